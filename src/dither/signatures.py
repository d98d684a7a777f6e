"""Read the options of commands and the fields of configs from source code, because importing PyTorch takes seconds."""

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files

CONFIG = ("train/config.py", "models/settings.py")
"""Files that define `Config` and most of its sections."""

SECTIONS = ("run", "optim", "data", "precision", "model")
"""Sections whose fields are suggested first, if several sections have a field of the same name."""


TABLES = ("Sampling | None",)
"""Types of fields that are sections of their own."""

NUMBER = re.compile("-(inf|infinity|nan)", re.IGNORECASE)
"""Numbers that look like short options."""


@cache
def options_of(module: str, function: str) -> tuple[str, ...]:
    """Return the options of a command, with their short forms, in the order of its arguments.

    >>> options_of("watch", "watch")
    ('--port', '--terminal', '--until-end')
    >>> "-o" in options_of("plan", "plan"), "--from" in options_of("train", "train")
    (True, True)
    """
    tree = _tree(f"commands/{module}.py")
    names = {ast.unparse(line.targets[0]): line.value for line in tree.body if isinstance(line, ast.Assign)}
    command = next(line for line in tree.body if isinstance(line, ast.FunctionDef) and line.name == function)
    found: list[str] = []
    for argument in (*command.args.args, *command.args.kwonlyargs):
        annotation = argument.annotation
        if flat := re.fullmatch(r"tyro\.conf\.OmitArgPrefixes\[(\w+)\]", ast.unparse(annotation) if annotation else ""):
            lines = [line for path in (f"commands/{module}.py", "snip/settings.py") for line in _tree(path).body]
            (kind,) = (line for line in lines if isinstance(line, ast.ClassDef) and line.name == flat[1])
            flags = [ast.unparse(each.target) for each in kind.body if isinstance(each, ast.AnnAssign)]
            found += [f"--{flag.replace('_', '-')}" for flag in flags]
            continue
        parts = list(ast.walk(names.get(ast.unparse(annotation), annotation))) if annotation is not None else []
        given = {
            keyword.arg: ast.literal_eval(keyword.value) for keyword in _keywords(parts) if keyword.arg in ("name", "aliases")
        }
        found += [f"--{given.get('name', argument.arg.replace('_', '-'))}", *given.get("aliases", ())]
    return tuple(found)


@cache
def config_fields() -> tuple[str, ...]:
    """Return fields of a config as section.field, those of the most used sections first.

    >>> [field for field in config_fields() if field.endswith(".seed")]
    ['run.seed', 'data.seed']
    """
    lines = [line for path in CONFIG for line in _tree(path).body if isinstance(line, ast.ClassDef)]
    fields = {
        line.name: {
            ast.unparse(each.target): ast.unparse(each.annotation) for each in line.body if isinstance(each, ast.AnnAssign)
        }
        for line in lines
    }
    sections = {section: fields.get(kind, {}) for section, kind in fields["Config"].items()}
    order = sorted(sections, key=lambda section: SECTIONS.index(section) if section in SECTIONS else len(SECTIONS))
    plain = {section: [name for name, kind in sections[section].items() if kind not in TABLES] for section in order}
    return tuple(f"{section}.{field}" for section in order for field in plain[section])


def unknown_options(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return descriptions of options among `words` that are not in `options`, each with the one that was probably meant.

    A command with the option --set takes fields of the config: these are suggested too.

    >>> unknown_options(["model", "--formt=x", "-o", "out", "--json"], ["--format", "--json", "-o"])
    ['--formt (did you mean --format?)']
    >>> unknown_options(["--step", "5"], ["--set", "--data"])
    ['--step (did you mean --set run.steps=5?)']
    """
    known = {"--help", "-h", *options, *(f"--no-{option[2:]}" for option in options if option.startswith("--"))}
    shorts = tuple(option for option in known if len(option) == 2)
    found = []
    for at, word in enumerate(words):
        if word == "--":  # the words after it are no options
            break
        option, equals, value = word.partition("=")
        if not re.match("--?[a-zA-Z]", option) or NUMBER.fullmatch(option):
            continue
        if option.startswith(shorts) if option[1] != "-" else option.replace("_", "-") in known:
            continue
        after = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else "VALUE"
        found.append(f"{option:.80}{_suggestion(option, value if equals else after, options)}")
    return found


def _suggestion(option: str, value: str, options: Sequence[str]) -> str:
    name = option.lstrip("-").replace("_", "-")
    meant = {each[2:]: each for each in options if each.startswith("--")}
    if "--set" in options:
        for field in config_fields():
            meant.setdefault(field.partition(".")[2].replace("_", "-"), f"--set {field}={value:.80}")
    near = difflib.get_close_matches(name, meant, n=1)
    return f" (did you mean {meant[near[0]]}?)" if near else ""


def _tree(path: str) -> ast.Module:
    return ast.parse((files("dither") / path).read_text(encoding="utf-8"))


def _keywords(parts: Sequence[ast.AST]) -> Iterator[ast.keyword]:
    """Yield the arguments of `tyro.conf.arg(...)` in an annotation."""
    for part in parts:
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "tyro.conf.arg":
            yield from part.keywords
