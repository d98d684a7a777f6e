"""What the documentation shows is what happens: the examples in README.md, docs/ and the docstrings run."""

import doctest
import functools
import importlib
import re
import runpy
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import tyro

import dither
from dither import cli
from dither.commands.formats import _row
from dither.spec.formats import TABLE

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCE = Path(dither.__file__).parent
NAMES = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in sorted(SOURCE.rglob("*.py"))]
MODULES = [
    name.removesuffix(".__init__")
    for name in NAMES  # by their files: to walk packages would import them, torchtitan among them, in every process
    if name != "dither.__init__" and not name.startswith("dither.ops.triton")  # these need Triton, and have no examples
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block of a page."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Return the lines of a page's blocks that run `dither`."""
    lines = [line.strip() for language, text in blocks(page) if language in ("", "sh") for line in text.splitlines()]
    lines = [line.removeprefix(".venv/bin/") for line in lines]
    return [line for line in lines if re.match(r"dither [a-z]", line)]


@pytest.mark.parametrize("page", [page for page in PAGES if ">>>" in page.read_text()], ids=lambda page: page.name)
def test_examples_in_pages(page):
    torch.manual_seed(0)
    results = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_python_block_is_run(page):
    """A block of Python without prompts would not be run by the test above."""
    for language, text in blocks(page):
        assert language in ("", "python", "sh", "toml", "text"), language
        if language == "python":
            assert all(part.startswith(">>>") for part in re.split(r"\n\s*\n", text.strip())), text


COMMANDS = [(page, line) for page in PAGES for line in commands(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page.name}: {line[:60]}" for page, line in COMMANDS])
def test_commands_in_pages_parse(page, line):
    words = shlex.split(line, comments=True)[1:]
    found = next((name for name in (" ".join(words[:2]), "-".join(words[:2]), words[0]) if name in cli.COMMANDS), None)
    assert found, line
    entry = cli.COMMANDS[found]
    function = entry.load() if hasattr(entry, "load") else entry
    rest = words[1 if found == words[0] else 2 :]
    calls = []

    @functools.wraps(function)
    def record(*args: object, **options: object) -> int:
        calls.append((args, options))
        return 0

    try:
        tyro.cli(record, args=rest, prog=f"dither {found}")  # exits where an argument is unknown or has a wrong type
    except dither.UserError:
        return  # parsed; the files that it names are not there
    assert calls


def test_commands_that_do_not_parse_are_found():
    with pytest.raises(SystemExit):
        test_commands_in_pages_parse(None, "dither eval runs/x --no-such-flag 1")
    with pytest.raises(AssertionError):
        test_commands_in_pages_parse(None, "dither trian")


SHORT = {"steps = 100": "steps = 4", "sequence = 64": "sequence = 16", "batch = 4": "batch = 2"}
"""Settings of the tutorial's config file, and shorter ones."""


def test_the_tutorial_typed_line_by_line(tmp_path, monkeypatch, capsys):
    """Every command of the tutorial runs, in its order, on a config file with fewer steps and a smaller text."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "tutorial.md"
    (config,) = [text for language, text in blocks(page) if language == "toml"]
    for setting, shorter in SHORT.items():
        assert f"{setting}\n" in config
        config = config.replace(setting, shorter)
    (tmp_path / "small.toml").write_text(config)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"{i} green bottles standing on the wall. " * 8)
    typed = commands(page)
    assert len(typed) >= 10
    for line in typed:
        words = [str(folder) if word == "stdlib" else word for word in shlex.split(line, comments=True)[1:]]
        code = cli.main(words)
        assert code == 0, (line, capsys.readouterr().err)
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {name: sum(bool(test.examples) for test in finder.find(importlib.import_module(name))) for name in MODULES}
    assert found["dither.ops"] >= 5
    assert found["dither.spec.formats"] >= 3


def test_the_table_of_formats_in_the_docs_is_that_of_the_command():
    page = (ROOT / "docs" / "casts.md").read_text()
    for format in TABLE.values():
        assert f"| {' | '.join(_row(format)[:-1])} |" in page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/examples.md"])
def test_files_named_in_pages_exist(page):
    named = re.findall(r"(?:src|tests|docs|benchmarks|examples)/[\w./-]*\w", (ROOT / page).read_text())
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


def test_files_of_the_package_in_the_architecture_page_exist():
    named = re.findall(r"`((?!tests/)[a-z_]+/[a-z_0-9]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 5
    for path in named:
        assert (ROOT / "src" / "dither" / path).exists(), path


def test_the_ways_to_break_a_kernel_are_still_possible():
    """Every line of the table in CONTRIBUTING.md names code that is there, once, and a test; every kernel has a line."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tests = "".join((ROOT / "tests" / name).read_text() for name in ("test_pairs.py", "test_output_loss.py"))
    rows = re.findall(r"^\| `(_\w+)`.* \| `(\w+\.py)` \| `(.+)` \| `(.+)` \| `(test_\w+)` \|$", page, flags=re.MULTILINE)
    assert len(rows) == page.count("\n| `_")
    sources = {path.name: path.read_text() for path in (ROOT / "src" / "dither" / "kernels").glob("*.py")}
    for _, file, old, new, test in rows:
        assert sources[file].count(old.replace("\\|", "|")) == 1, old
        assert old != new
        assert f"def {test}(" in tests
    kernels = {name for source in sources.values() for name in re.findall(r"^def (_\w+_kernel)\(", source, flags=re.MULTILINE)}
    assert {kernel for kernel, *_ in rows} == kernels


SITE = runpy.run_path(str(ROOT / "docs" / "site.py"))
PICTURES = runpy.run_path(str(ROOT / "docs" / "pictures.py"))


def test_every_page_is_in_the_site():
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert re.search(rf"[ :]{re.escape(str(page.relative_to(ROOT / 'docs')))}$", nav, flags=re.MULTILINE), page


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path = target.partition("#")[0]
        if path and "://" not in target:
            assert (page.parent / path).exists(), target


def test_hooks_of_the_site():
    assert doctest.run_docstring_examples(SITE["inside_docs"], SITE) is None
    moved = SITE["inside_docs"]("[a](docs/casts.md#scales), [c](CONTRIBUTING.md), [d](examples/toy.py), [e](https://x.org)")
    assert moved == "[a](casts.md#scales), [c](contributing.md), d, [e](https://x.org)"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda page: page.stem)
def test_the_api_reference_names_what_exists(page):
    (module,) = re.findall(r"^::: public names of (\S+)$", page.read_text(), flags=re.MULTILINE)
    names = [line.split(".")[-1] for line in SITE["entries"](module).splitlines()]
    assert names
    for name in names:
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", PICTURES["PICTURES"])
def test_pictures_are_those_of_the_script(name):
    file = ROOT / "docs" / "pictures" / f"{name}.svg"
    ElementTree.parse(file)
    assert file.read_text() == PICTURES["PICTURES"][name]().svg(), "run python docs/pictures.py"
