"""Checkpoints of several ranks: any layout is read into any other, bit for bit, and no rank holds or reads the whole."""

import hashlib
import itertools
import json
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
from worlds import join_group, ranks, start_ranks

import dither
from dither import UserError, checkpoint, files
from dither.checkpoint import SavedTensors, Saver, format, pack, unpack
from dither.checkpoint import read as reading
from dither.checkpoint import write as writing
from dither.checkpoint.format import SavedPiece, SavedTensor, local_part, manifest_bytes
from dither.files import Refused
from dither.models import build, open_model, preset
from dither.models.open import load_weights
from dither.train.config import Config, dumps, override

SHAPES = {
    "matrix": (13, 24),
    "vector": (11,),
    "experts": (4, 6, 5),
    "codes": (16, 8),
    "scalar": (),
    "empty": (3, 0),
    "one": (5,),
}
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
    "fsdp": lambda dim: [Shard(0)],
    "tp": lambda dim: [Shard(min(1, dim - 1))],
    "fsdp x tp rows": lambda dim: [_StridedShard(0, split_factor=2), Shard(0)],
    "fsdp x tp columns": lambda dim: [Shard(0), Shard(dim - 1)],
    "hsdp": lambda dim: [Replicate(), Shard(0)],
    "experts": lambda dim: [Shard(min(1, dim - 1)), Replicate()],
}


