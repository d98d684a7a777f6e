"""Checkpoints of several ranks: any layout is read into any other, bit for bit, and no rank holds or reads the whole."""

import functools
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import needs_gloo, spread

from dither import UserError
from dither.storage import reading
from dither.storage.pieces import local_part, pieces_of
from dither.storage.reading import SavedTensors
from dither.train import checkpoint, sharded
from dither.train.sharded import ShardedSaver

pytestmark = needs_gloo

SHAPES = {"matrix": (13, 24), "vector": (11,), "experts": (4, 6, 5), "codes": (16, 8), "scalar": (), "empty": (3, 0), "flag": (5,)}
DTYPES = {"codes": torch.uint8, "flag": torch.bool, "experts": torch.bfloat16, "vector": torch.float8_e4m3fn}


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
        cut = len(shape) > 0 and name != "flag"
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
