"""`dither bench`: rows, files and comparisons by planted numbers; suites and the command on a CPU; modes of training steps."""

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dither import cli, files
from dither.errors import UserError
from dither.nn.stored import StoredLinear
from dither.tools import bench, bench_kernels, bench_plan, bench_train
from dither.tools.bench import Bench, Beside, Case, Results, Row

BASELINE = Path(__file__).parent.parent / "benchmarks" / "baseline.json"
CPU = torch.device("cpu")
MACHINE = {"device": "cpu", "dither": "0.1.0", "torch": "2", "Triton": "3"}
ROW = Row(
    suite="kernels",
    name="cast, 8 x 8",
    ms=2.0,
    peers=(Beside("torch", 3.0), Beside("torchao", why="torchao is not installed")),
    limit=Beside("a copy", 1.5),
    peak_gib=0.5,
)


@pytest.fixture
def path():
    """Undo what a suite adds to the path of modules."""
    before = list(sys.path)
    yield
    sys.path[:] = before


# Rows and files -------------------------------------------------------------------------------------------------------


def test_ratios_are_times_of_others_over_ours():
    assert ROW.ratios == {"torch": 1.5, "a copy": 0.75}
    assert replace(ROW, ms=None).ratios == {}
    assert bench.cells(replace(ROW, tokens=5000))[1:4] == ("2.00", "2500.00", "0.50")
    assert "torchao: torchao is not installed" in bench.cells(ROW)[4]


def test_a_file_has_the_rows_that_were_written(tmp_path):
    results = Results(machine=MACHINE).with_row(ROW).with_row(replace(ROW, name="other", ms=None, why="not enough memory"))
    results = results.with_row(replace(ROW, ms=4.0))  # in place of the first
    paths = bench.write(results, tmp_path / "new" / "folder")
    assert bench.read(paths[0]) == results
    assert [row.ms for row in results.rows] == [4.0, None]
    text = paths[1].read_text()
    assert "| cast, 8 x 8 | 4.00 |" in text
    assert "not enough memory" in text


def damaged():
    """Contents that are no results of this version."""
    sound = Results(machine=MACHINE, rows=(ROW,)).to_dict()
    row = sound["rows"][0]
    yield b"{", "is not JSON"
    yield b"[]", "not a result of `dither bench`"
    yield {**sound, "version": 2}, "it has version 2, and this is version 1"
    yield {**sound, "machine": None}, "damaged"
    yield {**sound, "machine": {"device": 3}}, "damaged"
    yield {**sound, "rows": {}}, "damaged"
    yield {**sound, "rows": [3]}, "damaged"
    fields = {"ms": ("2", -1.0, 0), "name": (3,), "peers": ({}, [None]), "more": (1,)}
    for wrong in ({name: value} for name, values in fields.items() for value in values):
        yield {**sound, "rows": [row | wrong]}, "damaged"
    yield {**sound, "rows": [row | {"limit": {"name": "a copy", "ms": True}}]}, "damaged"


@pytest.mark.parametrize(("content", "why"), damaged())
def test_a_damaged_file_is_a_sentence_and_the_rest_goes_on(content, why, tmp_path):
    path = tmp_path / "bench.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(files.Refused, match=why):
        bench.read(path)
    sentence = bench.comparable(path, MACHINE)
    assert isinstance(sentence, str)
    assert why in sentence
    begun = bench.begin(MACHINE, tmp_path)
    assert begun.rows == ()
    assert why in begun.notes[0]
    assert (tmp_path / "bench-old-1.json").exists()


def test_a_folder_is_continued_on_the_same_machine_only(tmp_path):
    bench.write(Results(machine=MACHINE, rows=(ROW,)), tmp_path)
    assert bench.begin(MACHINE, tmp_path).rows == (ROW,)
    other = bench.begin({**MACHINE, "torch": "3"}, tmp_path)
    assert other.rows == ()
    assert "other versions" in other.notes[0]
    assert bench.read(tmp_path / "bench-old-1.json").rows == (ROW,)
    assert bench.begin(MACHINE, None).rows == ()


