"""Faults, many of them: kills, flipped bits, full disks, signals, other numbers of processes, hostile input; and a scoreboard.

    make soak                                       # under twenty minutes on two cores
    make soak SOAK='--scale 10'                     # ten times as many of each
    make soak SOAK='--write docs/results/soak.md'    # and write the scoreboard into the docs
    python tests/soak/soak.py kills --scale 0.1
    python tests/soak/soak.py kills=0.1 saves=0.5        # a scale of its own for each part

It lies beside the tests because it is one: `test_faults.py` runs the same parts with small counts. Runs are real ones,
`dither train` on a small model in a process of their own. They are forked from a process that has already trained a few steps,
so that torch is loaded once and not for each. Seeds are fixed, so points are the same each time, but for kills by the clock,
which hold at every moment or not at all. Exit code 1 when anything failed.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import hostile
import torch
from fuzz import fuzz

import dither
from dither import UserError, checkpoint, cli, models
from dither.data import Batch
from dither.train import Status, loop, train
from dither.train import config as configs
from dither.train.config import Config
from dither.train.trainer import Trainer

OURS = str(Path(dither.__file__).parent)
KILLED = -signal.SIGKILL
STEPS = 6


@dataclass(frozen=True)
class Score:
    """A line of the scoreboard."""

    what: str
    target: str
    figure: str
    passed: bool
    faults: tuple[str, ...] = ()
    """What went wrong, where something did."""


# Runs in processes of their own -----------------------------------------------------------------------------------------


def forked(work: Callable[[], int], said: Path) -> int:
    """Start work in a process of its own, which prints into a file: its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        # After a fork torch makes its pool of threads anew, and fails if two threads, such as loaders of weights, ask for it.
        torch.set_num_threads(1)
        code = work()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


LIMIT = 300.0
"""Seconds after which a process counts as hanging, and is killed."""

HANGING = 124
"""The exit code of a process that did not end and had to be killed."""


def ended(child: int, seconds: float = LIMIT) -> int:
    """Wait for a process: its exit code, a negative signal, or HANGING."""
    file = os.pidfd_open(child)
    try:
        hangs = not select.select([file], [], [], seconds)[0]
    finally:
        os.close(file)
    if hangs:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return HANGING if hangs else code


def small_model(folder: Path) -> None:
    """Save a model of 25 thousand parameters, which all runs train."""
    sizes = models.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    models.save_pretrained(models.build(sizes, seed=0), folder)


def config(text: Path, out: Path, *more: str) -> Config:
    """Six small steps, saved after each second, with the model that lies above the folder of the run."""
    model = next(parent / "model" for parent in out.parents if (parent / "model").is_dir())
    small = [
        f'model.hf="{model}"',
        "data.sequence=8",
        "data.batch=2",
        f"run.steps={STEPS}",
        "run.eval_every=4",
        "run.sample_every=0",
        "run.log_every=1",
    ]
    small += ["run.save_every=2", "run.keep_last=2", "run.eval_sequences=2", "run.device=cpu", "guard.spike=ignore"]
    return configs.override(Config(), [f'data.sources=["{text}"]', f'run.out="{out}"', *small, *more])


def arguments(text: Path, out: Path, *more: str) -> list[str]:
    """Of the command line: begin a run, or go on with it where there is one."""
    if (out / "config.toml").is_file():
        return ["train", "--resume", "--out", str(out)]
    return ["train", str(file_of(text, out, *more))]


def file_of(text: Path, out: Path, *more: str) -> Path:
    """Write the config of a run, and return its file."""
    file = out.with_suffix(".toml")
    file.write_text(configs.dumps(config(text, out, *more)))
    return file


