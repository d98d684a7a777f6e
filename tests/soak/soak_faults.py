"""More parts of the soak: races for a folder, a real full disk, shards that change, signals in every phase, all faults at once.

Processes are forked as in soak.py. A full disk is a tmpfs in a mount namespace of the process, which needs either root or
user namespaces; without both the part fails and says so.
"""

import ctypes
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import hostile
import soak
import torch
from soak import (
    KILLED,
    LIMIT,
    STEPS,
    Score,
    begin_or_resume,
    codes,
    config,
    ended,
    file_of,
    forked,
    group,
    in_this_process,
    scored,
    sha256,
)

from dither import UserError, checkpoint, cli, run_lock
from dither.checkpoint import format
from dither.checkpoint import write as writing
from dither.data import prepare
from dither.run_lock import RunLock
from dither.train import Status, agreement, ranks, run_folder
from dither.train import config as configs
from dither.train.records import Metrics
from dither.train.trainer import Trainer

# Races for a folder ---------------------------------------------------------------------------------------------------


def races(text: Path, folder: Path, count: int) -> list[Score]:
    """Three processes begin or resume a run in one folder at the same moment: exactly one gets it, and the others name it."""
    draw, workers, faults = random.Random(7), 3, []
    plan = [(draw.choice(("begin", "resume", "auto", "killed", "failing")), draw.random()) for _ in range(count)]
    pipes = [(os.pipe(), os.pipe()) for _ in range(workers)]  # to the worker, and from it
    usual = config(text, folder / "race")

    def worker(number: int) -> int:
        to, back = pipes[number][0][0], pipes[number][1][1]
        run_lock.WAIT = 0.02  # for the losers of every race
        for trial, (kind, _) in enumerate(plan):
            os.read(to, 1)
            out, lock = folder / f"race-{trial}", RunLock(folder / f"race-{trial}")
            now = replace(usual, run=replace(usual.run, out=str(out)))
            how: Any = {"begin": False, "failing": False, "resume": True}.get(kind, "auto")
            try:
                run_folder._claim(out, now, how, lock, lambda _: None)
                os.write(back, b"1")
            except UserError as error:
                os.write(
                    back,
                    b"0" if f"is in use by process {os.getpid()}" not in str(error) and "is in use by" in str(error) else b"?",
                )
            os.read(to, 1)
            if lock.held and kind == "failing":  # as RunFolder does with a run that never started
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
            (out / "config.toml").write_text(configs.dumps(usual))
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


