"""The entry point of the command line. It imports a command's module when that command runs: `dither --help` needs no torch."""

import functools
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import Any, NamedTuple, TextIO

from dither.errors import DitherError, UserError
from dither.signatures import options_of, unknown_options
from dither.versions import version

DESCRIPTION = "Train language models in few bits, compare precisions, evaluate, report, and choose each layer's precision."


class Command(NamedTuple):
    """A function of `dither.commands`: its arguments are the options of the command, its docstring is the help."""

    module: str
    function: str
    summary: str
    """The first line of the function's docstring, without its period."""
    long: bool = False
    """True if it may take longer than its imports do: it says at once that it has begun, also where its output is piped."""
    light: bool = False
    """True if it imports no PyTorch, which takes seconds."""

    def load(self) -> Callable[..., int]:
        """Import the function."""
        function: Callable[..., int] = getattr(importlib.import_module(f"dither.commands.{self.module}"), self.function)
        return function


COMMANDS = {
    "train": Command("train", "train", "Train a language model, or resume a run", long=True),
    "compare": Command("compare", "compare", "Train in several precisions and rank them by held-out loss", long=True),
    "ladder": Command("ladder", "ladder", "Train a ladder of models in several precisions and fit scaling laws", long=True),
    "eval": Command("evaluate", "evaluate", "Evaluate a model on held-out text and on tasks, also with other casts", long=True),
    "export": Command("export", "export", "Write a trained model for transformers, vLLM or llama.cpp", long=True),
    "generate": Command("generate", "generate", "Continue a prompt with a trained model", long=True),
    "chat": Command("generate", "chat", "Talk to a trained model, line by line", long=True),
    "report": Command("report", "report", "Write a page about one run or several", light=True),
    "watch": Command("watch", "watch", "Follow a run while it trains, in a browser or in the terminal", light=True),
    "runs": Command("runs", "runs", "Show all runs under a folder as a table", light=True),
    "data prepare": Command("data", "prepare", "Tokenize text into a new folder, which `dither train --data` reads", long=True),
    "data show": Command("data", "show", "Show the contents of a prepared folder"),
    "plan": Command("plan", "plan", "Choose the precision of each layer of a run, and show the plan", long=True),
    "plan show": Command("plan", "show", "Show a plan as a table of blocks and layers"),
    "plan diff": Command("plan", "diff", "Show the differences between two plans"),
    "plan auto": Command("plan", "auto", "Choose FP8 or BF16 for each layer of a model by measured time", long=True),
    "plan frontier": Command("plan", "frontier", "Show the cost of every target, from one estimate", long=True),
    "inspect": Command("inspect", "inspect", "Show the weights of a saved model, layer by layer", long=True),
    "bisect": Command("bisect", "bisect", "Run two precisions in lockstep and name the first layer that differs", long=True),
    "memory": Command("memory", "memory", "Show the memory that a training step needs, and recommend a precision"),
    "advise": Command(
        "advise", "advise", "Rank precisions and layouts for a model on many GPUs, with the config to run", long=True
    ),
    "formats": Command("formats", "formats", "Show the number formats as a table, or one format with its values", light=True),
    "doctor": Command(
        "doctor", "doctor", "Examine this machine, and test that kernels and devices agree bit for bit", long=True
    ),
}
"""The commands by the words that follow `dither`. A dash may replace the space, as in `dither plan-show`."""

