"""The direction of imports: folders form a column, each imports only from those before it, and files form no cycles."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import dither
from dither import cli

ROOT = Path(dither.__file__).parent

COLUMN = (
    *("errors", "lazy", "files", "settings", "run_lock", "versions", "console"),
    *("spec", "ops", "nn", "optim", "snip", "numerics", "data", "checkpoint", "models", "parallel"),
    *("evaluate", "train", "report", "exporting", "tools", "integrations", "commands", "cli", "__main__", "dither"),
)
"""Every folder and every module outside of folders, in the order of imports; "dither" is the package itself."""


def module_of(path: Path) -> str:
    parts = ("dither", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """Return the folder of a module, or its own name if it is in none."""
    return module.split(".")[1] if "." in module else "dither"


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(tree: ast.AST, module: str, package: bool) -> list[tuple[str, bool]]:
    """Return (imported module, True if inside a function) for every import of dither in a file.

    `from dither.spec import groups` names a module, `from dither.spec.groups import GroupLayout` a class: FILES tells.
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
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names]
        found.extend((name, inside) for name in names if name.split(".")[0] == "dither")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # no expression holds an import
                visit(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(tree, False)
    return found


@functools.cache
def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@functools.cache
def imports_of(module: str) -> list[tuple[str, bool]]:
    """Return `imports` of a file."""
    return imports(parsed(module), module, FILES[module].name == "__init__.py")


def wrong_imports(source: str, module: str, package: bool = False) -> list[str]:
    """Return the imports of a file from folders after its own, from itself, from nowhere, or from the kernels while loading."""
    return wrong_among(imports(ast.parse(source), module, package), module)


def wrong_among(imported: list[tuple[str, bool]], module: str) -> list[str]:
    """Return those of a module's imports that `wrong_imports` describes."""
    wrong = []
    here = COLUMN.index(folder_of(module))
    for name, inside in imported:
        up = name not in FILES or name == module or COLUMN.index(folder_of(name)) > here
        # The kernels need Triton, which not every machine has: they are imported when they are called.
        loading = name.startswith("dither.ops.triton") and not module.startswith("dither.ops.triton") and not inside
        if up or loading:
            wrong.append(name)
    return wrong


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a cycle of imports, or [] if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        found = next(filter(None, (visit(name, [*path, module]) for name in sorted(graph.get(module, ())))), [])
        done.add(module)
        return found

    return next(filter(None, (visit(module, []) for module in graph)), [])


def test_the_column_names_every_folder_and_nothing_else():
    assert {folder_of(module) for module in FILES} == set(COLUMN)
    assert len(set(COLUMN)) == len(COLUMN)


def test_a_file_imports_only_from_its_own_folder_and_those_before_it():
    found = {module: wrong_among(imports_of(module), module) for module in FILES}
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


def test_no_cycles_of_files():
    assert cycle_of({module: {name for name, _ in imports_of(module)} for module in FILES}) == []


def test_nothing_imports_the_commands_and_reports_need_no_training():
    for module in FILES:
        names = [name for name, _ in imports_of(module)]
        if folder_of(module) != "commands":
            assert not any(folder_of(name) == "commands" for name in names), module
        if folder_of(module) == "report":
            assert not any(folder_of(name) == "train" for name in names), module


def test_a_cycle_is_found():
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def hidden_imports(tree: ast.Module, module: str) -> list[str]:
    """Return the names by which a file imports by string, and "triton" if it loads that outside of the kernels.

    An import by string escapes the tests above. ops.backend chooses between a reference and its kernel by one; the package and
    the command line import what is used, when it is used.
    """
    found: list[str] = []
    if module not in ("dither", "dither.cli", "dither.lazy", "dither.ops.backend"):
        names = [getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)]
        found += [name for name in names if name in ("import_module", "__import__")]
    if not module.startswith("dither.ops.triton"):
        loaded = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
        loaded += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
        found += [name for name in loaded if name.split(".")[0] == "triton"]
    return found


def test_few_files_import_by_string_and_only_kernels_import_triton():
    found = {module: hidden_imports(parsed(module), module) for module in FILES}
    assert {module: names for module, names in found.items() if names} == {}


def test_hidden_imports_are_found():
    source = "import importlib\nimport triton.language as tl\nfrom triton import jit\nimportlib.import_module('x')"
    tree = ast.parse(source)
    assert hidden_imports(tree, "dither.ops") == ["import_module", "triton.language", "triton"]
    assert hidden_imports(tree, "dither.ops.backend") == ["triton.language", "triton"]
    assert hidden_imports(tree, "dither.ops.triton.philox") == ["import_module"]
    assert hidden_imports(ast.parse("def f():\n    import triton\n    __import__('x')"), "dither.ops") == ["__import__"]


@pytest.mark.parametrize(
    ("source", "module", "package", "wrong"),
    [
        ("from dither.errors import UserError", "dither.spec.formats", False, []),
        ("from dither.spec import groups", "dither.ops.reference.scales", False, []),
        ("from dither import nn", "dither.ops.reference.scales", False, ["dither.nn"]),
        ("from dither import Cast", "dither.ops", False, ["dither"]),
        ("def f():\n    from dither.ops import quantize", "dither.spec.groups", False, ["dither.ops"]),
        ("def f():\n    from dither.ops.triton import native", "dither.ops", False, []),
        ("from dither.ops.triton import native", "dither.ops", False, ["dither.ops.triton"]),
        (
            "from dither.ops.reference import rounding",
            "dither.ops.reference.rounding",
            False,
            ["dither.ops.reference.rounding"],
        ),
        ("from ...nn import linear", "dither.ops.reference.rounding", False, ["dither.nn.linear"]),
        ("from ..triton.quantize import pack", "dither.ops.reference.rounding", False, ["dither.ops.triton.quantize"]),
        ("from dither.nowhere import x", "dither.ops", False, ["dither.nowhere"]),
    ],
)
def test_the_check_sees_what_it_should(source, module, package, wrong):
    assert wrong_imports(source, module, package) == wrong


def test_every_public_name_exists():
    """`dither.__all__` is what users call, about 40 names; each is imported when it is first used."""
    assert sorted(dither.__all__) == dither.__all__
    assert all(hasattr(dither, name) for name in dither.__all__)
    assert not hasattr(dither, "training_step")


def test_the_specification_the_config_and_commands_need_no_torch():
    """So that help, mistakes in arguments, plans and reports do not wait for it."""
    loads = ["dither", "dither.train.config", *(f"dither.commands.{command.module}" for command in cli.COMMANDS.values())]
    loads += [f"dither.spec.{path.stem}" for path in (ROOT / "spec").glob("[a-z]*.py")]
    code = f"import importlib, sys\nfor name in {loads!r}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
