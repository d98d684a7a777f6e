"""The command line: what it prints, its exit codes, and errors of one line; and what stands behind `dither doctor`."""

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import dither
from dither import UserError, checkpoint, cli, data
from dither.commands.data import _default_folder
from dither.commands.train import resolve, summary
from dither.console import print_table
from dither.data.preparation import split_text
from dither.models import build, save_pretrained
from dither.models.open import load_weights
from dither.ops.ranks import first_error, gather
from dither.spec import registry
from dither.spec.formats import TABLE
from dither.tools import doctor, self_test
from dither.tools.recommend import cpu_here
from dither.train import Config
from dither.train.loop import Outcome
from dither.train.resume import resolved
from dither.versions import has_triton

ROOT = Path(__file__).parent.parent
BF16_UNITS = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Without them a CPU may not multiply FP8."""


def run(*arguments, **options):
    """The command in a process of its own, as a user starts it."""
    command = [sys.executable, "-m", "dither.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.parametrize("module", ["dither", "dither.cli"])
def test_version_is_that_of_the_project(module):
    result = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"dither {dither.__version__}\n", "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == dither.__version__
    assert project["scripts"] == {"dither": "dither.__main__:main"}


def test_formats_lists_every_format(capsys):
    assert cli.main(["formats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in lines[2:-3]}
    assert list(cells) == list(registry.FORMATS)
    assert cells["e4m3"] == ["8", "4/3", "7", "448", "2^-6", "2^-9", "2^-4", "1.2", "17.8", "no", "yes", "256"]
    assert cells["e2m1"] == ["4", "2/1", "1", "6", "1", "2^-1", "2^-2", "0.6", "3.6", "no", "no", "16"]
    assert cells["e8m0"] == ["8", "8/0", "127", "2^127", "2^-127", "-", "2^-1", "0.3", "254.0", "no", "yes", "256"]
    assert cells["int8"][4:10] == ["1", "-", "-", "-", "7.0", "no"]


@pytest.mark.parametrize("name", [name for name, format in TABLE.items() if format.bits <= 8])
def test_formats_lists_all_values_of_a_short_format(name, capsys):
    assert cli.main(["formats", name]) == 0
    fields, values = capsys.readouterr().out.split("finite values:")
    assert fields.startswith(f"Number format {name}\n")

    def read(cell):
        return float(cell) if "^" not in cell else (-1 if cell[0] == "-" else 1) * 2.0 ** int(cell.split("^")[1])

    assert tuple(map(read, values.split())) == TABLE[name].values()


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("bf16", "2^-133", "3.3895313892515355e+38"), ("fp32", "2^-149", "3.4028234663852886e+38"), ("e4m10", "2^-16", "255.875")],
)
def test_formats_lists_the_ends_of_a_long_format(name, first, last, capsys):
    assert cli.main(["formats", name]) == 0
    values = capsys.readouterr().out.split("from zero up:")[1].split()
    assert len(values) == 10
    assert (values[0], values[1], values[-1]) == ("0", first, last)


def test_an_unknown_format_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["formats", "e4n3"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("dither: error: There is no number format 'e4n3' (did you mean 'e4m3'?)")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["nothing"], ["formats", "e4m3", "e5m2"], ["doctor", "--elements", "many"], ["doctor", "--bits"], ["--versions"]],
    ids=" ".join,
)
def test_bad_arguments_are_exit_code_2(arguments, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("formats --plt", "Unrecognized options: --plt (did you mean --plot?): `dither formats --help` shows the arguments."),
        ("watch --port 1", "`dither watch` needs RUN: `dither watch --help` shows the arguments."),
        ("watch --prt 1", "Unrecognized options: --prt (did you mean --port?): `dither watch --help` shows the arguments."),
        ("watch a --port", "`dither watch` needs a value for --port: `dither watch --help` shows the arguments."),
        ("data prepare --kind chatt", "--kind is one of text, chat, not 'chatt' (did you mean 'chat'?): `dither data prepare "
         "--help` shows the arguments."),
        ("export --formt x", "Unrecognized options: --formt (did you mean --format?): `dither export --help` shows the "
         "arguments."),
        ("train --step 5", "Unrecognized options: --step (did you mean --set run.steps=5?): `dither train --help` shows the "
         "arguments."),
        ("plan x --targt=0.5 --seed 1 -x --zzz", "Unrecognized options: --targt (did you mean --target?), -x, --zzz: "
         "`dither plan --help` shows the arguments."),
        ("runs a b", "Unrecognized options: b: `dither runs --help` shows the arguments."),
        ("watch a --port q", "--port is an integer, not 'q': `dither watch --help` shows the arguments."),
        ("memory --params lots", "--params is a number, not 'lots': `dither memory --help` shows the arguments."),
        ("memory llama-1b --compiled", "Unrecognized options: --compiled (did you mean --no-compiled?): `dither memory --help` "
         "shows the arguments."),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_parsed_are_one_line(arguments, expected, capsys):
    assert cli.main(arguments.split()) == 2
    assert capsys.readouterr().err == f"dither: error: {expected}\n"


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        ("--held_out 0.1 --held-out=--x", ""),
        ("--bound -inf -1 -.5 -NaN", ""),
        ("-ofolder -o=x -h", ""),
        ("-- --nothing -x", ""),
        ("-x -steps 5", "-x, -steps (did you mean --set run.steps=5?)"),
        ("--no-json -- --x", "--no-json (did you mean --json?)"),
        ("--lr --sed=3", "--lr (did you mean --set optim.lr=VALUE?), --sed (did you mean --set run.seed=3?)"),
    ],
)
def test_unknown_options(words, unknown):
    found = cli._unknown(words.split(), ("--held-out", "--bound", "--out", "-o", "--json", "--set"))
    assert found == (f"Unrecognized options: {unknown}" if unknown else "")


def test_a_model_may_follow_the_values_of_an_option(capsys):
    call = cli._parse(cli.COMMANDS["eval"].load(), "eval", ["--cast", "mxfp4", "e4m3", "runs/a"])
    assert (call.args, call.keywords["cast"]) == ((Path("runs/a"),), ("mxfp4", "e4m3"))
    assert cli.main(["eval", "--sequences", "2"]) == 2
    assert "`dither eval` needs RUN|CHECKPOINT|MODEL" in capsys.readouterr().err


def test_an_unknown_option_is_named_before_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    for words in (["train", "--step", "5"], ["export"], ["memory", "--recip", "x"], ["eval"]):
        result = run(*words, env=env)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert result.stderr.startswith("dither: error: ")


def test_only_a_process_of_the_command_hides_bars_of_other_packages(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "")  # so that the value is restored
    monkeypatch.delenv("TQDM_DISABLE")
    cli.main(["--version"])
    assert "TQDM_DISABLE" not in os.environ
    monkeypatch.setattr(sys, "argv", ["dither", "--version"])
    cli.main()
    assert os.environ["TQDM_DISABLE"] == "1"


def test_a_reader_that_stops_early_sees_no_traceback():
    shell = f"{sys.executable} -m dither.cli formats e4m3 | head -n 1"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert result.stdout == "Number format e4m3\n"
    assert result.stderr == ""


# The doctor -----------------------------------------------------------------------------------------------------------


def test_too_few_elements_are_an_error(capsys):
    assert cli.main(["doctor", "--elements", "5"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "dither: error: The self-test takes 512 elements per cast or more, not 5.\n"


@pytest.fixture
def small_products(monkeypatch):
    """Products that a CPU, which multiplies FP8 number by number, computes in little time."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(doctor, "M", 32)
        monkeypatch.setattr(doctor, "N", 32)


