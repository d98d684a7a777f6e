"""Parts of the soak with several ranks: ranks that differ, lost ranks, restarts, killed launchers, sharded checkpoints."""

import itertools
import logging
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import hostile
import soak
import torch
from soak import LIMIT, STEPS, Score, begin_or_resume, codes, config, ended, file_of, forked, group, scored, sha256
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from dither import checkpoint, cli, files, recipe, report
from dither.data import prepare
from dither.train import Status, agreement
from dither.train import config as configs
from dither.train.trainer import Trainer

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


# Lost ranks -----------------------------------------------------------------------------------------------------------


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
        state = report.read(out).state
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


# Restarts by torchrun -------------------------------------------------------------------------------------------------


def torchrun(work: Callable[[], int], folder: Path, restarts: int) -> int:
    """Let two ranks run by torchrun's agent, which restarts both of them when one ends with an error. Return the exit code."""
    return ended(launcher(work, folder, restarts), LIMIT * (1 + restarts))


def launcher(work: Callable[[], int], folder: Path, restarts: int) -> int:
    """Start torchrun's agent with two ranks, and return its process id.

    The agent is that of `torchrun --nproc-per-node=2 --max-restarts=N`, but forks its ranks, so that none imports torch again.
    """

    def rank() -> None:
        torch.set_num_threads(1)
        if code := work():
            sys.exit(code)

    def agent() -> int:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=restarts,
            monitor_interval=0.1,
            start_method="fork",
        )
        try:
            launch_agent(launch, rank, [])
        except ChildFailedError as error:
            print(error)
            return 1
        return 0

    return forked(agent, folder / "agent.txt")


def printed(folder: Path) -> str:
    """Return the last lines of the agent and of every rank of the last attempts."""
    logs = sorted((folder / "logs").rglob("stderr.log"), key=lambda path: path.stat().st_mtime)
    return "\n".join([(folder / "agent.txt").read_text()[-1000:], *(path.read_text()[-500:] for path in logs[-4:])])


def attempt_number() -> tuple[int, int]:
    """Return the number of restarts so far, and this rank."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])


def restarts(text: Path, folder: Path, count: int) -> list[Score]:
    """`torchrun --max-restarts` with `--resume=auto`: a rank is killed in every attempt but the last, and the run is done."""
    out = folder / "run"
    more = ("run.steps=120", "run.save_every=3", "data.micro_batch=1", "run.eval_every=0", "run.log_every=50")
    file = file_of(text, out, *more)

    def work() -> int:
        attempt, rank = attempt_number()
        (folder / f"attempt-{attempt}").touch()
        draw = random.Random(attempt)
        victim, calls, training = draw.randrange(2), draw.randrange(1, 4000), draw.random() < 0.5
        if attempt < count and rank == victim:
            soak.at_call(calls, lambda: os.kill(os.getpid(), signal.SIGKILL), training)
        return begin_or_resume(file)

    code = torchrun(work, folder, count)
    went_on = len(list(folder.glob("attempt-*"))) - 1
    done = (out / "status.json").exists() and Status.load(out).state == "done"
    right = code == 0 and done and went_on == count
    faults = () if right else (f"ended with {code} after {went_on} restarts: {printed(folder)}",)
    what = "torchrun restarts after a kill go on (--resume=auto)"
    return [Score(what, f"{count}/{count}", f"{went_on}/{count}", right, faults)]


def launchers(text: Path, folder: Path, count: int) -> list[Score]:
    """The launcher of two ranks is killed with -9, and another resumes: the ranks save, end and free the folder."""
    draw, faults, slowest, steps = random.Random(11), [], 0.0, 20 * count + 20
    more = (f"run.steps={steps}", "run.save_every=0", "data.micro_batch=1", "run.eval_every=0", "run.log_every=1000")
    straight = folder / "straight"
    file = file_of(text, straight, *more)
    if any(codes(group(2, lambda _: begin_or_resume(file), folder / "rank"))):
        raise RuntimeError((folder / "rank-0").read_text()[-2000:])
    file, out = file_of(text, folder / "run", *more), folder / "run"

    def work(life: int, after: int, ready: int) -> int:
        real, steps_here = Trainer.step, itertools.count(1)

        def step(self: Trainer, *rest: Any) -> torch.Tensor:
            found = real(self, *rest)
            number = next(steps_here)
            if number == 1:
                (folder / f"pid-{life}-{os.environ['RANK']}").write_text(str(os.getpid()))
            if number == after:
                os.write(ready, self.done.to_bytes(4, "big"))
            time.sleep(0.15)  # so that the run outlasts its launchers
            return found

        if life % 2:  # as torchrun's own ranks; those that it forks get SIGINT, several times, when it dies
            torch.multiprocessing._prctl_pr_set_pdeathsig(0)
        if after:
            Trainer.step = step  # type: ignore[method-assign]
        return begin_or_resume(file)

    for life in range(count):
        read, write = os.pipe()
        after = draw.randrange(1, 6)
        child = launcher(lambda life=life, after=after, write=write: work(life, after, write), folder, 0)
        os.close(write)
        reached = [int.from_bytes(os.read(read, 4), "big") for _ in range(2)]  # of either rank
        os.close(read)
        os.kill(child, signal.SIGKILL)
        began = time.monotonic()
        ended(child)
        left = [pid for path in folder.glob(f"pid-{life}-*") if not gone(pid := int(path.read_text()), began + 30)]
        slowest = max(slowest, time.monotonic() - began)
        saved, state = checkpoint.newest(out / "checkpoints")[0], Status.load(out)
        if left or saved is None or not max(reached) <= state.step == checkpoint.step_of(saved) or state.state != "interrupted":
            faults.append(f"life {life} at {reached}: {len(left)} ranks are left, {state}, saved {saved}: {printed(folder)}")
    code = torchrun(lambda: work(count, 0, 0), folder, 0)
    if code or sha256(out, steps) != sha256(straight, steps):
        faults.append(f"the last one ended with {code}, or has other weights: {printed(folder)}")
    return [
        scored("launcher killed with -9: ranks save, the next one resumes, resumed = straight", count, faults),
        Score("launcher killed with -9: seconds until its ranks have ended", "< 5", f"{slowest:.1f}", slowest < 5),
    ]


def gone(pid: int, until: float) -> bool:
    """Wait for a process that is not a child, until a moment; kill it then. Return whether it ended by itself."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if select.select([file], [], [], max(0.0, until - time.monotonic()))[0]:
            return True
        signal.pidfd_send_signal(file, signal.SIGKILL)
        return False
    finally:
        os.close(file)


