"""The direction of imports: a file imports only from files above it in a list, and can be read without those below."""

import ast
from pathlib import Path

import pytest

import dither

ROOT = Path(dither.__file__).parent

ORDER = [
    "dither.errors",
    "dither.ranks",
    "dither.safe_files",
    "dither.formats",
    "dither.precision.checks",
    "dither.precision.patterns",
    "dither.precision.cast",
    "dither.precision.sampling",
    "dither.precision.layer",
    "dither.precision.plan",
    "dither.precision",
    "dither.bitwidths",
    "dither.recipes",
    "dither.engines",
    "dither.devices",
    "dither.random",
    "dither.grouping",
    "dither.adam_update",
    "dither.reference",
    "dither.reference.philox",
    "dither.reference.rounding",
    "dither.reference.packing",
    "dither.reference.scaling",
    "dither.reference.quantize",
    "dither.reference.numerics",
    "dither.reference.sampling",
    "dither.reference.dynamic",
    "dither.reference.adamw",
    "dither.reference.matmul",
    "dither.reference.loss",
    "dither.kernels",
    "dither.kernels.philox",
    "dither.kernels.rounding",
    "dither.kernels.packing",
    "dither.kernels.scaling",
    "dither.kernels.tiles",
    "dither.kernels.quantize",
    "dither.kernels.sampling",
    "dither.kernels.matmul",
    "dither.kernels.loss",
    "dither.kernels.dynamic",
    "dither.kernels.adamw",
    "dither.torch_ops",
    "dither.ops",
    "dither.nn.functional",
    "dither.nn.sampling",
    "dither.nn.output",
    "dither.nn.tensor_parallel",
    "dither.nn.draws",
    "dither.nn.hints",
    "dither.nn.histories",
    "dither.nn.linear",
    "dither.nn.step",
    "dither.nn.experts",
    "dither.nn.conv1d",
    "dither.nn.guidance",
    "dither.nn.norms",
    "dither.nn.conversion",
    "dither.nn.deployment",
    "dither.nn.targets",
    "dither.nn",
    "dither.optim.shards",
    "dither.optim.roles",
    "dither.optim.naming",
    "dither.optim.options",
    "dither.optim.launches",
    "dither.optim.peers",
    "dither.optim.members",
    "dither.optim.states",
    "dither.optim.adamw",
    "dither.optim.adamw8bit",
    "dither.optim.adam_mini",
    "dither.optim.export",
    "dither.optim.products",
    "dither.optim.gradients",
    "dither.optim.scaling",
    "dither.optim.modes",
    "dither.optim",
    "dither.snip.layer_options",
    "dither.snip.update_rules",
    "dither.snip.optimizer_state",
    "dither.snip.statistics",
    "dither.snip.divergence",
    "dither.snip.savings",
    "dither.snip.settings",
    "dither.snip.dry_run",
    "dither.snip.probes",
    "dither.snip.verification",
    "dither.snip.solver",
    "dither.snip.planning",
    "dither.snip.baselines",
    "dither.snip.controller",
    "dither.snip",
    "dither.numerics.report",
    "dither.numerics.updates",
    "dither.numerics.observe",
    "dither.numerics.monitor",
    "dither.numerics",
    "dither.models.causal",
    "dither.models.llama",
    "dither.models.gpt",
    "dither.models.gpt2",
    "dither.models.gpt_neo",
    "dither.models.presets",
    "dither.models.generation",
    "dither.models.hub",
    "dither.models",
    "dither.data.text",
    "dither.data.tokens",
    "dither.data.loader",
    "dither.data",
    "dither.evaluate.held_out",
    "dither.evaluate",
    "dither.theory",
    "dither.advice.memory",
    "dither.advice.recommendation",
    "dither.advice.machine",
    "dither.advice",
    "dither.advice.shapes",
    "dither.doctor",
    "dither.data.command",
    "dither.train.tensorfile",
    "dither.train.checkpoint",
    "dither.train.state",
    "dither.train.guard",
    "dither.train.config",
    "dither.train.distributed",
    "dither.train.metrics",
    "dither.train.progress",
    "dither.train.job",
    "dither.train.loop",
    "dither.train",
    "dither.train.command",
    "dither.snip.command",
    "dither.advice.command",
    "dither.evaluate.command",
    "dither.report.run_folder",
    "dither.report.summary",
    "dither.report.estimates",
    "dither.report.comparison",
    "dither.report.plots",
    "dither.report.maps",
    "dither.report.page",
    "dither.report",
    "dither.report.command",
    "dither.arms",
    "dither.trials",
    "dither.compare",
    "dither.numerics.rest",
    "dither.numerics.lockstep",
    "dither.numerics.command",
    "dither.cli",
    "dither",
]
"""Every module, top to bottom. A new file gets its line here."""


