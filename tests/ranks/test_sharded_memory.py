"""Memory of ranks that share a model: none of them ever holds the whole, while it builds, steps, saves or resumes."""

import contextlib
import functools
import gc
import json
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runs import config_of, write_bottles
from test_parallelize import METHODS, config, step_of, whole
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import on_ranks, ranks

import dither
from dither import checkpoint, models
from dither.checkpoint import SavedTensors, Saver, pack, unpack
from dither.data import open_corpus, open_tokens
from dither.data.settings import TOKENS
from dither.models import PRESETS, LlamaConfig
from dither.models.presets import blank, draw_parts
from dither.ops.ranks import local
from dither.parallel import Layout
from dither.train import Config
from dither.train.config import dumps
from dither.train.layout import RankLayout
from dither.train.ranks import Ranks
from dither.train.trainer import Trainer

DEEP = LlamaConfig(hidden_size=64, num_hidden_layers=32, num_attention_heads=4, intermediate_size=64, vocab_size=256)
"""Many blocks, so that one that FSDP2 has gathered is a small part of the model, as in large models."""
RANKS = 4


class Allocations(TorchDispatchMode):
    """Count the bytes of the storages that operations return, while they live, and their peak.

    FSDP2 resizes storages: all of them are measured again after its operations, and before a peak is believed. `there` are
    tensors that live already.
    """

    def __init__(self, there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        gc.collect()
        self.now = self.peak = 0
        self.storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        for x in there:
            self._add(x)
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._add(x._local_tensor if isinstance(x, DTensor) else x)
        if func.namespace in ("fsdp", "c10d") or self.now > self.peak:
            self.measure()
        return result

    def _add(self, x: torch.Tensor) -> None:
        if type(x) is torch.Tensor and x.device.type == "cpu":
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.storages:
                self.storages[key] = weakref.ref(storage, functools.partial(self._free, key)), size
                self.now += size

    def _free(self, key: int, _: object) -> None:
        _, size = self.storages.pop(key)
        self.now -= size

    def measure(self) -> None:
        """Measure all storages again."""
        for key, (reference, _) in list(self.storages.items()):
            if (storage := reference()) is not None:
                self.storages[key] = reference, storage.nbytes()
        self.now = sum(size for _, size in self.storages.values())
        self.peak = max(self.peak, self.now)


@contextlib.contextmanager
def deep_preset() -> Iterator[None]:
    known = {"deep": DEEP}
    with mock.patch.dict(PRESETS, known):
        yield


def settings(folder: Path, *more: str) -> Config:
    small = ["model.preset=deep", "data.sequence=8", f"data.batch={RANKS}", "run.eval_sequences=1"]
    return config_of(folder / "text", folder, small, more)


def build(folder: Path, ranks: Ranks, *more: str, initial: bool = True) -> Trainer:
    config = settings(folder, *more)
    layout = RankLayout.of(config, ranks)
    return Trainer(config, open_tokens(folder / TOKENS, verify=False), ranks, layout=layout, initial=initial)


def steps(trainer: Trainer, count: int) -> None:
    layout = trainer.layout
    for number in range(count):
        trainer.step(trainer.loader.batch(number, layout.data_rank, layout.data_world))


def measured(folder: Path, ranks: Ranks, *more: str) -> dict[str, int]:
    """Return the bytes of weights and states of this process, and the peaks of building, a step, saving and resuming."""
    found: dict[str, int] = {}
    with deep_preset():
        with Allocations() as seen:
            trainer = build(folder, ranks, *more)
        found["build"] = seen.peak
        steps(trainer, 1)
        trainer.training.optimizer.zero_grad()
        tensors, plain = trainer.pack(dumps(trainer.config), 0.0)
        with Allocations(local(x) for x in tensors.values()) as seen:
            found["held"] = seen.now
            if trainer.layout.cut:
                with Saver(folder / "checkpoints", group=dist.group.WORLD) as saver:
                    saver.save(1, tensors=tensors, plain=plain)
                    path = saver.wait()
                found["save"] = seen.peak
            else:
                path = checkpoint.save(folder / "whole", 1, tensors=tensors, plain=plain)
        with Allocations(local(x) for x in tensors.values()) as seen:
            steps(trainer, 1)
        found["step"] = seen.peak
        del trainer, tensors
        with Allocations() as seen:
            build(folder, ranks, *more, initial=False).restore(path)
        found["resume"] = seen.peak
    return found


def check_memory(folder: Path, more: list[str]) -> None:
    rank = dist.get_rank()
    found = measured(folder, Ranks(torch.device("cpu"), rank, dist.get_world_size()), *more)
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more", [["parallel.dp_shard=4"], ["parallel.dp_shard=2", "parallel.tp=2"]], ids=["FSDP2", "FSDP2 x TP"]
)
def test_ranks_share_memory_in_every_part_of_a_run(more: list[str], tmp_path: Path) -> None:
    write_bottles(tmp_path / "text")
    with deep_preset():
        open_corpus(settings(tmp_path).data, tmp_path)
    one = measured(tmp_path, Ranks(torch.device("cpu")))
    print({name: round(value / one["held"], 3) for name, value in one.items()})
    ranks(RANKS, check_memory, tmp_path, more)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        shares = {name: round(value / one["held"], 3) for name, value in found.items()}
        print(shares, round(found["step"] / one["step"], 3))
        for part in ("held", "build", "resume"):
            assert shares[part] <= 0.3, (rank, part, shares)
        # Gradients, activations and what FSDP2 has gathered come on top of weights and states, on one rank as well.
        assert found["step"] <= 0.3 * one["step"], (rank, found["step"], one["step"])
        # Asynchronous saving copies what a rank holds, once: on a GPU, to the host.
        assert found["save"] - found["held"] <= 1.05 * found["held"], (rank, shares)


@on_ranks(4)
def test_four_ranks_share_memory() -> None:
    """No rank ever holds the whole model, and the parts that ranks draw are those of the model that one rank builds."""
    sizes, layout = config(num_hidden_layers=5), Layout(dp_shard=2, tp=2)
    known = dict(models.build(sizes, seed=3).named_parameters())
    weights = sum(p.nbytes for p in known.values())
    alone = 3 * weights  # with two moments in float32
    with Allocations() as seen:
        model = blank(sizes, "cpu")
        dither.convert(model, METHODS["fp8-block"][0])
        dither.parallelize(model, layout.mesh("cpu"), gather="codes")
        draw_parts(model, 3)
    assert seen.peak <= 0.3 * alone, (seen.peak, alone)
    assert seen.peak < 0.6 * weights, (seen.peak, weights)
    for name, p in model.named_parameters():
        assert torch.equal(whole(p), known[name]), name
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-3)
    step_of(model, layout)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    held = sum(local(x).nbytes for x in (*model.parameters(), *states))
    assert held <= 0.3 * alone, (held, alone)


def test_a_resume_holds_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=0.1)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    tensors, plain = pack(model, optimizer, step=1)
    path = checkpoint.save(tmp_path, 1, tensors=tensors, plain=plain)
    weights = sum(p.nbytes for p in model.parameters())
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=0.1)
    with Allocations() as seen, SavedTensors(path) as saved:
        unpack(model, optimizer, saved, saved.plain)
    assert 3 * weights <= seen.peak <= 3.4 * weights  # weights, two moments, and one tensor at a time
