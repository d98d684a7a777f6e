"""Hostile input for the command line: configs, plans, tokenizers, data, checkpoints, models and run folders that are wrong.

A case writes what it needs into a box of its own and says which arguments `dither` gets. Whatever it is, the answer is one line
`dither: error: ...` and exit code 2 (0 or 3 where it may pass for a run): no traceback, nothing executed, nothing written
outside the box, in bounded time and memory. `tests/soak/test_faults.py` tries some of each kind, `tests/soak/soak.py` all.
"""

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dither import cli
from dither.checkpoint.format import CHUNK, manifest_bytes
from dither.data import prepare, train_bpe
from dither.models import build, preset, save_pretrained
from dither.settings import toml
from dither.spec.recipes import recipe
from dither.train import config as configs
from dither.train import train
from dither.train.config import Config, describe

SECONDS = 60
"""How long a case may take: most take a hundredth of a second, a run of one step about one."""

MEMORY = 3 << 30
"""How much memory a case may take beyond what the process has."""

ERROR = "dither: error: "
NOTES = (ERROR, "The checkpoint ", "Loading weights:")
"""What a line on stderr may begin with: why a checkpoint was passed over, and the progress bar of transformers."""
STAGE = " ..."
"""How a line about progress ends."""
SCRIPT = "<script>alert(1)</script>"
MARKER = "executed"
PICKLE = b"\x80\x04cos\nsystem\n(S'touch " + MARKER.encode() + b"'\ntR."
"""Whoever unpickles this leaves a file in the working directory."""

ONE_STEP = ("data.sequence=16", "data.batch=4", "run.steps=1", "run.log_every=1", "run.eval_sequences=2", "run.device=cpu")


@dataclass(frozen=True)
class Good:
    """What is right, to be copied and spoilt."""

    text: Path
    """A folder of documents."""
    run: Path
    """Of three steps, saved at the second and the third."""
    tokens: Path
    """A prepared folder, with a byte-level BPE."""
    model: Path
    """A folder as Hugging Face has them, with its tokenizer.json."""


@dataclass(frozen=True)
class Case:
    """Something wrong."""

    name: str
    make: Callable[[Path, Good], list[str]]
    """Writes into a box and returns the arguments."""
    codes: tuple[int, ...] = (2,)
    cpu: float | None = None
    """The most seconds of CPU time, if it has a limit of its own."""


def good(folder: Path) -> Good:
    """Make what is right, once."""
    text, words = folder / "text", ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs")
    text.mkdir(parents=True)
    order = random.Random(0)
    for number in range(60):
        (text / f"{number}.txt").write_text(" ".join(order.choice(words) for _ in range(60)))
    config = configs.override(Config(), [f'data.sources=["{text}"]', f'run.out="{folder / "run"}"', *ONE_STEP])
    train(configs.override(config, ["run.steps=3", "run.save_every=2", "run.sample_every=2", "run.sample_tokens=2"]))
    bpe = train_bpe(["the quick brown fox"] * 20, 265)
    prepare(str(text), folder / "tokens", bpe, held_out=0.1)
    save_pretrained(build(preset("tiny", vocab_size=265)), folder / "model")
    (folder / "model" / "tokenizer.json").write_text(bpe.json or "")
    return Good(text, folder / "run", folder / "tokens", folder / "model")


class TooLate(BaseException):
    """A case took too long."""


# Trying ---------------------------------------------------------------------------------------------------------------


def attempt(case: Case, folder: Path, known: Good) -> str:
    """Try a case in a new folder: what went wrong, in a few lines, or nothing."""
    box, work = folder / "box", folder / "work"
    box.mkdir(parents=True)
    work.mkdir()
    arguments = case.make(box, known)
    before = _listing(known.text.parent)
    out, err = io.StringIO(), io.StringIO()
    began = sum(os.times()[:4])  # with the processes that it starts
    with _within(work), _bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: object = cli.main(arguments)
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            code = "an exception:\n" + traceback.format_exc(limit=-3)
    spent = sum(os.times()[:4]) - began
    said = err.getvalue().splitlines()
    faults = []
    if case.cpu is not None and spent > case.cpu:
        faults.append(f"took {spent:.1f} s of CPU time")
    if code not in case.codes:
        faults.append(f"ended with {code}")
    if code == 2 and not (said and said[-1].startswith(ERROR) and sum(line.startswith(ERROR) for line in said) == 1):
        faults.append(f"said {said}")
    if code == 2 and any(line and not line.startswith(NOTES) and not line.endswith(STAGE) for line in said):
        faults.append(f"said more than an error: {said}")
    if "\x1b" in out.getvalue() + err.getvalue():
        faults.append("steered the terminal")
    if list(work.iterdir()) or {path.name for path in folder.iterdir()} != {"box", "work"}:
        faults.append(f"left {[str(path) for path in (*work.iterdir(), *folder.iterdir())]}")
    if _listing(known.text.parent) != before:
        faults.append("changed what it should not touch")
    for page in box.rglob("*.html"):
        if SCRIPT in page.read_text():
            faults.append("wrote a script into a page")
    shutil.rmtree(folder)
    return f"{case.name}: {'; '.join(faults)}" if faults else ""


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), (seen := path.lstat()).st_size, seen.st_mtime_ns) for path in folder.rglob("*"))


