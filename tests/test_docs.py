"""What the documentation shows is what happens: the examples in README.md, docs/ and the docstrings run."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import dither

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [
    module.name
    for module in pkgutil.walk_packages(dither.__path__, "dither.")
    if not module.name.startswith("dither.kernels")  # these need Triton, and have no examples
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_in_pages(page):
    results = doctest.testfile(str(page), module_relative=False)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {name: sum(bool(test.examples) for test in finder.find(importlib.import_module(name))) for name in MODULES}
    assert found["dither.ops"] >= 5
    assert found["dither.formats"] >= 3


def test_the_table_of_formats_in_the_docs_is_that_of_the_command():
    from dither import cli
    from dither.formats import TABLE

    page = (ROOT / "docs" / "casts.md").read_text()
    for format in TABLE.values():
        assert f"| {' | '.join(cli._row(format)[:-1])} |" in page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_files_named_in_pages_exist(page):
    import re

    named = re.findall(r"(?:src|tests|docs|benchmarks)/[\w./]*\w", (ROOT / page).read_text())
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
