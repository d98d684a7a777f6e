"""More parts of the soak: ranks that differ, races for a folder, a real full disk, shards that change, frozen ranks, restarts.

Processes are forked as in tests/soak.py. A full disk is a tmpfs in a mount namespace of the process, which needs either root or
user namespaces; without both the part fails and says so.
"""

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import hostile
import soak
import torch
from soak import KILLED, STEPS, Score, config, ended, forked, sha256

from dither import UserError, cli, models
from dither.data import prepare
from dither.run_lock import RunLock
from dither.train import Status, agreement, beginning, checkpoint, distributed
from dither.train import config as configs
from dither.train.metrics import Metrics
from dither.train.trainer import Trainer

LIMIT = 100.0
"""Seconds after which a process counts as hanging, and is killed."""


def scored(what: str, count: int, faults: list[str]) -> Score:
    """Return the line of a part in which each of `count` trials succeeds or fails."""
    return Score(what, f"{count}/{count}", f"{count - len(faults)}/{count}", not faults, tuple(faults))


def file_of(text: Path, out: Path, *more: str) -> Path:
    """Write the config of a run, and return its file."""
    file = out.with_suffix(".toml")
    file.write_text(configs.dumps(config(text, out, *more)))
    return file


def begin_or_resume(file: Path, *more: str) -> int:
    """Run `dither train FILE --resume=auto`."""
    return cli.main(["train", str(file), "--resume=auto", *more])