EXAMPLES = {
    "ladder": "reproduce/stochastic-rounding/ladder.toml",
    "eval": "runs/latest --cast mxfp4",
    "export": "runs/latest -o exported",
    "generate": "runs/latest --prompt 'Once upon a time'",
    "chat": "runs/latest",
    "report": "runs/latest",
    "watch": "runs/latest",
    "data show": "text-tokens",
    "plan": "runs/latest --target 0.5",
    "plan show": "runs/latest/plan.json",
    "plan diff": "first.json second.json",
    "plan auto": "llama-1b",
    "plan frontier": "runs/latest",
    "inspect": "runs/latest",
    "bisect": "--b fp8-block",
    "memory": "llama-1b",
    "advise": "--gpus 8 --gpu h100 --model llama-8b",
}
"""Arguments of the commands that need some."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dither` and return its exit code. A mistake in the arguments is one line on stderr and exit code 2.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    dither ...
    0
    """
    if arguments is None:  # a process of its own: commands show their own progress, without bars of other packages between
        os.environ.setdefault("TQDM_DISABLE", "1")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        sys.stdout.flush()  # so that a closed pipe raises here
        return code
    except DitherError as error:
        if not error.told:
            print(f"dither: error: {error}", file=sys.stderr)
        # With code 1 no argument would change it, for example a lost process.
        return 2 if isinstance(error, UserError) else 1
    except BrokenPipeError:
        # The reader of our output, such as `head`, has closed it. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    if words == ["--version"]:
        print(f"dither {version()}")
        return 0
    if words and words[0].startswith("--tyro-"):
        return _print_completion(words)
    name, rest = _split(words)
    subcommands = [key.removeprefix(f"{name} ") for key in _below(name)]
    if name in COMMANDS:
        command, rest = COMMANDS[name], [_resume(word) for word in rest]
        _check_options(name, command, rest)
        quick = not command.long or "-h" in rest or "--help" in rest
        silent = command.light or (quick and not sys.stderr.isatty())
        with nullcontext() if silent else _importing(name, sys.stderr):
            function = command.load()
        if subcommands and rest[:1] in (["-h"], ["--help"]):
            print(_help(name), end="\n\n")
        return _parse(function, name, rest)()
    if rest[:1] in (["-h"], ["--help"]):
        print(_help(name))
        sys.exit(0)
    wrong = rest[:1] if subcommands else [name]
    if not wrong:
        print(_help(name), file=sys.stderr)
        sys.exit(2)
    from dither.spec.checks import did_you_mean

    known = subcommands if name else list(dict.fromkeys(key.split()[0] for key in COMMANDS))
    title = f"dither {name}".strip()
    hint = did_you_mean(wrong[0], known)
    print(f"dither: error: There is no command `{title} {wrong[0]:.80}`{hint}: `{title} --help` lists them.", file=sys.stderr)
    sys.exit(2)


def _check_options(name: str, command: Command, words: Sequence[str]) -> None:
    """Exit with one line on stderr if arguments are missing altogether or options are unknown, before anything is imported."""
    if "-h" in words or "--help" in words:
        return
    if name in EXAMPLES and not words:
        problem = f"`dither {name}` needs arguments, as in `dither {name} {EXAMPLES[name]}`"
    elif unknown := unknown_options(words, options_of(command.module, command.function)):
        problem = f"Unrecognized options: {', '.join(unknown)}"
    else:
        return
    print(f"dither: error: {problem}: `dither {name} --help` shows the arguments.", file=sys.stderr)
    sys.exit(2)


def _parse(function: Callable[..., int], name: str, words: list[str]) -> Callable[[], int]:
    """Return the call of a command with parsed arguments; exit with one line on stderr if they cannot be parsed."""
    import tyro

    @functools.wraps(function)
    def deferred(*arguments: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(function, *arguments, **options)

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            call: Callable[[], int] = tyro.cli(deferred, prog=f"dither {name}", args=words)
        return call
    except SystemExit as stopped:
        if stopped.code in (None, 0):
            raise
    print(f"dither: error: {_one_line(said.getvalue())}: `dither {name} --help` shows the arguments.", file=sys.stderr)
    sys.exit(2)


def _one_line(box: str) -> str:
    """Return the parser's framed message without frame and help texts, and with the first option that it suggests.

    >>> _one_line("╭─ Error ─╮\\n│ Unrecognized: --plt │\\n│ ── │\\n│ Perhaps you meant: │\\n│     --plot [FILE] │\\n╰───╯")
    'Unrecognized: --plt (did you mean --plot?)'
    """
    parts: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]:
        text = line[2:].rstrip("│╰╯ ")  # without UTF-8 the frame is made of spaces and dashes
        if not text.strip("─-"):
            parts.append([])
        elif not text.startswith(" " * 8):
            parts[-1] += text.split()
    message, *others = [" ".join(part) for part in parts if part] or ["These arguments cannot be parsed"]
    marker = "Perhaps you meant: "
    meant = [part.removeprefix(marker).split()[0].rstrip(",") for part in others if part.startswith(marker)]
    return message.removesuffix(".") + (f" (did you mean {meant[0]}?)" if meant else "")


@contextmanager
def _importing(name: str, file: TextIO) -> Iterator[None]:
    """Say that a command has begun, if PyTorch is still to be imported: that takes seconds. A terminal forgets the line."""
    if "torch" in sys.modules:
        yield
        return
    terminal = file.isatty()
    print(f"dither {name}: importing PyTorch ...", end="" if terminal else "\n", file=file, flush=True)
    try:
        yield
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=file, flush=True)


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
