"""Checkpoints: exact both ways, whole after every kill, refused after every change; a resumed run is the straight run."""

import errno
import hashlib
import json
import os
import random
import resource
import runpy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import examples
from worlds import forked

import dither
from dither import Sampling, UserError, files
from dither.checkpoint import Saver, format, keep, leftovers, load, newest, pack, save, unpack, verify, write
from dither.checkpoint.format import manifest_bytes
from dither.checkpoint.read import SavedTensors
from dither.checkpoint.state import plan_of
from dither.models import Llama, LlamaConfig

TENSORS = {"weight": torch.arange(12, dtype=torch.float32).view(3, 4).to(torch.bfloat16), "step": torch.tensor(7)}


def some(value: float = 1.0, count: int = 6) -> dict[str, torch.Tensor]:
    return {"a": torch.full((count,), value), "b": torch.tensor(int(value))}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bytes(format.as_bytes(a)) == bytes(format.as_bytes(b))


# Round trips ----------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    found = {}
    for name in draw(st.lists(st.from_regex(r"[a-zA-Z0-9_:]+(\.[a-z0-9]+)*", fullmatch=True), max_size=5, unique=True)):
        dtype = draw(st.sampled_from(list(format.DTYPE_NAMES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = torch.Size(shape).numel() * dtype.itemsize
        data = draw(st.binary(min_size=size, max_size=size))
        data = bytes(byte & 1 for byte in data) if dtype == torch.bool else data
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        found[name] = raw.view(dtype).view(shape)
    return found


plains = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None, max_examples=examples(40), derandomize=True)
@given(tensors(), st.dictionaries(st.text(), plains, max_size=4), st.integers(0, 10**12 - 1))
def test_what_is_saved_is_loaded(tmp_path_factory, tensors, plain, step):
    folder = tmp_path_factory.mktemp("round")
    path = save(folder, step, tensors=tensors, plain=plain)
    assert path == folder / f"step-{step:08d}"
    found, values = load(path)
    assert set(found) == set(tensors)
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    assert values == plain
    assert json.dumps(values) == json.dumps(plain)  # 1 is not 1.0, and 0.0 is not -0.0
    assert newest(folder) == (path, [])


def test_safetensors_reads_what_is_written_and_the_other_way_round(tmp_path):
    given = {"t.BOOL": torch.tensor([True, False, True])}  # three bytes, after which nothing wider would be aligned
    for dtype, name in format.DTYPE_NAMES.items():
        given.setdefault(f"t.{name}", torch.arange(48, dtype=torch.uint8).view(dtype))
    path = save(tmp_path, 1, tensors=given, plain={})
    header, _ = format.read_header(path / T)
    assert all(tensor.begin % tensor.dtype.itemsize == 0 for tensor in header.values())
    theirs = safetensors.torch.load_file(path / T)
    assert set(theirs) == {f"{name}@0" for name in given}
    assert all(same(theirs[f"{name}@0"], tensor) for name, tensor in given.items())
    safetensors.torch.save_file(given, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    header, metadata = format.read_header(tmp_path / "theirs.safetensors")
    data = (tmp_path / "theirs.safetensors").read_bytes()
    assert metadata == {"format": "pt"}
    assert all((header[name].dtype, header[name].shape) == (x.dtype, tuple(x.shape)) for name, x in given.items())
    assert all(data[header[name].begin :].startswith(format.as_bytes(x).tobytes()) for name, x in given.items())


def test_tensors_that_do_not_lie_in_a_row_and_share_memory(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    given = {"t": base.t(), "column": base[:, 1], "whole": base, "parameter": torch.nn.Parameter(base)}
    found, _ = load(save(tmp_path, 0, tensors=given, plain={}))
    assert all(same(found[name], tensor.detach()) for name, tensor in given.items())


def test_states_beside_their_counts_are_read_once(tmp_path):
    counts = {f"{number}:step": torch.tensor(number) for number in range(12)}  # they come first in the file
    states = {f"{number}:average": torch.full((100_000,), float(number)) for number in range(12)}
    with SavedTensors(save(tmp_path, 1, tensors=counts | states, plain={})) as saved:
        for number in range(12):
            assert saved.read(f"{number}:step") == number
            assert (saved.read(f"{number}:average") == number).all()
    (file,) = saved.path.glob("*.safetensors")
    assert saved.bytes_read == file.stat().st_size


def test_many_tensors_take_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "FILE_BYTES", 100)
    given = {str(i): torch.full((10 + 10 * (i == 3),), float(i)) for i in range(7)}
    path = save(tmp_path, 0, tensors=given, plain={})
    assert [len(safetensors.torch.load_file(file)) for file in sorted(path.glob("rank-00000-*"))] == [2, 1, 1, 2, 1]
    assert all(same(load(path)[0][name], tensor) for name, tensor in given.items())


@pytest.mark.parametrize(
    ("tensors", "plain", "step", "message"),
    [
        ({"": torch.ones(1)}, {}, 0, "name has 1 to 512"),
        ({"../../x": torch.ones(1)}, {}, 0, "name has 1 to 512"),
        ({"a..b": torch.ones(1)}, {}, 0, "name has 1 to 512"),
        ({"<script>": torch.ones(1)}, {}, 0, "name has 1 to 512"),
        ({"a\nb": torch.ones(1)}, {}, 0, "name has 1 to 512"),
        ({"a\n": torch.ones(1)}, {}, 0, "name has 1 to 512"),
        ({"__metadata__": torch.ones(1)}, {}, 0, "name has 1 to 512"),
        ({"x" * 513: torch.ones(1)}, {}, 0, "name has 1 to 512"),
        ({1: torch.ones(1)}, {}, 0, "name has 1 to 512"),
        ({"a": 1.0}, {}, 0, "'a' is a float, not a tensor"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, {}, 0, "'a' is torch.strided of torch.complex64"),
        ({"a": torch.ones(2, 2).to_sparse()}, {}, 0, "'a' is torch.sparse_coo"),
        ({"a": torch.ones(1, device="meta")}, {}, 0, "'a' is a meta tensor"),
        ({}, {"a": float("nan")}, 0, r"plain\['a'\] is nan"),
        ({}, {"a": [1, float("inf")]}, 0, r"plain\['a'\]\[1\] is inf"),
        ({}, {"a": (1, 2)}, 0, r"plain\['a'\] is a tuple"),
        ({}, {"a": {1: 2}}, 0, r"plain\['a'\] has the key 1"),
        ({}, {"a": torch.ones(1)}, 0, r"plain\['a'\] is a Tensor"),
        ({}, {"a": 10**5000}, 0, "plain cannot be saved"),
        ({}, {"a": "x" * (65 << 20)}, 0, "more than 64 MiB"),
        ({}, {}, -1, "step is an integer from 0 on"),
        ({}, {}, True, "step is an integer from 0 on"),
        ({}, {}, 1.0, "step is an integer from 0 on"),
    ],
)
def test_what_cannot_be_kept_is_not_saved(tensors, plain, step, message, tmp_path):
    with pytest.raises(UserError, match=message):
        save(tmp_path, step, tensors=tensors, plain=plain)
    assert list(tmp_path.iterdir()) == []


def test_too_many_levels(tmp_path):
    deep: dict = {}
    for _ in range(65):
        deep = {"a": deep}
    with pytest.raises(UserError, match="more than 64 levels"):
        save(tmp_path, 0, tensors={}, plain=deep)


# Kills ----------------------------------------------------------------------------------------------------------------

KILLER = """
import os, signal, sys
import torch
from dither import files
from dither import checkpoint
from dither.checkpoint import format, write

torch.set_num_threads(1)
OWN = {write.__file__, files.__file__, format.__file__}

def lines(work, at):
    "Run `work` and count the lines of ours that it comes through; kill -9 before line number `at`."
    seen = 0
    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename not in OWN and "shutil" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    work()
    sys.settrace(None)
    return seen

def forked(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]

def state(value):
    return {f"t{i}": torch.full((50,), value) for i in range(4)}

def scene(folder, kind, at):
    checkpoint.save(folder, 100, tensors=state(1.0), plain={"value": 1.0})
    if kind == "replace":
        checkpoint.save(folder, 200, tensors=state(2.0), plain={"value": 2.0})
    if kind == "keep":
        checkpoint.save(folder, 200, tensors=state(2.0), plain={"value": 2.0})
        return lines(lambda: checkpoint.keep(folder, last=1), at)
    return lines(lambda: checkpoint.save(folder, 200, tensors=state(3.0), plain={"value": 3.0}), at)

root = sys.argv[1]
for kind, count in zip(("new", "replace", "keep"), map(int, sys.argv[2:])):
    total = scene(f"{root}/{kind}-whole", kind, 0)
    for trial in range(count):
        at = 1 + trial * (total - 1) // (count - 1)
        status = forked(lambda: scene(f"{root}/{kind}-{trial}", kind, at))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (kind, at, total, status)
"""


def _script(*arguments):
    sys.argv = list(arguments)
    runpy.run_path(arguments[0])


def test_kill_9_anywhere_in_a_save_or_removal_loses_nothing(tmp_path):
    counts = {"new": 12, "replace": 8, "keep": 4}
    (tmp_path / "killer.py").write_text(KILLER)
    code, said = forked(_script, str(tmp_path / "killer.py"), str(tmp_path), *map(str, counts.values()))
    assert code == 0, said
    found: dict[str, set[tuple[str, float]]] = {"new": set(), "replace": set(), "keep": set()}
    for kind, values in found.items():
        for trial in range(counts[kind]):
            folder = tmp_path / f"{kind}-{trial}"
            path, skipped = newest(folder)
            tensors, plain = load(path)
            assert all(bool((tensor == plain["value"]).all()) for tensor in tensors.values())
            assert {left for left in leftovers(folder) if left != path} == {left for left, _ in skipped}
            values.add((path.name, plain["value"]))
            if kind != "keep":
                assert load(folder / "step-00000100")[1] == {"value": 1.0}
            save(folder, 300, tensors=tensors, plain=plain)  # the next save clears up
            assert leftovers(folder) == []
            assert newest(folder) == (folder / "step-00000300", [])
    assert found["new"] == {("step-00000100", 1.0), ("step-00000200", 3.0)}  # both sides of the rename were met
    assert {("step-00000200", 2.0), ("step-00000200", 3.0)} <= found["replace"]
    assert found["keep"] == {("step-00000200", 2.0)}


def test_a_checkpoint_that_was_moved_away_for_another_is_found(tmp_path):
    save(tmp_path, 100, tensors=some(1), plain={})
    path = save(tmp_path, 200, tensors=some(2), plain={})
    path.rename(tmp_path / ".replaced-step-00000200")  # where a kill between two renames leaves it
    assert newest(tmp_path) == (tmp_path / ".replaced-step-00000200", [])
    save(tmp_path, 300, tensors=some(3), plain={})
    assert load(path)[0]["b"] == 2


def test_a_step_is_saved_again(tmp_path):
    path = save(tmp_path, 100, tensors=some(1), plain={})
    before = path.stat().st_ino
    assert save(tmp_path, 100, tensors=some(1), plain={}).stat().st_ino == before  # whole and the same: left alone
    (path / "plain.json").write_bytes(b"{ }")
    assert save(tmp_path, 100, tensors=some(1), plain={}).stat().st_ino != before  # not whole any more
    save(tmp_path, 100, tensors=some(5), plain={})
    assert load(path)[0]["b"] == 5
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000100"]


# A full disk ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 100, tensors=some(1), plain={})
    bytes_gone = SimpleNamespace(f_files=1000, f_favail=500, f_bavail=2000, f_frsize=1000)
    inodes_gone = SimpleNamespace(f_files=1000, f_favail=3, f_bavail=10**9, f_frsize=1000)
    for usage, why in (
        (bytes_gone, r"the disk is full: 4\.0 MB are needed, and 2\.0 MB are free"),
        (inodes_gone, "the disk has too few inodes: 5 are needed, and 3 of 1,000 are free"),
    ):
        monkeypatch.setattr(os, "statvfs", lambda _, usage=usage: usage)
        with pytest.raises(UserError, match=rf"Step 200 cannot be saved in .*: {why}; the last good .* kept: step-00000100\."):
            save(tmp_path, 200, tensors=some(1.0, 1_000_000), plain={})
        assert [each.name for each in tmp_path.iterdir()] == ["step-00000100"]


@pytest.mark.parametrize("at", range(6))
def test_a_disk_that_gets_full_on_the_way(at, tmp_path, monkeypatch):
    save(tmp_path, 100, tensors=some(1), plain={})
    real, calls = files.write_new, []

    def write_new(path, chunks, **options):
        calls.append(path)
        if len(calls) == at + 1:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, chunks, **options)

    monkeypatch.setattr(files, "write_new", write_new)
    monkeypatch.setattr(write, "FILE_BYTES", 24)
    if at == 5:  # there are two files of tensors, their index, plain.json and the manifest
        save(tmp_path, 200, tensors=some(2), plain={})
        return
    with pytest.raises(UserError, match=r"the disk is full .* the last good checkpoint was kept: step-00000100\."):
        save(tmp_path, 200, tensors=some(2), plain={})
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000100"]
    assert newest(tmp_path)[0].name == "step-00000100"


def test_a_write_that_the_system_refuses(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(UserError, match=r"Step 200 cannot be saved in .*File too large; there is no earlier checkpoint\."):
            save(tmp_path, 200, tensors=some(1, 1_000_000), plain={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be saved"):
        save(tmp_path / "file", 1, tensors={}, plain={})
    with pytest.raises(UserError, match="is not a folder of checkpoints"):
        newest(tmp_path / "file")
    assert newest(tmp_path / "none") == (None, [])


# Damage ---------------------------------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    """The one sentence with which a checkpoint is refused, by name."""
    with pytest.raises(UserError) as caught:
        load(path)
    with pytest.raises(UserError):
        verify(path)
    said = str(caught.value)
    assert said.startswith(f"The checkpoint {str(path)!r} ")
    assert said.endswith(".")
    assert "\n" not in said
    assert len(said) < 700
    return said


def test_flipped_bits_and_truncations_are_refused(tmp_path):
    path = save(tmp_path, 100, tensors=some(3.0, 40), plain={"list": [1, 2.5, "text"], "more": {"a": None}})
    draw, flips, cuts = random.Random(0), 0, 0
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for at in range(len(whole)):
            data = bytearray(whole)
            data[at] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
            with pytest.raises(UserError, match=r"The checkpoint .* is refused"):
                load(path)
            flips += 1
        for length in {0, 1, 7, 8, len(whole) // 2, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(10))}:
            file.write_bytes(whole[:length])
            assert file.name in refused(path)
            cuts += 1
        file.write_bytes(whole + b"\n")
        assert file.name in refused(path)
        file.write_bytes(whole)
        verify(path)
    assert flips >= 700
    assert cuts >= 30


def test_the_newest_whole_one_is_found_and_the_rest_is_told(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step, tensors=some(step), plain={})
    (tmp_path / "step-00000300" / "manifest.json").unlink()
    damaged = tmp_path / "step-00000200" / T
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    (tmp_path / ".saving-step-00000400").mkdir()
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    path, skipped = newest(tmp_path)
    assert path.name == "step-00000100"
    assert [each.name for each, _ in skipped] == [".saving-step-00000400", "step-00000300", "step-00000200"]
    assert "unfinished" in skipped[0][1]
    assert "no manifest.json" in skipped[1][1]
    assert "SHA-256" in skipped[2][1]
    assert keep(tmp_path, last=1) == [tmp_path / "step-00000200"]  # the only whole one stays
    assert newest(tmp_path)[0] == path


# Hostile checkpoints --------------------------------------------------------------------------------------------------


T, INDEX = "rank-00000-00000.safetensors", "rank-00000.json"


def shard(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


GOOD = shard({"a@0": entry()}, bytes(8))
PICKLE = b"cos\nsystem\n(S'touch %s'\ntR."

# Files whose manifest is right: sizes and hashes do not help against these.
FORGED = {
    "header longer than the file": {T: shard({"a@0": entry()}, bytes(8), length=1 << 40)},
    "header of 2^64": {T: b"\xff" * 16},
    "empty file": {T: b""},
    "seven bytes": {T: b"\0" * 7},
    "not JSON": {T: shard(b"nonsense")},
    "not UTF-8": {T: shard(b'{"\xff": 1}')},
    "list": {T: shard([])},
    "a pickle": {T: PICKLE},
    "key twice": {
        T: shard(
            b'{"a@0":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a@0":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
        )
    },
    "entry is a number": {T: shard({"a@0": 1})},
    "entry without shape": {T: shard({"a@0": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8))},
    "entry with more": {T: shard({"a@0": entry(code="import os")}, bytes(8))},
    "unknown type": {T: shard({"a@0": entry("F128")}, bytes(8))},
    "type is a list": {T: shard({"a@0": entry(["F32"])}, bytes(8))},
    "type is wider": {T: shard({"a@0": entry("F64")}, bytes(8))},
    "shape is larger": {T: shard({"a@0": entry(shape=[3])}, bytes(8))},
    "shape is smaller": {T: shard({"a@0": entry(shape=[1])}, bytes(8))},
    "shape is negative": {T: shard({"a@0": entry(shape=[-2])}, bytes(8))},
    "shape is a fraction": {T: shard({"a@0": entry(shape=[2.0])}, bytes(8))},
    "shape is true": {T: shard({"a@0": entry(shape=[2, True])}, bytes(8))},
    "shape is text": {T: shard({"a@0": entry(shape="2")}, bytes(8))},
    "shape overflows": {T: shard({"a@0": entry(shape=[1 << 32, 1 << 32, 0], offsets=[0, 0])})},
    "shape is huge": {T: shard({"a@0": entry(shape=[10**30], offsets=[0, 4 * 10**30])}, bytes(8))},
    "many dimensions": {T: shard({"a@0": entry(shape=[1] * 100 + [2])}, bytes(8))},
    "range beyond the end": {T: shard({"a@0": entry(shape=[4], offsets=[0, 16])}, bytes(8))},
    "range backwards": {T: shard({"a@0": entry(offsets=[8, 0])}, bytes(8))},
    "range of three": {T: shard({"a@0": entry(offsets=[0, 4, 8])}, bytes(8))},
    "ranges overlap": {T: shard({"a@0": entry(), "b@0": entry()}, bytes(8))},
    "hole between ranges": {T: shard({"a@0": entry(), "b@0": entry(offsets=[12, 20])}, bytes(20))},
    "bytes after the end": {T: shard({"a@0": entry()}, bytes(9))},
    "path as a name": {T: shard({"../../etc/passwd": entry()}, bytes(8))},
    "script as a name": {T: shard({"<script>alert(1)</script>": entry()}, bytes(8))},
    "empty name": {T: shard({"": entry()}, bytes(8))},
    "line in a name": {T: shard({"a\nb": entry()}, bytes(8))},
    "metadata is a number": {T: shard({"__metadata__": 1})},
    "metadata of objects": {T: shard({"__metadata__": {"a": {}}})},
    "booleans of 2": {T: shard({"a@0": entry("BOOL", [1], [0, 1])}, b"\2")},
    "deep header": {T: shard(b'{"a":' * 5000 + b"1" + b"}" * 5000)},
    "a file without an index": {"rank-00000-00001.safetensors": GOOD},
    "an index without a file": {T: None},
    "another tensor": {T: shard({"b@0": entry()}, bytes(8))},
    "one tensor more": {T: shard({"a@0": entry(), "b@0": entry(offsets=[8, 16])}, bytes(16))},
    "no index": {INDEX: None},
    "index is a list": {INDEX: b"[]"},
    "index is a pickle": {INDEX: PICKLE},
    "plain is a list": {"plain.json": b"[]"},
    "plain is empty": {"plain.json": b""},
    "plain is NaN": {"plain.json": b'{"a": NaN}'},
    "plain is infinite": {"plain.json": b'{"a": -Infinity}'},
    "plain overflows": {"plain.json": b'{"a": 1e999}'},
    "plain has a key twice": {"plain.json": b'{"a": 1, "a": 2}'},
    "plain is deep": {"plain.json": b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}"},
    "plain has 65 levels": {"plain.json": b'{"a":' + b"[" * 65 + b"]" * 65 + b"}"},
    "plain has a long integer": {"plain.json": b'{"a": ' + b"9" * 5000 + b"}"},
    "plain is a pickle": {"plain.json": PICKLE},
    "plain is UTF-16": {"plain.json": '{"a": 1}'.encode("utf-16")},
    "file with another name": {"evil.py": b"import os"},
    "file with a path": {"../../evil": b""},
    "absolute file": {"/etc/hostname": b""},
    "a .bin": {"pytorch_model.bin": PICKLE},
    "no plain": {"plain.json": None},
}


def forge(path: Path, contents: dict[str, bytes | None]) -> Path:
    """A checkpoint of these files, with a manifest in which everything is right."""
    path.mkdir()
    tensor_file = contents.get(T) or GOOD
    shape, dtype = ([1], "BOOL") if tensor_file.endswith(b"\2") else ([2], "F32")
    chunks = [hashlib.sha256(tensor_file).hexdigest()] if tensor_file else []
    index = {
        "chunk": format.CHUNK,
        "files": [{"name": T, "chunks": chunks if contents.get(T) != b"" else []}],
        "tensors": {"a": {"dtype": dtype, "shape": shape, "pieces": [[0, [0], shape]]}},
    }
    own = {T: GOOD, INDEX: json.dumps(index).encode(), "plain.json": b"{}"}
    contents = {name: data for name, data in (own | contents).items() if data is not None}
    for name, data in contents.items():
        if "/" not in name:
            (path / name).write_bytes(data)
    entries = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    (path / "manifest.json").write_bytes(manifest_bytes(1, entries))
    return path


def test_a_forged_checkpoint_without_a_fault_loads(tmp_path):
    tensors, plain = load(forge(tmp_path / "step-00000001", {}))
    assert same(tensors["a"], torch.zeros(2))
    assert plain == {}
    load(forge(tmp_path / "best", {}))  # under another name, too


@pytest.mark.parametrize("contents", FORGED.values(), ids=FORGED)
def test_forged_checkpoints_are_refused(contents, tmp_path):
    refused_load = forge(tmp_path / "step-00000001", contents)
    with pytest.raises(UserError) as caught:
        load(refused_load)
    said = str(caught.value)
    assert said.startswith(f"The checkpoint {str(refused_load)!r} is refused: ")
    assert said.endswith(".")
    assert "\n" not in said
    assert len(said) < 700
    assert newest(tmp_path)[0] is None or contents == FORGED["booleans of 2"]  # which only reading the tensors shows


MANIFESTS = {
    "not JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 100000,
    "another format": b'{"format": "x"}',
    "no version": b'{"format": "dither checkpoint"}',
    "version true": b'{"format": "dither checkpoint", "version": true}',
    "an earlier version": b'{"format": "dither checkpoint", "version": 2, "step": 1, "files": {}}',
    "a later version": b'{"format": "dither checkpoint", "version": 4, "step": 1, "files": {}}',
    "no step": b'{"format": "dither checkpoint", "version": 3, "files": {}}',
    "negative step": b'{"format": "dither checkpoint", "version": 3, "step": -1, "files": {}}',
    "files a list": b'{"format": "dither checkpoint", "version": 3, "step": 1, "files": []}',
    "file a number": b'{"format": "dither checkpoint", "version": 3, "step": 1, "files": {"plain.json": 1}}',
    "size a text": b'{"format":"dither checkpoint","version":3,"step":1,"files":{"plain.json":{"bytes":"2","sha256":""}}}',
    "no hash": b'{"format": "dither checkpoint", "version": 3, "step": 1, "files": {"plain.json": {"bytes": 2}}}',
    "no plain": b'{"format": "dither checkpoint", "version": 3, "step": 1, "files": {}}',
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_wrong_manifests_are_refused(manifest, tmp_path):
    path = forge(tmp_path / "step-00000001", {})
    (path / "manifest.json").write_bytes(manifest)
    refused(path)


def test_a_manifest_in_which_only_the_spacing_differs(tmp_path):
    path = forge(tmp_path / "step-00000001", {})
    (path / "manifest.json").write_text(json.dumps(json.loads((path / "manifest.json").read_text())))
    assert "manifest.json was changed" in refused(path)


def test_another_step_by_name(tmp_path):
    assert "its manifest is that of step 1" in refused(forge(tmp_path / "step-00000002", {}))


def test_links_devices_pipes_and_strangers_are_refused(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(GOOD)

    def scene(name: str) -> Path:
        return forge(tmp_path / name, {})

    path = scene("link to a file")
    (path / T).unlink()
    (path / T).symlink_to(elsewhere)
    assert "is a link" in refused(path)
    path = scene("link to zeros")
    (path / "plain.json").unlink()
    (path / "plain.json").symlink_to("/dev/zero")
    assert "is a link" in refused(path)
    path = scene("manifest is a link")
    (path / "manifest.json").rename(tmp_path / "manifest")
    (path / "manifest.json").symlink_to(tmp_path / "manifest")
    assert "is a link" in refused(path)
    path = scene("manifest is a pipe")
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    assert "not a regular file" in refused(path)
    path = scene("a pipe")
    (path / T).unlink()
    os.mkfifo(path / T)
    assert "not a regular file" in refused(path)
    path = scene("a folder")
    (path / T).unlink()
    (path / T).mkdir()
    assert "not a regular file" in refused(path)
    path = scene("a stranger")
    (path / "setup.py").write_text("raise SystemExit")
    assert "'setup.py' is not in its manifest" in refused(path)
    path = scene("missing")
    (path / T).unlink()
    assert f"{T} is missing" in refused(path)
    (tmp_path / "step-00000009").symlink_to(scene("step-00000001"))
    assert "it is a link" in refused(tmp_path / "step-00000009")
    assert newest(tmp_path)[0] == tmp_path / "step-00000001"
    assert "no such folder" in refused(tmp_path / "none")
    assert "not a folder" in refused(elsewhere)
    with pytest.raises(UserError, match="no such folder"):
        load("a\0b")


def test_links_are_not_followed_when_old_checkpoints_are_removed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("here")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "step-00000001").symlink_to(precious)
    (folder / ".saving-step-00000002").symlink_to(precious)
    save(folder, 100, tensors=some(), plain={})
    assert keep(folder, last=1) == [folder / "step-00000001"]
    assert [each.name for each in folder.iterdir()] == ["step-00000100"]
    assert (precious / "file").read_text() == "here"


# What is kept ---------------------------------------------------------------------------------------------------------


def test_keep(tmp_path):
    for step in range(100, 1100, 100):
        save(tmp_path, step, tensors=some(step), plain={})
    removed = keep(tmp_path, last=2, every=400)
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [400, 800, 900, 1000]
    assert len(removed) == 6
    assert keep(tmp_path, last=2, every=400) == []
    for last, every in ((0, None), (True, None), (1.0, None), (1, 0), (1, -5), (None, 1)):
        with pytest.raises(UserError, match="at least 1"):
            keep(tmp_path, last=last, every=every)


def test_nothing_is_removed_where_nothing_is_whole(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:08d}").mkdir()
    assert keep(tmp_path, last=1) == []


# Saving in a thread ---------------------------------------------------------------------------------------------------


def test_a_saver_saves_what_was_there_one_at_a_time(tmp_path, monkeypatch):
    tensors = some(0.0, 1000)
    plain = {"value": 0}
    real, begin, running, at_once = write._write, threading.Event(), [], []

    def slow_write(*arguments):
        assert begin.wait(60)
        running.append(threading.current_thread().name)
        at_once.append(len(running))
        path = real(*arguments)
        running.pop()
        return path

    monkeypatch.setattr(write, "_write", slow_write)
    with Saver(tmp_path, last=2) as saver:
        saver.prepare(tensors)  # which locks memory for those on a GPU, and changes nothing
        saver.save(0, tensors=tensors, plain=plain)
        tensors["a"] += 1  # before a byte is written
        plain["value"] = 1
        begin.set()
        for step in (1, 2, 3):
            saver.save(step, tensors=tensors, plain=plain)
            tensors["a"] += 1
            plain["value"] += 1
            found, values = load(tmp_path / f"step-{step - 1:08d}")
            assert bool((found["a"] == step - 1).all())
            assert values == {"value": step - 1}
        assert saver.wait() == tmp_path / "step-00000003"
        assert saver.wait() is None
    assert at_once == [1, 1, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    with pytest.raises(UserError, match="is closed"):
        saver.save(4, tensors=tensors, plain=plain)


def test_a_saver_tells_of_an_error_at_the_next_call(tmp_path):
    (tmp_path / "file").write_text("")
    for call in ("save", "wait", "close"):
        saver = Saver(tmp_path / "file")
        saver.save(1, tensors=some(), plain={})
        with pytest.raises(UserError, match="Step 1 cannot be saved"):
            saver.save(2, tensors=some(), plain={}) if call == "save" else getattr(saver, call)()
        saver.close()
    with Saver(tmp_path / "run") as saver, pytest.raises(UserError, match="name has 1 to 512"):
        saver.save(1, tensors={"": torch.ones(1)}, plain={})  # at once where it can be seen at once


# A resumed run is the straight run ------------------------------------------------------------------------------------

SIZES = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64, tie_word_embeddings=True
)


class Dropped(torch.nn.Module):
    """A model that draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(tokens, 64).to(self.linear.weight.dtype)
        y = self.linear(torch.nn.functional.dropout(x, 0.5))
        return torch.nn.functional.cross_entropy(y.flatten(0, 1).float(), targets.flatten())


def build(kind: str, seed: int):
    """A model, what trains it, its plan, and what scales its loss."""
    torch.manual_seed(seed)
    model = Dropped() if kind == "dropout" else Llama(SIZES)
    plan = None
    if kind in ("fp8-delayed", "fp8-static", "mxfp4"):
        plan = dither.recipe(kind)
    elif kind == "sampling":
        plan = dither.Plan(default=dither.LayerPrecision()).with_sampling(Sampling(block=8, parts="od"))
    if plan is not None:
        dither.convert(model, plan, seed=5)
    scaler = None
    if kind == "fp16":
        run = dither.optim.training(model, "fp16", lr=1e-2)
        run.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=2)  # overflows at first
        return model, run.optimizer, plan, scaler
    if kind in ("bf16-sr", "kahan", "dynamic8", "dynamic4"):
        model.to(torch.bfloat16)
    if kind == "adam-mini":
        roles = dither.optim.roles(model)
        return model, dither.optim.AdamMini(model.named_parameters(), roles, lr=1e-2, max_norm=1.0), plan, None
    if kind in ("dropout", "torch"):
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, None
    options = {"states": kind} if kind.startswith("dynamic") else {"weights": "kahan"} if kind == "kahan" else {}
    groups = dither.nn.bitwidths.param_groups(model, bitwidth_lr=0.05)
    return model, dither.optim.AdamW(groups, lr=1e-2, max_norm=1.0, **options), plan, scaler


def train(model, optimizer, scaler, steps) -> None:
    for step in steps:
        tokens = dither.Stream(1, "data", "tokens").bits(step, (2, 17), width=8) % 64
        with dither.step_context(model, step=step):
            loss = model(tokens[:, :-1].long(), tokens[:, 1:].long()) + dither.bitwidth_loss(model)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def fingerprint(model, optimizer, scaler) -> str:
    """SHA-256 of every weight, buffer and optimizer state."""
    tensors, plain = pack(model, optimizer, step=0, scaler=scaler)
    found = hashlib.sha256(json.dumps(plain).encode())
    for name in sorted(tensors):
        found.update(name.encode() + format.as_bytes(tensors[name]))
    return found.hexdigest()


KINDS = ["fp32", "bf16-sr", "kahan", "dynamic8", "dynamic4", "adam-mini"]
KINDS += ["fp8-delayed", "fp8-static", "mxfp4", "sampling", "fp16", "torch", "dropout"]


@pytest.mark.sampled(only=["bf16-sr", "dynamic4", "adam-mini", "fp8-delayed", "sampling", "torch", "dropout"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_straight_run(kind, tmp_path):
    model, optimizer, plan, scaler = build(kind, seed=1)
    start = fingerprint(model, optimizer, scaler)
    train(model, optimizer, scaler, range(3))
    tensors, plain = pack(model, optimizer, step=3, plan=plan, scaler=scaler, others={"position": [6, 0.5, "x"]})
    path = save(tmp_path, 3, tensors=tensors, plain=plain)
    train(model, optimizer, scaler, range(3, 6))
    straight = fingerprint(model, optimizer, scaler)

    model, optimizer, _, scaler = build(kind, seed=2)  # other weights and another generator, until they are loaded
    resumed = unpack(model, optimizer, *load(path), scaler=scaler)
    assert (resumed.step, resumed.plan, resumed.others) == (3, plan, {"position": [6, 0.5, "x"]})
    train(model, optimizer, scaler, range(3, 6))
    assert fingerprint(model, optimizer, scaler) == straight != start


def test_bitwidths_that_rest_come_back(tmp_path):
    model, optimizer, plan, _ = build("sampling", seed=1)
    train(model, optimizer, None, range(2))
    learned = {name: p.detach().clone() for name, p in model.named_parameters() if "bitwidth" in name}
    assert all(bool((p != 1).any()) for p in learned.values())
    off = dither.Plan(default=dither.LayerPrecision())
    dither.Conversion.of(model).switch(off)
    tensors, plain = pack(model, optimizer, step=2, plan=off)
    path = save(tmp_path, 2, tensors=tensors, plain=plain)

    model, optimizer, _, _ = build("sampling", seed=2)
    tensors, plain = load(path)
    with pytest.raises(UserError, match="bring it to the saved plan"):
        unpack(model, optimizer, tensors, plain)
    dither.Conversion.of(model).switch(plan_of(plain))
    unpack(model, optimizer, tensors, plain)
    dither.Conversion.of(model).switch(plan)
    for name, p in learned.items():
        assert same(dict(model.named_parameters())[name].detach(), p)


NORM = "model.norm.weight"


def without(given: dict, key: str) -> dict:
    return {name: value for name, value in given.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, p: (t, {}), "keys step, same"),
        (lambda t, p: (t, p | {"step": -1}), "step of a training"),
        (lambda t, p: (t, p | {"step": True}), "step of a training"),
        (lambda t, p: (t, p | {"others": []}), "keys step, same"),
        (lambda t, p: (t, p | {"more": 1}), "keys step, same"),
        (lambda t, p: (t, p | {"same": {}}), "tied weights"),
        (lambda t, p: (t, p | {"layers": []}), "layers are not an object"),
        (lambda t, p: (t, p | {"layers": {}}), "the checkpoint does not"),
        (lambda t, p: (t, p | {"layers": p["layers"] | {"x": {}}}), "the model does not"),
        (lambda t, p: (t, p | {"layers": dict.fromkeys(p["layers"], 1)}), "precision of the layer"),
        (lambda t, p: (t, p | {"plan": {"version": 99}}), "version 99"),
        (lambda t, p: (t, p | {"plan": 1}), "plan"),
        (lambda t, p: (t, p | {"scaler": {"scale": 1.0}}), "loss scale has scale"),
        (lambda t, p: (t, p | {"scaler": [1]}), "loss scale"),
        (lambda t, p: (t, p | {"optimizer": 1}), "groups and numbers"),
        (lambda t, p: (t, p | {"optimizer": {"groups": [], "numbers": {}}}), "0 parameter groups"),
        (lambda t, p: (t, p | {"optimizer": {"groups": [1, 2, 3], "numbers": {}}}), "does not hold the parameters"),
        (lambda t, p: (t, p | {"optimizer": p["optimizer"] | {"numbers": {"99": {"x": 1}}}}), "parameter '99'"),
        (lambda t, p: (t, p | {"optimizer": p["optimizer"] | {"numbers": {NORM: {"x": 1}}}}), "this optimizer keeps"),
        (lambda t, p: (t, p | {"optimizer": p["optimizer"] | {"numbers": {NORM: 1}}}), "this optimizer keeps"),
        (
            lambda t, p: (t, p | {"optimizer": {"numbers": {}, "groups": [g | {"lr": "x"} for g in p["optimizer"]["groups"]]}}),
            "lr='x'",
        ),
        (
            lambda t, p: (
                t,
                p | {"optimizer": {"numbers": {}, "groups": [g | {"betas": [1]} for g in p["optimizer"]["groups"]]}},
            ),
            r"betas=\[1\]",
        ),
        (
            lambda t, p: (
                t,
                p | {"optimizer": {"numbers": {}, "groups": [without(g, "lr") for g in p["optimizer"]["groups"]]}},
            ),
            "lr=None",
        ),
        (
            lambda t, p: (t, p | {"optimizer": {"numbers": {}, "groups": [g | {"seed": 9} for g in p["optimizer"]["groups"]]}}),
            "seed=9",
        ),
        (
            lambda t, p: (
                t,
                p | {"optimizer": {"numbers": {}, "groups": [g | {"steps": 10**30} for g in p["optimizer"]["groups"]]}},
            ),
            "does not fit AdamW",
        ),
        (lambda t, p: (without(t, "model:model.norm.weight"), p), "the checkpoint does not"),
        (lambda t, p: (t | {"model:x": torch.ones(1)}, p), "the model does not"),
        (lambda t, p: (t | {"model:model.norm.weight": torch.ones(1)}, p), "build it as the saved one was"),
        (lambda t, p: (t | {"model:model.norm.weight": torch.ones(32).half()}, p), "build it as the saved one was"),
        (lambda t, p: (t | {"resting:nothing:bitwidth": torch.ones(1)}, p), "does not have"),
        (lambda t, p: (t | {"resting": torch.ones(1)}, p), None),
        (lambda t, p: (t | {"resting:": torch.ones(1)}, p), "does not have"),
        (lambda t, p: (t | {"optimizer:0": torch.ones(1)}, p), "parameter '0'"),
        (lambda t, p: (t | {"optimizer:x:exp_avg": torch.ones(1)}, p), "parameter 'x'"),
        (lambda t, p: (t | {f"optimizer:{NORM}:exp_avg": torch.ones(1)}, p), "this optimizer keeps"),
        (lambda t, p: (t | {f"optimizer:{NORM}:evil": torch.ones(1)}, p), "this optimizer keeps"),
        (
            lambda t, p: (t | {f"optimizer:{NORM}:step": t[f"optimizer:{NORM}:step"].reshape(1)}, p),
            r"as \(1,\), and it is one number",
        ),
        (lambda t, p: (t | {"rng:cpu": torch.ones(3)}, p), "state of the generator 'cpu'"),
    ],
)
def test_what_does_not_fit_is_said_by_name(change, message, state):
    model, optimizer, tensors, plain = state
    tensors, plain = change(dict(tensors), dict(plain))
    if message is None:
        unpack(model, optimizer, tensors, plain)
        return
    before = model.model.norm.weight.detach().clone()
    with pytest.raises(UserError, match=message) as caught:
        unpack(model, optimizer, tensors, plain)
    assert "\n" not in str(caught.value)
    assert same(model.model.norm.weight.detach(), before)


@pytest.fixture(scope="module")
def state():
    model, optimizer, plan, _ = build("sampling", seed=1)
    train(model, optimizer, None, range(1))
    tensors, plain = pack(model, optimizer, step=1, plan=plan)
    tensors, plain = {name: t.detach().clone() for name, t in tensors.items()}, json.loads(json.dumps(plain))
    return model, optimizer, tensors, plain