def group(world: int, work: Callable[[int], int], said: Path) -> list[int]:
    """Start the ranks of a run, which print into `said`-RANK, and return their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def rank(number: int) -> int:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world))
        return work(number)

    return [forked(lambda number=number: rank(number), Path(f"{said}-{number}")) for number in range(world)]


def codes(children: list[int], seconds: float = LIMIT) -> list[int | None]:
    """Return the exit codes of processes; None for one that had to be killed because it did not end."""
    end, found = time.monotonic() + seconds, dict.fromkeys(children, 0)
    left: list[int] = list(children)
    hanging = []
    while left:
        for child in list(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                left.remove(child)
                found[child] = os.waitstatus_to_exitcode(status)
        if left and time.monotonic() > end:
            for child in left:
                os.kill(child, signal.SIGKILL)
            hanging, end = list(left), end + 60
        time.sleep(0.01)
    return [None if child in hanging else found[child] for child in children]


def small_model(folder: Path) -> str:
    """Save a model of 25 thousand parameters, and return the setting that trains it."""
    with suppress(ImportError):
        import transformers.models.llama.modeling_llama  # noqa: F401 - once, before processes are forked
    sizes = models.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    models.save_pretrained(models.build(sizes, seed=0), folder / "model")
    return f'model.hf="{folder / "model"}"'


# Ranks that differ ----------------------------------------------------------------------------------------------------

OTHER = (
    "optim.lr=0.002",
    "run.seed=7",
    "data.seed=7",
    "precision.recipe=fp8-block",
    "optim.eps=1e-6",
    "optim.betas=[0.8, 0.9]",
)
OTHER += ("optim.weight_decay=0.2", "optim.max_norm=0.5", "optim.warmup=0.3", "precision.states=dynamic8", "data.batch=4")
OTHER += ("data.sequence=8", "guard.nonfinite=skip", "run.eval_every=3", "run.steps=7", "monitor.every=2", "data.held_out=0.2")
"""Settings of which one rank gets another."""


def flip(tensor: torch.Tensor, draw: random.Random) -> None:
    """Flip one bit of a tensor."""
    words = tensor.detach().view(-1).view(torch.uint8)
    words[draw.randrange(len(words))] ^= 1 << draw.randrange(8)


def differing(kind: str, draw: random.Random) -> tuple[str, Callable[[], None]]:
    """Return what the sentence must name, and a change of the code of one rank that makes it differ."""

    def version() -> None:
        agreement.version = lambda: "0.0.1"

    def code() -> None:
        agreement._code = lambda: "0" * 64

    def first_weights() -> None:
        real = agreement.facts_of_trainer

        def facts(trainer: Trainer) -> dict[str, str]:
            flip(draw.choice(list(trainer.model.parameters())), draw)
            return real(trainer)

        agreement.facts_of_trainer = facts

    def later() -> None:
        real, at = Trainer.step, draw.randrange(1, 4)

        def step(self: Trainer, *rest: Any) -> torch.Tensor:
            found = real(self, *rest)
            if self.done == at:
                if kind == "weights":
                    flip(draw.choice(list(self.model.parameters())), draw)
                else:
                    states = self.training.optimizer.state
                    flip(states[draw.choice(list(states))]["exp_avg"], draw)
            return found

        Trainer.step = step  # type: ignore[method-assign]

    table = {"version": ("the version of dither", version), "code": ("the code of dither", code)}
    table |= {
        "first weights": ("the weight ", first_weights),
        "weights": ("first in the ", later),
        "states": ("first in the ", later),
    }
    return table[kind]


def differences(text: Path, folder: Path, count: int) -> list[Score]:
    """One rank of two or three differs, in a field, a plan, the corpus, the code or one bit of the weights: it is named."""
    draw, faults, longest = random.Random(6), [], 0.0
    corpora = [folder / "tokens-0", folder / "tokens-1"]
    for number, corpus in enumerate(corpora):
        prepare(str(text), corpus, held_out=0.1 + 0.1 * number)
    plans = [folder / "plan-0.json", folder / "plan-1.json"]
    from dither import recipe

    for plan, name in zip(plans, ("fp8-block", "fp8-row"), strict=True):
        plan.write_text(recipe(name).to_json())
    more = ("data.batch=6", "data.sequence=4", "run.steps=4", "run.save_every=1", "run.eval_every=0", "guard.compare_every=1")
    kinds = [
        "field",
        "field",
        "weights",
        "field",
        "first weights",
        "plan",
        "states",
        "corpus",
        "field",
        "version",
        "weights",
        "code",
    ]
    for trial in range(count):
        kind, world, out = kinds[trial % len(kinds)], draw.choice((2, 2, 3)), folder / f"run-{trial}"
        odd, seed = draw.randrange(world), draw.random()
        field = OTHER[draw.randrange(len(OTHER))]
        named, change = {"field": (field.split("=")[0], None), "plan": ("the plan", None), "corpus": ("the corpus", None)}.get(
            kind, (None, None)
        )
        if named is None:
            named, change = differing(kind, random.Random(seed))

        def rank(
            number: int, kind: str = kind, out: Path = out, odd: int = odd, field: str = field, change: Any = change
        ) -> int:
            other = number == odd
            plan, corpus = folder / "plan.json", text
            own = []
            if kind == "plan":  # the same path has other contents on another machine
                plan = plans[other]
                own = [f'precision.plan="{plan}"']
            if kind == "corpus":
                corpus = corpora[other]
            if other and kind == "field":
                own.append(field)
            settings = config(corpus, out, *more, *own)
            if kind in ("plan", "corpus"):  # the paths agree, the contents do not
                real = agreement.facts_of_config

                def facts(given: Any) -> dict[str, str]:
                    return {k: v for k, v in real(given).items() if k not in ("precision.plan", "data.sources")}

                agreement.facts_of_config = facts
            if other and change is not None:
                change()
            file = out.with_name(f"{out.name}-{number}.toml")
            file.write_text(configs.dumps(settings))
            return cli.main(["train", str(file)])

        began = time.monotonic()
        found = codes(group(world, rank, folder / "rank"))
        longest = max(longest, time.monotonic() - began)
        expected = 1 if kind in ("weights", "states") else 2
        printed = [(folder / f"rank-{number}").read_text() for number in range(world)]
        lines = [[line for line in each.splitlines() if line.startswith(hostile.ERROR)] for each in printed]
        said = lines[0][0] if lines[0] else ""
        # Rank 0 alone prints what every rank raises.
        right = found == [expected] * world and len(lines[0]) == 1 and named in said and not any(lines[1:])
        if not right or not (f"rank {odd}" in said or world == 2) or any("Traceback" in each for each in printed):
            faults.append(
                f"{kind} ({field if kind == 'field' else named}) on rank {odd} of {world}: {found} {said} {printed[0][-600:]}"
            )
        shutil.rmtree(out, ignore_errors=True)
    return [scored("ranks that differ: field and rank named, every rank ends", count, faults)]


# Races for a folder ---------------------------------------------------------------------------------------------------


def races(text: Path, folder: Path, count: int) -> list[Score]:
    """Three processes begin or resume a run in one folder at the same moment: exactly one gets it, and the others name it."""
    draw, workers, faults = random.Random(7), 3, []
    plan = [(draw.choice(("begin", "resume", "auto", "killed", "failing")), draw.random()) for _ in range(count)]
    pipes = [(os.pipe(), os.pipe()) for _ in range(workers)]  # to the worker, and from it

    def worker(number: int) -> int:
        to, back = pipes[number][0][0], pipes[number][1][1]
        for trial, (kind, _) in enumerate(plan):
            os.read(to, 1)
            out, lock = folder / f"race-{trial}", RunLock(folder / f"race-{trial}")
            how: Any = {"begin": False, "failing": False, "resume": True}.get(kind, "auto")
            try:
                beginning._claim(out, config(text, out), how, lock, lambda _: None)
                os.write(back, b"1")
            except UserError as error:
                os.write(
                    back,
                    b"0" if f"is in use by process {os.getpid()}" not in str(error) and "is in use by" in str(error) else b"?",
                )
            os.read(to, 1)
            if lock._file >= 0 and kind == "failing":  # as RunRecorder does with a run that never started
                (out / "config.toml").unlink()
            lock.release()
            with suppress(OSError):
                if kind == "failing":
                    out.rmdir()
            os.write(back, b".")
        return 0

    children = [forked(lambda number=number: worker(number), folder / f"worker-{number}") for number in range(workers)]
    zero = several = unnamed = 0
    for trial, (kind, _) in enumerate(plan):
        out = folder / f"race-{trial}"
        if kind in ("resume", "killed"):
            out.mkdir()
            (out / "config.toml").write_text(configs.dumps(config(text, out)))
        if kind == "killed":
            (out / "run.lock").write_text('{"pid": 1, "host": "a", "since": "b"}')
        for to, _ in pipes:
            os.write(to[1], b"g")
        answers = [os.read(back[0], 1) for _, back in pipes]
        zero += answers.count(b"1") == 0
        several += answers.count(b"1") > 1
        unnamed += b"?" in answers
        if answers.count(b"1") != 1 or b"?" in answers:
            faults.append(f"race {trial} ({kind}): {answers}")
        for to, _ in pipes:
            os.write(to[1], b"e")
        for _, back in pipes:
            os.read(back[0], 1)
        if kind == "failing" and out.exists():
            faults.append(f"race {trial}: a run that never started left {list(out.iterdir())}")
        shutil.rmtree(out, ignore_errors=True)
    for child in children:
        if code := ended(child):
            faults.append(f"a worker ended with {code}")
    bad = zero + several + unnamed
    what = "races for a folder: no winner, two winners, or an unnamed holder"
    return [Score(what, f"0/{count}", f"{bad}/{count}", not faults, tuple(faults))]


# A full disk ----------------------------------------------------------------------------------------------------------

NEWNS, NEWUSER, PRIVATE = 0x00020000, 0x10000000, 1 << 18


def mount(place: Path, size: int, inodes: int) -> None:
    """Mount a tmpfs that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(NEWNS) and libc.unshare(NEWUSER | NEWNS):
        raise OSError(ctypes.get_errno(), "a real full disk needs root or user namespaces")
    if uid != os.getuid():
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    libc.mount(b"none", b"/", None, (1 << 14) | PRIVATE, None)
    place.mkdir(exist_ok=True)
    if libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, f"size={size},nr_inodes={inodes}".encode()):
        raise OSError(ctypes.get_errno(), "a real full disk needs root or user namespaces")


