"""Hooks of the documentation site (mkdocs.yml): pages that are made from other files of the repository."""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COPIED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files of the repository's root."""


def on_files(files: Any, *, config: Any) -> Any:
    """Add the READMEs, tables and figures of reproduce/ as results/."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "reproduce").glob("*/**/*")):
        if path.suffix in (".md", ".svg"):
            at = path.relative_to(ROOT / "reproduce").with_name(path.name.replace("README.md", "index.md")).as_posix()
            content = inside_results(path.read_text(encoding="utf-8")) if path.suffix == ".md" else path.read_bytes()
            files.append(File.generated(config, f"results/{at}", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page: of a file elsewhere, or with an entry for each public name of a package."""
    path = page.file.src_uri
    if path in COPIED:
        return inside_docs((ROOT / COPIED[path]).read_text(encoding="utf-8"))
    results = "../" * path.count("/") + "results"
    markdown = re.sub(r"\]\((?:\.\./)+reproduce/([\w-]+)/README\.md", rf"]({results}/\1/index.md", markdown)
    markdown = re.sub(r"\[([^]]+)\]\(\.\./(?:src|tests|examples|benchmarks)/[^)]*\)", r"\1", markdown)  # not part of the site
    return re.sub(r"^::: public names of (\S+)$", lambda found: entries(found[1]), markdown, flags=re.MULTILINE)


def inside_docs(text: str) -> str:
    """Return a text of the repository's root with its links as seen from docs/; links to other files become plain text.

    >>> inside_docs("[a](docs/casts.md#scales), [b](CONTRIBUTING.md), [c](examples/toy.py), [d](reproduce/snip/README.md)")
    '[a](casts.md#scales), [b](contributing.md), c, [d](results/snip/index.md)'
    """
    pages = {name: page for page, name in COPIED.items()}

    def moved(link: re.Match[str]) -> str:
        label, target = link.groups()
        if target.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')})"
        if target in pages:
            return f"[{label}]({pages[target]})"
        if target.startswith("reproduce/"):
            return f"[{label}]({target.replace('reproduce/', 'results/').replace('README.md', 'index.md')})"
        return link[0] if "://" in target else label

    return re.sub(r"\[([^]]+)\]\(([^)\s]+)\)", moved, text)


def inside_results(text: str) -> str:
    """Return a page of a folder of reproduce/ with its links as seen from a folder of docs/results/.

    >>> inside_results("[a](../snip/README.md#b), [c](../../docs/snip.md), ![d](d.svg), [e](ladder.toml), [f](ladder.md)")
    '[a](../snip/index.md#b), [c](../../snip.md), ![d](d.svg), e, [f](ladder.md)'
    """
    text = text.replace("/README.md", "/index.md").replace("](../../docs/", "](../../")
    return re.sub(r"\[([^]]+)\]\((?![^)]*://)[^)\s]*\.(?:toml|json|py|txt)\)", r"\1", text)


def entries(module: str) -> str:
    """Return a line for mkdocstrings per public name of a module: a name that it imports `as` itself, or defines.

    >>> entries("dither.evaluate").split()[:2]
    [':::', 'dither.evaluate.Deployment']
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
