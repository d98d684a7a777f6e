"""The table of sources: every name in its middle column exists."""

import ast
import importlib
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from dither import cli
from dither.train.config import Config

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "sources.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| source |")
]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])})


def exists(name: str) -> bool:
    """Whether a name is a file (with a test in it), a command, a function or class, or a field of a config."""
    path, _, test = name.partition("::")
    if "/" in path:
        file = ROOT / path
        return file.is_file() and (not test or test in _functions(file))
    if name.startswith("dither "):
        return " ".join(name.split()[1:]) in cli.COMMANDS
    if name.startswith("dither"):
        return _resolves(name.split("."))
    section, _, field = name.partition(".")
    kind = {each.name: each.default_factory for each in fields(Config)}.get(section)
    return is_dataclass(kind) and field in {each.name for each in fields(kind)}


def _functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def _resolves(parts: list[str]) -> bool:
    """Whether parts are a module and names in it, one after the other."""
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for name in parts[end:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name):
    assert exists(name)


def test_every_row_has_a_source_a_place_and_a_difference():
    assert len(ROWS) > 80
    for row in ROWS:
        assert len(row) == 3, row
        assert re.search(r"`[^`]+`", row[1]), row


@pytest.mark.parametrize(
    "name",
    ["dither.nothing", "dither.snip.Snipp", "dither.theory.Adam.bound", "dither trains", "dither plan verified", "snip.row",
     "optimizer.lr", "docs/nothing.md", "tests/test_sources.py::test_nothing"],
)  # fmt: skip
def test_the_check_finds_what_does_not_exist(name):
    assert not exists(name)


def test_the_check_finds_what_exists():
    names = ["dither.snip.Snip", "dither plan verify", "snip.rows", "tests/test_sources.py::test_every_name_exists"]
    assert all(map(exists, names))