@pytest.mark.skipif(not has_triton(), reason="the kernels need Triton, which is not installed")
@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("share", [60, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_doctor_finds_that_all_bits_agree(share, capsys, monkeypatch):
    """One of 60 jobs, in one process; and all of them, in a process per core."""
    if share > 1 and not torch.cuda.is_available():
        popen = subprocess.Popen
        monkeypatch.setattr(os, "cpu_count", lambda: 1)
        monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([*command[:-1], f"0/{share}"], **options))
    code = cli.main(["doctor"])
    said = capsys.readouterr()
    assert code == 0, said
    found, advice = said.out.split("\nAdvice ")
    lines = found.splitlines()
    assert lines[-1] == "All bits agree."
    assert torch.cuda.is_available() or "A CPU has no matrix units for few bits" in advice
    rows = {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line.strip()) for line in lines)}
    assert rows["torch"] == [torch.__version__]
    assert rows["cpu"][0].endswith(f"{os.cpu_count()} cores")
    assert rows["fp8, tensor scales"][0] == "yes" or not (torch.cuda.is_available() or BF16_UNITS)
    across = "0" if torch.cuda.is_available() else "not run"
    every = enumerate(self_test.operations(doctor.ELEMENTS))
    todo = [job for place, job in every if place // 2 % share == 0 or torch.cuda.is_available()]
    names = {job.group for job in todo}
    assert share > 1 or names == {"random bits", *TABLE} - {"e8m0"}
    for name in [*names, "total"]:
        assert rows[name][2:] == ["0", across]
    assert int(rows["total"][0]) == len(todo)


def test_the_self_test_covers_every_format_granularity_scale_and_rounding():
    casts = self_test.casts()
    assert len(set(casts)) == len(casts)
    for name, format in TABLE.items():
        mine = [cast for cast in casts if cast.format == name]
        if name in ("e8m0", "fp32", "bf16"):  # e8m0 holds scales only, and the others take none
            assert [str(cast).split("(")[0] for cast in mine] == (
                [] if name == "e8m0" else [f"{name} nearest", f"{name} stochastic"]
            )
            continue
        for rounding in ("nearest", "stochastic"):
            scalings = {(c.group.kind, c.scaling.kind) for c in mine if c.round.kind == rounding}
            kinds = {"none", "fp32", "pow2", "pow2_ceil"}
            kinds |= {"nvfp4"} if format.bits <= 8 else set()
            kinds |= {"delayed"} if format.nan else set()
            assert {scale for _, scale in scalings} == kinds
            assert {group for group, _ in scalings} == {"none", "tensor", "row", "block", "tile"}


@pytest.mark.parametrize(
    ("a", "b", "bits"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0),
        ([1.0, 2.0], [1.0, -2.0], 1),
        ([1.0, 0.0], [1.0000001, -0.0], 2),
        ([float("nan")], [-float("nan")], 0),
        ([float("nan")], [float("inf")], 1),
        ([1.0, 2.0], [1.0], 64),
        ([], [], 0),
    ],
)
def test_differing_bits(a, b, bits):
    assert self_test.differing_bits([torch.tensor(a)], [torch.tensor(b)]) == bits


