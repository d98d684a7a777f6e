"""What the documentation shows is what happens: the examples in README.md, docs/ and the docstrings run."""

import doctest
import functools
import importlib
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
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
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if ">>>" in path.read_text() and "triton" not in path.parts]
MODULES = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__") for path in FILES]
pytestmark = pytest.mark.usefixtures("registry_undone")

OTHERS = ("huggingface.md", "torchtitan.md")
"""Pages about other packages, whose examples tests/integrations runs, with those of dither.integrations."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block of a page."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Return the lines of a page's blocks that run `dither`."""
    texts = [text.replace("\\\n", " ") for language, text in blocks(page) if language in ("", "sh")]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    lines = [line.removeprefix(".venv/bin/") for line in lines]
    return [line for line in lines if re.match(r"dither [a-z]", line)]


def check_page(page: Path) -> None:
    """Run the examples of a page."""
    torch.manual_seed(0)
    results = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert results.attempted > 0
    assert results.failed == 0


def check_docstrings(module: str) -> None:
    """Run the examples in the docstrings of a module."""
    torch.manual_seed(0)
    assert doctest.testmod(importlib.import_module(module)).failed == 0


@pytest.mark.parametrize(
    "page", [page for page in PAGES if ">>>" in page.read_text() and page.name not in OTHERS], ids=lambda page: page.name
)
def test_examples_in_pages(page):
    check_page(page)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("dither.integrations")])
def test_examples_in_docstrings(name):
    check_docstrings(name)


def test_every_python_block_is_run():
    """A block of Python without prompts would not be run by the test above."""
    for page in PAGES:
        for language, text in blocks(page):
            assert language in ("", "python", "sh", "toml", "text"), (page, language)
            if language == "python":
                assert all(part.startswith(">>>") for part in re.split(r"\n\s*\n", text.strip())), (page, text)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_in_pages_parse(page):
    shell = subprocess.run(["bash", "-n"], input="\n".join(commands(page)), text=True, capture_output=True)
    assert not shell.stderr  # such as brackets without quotes
    for line in commands(page):
        words = shlex.split(re.sub(r"--plugin \S+", "", line), comments=True)[1:]  # every command takes one
        found = next((name for name in (" ".join(words[:2]), "-".join(words[:2]), words[0]) if name in cli.COMMANDS), None)
        assert found, line
        entry = cli.COMMANDS[found]
        function = entry.load() if hasattr(entry, "load") else entry
        rest = words[1 if found == words[0] else 2 :]
        calls = []

        @functools.wraps(function)
        def record(*args: object, calls: list[object] = calls, **options: object) -> int:
            calls.append((args, options))
            return 0

        try:
            tyro.cli(record, args=rest, prog=f"dither {found}")  # exits where an argument is unknown or has a wrong type
        except dither.UserError:
            continue  # parsed; the files that it names are not there
        assert calls, line


SHORT = {"steps = 60": "steps = 4", "sequence = 64": "sequence = 16", "batch = 4": "batch = 2"}
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


def test_the_table_of_formats_in_the_docs_is_that_of_the_command():
    page = (ROOT / "docs" / "casts.md").read_text()
    for format in TABLE.values():
        assert f"| {' | '.join(_row(format)[:-1])} |" in page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
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
    """Every line of the table names code that is there, once, and a test; every kernel has a line."""
    page = (ROOT / "tests" / "kernels" / "breaks.md").read_text()
    tests = "".join((ROOT / "tests" / name).read_text() for name in ("test_pairs.py", "test_output_loss.py"))
    rows = re.findall(r"^\| `(_\w+)`.* \| `(\w+\.py)` \| `(.+)` \| `(.+)` \| `(test_\w+)` \|$", page, flags=re.MULTILINE)
    assert len(rows) == page.count("\n| `_")
    sources = {path.name: path.read_text() for path in (SOURCE / "ops" / "triton").glob("*.py")}
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


def test_links_lead_somewhere():
    for page in (*PAGES, *(ROOT / "reproduce").rglob("*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path = target.partition("#")[0]
            if path and "://" not in target:
                assert (page.parent / path).exists(), (page, target)


def test_hooks_of_the_site():
    runner = doctest.DocTestRunner()
    for name in ("inside_docs", "inside_results", "entries"):
        for test in doctest.DocTestFinder().find(SITE[name], name, globs=SITE):
            runner.run(test)
    assert (runner.failures, runner.tries) == (0, 3)
    moved = SITE["inside_docs"]("[a](docs/casts.md#scales), [c](CONTRIBUTING.md), [d](examples/toy.py), [e](https://x.org)")
    assert moved == "[a](casts.md#scales), [c](contributing.md), d, [e](https://x.org)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results/e2e.md"))
    linked = SITE["on_page_markdown"]("[a](../../reproduce/snip/README.md#b)", page=page)
    assert linked == "[a](../results/snip/index.md#b)"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda page: page.stem)
def test_the_api_reference_names_what_exists(page):
    modules = re.findall(r"^::: public names of (\S+)$", page.read_text(), flags=re.MULTILINE)
    assert modules
    for module in modules:
        names = [line.split(".")[-1] for line in SITE["entries"](module).splitlines()]
        assert names
        for name in names:
            assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", PICTURES["PICTURES"])
def test_pictures_are_those_of_the_script(name):
    file = ROOT / "docs" / "pictures" / f"{name}.svg"
    ElementTree.parse(file)
    assert file.read_text() == PICTURES["PICTURES"][name]().svg(), "run python docs/pictures.py"
