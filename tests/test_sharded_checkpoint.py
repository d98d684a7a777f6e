"""Checkpoints of several ranks: any layout is read into any other, bit for bit, and no rank holds or reads the whole."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sweeps import only
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import free_port, needs_gloo, spread, start

import dither
from dither import UserError, safe_files
from dither.storage import index, reading
from dither.storage.manifest import SHARDED
from dither.storage.manifest import to_bytes as manifest_bytes
from dither.storage.pieces import local_part
from dither.storage.reading import SavedTensors
from dither.train import checkpoint, pack, sharded, unpack
from dither.train.sharded import ShardedSaver
from dither.train.state import pack_sharded

pytestmark = needs_gloo

SHAPES = {"matrix": (13, 24), "vector": (11,), "experts": (4, 6, 5), "codes": (16, 8), "scalar": (), "empty": (3, 0), "one": (5,)}
DTYPES = {"codes": torch.uint8, "one": torch.bool, "experts": torch.bfloat16, "vector": torch.float8_e4m3fn}


def whole(name: str) -> torch.Tensor:
    """The whole tensor of a name: the same on every rank."""
    shape, dtype = SHAPES[name], DTYPES.get(name, torch.float32)
    generator = torch.Generator().manual_seed(len(name))
    values = torch.randint(0, 100, shape, generator=generator)
    return values.to(torch.float32).to(dtype) if dtype != torch.bool else values > 50


def split(mesh: DeviceMesh, x: torch.Tensor, placements: list) -> DTensor:
    """Cut a tensor that every rank has, without communication; strided shards as FSDP2 cuts what TP has cut already."""
    strided = next((n for n, p in enumerate(placements) if isinstance(p, _StridedShard)), None)
    order = list(range(mesh.ndim)) if strided is None else [*(n for n in range(mesh.ndim) if n != strided), strided]
    part = x
    for number in order:
        placement = placements[number]
        if not placement.is_replicate():
            chunks = part.chunk(mesh.size(number), placement.dim)
            place = mesh.get_coordinate()[number]
            empty = part.narrow(placement.dim, 0, 0)
            part = chunks[place] if place < len(chunks) else empty
    stride = torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False, shape=x.shape, stride=stride)


LAYOUTS = {
    "fsdp": lambda dim, shape: [Shard(0)],
    "tp": lambda dim, shape: [Shard(min(1, dim - 1))],
    "fsdp x tp rows": lambda dim, shape: [_StridedShard(0, split_factor=2), Shard(0)],
    "fsdp x tp columns": lambda dim, shape: [Shard(0), Shard(dim - 1)],
    "hsdp": lambda dim, shape: [Replicate(), Shard(0)],
    "experts": lambda dim, shape: [Shard(min(1, dim - 1)), Replicate()],
}


def laid(kind: str, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The tensors in a layout; those without dimensions are whole on every rank, and so is one other."""
    found: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        x = whole(name)
        cut = len(shape) > 0 and name != "one"
        found[name] = split(mesh, x, LAYOUTS[kind](len(shape), shape)) if cut else x
    return found