def test_differing_bits_of_codes_scales_and_dtypes():
    codes = torch.tensor([[0x7F, 0x00], [0x12, 0xFF]], dtype=torch.uint8)
    other = torch.tensor([[0x7F, 0x81], [0x10, 0xFF]], dtype=torch.uint8)
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        assert self_test.differing_bits([codes.view(dtype)], [other.view(dtype)]) == 3
        assert self_test.differing_bits([codes.view(dtype).T], [codes.view(dtype).T]) == 0
    assert self_test.differing_bits([codes], [codes.view(torch.float8_e4m3fn)]) == 32
    assert self_test.differing_bits([torch.tensor(1.0)], [torch.tensor(1.5)]) == 1  # 0-d, as a tensor's scale is


class Broken:
    """The reference's casts, one of them with one bit of its first result wrong."""

    def __init__(self, what):
        self.what = what

    def __getattr__(self, name):
        original = getattr(self_test.quantize, name)

        def wrong(*arguments):
            first, *rest = original(*arguments) if name.startswith("quantize") else [original(*arguments)]
            octets = first.contiguous().view(torch.uint8).clone()
            octets[0, 0] ^= 1
            first = octets.view(first.dtype)
            return (first, *rest) if rest else first

        return wrong if name == self.what else original


@pytest.mark.parametrize("what", ["quantize", "dequantize", "fake_quantize", "quantize_both"])
def test_a_wrong_kernel_is_found(what):
    broken = self_test.Implementation(self_test.philox, self_test.rounding, Broken(what))
    todo = [job for job in self_test.operations(512) if job.what.startswith("e4m3 tile(128) fp32")]
    assert len(todo) == 2  # both roundings, of which one goes the way without codes
    assert sum(check.kernel for check in self_test.compare_operations(todo, "cpu", broken)) > 0
    for check in self_test.compare_operations(todo, "cpu", self_test.REFERENCE):
        assert (check.kernel, check.devices) == (0, None)


