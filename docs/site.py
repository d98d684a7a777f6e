"""Hooks of the documentation site (mkdocs.yml): pages that are made from other files of the repository."""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COPIED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files of the repository's root."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page: of a file elsewhere, or with an entry for each public name of a package."""
    path = page.file.src_uri
    if path in COPIED:
        return inside_docs((ROOT / COPIED[path]).read_text(encoding="utf-8"))
    markdown = re.sub(r"\[([^]]+)\]\(\.\./(?:src|tests|examples|benchmarks)/[^)]*\)", r"\1", markdown)  # not part of the site
    return re.sub(r"^::: public names of (\S+)$", lambda found: entries(found[1]), markdown, flags=re.MULTILINE)


def inside_docs(text: str) -> str:
    """Return a text of the repository's root with its links as seen from docs/; links to other files become plain text.

    >>> inside_docs("[a](docs/casts.md), [b](docs/casts.md#scales), [c](CONTRIBUTING.md), [d](examples/toy.py), [e](https://x.org)")
    '[a](casts.md), [b](casts.md#scales), [c](contributing.md), d, [e](https://x.org)'
    """
    pages = {name: page for page, name in COPIED.items()}

    def moved(link: re.Match[str]) -> str:
        label, target = link.groups()
        if target.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')})"
        if target in pages:
            return f"[{label}]({pages[target]})"
        return link[0] if "://" in target else label

    return re.sub(r"\[([^]]+)\]\(([^)\s]+)\)", moved, text)


def entries(module: str) -> str:
    """Return a line for mkdocstrings per public name of a module: a name that it imports `as` itself, or defines.

    >>> entries("dither.evaluate").split()[:2]
    [':::', 'dither.evaluate.Perplexity']
    """
    base = ROOT / "src" / Path(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return "\n".join(f"::: {module}.{name}" for name in public_names(path))


def public_names(path: Path) -> list[str]:
    """Return `__all__` of a file, or its public functions and classes and the names that it re-exports, without modules."""
    names = []
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    lazy = [node for block in body if isinstance(block, ast.If) for node in block.body]  # under `if TYPE_CHECKING`
    for node in (*body, *lazy):
        if isinstance(node, ast.ImportFrom) and node.module:
            folder = ROOT / "src" / Path(*node.module.split("."))
            modules = {path.stem for path in folder.glob("*")} if folder.is_dir() else set()
            names += [alias.name for alias in node.names if alias.asname == alias.name and alias.name not in modules]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names.append(node.name)
    return names