@contextlib.contextmanager
def _within(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """An error for whoever takes too long or too much memory."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooLate(f"more than {SECONDS} seconds")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


# Configs --------------------------------------------------------------------------------------------------------------

WRONG = {
    "int": ('"7"', "7.5", "true", "nan", "[7]", "-1", "{ a = 1 }", "1979-05-27"),
    "float": ('"1.0"', "nan", "-inf", "true", "[1.0]", "{}", "1e999"),
    "text": ("7", "1.5", "true", '["a"]', "{}", "nan"),
    "list": ("7", '"x"', "[true]", "[[]]", "{ a = 1 }", "[nan]"),
    "choice": ('"nonsense"', "7", '["adamw"]', '"\\u0000"', '""', "true"),
    "true | false": ('"true"', "1", "[]", "nan"),
}

CONFIGS: dict[str, bytes] = {
    "not TOML": b"[",
    "empty section": b"[]",
    "NUL bytes": b"\0" * 100,
    "UTF-16": "[run]\nsteps = 1\n".encode("utf-16"),
    "not UTF-8": b'[run]\nout = "\xff\xfe"\n',
    "a pickle": PICKLE,
    "Python": b"__import__('os').system('touch executed')",
    "a key twice": b"[run]\nsteps = 1\nsteps = 2\n",
    "a section twice": b"[run]\nsteps = 1\n[run]\nseed = 2\n",
    "unknown section": b"[training]\nsteps = 1\n",
    "unknown key": b"[run]\nstep = 1\n",
    "a key of markup": f'[run]\n"{SCRIPT}" = 1\n'.encode(),
    "a key that steers": b'[run]\n"\\u001b[31m" = 1\n',
    "a value that steers": b'[precision]\nrecipe = "\\u001b[2J\\u0007"\n',
    "a line in a value": b'[precision]\nmode = "a\\nb: error: c"\n',
    "a key of NUL": b'[run]\n"\\u0000" = 1\n',
    "half a surrogate pair": b'[run]\nout = "\\ud800"\n',
    "deep lists": b"[run]\nprofile = " + b"[" * 100_000,
    "deep lists, closed": b"[run]\nprofile = " + b"[" * 5000 + b"]" * 5000,
    "deep tables": b"[run]\nprofile = " + b"{a=" * 5000 + b"1" + b"}" * 5000,
    "deep keys": b"a." * 5000 + b"a = 1",
    "a long integer": b"[run]\nsteps = " + b"9" * 5000,
    "a long key": b"[run]\n" + b"x" * 100_000 + b" = 1\n",
    "a section is a number": b"run = 1\n",
    "a section is a list": b"[[run]]\nsteps = 1\n",
    "a carriage return": b"[run]\rsteps = 1\r",
    "too long": b"#" * (65 << 20),
    "a path as a recipe": b'[precision]\nrecipe = "../../etc/passwd"\n',
    "a path as a preset": b'[model]\npreset = "/dev/zero"\n',
    "two models": b'[model]\npreset = "tiny"\nhf = "x"\n',
    "sampling is a list": b"[precision]\nsampling = [1]\n",
    "sampling of nonsense": b"[precision.sampling]\nnoise = [1]\n",
    "guidance is text": b'[precision.sampling]\nguidance = "much"\n',
    "guidance of nonsense": b"[precision.sampling]\nguidance = [{ kind = {} }]\n",
}

SETTINGS = (
    *("data.sequence=1000000000000", "data.batch=1000000000000", f"data.batch={10**30}", f"data.sequence={10**30}"),
    *("model.vocab=1000000000", f"model.vocab={10**15}", f"model.vocab={10**30}", f"guard.spike_window={10**30}"),
    *("data.held_out=1e-300", "data.held_out=0.9999999999999999", f"run.seed={2**64}", "data.seed=-1", f"run.steps={2**31}"),
    *("run.device=cuda:999", "run.device=/dev/sda", "run.track=['../x']", f"run.profile=[1, {10**30}]", "optim.lr=0"),
    *(
        "optim.betas=[1.0, 1.0]",
        "optim.betas=[0.9]",
        "precision.plan=/dev/zero",
        "precision.plan=/etc/passwd",
        "precision.plan=/",
    ),
    *("data.tokenizer=/dev/zero", "data.tokenizer=/proc/self/mem", "model.hf=/dev/zero", "model.hf=/", "model.hf=../nowhere"),
    *(
        "data.tokenizer=/",
        "x",
        "=",
        "a=b",
        "run=1",
        "run.out.x=1",
        ".=1",
        "run.steps=",
        "run.steps=1\n[x]",
        "optim.lr=__import__",
    ),
    *("precision.sampling.parts='('", "precision.sampling.parts='nothing like it'"),
)
"""Settings that no run can have."""

BORDERLINE = (
    "optim.lr=1e300",
    "optim.weight_decay=1e300",
    "optim.eps=1e30",
    f"run.eval_sequences={10**30}",
    "optim.max_norm=1e-300",
)
BORDERLINE += (f"guard.most_skips={10**30}", f"run.keep_last={10**30}", f"run.save_every={10**30}", "optim.max_norm=1e300")
"""Settings that a run may have, and that must not be its end by a traceback."""

OUTS = (
    "{box}/pipe",
    "{box}/pipe/x",
    "/proc/x/y",
    "a\0b",
    "x" * 5000,
    "{box}/" + "x" * 300,
    "{box}/file/x",
    "{box}/loop",
    "{box}/to-zero",
)
"""Places where nothing can be written. None but that in /proc is outside the box: a missing check must not cost a real file."""

FILES = (
    "/dev/zero",
    "/dev/null/x",
    "/dev",
    "{box}/pipe",
    "{box}/loop",
    "{box}/to-zero",
    "a\0b",
    "x" * 5000,
    "{box}/" + "y" * 300,
    "{box}/none",
)
"""Paths of files that are none."""


def _scene(box: Path) -> None:
    """A file, a pipe, and links that go in circles or to a device."""
    (box / "file").write_text("here")
    os.mkfifo(box / "pipe")
    (box / "loop").symlink_to(box / "loop")
    (box / "to-zero").symlink_to("/dev/zero")


def _wrong_values(kind: str) -> tuple[str, ...]:
    return WRONG.get(kind) or WRONG["list" if kind.startswith("list") or "," in kind else "choice" if "|" in kind else "text"]


def _config(data: bytes) -> Callable[[Path, Good], list[str]]:
    def make(box: Path, _: Good) -> list[str]:
        (box / "run.toml").write_bytes(data)
        return ["train", str(box / "run.toml"), "--out", str(box / "run")]

    return make


def _train(*settings: str) -> Callable[[Path, Good], list[str]]:
    def make(box: Path, known: Good) -> list[str]:
        return ["train", "--data", str(known.text), "--out", str(box / "run"), "--set", *ONE_STEP, *settings]

    return make


def _at(arguments: Callable[[str, Path, Good], list[str]], path: str) -> Callable[[Path, Good], list[str]]:
    """Arguments with a path in a scene of strange files."""

    def make(box: Path, known: Good) -> list[str]:
        _scene(box)
        return arguments(path.replace("{box}", str(box)), box, known)

    return make


def config_cases() -> Iterator[Case]:
    """Of each field, every wrong type; files that are no TOML; settings and paths."""
    for field in describe():
        section, _, name = field.path.rpartition(".")
        for value in _wrong_values(field.type):
            yield Case(f"{field.path} = {value}", _config(f"[{section}]\n{name} = {value}\n".encode()))
    for title, data in CONFIGS.items():
        yield Case(f"config: {title}", _config(data))
    for setting in SETTINGS:
        yield Case(f"--set {setting!r:.60}", _train(setting))
    for setting in BORDERLINE:
        yield Case(f"--set {setting!r:.60}", _train(setting), codes=(0, 2, 3))
    for out in (*OUTS, "{box}", "{box}/file"):
        base = ["train", "--set", *ONE_STEP]
        yield Case(
            f"--out {out!r:.40}", _at(lambda path, _, known, base=base: [*base, "--data", str(known.text), "--out", path], out)
        )
        yield Case(f"--resume --out {out!r:.40}", _at(lambda path, *_: ["train", "--resume", "--out", path], out))
    for path in FILES:
        yield Case(f"train {path!r:.40}", _at(lambda path, box, _: ["train", path, "--out", str(box / "run")], path))
        for field in ("precision.plan", "data.tokenizer", "model.hf"):
            make = _at(lambda path, box, known, field=field: _train(f"{field}={toml(path)}")(box, known), path)
            yield Case(f"{field} {path!r:.40}", make)


# JSON -----------------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    0.5,
    "",
    "x",
    "../../x",
    SCRIPT,
    "\x1b[2J\0",
    [],
    [[]],
    {},
    {"a": 1},
    [None] * 3,
)

TEXTS: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "a number": b"7",
    "null": b"null",
    "a list": b"[]",
    "an object": b"{}",
    "text": b'"x"',
    "deep": b"[" * 100_000,
    "deep objects": b'{"version":' * 5000 + b"1" + b"}" * 5000,
    "NaN": b"NaN",
    "a long integer": b'{"version": ' + b"9" * 5000 + b"}",
    "a key twice": b'{"version": 2, "version": 2}',
    "not UTF-8": b'{"\xff": 1}',
    "UTF-16": '{"version": 2}'.encode("utf-16"),
    "NUL bytes": b"\0" * 100,
    "a pickle": PICKLE,
    "markup": json.dumps({SCRIPT: SCRIPT}).encode(),
    "half a surrogate pair": b'{"version": "\\ud800"}',
}
"""Files that are no JSON, or other JSON than was asked for."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, as the keys that lead to it."""
    if path:
        yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a place."""
    whole = json.loads(json.dumps(value))
    at = whole
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return whole


def plan_cases() -> Iterator[Case]:
    """A plan's file of other text, and with every place of a right one spoilt."""

    def plan(data: bytes) -> Callable[[Path, Good], list[str]]:
        def make(box: Path, known: Good) -> list[str]:
            (box / "plan.json").write_bytes(data)
            return _train(f"precision.plan={toml(str(box / 'plan.json'))}")(box, known)

        return make

    for title, data in TEXTS.items():
        yield Case(f"plan: {title}", plan(data))
    whole, draw = recipe("nvfp4").to_dict(), random.Random(1)
    for place in places(whole):
        value = draw.choice(VALUES)
        data = json.dumps(replaced(whole, place, value)).encode()
        yield Case(f"plan: {'.'.join(map(str, place))} = {value!r:.20}", plan(data), codes=(0, 2, 3))
    yield Case("plan: a pattern that is none", plan(json.dumps(whole | {"layers": [["re:(", whole["default"]]]}).encode()))


def tokenizer_cases() -> Iterator[Case]:
    """A tokenizer.json of other text, of wrong shape, or with spoilt places."""

    def tokenizer(data: bytes) -> Callable[[Path, Good], list[str]]:
        def make(box: Path, known: Good) -> list[str]:
            (box / "tokenizer.json").write_bytes(data)
            return [
                "data",
                "prepare",
                str(known.text),
                "--out",
                str(box / "tokens"),
                "--tokenizer",
                str(box / "tokenizer.json"),
            ]

        return make

    for title, data in TEXTS.items():
        yield Case(f"tokenizer: {title}", tokenizer(data))
    bpe = json.loads(train_bpe(["the quick brown fox"] * 20, 265).json or "")
    draw = random.Random(2)
    some = [place for place in places(bpe) if "vocab" not in place[:-1] and "merges" not in place[:-2]]
    for place in some:
        value = draw.choice(VALUES)
        data = json.dumps(replaced(bpe, place, value)).encode()
        yield Case(f"tokenizer: {'.'.join(map(str, place))} = {value!r:.20}", tokenizer(data), codes=(0, 2))
    for title, model in {
        "huge numbers": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "</s>": 4_000_000_000}},
        "negative numbers": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": -1, "</s>": 0}},
        "no words": {"type": "WordLevel", "unk_token": "a", "vocab": {}},
        "no end": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}},
        "an unknown kind": {"type": "Exec", "command": "touch executed"},
    }.items():
        yield Case(f"tokenizer: {title}", tokenizer(json.dumps({"version": "1.0", "model": model}).encode()))
    for argument in ("bpe:0", "bpe:-5", "bpe:999999999", "bpe:1e9", "bpe:", "../bytes", "bytes\0"):

        def make(box: Path, known: Good, name: str = argument) -> list[str]:
            return ["data", "prepare", str(known.text), "--out", str(box / "t"), "--tokenizer", name]

        yield Case(f"tokenizer: {argument!r}", make)