def report(self_test):
    tried = (doctor.Product("bf16", False, "no [b]unit[/b]"),)
    return doctor.MachineReport((("torch", "2"),), (cpu_here(),), "cpu", tried, self_test)


def test_differing_bits_are_printed_and_exit_code_1(capsys):
    checks = (self_test.BitCheck("e4m3", "e4m3 row", 100, 3, 4), self_test.BitCheck("e5m2", "e5m2 row", 100, 0, 0))
    found = report(doctor.SelfTest(checks, "on the GPU", "CPU against GPU", 0))
    assert found.exit_code == 1
    doctor.print_report(found)
    output = capsys.readouterr().out
    assert "DIFFERS: e4m3 row: kernel against reference 3, CPU against GPU 4" in output
    assert output.endswith("FAILED: 7 bits differ.\n")
    assert "no [b]unit[/b]" in output


def test_a_wrong_known_answer_and_a_broken_comparison_are_exit_code_1():
    fine = doctor.SelfTest((), "here", "there", 0)
    assert report(fine).exit_code == 0
    assert report(dataclasses.replace(fine, wrong_answers=1)).exit_code == 1
    assert report(dataclasses.replace(fine, failure="it stopped")).exit_code == 1


def test_philox_answers_are_really_compared(monkeypatch):
    assert self_test.wrong_answers("cpu") == 0
    monkeypatch.setattr(self_test.philox, "ROUNDS", 9)
    assert self_test.wrong_answers("cpu") == 3


def test_without_triton_the_report_says_that_no_kernel_ran(monkeypatch, capsys):
    few = self_test.operations(512)[:8]
    monkeypatch.setattr(self_test, "operations", lambda elements: few)
    monkeypatch.setattr(self_test, "has_triton", lambda: False)
    monkeypatch.setattr(self_test, "best_device", lambda: "cpu")
    found = self_test.run_self_test(512)
    assert found.passed
    doctor.print_report(report(found))
    output = capsys.readouterr().out
    assert "Kernels: not run: Triton is not installed." in output
    assert "All bits agree" not in output
    assert output.endswith("no kernel and no second device could be compared here.\n")


def test_an_interpreter_that_fails_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")  # a program that does nothing but fail
    checks, failure = self_test.interpreted_checks(512)
    assert checks == []
    assert failure == "the interpreter stopped with exit code 1: no message"


def test_a_product_that_fails_or_is_wrong_says_so():
    right = torch.ones(2, 2)

    def fail(device):
        raise RuntimeError("no such unit\nand a long trace")

    assert doctor._try("a", lambda device: (right, right), "cpu") == doctor.Product("a", True, "")
    assert doctor._try("a", fail, "cpu") == doctor.Product("a", False, "no such unit")
    wrong = doctor._try("a", lambda device: (right * 2, right), "cpu")
    assert not wrong.passed
    assert "wrong" in wrong.note
    assert not doctor._try("a", lambda device: (right * torch.nan, right), "cpu").passed


@pytest.mark.usefixtures("small_products")
def test_products_on_the_cpu():
    found = {product.name: product for product in doctor.products("cpu")}
    assert len(found) == 9
    for name in ("bf16", "fp16", "fp8, tensor scales", "fp8, row scales"):
        assert found[name].passed or (name.startswith("fp8") and not BF16_UNITS), found[name]
    for name in ("MXFP8", "MXFP4", "NVFP4"):
        assert not found[name].passed
        assert found[name].note