def fill(place: Path, inodes: bool, leave: int) -> None:
    """Use up the inodes of a file system, or its bytes but for a few."""
    filler = place / "filler"
    filler.mkdir()
    with suppress(OSError):
        if inodes:
            for number in range(1 << 20):
                (filler / str(number)).touch()
        with open(filler / "bytes", "wb", buffering=0) as file:
            while True:
                file.write(b"x" * (1 << 16))
    if not inodes and leave:
        os.truncate(filler / "bytes", max(0, (filler / "bytes").stat().st_size - leave))


def watched(place: Path, at: int, inodes: bool, leave: int, names: list[str]) -> None:
    """Fill the disk just before write number `at` of this process: a file that is opened for writing, or a line of metrics."""
    state = {"count": 0, "busy": False}

    def write(name: str) -> None:
        if state["busy"]:
            return
        names.append(name)
        state["count"] += 1
        if state["count"] == at:
            state["busy"] = True
            fill(place, inodes, leave)

    def look(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[0], str) and isinstance(given[2], int):
            writes = given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and not given[0].startswith(("/dev", "/proc")):
                write(Path(given[0]).name)

    sys.addaudithook(look)
    real = Metrics._append

    def append(self: Metrics, data: bytes) -> None:
        write("a line of metrics")
        real(self, data)

    Metrics._append = append  # type: ignore[method-assign]