# Comparison -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "flagged"), [(0.94, True), (0.96, False), (1.0, False), (1.2, False)])
def test_a_fall_of_six_percent_is_flagged_and_one_of_four_is_not(factor, flagged):
    now = replace(ROW, peers=(Beside("torch", 3.0 * factor),))
    found = bench.falls([now], Results(machine=MACHINE, rows=(ROW,)))
    assert found == (["kernels, cast, 8 x 8: the speed relative to torch fell by 6.0%, from 1.50 to 1.41."] if flagged else [])


def test_a_slower_machine_is_no_fall_and_a_slower_row_is():
    base = Results(machine=MACHINE, rows=(ROW,))
    slower = replace(ROW, ms=4.0, peers=(Beside("torch", 6.0),), limit=Beside("a copy", 3.0))
    assert bench.falls([slower], base) == []
    assert len(bench.falls([replace(ROW, ms=4.0)], base)) == 2


def test_what_was_not_compared_is_said():
    base = Results(machine=MACHINE, rows=(ROW,))
    assert bench.falls([replace(ROW, name="other")], base) == ["Nothing was compared: the baseline has none of these ratios."]
    (sentence,) = bench.falls([replace(ROW, ms=None, why="not enough memory")], base)
    assert sentence.endswith("was not measured: not enough memory.")


def test_a_baseline_of_another_device_is_not_compared():
    sentence = bench.comparable(BASELINE, MACHINE)
    assert sentence == "Nothing is compared with 'baseline.json': it was measured on NVIDIA H200, and this device is cpu."
    with pytest.raises(UserError, match="There is no file"):
        bench.comparable(BASELINE.with_name("none.json"), MACHINE)


def test_the_rows_of_the_baseline_are_those_of_the_suites(monkeypatch):
    """A row of another name would never be compared."""
    found = bench.read(BASELINE)
    gpu = Bench(torch.device("cuda"))
    assert found.machine["device"] == "NVIDIA H200"
    assert "docs/benchmarks.md" in found.source
    known = {(case.suite, case.name) for suite in (bench_kernels, bench_plan) for case in suite.cases(gpu)}
    for row in found.rows:
        if row.suite == "train":
            size, mode, _ = row.name.split(", ")
            assert [case.name for case in bench_train.cases(gpu, [size], [mode])] == [row.name]
            assert {peer.name for peer in row.peers} <= set(bench_train.peers_of(mode))
        else:
            assert (row.suite, row.name) in known
        assert row.ratios


# Suites on a CPU ------------------------------------------------------------------------------------------------------


def test_a_case_that_fails_is_a_row_and_the_rest_goes_on():
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    done = []
    cases = [Case("kernels", "first", fail), Case("kernels", "second", lambda: ROW)]
    rows = list(bench.run(cases, CPU, lambda *count: done.append(count)))
    assert rows == [Row(suite="kernels", name="first", why="not enough memory"), ROW]
    assert done == [(1, 2), (2, 2)]


def test_a_missing_peer_says_so():
    def make():
        import package_that_nobody_has  # noqa: F401

    found = bench.measured_peer("it", make, lambda work: 1.0)
    assert found == Beside("it", why="package_that_nobody_has is not installed, nor unpacked in the folder of --peer")
    assert bench.measured_peer("it", lambda: None, lambda work: 1.0) == Beside("it", 1.0)


def test_a_peer_in_a_folder_is_found(tmp_path, path):
    (tmp_path / "package_of_a_peer.py").write_text("value = 3")
    bench.use_peers(str(tmp_path))
    import package_of_a_peer

    assert package_of_a_peer.value == 3
    with pytest.raises(UserError, match="There is no folder"):
        bench.use_peers(str(tmp_path / "none"))