def test_tables_on_a_terminal_keep_brackets(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table("A title", ("name", "count"), [("[red]x[/red]", "12")], right=[1])
    output = capsys.readouterr().out
    assert "[red]x[/red]" in output
    assert "A title" in output
    assert "━" in output or "─" in output


def narrow_terminal(monkeypatch):
    """Let the captured output of a test be a terminal of 80 columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")


def screen(capsys):
    """The lines on a terminal, without escape sequences."""
    lines = re.sub(r"\x1b(\[\d*m|\]8;;[^\x1b]*\x1b\\\\)", "", capsys.readouterr().out).splitlines()
    assert all(len(line) <= 80 for line in lines)
    return lines


def test_no_number_is_split_on_a_narrow_terminal(monkeypatch, capsys):
    narrow_terminal(monkeypatch)
    assert cli.main(["formats"]) == 0
    words = [line.split() for line in screen(capsys)]
    assert any(row[:5] == ["fp32", "32", "8/23", "127", "3.40282e+38"] for row in words)
    assert ["fp32", "277.0", "yes", "yes", "2^32"] in words  # columns that do not fit are below, with the names again
    assert sum(row[:1] == ["e4m3"] for row in words) == 2


def test_texts_are_wrapped_and_names_lose_what_they_share(monkeypatch, capsys):
    narrow_terminal(monkeypatch)
    note = "a product that is not implemented for this kind of device " * 3
    print_table("Products", ("product", "note"), [("fp8, 1x128 times 128x128", note)])
    lines = screen(capsys)
    assert " ".join(line[26:].strip() for line in lines[3:]).split() == note.split()
    layers = [f"model.layers.{block}.self_attn.{kind}_proj" for block in (0, 10) for kind in "qkv"]
    numbers = ("0.0123", "1.5e-05", "31.25", "100.00 %", "0.00 %")
    print_table("Layers", ("layer", *"abcde"), [(layer, *numbers) for layer in layers], right=range(1, 6))
    assert [line.split() for line in screen(capsys)[3:]] == [[layer, *" ".join(numbers).split()] for layer in layers]
    print_table("Layers", ("layer", *"abcdefg"), [(layer, *numbers, "1", "2") for layer in layers], right=range(1, 8))
    assert [line.split()[0] for line in screen(capsys)[3:]] == [layer.replace("model.layers.", "…") for layer in layers]


def test_links_of_a_terminal(monkeypatch, capsys):
    narrow_terminal(monkeypatch)
    print_table("Runs", ("run", "report"), [("a", "page")], links={(0, 1): "file:///a"})
    assert "\x1b]8;;file:///a\x1b\\page\x1b]8;;\x1b\\" in capsys.readouterr().out


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert (stopped.value.code, "dither --version" in shown) == (0, True)
    assert all(f"\n  {name} " in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_words_for_values_and_fits(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main([*name.split(), "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert not re.search(r"\[STR|\[INT|\{None|\bSTR\b|\bFLOAT\b", shown)
    assert max(len(line) for line in shown.splitlines() if not line.startswith("usage: ")) <= 80


def test_help_joins_the_lines_of_a_docstring(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        cli.main(["export", "--help"])
    shown = capsys.readouterr().out
    assert "gguf-mxfp4. By default that of `dither train --qat`, whose codes are written, or else bf16." in shown
    assert "--merge " in shown
    assert "--no-" not in shown


@pytest.mark.parametrize("name", ["memory", "formats", "doctor", "compare", "plan", "plan show", "plan diff", "plan auto",
                                  "plan static", "plan frontier", "advise", "bisect", "eval", "export", "inspect",
                                  "runs"])  # fmt: skip
def test_commands_with_results_have_json(name):
    assert "--json" in cli._options(cli.COMMANDS[name].load())


def test_formats_as_json(capsys):
    assert cli.main(["formats", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert list(found) == list(registry.FORMATS)
    assert (found["e4m3"]["max"], found["e4m3"]["min_subnormal"], found["e4m3"]["nan"]) == (448, 2**-9, True)
    assert cli.main(["formats", "e2m1", "--json"]) == 0
    assert tuple(json.loads(capsys.readouterr().out)["values"]) == TABLE["e2m1"].values()


def test_plans_as_json(tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, name in zip(paths, ("fp8-block", "mxfp8"), strict=True):
        Path(path).write_text(dither.recipe(name).to_json())
    assert cli.main(["plan", "show", paths[0], "--json"]) == 0
    assert dither.Plan.from_dict(json.loads(capsys.readouterr().out)) == dither.recipe("fp8-block")
    assert cli.main(["plan", "diff", *paths, "--json"]) == 1
    found = {each["where"]: each for each in json.loads(capsys.readouterr().out)}
    assert {each["first"] == each["second"] for each in found.values()} == {False}
    assert cli.main(["plan", "diff", paths[0], paths[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_escapes_and_lone_surrogates_of_a_plan_are_visible(tmp_path, capsys):
    hostile = dither.recipe("fp8-block").to_dict() | {"provenance": {"x\x1b[31m": "y\x1b[2J\ud800"}}
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    Path(paths[0]).write_text(json.dumps(hostile))
    Path(paths[1]).write_text(dither.recipe("fp8-block").to_json())
    for words, code in (["show", paths[0]], 0), (["diff", *paths], 1), (["show", "\x1b[31m\ud800"], 2):
        assert cli.main(["plan", *words]) == code
        found = "".join(capsys.readouterr())
        assert "\\x1b[31m" in found
        assert "\x1b" not in found
        found.encode()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "Interrupted."), (OSError(24, "Too many open files"), 2, "Too many files are open at once")],
)
def test_an_interruption_and_a_limit_are_one_line(error, code, message, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli, "_import_torch", fail)
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err.startswith(f"dither: error: {message}")


def test_the_doctors_report_as_json(capsys, monkeypatch):
    test = doctor.SelfTest((self_test.BitCheck("e4m3", "e4m3 row", 100, 3, None),), "here", "there", 0)
    monkeypatch.setattr(doctor, "examine", lambda elements: report(test))
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["devices"][0]["name"], found["products"][0]["passed"]) == ("cpu", False)
    assert (found["self_test"]["checks"][0]["kernel"], found["self_test"]["checks"][0]["devices"]) == (3, None)


# The command line as people type it ------------------------------------------------------------------------------------


SMALL = ("data.sequence=16", "data.batch=4", "run.steps=2", "run.sample_every=1", "run.sample_tokens=8")
SMALL += ("run.eval_sequences=2", "run.device=cpu")


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """One plain text without separators, as Shakespeare's works are distributed."""
    path = tmp_path_factory.mktemp("play") / "a play.txt"
    path.write_text(
        "\n\n".join(f"Fool {number}:\nNow is the winter of our discontent, number {number}." for number in range(99))
    )
    return path


@pytest.fixture(scope="module")
def run_typed(play, tmp_path_factory):
    """A run on that text, from the command line, and what it printed."""
    out = tmp_path_factory.mktemp("run") / "the first"
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = cli.main(["train", "--data", str(play), "--out", str(out), "--set", *SMALL])
    assert code == 0, errors.getvalue()
    return out, said.getvalue()


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


# Start-up -------------------------------------------------------------------------------------------------------------


def test_the_doctor_needs_no_safetensors_and_importing_dither_no_dynamo():
    lacking = "sys.modules['safetensors'] = sys.modules['tyro'] = None"
    doctor = f"{lacking}; import dither.tools.doctor; del sys.modules['safetensors'], sys.modules['tyro']"
    modules = "dither.nn, dither.optim, dither.numerics, dither.snip, dither.models, dither.train"
    assert python(f"import sys; {doctor}; import {modules}; print('torch._dynamo' in sys.modules)") == "False\n"


def test_marks_for_the_compiler_are_those_of_torch():
    from dither.ops.backend import assume_constant_result

    theirs, ours = torch.compiler.assume_constant_result(lambda: 1), assume_constant_result(lambda: 1)
    assert vars(theirs) == vars(ours) != {}


def test_a_misspelled_command_gets_a_suggestion(capsys):
    for words, hint in ((["trian"], "(did you mean 'train'?)"), (["data", "prepair"], "(did you mean 'prepare'?)")):
        assert cli.main(words) == 2
        assert hint in capsys.readouterr().err


def test_plan_lists_its_subcommands_and_its_own_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("plan show", "plan diff", "plan auto", "plan frontier", "--target"))


