"""Docstrings for the API reference (an extension of griffe, named in mkdocs.yml): doctests become blocks of code."""

from typing import Any

from griffe import Extension, Object


class Doctests(Extension):
    """Put a fence around each doctest, and escape what Markdown would read as a link."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object when it has been read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return a docstring with a fence around each doctest, which ends at an empty line."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        starts = not inside and line.lstrip().startswith(">>> ")
        if starts:
            margin = line[: len(line) - len(line.lstrip())]
            lines += ["", f"{margin}```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append(f"{margin}```")
            inside = False
        lines.append(line if inside else line.replace("][", "]\\["))
    return "\n".join([*lines, f"{margin}```"] if inside else lines)