def test_limits_are_proportional_to_the_work(monkeypatch):
    monkeypatch.setattr(bench, "BUFFER", 1000)
    monkeypatch.setattr(bench, "_copy_ms", lambda size, device: size / 1e3)
    assert bench.copy_limit(1000, CPU) == Beside("a copy", 0.5)
    assert bench.copy_limit(8000, CPU) == Beside("a copy", 4.0)  # by a copy of 1000 bytes
    monkeypatch.setattr(bench, "_product_ms", lambda unit, n, device: {"fp8": 1.0, "bf16": 2.0, "fp32": 8.0}[unit])
    gpu = torch.device("cuda")
    flop = 2 * 8192**3
    assert bench.product_limit(2 * flop, ["bf16"], gpu) == Beside("a product in bf16", 4.0)
    assert bench.product_limit(flop, ["bf16-group", "fp8-container"], gpu) == Beside("a product in fp8", 1.0)
    assert bench.product_limit(2 * 512**3, ["fp8"], CPU) == Beside("a product in fp32", 8.0)
    assert "KeyError" in bench.product_limit(flop, ["int8"], gpu).why  # units that the GPU does not have
    assert "nvfp4 units" in bench.product_limit(flop, ["nvfp4"], gpu).why


FIRST = (
    *("cast e4m3 tile(128) fp32 nearest, one", "sample uniform", "gradients of", "cross entropy", "optimizer"),
    "linear layer, fp8-current",
)
"""Beginnings of names, of which the first row of each is measured."""


def test_operations_are_timed_beside_torch_and_a_limit():
    known = list(bench_kernels.cases(Bench(CPU, quick=True)))
    for beginning in FIRST:
        case = next(case for case in known if case.name.startswith(beginning))
        row = case.measure()
        assert (row.suite, row.name) == ("kernels", case.name)
        assert row.ms > 0
        assert row.limit.ms > 0
        for peer in row.peers:
            assert peer.ms > 0 if not peer.name.startswith("torchao") else "not installed" in peer.why
    names = [case.name for case in bench_kernels.cases(Bench(CPU))]
    assert len(names) == len(set(names)) > len(known)


@pytest.mark.parametrize("text", ["e4m3 tile(128)", "e4m3 row", "e4m3 tensor"])
def test_the_peer_of_a_cast_does_the_same_work(text):
    cast = bench_kernels.Cast.parse(text)
    x = bench_kernels.matrix(128, 256, CPU, torch.bfloat16)
    ours, scale = bench_kernels.cast_call(x, cast, "one layout")()[:2]
    theirs, other = bench_kernels.plain_cast(x, cast)
    assert torch.allclose(scale.flatten(), other.flatten(), rtol=1e-6)
    same = (ours.view(torch.uint8) == theirs.view(torch.uint8)).float().mean()
    assert same > 0.99  # ours is exact; the peer's product with a rounded scale may cross the middle between two codes