def kill_in_save(number: int) -> None:
    """Kill this process in the middle of file `number` of those that its thread of checkpoints writes."""
    real, count = files.write_new, itertools.count(1)

    def halfway(chunks: Iterable[Any]) -> Iterator[Any]:
        whole = b"".join(bytes(chunk) for chunk in chunks)
        yield whole[: len(whole) // 2]
        os.kill(os.getpid(), signal.SIGKILL)

    def write_new(path: Path, chunks: Iterable[Any], **options: Any) -> tuple[int, str]:
        saves = threading.current_thread().name.startswith("checkpoint")
        return real(path, halfway(chunks) if saves and next(count) == number else chunks, **options)

    files.write_new = write_new


def sharded(text: Path, folder: Path, count: int) -> list[Score]:
    """A rank of two that hold halves of the model (dp_shard=2) is killed in a step or in a save: resumed = straight."""
    steps = 4 + 3 * count
    more = ("parallel.dp_shard=2", "run.save_every=1", "run.eval_every=0", "run.log_every=50", f"run.steps={steps}")
    straight, out = folder / "straight", folder / "run"
    file = file_of(text, straight, *more)
    if any(codes(group(2, lambda _: begin_or_resume(file), folder / "rank"))):
        raise RuntimeError((folder / "rank-0").read_text()[-2000:])
    expected = sha256(straight, steps)
    file = file_of(text, out, *more)

    def work() -> int:
        attempt, rank = attempt_number()
        kind, draw = ("save", "step")[attempt % 2], random.Random(attempt)
        if rank == 0:
            unfinished = bool(checkpoint.leftovers(out / "checkpoints"))
            (folder / f"attempt-{attempt}").write_text("unfinished" if unfinished else "")
        if attempt < count and rank == draw.randrange(2):
            if kind == "save":
                kill_in_save(draw.randrange(1, 7))
            else:
                soak.at_call(draw.randrange(1, 8000), lambda: os.kill(os.getpid(), signal.SIGKILL), True)
        return begin_or_resume(file)

    code = torchrun(work, folder, count)
    attempts = [path.read_text() for path in folder.glob("attempt-*")]
    went_on, left = len(attempts) - 1, attempts.count("unfinished")
    same = code == 0 and sha256(out, steps) == expected
    right = same and went_on == count and left > 0
    faults = () if right else (f"ended with {code} after {went_on} restarts, other weights: {not same}: {printed(folder)}",)
    what = f"sharded (dp_shard=2), resumed = straight, kill -9 of a rank, {left} left a save unfinished"
    return [Score(what, f"{count}/{count}", f"{went_on}/{count}", right, faults)]


PARTS: dict[str, tuple[Callable[[Path, Path, int], list[Score]], int]] = {
    "differences": (differences, 100),
    "lost": (lost_ranks, 4),
    "restarts": (restarts, 20),
    "launchers": (launchers, 20),
    "sharded": (sharded, 20),
}
"""The parts of this file, and how often each is tried when nothing is said."""