def mesh_of(kind: str) -> DeviceMesh:
    size = dist.get_world_size()
    two = kind in ("fsdp x tp rows", "fsdp x tp columns", "hsdp", "experts")
    return init_device_mesh("cpu", (size // 2, 2) if two else (size,))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


def write(folder: Path, kind: str) -> None:
    sharded.save(folder, 7, tensors=laid(kind, mesh_of(kind)), plain={"rank": dist.get_rank()})


def read(folder: Path, kind: str) -> None:
    """Read into a layout, from tensors that hold something else; compare with the parts of the whole."""
    mesh = mesh_of(kind)
    wanted = laid(kind, mesh)
    for tensor in wanted.values():
        local_part(tensor).zero_()
    assert sharded.load(folder / "step-00000007", wanted) == {"rank": 0}
    for name, tensor in laid(kind, mesh).items():
        assert torch.equal(bits(local_part(wanted[name])), bits(local_part(tensor))), name


def test_a_layout_is_read_into_another(tmp_path):
    spread(4, functools.partial(write, tmp_path, "fsdp x tp rows"))
    tensors, plain = checkpoint.load(tmp_path / "step-00000007")
    assert plain == {"rank": 0}
    assert {name: bits(x).tolist() for name, x in tensors.items()} == {name: bits(whole(name)).tolist() for name in SHAPES}
    checkpoint.verify(tmp_path / "step-00000007")
    spread(3, functools.partial(read, tmp_path, "fsdp"), functools.partial(read, tmp_path, "tp"))
    spread(2, functools.partial(read, tmp_path, "fsdp x tp columns"), functools.partial(read, tmp_path, "fsdp"))


# The state of training ------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Two layers whose rows and columns can be cut by 2 and, unevenly, by 3."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 10, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "dynamic8": lambda model: dither.optim.AdamW(model.named_parameters(), lr=1e-2, states="dynamic8"),
    "bf16": lambda model: dither.optim.AdamW(model.named_parameters(), lr=1e-2, states="bf16"),
    "adam-mini": lambda model: dither.optim.AdamMini(model.named_parameters(), ROLES, lr=1e-2),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}
ROLES = {
    "up.weight": dither.optim.Role.rows_each(1),
    "down.weight": dither.optim.Role.rows_each(1),
    "norm.weight": dither.optim.Role.whole(),
    "norm.bias": dither.optim.Role.whole(),
}


def trained(kind: str, optimizer: str, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in a layout, after some steps on the same data on every rank."""
    torch.manual_seed(seed)
    model = Tiny()
    if optimizer == "sampling":
        plan = dither.Plan(default=dither.LayerPrecision(sampling=dither.Sampling()))
        dither.convert(model, plan, emulate=True)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if "tp" in kind:
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)) if size > 1 else None
    if "fsdp" in kind:
        fully_shard(model.up, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    made = OPTIMIZERS["bf16" if optimizer == "sampling" else optimizer](model)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    for step in range(steps):
        with dither.step_context(model, step=step):
            model(x).square().mean().backward()
        made.step()
        made.zero_grad()
    return model, made


def train_and_save(folder: Path, kind: str, optimizer: str) -> None:
    model, made = trained(kind, optimizer, seed=1, steps=2)
    with ShardedSaver(folder) as saver:
        tensors, plain = pack_sharded(model, made, step=2, others={"sequences": 8})
        saver.save(2, tensors=tensors, plain=plain)
        for parameter in model.parameters():
            local_part(parameter).fill_(7)  # training continues: the saved values are the earlier ones
        assert saver.wait() == folder / "step-00000002"


def restore_and_save(folder: Path, again: Path, kind: str, optimizer: str) -> None:
    model, made = trained(kind, optimizer, seed=2, steps=1)
    path, skipped = sharded.newest(folder)
    assert (path, skipped) == (folder / "step-00000002", [])
    with SavedTensors(path) as saved:
        assert unpack(model, made, saved, saved.plain).others == {"sequences": 8}
    tensors, plain = pack_sharded(model, made, step=2, others={"sequences": 8})
    sharded.save(again, 2, tensors=tensors, plain=plain)


def same_checkpoints(first: Path, second: Path) -> None:
    (ours, plain), (theirs, others) = (checkpoint.load(path / "step-00000002") for path in (first, second))
    assert plain == others
    assert set(ours) == set(theirs)
    for name, x in ours.items():
        if not name.startswith("rng:"):
            assert (x.dtype, x.shape) == (theirs[name].dtype, theirs[name].shape), name
            assert torch.equal(bits(x), bits(theirs[name])), name


WAYS = [(4, "fsdp x tp", 2, "tp"), (4, "fsdp x tp", 3, "fsdp"), (3, "fsdp", 4, "fsdp x tp"), (2, "tp", 2, "fsdp")]


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        only((way, optimizer), kept=(optimizer == "dynamic8" and number < 2) or (optimizer == "adam-mini" and number == 1))
        for number, way in enumerate(WAYS)
        for optimizer in OPTIMIZERS
    ],
)
def test_training_resumes_in_another_layout(way, optimizer, tmp_path):
    size, kind, other_size, other = way
    spread(size, functools.partial(train_and_save, tmp_path / "first", kind, optimizer))
    spread(other_size, functools.partial(restore_and_save, tmp_path / "first", tmp_path / "second", other, optimizer))
    same_checkpoints(tmp_path / "first", tmp_path / "second")
    model, made = trained("one", optimizer, seed=3, steps=1)  # and in one process, without ranks
    with SavedTensors(tmp_path / "first" / "step-00000002") as saved:
        unpack(model, made, saved, saved.plain)
    tensors, plain = pack(model, made, step=2, others={"sequences": 8})
    checkpoint.save(tmp_path / "third", 2, tensors=tensors, plain=plain)
    same_checkpoints(tmp_path / "first", tmp_path / "third")