def test_shell_completion_names_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--tyro-print-completion", "bash"])
    assert not stopped.value.code
    script = capsys.readouterr().out
    assert all(name.replace(" ", "-") in script for name in cli.COMMANDS)


# A plain text ---------------------------------------------------------------------------------------------------------


def test_a_single_text_is_split_and_the_command_says_so(play, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "prepare", str(play)]) == 0
    said = capsys.readouterr().err
    assert "is a single document: its last" in said
    assert '--separator ""' in said
    corpus = data.open_tokens("a-play-tokens")
    assert (corpus.train.counts.documents, corpus.held_out.counts.documents) == (1, 1)
    whole = play.read_text()
    parts = [split.tokenizer.decode(split.read(0, len(split) - 1)) for split in (corpus.train, corpus.held_out)]
    assert "".join(parts) == whole
    assert parts[1].startswith("Fool ")
    assert 0.04 < len(parts[1]) / len(whole) < 0.08


@pytest.mark.parametrize(
    ("text", "fraction", "held_out"),
    [
        ("a\n\nb\n\nc d", 0.3, "c d"),
        ("a\nb\nc d", 0.3, "c d"),
        ("0123456789", 0.25, "789"),
        ("x\n\n" + "y" * 97, 0.1, "y" * 10),  # an empty line far away would hold out nearly everything
        ("x", 0.5, ""),
        ("x \n", 0.5, ""),
    ],
)
def test_where_a_text_is_split(text, fraction, held_out):
    assert split_text(text, fraction) == (text.removesuffix(held_out) if held_out else text, held_out)


