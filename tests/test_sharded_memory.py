"""Memory of ranks that share a model: none of them ever holds the whole, while it builds, steps, saves or resumes."""

import contextlib
import functools
import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import needs_gloo, spread

from dither.data import open_tokens
from dither.models import llama, presets
from dither.nn.tensor_parallel import local
from dither.train import Config, checkpoint
from dither.train import config as configs
from dither.train.config import dumps
from dither.train.corpora import open_corpus
from dither.train.distributed import Ranks
from dither.train.files import TOKENS
from dither.train.layout import RankLayout
from dither.train.sharded import ShardedSaver
from dither.train.trainer import Trainer

pytestmark = needs_gloo

DEEP = llama.LlamaConfig(hidden_size=64, num_hidden_layers=32, num_attention_heads=4, intermediate_size=64, vocab_size=256)
"""Many blocks, so that one that FSDP2 has gathered is a small part of the model, as in large models."""
RANKS = 4


class Allocations(TorchDispatchMode):
    """Count the bytes of the storages that operations return, while they live, and their peak.

    FSDP2 resizes storages: all of them are measured again after its operations, and before a peak is believed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

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

    def restart(self) -> int:
        """Begin a new peak. Return the bytes that live now."""
        gc.collect()
        self.peak = 0
        self.measure()
        return self.peak


@contextlib.contextmanager
def deep_preset() -> Iterator[None]:
    known = MappingProxyType({**presets.PRESETS, "deep": DEEP})
    with mock.patch.object(presets, "PRESETS", known), mock.patch.object(configs, "PRESETS", known):
        yield


def settings(folder: Path, *more: str) -> Config:
    small = ["model.preset=deep", "data.sequence=8", f"data.batch={RANKS}", "data.micro_batch=1", "run.device=cpu"]
    given = [f'data.sources=["{folder / "text"}"]', f'run.out="{folder}"', "run.eval_sequences=1", *small, *more]
    return configs.override(Config(), given)


def build(folder: Path, ranks: Ranks, *more: str, initial: bool = True) -> Trainer:
    config = settings(folder, *more)
    layout = RankLayout.of(config, ranks)
    return Trainer(config, open_tokens(folder / TOKENS, verify=False), ranks, layout=layout, initial=initial)


def steps(trainer: Trainer, count: int) -> None:
    layout = trainer.layout
    for number in range(count):
        trainer.step(trainer.loader.batch(number, layout.data_rank, layout.data_world))


def measured(folder: Path, ranks: Ranks, *more: str) -> dict[str, int]:
    """Return the bytes of weights and states that this process holds, and the peaks of building, steps, saving and resuming."""
    found: dict[str, int] = {}
    with deep_preset(), Allocations() as seen:
        trainer = build(folder, ranks, *more)
        found["build"] = seen.peak
        steps(trainer, 1)
        seen.restart()
        steps(trainer, 1)
        found["step"] = seen.peak
        tensors, plain = trainer.pack(dumps(trainer.config), 0.0)
        held = {name: local(x) for name, x in tensors.items() if not name.startswith("rng:")}
        found["held"] = sum(x.nbytes for x in held.values())
        if trainer.layout.cut:
            trainer.training.optimizer.zero_grad()
            before = seen.restart()
            with ShardedSaver(folder / "checkpoints") as saver:
                saver.save(2, tensors=tensors, plain=plain)
                path = saver.wait()
            found["save"] = seen.peak - before
        else:
            path = checkpoint.save(folder / "whole", 2, tensors=tensors, plain=plain)
        del trainer, tensors, held
        left = seen.restart()
        trainer = build(folder, ranks, *more, initial=False)
        trainer.restore(path)
        found["resume"] = seen.peak - left
    return found


def check_memory(folder: Path, more: list[str]) -> None:
    rank = dist.get_rank()
    found = measured(folder, Ranks(torch.device("cpu"), rank, dist.get_world_size()), *more)
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    "more", [["parallel.dp_shard=4"], ["parallel.dp_shard=2", "parallel.tp=2"]], ids=["FSDP2", "FSDP2 x TP"]
)
def test_ranks_share_memory_in_every_part_of_a_run(more: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} bottles of beer on the wall, take {number % 7} down. " * 5)
    with deep_preset():
        open_corpus(settings(tmp_path), tmp_path, Ranks(torch.device("cpu")))
    one = measured(tmp_path, Ranks(torch.device("cpu")))
    spread(RANKS, functools.partial(check_memory, tmp_path, more))
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        print({name: round(value / one["held"], 3) for name, value in found.items()}, one)