def full_disks(text: Path, folder: Path, count: int) -> list[Score]:
    """Fill a real tmpfs just before each kind of write of a run; then free it and let the run go on."""
    expected, _, _ = soak.straight(text, folder)

    def trial(number: int) -> int:
        place = folder / "tmpfs"
        try:
            mount(place, 24 << 20, 300)
        except OSError as error:
            print(f"cannot mount: {error}")
            return 9
        out, said, draw = place / "run", folder / f"said-{number}", random.Random(number)
        file = file_of(text, out)
        shutil.move(file, folder / "full.toml")

        def work(at: int = 0) -> int:
            names: list[str] = []
            watched(place, at, draw.random() < 0.3, draw.choice((0, 4096, 20_000)), names)
            code = begin_or_resume(folder / "full.toml")
            print("writes:", *names, sep="|")
            return code

        if number == 0:  # how many writes there are, and of what
            code = ended(forked(work, said))
            shutil.copy(said, folder / "writes.txt")
            return code
        kinds = (folder / "writes.txt").read_text().partition("writes:|")[2].strip().split("|")
        at = 1 + (number - 1) % len(kinds) if count >= len(kinds) else draw.randrange(1, len(kinds))
        code = ended(forked(lambda: work(at), said))
        printed = said.read_text()
        errors = [line for line in printed.splitlines() if line.startswith(hostile.ERROR)]
        problem = ""
        if code not in (0, 2) or "Traceback" in printed or (code == 2 and len(errors) != 1):
            problem = f"ended with {code}"
        elif code == 2 and not any(word in errors[0] for word in ("full", "inodes")):
            problem = "did not say why"
        elif code == 2 and (out / "metrics.jsonl").exists() and Status.load(out).state != "failed":
            problem = f"has the status {Status.load(out)}"
        elif "the last good checkpoint was kept" in printed and checkpoint.newest(out / "checkpoints")[0] is None:
            problem = "lost the checkpoint that was kept"
        if not problem:
            shutil.rmtree(place / "filler", ignore_errors=True)
            if again := ended(forked(lambda: begin_or_resume(folder / "full.toml"), said)):
                problem = f"with room again ended with {again}: {said.read_text()[-600:]}"
            elif sha256(out) != expected:
                problem = "with room again has other weights"
        if problem:
            print(f"before write {at} ({kinds[at - 1]}): {problem}\n{printed[-1500:]}")
        return int(bool(problem))

    faults, told = [], folder / "trial.txt"
    if code := ended(forked(lambda: trial(0), told)):
        return [Score("disk full: a real tmpfs", "mounted", "not mounted", False, (f"{code}: {told.read_text()[-500:]}",))]
    for number in range(1, count + 1):
        if ended(forked(lambda number=number: trial(number), told)):
            faults.append(told.read_text()[-2500:])
    kinds = len(set((folder / "writes.txt").read_text().partition("writes:|")[2].split("|")))
    return [scored(f"tmpfs full before {kinds} kinds of write: a sentence, resumed = straight", count, faults)]


