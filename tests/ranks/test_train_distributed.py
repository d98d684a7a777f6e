"""Training by two processes (gloo): the same data and the same numbers as one, within the order of additions."""

import json
import math
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runs import config_of, lines, losses
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import ranks, set_up, start_ranks

from dither import UserError, checkpoint, cli
from dither.optim import GRADIENTS, Gradients, training
from dither.train import Config, Status, train
from dither.train import trainer as trainers
from dither.train.ranks import Ranks
from dither.train.trainer import Trainer

STEPS = 6

DELAYED = ("precision.recipe=fp8-delayed", "run.steps=2", "run.eval_every=0", "run.eval_sequences=1")


def settings(text: Path, out: Path, *more: str) -> Config:
    small = [f"run.steps={STEPS}", "run.eval_every=3", "run.log_every=1", "run.save_every=3", "run.keep_last=9"]
    # With a large eps the update is nearly proportional to the gradient, so that a rounding stays as small as it was.
    small += ["run.eval_sequences=3", "optim.eps=1.0", "optim.lr=0.1", "data.micro_batch=2"]
    return config_of(text, out, small, more)


def _train(folder: Path, text: Path) -> None:
    """All that two ranks do here, one after the other."""
    rank = dist.get_rank()
    assert train(settings(text, folder / "two")).step == STEPS
    assert train(settings(text, folder / "resumed"), resume=True).step == STEPS
    delayed = train(settings(text, folder / "two delayed", *DELAYED))
    original = Trainer.step

    def signalled(self: Trainer, *arguments: Any) -> torch.Tensor:
        if rank == 1 and self.done == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    with mock.patch.object(Trainer, "step", signalled):
        outcome = train(settings(text, folder / "signalled"))
    (folder / f"outcome-{rank}.json").write_text(json.dumps([outcome.code, outcome.step, delayed.loss]))
    try:
        train(settings(text, folder / "odd", "data.batch=3", "data.micro_batch=1"))
    except UserError as error:
        (folder / f"refused-{rank}.txt").write_text(str(error))
    _reduce(rank, folder)
    assert train(settings(text, folder / "stochastic", *STOCHASTIC)).step == 2
    build = trainers._model

    def told_to_end(*arguments: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return build(*arguments)

    with mock.patch.object(trainers, "_model", told_to_end):
        early = train(settings(text, folder / "early"))
    (folder / f"early-{rank}.json").write_text(json.dumps([early.code, early.why]))


STOCHASTIC = ("precision.mode=bf16-sr", "precision.gradients=bf16-sr", "run.steps=2", "run.eval_every=0")
STOCHASTIC += ("run.eval_sequences=1", "data.sequence=4", "data.micro_batch=1")


def _reduce(rank: int, folder: Path) -> None:
    """Rank 0 has gradients of 1 and rank 1 of 2^-9, whose sum is between the bfloat16 numbers 1 and 1 + 2^-7."""
    found = {}
    for kind in GRADIENTS:
        layer = torch.nn.Linear(4097, 1, bias=False)  # an odd number, which two ranks do not share evenly
        run = training(layer, "bf16-sr", lr=1e-2, gradients=kind)
        run.backward((layer.weight * (2.0**-9 if rank else 1.0)).float().sum())
        run.gradients.all_reduce()
        found[kind] = layer.weight.grad
    torch.save(found, folder / f"reduced-{rank}.pt")
    mesh = dist.init_device_mesh("cpu", (2,))
    sharded = torch.nn.Linear(8, 8, bias=False)
    sharded.weight = torch.nn.Parameter(distribute_tensor(sharded.weight.detach().bfloat16(), mesh, [Shard(0)]))
    Gradients(sharded, "bf16")  # its own type, which is nothing to ask for
    try:
        Gradients(sharded, "fp32")
    except UserError as error:
        (folder / f"sharded-{rank}.txt").write_text(str(error))


def _dying(rank: int, size: int, port: int, folder: Path, text: Path) -> None:
    set_up(rank, size, port)
    original = Trainer.step

    def step(self: Trainer, *arguments: Any) -> torch.Tensor:
        if rank == 1 and self.done == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)

    Trainer.step = step  # type: ignore[method-assign]
    sys.stderr = (folder / f"stderr-{rank}.txt").open("w")
    more = ["run.steps=6", "run.save_every=3", "data.sequence=16", "data.batch=4", "run.device=cpu", "run.eval_every=0"]
    code = cli.main(["train", "--data", str(text), "--out", str(folder / "run"), "--set", *more])
    sys.stderr.close()
    os._exit(code)


