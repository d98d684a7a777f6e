"""The registry: definitions from outside, plugins, plans that carry them, and what is refused before anything trains."""

import copy
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import torch

import dither
from dither import (
    Cast,
    Format,
    NamedCast,
    Plan,
    Recipe,
    RoundingRule,
    ScaleRule,
    Stream,
    TransformRule,
    UserError,
    checkpoint,
    cli,
)
from dither.ops.backend import implementation
from dither.ops.reference.rounding import round_values
from dither.snip.options import options
from dither.spec import Rounding, registry
from dither.spec.bitwidths import capacity, safe_bitwidth
from dither.spec.engines import engine_for
from dither.spec.formats import NF4
from dither.train.config import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"


pytestmark = pytest.mark.usefixtures("registry_undone")


def up(fraction, odd, random):
    return fraction + random >= 1


def half(amax, format):
    return amax / format.max / 2


# Codebooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nearest", "toward_zero", "stochastic(4)", "stochastic(16)", "mine(16)"])
@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e4m3", "int3", "int8"])
def test_the_values_of_a_format_as_a_codebook_round_as_the_format_does(name, how):
    dither.register(RoundingRule("mine", up, random=True))
    element = Format.parse(name)
    book = Format.from_values("book", element.values())
    values = torch.tensor(element.values())
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.randn(20_000, generator=generator) * element.max / 2])
    random = torch.randint(-(2**31), 2**31 - 1, x.shape, generator=generator, dtype=torch.int32)
    own = Rounding.parse(how.replace("mine", "stochastic"))
    rounded = [round_values(x, each, rule, True, random if rule.bits else None) for each, rule in
               ((element, own), (book, Rounding.parse(how)), (element, Rounding.parse(how)))]  # fmt: skip
    assert all(torch.equal(each.abs(), rounded[0].abs()) and not ((each * rounded[0]) < 0).any() for each in rounded[1:])


def test_nf4_has_the_published_values_and_rounds_to_the_nearest_of_them():
    # bitsandbytes' create_normal_map, from its offset 0.9677083 and the quantiles of a normal distribution.
    quantile = torch.distributions.Normal(0.0, 1.0).icdf
    positive, negative = quantile(torch.linspace(0.9677083, 0.5, 9)[:-1]), -quantile(torch.linspace(0.9677083, 0.5, 8)[:-1])
    published = torch.cat([positive, torch.zeros(1), negative]).sort().values
    torch.testing.assert_close(torch.tensor(NF4), published / published.max(), atol=2e-6, rtol=0)
    x = torch.linspace(-1.2, 1.2, 4001)
    nearest = torch.tensor(NF4)[(x[:, None] - torch.tensor(NF4)).abs().argmin(1)]
    assert torch.equal(dither.round_to(x, "nf4"), nearest)
    codes = dither.quantize(torch.tensor([NF4]), "nf4 row")
    assert codes.values.tolist() == [[code | (code + 1) << 4 for code in range(0, 16, 2)]]


@pytest.mark.parametrize("cast", ["nf4 tile(32)", "ternary row", "e3m0 tile(16) pow2", "e4m3fnuz tensor", "int3 block(4)",
                                  "e2m1 tile(16) half", "e4m3 tile(16) spread", "e2m1 tile(32) pow2 mine(8)"])  # fmt: skip
@pytest.mark.parametrize("axis", [0, 1])
def test_codes_dequantize_to_the_fake_quantized_numbers(cast, axis):
    spread = ScaleRule("spread", lambda groups, format: groups.abs().mean(-1).clamp(min=1e-6) * 3 / format.max, values=True)
    dither.register(RoundingRule("mine", up, random=True), ScaleRule("half", half), spread)
    x, stream = torch.randn(20, 48, generator=torch.Generator().manual_seed(1)), Stream(0, "test", "x")
    stored, fake = (make(x, cast, axis=axis, stream=stream) for make in (dither.quantize, dither.fake_quantize))
    assert torch.equal(stored.dequantize(), fake)
    assert 0 < (fake - x).norm() < x.norm()