# Shards that change ---------------------------------------------------------------------------------------------------


def shards(text: Path, folder: Path, count: int) -> list[Score]:
    """A token shard is truncated, or grows, while a run reads it."""
    draw, faults = random.Random(8), []
    prepare(str(text), folder / "tokens", held_out=0.1)
    straight = folder / "straight"
    if ended(forked(lambda: begin_or_resume(file_of(folder / "tokens", straight)), folder / "straight.txt")):
        raise RuntimeError((folder / "straight.txt").read_text())
    expected = sha256(straight)
    for trial in range(count):
        out, corpus, said, grows = folder / f"run-{trial}", folder / f"tokens-{trial}", folder / "shard.txt", trial % 4 == 3
        shutil.copytree(folder / "tokens", corpus)
        shard, at, seed = corpus / "train-00000.bin", draw.randrange(STEPS - 3), draw.random()

        def work(
            out: Path = out, corpus: Path = corpus, shard: Path = shard, at: int = at, grows: bool = grows, seed: float = seed
        ) -> int:
            real = Trainer.step

            def step(self: Trainer, *rest: Any) -> torch.Tensor:
                if self.done == at and grows:
                    with shard.open("ab") as file:
                        file.write(b"\xff" * 1000)
                elif self.done == at:  # somewhere in its first page, which some of the next windows need
                    os.truncate(shard, random.Random(seed).randrange(200))
                return real(self, *rest)

            Trainer.step = step  # type: ignore[method-assign]
            return begin_or_resume(file_of(corpus, out))

        code = ended(forked(work, said))
        printed = said.read_text()
        problem = ""
        if "Traceback" in printed or code != (0 if grows else 2):
            problem = f"ended with {code}"
        elif not grows and ("truncated" not in printed or Status.load(out).state != "failed"):
            problem = f"has the status {Status.load(out)}"
        else:
            shutil.copy(folder / "tokens" / shard.name, shard)
            if again := ended(forked(lambda out=out, corpus=corpus: begin_or_resume(file_of(corpus, out)), said)):
                problem = f"restored, it ended with {again}: {said.read_text()[-500:]}"
            elif sha256(out) != expected:
                problem = "restored, it has other weights"
        if problem:
            faults.append(f"{'grown' if grows else 'truncated'} in step {at}: {problem}: {printed[-600:]}")
    return [scored("shards truncated or growing: a sentence, resumed = straight", count, faults)]


# Signals and frozen ranks ---------------------------------------------------------------------------------------------

PHASES = (
    "preparing",
    "building",
    "planning",
    "evaluating",
    "sampling",
    "measuring",
    "recomputing",
    "saving",
    "restoring",
    "ending",
)