def laid(kind: str, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The tensors in a layout; those without dimensions are whole on every rank, and so is one other."""
    found: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        x = whole(name)
        cut = len(shape) > 0 and name != "one"
        found[name] = split(mesh, x, LAYOUTS[kind](len(shape))) if cut else x
    return found


def mesh_of(kind: str) -> DeviceMesh:
    size = dist.get_world_size()
    two = kind in ("fsdp x tp rows", "fsdp x tp columns", "hsdp", "experts")
    return init_device_mesh("cpu", (size // 2, 2) if two else (size,))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


def save_together(folder: Path, step: int, tensors: dict, plain: dict) -> Path:
    """Save with all ranks, or alone without torch.distributed."""
    return checkpoint.save(folder, step, tensors=tensors, plain=plain, group=world())


def world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def write(folder: Path, kind: str) -> None:
    save_together(folder, 7, laid(kind, mesh_of(kind)), {"rank": dist.get_rank()})


def read(folder: Path, kind: str) -> None:
    """Read into a layout, from tensors that hold something else; compare with the parts of the whole."""
    mesh = mesh_of(kind)
    wanted = laid(kind, mesh)
    for tensor in wanted.values():
        local_part(tensor).zero_()
    with SavedTensors(folder / "step-00000007") as saved:
        assert saved.plain == {"rank": 0}
        for name, tensor in wanted.items():
            saved.fill(name, tensor)
    for name, tensor in laid(kind, mesh).items():
        assert torch.equal(bits(local_part(wanted[name])), bits(local_part(tensor))), name


def test_a_layout_is_read_into_another(tmp_path):
    ranks(4, write, tmp_path, "fsdp x tp rows")
    tensors, plain = checkpoint.load(tmp_path / "step-00000007")
    assert plain == {"rank": 0}
    assert {name: bits(x).tolist() for name, x in tensors.items()} == {name: bits(whole(name)).tolist() for name in SHAPES}
    checkpoint.verify(tmp_path / "step-00000007")
    ranks(3, read, tmp_path, "fsdp")
    ranks(3, read, tmp_path, "tp")
    ranks(2, read, tmp_path, "fsdp x tp columns")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("second", "size"), [*itertools.product(LAYOUTS, (2, 4)), ("fsdp", 3), ("tp", 3)])
@pytest.mark.parametrize("first", LAYOUTS)
def test_every_layout_is_read_into_every_other(first, second, size, tmp_path):
    ranks(4, write, tmp_path, first)
    ranks(size, read, tmp_path, second)


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
    "dynamic4": lambda model: dither.optim.AdamW(model.named_parameters(), lr=1e-2, states="dynamic4"),
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
    if optimizer == "sampling":
        made = dither.optim.AdamW(dither.nn.param_groups(model, weight_decay=0.1), lr=1e-2, states="bf16")
    else:
        made = OPTIMIZERS[optimizer](model)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    for step in range(steps):
        with dither.step_context(model, step=step):
            model(x).square().mean().backward()
        made.step()
        made.zero_grad()
    return model, made


def train_and_save(folder: Path, kind: str, optimizer: str) -> None:
    model, made = trained(kind, optimizer, seed=1, steps=2)
    with Saver(folder, group=world()) as saver:
        tensors, plain = pack(model, made, step=2, others={"sequences": 8}, group=world())
        saver.save(2, tensors=tensors, plain=plain)
        for parameter in model.parameters():
            local_part(parameter).fill_(7)  # training continues: the saved values are the earlier ones
        assert saver.wait() == folder / "step-00000002"


def restore_and_save(folder: Path, again: Path, kind: str, optimizer: str) -> None:
    model, made = trained(kind, optimizer, seed=2, steps=1)
    path, skipped = checkpoint.newest(folder)
    assert (path, skipped) == (folder / "step-00000002", [])
    with SavedTensors(path) as saved:
        assert unpack(model, made, saved, saved.plain).others == {"sequences": 8}
    tensors, plain = pack(model, made, step=2, others={"sequences": 8}, group=world())
    save_together(again, 2, tensors, plain)


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
        *(
            only((way, optimizer), kept=(optimizer, number) == ("adam-mini", 1))
            for number, way in enumerate(WAYS)
            for optimizer in OPTIMIZERS
        ),
        only(((2, "fsdp", 3, "fsdp"), "sampling"), kept=False),
    ],
)
def test_training_resumes_in_another_layout(way, optimizer, tmp_path):
    """A loop of one's own. test_train_parallel.py has runs, with 8-bit states, learned bitwidths and SNIP."""
    size, kind, other_size, other = way
    ranks(size, train_and_save, tmp_path / "first", kind, optimizer)
    ranks(other_size, restore_and_save, tmp_path / "first", tmp_path / "second", other, optimizer)
    same_checkpoints(tmp_path / "first", tmp_path / "second")
    model, made = trained("one", optimizer, seed=3, steps=1)  # and in one process, without ranks
    with SavedTensors(tmp_path / "first" / "step-00000002") as saved:
        unpack(model, made, saved, saved.plain)
    tensors, plain = pack(model, made, step=2, others={"sequences": 8})
    checkpoint.save(tmp_path / "third", 2, tensors=tensors, plain=plain)
    same_checkpoints(tmp_path / "first", tmp_path / "third")


class Stage(nn.Module):
    """The layers of a stage, under the names that they have in the whole model."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        for name, module in Tiny().named_children():
            if name in names:
                self.add_module(name, module)

    def steps(self, made: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        made.step()


def save_stages(folder: Path) -> None:
    model = Stage(*(("norm", "up") if dist.get_rank() == 0 else ("down",)))
    made = OPTIMIZERS["dynamic4"](model)
    model.steps(made)
    tensors, plain = pack(model, made, step=2, group=world())
    save_together(folder, 2, tensors, plain)
    alike = nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(2, 2)})  # the same states, of other parameters
    with pytest.raises(UserError, match="Ranks hold different parameters, which need names"):
        pack(alike, torch.optim.AdamW(alike.parameters()), step=2, group=world())


def restore_stages(folder: Path, again: Path) -> None:
    model = Stage(*(("up", "down") if dist.get_rank() == 0 else ("norm",)))
    made = OPTIMIZERS["dynamic4"](model)
    with SavedTensors(folder / "step-00000002") as saved, torch.no_grad():
        model.get_parameter("up.weight" if dist.get_rank() == 0 else "norm.weight").zero_()
        if dist.get_rank() == 0:
            with pytest.raises(UserError, match=r"does not hold the parameters|the model does not"):
                unpack(model, made, saved, saved.plain)
        unpack(model, made, saved, saved.plain, stage=True)
    tensors, plain = pack(model, made, step=2, group=world())
    save_together(again, 2, tensors, plain)


def test_stages_of_a_pipeline_are_one_model(tmp_path):
    ranks(2, save_stages, tmp_path / "first")
    ranks(2, restore_stages, tmp_path / "first", tmp_path / "second")
    model = Stage("norm", "up", "down")
    made = OPTIMIZERS["dynamic4"](model)
    model.steps(made)
    tensors, plain = pack(model, made, step=2)
    for name in ("first", "second"):
        other = Stage("norm", "up", "down")
        optimizer = OPTIMIZERS["dynamic4"](other)
        with SavedTensors(tmp_path / name / "step-00000002") as saved:
            unpack(other, optimizer, saved, saved.plain)
        found, values = pack(other, optimizer, step=2)
        assert values == plain
        assert all(torch.equal(bits(x), bits(found[key])) for key, x in tensors.items() if not key.startswith("rng:"))


# How much is written and read ------------------------------------------------------------------------------------------


def save_large(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(1024, 2048, generator=generator)  # 8 MiB, of which each rank has 2
    tensors = {"matrix": split(mesh, matrix, [Shard(0), Shard(0)])}
    tensors |= {f"same{number}": torch.full((300, 100), float(number)) for number in range(8)}
    written, real = [0], format.as_bytes

    def counted(tensor: torch.Tensor) -> memoryview:
        written[0] = max(written[0], tensor.nbytes)
        return real(tensor)

    with mock.patch.object(format, "as_bytes", counted):
        path = save_together(folder, 2, tensors, {})
    assert written[0] == 2 << 20  # no rank wrote, or held, more than its part at once
    files = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    assert len(files) == 4
    assert max(files.values()) - min(files.values()) < 2048  # replicas are shared out evenly


def load_large(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(1024, 2048, generator=generator)
    wanted = split(mesh, torch.zeros(1024, 2048), [Shard(0), Shard(0)])
    with SavedTensors(folder / "step-00000002") as saved:
        saved.fill("matrix", wanted)
        assert saved.bytes_read <= (2 << 20) + 4 * format.CHUNK  # a quarter, and the rest of the chunks at its ends
    assert torch.equal(wanted.to_local(), split(mesh, matrix, [Shard(0), Shard(0)]).to_local())


def test_no_rank_writes_or_reads_the_whole(tmp_path):
    ranks(4, save_large, tmp_path)
    ranks(4, load_large, tmp_path)
    assert sum(file.stat().st_size for file in (tmp_path / "step-00000002").iterdir()) < (9 << 20) + 100_000


# Kills and errors ------------------------------------------------------------------------------------------------------


def state(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    return {"a": split(mesh, torch.full((6, 4), value), [Shard(0)]), "b": torch.full((3,), value)}


def save_in_thread(folder: Path) -> None:
    with Saver(folder, group=world()) as saver:
        saver.save(2, tensors=state(2.0), plain={"value": 2.0})


def killed(rank: int, size: int, port: int, folder: Path, who: int, name: str) -> None:
    """Save a second step, in which a rank is killed just before it writes a file or renames the folder."""
    join_group(rank, size, port)
    save_together(folder, 1, state(1.0), {"value": 1.0})
    write, rename = files.write_new, writing._rename

    def write_or_die(path, *arguments, **options):
        if rank == who and path.name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, *arguments, **options)

    def rename_or_die(*arguments):
        if rank == who and name == "rename":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(*arguments)

    with (
        mock.patch.object(files, "write_new", write_or_die),
        mock.patch.object(writing, "_rename", rename_or_die),
        pytest.raises(RuntimeError, match=r"closed|reset|peer"),
    ):
        save_in_thread(folder)
    os._exit(0)  # the group is broken: its threads would wait


@pytest.mark.parametrize(
    ("who", "name"),
    [(1, "rank-00001-00000.safetensors"), (1, "rank-00001.json"), (0, "plain.json"), (0, "manifest.json"), (0, "rename")],
)
def test_kill_9_of_a_rank_in_a_save_leaves_the_last_good_checkpoint(who, name, tmp_path):
    processes = start_ranks(killed, 2, tmp_path, who, name).processes
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL if rank == who else 0 for rank in range(2)]
    path, skipped = checkpoint.newest(tmp_path)
    assert (path.name, [each.name for each, _ in skipped]) == ("step-00000001", [".saving-step-00000002"])
    tensors, plain = checkpoint.load(path)
    assert plain == {"value": 1.0}
    assert all(bool((x == 1.0).all()) for x in tensors.values())
    save_together(tmp_path, 3, tensors, plain)  # which clears up
    assert checkpoint.leftovers(tmp_path) == []


def failing(folder: Path) -> None:
    """A full disk on one rank is an error on every rank, with the same words, and the next save works."""
    write = files.write_new

    def full(path, *arguments, **options):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(path, *arguments, **options)

    with Saver(folder, last=2, group=world()) as saver:
        saver.save(1, tensors=state(1.0), plain={})
        saver.wait()
        with mock.patch.object(files, "write_new", full):
            saver.save(2, tensors=state(2.0), plain={})
            with pytest.raises(UserError, match=r"Step 2 cannot be saved.*the disk is full.*was kept: step-00000001"):
                saver.wait()
        dist.barrier()
        assert checkpoint.leftovers(folder) == []
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        mine = {"x": partial if dist.get_rank() == 1 else torch.ones(2)}
        with pytest.raises(UserError, match="'x' has the placement"):
            saver.save(3, tensors=mine, plain={})
        with pytest.raises(UserError, match=r"plain\['a'\] is nan"):
            saver.save(3, tensors=state(3.0), plain={"a": float("nan")})
        unlike = {"x": torch.ones(2 + dist.get_rank())}
        saver.save(3, tensors=unlike, plain={})
        with pytest.raises(UserError, match="the tensor 'x' is"):
            saver.wait()
        for step in (4, 5, 6):
            saver.save(step, tensors=state(float(step)), plain={})
        saver.wait()
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000005", "step-00000006"]
    if dist.get_rank() == 0:
        file = folder / "step-00000006" / "rank-00001-00000.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    path, skipped = checkpoint.newest(folder)
    assert path == folder / "step-00000005"
    assert "rank-00001-00000.safetensors: its SHA-256 at byte 0 is not the saved one" in skipped[0][1]
    if dist.get_rank() == 1:
        with pytest.raises(UserError, match="its SHA-256 at byte 0 is not the saved one"):
            checkpoint.load(folder / "step-00000006")


def test_ranks_without_a_shared_folder(tmp_path):
    with pytest.raises(UserError, match="Rank 1 does not see"):
        writing._write_share(tmp_path / "elsewhere", 1, [], {}, tmp_path)


def test_an_error_on_one_rank_is_an_error_on_every_rank(tmp_path):
    ranks(2, failing, tmp_path)


# Forged checkpoints ----------------------------------------------------------------------------------------------------


def forge(folder: Path, change: Callable[[dict], object]) -> Path:
    """A checkpoint of one rank whose index was changed, with hashes that fit."""
    path = save_together(folder, 1, {"a": torch.ones(4, 2), "b": torch.ones(3)}, {})
    body = json.loads((path / "rank-00000.json").read_text())
    change(body)
    (path / "rank-00000.json").write_bytes(files.to_json(body, "index"))
    entries = {}
    for file in path.iterdir():
        if file.name != "manifest.json":
            data = file.read_bytes()
            entries[file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_bytes(manifest_bytes(1, entries))
    return path


def pieces(*found: list) -> Callable[[dict], object]:
    return lambda body: body["tensors"]["a"].update(pieces=list(found))


FORGED = {
    "overlapping": (pieces([0, [0, 0], [3, 2]], [0, [2, 0], [2, 2]]), "overlap"),
    "same size, overlapping": (pieces([0, [0, 0], [2, 2]], [0, [1, 0], [2, 2]]), "overlap and do not cover"),
    "missing": (pieces([0, [0, 0], [2, 2]]), "do not cover it"),
    "none": (pieces(), "do not cover it"),
    "outside": (pieces([0, [1, 0], [4, 2]]), "not inside"),
    "negative": (pieces([0, [-1, 0], [4, 2]]), "not inside"),
    "empty": (pieces([0, [0, 0], [0, 2]]), "not inside"),
    "fraction": (pieces([0, [0.5, 0], [4, 2]]), "not inside"),
    "other dimensions": (pieces([0, [0], [8]]), "not inside"),
    "another file": (pieces([1, [0, 0], [4, 2]]), "not a file, an offset and a shape"),
    "not a piece": (pieces("x"), "not a file, an offset and a shape"),
    "other pieces": (pieces([0, [0, 0], [2, 2]], [0, [2, 0], [2, 2]]), "not those of its index|has no tensor"),
    "shape": (lambda body: body["tensors"]["a"].update(shape=[4, 3]), "do not cover it"),
    "huge": (
        lambda body: body["tensors"]["a"].update(shape=[1 << 29, 1 << 29], pieces=[[0, [0, 0], [1 << 29, 1 << 29]]]),
        "more bytes than",
    ),
    "impossible": (lambda body: body["tensors"]["a"].update(shape=[1 << 70]), "is impossible"),
    "dtype": (lambda body: body["tensors"]["a"].update(dtype="I32"), "not those of its index|has no tensor"),
    "unknown dtype": (lambda body: body["tensors"]["a"].update(dtype="F4"), "type of 'a' is unknown"),
    "name": (lambda body: body["tensors"].update({"../a": body["tensors"].pop("a")}), "of the name"),
    "file of another rank": (lambda body: body["files"][0].update(name="rank-00001-00000.safetensors"), "not its own"),
    "chunks": (lambda body: body["files"][0].update(chunks=["0" * 64]), "chunks|at byte 0"),
    "no chunks": (lambda body: body["files"][0].update(chunks=[]), "does not have 1 hashes"),
    "chunk": (lambda body: body.update(chunk=1), "chunks of 1048576 bytes"),
    "no tensors": (lambda body: body.pop("tensors"), "not an index"),
    "list": (lambda body: body.update(tensors=[]), "not an index"),
}


@pytest.mark.parametrize(("change", "message"), FORGED.values(), ids=FORGED)
def test_forged_indexes_are_refused(change, message, tmp_path):
    path = forge(tmp_path, change)
    for read_it in (checkpoint.verify, checkpoint.load):
        with pytest.raises(UserError, match=message):
            read_it(path)
    assert checkpoint.newest(tmp_path)[0] is None


def test_missing_indexes_and_strange_files_are_refused(tmp_path):
    path = forge(tmp_path / "good", lambda body: None)
    assert set(checkpoint.load(path)[0]) == {"a", "b"}
    (path / "rank-00000.json").unlink()
    with pytest.raises(UserError, match=r"rank-00000\.json is missing"):
        checkpoint.load(path)
    path = forge(tmp_path / "extra", lambda body: None)
    (path / "setup.py").write_text("")
    with pytest.raises(UserError, match="not in its manifest"):
        checkpoint.load(path)
    data = (path / "rank-00000-00000.safetensors").read_bytes()
    entries = {"plain.json": {"bytes": 3, "sha256": hashlib.sha256(b"{}\n").hexdigest()}}
    entries["rank-00000-00000.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "setup.py").unlink()
    (path / "rank-00000.json").unlink()
    (path / "manifest.json").write_bytes(manifest_bytes(1, entries))
    with pytest.raises(UserError, match="no index names the file"):
        checkpoint.load(path)


def test_many_irregular_pieces_take_no_time(tmp_path):
    def change(body: dict) -> None:
        cuts = [[0, [row, 0], [1, 2]] for row in range(4)]
        body["tensors"]["a"].update(shape=[4, 2], pieces=cuts * 1_000)

    with pytest.raises(UserError, match="overlap"):
        checkpoint.load(forge(tmp_path, change))
    # As many cuts in each direction as there are pieces: the grid has the square of their number.
    steps = [SavedPiece("", "", (i, i), (1, 1)) for i in range(5_000)]
    irregular = SavedTensor(torch.float32, (5_000, 5_000), [*steps, SavedPiece("", "", (0, 0), (4_999, 5_000))])
    with pytest.raises(Refused, match="cut too irregularly"):
        format.check_cover("a", irregular)


# Whole models ----------------------------------------------------------------------------------------------------------


def test_models_are_read_from_sharded_checkpoints(tmp_path):
    config = dumps(override(Config(), ["model.preset=tiny"]))
    model = build(preset("tiny", vocab_size=64), seed=3)
    made = dither.optim.AdamW(model.named_parameters(), lr=1e-3)
    tensors, plain = pack(model, made, step=4, others={"config": config}, group=world())
    path = save_together(tmp_path / "checkpoints", 4, tensors, plain)
    loaded = open_model(path).model
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())
    other = build(preset("tiny", vocab_size=64), seed=5)
    load_weights(other, path)
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in model.state_dict().items())


WIDE = {
    "split": ("llama", lambda model: dither.optim.AdamW(model.named_parameters(), lr=1e-2, master="split")),
    "split24": ("llama", lambda model: dither.optim.AdamW(model.named_parameters(), lr=1e-2, master="split24")),
    "kahan": ("llama", lambda model: dither.optim.AdamW(model.named_parameters(), lr=1e-2, weights="kahan")),
    "Adam-mini": (
        "gpt2",
        lambda model: dither.optim.AdamMini(model.named_parameters(), dither.optim.roles(model), lr=1e-2, master="fp32"),
    ),
}


def load_wide(path: Path) -> None:
    """Load the weights of a checkpoint into a model that is sharded."""
    expected = open_model(path).model
    model = build(expected.config, seed=5)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    load_weights(model, path)
    for name, weight in expected.named_parameters():
        found = model.get_parameter(name)
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), weight), name


@pytest.mark.parametrize("kind", WIDE)
def test_masters_are_read_into_sharded_models(kind, tmp_path):
    family, make = WIDE[kind]
    sizes = "model.preset=gpt2-124m" if family == "gpt2" else "model.preset=tiny"
    config = override(Config(), [sizes, "model.layers=1", "model.width=32", "model.heads=2"])
    model = build(config.model.sizes(64), seed=3, dtype=torch.bfloat16)
    made = make(model)
    for step in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        made.step()
    tensors, plain = pack(model, made, step=2, others={"config": dumps(config)})
    path = checkpoint.save(tmp_path, 2, tensors=tensors, plain=plain)
    opened = open_model(path).model
    for name, parameter in model.named_parameters():
        assert torch.equal(opened.get_parameter(name), made.wide_weight(parameter)), name
    ranks(2, load_wide, path)


def test_a_checkpoint_of_one_process_is_read_in_parts(tmp_path):
    path = checkpoint.save(tmp_path, 7, tensors={name: whole(name) for name in SHAPES}, plain={"rank": 0})
    ranks(2, read, tmp_path, "fsdp")
    ranks(2, read, tmp_path, "tp")
    with SavedTensors(path) as saved, mock.patch.object(reading, "BLOCK", 64), mock.patch.object(reading, "ROW", 16):
        for name in SHAPES:
            assert torch.equal(bits(saved.box(name)), bits(whole(name)))
        assert torch.equal(saved.box("experts", [(1, 3), (2, 5), (1, 4)]), whole("experts")[1:3, 2:5, 1:4])
    file = path / "rank-00000-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with SavedTensors(path) as saved, pytest.raises(UserError, match="its SHA-256 at byte 0 is not the saved one"):
        saved.box("matrix")