def test_a_scale_rule_scales():
    dither.register(ScaleRule("half", half), ScaleRule("sum", lambda groups, format: groups.abs().sum(-1), values=True))
    x = torch.tensor([[6.0, 2.9, 1.0, 0.3]])
    codes = dither.quantize(x, "e2m1 tile(4) half")
    assert codes.scale.tolist() == [[0.5]]
    assert codes.dequantize().tolist() == [[3.0, 3.0, 1.0, 0.25]]  # 12 is clipped to 6; 0.6 becomes 0.5
    y = torch.arange(1.0, 17).view(2, 8)
    for axis, expected in ((1, [[10, 26], [42, 58]]), (0, [[10.0, 12, 14, 16, 18, 20, 22, 24]])):
        assert dither.quantize(y, "e4m3 tile(4) sum", axis=axis).scale.tolist() == expected
    assert dither.quantize(y[:, :4], "e4m3 block(4) sum").scale.tolist() == [[10.0 + 42]]


def test_what_has_no_kernel_runs_by_the_reference_and_a_gpu_warns_once():
    dither.register(RoundingRule("mine", up, random=True), ScaleRule("half", half))
    gpu = torch.device("cuda")
    for text in ("nf4 row", "e3m0 row", "e4m3fnuz row", "e2m1 tile(128) half", "e2m1 tile(128) fp32 mine(16)"):
        cast = Cast.parse(text)
        with pytest.warns(dither.PerformanceWarning, match="There is no kernel for .* tens of passes") as warned:
            assert implementation("quantize", gpu, "auto", cast).__name__ == "dither.ops.reference.quantize"
        assert len(warned) == 1
        implementation("quantize", gpu, "auto", cast)  # no second warning, which would be an error
        with pytest.raises(UserError, match="There is no kernel for the cast"):
            dither.quantize(torch.ones(2, 2), cast, backend="kernel", stream=Stream(0, "a", "b"))
    # Kernels read the codes of built-in formats, whatever scaled and rounded them.
    sizes = (128, 128, 128)
    for text, engine in (("nf4 row", "fp32"), ("e2m1 tile(128) half mine(16)", "fp8-container"), ("e4m3 row half", "fp8")):
        cast = Cast.parse(text)
        assert str(engine_for(cast, cast, sizes, (9, 0))) == engine


def test_compiled_code_casts_as_eager_code_does():
    dither.register(RoundingRule("mine", up, random=True))
    layer = dither.Linear(32, 32, precision=dither.LayerPrecision.of(*["nf4 tile(16) mine(16)"] * 3), name="a")
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def dct(size):
    place = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.pi / size * (place + 0.5) * place[:, None]) * (2 / size) ** 0.5
    return torch.cat([matrix[:1] * 0.5**0.5, matrix[1:]]).float()


