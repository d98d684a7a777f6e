"""Prose and sizes: no phrase that a reader stumbles over, no docstring that is a fragment, no file that is too long to read."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

OPEN: tuple[str, ...] = ()
"""Files whose language is not checked yet. Empty this when they are rewritten."""

LINES, CLASS_LINES, PARAMETERS = 600, 250, 10
"""The most lines of a file and of a class, and the most parameters of a function outside of kernels."""

LONG: dict[str, str] = {
    "optim/adamw.py": "AdamW.__init__",
    "nn/linear.py": "Linear.__init__",
    "nn/targets.py": "choose_targets",
    "nn/functional.py": "forward",
    "nn/output_loss.py": "forward",
    "nn/conversion.py": "convert",
    "commands/": "",
    "torch_ops.py": "",
}
"""Exceptions: files or folders, and the class or function ("" means all functions). docs/architecture.md has their reasons."""

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
"""Words that no docstring begins with."""


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


def by_file(files: list[Path], check: Callable[[Path, str], list[str]]) -> dict[str, list[str]]:
    """Return what a check finds in each file, without the files in which it finds nothing."""
    found = {str(path.relative_to(ROOT)): check(path, path.read_text(encoding="utf-8")) for path in files}
    return {name: complaints for name, complaints in found.items() if complaints}


def test_prose_reads_at_once():
    assert len(CHECKED) > 300
    assert by_file(CHECKED, lambda _, text: faults(text)) == {}


@pytest.mark.parametrize(
    "text",
    ["526 tokens a second", "Codes wait for backward.".replace("wait", "waits"), "a run is gone on from", "one \N{EM DASH} two",
     "further batches that only\nthe loss is looked at of"],
)  # fmt: skip
def test_the_check_sees_what_it_should(text):
    assert faults(text)


SOURCES = sorted((ROOT / "src" / "dither").rglob("*.py"))
CHECKED_SOURCES = [path for path in SOURCES if not is_open(path)]


def strings(text: str) -> list[str]:
    """Return the docstrings of a module's functions and classes, and the strings below its constants and fields."""
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    return [
        node.value.value for node in statements if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def fragments(text: str) -> list[str]:
    """Return the docstrings that begin with one of FRAGMENTS."""
    return [string for string in strings(text) if string.split()[0].rstrip(",:") in FRAGMENTS]


def test_docstrings_are_no_fragments():
    assert by_file(CHECKED_SOURCES, lambda _, text: fragments(text)) == {}


@pytest.mark.parametrize("word", FRAGMENTS)
def test_fragments_are_found(word):
    assert fragments(f'def _f():\n    """{word} each group is divided by."""')
    assert fragments(f'class A:\n    x: int\n    """{word} many."""')
    assert not fragments('def f():\n    """Return the scale of each group."""')


def too_long(name: str, text: str) -> list[str]:
    """Return the names of the classes and functions of a file of src/dither that are longer than the limits."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                if child.end_lineno - child.lineno >= CLASS_LINES:
                    found.append(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = child.args
                count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
                if count > PARAMETERS and not name.startswith("kernels/"):
                    found.append(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(text), "")
    return found


def is_excepted(name: str, item: str) -> bool:
    """Return True if LONG has the file or its folder, with this class or function or with all."""
    entries = [value for key, value in LONG.items() if name == key or (key.endswith("/") and name.startswith(key))]
    return any(entry in ("", item) or item.endswith(f".{entry}") for entry in entries)


def unexcepted(path: Path, text: str) -> list[str]:
    """Return what is too long in a file, the file itself among it, and is no exception."""
    name, lines = path.relative_to(ROOT / "src" / "dither").as_posix(), len(text.splitlines())
    whole = [f"{lines} lines"] if lines > LINES else []
    return whole + [item for item in too_long(name, text) if not is_excepted(name, item)]


def test_what_is_long_is_an_exception():
    assert by_file(SOURCES, unexcepted) == {}


def test_exceptions_exist_and_have_reasons():
    reasons = (ROOT / "docs" / "architecture.md").read_text()
    for key, item in LONG.items():
        assert f"| `{key}`" in reasons, key
        assert not item or f"`{item}`" in reasons, item
        paths = [path for path in SOURCES if path.relative_to(ROOT / "src" / "dither").as_posix().startswith(key)]
        assert any(too_long(key, path.read_text(encoding="utf-8")) for path in paths), f"{key} needs no exception"


def test_what_is_long_is_found():
    many = ", ".join(f"x{index}" for index in range(PARAMETERS + 1))
    assert too_long("ops.py", f"class A:\n    def f({many}):\n        pass") == ["A.f"]
    assert too_long("kernels/ops.py", f"def f({many}):\n    pass") == []
    assert too_long("ops.py", "class A:\n" + "    x = 1\n" * CLASS_LINES) == ["A"]
    assert too_long("ops.py", "class A:\n" + "    x = 1\n" * (CLASS_LINES - 1)) == []
    assert unexcepted(ROOT / "src" / "dither" / "ops.py", "x = 1\n" * (LINES + 1)) == [f"{LINES + 1} lines"]
    assert unexcepted(ROOT / "src" / "dither" / "ops.py", "x = 1\n" * LINES) == []