def sha256(out: Path, step: int = STEPS) -> str:
    """Of everything that a run has learned: weights, moments and the rest of its last checkpoint's tensors."""
    tensors, _ = checkpoint.load(out / "checkpoints" / f"step-{step:08d}")
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def counted(work: Callable[[], int], at: int = 0, training: bool = False) -> Callable[[], int]:
    """Work that is killed at its call number `at` of a function of ours, counted from its start or from its first step on.

    At its end it tells how many calls there were from either. Most come before the first step, where tokens are made and the
    model is built: points drawn from all calls alike would hardly ever lie between two checkpoints.
    """

    def run() -> int:
        calls = steps = 0

        def look(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls, steps
            if event == "call" and frame.f_code.co_filename.startswith(OURS):
                calls += 1
                steps += steps > 0 or frame.f_code is Trainer.step.__code__
                if at and at == (steps if training else calls):
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(look)
        code = work()
        sys.setprofile(None)
        print(calls, steps)
        return code

    return run


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


def codes(children: Iterable[int], seconds: float = LIMIT) -> list[int]:
    """Return the exit codes of processes, HANGING for each that runs after so many seconds and is killed."""
    end = time.monotonic() + seconds
    return [ended(child, max(0.0, end - time.monotonic())) for child in children]


def scored(what: str, count: int, faults: list[str]) -> Score:
    """Return the line of a part in which each of `count` trials succeeds or fails."""
    return Score(what, f"{count}/{count}", f"{count - len(faults)}/{count}", not faults, tuple(faults))


def at_call(number: int, act: Callable[[], None], training: bool) -> None:
    """Do something at call `number` of a function of Dither, from the first step on, or since the folder was claimed."""
    calls, first = 0, (Trainer.step if training else loop._build).__code__

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls += calls > 0 or frame.f_code is first
            if calls == number:
                calls += 1
                sys.setprofile(None)
                act()

    sys.setprofile(look)


def in_this_process(file: Path) -> Path:
    """Do a run without faults and return its folder. Runs that are forked afterwards find everything imported."""
    said = io.StringIO()  # never closed: handlers of loggers may keep it
    with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if code := begin_or_resume(file):
            raise RuntimeError(f"the run without faults ended with {code}: {said.getvalue()[-1000:]}")
    return file.with_suffix("")


@cache
def straight(text: Path) -> tuple[Path, str, int, int]:
    """A run that nothing happens to: its folder, its SHA-256, its calls, and how many of them from the first step on."""
    out, said = text.parent / "straight", text.parent / "straight.txt"
    if ended(forked(counted(lambda: cli.main(arguments(text, out))), said)):
        raise RuntimeError(said.read_text())
    calls, steps = map(int, said.read_text().split()[-2:])
    return out, sha256(out), calls, steps


# The parts ------------------------------------------------------------------------------------------------------------


def kills(text: Path, folder: Path, count: int) -> list[Score]:
    """kill -9 at random calls, in one to three lives of a run, three of four while it trains: it ends as the straight one."""
    _, expected, calls, steps = straight(text)
    draw, done, within, runs, faults = random.Random(0), 0, 0, 0, []
    while done < count:
        out, said, code, left = folder / f"killed-{runs}", folder / "killed.txt", KILLED, draw.randrange(1, 4)
        runs += 1
        while code == KILLED:
            training = draw.random() < 0.75
            at = draw.randrange(1, steps if training else calls) if left and done < count else 0
            code = ended(forked(counted(lambda out=out: cli.main(arguments(text, out)), at, training), said))
            done += code == KILLED
            within += code == KILLED and training
            left -= 1
        if code or sha256(out) != expected:
            faults.append(f"run {runs} ended with {code}: {said.read_text()[-500:]}")
        shutil.rmtree(out, ignore_errors=True)
    what = f"resumed = straight, kill -9 at {done} points, {within} of them while training"
    return [Score(what, f"{runs}/{runs}", f"{runs - len(faults)}/{runs}", not faults, tuple(faults))]


def kills_in_saves(text: Path, folder: Path, count: int) -> list[Score]:
    """kill -9 by the clock at a process that only saves: there is always a checkpoint, and it is what was saved."""
    draw, trials, unloadable, unfinished, faults = random.Random(1), 0, 0, 0, []

    def state(step: int) -> dict[str, torch.Tensor]:
        return {f"t{i}": torch.full((1 << 14,), float(step)) for i in range(8)}

    def saves(place: Path, ready: int) -> int:
        for step in range(1, 1 << 20):
            checkpoint.save(place, step, tensors=state(step), plain={"step": step})
            if step == 1:
                os.write(ready, b"1")
            checkpoint.keep(place, last=2)
        return 0

    while trials < count or (not unfinished and trials < 20 * count):  # on a busy machine, few kills hit a save
        trials += 1
        place = folder / f"saves-{trials}"
        read, write = os.pipe()
        child = forked(lambda place=place, write=write: saves(place, write), folder / "saves.txt")
        os.close(write)
        os.read(read, 1)
        os.close(read)
        time.sleep(draw.uniform(0, 0.03))  # the moment of the kill, not a wait for anything
        os.kill(child, signal.SIGKILL)
        ended(child)
        unfinished += bool(checkpoint.leftovers(place))
        try:
            path, _ = checkpoint.newest(place)
            tensors, plain = checkpoint.load(path or place)
            if not all(torch.equal(tensor, state(plain["step"])[name]) for name, tensor in tensors.items()):
                raise UserError(f"{path} is not what was saved")
        except UserError as error:
            unloadable += 1
            faults.append(str(error))
        shutil.rmtree(place)
    what = f"unloadable after kill -9 in a save ({unfinished} of {trials} left one unfinished)"
    return [Score(what, f"0/{trials}", f"{unloadable}/{trials}", not unloadable and unfinished > 0, tuple(faults))]


def damage(text: Path, folder: Path, count: int) -> list[Score]:
    """A flipped bit, or a cut, anywhere in any file of a checkpoint of a run: it is refused."""
    path = folder / f"step-{STEPS:08d}"
    shutil.copytree(straight(text)[0] / "checkpoints" / path.name, path)
    checkpoint.load(path)
    draw, scores = random.Random(2), []
    names = sorted(file.name for file in path.iterdir())
    for what, many in (("single-bit flips", count), ("truncations", max(3, count // 10))):
        accepted = []
        for number in range(many):
            file = path / names[number % len(names)]  # each file as often as the large one
            size = file.stat().st_size
            at = draw.randrange(size)
            with open(file, "r+b") as stream:
                stream.seek(at)
                rest = stream.read() if what == "truncations" else stream.read(1)
                stream.seek(at)
                if what == "truncations":
                    stream.truncate()
                else:
                    stream.write(bytes([rest[0] ^ 1 << draw.randrange(8)]))
            with suppress(UserError):
                checkpoint.load(path)
                accepted.append(f"{file.name} at byte {at}")
            with open(file, "r+b") as stream:
                stream.seek(at)
                stream.write(rest)
        checkpoint.load(path)
        scores.append(Score(f"{what} accepted", f"0/{many}", f"{len(accepted)}/{many}", not accepted, tuple(accepted)))
    return scores


def worlds(text: Path, folder: Path, count: int) -> list[Score]:
    """One to four processes have the same sequences, and losses that differ by the order of additions; so if each goes on."""
    # With a large eps an update is nearly proportional to the gradient, so that a rounding stays as small as it was.
    more = ("data.batch=12", "data.micro_batch=1", "run.keep_last=9", "optim.eps=1.0", "optim.lr=0.1")
    sizes = (1, 2, 3, 4)[: max(2, count)]
    faults: list[str] = []

    def part(out: Path, world: int, steps: int) -> None:
        def rank(number: int) -> int:
            real = Trainer.step

            def step(self: Trainer, batch: Batch, *rest: Any) -> torch.Tensor:
                with open(out.parent / f"{out.name}.order", "a") as order:
                    for place, tokens in enumerate(batch.tokens.tolist()):
                        order.write(json.dumps([batch.step, batch.first + place, tokens]) + "\n")
                return real(self, batch, *rest)

            Trainer.step = step  # type: ignore[method-assign]
            settings = config(text, out, *more, "run.save_every=3")
            return train(configs.override(settings, [f"run.steps={steps}"]), resume=(out / "config.toml").is_file()).code

        for number, code in enumerate(codes(group(world, rank, folder / "rank"))):
            if code:
                said = (folder / f"rank-{number}").read_text()[-500:]
                faults.append(f"rank {number} of {world} ended with {code}: {said}")

    def order(out: Path) -> list[str]:
        return sorted(set((out.parent / f"{out.name}.order").read_text().splitlines()))

    def losses(out: Path) -> dict[tuple[str, int], float]:
        found = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return {(line["kind"], line["step"]): line["loss"] for line in found if line["kind"] in ("train", "eval")}

    for world in sizes:
        part(folder / f"world-{world}", world, STEPS)
    if faults:
        return [Score("world sizes", "all equal", "a run failed", False, tuple(faults))]
    one = folder / "world-1"
    for start in sizes:  # each goes on with what another began
        mixed = folder / f"world-from-{start}"
        shutil.copytree(folder / f"world-{start}", mixed)
        checkpoint.drop(mixed / "checkpoints", after=3)
        shutil.copy(folder / f"world-{start}.order", folder / f"{mixed.name}.order")
        part(mixed, sizes[sizes.index(start) - 1], STEPS)
    runs = [*(folder / f"world-{world}" for world in sizes[1:]), *(folder / f"world-from-{world}" for world in sizes)]
    others = [f"{out.name} has other sequences" for out in runs if order(out) != order(one)]
    faults += [f"{out.name} has other lines" for out in runs if losses(out).keys() != losses(one).keys()]
    worst = max(abs(losses(out).get(key, 0) / value - 1) for out in runs for key, value in losses(one).items())
    # Means of 96 float32 losses near 5, added in another order: a few units of 2^-24.
    right = worst <= 1e-6 and not faults
    names = "-".join(map(str, sizes))
    return [
        Score(f"world sizes {names}: other sequences, in {len(runs)} runs", "0", f"{len(others)}", not others, tuple(others)),
        Score(f"world sizes {names}: largest difference of a loss", "<= 1e-6", f"{worst:.1e}", right, tuple(faults)),
    ]


def signals(text: Path, folder: Path, count: int) -> list[Score]:
    """SIGTERM at a random step: saved, status written, ended with 143."""
    draw, longest, faults = random.Random(4), 0.0, []
    for trial in range(count):
        out, said, at = folder / f"signal-{trial}", folder / "signal.txt", draw.randrange(1, 6)
        read, write = os.pipe()

        def work(out: Path = out, write: int = write, at: int = at) -> int:
            real = Trainer.step

            def step(self: Trainer, *rest: Any) -> torch.Tensor:
                if self.done == at:
                    os.write(write, b"1")
                return real(self, *rest)

            Trainer.step = step  # type: ignore[method-assign]
            return cli.main(arguments(text, out, "run.steps=1000000", "run.save_every=0", "run.log_every=1000"))

        child = forked(work, said)
        os.close(write)
        os.read(read, 1)
        os.close(read)
        began = time.monotonic()
        os.kill(child, signal.SIGTERM)
        code = ended(child)
        longest = max(longest, time.monotonic() - began)
        try:
            status = Status.load(out)
            saved, _ = checkpoint.newest(out / "checkpoints")
            if (code, status.state) != (143, "interrupted") or saved is None or checkpoint.step_of(saved) != status.step:
                raise UserError(f"ended with {code}, {status}, saved {saved}")
        except UserError as error:
            faults.append(f"{error} {said.read_text()[-500:]}")
        shutil.rmtree(out, ignore_errors=True)
    return [
        scored("SIGTERM: saved, and ended with 143", count, faults),
        Score("SIGTERM: seconds to the end, at the most", "< 20", f"{longest:.1f}", longest < 20),
    ]


def hostility(text: Path, folder: Path, count: int) -> list[Score]:
    """Every kind of hostile input, `count` of each or all."""
    known, faults, tried = hostile.good(folder / "good"), list[str](), 0
    for cases in hostile.KINDS.values():
        chosen = list(cases())
        random.Random(5).shuffle(chosen)
        tried += len(chosen[:count])
        faults += [fault for case in chosen[:count] if (fault := hostile.attempt(case, folder / "case", known))]
    what = f"hostile {', '.join(hostile.KINDS)}: not one line and code 2"
    return [Score(what, f"0/{tried}", f"{len(faults)}/{tried}", not faults, tuple(faults))]


def bombs(text: Path, folder: Path, count: int) -> list[Score]:
    """Compressed files that are far larger than they look, at the real limit: refused, in bounded memory."""
    import gzip
    import lzma

    from dither.data.text import LARGEST

    faults, most = [], 0
    fast: list[tuple[Any, str, dict[str, int]]] = [
        (gzip.open, "a.txt.gz", {"compresslevel": 1}),
        (lzma.open, "a.jsonl.xz", {"preset": 0}),
    ]
    for opener, name, options in fast[:count]:
        with opener(folder / name, "wb", **options) as stream:
            for _ in range((LARGEST >> 24) + 2):
                stream.write(b"x" * (1 << 24))
        command = ["data", "prepare", str(folder / name), "--out", str(folder / "bomb")]
        child = forked(lambda command=command: cli.main(command), folder / "bomb.txt")
        _, status, usage = os.wait4(child, 0)
        printed = (folder / "bomb.txt").read_text()
        most = max(most, usage.ru_maxrss << 10)
        if os.waitstatus_to_exitcode(status) != 2 or f"{LARGEST:,} bytes" not in printed:
            faults.append(f"{name}: {printed[-500:]}")
        (folder / name).unlink()
    # The line that is read, once more while it grows, and the process itself.
    limit = 3 * LARGEST + (1 << 30)
    return [
        Score(
            "bombs of 1 GiB: peak memory in GiB",
            f"<= {limit >> 30}",
            f"{most / 2**30:.1f}",
            not faults and most <= limit,
            tuple(faults),
        )
    ]


def fuzzing(text: Path, folder: Path, count: int) -> list[Score]:
    """Mutated input for every reader of files, `count` in all: nothing but errors of Dither."""
    rows = fuzz(executions=count)
    faults = tuple(fault for row in rows for fault in row.faults)
    names = ", ".join(row.what.partition(":")[0].removeprefix("fuzzed ") for row in rows)
    return [Score(f"fuzzed {names}: faults", f"0/{count}", f"{len(faults)}/{count}", not faults, faults)]


PARTS: dict[str, tuple[Callable[[Path, Path, int], list[Score]], int]] = {
    "kills": (kills, 200),
    "saves": (kills_in_saves, 500),
    "damage": (damage, 10_000),
    "worlds": (worlds, 4),
    "signals": (signals, 10),
    "hostility": (hostility, 1000),
    "bombs": (bombs, 2),
    "fuzzing": (fuzzing, 1_000_100),
}
"""What is tried, and how often when nothing is said. The parts of tests/soak/soak_faults.py come on top."""


ORDER = (
    "faults",
    "fuzzing",
    "launchers",
    "kills",
    "differences",
    "restarts",
    "hostility",
    "sharded",
    "saves",
    "lost",
    "phases",
)
ORDER += ("disks", "terminals", "worlds", "races", "bombs", "damage", "shards", "signals")
"""The longest parts first, so that two processes end at about the same time."""


@dataclass(frozen=True)
class Result:
    """The scores of a part, and its clock."""

    part: str
    scores: tuple[Score, ...]
    seconds: float
    """Wall-clock time."""
    cpu: float
    """CPU time of the part and its processes."""


def write_text(text: Path) -> None:
    """Write a folder of documents."""
    text.mkdir()
    draw, words = random.Random(0), ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "runs", "away")
    for number in range(60):
        (text / f"{number}.txt").write_text(" ".join(draw.choice(words) for _ in range(60)))


def warm_up(text: Path) -> None:
    """Train two steps in this process, so that those forked from it need not import, read and parse the same again."""
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # no thread, which would be missing after a fork
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and runs under nohup leave it ignored
    torch.set_num_threads(1)
    small_model(text.parent / "model")
    in_this_process(file_of(text, text.parent / "warm", "run.steps=2"))


def run(scales: Mapping[str, float], folder: Path) -> list[Result]:
    """Run some parts, so many times their usual counts, each in a folder and a process of its own, two at a time."""
    text = folder / "text"
    write_text(text)
    warm_up(text)
    straight(text)
    waiting, running, results = deque(scales), dict[int, tuple[str, float]](), list[Result]()

    def part(name: str) -> int:
        work, count = PARTS[name]
        (folder / name).mkdir()
        scores = work(text, folder / name, max(1, round(count * scales[name])))
        (folder / f"{name}.json").write_text(json.dumps([asdict(score) for score in scores]))
        shutil.rmtree(folder / name)
        return 0

    while waiting or running:
        while waiting and len(running) < 2:
            name = waiting.popleft()
            running[forked(lambda name=name: part(name), folder / f"{name}.said")] = name, time.monotonic()
        child, status, usage = os.wait4(-1, 0)
        name, began = running.pop(child)
        file, said = folder / f"{name}.json", (folder / f"{name}.said").read_text()
        print(said, end="", flush=True)
        scores = [Score(**score) for score in json.loads(file.read_text())] if file.exists() else []
        if status or not scores:
            scores.append(Score(f"{name}: runs to its end", "yes", "no", False, (said[-3000:],)))
        for score in scores:
            show(score)
        result = Result(name, tuple(scores), time.monotonic() - began, usage.ru_utime + usage.ru_stime)
        print(f"      {name} took {result.seconds:.0f} s, and {result.cpu:.0f} s of CPU time", flush=True)
        results.append(result)
    return results


def show(score: Score) -> None:
    """A line of the scoreboard, and the first things that went wrong."""
    print(f"{'PASS' if score.passed else 'FAIL'}  {score.what:80} {score.target:>12} {score.figure:>12}", flush=True)
    for fault in score.faults[:5]:
        print(f"      {fault}", flush=True)


def markdown(results: Iterable[Result], seconds: float) -> str:
    """Return the scoreboard as Markdown; what failed is in bold."""
    known = sorted(results, key=lambda result: list(PARTS).index(result.part))
    scores = [score for result in known for score in result.scores]
    passed, load = sum(score.passed for score in scores), os.getloadavg()[2]
    lines = [
        f"{passed} of {len(scores)} passed in {seconds / 60:.1f} minutes on {time.strftime('%Y-%m-%d', time.gmtime())}: "
        f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), a load of {load:.1f} over the last 15 minutes, Python "
        f"{platform.python_version()}, torch {torch.__version__}.",
        "",
        "| tested | target | found |",
        "|---|---:|---:|",
        *(f"| {score.what} | {score.target} | {score.figure if score.passed else f'**{score.figure}**'} |" for score in scores),
    ]
    return "\n".join(lines) + "\n"


MARKERS = ("<!-- The scoreboard of make soak begins. -->\n", "<!-- The scoreboard of make soak ends. -->\n")


def write_between_markers(page: Path, table: str) -> None:
    """Replace what is between the markers of a page."""
    before, begins, rest = page.read_text().partition(MARKERS[0])
    _, ends, after = rest.partition(MARKERS[1])
    if not begins or not ends:
        raise SystemExit(f"{page} has no lines {MARKERS[0].strip()!r} and {MARKERS[1].strip()!r}")
    page.write_text(f"{before}{begins}\n{table}\n{ends}{after}")


def main() -> int:
    """The command: 0 when everything passed."""
    import soak_faults  # which import this file
    import soak_ranks

    PARTS.update(soak_ranks.PARTS | soak_faults.PARTS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART[=SCALE]", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the usual counts")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the scoreboard between the markers of this page")
    given = parser.parse_args()
    scales = {name: float(scale or given.scale) for name, _, scale in (part.partition("=") for part in given.parts)}
    if unknown := set(scales) - set(PARTS):
        parser.error(f"there is no part {min(unknown)!r}: choose from {', '.join(PARTS)}")
    began = time.monotonic()
    print(f"      {'what':80} {'target':>12} {'found':>12}", flush=True)
    with tempfile.TemporaryDirectory(prefix="dither-soak-") as folder:
        results = run(scales or dict.fromkeys(sorted(PARTS, key=ORDER.index), given.scale), Path(folder))
    table = markdown(results, time.monotonic() - began)
    print(f"\n{table}", flush=True)
    if given.write is not None:
        write_between_markers(given.write, table)
    return int(not all(score.passed for result in results for score in result.scores))


if __name__ == "__main__":
    import soak

    sys.exit(soak.main())