@pytest.mark.parametrize("signs", ["plain", "fixed", "redrawn"])
def test_a_registered_transform_is_undone_after_the_cast(signs):
    dither.register(TransformRule("dct", dct))
    x, stream = torch.randn(12, 40, generator=torch.Generator().manual_seed(3)), Stream(0, "test", "x")
    for axis in (0, 1):
        codes = dither.quantize(x, f"fp32 dct(16,{signs})", axis=axis, stream=stream)
        torch.testing.assert_close(codes.dequantize(), x, atol=2e-6, rtol=0)
        assert (codes.values.shape[axis], codes.values.shape[1 - axis]) == (16 if axis == 0 else 48, x.shape[1 - axis])
    constant = dither.quantize(torch.full((1, 16), 0.3), "int4 tile(16) fp32 nearest dct(16,plain)")
    assert constant.values.tolist() == [[7, *[0] * 7]]  # one coefficient of 16
    layer = dither.Linear(48, 32, precision=dither.LayerPrecision.of(*["e4m3 tile(16) dct(16)"] * 3), name="a")
    rows = x.new_ones(8, 48) * torch.arange(48)
    exact = torch.nn.functional.linear(rows, layer.weight, layer.bias)
    assert (layer(rows) - exact).norm() < 0.1 * exact.norm()


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Format.from_values("x", [1, 2]), r"The format 'x' has no zero, .* add it to the values\."),
        (lambda: Format.from_values("x", [0, 2, 1]), r"The values of the format 'x' must ascend: it has 2 before 1\."),
        (lambda: Format.from_values("x", [0, 1, 1]), r"The values of the format 'x' must ascend: it has 1 twice\."),
        (lambda: Format.from_values("x", [0, float("inf")]), r"must be finite: it has inf\."),
        (lambda: Format.from_values("x", [-1e-45, 0, 1e-45]), r"largest magnitude of the format 'x' is 1.4013e-45"),
        (lambda: Format.from_values("x", [0, 3e38]), r"so that it is between 2\^-64 and 2\^64\."),
        (lambda: Format.from_values("uncast", [0, 1]), r"The format 'uncast' has a name that means no cast"),
        (lambda: Format.from_values("x", range(257)), r"The format 'x' has 257 values: a codebook has from 2 to 256\."),
        (lambda: Format.from_values("e3m3", [0, 1]), r"The name 'e3m3' already means a format with other values"),
        (lambda: Format.floating("x", 8, 3, bias=-90), r"'x' has values that float32 does not hold"),
        (lambda: ScaleRule("x", lambda amax, format: amax * 0), r"The scale rule 'x' returns 0.0 for a group with"),
        (lambda: ScaleRule("x", lambda amax, format: amax / 0), r"The scale rule 'x' returns inf for a group with"),
        (lambda: ScaleRule("x", lambda amax, format: amax.log()), r"The scale rule 'x' returns -.* scales are positive"),
        (lambda: ScaleRule("x", lambda amax, format: 1 / 0), r"reference of the scale rule 'x' raises ZeroDivisionError, div"),
        (lambda: ScaleRule("x", lambda amax: amax), r"'x' raises TypeError, .* it is a function of \(amax, format\)"),
        (lambda: ScaleRule("x", lambda amax, format: amax > 0), r"'x' returns a float32 scale for each group, not tensor"),
        (lambda: ScaleRule("x", half, arguments=-1), r"has a number of arguments from 0 on, not -1\."),
        (lambda: ScaleRule("x", half, kernel=True), r"The scale rule 'x' has kernel=True, and kernels know built-in rules"),
        (lambda: ScaleRule("x", half, storage="pow2"), r"storage='pow2' holds powers of two alone"),
        (lambda: ScaleRule("nearest", half), r"The scale rule 'nearest' has the name of a rounding"),
        (lambda: RoundingRule("tile", up, random=True), r"The rounding 'tile' has the name of a granularity"),
        (lambda: ScaleRule("fp32", half), r"There are two scale rules 'fp32', of Dither and of"),
        (lambda: RoundingRule("x", lambda fraction, odd, random: fraction), r"The rounding 'x' returns a bool per number"),
        (lambda: TransformRule("x", lambda size: torch.ones(size, size)), r"The matrix of the transform 'x' is not orthogonal"),
        (
            lambda: RoundingRule("x", lambda fraction, odd, random: fraction + random >= 1),
            r"random is None without random=True",
        ),
        (lambda: RoundingRule("x", up, kernel=True), r"The rounding 'x' has kernel=True"),
        (lambda: TransformRule("x", lambda size: torch.eye(size) * (size != 64)), r"'x' is not orthogonal at size 64"),
        (lambda: TransformRule("x", lambda size: 1 / 0), r"The reference of the transform 'x' raises ZeroDivisionError"),
        (lambda: TransformRule("x", torch.eye, kernel=True), r"The transform 'x' has kernel=True"),
        (lambda: TransformRule("x", lambda size: 1), r"The transform 'x' returns a float32 matrix \[16, 16\], not 1"),
        (lambda: Recipe.of("fp8", "mxfp8", "mxfp8", "mxfp8"), r"The name 'fp8' already means a recipe"),
        (lambda: Recipe.of("auto", "mxfp8", "mxfp8", "mxfp8"), r"The name 'auto' already means a recipe"),
        (lambda: NamedCast("plain", "e2m1", "tile(32)", "fp32"), r"The cast 'plain' has a name that means no cast"),
        (lambda: NamedCast("x", "e2m1", "tile(32)"), r"A cast is either unscaled"),
        (lambda: Format.from_values("Two words", [0, 1]), r"A format has a name of lowercase letters"),
        (lambda: "e4m3", r"dither\.register takes a Format, a rule, a NamedCast or a Recipe, not 'e4m3'\."),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_registered(make, sentence):
    with pytest.raises(UserError, match=sentence):
        dither.register(Format.from_values("before", [0, 1]), make())
    with pytest.raises(UserError, match="There is no number format 'before'"):
        Cast.parse("before tile(32)")