def phases(text: Path, folder: Path, count: int) -> list[Score]:
    """SIGTERM at the beginning of every phase of a run: saved or cleanly ended with 143, and resumed = straight."""
    from dither.data import preparation
    from dither.snip import Snip
    from dither.train import recorder

    more = (
        "snip.target=0.5",
        "snip.start=1",
        "snip.every=2",
        "snip.delay=1",
        "snip.probe=direct",
        "precision.recipe=fp8-block",
    )
    more += ("run.eval_every=2", "run.sample_every=2", "run.sample_tokens=2", "monitor.every=2", "guard.recompute_every=2")
    more += ("data.sequence=4", "run.eval_sequences=1")
    more += (small_model(folder),)
    straight = folder / "straight"
    if ended(forked(lambda: begin_or_resume(file_of(text, straight, *more)), folder / "straight.txt")):
        raise RuntimeError((folder / "straight.txt").read_text())
    expected, faults, longest = sha256(straight), [], 0.0
    places: dict[str, tuple[Any, str]] = {
        "preparing": (preparation._Writer, "write"),
        "building": (Trainer, "__init__"),
        "planning": (Snip, "before_step"),
        "evaluating": (Trainer, "evaluate"),
        "sampling": (Trainer, "sample"),
        "measuring": (Trainer, "look"),
        "recomputing": (agreement, "recompute"),
        "saving": (checkpoint, "_write"),
        "restoring": (Trainer, "restore"),
        "ending": (recorder.RunRecorder, "evaluate"),
    }
    chosen = (PHASES * count)[:count]
    for trial, phase in enumerate(chosen):
        out, said = folder / f"run-{trial}", folder / "phase.txt"
        if phase == "restoring":
            shutil.copytree(straight, out)
            checkpoint.drop(out / "checkpoints", after=4)
        file = file_of(text, out, *more)

        def work(phase: str = phase, file: Path = file) -> int:
            owner, name = places[phase]
            real, sent = getattr(owner, name), []

            def interrupted(*given: Any, **options: Any) -> Any:
                if not sent:
                    sent.append(time.monotonic())
                    os.kill(os.getpid(), signal.SIGTERM)
                return real(*given, **options)

            setattr(owner, name, interrupted)
            code = begin_or_resume(file)
            print(f"took {time.monotonic() - sent[0]:.3f} s" if sent else "never came")
            return code

        code = ended(forked(work, said))
        printed = said.read_text()
        seconds = float(printed.split()[-2]) if printed.endswith(" s\n") else 1e9
        longest = max(longest, seconds)
        if code != 143 or "Traceback" in printed:
            faults.append(f"{phase}: ended with {code}: {printed[-600:]}")
        elif again := ended(forked(lambda file=file: begin_or_resume(file), said)):
            faults.append(f"{phase}: resumed, ended with {again}: {said.read_text()[-600:]}")
        elif sha256(out) != expected:
            faults.append(f"{phase}: other weights")
    return [
        scored(f"SIGTERM in {len(set(chosen))} phases: ended with 143, resumed = straight", count, faults),
        Score("SIGTERM in a phase: seconds to the end, at the most", "< 20", f"{longest:.1f}", longest < 20),
    ]


def lost_ranks(text: Path, folder: Path, count: int) -> list[Score]:
    """A rank is killed (within 5 s) or frozen by SIGSTOP (within 60 s): the others name it, and the run can go on."""
    draw, faults, slowest = random.Random(9), [], {signal.SIGKILL: 0.0, signal.SIGSTOP: 0.0}
    for trial in range(count):
        number = signal.SIGSTOP if trial == 0 else signal.SIGKILL
        out, victim, at = folder / f"run-{trial}", draw.randrange(3) if trial else 1, draw.randrange(1, STEPS)
        file = file_of(text, out, "data.batch=6", "data.micro_batch=1")

        def rank(me: int, file: Path = file, victim: int = victim, at: int = at, number: Any = number) -> int:
            real = Trainer.step

            def step(self: Trainer, *rest: Any) -> torch.Tensor:
                if me == victim and self.done == at:
                    (folder / "when").write_text(str(time.time()))
                    os.kill(os.getpid(), number)
                return real(self, *rest)

            Trainer.step = step  # type: ignore[method-assign]
            return begin_or_resume(file)

        children = group(3, rank, folder / "rank")
        others = [child for index, child in enumerate(children) if index != victim]
        found = codes(others)
        slowest[number] = max(slowest[number], time.time() - float((folder / "when").read_text()))
        os.kill(children[victim], signal.SIGKILL)
        ended(children[victim])
        said = [(folder / f"rank-{index}").read_text() for index in range(3) if index != victim]
        named = all(f"lost rank {victim}" in each.splitlines()[-1] and "Traceback" not in each for each in said)
        state = Status.observe(out).state
        if found != [1, 1] or not named or state != ("crashed" if victim == 0 else "failed"):
            faults.append(f"{number.name} of rank {victim}: {found}, {state}: {[each[-400:] for each in said]}")
        elif code := ended(forked(lambda file=file: begin_or_resume(file), folder / "again")):
            faults.append(f"then one process ended with {code}: {(folder / 'again').read_text()[-500:]}")
    return [
        scored("rank killed or frozen: named by the others, and the run goes on", count, faults),
        Score(
            "rank killed: seconds until all have ended", "< 5", f"{slowest[signal.SIGKILL]:.1f}", slowest[signal.SIGKILL] < 5
        ),
        Score(
            "rank frozen: seconds until all have ended", "< 60", f"{slowest[signal.SIGSTOP]:.1f}", slowest[signal.SIGSTOP] < 60
        ),
    ]