def module_of(path: Path) -> str:
    parts = ("dither", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(tree: ast.AST, module: str, package: bool) -> list[tuple[str, bool]]:
    """(imported module, whether inside a function) for everything of dither that a file imports, wherever it does.

    `from dither import layout` names a module, `from dither.grouping import Layout` a thing in one: the list tells which.
    """
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if package else module.split(".")[:-1]
                base = ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in ORDER else base for alias in node.names]
        found.extend((name, inside) for name in names if name.split(".")[0] == "dither")
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(tree, False)
    return found


def wrong_imports(source: str, module: str, package: bool = False) -> list[str]:
    """The imports of a file that point down the list, to itself, to nowhere, or to the kernels while loading."""
    wrong = []
    for name, inside in imports(ast.parse(source), module, package):
        down = name not in ORDER or ORDER.index(name) >= ORDER.index(module)
        # The kernels need Triton, which not every machine has: they are imported when they are called.
        loading = name.startswith("dither.kernels") and not module.startswith("dither.kernels") and not inside
        if down or loading:
            wrong.append(name)
    return wrong


def test_every_file_has_its_line_in_the_list():
    assert sorted(set(FILES) - set(ORDER)) == []
    assert len(set(ORDER)) == len(ORDER)


def test_the_list_has_no_line_without_a_file():
    commands = {"dither.doctor", "dither.cli"}  # these may be missing
    assert set(ORDER) - set(FILES) <= commands


@pytest.mark.parametrize("module", FILES)
def test_imports_point_up(module):
    path = FILES[module]
    assert wrong_imports(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("module", FILES)
def test_only_operators_import_by_string_and_only_kernels_import_triton(module):
    # An import by string would escape the tests above; operators have one, to choose between a pair.
    tree = ast.parse(FILES[module].read_text())
    by_string = any(
        isinstance(node, ast.Attribute | ast.Name)
        and getattr(node, "attr", getattr(node, "id", "")) in ("import_module", "__import__")
        for node in ast.walk(tree)
    )
    assert not by_string or module == "dither.torch_ops"
    if not module.startswith("dither.kernels"):
        loaded = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in loaded if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in loaded if isinstance(node, ast.ImportFrom)}
        assert not any(name.split(".")[0] == "triton" for name in names)


@pytest.mark.parametrize(
    ("source", "module", "package", "wrong"),
    [
        ("from dither.errors import UserError", "dither.formats", False, []),
        ("from dither.formats import Format", "dither.errors", False, ["dither.formats"]),
        ("import dither.ops", "dither.random", False, ["dither.ops"]),
        ("from dither import grouping", "dither.reference.scaling", False, []),
        ("from dither import ops", "dither.reference.scaling", False, ["dither.ops"]),
        ("from dither import Cast", "dither.ops", False, ["dither"]),
        ("from dither.ops import quantize", "dither", True, []),
        ("def f():\n    from dither.ops import quantize", "dither.grouping", False, ["dither.ops"]),
        ("class A:\n    if True:\n        import dither.cli", "dither.ops", False, ["dither.cli"]),
        ("def f():\n    from dither.kernels import native", "dither.ops", False, []),
        ("from dither.kernels import native", "dither.ops", False, ["dither.kernels"]),
        ("from dither.kernels import native", "dither.kernels.philox", False, []),
        ("from dither.kernels import scaling", "dither.kernels.rounding", False, ["dither.kernels.scaling"]),
        ("from dither.reference import quantize", "dither.reference.rounding", False, ["dither.reference.quantize"]),
        ("from . import quantize", "dither.reference.rounding", False, ["dither.reference.quantize"]),
        ("from .quantize import pack", "dither.reference", True, ["dither.reference.quantize"]),
        ("from ..errors import UserError", "dither.reference.philox", False, []),
        ("from dither.nowhere import x", "dither.ops", False, ["dither.nowhere"]),
        ("import torch, math\nfrom torch import Tensor", "dither.errors", False, []),
    ],
)
def test_the_check_sees_what_it_should(source, module, package, wrong):
    assert wrong_imports(source, module, package) == wrong