def test_a_plugin_that_raises_leaves_nothing_behind(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import dither\ndither.register(dither.Format.from_values('seven', [0, 7]))\n"
                    "dither.Cast.parse('seven tile(32)')\n1 / 0\n")  # fmt: skip
    with pytest.raises(UserError, match=r"^The plugin 'broken.py' cannot be imported: ZeroDivisionError: division by zero\.$"):
        registry.load_plugin(path)
    with pytest.raises(UserError, match="There is no number format 'seven'"):
        Cast.parse("seven tile(32)")
    assert not any(plugin.name == "broken.py" for plugin in registry.PLUGINS.values())
    path.write_text("import sys; sys.exit(3)")
    with pytest.raises(UserError, match=r"^The plugin 'broken.py' cannot be imported: SystemExit: 3\.$"):
        registry.load_plugin(path)
    path.write_text("dither.register(")
    with pytest.raises(UserError, match=r"^The plugin 'broken.py' cannot be imported: SyntaxError: "):
        registry.load_plugin(path)
    path.write_text("import dither\n")
    with pytest.raises(UserError, match=r"^In the plugin 'broken.py': it registers nothing: call dither.register in it\.$"):
        registry.load_plugin(path)
    assert [each.name for each in tmp_path.iterdir()] == ["broken.py"]


def test_a_scale_rule_is_tried_with_the_format_of_each_cast():
    dither.register(ScaleRule("shrink", lambda amax, format: amax / format.max * (1 - 2.0**-format.mantissa_bits)))
    assert Cast.parse("e4m3 tile(32) shrink").scaling.rule.name == "shrink"
    with pytest.raises(UserError, match=r"The scale rule 'shrink' returns 0.0 for a group with .* in nf4: scales are positive"):
        Cast.parse("nf4 tile(32) shrink")


def test_a_plugin_is_a_module(tmp_path):
    """Dataclasses and pickle look a module up by its name; one that raises is none."""
    path, before = tmp_path / "whole.py", set(sys.modules)
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pickle, dither\n"
        "@dataclass\nclass Levels:\n    values: list[float]\n"
        "assert pickle.loads(pickle.dumps(Levels([1.0]))) == Levels([1.0])\n"
        "dither.register(dither.Format.from_values('whole', Levels([-1, 0, 1]).values))\n"
    )
    registry.load_plugin(path)
    added = set(sys.modules) - before
    assert len(added) == 1
    path.write_text("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        registry.load_plugin(path)
    assert set(sys.modules) - before == added


def test_two_files_with_one_name_are_refused(tmp_path, capsys):
    for folder, name in (("a", "first"), ("b", "second")):
        (tmp_path / folder).mkdir()
        text = f"import dither\ndither.register(dither.Format.from_values('of-{name}', [0, 1]))\n"
        (tmp_path / folder / "same.py").write_text(text)
    words = [word for folder in "ab" for word in ("--plugin", str(tmp_path / folder / "same.py"))]
    assert cli.main(["formats", *words]) == 2
    assert "Two plugins are called 'same.py', by which a run keeps them: rename one of them." in capsys.readouterr().err


def test_two_plugins_with_one_name_are_refused(tmp_path):
    for name, value in (("one.py", 1), ("two.py", 2)):
        (tmp_path / name).write_text(f"import dither\ndither.register(dither.Format.from_values('pair', [0, {value}]))\n")
    registry.load_plugin(tmp_path / "one.py")
    with pytest.raises(UserError, match=r"In the plugin 'two.py': There are two formats 'pair', of the plugin 'one.py' and of"):
        registry.load_plugin(tmp_path / "two.py")
    assert Format.parse("pair").max == 1


# Plans ----------------------------------------------------------------------------------------------------------------


def in_another_process(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120)


CALLS = "import json, sys; from dither import cli; print('\\n' + json.dumps(list(map(cli.main, json.loads(sys.argv[1])))))"
OPEN = "import sys; from dither import Plan; print(Plan.load(sys.argv[1]).to_json() == open(sys.argv[1]).read())"


def test_a_plan_carries_its_formats_and_names_its_code(tmp_path):
    dither.register(Format.from_values("levels", [-1, 0, 0.5, 1]), Format.floating("odd8", 4, 3, bias=5, nan=True))
    data, path = Recipe.of("levels", "levels row", "odd8 row", "levels row").plan, tmp_path / "plan.json"
    data.save(path)
    found = in_another_process(OPEN, path)
    assert (found.stdout, found.stderr) == ("True\n", "")
    dither.register(RoundingRule("mine", up, random=True))
    Recipe.of("levels", "levels row", "levels row", "levels row mine(16)").plan.save(path)
    assert json.loads(path.read_text())["definitions"]["roundings"] == {"mine": "a test"}
    assert (
        "This plan needs the rounding 'mine', which is code of a test and not registered here"
        in (in_another_process(OPEN, path).stderr.splitlines()[-1])
    )


def test_a_plan_whose_format_means_something_else_here_is_refused():
    dither.register(Format.from_values("levels", [-1, 0, 1]))
    text = Recipe.of("levels", "levels row", "levels row", "levels row").plan.to_json().replace("-1.0, 0.0", "-2.0, 0.0")
    with pytest.raises(UserError, match="There are two formats 'levels', of a test and of a plan"):
        Plan.from_json(text)


# The example package ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """Install examples/plugin into a folder of its own, and return it."""
    folder = tmp_path_factory.mktemp("plugin")
    source = folder / "source"
    source.mkdir()
    for path in EXAMPLE.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(source)], check=True, capture_output=True)
    return folder / "site"