# Data -----------------------------------------------------------------------------------------------------------------

LINES = b"".join(b'{"text": "document %d"}\n' % i for i in range(60))

DATA: dict[str, bytes | Callable[[], bytes]] = {
    "empty.txt": b"",
    "one-line.txt": b"a single line\n",
    "no-letters.txt": b" \n\n\t\n",
    "binary.txt": bytes(range(256)) * 9,
    "png.txt": b"\x89PNG\r\n\x1a\n" * 99,
    "utf16.txt": ("text " * 99).encode("utf-16"),
    "latin1.txt": ("é" * 99).encode("latin-1"),
    "pickle.txt": PICKLE,
    "NUL.txt": b"text\0text",
    "plain.gz": b"no gzip at all",
    "cut.txt.gz": gzip.compress(b"text\n" * 9999)[:-9],
    "spoilt.txt.gz": gzip.compress(LINES)[:40] + b"\xff" * 60,
    "other.txt.xz": gzip.compress(b"text"),
    "cut.txt.xz": lzma.compress(b"text\n" * 9999)[:-20],
    "empty.txt.xz": b"",
    "empty.txt.gz": b"",
    "zeros.txt.gz": lambda: gzip.compress(bytes(1 << 26)),
    "zeros.txt.xz": lambda: lzma.compress(bytes(1 << 26), preset=1),
    "twice.txt.gz.gz": gzip.compress(gzip.compress(b"text")),
    "plain.zst": b"no zstandard at all",
    "plain.parquet": b"PAR1 and no more",
    "plain.jsonl": b"text, not JSON\n",
    "list.jsonl": b"[1]\n",
    "number.jsonl": b"7\n",
    "null.jsonl": b"null\n",
    "other-field.jsonl": b'{"body": "a"}\n',
    "markup-field.jsonl": json.dumps({SCRIPT: "a"}).encode(),
    "steering-field.jsonl": b'{"\\u001b[2J": "a"}\n',
    "no-field.jsonl": b"{}\n",
    "number-text.jsonl": b'{"text": 7}\n',
    "null-text.jsonl": b'{"text": null}\n',
    "list-text.jsonl": b'{"text": ["a"]}\n',
    "cut.jsonl": LINES + b'{"text": "a',
    "deep.jsonl": b'{"text": ' + b"[" * 100_000,
    "deep-closed.jsonl": b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "long-integer.jsonl": b'{"text": ' + b"9" * 5000 + b"}",
    "NaN.jsonl": b'{"text": NaN}\n',
    "surrogate.jsonl": b'{"text": "\\ud800"}\n',
    "binary.jsonl": b"\xff\xfe\0\0",
    "one-document.jsonl": b'{"text": "a"}\n',
}

