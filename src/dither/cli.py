"""The entry point of the command line: `dither COMMAND ...`.

Modules of commands import no torch until a command runs, so help and mistakes are shown at once.
"""

import difflib
import errno
import functools
import importlib
import inspect
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, NamedTuple, TextIO

from dither.console import LastingStream, printable
from dither.errors import DitherError, UserError, did_you_mean
from dither.spec import registry
from dither.versions import version

DESCRIPTION = "Train language models in few bits, compare precisions, evaluate, report, and choose each layer's precision."


class Command(NamedTuple):
    """A function of `dither.commands`: its arguments are the options of the command, its docstring is the help."""

    module: str
    function: str
    long: bool = False
    """True if it may take longer than importing PyTorch: it says at once that it has begun, also where its output is piped."""
    lasting: bool = False
    """True if it goes on without a terminal: the loss of its output does not end it."""
    light: bool = False
    """True if it imports no PyTorch, which takes seconds."""

    def load(self) -> Callable[..., int]:
        """Import the function."""
        function: Callable[..., int] = getattr(importlib.import_module(f"dither.commands.{self.module}"), self.function)
        return function

    @property
    def summary(self) -> str:
        """The first line of the help, without its period."""
        return (inspect.getdoc(self.load()) or "").partition("\n")[0].removesuffix(".")


COMMANDS = {
    "train": Command("train", "train", long=True, lasting=True),
    "compare": Command("compare", "compare", long=True, lasting=True),
    "ladder": Command("ladder", "ladder", long=True, lasting=True),
    "eval": Command("evaluate", "evaluate", long=True),
    "export": Command("export", "export", long=True),
    "generate": Command("generate", "generate", long=True),
    "chat": Command("generate", "chat", long=True),
    "report": Command("report", "report", light=True),
    "watch": Command("report", "watch", light=True),
    "runs": Command("report", "runs", light=True),
    "data prepare": Command("data", "prepare", long=True),
    "data show": Command("data", "show"),
    "plan": Command("plan", "plan", long=True),
    "plan options": Command("plan", "options"),
    "plan show": Command("plan", "show"),
    "plan diff": Command("plan", "diff"),
    "plan auto": Command("plan", "auto", long=True),
    "plan static": Command("plan", "static"),
    "plan frontier": Command("plan", "frontier", long=True),
    "inspect": Command("numerics", "inspect", long=True),
    "bisect": Command("numerics", "bisect", long=True),
    "memory": Command("memory", "memory"),
    "advise": Command("advise", "advise", long=True),
    "formats": Command("formats", "formats", light=True),
    "bench": Command("bench", "bench", long=True),
    "doctor": Command("doctor", "doctor", long=True),
}
"""The commands by the words that follow `dither`. A dash may replace the space, as in `dither plan-show`."""

WORDS = {"STR": "TEXT", "INT": "INTEGER", "FLOAT": "NUMBER"}
"""The values of options in the help."""