def last(out: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's last checkpoint: weights, optimizer states and the rest."""
    path, _ = checkpoint.newest(out / "checkpoints")
    return checkpoint.load(path)[0]


def test_an_installed_package_is_found_trains_and_resumes_bit_for_bit(installed, tmp_path, monkeypatch):
    text = runs.write_bottles(tmp_path / "text")
    with pytest.raises(UserError, match=r"There is no precision.recipe='penta'"):
        runs.config_of(text, tmp_path / "no", "precision.recipe=penta")
    monkeypatch.syspath_prepend(str(installed))
    for out, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        settings = ("precision.recipe=penta", "optim.schedule=constant", "optim.warmup=0", f"run.steps={steps}")
        config = runs.config_of(text, tmp_path / out, settings)
        runs.train(config, resume=(tmp_path / out).exists())
    whole, parts = last(tmp_path / "whole"), last(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    plan = tmp_path / "whole" / "plan.json"
    assert json.loads(plan.read_text())["definitions"] == {
        "formats": [{"name": "penta", "values": list(Format.parse("penta").codebook)}],
        "roundings": {"coin": "the package 'dither-penta'"},
    }
    own_tests = runpy.run_path(str(EXAMPLE / "test_dither_penta.py"))
    assert [test() for name, test in own_tests.items() if name.startswith("test_")] == [None, None]
    refused = in_another_process(
        CALLS, json.dumps([["plan", "show", str(plan)], ["train", "--resume", "--out", str(plan.parent)]])
    )
    assert json.loads(refused.stdout.splitlines()[-1]) == [2, 2]
    missing = "needs the rounding 'coin', which is code of the package 'dither-penta' and not registered here: install"
    assert refused.stderr.replace("\n", " ").count(missing) == 2


def test_a_run_opens_where_its_formats_and_recipe_are_not_registered(tmp_path):
    path, out = tmp_path / "data.py", tmp_path / "run"
    path.write_text("import dither\ndither.register(dither.Format.from_values('three', [-1, 0, 1]))\n"
                    "dither.register(dither.Recipe.of('three', 'three row', 'three row', 'three row'))\n")  # fmt: skip
    settings = [f'data.sources=["{runs.write_bottles(tmp_path / "text")}"]', *runs.SHORT, "run.steps=1"]
    assert cli.main(["train", "--plugin", str(path), "--out", str(out), "--set", *settings, "precision.recipe=three"]) == 0
    calls = [["inspect", str(out)], ["generate", str(out), "--prompt", "a", "--tokens", "2"]]
    opened = in_another_process(CALLS, json.dumps(calls))
    assert json.loads(opened.stdout.splitlines()[-1]) == [0, 0], opened
    (out / "config.toml").write_text((out / "config.toml").read_text().replace('"three"', '"thre"'))
    with pytest.raises(UserError, match=r"There is no precision.recipe='thre'"):
        load(out / "config.toml")


def test_a_file_is_stored_in_the_run_and_a_resume_needs_it(tmp_path, capsys, monkeypatch):
    text, out, path = runs.write_bottles(tmp_path / "text"), tmp_path / "run", tmp_path / "mine.py"
    path.write_text("import dither\ndither.register(dither.Format.from_values('two', [-1, 0, 1.5]))\n"
                    "dither.register(dither.Recipe.of('two', 'two row', 'two row', 'two row'))\n")  # fmt: skip
    settings = [f'data.sources=["{text}"]', *runs.SHORT, "run.steps=1"]
    assert cli.main(["train", "--plugin", str(path), "--out", str(out), "--set", *settings, "precision.recipe=two"]) == 0
    printed = capsys.readouterr()
    assert "mine.py" in printed.err
    assert "The plugin 'mine.py' has the SHA-256" in printed.out
    assert (out / "plugins" / "mine.py").read_bytes() == path.read_bytes()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(registry, "PLUGINS", {})
        assert cli.main(["train", "--resume", "--out", str(out), "run.steps=2"]) == 2
    message = capsys.readouterr().err
    assert "Python code that a resume does not run unasked" in message
    assert f"--plugin {out / 'plugins' / 'mine.py'}" in message.replace("\n", " ")
    assert cli.main(["train", "--resume", "--out", str(out), "--plugin", str(path), "run.steps=2"]) == 0


# SNIP, GaussWS and the bench --------------------------------------------------------------------------------------------


def test_any_cast_is_a_level_of_snip(capsys):
    dither.register(Recipe.of("levels", "nf4 tile(64)", "nf4 tile(64)", "e4m3 tile(128)"))
    names = [option.name for option in options("fp8-block,nf4 tile(64)")]
    assert (len(names), names[-1]) == (8, "nf4 tile(64)/nf4 tile(64)/nf4 tile(64)")
    assert len(options("fp8-block,levels")) == 4  # both cast gradients alike
    with pytest.raises(UserError, match=r"There is no level 'nf5': choose from .* or write a cast such as"):
        options("fp8-block,nf5")
    assert cli.main(["plan", "options", "--json"]) == 0
    assert {"fp8-block", "mxfp4", "levels"} <= {each["level"] for each in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e3m2", "e2m3"])
def test_bitwidths_follow_from_the_numbers_of_a_format(name):
    element = Format.parse(name)
    book = Format.from_values("book", element.values())
    assert (safe_bitwidth(book), capacity(book)) == (safe_bitwidth(element), capacity(element))
    assert safe_bitwidth("ternary") == 1
    assert safe_bitwidth("nf4") == pytest.approx(1 - torch.tensor(NF4).diff().max().log2().item())


def test_formats_compares_casts(capsys, tmp_path):
    from safetensors.torch import save_file

    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    save_file({"a": x, "b": x.clone(), "bias": x[0].clone()}, tmp_path / "some.safetensors")
    casts = ["mxfp4", "nf4:tile(32)", "nf4:tile(32):stochastic(16)", "e4m3:row", "mxfp4:hadamard(32)"]
    assert cli.main(["formats", "--cast", *casts, "--on", str(tmp_path / "some.safetensors"), "--tensor", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shape"] == [64, 96]
    *plain, transformed = found["casts"]
    assert transformed["product"] < 0.3
    assert transformed["product_hadamard"] is None
    for each, bits in zip(plain, (4.25, 5.0, 5.0, 8 + 32 / 96), strict=True):
        cast = Cast.parse(each["cast"])
        stored = dither.fake_quantize(x, cast, stream=Stream(0, "formats", each["cast"])).double()
        assert each["bits"] == bits
        assert each["sqnr"] == pytest.approx(10 * torch.log10(x.double().square().sum() / (stored - x).square().sum()).item())
        flushed = ((stored == 0) & (x != 0)).double().mean().item()
        sigma = (flushed / x.numel()) ** 0.5 if cast.round.bits else 1e-9
        assert abs(each["flushed"] - flushed) < 5 * sigma + 1 / 32 * bool(cast.round.bits) * flushed
        assert sum(each["histogram"].values()) == pytest.approx(1)
        assert each["histogram"]["0.0"] == pytest.approx((stored == 0).double().mean().item())
        assert 0 < each["product_hadamard"] < 0.5
    assert cli.main(["formats", "--cast", "mxfp4", "--on", str(tmp_path / "some.safetensors")]) == 2
    assert "choose one with --tensor, such as a, b." in capsys.readouterr().err


def test_built_in_recipes_stay_when_a_plugin_that_imports_them_first_raises(tmp_path):
    (tmp_path / "broken.py").write_text("import dither\ndither.Recipe\n1 / 0\n")
    code = (
        "import sys\nfrom dither.spec import registry\nfrom dither.errors import UserError\n"
        "try:\n    registry.load_plugin(sys.argv[1])\nexcept UserError as error:\n    print(error)\n"
        "import dither\nprint(bool(dither.recipe('fp8-block')), registry.RECIPES.added('fp8-block'))\n"
    )
    done = in_another_process(code, tmp_path / "broken.py")
    assert done.stdout.splitlines()[1:] == ["True False"], done.stderr