SOURCES = (
    "",
    "hf:",
    "hf::",
    "hf:a:b:c:d",
    "**/nothing",
    "[",
    "~",
    "stdlib2",
    "-",
    "$(touch executed)",
    "`touch executed`",
    "\x1b[2J",
    "a\nb",
)


def data_cases() -> Iterator[Case]:
    """Files that are no text, sources that are none, and prepared folders with a spoilt manifest."""
    for name, raw in DATA.items():

        def make(box: Path, _: Good, name: str = name, raw: bytes | Callable[[], bytes] = raw) -> list[str]:
            (box / name).write_bytes(raw if isinstance(raw, bytes) else raw())
            return ["train", "--data", str(box / name), "--out", str(box / "run"), "--set", *ONE_STEP]

        yield Case(f"data: {name}", make)
    for path in (*(each for each in FILES if each != "/dev"), *SOURCES):
        yield Case(f"data: {path!r:.40}", _at(lambda path, box, _: ["data", "prepare", path, "--out", str(box / "t")], path))
    for out in (*OUTS, "{box}", "{box}/file"):
        yield Case(
            f"data --out {out!r:.40}", _at(lambda path, _, known: ["data", "prepare", str(known.text), "--out", path], out)
        )
        yield Case(f"data show {out!r:.40}", _at(lambda path, *_: ["data", "show", path], out))
    for share in ("0", "1", "-0.5", "nan", "1e999", "0.5.5", "{box}/none", "a\0b", "x" * 5000):
        make = _at(lambda s, box, known: ["data", "prepare", str(known.text), "--out", str(box / "t"), "--held-out", s], share)
        yield Case(f"data --held-out {share!r:.40}", make)
    for title, data in TEXTS.items():
        yield Case(f"tokens: {title}", _tokens(lambda _, data=data: data))
    draw = random.Random(3)
    for number in range(40):
        seed = draw.random()
        yield Case(f"tokens: place {number}", _tokens(lambda whole, seed=seed: _spoilt_tokens(whole, seed)))