def test_a_tokenizer_does_not_see_the_held_out_end(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("ab" * 500 + "\n\n" + "zq" * 30)
    assert cli.main(["data", "prepare", str(path), "-o", str(tmp_path / "out"), "--tokenizer", "bpe:258"]) == 0
    merged = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["merges"]
    assert "ab" in "".join(merged[0])


def test_errors_name_flags(tmp_path, capsys):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("twin")
    assert cli.main(["data", "prepare", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--held-out" in said
    assert "--separator" in said
    assert "held_out=" not in said


def test_folders_of_tokens_are_named_after_their_text():
    names = {"texts/a b.jsonl.xz": "a-b-tokens", "hf:wiki@en:train": "hf-wiki-en-train-tokens", "*.txt": "text-tokens"}
    assert {source: str(_default_folder((source,))) for source in names} == names


# Configs --------------------------------------------------------------------------------------------------------------


def test_a_list_takes_a_single_value():
    found = resolve(
        None, settings=["run.track=tensorboard", "data.sources=a.txt", "snip.target=0.5", "snip.stages=6", "run.profile=[1, 2]"]
    )
    assert (found.run.track, found.data.sources, found.snip.stages) == (("tensorboard",), ("a.txt",), (6,))
    with pytest.raises(UserError, match=r"There is no run\.track='tensorbord' \(did you mean"):
        resolve(None, settings=["run.track=tensorbord"])


def test_a_stored_config_says_which_model_and_tokenizer(run_typed, play, tmp_path):
    out, _ = run_typed
    stored = tomllib.loads((out / "config.toml").read_text())
    assert stored["model"]["preset"] == "tiny"
    bpe = data.train_bpe([play.read_text()], 300)
    data.prepare(str(play), tmp_path / "tokens", bpe)
    found = resolved(resolve(None, data=[str(tmp_path / "tokens")]))
    assert found.data.tokenizer == str(tmp_path / "tokens" / "tokenizer.json")
    assert resolved(found) == found


def test_prepared_tokens_may_move_between_resumes(play, tmp_path, capsys):
    data.prepare(str(play), tmp_path / "old", data.train_bpe([play.read_text()], 300))
    train = ["train", "--out", str(tmp_path / "run"), "--set", *SMALL, "run.sample_every=0"]
    assert cli.main([*train, "--data", str(tmp_path / "old")]) == 0
    (tmp_path / "old").rename(tmp_path / "new")
    assert cli.main([*train, "--resume", "--data", str(tmp_path / "new")]) == 0
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert stored["data"]["tokenizer"] == str(tmp_path / "new" / "tokenizer.json")


def test_prompts_fit_the_text(run_typed):
    out, said = run_typed
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (prompt,) = {line["prompt"] for line in lines if line["kind"] == "sample"}
    assert prompt.startswith("Fool ")
    assert prompt.endswith("Now")
    assert "is a single document" in said


def test_printed_commands_are_quoted(run_typed):
    out, said = run_typed
    assert f"dither report '{out}'" in said
    stopped = Outcome(3, "guard", "why", 1, None, None, None, 1.0, out)
    assert summary(stopped).endswith(f"dither train --resume --out '{out}'")
    assert summary(replace(stopped, folder=out / "gone")).endswith("nothing was kept")


# New runs from old weights --------------------------------------------------------------------------------------------


def test_a_new_run_from_the_weights_of_another(run_typed, tmp_path, capsys):
    old, _ = run_typed
    assert cli.main(["train", "--resume", "--out", str(old), "--set", "optim.eps=1e-5", "run.steps=4"]) == 2
    said = capsys.readouterr().err
    assert f"dither train --from '{old}' --out NEW_FOLDER" in said
    new = tmp_path / "new"
    assert cli.main(["train", "--from", str(old), "--out", str(new), "--set", "optim.lr=1e-5", "run.steps=1"]) == 0
    capsys.readouterr()
    stored = tomllib.loads((new / "config.toml").read_text())
    assert stored["model"]["weights"] == str(old / "checkpoints" / "step-00000002")
    assert (stored["optim"]["lr"], stored["data"]["sequence"]) == (1e-5, 16)
    before, after = (checkpoint.load(checkpoint.newest(path / "checkpoints")[0])[0] for path in (old, new))
    names = [name for name in before if name.startswith("model:")]
    assert all(0 < (after[name] - before[name]).abs().max() < 1e-4 for name in names)  # one step of at most lr, and decay
    # Resumed, the new run does not need the old one any more.
    old.rename(tmp_path / "gone")
    try:
        assert cli.main(["train", "--resume", "--out", str(new)]) == 0
    finally:
        (tmp_path / "gone").rename(old)


def test_weights_fit_or_are_refused(run_typed, tmp_path):
    old, _ = run_typed
    model = build("tiny", vocab_size=257)
    load_weights(model, old)
    saved = checkpoint.load(checkpoint.newest(old / "checkpoints")[0])[0]
    assert all(
        torch.equal(value, saved[f"model:{name}"]) for name, value in model.state_dict().items() if f"model:{name}" in saved
    )
    with pytest.raises(UserError, match=r"has the shape \[257, .* and \[300, .* set \[model\] and data.tokenizer"):
        load_weights(build("tiny", vocab_size=300), old)
    with pytest.raises(UserError, match=r"has no tensor 'weight': set \[model\]"):
        load_weights(nn.Linear(2, 2), old)
    with pytest.raises(UserError, match="neither a run"):
        resolve(None, start_from=str(tmp_path))
    with pytest.raises(UserError, match="--resume continues a run and --from starts a new one"):
        resolve(None, start_from=str(old), resume=True)


def test_masters_are_read_where_there_are_any(play, tmp_path):
    out = tmp_path / "o2"
    assert cli.main(["train", "--data", str(play), "--out", str(out), "--set", *SMALL, "precision.mode=o2"]) == 0
    tensors, plain = checkpoint.load(checkpoint.newest(out / "checkpoints")[0])
    model = build("tiny", vocab_size=257)
    load_weights(model, out)
    names = [name for group in plain["optimizer"]["groups"] for name in group["params"]]
    exact = [name for name in names if f"optimizer:{name}:master" in tensors]
    assert exact
    assert all(torch.equal(model.state_dict()[name], tensors[f"optimizer:{name}:master"]) for name in exact)


def test_a_new_run_from_a_hugging_face_folder(tmp_path):
    save_pretrained(build("tiny", vocab_size=257), tmp_path / "model")
    found = resolve(None, start_from=str(tmp_path / "model"))
    assert (found.model.hf, found.model.size, found.data.tokenizer) == (str(tmp_path / "model"), None, "bytes")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert resolve(None, start_from=str(tmp_path / "model")).data.tokenizer == str(tmp_path / "model" / "tokenizer.json")
    assert Config() == resolve(None)


# Small things ---------------------------------------------------------------------------------------------------------


def test_errors_of_ranks(tmp_path):
    assert (gather(1), first_error("a"), first_error("")) == ([1], "a", "")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert (gather({"a": 1}), first_error("a"), first_error("")) == ([{"a": 1}], "a", "")
    finally:
        torch.distributed.destroy_process_group()