FIRST = ("run", "optim", "data", "precision", "model")
"""Sections whose fields are suggested first, if several sections have a field of the same name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dither` and return its exit code. A mistake in the arguments is one line on stderr and exit code 2.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    dither ...
    0
    """
    if arguments is None:  # a process of its own: commands show their own progress, without bars of other packages between
        os.environ.setdefault("TQDM_DISABLE", "1")
        _open_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words, lasting=arguments is None)
        sys.stdout.flush()  # so that a closed pipe raises here
        return code
    except DitherError as error:
        if not error.told:
            print(f"dither: error: {printable(str(error))}", file=sys.stderr)
        # With code 1 no argument would change it, for example a lost process.
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("dither: error: Interrupted.", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EPIPE):
            raise
        if error.errno != errno.EPIPE:
            print("dither: error: Too many files are open at once: raise the limit, as by `ulimit -n 1024`.", file=sys.stderr)
            return 2
        # The reader of our output, such as `head`, has closed it. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _open_streams() -> None:
    """Open standard streams that were closed, as by `>&-`: the next files would take their numbers, and be printed into."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _run(words: list[str], *, lasting: bool = False) -> int:
    if words == ["--version"]:
        print(f"dither {version()}")
        return 0
    if words and words[0].startswith("--tyro-"):
        return _print_completion(words)
    words = _load_plugins(words)
    name, rest = _split(words)
    asked = rest[:1] in (["-h"], ["--help"])
    if asked and (name not in COMMANDS or _below(name)):
        print(_help(name), end="\n\n" if name in COMMANDS else "\n")
    if name in COMMANDS:
        command = COMMANDS[name]
        if command.lasting and lasting:
            sys.stdout, sys.stderr = LastingStream("stdout"), LastingStream("stderr")
        call = _parse(command.load(), name, [_resume(word) for word in rest])
        if not command.light:
            _import_torch(name, sys.stderr, command.long)
        return call()
    if asked:
        sys.exit(0)
    subcommands = [key.removeprefix(f"{name} ") for key in _below(name)] if name else []
    wrong = rest[:1] if name else words[:1]
    if not wrong:
        print(_help(name), file=sys.stderr)
        return 2
    known = subcommands or list(dict.fromkeys(key.split()[0] for key in COMMANDS))
    title = f"dither {name}".strip()
    hint = did_you_mean(wrong[0], known)
    raise UserError(f"There is no command `{title} {wrong[0]:.80}`{hint}: `{title} --help` lists them.")


def _parse(function: Callable[..., int], name: str, words: list[str]) -> Callable[[], int]:
    """Return the call of a command with parsed arguments; raise a UserError of one line if they cannot be parsed."""
    import tyro
    from tyro import _errors  # structured errors are not public yet: pyproject.toml has the versions that we test

    @functools.wraps(function)
    def deferred(*arguments: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(function, *arguments, **options)

    def refuse(event: _errors.ParseErrorEvent) -> None:
        problem = _unknown(words, list(_options(function))) or _problem(event)
        raise UserError(f"{problem}: `dither {name} --help` shows the arguments.")

    hints = typing.get_type_hints(function, include_extras=True)
    for option, parameter in inspect.signature(function).parameters.items():
        told = any(getattr(note, "help_behavior_hint", None) is not None for note in getattr(hints[option], "__metadata__", ()))
        if parameter.default in (None, (), False, True) and not told:  # the help says it in words, or it is plain
            hints[option] = Annotated[hints[option], tyro.conf.arg(help_behavior_hint="")]
    deferred.__doc__ = re.sub(r"\n {8}", " ", inspect.getdoc(function) or "")  # the parser keeps breaks before some words
    deferred.__annotations__, deferred.__signature__ = hints, inspect.signature(function)  # type: ignore[attr-defined]
    del deferred.__wrapped__
    with _errors.on_parse_error(refuse):
        call: Callable[[], int] = tyro.cli(
            deferred,
            prog=f"dither {name}",
            description=_description(function),
            args=words,
            config=(tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff),
            registry=_registry(),
        )
    return call


def _description(function: Callable[..., object]) -> str:
    """Return the docstring of a command before its arguments, wrapped to the terminal: the parser keeps indented lines."""
    text, width = (inspect.getdoc(function) or "").partition("\n\nArgs:")[0], shutil.get_terminal_size().columns
    parts = [part.replace("\n", " ") for part in text.split("\n\n")]
    return "\n\n".join(textwrap.indent(textwrap.fill(part, width - 2, break_on_hyphens=False), "  ") for part in parts)


def _registry() -> Any:
    """Return the parser's rules with words for the values of options in the help: NUMBER, or TEXT... for several."""
    import tyro

    registry, entered = tyro.constructors.ConstructorRegistry(), list[object]()

    @registry.primitive_rule
    def rule(info: Any) -> Any:
        if info in entered:  # the parser's own rule
            return None
        entered.append(info)
        spec: Any = registry.get_primitive_spec(info)
        entered.pop()
        if not hasattr(spec, "metavar"):
            return spec
        words = re.sub(r"\[(.+) \[\1 \.\.\.\]\]", r"\1...", spec.metavar)
        words = re.sub(r"\b(STR|INT|FLOAT)\b", lambda kind: WORDS[kind[0]], words)
        return replace(spec, metavar=words)

    return registry