def _spoilt_tokens(whole: bytes, seed: float) -> bytes:
    """A manifest with one value changed, and its own hash made right again."""
    fields = json.loads(whole)
    del fields["sha256"]
    draw = random.Random(seed)
    # What names no file and counts nothing may be anything, and a shard's hash is not compared unless that is asked for.
    where = [place for place in places(fields) if place[0] not in ("sources", "skipped")]
    place = draw.choice(where)
    fields = replaced(fields, place, draw.choice(VALUES))
    own = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**fields, "sha256": own}, indent=1) + "\n").encode()


def _tokens(spoil: Callable[[bytes], bytes]) -> Callable[[Path, Good], list[str]]:
    def make(box: Path, known: Good) -> list[str]:
        shutil.copytree(known.tokens, box / "tokens")
        manifest = box / "tokens" / "dither-tokens.json"
        manifest.write_bytes(spoil(manifest.read_bytes()))
        return ["data", "show", str(box / "tokens"), "--verify"]

    return make


# Checkpoints ----------------------------------------------------------------------------------------------------------

LAST = "step-00000003"
TENSORS, INDEX = "rank-00000-00000.safetensors", "rank-00000.json"


def _reforged(path: Path) -> None:
    """Give a checkpoint that was changed an index and a manifest in which every size and hash is right."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        index, data = json.loads((path / INDEX).read_bytes()), (path / TENSORS).read_bytes()
        chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        index["files"][0]["chunks"] = [hashlib.sha256(chunk).hexdigest() for chunk in chunks]
        (path / INDEX).write_text(json.dumps(index))
    step = json.loads((path / "manifest.json").read_bytes())["step"]
    contents = {each.name: each.read_bytes() for each in path.iterdir() if each.name != "manifest.json"}
    entries = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    (path / "manifest.json").write_bytes(manifest_bytes(step, entries))


def _checkpoint(
    spoil: Callable[[Path], None], command: str = "resume", forge: bool = True
) -> Callable[[Path, Good], list[str]]:
    def make(box: Path, known: Good) -> list[str]:
        run = box / "run"
        shutil.copytree(known.run, run)
        shutil.rmtree(run / "checkpoints" / "step-00000002")
        spoil(run / "checkpoints" / LAST)
        if forge:
            _reforged(run / "checkpoints" / LAST)
        if command == "eval":
            return ["eval", str(run / "checkpoints" / LAST), "--device", "cpu"]
        return ["train", "--resume", "--out", str(run), "--set", "run.sample_every=0"]

    return make


def _header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a checkpoint's tensors."""
    data = (path / TENSORS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    (path / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return header[next(name for name in header if name != "__metadata__")]


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a name of markup": lambda header: header.update({SCRIPT: header.pop(next(iter(header)))}),
    "a path as a name": lambda header: header.update({"../../x": header.pop(next(iter(header)))}),
    "another name": lambda header: header.update({"model:other@0": header.pop(next(iter(header)))}),
    "overlapping ranges": lambda header: [each.update(data_offsets=[0, 4]) for each in header.values()],
    "huge offsets": lambda header: _first(header).update(data_offsets=[1 << 50, 1 << 51]),
    "a huge shape": lambda header: _first(header).update(shape=[1 << 40, 1 << 19]),
    "a negative shape": lambda header: _first(header).update(shape=[-1]),
    "another shape": lambda header: _first(header).update(shape=list(reversed([1, *_first(header)["shape"]]))),
    "another type": lambda header: _first(header).update(dtype="I32" if _first(header)["dtype"] == "F32" else "F32"),
    "an unknown type": lambda header: _first(header).update(dtype="OBJECT"),
    "metadata of code": lambda header: header.update(__metadata__={"exec": ["touch executed"]}),
    "no tensors": lambda header: header.clear(),
}


def checkpoint_cases() -> Iterator[Case]:
    """Checkpoints whose hashes are right and whose contents are not, and others; resumed and evaluated."""

    def put(name: str, data: bytes) -> Callable[[Path], None]:
        def spoil(path: Path) -> None:
            (path / name).write_bytes(data)

        return spoil

    def swap(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
        def spoil(path: Path) -> None:
            (path / name).rename(path.parent.parent / "moved")
            make(path / name)

        return spoil

    for command in ("resume", "eval"):
        for name in (TENSORS, INDEX, "plain.json"):
            for title in ("empty", "a pickle", "deep", "a list", "NaN", "a key twice", "NUL bytes"):
                yield Case(f"{command}: {name} is {title}", _checkpoint(put(name, TEXTS[title]), command))
            for title, make in {
                "a link": lambda path: path.symlink_to(path.parent.parent.parent / "moved"),
                "a pipe": os.mkfifo,
                "a folder": os.mkdir,
                "a link to a device": lambda path: path.symlink_to("/dev/zero"),
                "missing": lambda path: None,
            }.items():
                yield Case(f"{command}: {name} is {title}", _checkpoint(swap(name, make), command, forge=False))
        for title, change in HEADERS.items():
            yield Case(f"{command}: {title}", _checkpoint(lambda path, change=change: _header(path, change), command))
        for title, data in TEXTS.items():
            yield Case(f"{command}: manifest is {title}", _checkpoint(put("manifest.json", data), command, forge=False))
        for name in ("setup.py", "pytorch_model.bin", "__init__.py", "rank-99999-00000.safetensors"):
            yield Case(f"{command}: a stranger {name}", _checkpoint(put(name, PICKLE), command, forge=False))
    draw = random.Random(4)
    for number in range(60):
        seed = draw.random()
        make = _checkpoint(lambda path, seed=seed: _spoilt_plain(path, seed), ("resume", "eval")[number % 2])
        yield Case(f"checkpoint: plain.json, place {number}", make, codes=(0, 2, 3))


def _spoilt_plain(path: Path, seed: float) -> None:
    plain, draw = json.loads((path / "plain.json").read_bytes()), random.Random(seed)
    # As many from the keys at the top, which decide most, as from the many deep down.
    where = list(places(plain))
    place = draw.choice([each for each in where if len(each) <= draw.choice((2, 3, 9))])
    (path / "plain.json").write_bytes(json.dumps(replaced(plain, place, draw.choice(VALUES))).encode())


# Models and runs ------------------------------------------------------------------------------------------------------


def model_cases() -> Iterator[Case]:
    """Folders of Hugging Face whose config, weights or tokenizer are wrong, and casts that are none."""

    def model(spoil: Callable[[Path], object]) -> Callable[[Path, Good], list[str]]:
        def make(box: Path, known: Good) -> list[str]:
            shutil.copytree(known.model, box / "model")
            spoil(box / "model")
            return ["eval", str(box / "model"), "--data", str(known.text), "--sequence", "16", "--sequences", "2"]

        return make

    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        for title in ("empty", "not JSON", "a list", "an object", "deep", "a pickle", "NUL bytes", "a key twice"):
            yield Case(
                f"model: {name} is {title}", model(lambda path, name=name, data=TEXTS[title]: (path / name).write_bytes(data))
            )
    yield Case("model: weights are a .bin", model(lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin")))
    for key, value in {
        "num_hidden_layers": 10**9,
        "vocab_size": 10**12,
        "hidden_size": 0,
        "num_attention_heads": 7,
        "model_type": "../../x",
        "architectures": [SCRIPT],
        "auto_map": {"AutoModelForCausalLM": "evil.Model"},
        "rope_theta": -1,
        "rms_norm_eps": "x",
        "intermediate_size": -5,
    }.items():

        def spoil(path: Path, key: str = key, value: Any = value) -> None:
            (path / "evil.py").write_text("open('executed', 'w')")
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {key: value}))

        yield Case(
            f"model: {key} = {value!r:.20}",
            model(spoil),
            codes=(0, 2) if key in ("auto_map", "rope_theta", "architectures") else (2,),
        )
    for cast in (
        "",
        ":",
        "e99m99",
        "e2m1:block(0)",
        "e2m1:block(99999999999999999999)",
        SCRIPT,
        "mx",
        "nv",
        "e4m3:row:x:y:z",
        "\0",
    ):
        yield Case(
            f"eval --cast {cast!r:.30}", lambda _, known, cast=cast: ["eval", str(known.run), "--cast", cast, "--device", "cpu"]
        )
    for more in (
        ["--sequence", "0"],
        ["--sequence", "-5"],
        ["--sequence", str(10**30)],
        ["--sequences", str(10**30)],
        ["--device", "/x"],
    ):
        yield Case(f"eval {more}", lambda _, known, more=more: ["eval", str(known.run), *more])
    for path in (*FILES, "{box}/file"):
        yield Case(f"eval {path!r:.40}", _at(lambda path, *_: ["eval", path], path))


REPORTED = ("config.toml", "plan.json", "conversion.json", "environment.json", "status.json", "metrics.jsonl")


def run_cases() -> Iterator[Case]:
    """Run folders for reports, which show what can be shown, and for comparisons, which do not go on with them."""

    def run(spoil: Callable[[Path], object]) -> Callable[[Path, Good], list[str]]:
        def make(box: Path, known: Good) -> list[str]:
            (box / "run").mkdir()
            for name in REPORTED:
                shutil.copy(known.run / name, box / "run" / name)
            spoil(box / "run")
            return ["report", str(box / "run")]

        return make

    for name in REPORTED:
        for title in ("empty", "deep", "a pickle", "markup", "a list", "NUL bytes"):
            case = run(lambda path, name=name, data=TEXTS[title]: (path / name).write_bytes(data))
            yield Case(f"report: {name} is {title}", case, codes=(0, 2))
        for title, place in {"a link": lambda path: path.symlink_to("/etc/passwd"), "a pipe": os.mkfifo}.items():
            case = run(lambda path, name=name, place=place: ((path / name).unlink(), place(path / name)))
            yield Case(f"report: {name} is {title}", case, codes=(0, 2))
    draw = random.Random(5)
    for number in range(40):
        seed = draw.random()
        yield Case(f"report: place {number}", run(lambda path, seed=seed: _spoilt_run(path, seed)), codes=(0, 2))
    for path in (*FILES, "{box}/file"):
        yield Case(f"report {path!r:.40}", _at(lambda path, *_: ["report", path], path))
    for path in (*OUTS, "{box}"):
        make = _at(lambda path, _, known: ["report", str(known.run), "--out", path], path)
        yield Case(f"report --out {path!r:.40}", make)
    yield Case("report of a run twice", lambda _, known: ["report", str(known.run), str(known.run)])

    def compare(*arguments: str, **contents: bytes) -> Callable[[Path, Good], list[str]]:
        def make(box: Path, known: Good) -> list[str]:
            if contents:
                shutil.copytree(known.run, box / "all" / "fp32")
            for name, data in contents.items():
                (box / "all" / "fp32" / name.replace("_", ".")).write_bytes(data)
            base = configs.override(Config(), [f'data.sources=["{known.text}"]', *ONE_STEP])
            (box / "base.toml").write_text(configs.dumps(base))
            names = arguments or ("fp32",)
            return ["compare", *names, "--base", str(box / "base.toml"), "--out", str(box / "all"), "--resume"]

        return make

    for name in ("../../evil", "/etc/passwd", "fp32+fp32", "gaussws:../x", "", "+", ":", SCRIPT, "\x1b[2J", "a\0b", "x" * 5000):
        yield Case(f"compare {name!r:.30}", compare(name))
    for title in ("empty", "a pickle", "deep", "NUL bytes", "not UTF-8"):
        yield Case(f"compare: config is {title}", compare(config_toml=TEXTS[title]))
        yield Case(f"compare: status is {title}", compare(status_json=TEXTS[title]))
    for path in FILES:
        yield Case(
            f"compare --base {path!r:.40}",
            _at(lambda path, box, _: ["compare", "--base", path, "--out", str(box / "all")], path),
        )


def _spoilt_run(path: Path, seed: float) -> None:
    """One value of one file, anywhere in it, is another."""
    draw = random.Random(seed)
    name = draw.choice(REPORTED[1:])
    text = (path / name).read_text()
    whole = [json.loads(line) for line in text.splitlines()] if name == "metrics.jsonl" else json.loads(text)
    changed = replaced(whole, draw.choice(list(places(whole))), draw.choice(VALUES))
    lines = map(json.dumps, changed) if name == "metrics.jsonl" else [json.dumps(changed)]
    (path / name).write_text("\n".join(lines) + "\n")


# CPU time -------------------------------------------------------------------------------------------------------------

CPU = 5.0
"""Seconds of CPU time for hostile input below 1 MB; what may pass for a run gets the time of a run as well."""

SLOW_TOKENIZERS = (r"(a+)+$", r"(\w+\s?)+$", r"(x+x+)+y", r"((\w|\s)*)*!")


SLOW_TEMPLATES = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{% set n = namespace(a='a' * 999) %}{% for _ in range(9) %}{% set n.a = n.a * 9 %}{% endfor %}{{ n.a }}",
    "one operation": "{{ 9 ** 9 ** 9 }}",
    "much text": "{{ 'a ' * 9999999 }}",
}

SLOW_PICKLES = {
    "a name that doubles": b"\x80\x04K\x01\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(60)) + b"\x8c\x01a\x93.",
    "a deep tuple": b"\x80\x04)" + b"\x85" * 100_000 + b".",
    "a deep tuple as a key": b"\x80\x04})" + b"\x85" * 100_000 + b"K\x01s.",
    "a huge memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
}


def slow_plans() -> dict[str, Any]:
    """Return rules of plans, or bytes of a plan, that take long in a careless reader."""
    return {
        "many keys and one twice": b"{" + b",".join(b'"key %d": 1' % i for i in range(20_000)) + b', "key 7": 1}',
        "regular expressions": [["re:(a+)+$", None], ["re:(.*)*x", None], ["re:(.*a|.*)*(_|.)*proj!", None]],
        "globs that backtrack": [["*a" * 400 + "!", None], ["*?" * 300 + "! & " + "*[a-z]" * 60, None]],
        "many globs": [["*" + "?*" * 9 + str(i), None] for i in range(300)],
        "too many globs": [[f"*{i}*", None] for i in range(60_000)],
        "a long glob": [["*a" * 400_000, None]],
        "many names": [[f"layer.{i}", None] for i in range(40_000)],
        "a long name": [["a" * 900_000, None]],
    }


def slow_configs() -> dict[str, bytes]:
    """Return files of settings that take long in a careless reader."""
    return {
        "a key of 20,000 parts": b"a." * 20_000 + b"a = 1",
        "a quoted key of 20,000 parts": b'"a".' * 20_000 + b"a = 1",
        "a section of 20,000 parts": b"[" + b"a." * 20_000 + b"a]",
        "deep in lists": b"x = " + b"[" * 400_000,
        "many sections": b"".join(b"[a%d.b]\n" % i for i in range(50_000)),
        "many keys": b"[run]\n" + b"".join(b"k%d=1\n" % i for i in range(80_000)),
        "quotes": b'"' * 900_000,
        "escapes": b'[run]\nout = "' + b"\\" * 900_000,
        "strings that do not end": b"'''" * 299_999,
        "a long number": b"[optim]\nlr = 0." + b"1" * 900_000 + b"x",
        "a long key, not known": b"[run]\n" + b"s" * 900_000 + b" = 1",
    }


def slow_cases() -> Iterator[Case]:
    """Small files that take long in a careless reader: duplicates, long keys, globs that backtrack, headers."""

    def plan(rules: Any) -> Callable[[Path, Good], list[str]]:
        def make(box: Path, known: Good) -> list[str]:
            data = rules if isinstance(rules, bytes) else json.dumps({"version": 3, "layers": rules}).encode()
            (box / "plan.json").write_bytes(data)
            return ["plan", "show", str(box / "plan.json")]

        return make

    plans = slow_plans()
    for title, rules in plans.items():
        fine = title in ("globs that backtrack", "many globs", "many names", "a long name")
        yield Case(f"slow plan: {title}", plan(rules), codes=(0, 2) if fine else (2,), cpu=CPU)

    def trained(box: Path, known: Good) -> list[str]:
        rules = {"version": 3, "layers": plans["globs that backtrack"], "default": {"input": "mxfp8"}}
        (box / "plan.json").write_text(json.dumps(rules))
        return _train(f"precision.plan={toml(str(box / 'plan.json'))}", "precision.emulate=true")(box, known)

    yield Case("slow plan: trained with", trained, codes=(0, 2), cpu=4 * CPU)
    for title, data in slow_configs().items():
        yield Case(f"slow config: {title}", _config(data), cpu=CPU)
    yield Case("slow setting", _train("run.profile=" + "[" * 100_000), cpu=CPU)
    for expression in SLOW_TOKENIZERS:

        def tokenizer(box: Path, known: Good, expression: str = expression) -> list[str]:
            whole = json.loads((known.model / "tokenizer.json").read_text())
            split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
            (box / "tokenizer.json").write_text(json.dumps({**whole, "pre_tokenizer": split}))
            (box / "text.txt").write_text("\n<|endoftext|>\n".join(f"{'a' * 60} {'x' * 60} {i}!?" for i in range(200)))
            out = ["--out", str(box / "tokens"), "--tokenizer", str(box / "tokenizer.json")]
            return ["data", "prepare", str(box / "text.txt"), *out]

        yield Case(f"slow tokenizer: {expression}", tokenizer, codes=(0, 2), cpu=CPU)

    for title, piece in SLOW_TEMPLATES.items():

        def template(box: Path, known: Good, piece: str = piece) -> list[str]:
            """Explode in long conversations only."""
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(known.model)  # to import what it needs takes seconds
            shutil.copy(known.model / "tokenizer.json", box)
            text = "{% if messages | length > 9 %}" + piece + "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
            (box / "chat_template.jinja").write_text(text)
            (box / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
            chat = {"messages": [{"role": role, "content": "a fox"} for role in ("user", "assistant") * 8]}
            (box / "chat.jsonl").write_text(f"{json.dumps(chat)}\n" * 9)
            return ["data", "prepare", str(box / "chat.jsonl"), "--kind=chat", "--out", str(box / "x"), "--tokenizer", str(box)]

        yield Case(f"slow template: {title}", template, cpu=CPU)

    def multiplied(box: Path, known: Good) -> list[str]:
        whole = json.loads((known.model / "tokenizer.json").read_text())
        longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
        (box / "tokenizer.json").write_text(
            json.dumps({**whole, "normalizer": {"type": "Sequence", "normalizers": [longer] * 6}})
        )
        return ["data", "prepare", str(known.text), "--out", str(box / "x"), "--tokenizer", str(box)]

    yield Case("slow tokenizer: multiplies its text", multiplied, cpu=CPU)
    yield Case("slow glob", lambda box, known: ["data", "prepare", "/**/**", "--out", str(box / "x")], cpu=CPU)
    for title, pickled in SLOW_PICKLES.items():

        def metadata(box: Path, known: Good, pickled: bytes = pickled) -> list[str]:
            (box / ".metadata").write_bytes(pickled)
            return [*_train()(box, known), "--from", str(box)]

        yield Case(f"slow .metadata: {title}", metadata, cpu=CPU)

    def header(path: Path) -> None:
        entries = b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(15_000))
        text = b"{" + entries + b',"t7":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        (path / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text)

    yield Case("slow header: many tensors and one twice", _checkpoint(header, "eval"), cpu=CPU)


KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    "slow input": slow_cases,
    "configs": config_cases,
    "plans": plan_cases,
    "tokenizers": tokenizer_cases,
    "data": data_cases,
    "checkpoints": checkpoint_cases,
    "models": model_cases,
    "runs": run_cases,
}
