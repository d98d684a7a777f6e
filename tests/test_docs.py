"""What the documentation shows is what happens: the examples in README.md, docs/ and the docstrings run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import dither
from dither.commands.formats import _row
from dither.formats import TABLE

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.stem != "benchmarks")]  # no code there
MODULES = [
    module.name
    for module in pkgutil.walk_packages(dither.__path__, "dither.")
    if not module.name.startswith("dither.kernels")  # these need Triton, and have no examples
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_in_pages(page):
    torch.manual_seed(0)
    results = doctest.testfile(str(page), module_relative=False)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {name: sum(bool(test.examples) for test in finder.find(importlib.import_module(name))) for name in MODULES}
    assert found["dither.ops"] >= 5
    assert found["dither.formats"] >= 3


def test_the_table_of_formats_in_the_docs_is_that_of_the_command():
    page = (ROOT / "docs" / "casts.md").read_text()
    for format in TABLE.values():
        assert f"| {' | '.join(_row(format)[:-1])} |" in page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_files_named_in_pages_exist(page):
    named = re.findall(r"(?:src|tests|docs|benchmarks|examples)/[\w./-]*\w", (ROOT / page).read_text())
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


def test_the_ways_to_break_a_kernel_are_still_possible():
    """Every line of the table in CONTRIBUTING.md names code that is there, once, and a test; every kernel has a line."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tests = (ROOT / "tests" / "test_pairs.py").read_text()
    rows = re.findall(r"^\| `(_\w+)`.* \| `(\w+\.py)` \| `(.+)` \| `(.+)` \| `(test_\w+)` \|$", page, flags=re.MULTILINE)
    assert len(rows) == page.count("\n| `_")
    sources = {path.name: path.read_text() for path in (ROOT / "src" / "dither" / "kernels").glob("*.py")}
    for _, file, old, new, test in rows:
        assert sources[file].count(old.replace("\\|", "|")) == 1, old
        assert old != new
        assert f"def {test}(" in tests
    kernels = {name for source in sources.values() for name in re.findall(r"^def (_\w+_kernel)\(", source, flags=re.MULTILINE)}
    assert {kernel for kernel, *_ in rows} == kernels