# Restarts -------------------------------------------------------------------------------------------------------------


def restarted() -> int:
    """Be a rank of torchrun's in `restarts`: train, and let one rank be killed in each attempt but the last."""
    file, attempts = sys.argv[2], int(sys.argv[3])
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    with Path(file).with_name("attempts").open("a") as attempted:
        attempted.write(f"{attempt}\n")
    draw = random.Random(attempt)
    victim, calls = draw.randrange(2), draw.randrange(1, 4000)
    torch.set_num_threads(1)
    if attempt < attempts and rank == victim:
        return soak.counted(lambda: begin_or_resume(Path(file)), calls, training=draw.random() < 0.5)()
    return begin_or_resume(Path(file))


def restarts(text: Path, folder: Path, count: int) -> list[Score]:
    """`torchrun --max-restarts` with `--resume=auto`: a rank is killed in every attempt but the last, and the run is done."""
    out = folder / "run"
    file = file_of(text, out, "run.steps=120", "run.save_every=3", "data.micro_batch=1", "run.eval_every=0", "run.log_every=50")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={count}"]
    command += ["--master-addr=127.0.0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.1"]
    command += [__file__, "restarted", str(file), str(count)]
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(soak.OURS).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    starts = (out / "metrics.jsonl").read_text().count('"kind": "start"') if (out / "metrics.jsonl").exists() else 0
    done = out.exists() and Status.load(out).state == "done"
    went_on = len(set((folder / "attempts").read_text().split())) - 1
    right = ran.returncode == 0 and done and went_on == count
    faults = () if right else (f"{ran.returncode}, {starts} starts, {went_on} restarts: {ran.stderr[-3000:]}",)
    return [
        Score("torchrun restarts after a kill go on (--resume=auto)", f"{count}/{count}", f"{went_on}/{count}", right, faults)
    ]


# Everything at once ---------------------------------------------------------------------------------------------------

METHODS = (
    "precision.mode=bf16-sr",
    "precision.states=dynamic8",
    "precision.recipe=fp8-block",
    "snip.target=0.5",
    "snip.start=2",
)
METHODS += (
    "snip.every=6",
    "snip.delay=2",
    'snip.options="fp8,fp4"',
    "snip.probe=layer",
    "precision.sampling.noise=rounded_normal",
)
METHODS += ('precision.sampling.guidance=[{kind="bitwidth_loss", weight=0.001}, {kind="weight_decay", rate=0.1}]',)
METHODS += ("data.micro_batch=1", "run.save_every=2", "run.eval_every=8", "run.eval_sequences=1", "guard.compare_every=3")
"""Every method at once, with a sequence per micro-batch, so that one rank and two give the same bits."""

KINDS = ("kill", "kill", "kill", "SIGTERM", "SIGTERM", "SIGSTOP", "disk full", "disk full", "inodes")


