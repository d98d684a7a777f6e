"""Checkpoints of torch.distributed.checkpoint and torchtitan: read as torch reads them, and nothing in them is executed."""

import functools
import itertools
import json
import os
import pickle
import time
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import ranks

from dither import UserError, cli
from dither.checkpoint.foreign import METADATA_NAMES, DcpSafetensors, DcpTensors, is_dcp, loads, saved_tensor
from dither.commands.train import _starting_from
from dither.files import Refused
from dither.models import Llama, LlamaConfig, build, find_model, open_model
from dither.models.llama import rotary_angles, rotate
from dither.models.open import halves_from_pairs, load_weights, rotates, titan_names
from dither.train.config import Config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {"a.weight": torch.randn(7, 6, generator=generator), "b": torch.randn(5, generator=generator).bfloat16()}
    found |= {"count": torch.tensor(3), "e4m3": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn)}
    return found | {"half": torch.randn(3, 2, generator=generator).half().t(), "flag": torch.tensor([True, False])}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )


def save_sharded(folder: Path) -> None:
    """Save with DCP, both in its own format and as safetensors, from ranks that hold uneven parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = functools.partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)], src_data_rank=None)
    state = {name: cut(x) if x.dim() == 2 else x for name, x in tensors().items()}
    dcp.save({"model": state, "step": 7, "train_state": {"losses": [1.5, 2.5]}}, checkpoint_id=folder / "dcp")
    plain = {name: x for name, x in state.items() if name not in ("e4m3", "flag")}  # which that writer does not know
    dcp.save(plain, storage_writer=HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True))


def test_what_ranks_saved_is_read_as_torch_reads_it(tmp_path):
    ranks(2, save_sharded, tmp_path)
    wanted = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in tensors().items()}
    dcp.load({"model": wanted}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with DcpTensors(tmp_path / "dcp") as source:
        assert {name.removeprefix("model.") for name in source.tensors if name.startswith("model.")} == set(wanted)
        assert len(source.tensors["model.a.weight"].pieces) == 2
        for name, x in wanted.items():
            assert equal(source.box(f"model.{name}"), x), name
            assert equal(x, tensors()[name]), name
        assert torch.equal(source.box("model.a.weight", [(3, 5), (1, 4)]), tensors()["a.weight"][3:5, 1:4])
    theirs = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in wanted.items() if name not in ("e4m3", "flag")}
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(tmp_path / "hf")), no_dist=True)
    with DcpSafetensors(tmp_path / "hf") as source:
        assert set(source.tensors) == set(theirs)
        assert len(source.tensors["a.weight"].pieces) == 2
        assert all(equal(source.box(name), x) for name, x in theirs.items())


# torchtitan -----------------------------------------------------------------------------------------------------------

SIZES = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def pairs_from_halves(weight: torch.Tensor, head_size: int) -> torch.Tensor:
    return weight.reshape(-1, 2, head_size // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def test_queries_and_keys_of_neighbouring_pairs_give_the_same_attention():
    x, weights = torch.randn(5, 32), [torch.randn(16, 32) for _ in "qk"]
    cos, sin = rotary_angles(SIZES, 5, torch.device("cpu"))
    theirs, ours = [], []
    for weight in weights:  # as torchtitan rotates: complex numbers of neighbouring columns
        pairs = torch.view_as_complex((x @ weight.t()).view(5, 2, 4, 2))
        turned = pairs * torch.polar(torch.ones(5, 4), torch.atan2(sin, cos)[:, :4])[:, None]
        theirs.append(torch.view_as_real(turned).flatten(-2).transpose(0, 1))
        ours.append(rotate((x @ halves_from_pairs(weight, 8).t()).view(5, 2, 8).transpose(0, 1), cos, sin))
    assert torch.allclose(theirs[0] @ theirs[1].transpose(1, 2), ours[0] @ ours[1].transpose(1, 2), atol=1e-4)


@pytest.mark.parametrize(("prefix", "version"), [("", 0), ("model.", -1)])
def test_weights_of_torchtitans_llama(prefix, version, tmp_path):
    torch.manual_seed(1)
    model = Llama(SIZES)
    state = {}
    for name, value in model.state_dict().items():
        value = pairs_from_halves(value, SIZES.head_dim) if rotates(name) else value
        state[prefix + titan_names(name)[version]] = value
    assert f"{prefix}layers.1.feed_forward.w2.weight" in state
    others = {"optimizer": {"state": torch.ones(3)}, "train_state": {"step": 5}}
    dcp.save(state | others, checkpoint_id=tmp_path / "titan", no_dist=True)
    torch.manual_seed(2)
    other = Llama(SIZES)
    load_weights(other, tmp_path / "titan")
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in model.state_dict().items())
    assert is_dcp(tmp_path / "titan")
    assert _starting_from(tmp_path / "titan", Config(), own=False).model.weights == str(tmp_path / "titan")
    with pytest.raises(UserError, match=r"has no tensor 'model\.layers\.2"):
        load_weights(Llama(replace(SIZES, num_hidden_layers=3)), tmp_path / "titan")
    with pytest.raises(UserError, match="has the shape"):
        load_weights(Llama(replace(SIZES, intermediate_size=128)), tmp_path / "titan")


def test_a_run_starts_from_a_folder_of_dcp(tmp_path):
    model = build("tiny", vocab_size=257, seed=9)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "text.txt").write_text("all work and no play " * 400)
    small = ["data.sequence=32", "data.batch=4", "run.steps=1", "run.eval_sequences=2", "run.sample_every=0", "run.device=cpu"]
    command = ["train", "--from", str(tmp_path / "dcp"), "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--set", "model.preset=tiny", "optim.lr=1e-9", "optim.min_lr=0", *small]) == 0
    origin = json.loads((tmp_path / "run" / "origin.json").read_text())
    assert origin["kind"] == "dcp"
    assert origin["path"] == str(tmp_path / "dcp")
    assert origin["sha256"] == find_model(tmp_path / "dcp").sha256()
    trained = open_model(tmp_path / "run").model.state_dict()
    assert all(torch.allclose(x, trained[name], atol=1e-7) for name, x in model.state_dict().items())
    assert cli.main(["train", "--resume", "--out", str(tmp_path / "run"), "--set", "run.steps=2"]) == 0
    with pytest.raises(UserError, match="does not describe its model"):
        open_model(tmp_path / "dcp")


# Hostile files --------------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def forged(folder: Path, **changes: object) -> Path:
    """A checkpoint of one tensor, in which some fields are wrong."""
    folder.mkdir()
    with open(folder / "__0_0.distcp", "wb") as file:
        torch.save(changes.pop("tensor", torch.ones(2, 2)), file)
    length = (folder / "__0_0.distcp").stat().st_size
    size = torch.Size((2, 2))
    chunk = ChunkStorageMetadata(torch.Size(changes.pop("offsets", (0, 0))), torch.Size(changes.pop("sizes", size)))
    chunks = [chunk] * changes.pop("count", 1)
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(changes.pop("size", size)), chunks)
    place = _StorageInfo(changes.pop("file", "__0_0.distcp"), changes.pop("at", 0), changes.pop("length", length))
    metadata = Metadata({"w": entry}, changes.pop("planner", {}), {MetadataIndex("w", chunk.offsets): place})
    assert not changes
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "../../etc/passwd.distcp"}, "names the file"),
        ({"file": "/etc/passwd"}, "names the file"),
        ({"at": -1}, "has the place"),
        ({"length": 10**15}, "ends before"),
        ({"length": 100}, "archive cannot be read"),
        ({"sizes": (2, 3)}, "not there"),
        ({"sizes": (1, 2)}, "do not cover it"),
        ({"count": 2}, "overlap"),
        ({"size": (2, 10**12), "sizes": (2, 10**12)}, "more bytes than"),
        ({"tensor": torch.ones(2, 2).half()}, "where the metadata says"),
        ({"tensor": [1]}, "not a plain tensor"),
        ({"tensor": torch.nn.Linear(2, 2)}, "names 'torch.nn.modules.linear.Linear'"),
    ],
)
def test_forged_checkpoints_are_refused(changes, message, tmp_path):
    path = forged(tmp_path / "forged", **changes)
    with pytest.raises(UserError, match=message), DcpTensors(path) as source:
        source.box("w")


def test_nothing_is_executed(tmp_path):
    path = forged(tmp_path / "good")
    assert torch.equal(DcpTensors(path).box("w"), torch.ones(2, 2))
    canary = tmp_path / "executed"
    for place in ({"planner": Evil(canary)}, {"tensor": Evil(canary)}):
        path = forged(tmp_path / f"evil {len(os.listdir(tmp_path))}", **place)
        with pytest.raises(UserError, match=r"names 'posix\.mkdir'"):
            DcpTensors(path).box("w")
    for data in (
        pickle.dumps(Evil(canary)),
        pickle.dumps(Evil(canary), 0),
        b"cposix\nmkdir\n(S'x'\ntR.",
        b"\x80\x04",
        b"garbage",
        b"",
    ):
        with pytest.raises(Refused):
            loads(data, METADATA_NAMES)
    with zipfile.ZipFile(tmp_path / "zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"x" * 1000)
    with pytest.raises(Refused, match="compressed"):
        saved_tensor((tmp_path / "zip").read_bytes(), torch.float32, (2,))
    assert not canary.exists()


def nested(depth: int) -> bytes:
    """Opcodes of a tuple that holds the one before it twice, and so on: 2^depth elements, if anyone counts them."""
    at = [(n + 1000).to_bytes(4, "little") for n in range(depth + 1)]
    return b"K\x01r" + at[0] + b"".join(b"j" + a + b"\x86r" + b for a, b in itertools.pairwise(at))


DEEP = b"K\x01" + b"\x85" * 100_000
"""Opcodes of a tuple in a tuple in a tuple."""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (nested(9) + b".", "is not the metadata of DCP"),
        (nested(30) + b".", "is not the metadata of DCP"),
        (b"}" + nested(30) + b"K\x01s.", "has a tuple as a key"),
        (b"(" + nested(30) + b"K\x01d.", "not a pickle"),
        (b"\x8f(" + nested(30) + b"\x90.", "not a pickle"),  # a set
        (b"ctorch\nSize\n" + nested(30) + b"\x85R.", "is not the metadata of DCP"),
        (b"ccollections\nOrderedDict\n" + nested(30) + b"\x85R.", "not a pickle"),
        (DEEP + b".", "is not the metadata of DCP"),
        (b"]" * 100_000 + b"a" * 99_999 + b".", "is not the metadata of DCP"),
        (b"(" * 50_000 + b"t" * 50_000 + b".", "is not the metadata of DCP"),
        (b"Nr\xff\xff\xff\x7f.", "is not the metadata of DCP"),  # a memo of two billion entries
        (b"B\xff\xff\xff\x7f.", "not a pickle"),  # two gigabytes of text
        (b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", "not a pickle"),
        (b"ccollections\nOrderedDict\nN}X\x08\x00\x00\x00__init__Ns\x86b.", "not a pickle"),
        (b"ctorch\nSize\nN}X\x07\x00\x00\x00__new__Ns\x86b.", "not a pickle"),
    ],
)
def test_hostile_metadata_is_refused_at_once_and_in_one_line(data, message, tmp_path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + data)
    began = time.process_time()
    with pytest.raises(UserError, match=message) as caught:
        DcpTensors(tmp_path)
    assert "\n" not in str(caught.value)
    assert time.process_time() - began < 2
    assert loads(pickle.dumps(OrderedDict(a=torch.Size((2,)))), METADATA_NAMES)["a"].arguments == ((2,),)


@pytest.mark.parametrize(
    "value", [nested(30), DEEP, b"(" + nested(30) + b"t", b"K\x01"], ids=["nested", "deep", "in a tuple", "a number"]
)
def test_hostile_values_in_metadata_are_refused_at_once_and_in_one_line(value, tmp_path):
    info = _StorageInfo("__0_0.distcp", 0, 1000)
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 2)))
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((2, 2)), [chunk])
    fields = [(info, "relative_path"), (info, "offset"), (info, "length"), (chunk, "offsets"), (chunk, "sizes")]
    for thing, name in [*fields, (entry, "size"), (entry, "chunks"), (entry, "properties")]:
        kept = getattr(thing, name)
        object.__setattr__(thing, name, "PLACE")
        data = pickle.dumps(Metadata({"w": entry}, {}, {MetadataIndex("w", torch.Size((0, 0))): info}), 2)
        object.__setattr__(thing, name, kept)
        written = b"X\x05\x00\x00\x00PLACE"
        assert data.count(written) == 1
        (tmp_path / ".metadata").write_bytes(data.replace(written, value))
        with pytest.raises(UserError) as caught, DcpTensors(tmp_path) as source:
            source.box("w")
        assert "\n" not in str(caught.value)