def test_a_rank_that_dies_ends_the_others_with_a_sentence(text: Path, tmp_path: Path) -> None:
    processes = start_ranks(_dying, 2, tmp_path, text).processes
    processes[1].join()
    processes[0].join(5)
    assert [process.exitcode for process in processes] == [1, -signal.SIGKILL]
    told = (tmp_path / "stderr-0.txt").read_text()
    lost = f"rank 1 (process {processes[1].pid} on {socket.gethostname()})"
    assert told.startswith(f"dither: error: Rank 0 of 2 lost {lost} in step 5 (Connection ")
    assert told.count("\n") == 1
    assert Status.load(tmp_path / "run").state == "failed"
    assert "in step 5" in Status.load(tmp_path / "run").why
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(settings(text, folder / "one"))
    train(settings(text, folder / "one delayed", *DELAYED))
    shutil.copytree(folder / "one", folder / "resumed")
    checkpoint.drop(folder / "resumed" / "checkpoints", after=3)
    ranks(2, _train, folder, text)
    return folder


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_two_ranks_are_one(runs: Path, kind: str) -> None:
    """From the first step on, and resumed by two where one had trained."""
    one = losses(runs / "one", kind)
    assert len(one) == (STEPS if kind == "train" else 2)
    assert one[-1] < one[0] - 0.1
    # Means of 64 float32 losses near 5, added in another order: a few units of 2^-24 each; six smooth steps keep that small.
    assert losses(runs / "two", kind) == pytest.approx(one, rel=1e-6)
    assert losses(runs / "resumed", kind) == pytest.approx(one, rel=1e-6)


def test_weights_of_two_ranks(runs: Path) -> None:
    ours, theirs = (checkpoint.load(runs / name / "checkpoints" / f"step-{STEPS:08d}")[0] for name in ("two", "one"))
    for name, tensor in theirs.items():
        if name.startswith("model:"):
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_histories_of_delayed_scaling_are_shared(runs: Path) -> None:
    """Each rank saw half of the numbers, and the saved histories are those of all: the largest of both."""
    ours, theirs = (
        checkpoint.load(runs / name / "checkpoints" / "step-00000002")[0] for name in ("two delayed", "one delayed")
    )
    histories = [name for name in theirs if name.endswith("input_history")]
    assert histories
    for name in histories:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=0, msg=name)


def test_a_signal_to_one_rank_reaches_all(runs: Path) -> None:
    first, second = (json.loads((runs / f"outcome-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first[:2] == [143, 3]  # it came within step 3, and the evaluation after it told everybody
    assert Status.load(runs / "signalled") == Status(state="interrupted", step=3, why="Received SIGTERM; step 3 is saved.")
    assert checkpoint.newest(runs / "signalled" / "checkpoints")[0] == runs / "signalled" / "checkpoints" / "step-00000003"


def test_a_signal_to_one_rank_while_the_run_is_built_ends_all_with_its_code(runs: Path) -> None:
    for rank in (0, 1):
        assert json.loads((runs / f"early-{rank}.json").read_text()) == [143, "Received SIGTERM before the first step."]
    assert not (runs / "early").exists()


def test_a_batch_that_cannot_be_shared(runs: Path) -> None:
    assert (runs / "refused-0.txt").read_text() == "data.batch=3 cannot be divided evenly among 2 ranks: choose a multiple."
    with pytest.raises(UserError, match=r"micro_batch=4 does not divide the 6 sequences per rank of data\.batch=12 on 2 ranks"):
        Ranks(torch.device("cpu"), 0, 2).share(12, 4)
    assert Ranks(torch.device("cpu"), 1, 2).share(12, 6) == 1


def test_gradients_are_reduced_in_their_type(runs: Path) -> None:
    found = [torch.load(runs / f"reduced-{rank}.pt") for rank in (0, 1)]
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("bf16-sr", torch.bfloat16)):
        assert found[0][kind].dtype == dtype
        assert torch.equal(found[0][kind], found[1][kind])  # the same bits on all ranks
    assert torch.equal(found[0]["fp32"], torch.full((1, 4097), 1 + 2.0**-9))
    assert torch.equal(found[0]["bf16"], torch.ones(1, 4097, dtype=torch.bfloat16))  # what rank 1 had is lost
    stochastic = found[0]["bf16-sr"].double()
    assert set(stochastic.unique().tolist()) == {1.0, 1 + 2.0**-7}
    share = (stochastic > 1).double().mean().item()  # a quarter, with a deviation of 0.0068
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4097)


def test_sharded_gradients_are_fsdp_s(runs: Path) -> None:
    said = (runs / "sharded-1.txt").read_text()
    assert said.startswith("gradients='fp32' is for parameters that one process holds, and 'weight' is sharded")
    assert "reduce_dtype" in said


def test_two_ranks_train_with_stochastic_gradients(runs: Path) -> None:
    found = losses(runs / "stochastic")
    assert len(found) == 2
    assert found[1] < found[0]


def test_only_one_rank_writes(runs: Path) -> None:
    assert [line["step"] for line in lines(runs / "two", "train")] == list(range(1, STEPS + 1))
    assert json.loads((runs / "two" / "environment.json").read_text())["world_size"] == 2