def faults_of_all_kinds(text: Path, folder: Path, count: int) -> list[Score]:
    """A run with faults of all kinds, begun and resumed by --resume=auto with one or two ranks, ends as one without any."""
    steps = max(8, count // 2)
    more = (*METHODS, small_model(folder), f"run.steps={steps}")
    straight = folder / "straight"
    if ended(forked(lambda: begin_or_resume(file_of(text, straight, *more)), folder / "straight.txt")):
        raise RuntimeError((folder / "straight.txt").read_text())
    expected, told = sha256(straight, steps), folder / "told"

    def all_faults() -> int:
        place, draw, done = folder / "tmpfs", random.Random(10), dict.fromkeys(dict.fromkeys(KINDS), 0)
        mount(place, 16 << 20, 300)
        out, worlds = place / "run", {1: 0, 2: 0}
        file = folder / "faults.toml"
        shutil.move(file_of(text, out, *more), file)
        lives = 0
        finished = False
        while sum(done.values()) < count or not finished:
            kind = draw.choice(KINDS) if sum(done.values()) < count else ""
            world = 2 if kind == "SIGSTOP" else draw.choice((1, 1, 2))
            victim, training, lives = draw.randrange(world), draw.random() < 0.6, lives + 1
            calls = draw.randrange(1, 6000 if training else 9000)

            def rank(
                me: int,
                kind: str = kind,
                world: int = world,
                victim: int = victim,
                calls: int = calls,
                training: bool = training,
            ) -> int:
                distributed.GLOO_TIMEOUT = timedelta(seconds=4)  # so that a frozen rank is noticed sooner

                def act() -> None:
                    (folder / "happened").touch()
                    if kind in ("disk full", "inodes"):
                        fill(place, kind == "inodes", 0)
                    else:
                        os.kill(
                            os.getpid(), {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}[kind]
                        )

                if me == victim and kind:
                    at_call(calls, act, training)
                return begin_or_resume(file)

            (folder / "happened").unlink(missing_ok=True)
            alone = [] if world == 2 else [forked(lambda rank=rank: rank(0), folder / "life-0")]
            children = alone or group(2, rank, folder / "life")
            stopped = children[victim] if kind == "SIGSTOP" else 0
            found = codes([child for child in children if child != stopped], 60)
            if stopped:
                os.kill(stopped, signal.SIGKILL)
                ended(stopped)
            shutil.rmtree(place / "filler", ignore_errors=True)
            happened = (folder / "happened").exists()
            done[kind or "kill"] += happened and bool(kind)
            worlds[world] += 1
            printed = "".join((folder / f"life-{number}").read_text() for number in range(world))
            allowed = {
                "kill": (KILLED, 0, 1),
                "SIGTERM": (143, 0),
                "SIGSTOP": (0, 1),
                "disk full": (0, 1, 2),
                "inodes": (0, 1, 2),
            }
            if any(code not in allowed.get(kind, (0,)) for code in found) or "Traceback" in printed:
                shown = printed[max(0, printed.find("Traceback") - 500) :]
                print(f"life {lives} ({kind}, {world} ranks) ended with {found}: {shown[:2500]}")
                return 1
            finished = (out / "status.json").exists() and Status.load(out).state == "done"
            if finished and sum(done.values()) < count:  # more faults are due: go back to an earlier checkpoint
                checkpoint.drop(
                    out / "checkpoints",
                    after=draw.choice([checkpoint.step_of(p) for p in checkpoint._steps(out / "checkpoints")][1:]),
                )
        same = sha256(out, steps) == expected
        kinds = ", ".join(f"{number} {kind}" for kind, number in done.items())
        print(f"{lives} lives ({worlds[2]} with two ranks): {kinds}" if same else "other weights")
        return int(not same)

    code = ended(forked(all_faults, told))
    said = told.read_text()
    faults = (said[-3000:],) if code else ()
    what = f"SHA-256 after {count} faults = straight, every method on"
    if not code:
        print(f"      {said.strip()}", flush=True)
    return [Score(what, "equal", "equal" if not code else "not equal", not code, faults)]


def at_call(number: int, act: Callable[[], None], training: bool) -> None:
    """Do something at call `number` of a function of Dither, from the first step on, or since the folder was claimed."""
    calls, first = 0, (Trainer.step if training else beginning.RunBeginning.build).__code__

    def look(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(soak.OURS):
            calls += calls > 0 or frame.f_code is first
            if calls == number:
                calls += 1
                sys.setprofile(None)
                act()

    sys.setprofile(look)


PARTS: dict[str, tuple[Callable[[Path, Path, int], list[Score]], int]] = {
    "differences": (differences, 100),
    "races": (races, 1000),
    "disks": (full_disks, 40),
    "shards": (shards, 12),
    "phases": (phases, 10),
    "lost": (lost_ranks, 4),
    "restarts": (restarts, 20),
    "faults": (faults_of_all_kinds, 50),
}
"""The parts of this file, and how often each is tried when nothing is said."""

if __name__ == "__main__":
    assert sys.argv[1] == "restarted"
    sys.exit(restarted())