def fill_with_log(place: Path) -> None:
    """Use up the bytes of a file system, and the rest of the last page of the log, which is standard output."""
    fill(place, False, 0)
    with suppress(OSError):
        while True:
            os.write(1, b"\n")


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
    """Fill a real tmpfs just before each kind of write of a run, alone and of two ranks that save sharded checkpoints."""
    (folder / "alone").mkdir()
    (folder / "sharded").mkdir()
    few, more = max(1, count // 4), ("parallel.dp_shard=2", "run.save_every=1")
    return [*_full_disks(text, folder / "alone", count, 1), *_full_disks(text, folder / "sharded", few, 2, *more)]


def _full_disks(text: Path, folder: Path, count: int, world: int, *more: str) -> list[Score]:
    """Fill a tmpfs before a write of one of `world` ranks; then free it and let the run go on."""
    place, file, said = folder / "tmpfs", folder / "full.toml", folder / "said"
    out = place / "run"

    def life(victim: int = 0, at: int = 0, inodes: bool = False, leave: int = 0) -> tuple[list[int], list[str]]:
        def rank(number: int) -> int:
            names: list[str] = []
            watched(place, at if number == victim else 0, inodes, leave, names)
            code = begin_or_resume(file)
            print("writes:", *names, sep="|")
            return code

        found = codes(group(world, rank, said))
        return found, [Path(f"{said}-{number}").read_text() for number in range(world)]

    def trial(number: int) -> int:
        try:
            mount(place, 24 << 20, 300)
        except OSError as error:
            print(f"cannot mount: {error}")
            return 9
        shutil.move(file_of(text, out, *more), file)
        if number == 0:  # how many writes each rank has, of what, and the weights
            found, printed = life()
            for rank in range(world):
                (folder / f"writes-{rank}").write_text(printed[rank].partition("writes:|")[2].strip())
            (folder / "expected").write_text(sha256(out) if not any(found) else "")
            print(*printed)
            return max(found)
        victim, draw = (number - 1) % world, random.Random(number)
        kinds = (folder / f"writes-{victim}").read_text().split("|")
        at = 1 + (number - 1) // world % len(kinds) if count >= world * len(kinds) else draw.randrange(1, len(kinds) + 1)
        found, printed = life(victim, at, draw.random() < 0.3, draw.choice((0, 4096, 20_000)))
        problem = _problem(out, found, printed)
        if not problem:
            shutil.rmtree(place / "filler", ignore_errors=True)
            again, words = life()
            if any(again):
                problem = f"with room again ended with {again}: {words[0][-600:]}"
            elif sha256(out) != (folder / "expected").read_text():
                problem = "with room again has other weights"
        if problem:
            print(
                f"before write {at} ({kinds[at - 1]}) of rank {victim}: {problem}",
                *(each[-1500:] for each in printed),
                sep="\n",
            )
        return int(bool(problem))

    faults, told = [], folder / "trial.txt"
    if code := ended(forked(lambda: trial(0), told)):
        return [Score("tmpfs full", "mounted", "failed", False, (f"ended with {code}: {told.read_text()[-500:]}",))]
    for number in range(1, count + 1):
        if ended(forked(lambda number=number: trial(number), told), 3 * LIMIT):
            faults.append(told.read_text()[-3000:])
    kinds = len({name for path in folder.glob("writes-*") for name in path.read_text().split("|")})
    who = f"tmpfs full before {kinds} kinds of write" + (" of two ranks (dp_shard=2)" if world > 1 else "")
    return [scored(f"{who}: a sentence, resumed = straight", count, faults)]


def _problem(out: Path, found: list[int], printed: list[str]) -> str:
    """Return what is wrong with the end of a run on a full disk, or ""."""
    errors = [line for each in printed for line in each.splitlines() if line.startswith(hostile.ERROR)]
    if any("Traceback" in each for each in printed) or not set(found) <= ({0, 2} if len(found) == 1 else {0, 1, 2}):
        return f"ended with {found}"
    if not any(found):
        return ""
    if not errors or (len(found) == 1 and len(errors) > 1):
        return f"ended with {found} and printed {len(errors)} errors"
    if not all("full" in line or "inodes" in line for line in errors):
        return "did not say why"
    if (out / "metrics.jsonl").exists() and Status.load(out).state != "failed":
        return f"has the status {Status.load(out)}"
    if "the last good checkpoint was kept" in printed[0] and checkpoint.newest(out / "checkpoints")[0] is None:
        return "lost the checkpoint that was kept"
    return ""


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
    from dither.train import loop

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
    straight = in_this_process(file_of(text, folder / "straight", *more))
    expected, faults, longest = sha256(straight), [], 0.0
    places: dict[str, tuple[Any, str]] = {
        "preparing": (preparation._Writer, "write"),
        "building": (Trainer, "__init__"),
        "planning": (Snip, "before_step"),
        "evaluating": (Trainer, "evaluate"),
        "sampling": (Trainer, "sample"),
        "measuring": (Trainer, "look"),
        "recomputing": (agreement, "recompute"),
        "saving": (writing, "_write"),
        "restoring": (Trainer, "restore"),
        "ending": (loop.Run, "evaluate"),
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


# Lost terminals -------------------------------------------------------------------------------------------------------


def terminals(text: Path, folder: Path, count: int) -> list[Score]:
    """SIGHUP, a pipe that its reader closes, a log on a full disk, and streams closed from the start: nothing is lost."""
    _, expected, _, _ = soak.straight(text)
    draw, scores, place = random.Random(12), [], folder / "tmpfs"

    def work(kind: str, out: Path, at: int) -> int:
        read, write = os.pipe()
        if kind == "closed pipe":
            os.dup2(write, 1)
            os.close(write)
        elif kind == "full log":
            mount(place, 1 << 20, 50)
            for stream in (1, 2):
                os.dup2(os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        elif kind == "closed stdout":
            os.close(1)
        lose: dict[str, Callable[[], None]] = {
            "SIGHUP": lambda: os.kill(os.getpid(), signal.SIGHUP),
            "closed pipe": lambda: os.close(read),
            "full log": lambda: fill_with_log(place),
        }
        real = Trainer.step

        def step(self: Trainer, *rest: Any) -> torch.Tensor:
            if self.done == at and kind in lose:
                lose[kind]()
            return real(self, *rest)

        Trainer.step = step  # type: ignore[method-assign]
        sys.argv = ["dither", *soak.arguments(text, out)]
        return cli.main()

    for kind in ("SIGHUP", "closed pipe", "full log", "closed stdout"):
        faults = []
        for trial in range(count):
            out, said, at = folder / f"{kind.replace(' ', '-')}-{trial}", folder / "said", draw.randrange(1, STEPS - 1)
            code = ended(forked(lambda kind=kind, out=out, at=at: work(kind, out, at), said))
            printed, status = said.read_text(), Status.load(out) if (out / Status.FILE).exists() else None
            wanted = (129, "interrupted") if kind == "SIGHUP" else (0, "done")
            named = status is not None and ("was lost" in status.why) == (kind in ("closed pipe", "full log"))
            if status is None or (code, status.state) != wanted or not named or "Traceback" in printed:
                faults.append(f"ended with {code}, {status}: {printed[-800:]}")
            elif kind == "SIGHUP" and checkpoint.step_of(checkpoint.newest(out / "checkpoints")[0] or out) != at + 1:
                faults.append(f"step {at + 1} was not saved")
            elif again := ended(forked(lambda out=out: cli.main(soak.arguments(text, out)), said)) if wanted[0] else 0:
                faults.append(f"resumed, ended with {again}: {said.read_text()[-500:]}")
            elif sha256(out) != expected:
                faults.append("other weights")
            shutil.rmtree(out, ignore_errors=True)
        scores.append(scored(f"{kind}: nothing is lost, and the status says what broke", count, faults))
    return scores


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
    'snip.options="fp8-block,fp4-block"',
    "snip.probe=last",
    "precision.sampling.noise=rounded_normal",
)
METHODS += ('precision.sampling.guidance=[{kind="bitwidth_loss", weight=0.001}, {kind="weight_decay", rate=0.1}]',)
METHODS += ("data.micro_batch=1", "run.save_every=2", "run.eval_every=8", "run.eval_sequences=1", "guard.compare_every=3")
"""Every method at once, with a sequence per micro-batch, so that one rank and two give the same bits."""

KINDS = ("kill", "kill", "kill", "SIGTERM", "SIGTERM", "SIGSTOP", "disk full", "disk full", "inodes")


def faults_of_all_kinds(text: Path, folder: Path, count: int) -> list[Score]:
    """A run with faults of all kinds, begun and resumed by --resume=auto with one or two ranks, ends as one without any."""
    steps = max(8, count // 2)
    more = (*METHODS, f"run.steps={steps}")
    straight = in_this_process(file_of(text, folder / "straight", *more))
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
                ranks.GLOO_TIMEOUT = timedelta(seconds=4)  # so that a frozen rank is noticed sooner

                def act() -> None:
                    (folder / "happened").touch()
                    if kind in ("disk full", "inodes"):
                        fill(place, kind == "inodes", 0)
                    else:
                        os.kill(
                            os.getpid(), {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}[kind]
                        )

                if me == victim and kind:
                    soak.at_call(calls, act, training)
                return begin_or_resume(file)

            (folder / "happened").unlink(missing_ok=True)
            alone = [] if world == 2 else [forked(lambda rank=rank: rank(0), folder / "life-0")]
            children = alone or group(2, rank, folder / "life")
            stopped = children[victim] if kind == "SIGSTOP" else 0
            found = codes([child for child in children if child != stopped])
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
                    after=draw.choice([checkpoint.step_of(p) for p in format.steps(out / "checkpoints")][1:]),
                )
        same = sha256(out, steps) == expected
        kinds = ", ".join(f"{number} {kind}" for kind, number in done.items())
        print(f"{kinds}; {lives} lives, {worlds[2]} with two ranks" if same else "other weights")
        return int(not same)

    code = ended(forked(all_faults, told), LIMIT * (count + 2))
    said = told.read_text()
    faults = (said[-3000:],) if code else ()
    kinds = f" ({said.strip()})" if not code else ""
    what = f"SHA-256 after {count} faults = straight, every method on{kinds}"
    return [Score(what, "equal", "equal" if not code else "not equal", not code, faults)]


PARTS: dict[str, tuple[Callable[[Path, Path, int], list[Score]], int]] = {
    "races": (races, 1000),
    "disks": (full_disks, 48),
    "shards": (shards, 12),
    "phases": (phases, 10),
    "terminals": (terminals, 5),
    "faults": (faults_of_all_kinds, 50),
}
"""The parts of this file, and how often each is tried when nothing is said."""