def _problem(event: Any) -> str:
    """Return in words why the parser refuses arguments; its events have different fields."""

    def title(argument: Any) -> str:
        return str(argument.lowered.metavar) if argument.is_positional() else "/".join(argument.lowered.name_or_flags)

    match type(event).__name__:
        case "UnrecognizedArgs":
            return f"Unrecognized options: {', '.join(event.tokens)}"
        case "MissingArgs":
            return f"`{event.prog}` needs {', '.join(title(each.arg) for each in event.missing_arguments)}"
        case "BadValue":
            return f"`{event.prog}` needs a value for {title(event.argument)}"
        case "InvalidChoice":
            hint = did_you_mean(event.value, event.choices)
            return f"{title(event.argument)} is one of {', '.join(event.choices)}, not {event.value!r:.80}{hint}"
        case "InstantiationFailure":
            message, where = str(event.message).rstrip("."), "" if event.argument is None else title(event.argument)
            if number := re.search(r"(invalid literal for int|could not convert string to float).*: (.{,80})", message):
                return f"{where} is {'a number' if 'float' in number[1] else 'an integer'}, not {number[2]}"
            return f"Error parsing {where}: {message}" if where else message
    return "These arguments cannot be parsed"


def _options(function: Callable[..., object]) -> Iterator[str]:
    """Yield the options of a command with their short forms; those of a dataclass among its arguments are its own."""
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *notes = typing.get_args(hints[name]) if hasattr(hints[name], "__metadata__") else (hints[name],)
        if isinstance(kind, type) and is_dataclass(kind):
            yield from _options(kind)
        elif parameter.kind is not parameter.POSITIONAL_ONLY:
            given = {key: value for note in notes for key, value in vars(note).items()} if notes else {}
            off = "no-" if parameter.default is True else ""
            yield f"--{off}{given.get('name') or name.replace('_', '-')}"
            yield from given.get("aliases") or ()


def _unknown(words: Sequence[str], options: Sequence[str]) -> str:
    """Return a sentence about the options among `words` that a command does not have, with those probably meant, or "".

    >>> _unknown(["model", "--formt=x", "-o", "out", "--json"], ["--format", "--json", "-o"])
    'Unrecognized options: --formt (did you mean --format?)'
    >>> _unknown(["--step", "5"], ["--set", "--data"])
    'Unrecognized options: --step (did you mean --set run.steps=5?)'
    """
    known = {"--help", "-h", *options}
    shorts = tuple(option for option in known if len(option) == 2)
    found = []
    for at, word in enumerate(words[: [*words, "--"].index("--")]):
        option, equals, value = word.partition("=")
        if not re.match("--?[a-zA-Z]", option) or re.fullmatch("-(inf|infinity|nan)", option, re.IGNORECASE):
            continue
        if option.startswith(shorts) if option[1] != "-" else option.replace("_", "-") in known:
            continue
        after = next((after for after in words[at + 1 : at + 2] if not after.startswith("-")), "VALUE")
        found.append(f"{option:.80}{_suggestion(option, value if equals else after, options)}")
    return f"Unrecognized options: {', '.join(found)}" if found else ""