@pytest.fixture
def small(monkeypatch):
    """Make the tiny size of training steps smaller."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = replace(bench_train.SIZES["tiny"][0], num_hidden_layers=1, vocab_size=64, **shape)
    monkeypatch.setitem(bench_train.SIZES, "tiny", (config, 2, 2048))
    settings = bench_train.StepSettings("cpu", sequence=16, warmup=1, steps=1)
    monkeypatch.setattr(bench_train, "settings_of", lambda bench: settings)
    monkeypatch.setattr(bench_plan, "settings_of", bench_train.settings_of)


def test_training_steps_of_the_guides_precisions(small):
    modes = [*bench_train.MODES, "torchao-rowwise"]
    rows = [case.measure() for case in bench_train.cases(Bench(CPU), ["tiny"], modes)]
    assert [row.name for row in rows] == [f"tiny, {mode}, 2 x 16 tokens" for mode in modes]
    *measured, missing = rows
    for row in measured:
        assert row.why == ""
        assert row.ms > 0
        assert row.tokens == 32
        assert set(row.ratios) == {"a product in fp32", *(() if "o1" in row.name else ["o1"])}
    assert "torchao is not installed" in missing.why
    assert [peer.name for peer in rows[modes.index("recipe:fp8-current")].peers] == ["o1", "torchao-tensorwise"]


@pytest.mark.parametrize(
    "mode",
    [
        "recipe:fp8-current+sr+companded8+host+release+chunked+checkpointing+input+none",
        "recipe:fp8-current+sr+fp8-weights+dynamic4+release+chunked",
        "bf16-sr+chunked+checkpointing",
    ],
)
def test_training_steps_in_little_memory(small, mode):
    found = bench_train.measure("tiny", [mode], bench_train.settings_of(Bench(CPU)))[mode]
    assert found.ms > 0, found.why
    built = bench_train.build("tiny", mode, bench_train.settings_of(Bench(CPU)))
    assert built.model.loss_rows > 0
    assert ("fp8-weights" in mode) == any(isinstance(module, StoredLinear) for module in built.model.modules())


def test_modes_take_turns_in_one_process(small):
    rows = [case.measure() for case in bench_train.cases(Bench(CPU), ["tiny"], ["o1", "bf16-sr"], together=True)]
    assert rows[1].peers == (Beside("o1", rows[0].ms),)


def test_modes_compile_ahead_of_their_turn():
    settings = bench_train.StepSettings("cpu", sequence=8, warmup=0, steps=1, batch=1)
    cases = [("tiny", "o1"), ("tiny", "torchao-rowwise"), ("tiny", "bf16-sr")]
    ahead = bench_train.Ahead(cases, settings, 1)
    found = {mode: ahead.measured(size, mode) for size, mode in cases}
    assert found["o1"].ms > 0
    assert found["bf16-sr"].ms > 0
    assert "torchao" in found["torchao-rowwise"].why


def test_too_little_memory_is_said(small, monkeypatch):
    here = bench_train.cpu_here()
    monkeypatch.setattr(bench_train, "cpu_here", lambda: replace(here, memory=1 << 10))
    (case,) = bench_train.cases(Bench(CPU), ["tiny"], ["o1"])
    assert "needs" in case.measure().why


def test_the_cost_of_a_plan(small):
    rows = [case.measure() for case in bench_plan.cases(Bench(CPU, quick=True))]
    assert len(rows) == 4
    assert all(row.ms > 0 and row.peers[0].ms > 0 for row in rows)
    assert rows[0].limit.ms > 0


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_compares_and_flags(small, tmp_path, capsys):
    words = ["bench", "train", "--modes", "o1", "bf16-sr", "-o", str(tmp_path)]
    assert cli.main(words) == 0
    assert "bf16-sr, 2 x 16 tokens" in capsys.readouterr().out
    found = bench.read(tmp_path / "bench.json")
    assert len(found.rows) == 2
    fast = tuple(replace(row, ms=row.ms / 100) for row in found.rows)  # a baseline that no run reaches
    (tmp_path / "fast").mkdir()
    bench.write(Results(machine=found.machine, rows=fast), tmp_path / "fast")
    assert cli.main([*words[:4], "--against", str(tmp_path / "fast" / "bench.json"), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["format"] == "dither-bench"
    assert all("fell by" in sentence for sentence in result["fallen"])
    assert cli.main([*words[:4], "--against", str(BASELINE)]) == 1
    streams = capsys.readouterr()
    assert "it was measured on NVIDIA H200, and this device is cpu" in streams.out
    assert "it was measured on NVIDIA H200" in streams.err  # before anything is measured


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["bench", "kernel"], "kernels"),
        (["bench", "kernels", "--modes", "o1"], "--modes is for training steps"),
        (["bench", "kernels", "--together"], "--together is for training steps"),
        (["bench", "plan", "--ahead", "2"], "--ahead is for training steps"),
        (["bench", "train", "--ahead", "1", "--together"], "--ahead is the number of processes"),
        (["bench", "kernels", "--sizes", "1b"], "--sizes are those of train and plan"),
        (["bench", "train", "--sizes", "2b"], "There is no size '2b'"),
        (["bench", "train", "--modes", "fp7"], "There is no mode 'fp7'"),
        (["bench", "train", "--modes", "recipe:fp8-blok"], "did you mean 'fp8-block'"),
        (["bench", "train", "--peer", "nowhere"], "There is no folder 'nowhere'"),
        (["bench", "train", "--against", "nothing.json"], "There is no file 'nothing.json'"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, capsys):
    assert cli.main(words) == 2
    assert sentence in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err


# Modes of training steps ----------------------------------------------------------------------------------------------


def listed():
    """The modes of the docstring, with examples for its capital words."""
    about = bench_train.__doc__
    words = [line.split()[0] for line in about.partition("Modes:\n")[2].splitlines() if re.match(r"    \S+  ", line)]
    examples = {
        "NAME": ["fp8-block"], "PARTS": ["all", "od", "down"], "SR": ["bf16-sr", "recipe:fp8-block+output+sr"],
        "RECIPE": ["recipe:mxfp8", "recipe:mxfp8+sr+dynamic8+release"], "MODE": ["o1", "diffq:up"],
        "METHOD": ["o1", "gaussws:all+recompute"],
    }  # fmt: skip
    for word in words:
        capitals = re.findall("[A-Z]+", word)
        for chosen in itertools.product(*(examples[capital] for capital in capitals)):
            found = word
            for capital, example in zip(capitals, chosen, strict=True):
                found = found.replace(capital, example)
            yield found


def test_every_mode_of_the_docstring_is_parsed():
    texts = list(listed())
    assert len(texts) > 20
    found = [bench_train.parse_mode(text) for text in texts]
    assert len(set(found)) == len(set(texts))
    assert {mode.method for mode in found} == set(bench_train.FIELDS)


def test_parts_are_fields():
    assert bench_train.parse_mode("recipe:fp8-block+output+sr+companded8+release+input+one+fsdp-codes") == bench_train.StepMode(
        "recipe", "fp8-block", output=True, sr=True, states="companded8", release=True, save="input", hold="one",
        fsdp="fsdp-codes",
    )  # fmt: skip
    assert bench_train.parse_mode("gaussws:od+recompute+adam-mini") == bench_train.StepMode(
        "gaussws", "od", recompute=True, optimizer="adam-mini"
    )
    narrow = {
        text: bench_train.parse_mode(text).narrow for text in ("o1", "bf16-nearest", "bf16-sr", "recipe:int8", "recipe:int8+sr")
    }
    assert [text for text, is_narrow in narrow.items() if is_narrow] == ["bf16-nearest", "bf16-sr", "recipe:int8+sr"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("o3", "There is no mode 'o3'"),
        ("recipe:", "There is no mode 'recipe:'"),
        ("gaussws:some", "There is no mode 'gaussws:some'"),
        ("o1:x", "There is no mode 'o1:x'"),
        ("o1+sr", r"\+sr is unknown: o1 takes \+adamw, \+adam-mini, \+fsdp, \+fsdp-codes, \+graphs, in this order"),
        ("bf16-sr+", r"\+ is unknown"),
        ("bf16-sr+fsdp+fsdp", r"\+fsdp is given twice or contradicts"),
        ("recipe:int8+input+one+none", r"\+none is given twice or contradicts"),
        ("recipe:int8+input+sr", r"\+sr is too late"),
        ("recipe:int8+release", r"\+release needs \+sr"),
        ("o1+fsdp+graphs", r"\+graphs cannot capture the communication or the copies of \+fsdp"),
        ("bf16-sr+host+release+graphs", r"\+graphs cannot capture .* of \+host and \+release"),
    ],
)
def test_a_wrong_mode_is_one_sentence(text, sentence):
    with pytest.raises(UserError, match=sentence) as raised:
        bench_train.parse_mode(text)
    assert str(raised.value).count(". ") == 0
    assert str(raised.value).endswith(".")
