"""Prose and sizes: no phrase that a reader stumbles over, no docstring that is a fragment, no file that is too long to read."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import dither

ROOT = Path(__file__).parent.parent

OPEN = (
    "src/dither",
    *(f"docs/{name}.md" for name in ("training", "data", "checkpoints", "reliability", "snip", "snip-planning", "numerics")),
    *(f"docs/{name}.md" for name in ("memory", "comparing", "reports", "evaluation", "models", "optimizers", "casts")),
    *(f"docs/{name}.md" for name in ("stochastic-rounding", "fp16", "int8", "fp8-scaling", "engines", "sampling")),
    "docs/precision.md",  # its table holds the sentences of src/dither/recipes.py
    "docs/results",
)
"""Files and folders whose language is not checked yet. Empty this when they are rewritten."""

STILL_LONG = ("doctor.py", "train/config.py", "data/tokens.py")
"""Files of src/dither with more than 600 lines that are not split yet."""

LINES = 600
"""The most lines of a file, unless docs/architecture.md says why it is better long."""

PHRASES = (
    "Raise where a cut goes through what shares a scale",
    "sums that are still to be added up are, and cut rows are gathered",
    "Whether it is outputs that are cut, or else inputs",
    "how many a process has, the last perhaps fewer",
    "a graph that knows it serves no other layer",
    "Of how many losses the loss is the mean",
    "or none of them if one cannot have it",
    "why some now run uncast, by name",
    "that only the loss is looked at of",
    "a folder that tells what happened and can be gone on from",
    "it is not to be told at",
    "begin to think about them",
    "what any rank has against that",
)
"""Sentences of earlier versions that had to be read twice."""

HABITS = {
    "'a' for 'per'": r"\b(?:tokens?|bits?|bytes?|steps?|ms|passes|instructions|parameters?|scales?|elements?|GiB|rows?) an? "
    r"(?:second|byte|token|step|layer|parameter|element|block|tensor|process|row|weight|rank|seed)\b",
    "personification": r"\b(?:nobody|somebody) (?:looks|waits|wants|asks|reads|knows|holds|gave)\b|\bwaits? for backward\b",
    "a translated idiom": r"not to be told|to be told from|gone on from|goes? on from|looked at of",
}
"""Patterns that often make a sentence hard to read, with their names."""

FRAGMENTS = ("What", "Of", "Whether", "How")
"""Words that a docstring of a public name does not begin with."""


def is_open(path: Path) -> bool:
    """Return True if a file is in OPEN or in a folder of it."""
    name = path.relative_to(ROOT).as_posix()
    return any(name == part or name.startswith(f"{part}/") for part in OPEN)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = [*PAGES, *sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
CHECKED = [path for path in FILES if not is_open(path)]


def faults(text: str) -> list[str]:
    """Return what the tests below complain of, with the line or the phrase."""
    joined = " ".join(text.split()).lower()
    found = [phrase for phrase in PHRASES if phrase.lower() in joined]
    for name, pattern in HABITS.items():
        found += [f"{name}: {line.strip()}" for line in text.splitlines() if re.search(pattern, line)]
    return found + [f"an em dash: {line.strip()}" for line in text.splitlines() if "\N{EM DASH}" in line]


@pytest.mark.parametrize("path", CHECKED, ids=[str(path.relative_to(ROOT)) for path in CHECKED])
def test_prose_reads_at_once(path):
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    ["526 tokens a second", "Codes wait for backward.".replace("wait", "waits"), "a run is gone on from", "one \N{EM DASH} two",
     "further batches that only\nthe loss is looked at of"],
)  # fmt: skip
def test_the_check_sees_what_it_should(text):
    assert faults(text)


MODULES = [
    module.name
    for module in pkgutil.walk_packages(dither.__path__, "dither.")
    if not any(part.startswith("_") for part in module.name.split("."))
    and not module.name.startswith("dither.kernels")  # these need Triton
    and not is_open(ROOT / "src" / Path(*module.name.split(".")))
    and not is_open((ROOT / "src" / Path(*module.name.split("."))).with_suffix(".py"))
]


def documented(module: str) -> list[tuple[str, str]]:
    """Return (name, docstring) of a module, and of its public functions, classes and methods."""
    loaded = importlib.import_module(module)
    found = [(module, loaded.__doc__ or "")]
    for name, item in vars(loaded).items():
        if name.startswith("_") or getattr(item, "__module__", None) != module:
            continue
        if inspect.isclass(item) or inspect.isfunction(item):
            found.append((f"{module}.{name}", item.__doc__ or ""))
        if inspect.isclass(item):
            for member, value in vars(item).items():
                if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    found.append((f"{module}.{name}.{member}", value.__doc__ or ""))
    return found


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_are_no_fragments(module):
    assert [name for name, doc in documented(module) if doc.lstrip().startswith(tuple(f"{word} " for word in FRAGMENTS))] == []


def test_fragments_are_found():
    tree = ast.parse('def f():\n    """What each group is divided by."""')
    assert ast.get_docstring(tree.body[0]).startswith(FRAGMENTS)
    assert any(name == "dither.ops.quantize" for name, _ in documented("dither.ops"))
    assert any(name == "dither.ops.Quantized.dequantize" for name, _ in documented("dither.ops"))


def test_long_files_are_explained():
    reasons = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "dither"
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).as_posix()
        if len(path.read_text().splitlines()) > LINES and name not in STILL_LONG:
            assert f"`{name}`" in reasons, name