def _suggestion(option: str, value: str, options: Sequence[str]) -> str:
    """Return the option that was probably meant, in brackets, or "". `--set` takes the fields of a config."""
    meant = {each[2:]: each for each in options if each.startswith("--")}
    if "--set" in options:
        from dither.train.config import describe

        order = {section: rank for rank, section in enumerate(FIRST)}
        fields = sorted(describe(), key=lambda field: order.get(field.path.partition(".")[0], len(order)))
        for field in fields:
            meant.setdefault(field.path.rpartition(".")[2].replace("_", "-"), f"--set {field.path}={value:.80}")
    near = difflib.get_close_matches(option.lstrip("-").replace("_", "-"), meant, n=1)
    return f" (did you mean {meant[near[0]]}?)" if near else ""


def _import_torch(name: str, file: TextIO, long: bool) -> None:
    """Import PyTorch, which takes seconds, and say so before if the command is long; a terminal forgets the line."""
    terminal = file.isatty()
    if "torch" in sys.modules or not (long or terminal):
        return
    print(f"dither {name}: importing PyTorch ...", end="" if terminal else "\n", file=file, flush=True)
    try:
        import torch  # noqa: F401
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=file, flush=True)


def _load_plugins(words: list[str]) -> list[str]:
    """Load the files of every `--plugin FILE`, which all commands take, and return the other words."""
    kept, given, loaded = list[str](), iter(words), dict[str, registry.Plugin]()
    for word in given:
        if word == "--plugin":
            if (path := next(given, None)) is None:
                raise UserError("--plugin needs the Python file of a plugin.")
        elif word.startswith("--plugin="):
            path = word.partition("=")[2]
        else:
            kept.append(word)
            continue
        plugin = registry.load_plugin(path)
        if loaded.setdefault(plugin.name, plugin) is not plugin:
            raise UserError(f"Two plugins are called {plugin.name!r}, by which a run keeps them: rename one of them.")
        print(f"plugin {plugin.name}, SHA-256 {plugin.sha256}", file=sys.stderr)
    return kept


def _resume(word: str) -> str:
    """Return `--resume=auto` as the flag that the parser knows: a flag has no value, and would make it the next argument."""
    if not word.startswith("--resume="):
        return word
    if word != "--resume=auto":
        raise UserError(f"--resume has no value but auto, as in --resume=auto, not {word.partition('=')[2]!r:.80}.")
    return "--resume-auto"


def _split(words: list[str]) -> tuple[str, list[str]]:
    """Return the name of the command or group of commands, "" if the first word is none, and the words after it."""
    dashed = [*words[0].split("-", 1), *words[1:]] if words else []
    for candidate, used in ((words, 2), (dashed, 2), (words, 1)):
        name = " ".join(candidate[:used])
        if name in COMMANDS or _below(name):
            return name, candidate[used:]
    return "", words


def _below(name: str) -> dict[str, Command]:
    """Return the commands below a group, by their full names: all of them below ""."""
    return {key: command for key, command in COMMANDS.items() if not name or key.startswith(f"{name} ")}


def _help(name: str) -> str:
    """Return the help of `dither`, or of a group of commands."""
    commands = {key: command for key, command in COMMANDS.items() if key == name} | _below(name)
    width = max(map(len, commands))
    title = f"dither {name}".strip()
    lines = [f"usage: {title} COMMAND ..." if not name else f"usage: {title} ...", ""]
    lines += [] if name else [DESCRIPTION, ""]
    lines += ["commands:", *(f"  {key:{width}}  {command.summary}" for key, command in commands.items()), ""]
    lines += [f"`dither {next(iter(_below(name))) if name else 'COMMAND'} --help` shows the options of that command."]
    lines += [] if name else ["`dither COMMAND --plugin FILE` registers the formats and recipes of a Python file first."]
    lines += [] if name else ["`dither --version` prints the version."]
    return "\n".join(lines)


def _print_completion(words: list[str]) -> int:
    """Print or write a script of shell completions for all commands, which imports all of them."""
    import tyro

    functions = {name.replace(" ", "-"): command.load() for name, command in COMMANDS.items()}
    code: int = tyro.extras.subcommand_cli_from_dict(functions, prog="dither", description=DESCRIPTION, args=words)
    return code


if __name__ == "__main__":
    sys.exit(main())
