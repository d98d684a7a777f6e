"""Coverage-guided fuzzing of every reader of bytes from elsewhere: no exception but a UserError, in 5 s of CPU time and 1 GiB.

    make fuzz                                # a minute
    python tests/soak/fuzz.py --executions 1000000
    python tests/soak/fuzz.py plans headers --seconds 300 --seed 7

Inputs begin with the seeds in tests/fixtures/fuzz and with what Dither itself writes. A mutation that reaches a new pair of
consecutive lines of Dither or of tomllib joins the corpus. Every sixteenth execution is traced (`sys.settrace`), and so are the
first ones of each reader: tracing takes five times as long. `make soak` calls `fuzz`.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import dither
from dither import UserError, checkpoint
from dither.checkpoint import foreign, format
from dither.checkpoint.foreign import METADATA_NAMES
from dither.data import prepare, train_bpe
from dither.data import text as texts
from dither.data.chat import load_template, read_conversation
from dither.data.tokenizer import Tokenizer, load_tokenizer
from dither.data.tokens import manifest_text, open_tokens
from dither.files import Refused, from_json
from dither.models import build, preset, save_pretrained
from dither.models.generation import Chat, Sampler
from dither.models.open import open_model
from dither.report import run_folder
from dither.spec import Cast, Plan
from dither.spec.patterns import matches
from dither.spec.recipes import RECIPES, recipe
from dither.train import config as configs
from dither.train.config import Config
from dither.train.run_folder import Status

SEEDS = Path(__file__).parents[1] / "fixtures" / "fuzz"
TRACED = (str(Path(dither.__file__).parent), "tomllib")
SECONDS, MEMORY = 5.0, 1 << 30
"""The most CPU time of one input, processes that it starts included, and the most memory beyond what there is before."""


class Row(NamedTuple):
    """A line of the scoreboard."""

    what: str
    target: str
    figure: str
    passed: bool
    faults: tuple[str, ...] = ()


@dataclass
class Reader:
    """A function that reads bytes, its seeds, and its part of the executions: fast ones have most."""

    read: Callable[[bytes], object]
    seeds: list[bytes]
    share: float
    refusals: tuple[type[BaseException], ...] = (UserError,)
    words: list[bytes] = field(default_factory=list)


# Readers --------------------------------------------------------------------------------------------------------------


def _decoded(function: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: function(data.decode(errors="replace"))


def _signed(data: bytes, write: Callable[[dict[str, Any]], None]) -> None:
    """Give a manifest its own hash, so that not every change ends there."""
    value = from_json(data)
    if isinstance(value, dict):
        value.pop("sha256", None)
    write(value)


def readers(folder: Path, light: bool = False) -> dict[str, Reader]:
    """Return the readers, `light`: but for those that import transformers."""
    words = ("the", "quick", "brown", "fox")
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(" ".join(random.Random(number).choices(words, k=9)))
    bpe = train_bpe(["the quick brown fox"] * 20, 265)
    prepare(str(folder / "text"), folder / "tokens", bpe, held_out=0.3)
    tokens = folder / "tokens" / texts.MANIFEST
    point = checkpoint.save(folder / "run", 1, tensors={"w": torch.ones(2), "b": torch.zeros(2, 3)}, plain={})
    manifest, tensors = point / "manifest.json", next(point.glob("*.safetensors")).read_bytes()
    (folder / "report").mkdir()

    def token_manifest(data: bytes) -> None:
        _signed(data, lambda value: tokens.write_text(manifest_text(value) if isinstance(value, dict) else json.dumps(value)))
        open_tokens(folder / "tokens", verify=False)

    def checkpoint_manifest(data: bytes) -> None:
        value = from_json(data)
        whole = isinstance(value, dict) and isinstance(value.get("files"), dict)
        manifest.write_bytes(format.manifest_bytes(value.get("step"), value["files"]) if whole else data)
        checkpoint.verify(point)

    shards = checkpoint.save(folder / "shards", 1, tensors={"w": torch.ones(2), "b": torch.zeros(2, 3)}, plain={})
    listing = format.read_manifest(shards)

    def shard_index(data: bytes) -> None:
        tensors: dict[str, format.SavedTensor] = {}
        format.add_index(from_json(data), "rank-00000", listing, tensors, {})
        for name, tensor in tensors.items():
            format.check_cover(name, tensor)

    def header(data: bytes) -> None:
        (folder / "header.safetensors").write_bytes(data)
        format.read_header(folder / "header.safetensors")

    def tokenizer(data: bytes) -> None:
        Tokenizer(data.decode(errors="replace")).encode("the quick aaaaaaaaaaaaaaaaaaaa!")

    def json_lines(data: bytes) -> None:
        for _ in texts._json_lines(Path("x.jsonl"), io.BytesIO(data), "text", lambda where, why: None):
            pass

    def plain_text(data: bytes) -> None:
        for _ in texts._texts(Path("x.txt"), io.BytesIO(data), texts.SEPARATOR, lambda where, why: None):
            pass

    def metrics(data: bytes) -> None:
        (folder / "report" / "metrics.jsonl").write_bytes(data)
        run_folder.read(folder / "report")

    def status(data: bytes) -> None:
        (folder / "report" / "status.json").write_bytes(data)
        Status.load(folder / "report")

    def pattern(text: str) -> None:
        matches(text, "model.layers.0.self_attn.q_proj")

    pickles = [pickle.dumps({"a": [torch.Size((2, 3)), (1, 2.5, None)]}, protocol) for protocol in (2, 4)]
    plans = [recipe(name).to_json().encode() for name in sorted(RECIPES)]
    names = b"model.layers.0.mlp.up_proj"
    full = configs.dumps(Config()).encode().split(b"\n\n")
    lines = b'{"text": "a"}\n{"text": "\\ud83d\\ude00", "b": [1, 2.5e3, null]}\n'
    run = b'{"kind": "train", "step": 10, "time": 1.5, "loss": 5.5}\n{"kind": "eval", "step": 10, "time": 2, "loss": 5}\n'
    found = {
        "configs": Reader(_decoded(configs.loads), full, 0.004),
        "plans": Reader(_decoded(Plan.from_json), plans, 0.15),
        "casts": Reader(_decoded(Cast.parse), [b"e4m3 tile(128) fp32 nearest", b"mxfp4", b"e5m2 delayed(16,0,max)"], 0.1),
        "patterns": Reader(_decoded(pattern), [rb"re:(.*\.)?(q|k|v)_proj", rb"[!a-c]*.[0-9]?* & *_proj", names], 0.01),
        "JSON": Reader(lambda data: from_json(data), [*plans[:2], lines[:14]], 0.2, (Refused,)),
        "headers": Reader(header, [tensors], 0.02, (Refused,)),
        "indexes of shards": Reader(shard_index, [(shards / "rank-00000.json").read_bytes()], 0.02, (Refused,)),
        "pickles": Reader(lambda data: foreign.loads(data, METADATA_NAMES), pickles, 0.02, (Refused,)),
        "JSON lines": Reader(json_lines, [lines], 0.14, (UserError, texts._NotTextError)),
        "text": Reader(plain_text, [b"one\n<|endoftext|>\ntwo\r\n\xef\xbb\xbfthree"], 0.147, (UserError, texts._NotTextError)),
        "metrics": Reader(metrics, [run], 0.001),
        "statuses": Reader(status, [b'{"state": "done", "step": 9, "why": ""}'], 0.002),
        "manifests of tokens": Reader(token_manifest, [tokens.read_bytes()], 0.002, (UserError, Refused)),
        "manifests of checkpoints": Reader(checkpoint_manifest, [manifest.read_bytes()], 0.002, (UserError, Refused)),
        "tokenizers": Reader(tokenizer, [(bpe.json or "").encode()], 0.002),
    }
    found |= {"DCP folders": _dcp(folder), "shards of tokens": _tokens(tokens)}
    with contextlib.suppress(ImportError):
        found["Parquet"] = _parquet(folder)
    if not light:
        with contextlib.suppress(ImportError):
            found |= {"models": _model(folder), **_chats(folder, bpe.json or "")}
    for name, reader in found.items():
        kept = SEEDS / name.replace(" ", "-").lower()
        reader.seeds += [path.read_bytes() for path in sorted(kept.iterdir())] if kept.is_dir() else []
        reader.words += _words(reader.seeds)
    return found


def _dcp(folder: Path) -> Reader:
    """The metadata of a folder of torch.distributed.checkpoint, and the tensors that it leads to."""
    from torch.distributed import checkpoint as dcp

    dcp.save({"model": {"w": torch.ones(4, 2), "b": torch.zeros(3)}, "step": 7}, checkpoint_id=folder / "dcp", no_dist=True)
    metadata = folder / "dcp" / ".metadata"

    def read(data: bytes) -> None:
        metadata.write_bytes(data)
        with foreign.open_dcp(folder / "dcp") as source:
            for name in source.tensors:
                source.read(name)

    return Reader(read, [metadata.read_bytes()], 0.002)


def _model(folder: Path) -> Reader:
    """The config of a model, beside weights that stay as they are; and the same bytes as a file, such as a GGUF."""
    save_pretrained(build(preset("tiny", vocab_size=265)), folder / "model")
    config = folder / "model" / "config.json"
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):
        AutoModelForCausalLM.from_pretrained(folder / "model")  # imports what one that Dither does not have would import

    def read(data: bytes) -> None:
        (folder / "model.gguf").write_bytes(data)
        with contextlib.suppress(UserError):
            open_model(folder / "model.gguf")
        config.write_bytes(data)
        with contextlib.redirect_stderr(io.StringIO()):
            open_model(folder / "model")

    gguf = b"GGUF\3\0\0\0" + (1).to_bytes(8, "little") * 2 + (20).to_bytes(8, "little") + b"general.architecture\x08\0\0\0"
    return Reader(read, [config.read_bytes(), gguf], 0.0009)


def _tokens(manifest: Path) -> Reader:
    """A shard of tokens, whose hash is right: a manifest can be forged as well."""
    shard, whole = manifest.parent / "train-00000.bin", manifest.read_bytes()

    def read(data: bytes) -> None:
        shard.write_bytes(data)
        value = from_json(whole)
        value.pop("sha256")
        split = value["splits"]["train"]
        split["tokens"] = split["shards"][0]["tokens"] = len(data) // 2
        split["shards"][0]["sha256"] = hashlib.sha256(data).hexdigest()
        manifest.write_text(manifest_text(value))
        tokens = open_tokens(manifest.parent, verify=True).train
        tokens.bytes_of(torch.from_numpy(tokens.read(0, len(tokens))))

    return Reader(read, [shard.read_bytes()], 0.0009)


LOOPS = (b"{% for a in range(99999) %}", b"{% endfor %}", b"{% set n.a = n.a * 99 %}", b"{{ n.a }}", b"{{ 'a' * 99999999 }}")
LOOPS += (b"{{ 9 ** 9 ** 9 }}", b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", b"{{ messages | join(n.a) }}", b"((((")
"""Pieces of templates that take long or much memory."""


def _chats(folder: Path, tokenizer: str) -> dict[str, Reader]:
    """A chat template, for a conversation that is prepared and for one that goes on; and the settings of a tokenizer."""
    place = folder / "chat"
    place.mkdir()
    (place / "tokenizer.json").write_text(tokenizer)
    messages = [{"role": role, "content": "the fox"} for role in ("user", "assistant") * 6]
    chat = read_conversation({"messages": messages}, "line 1")
    template = b"{% set n = namespace(a='a') %}{% for m in messages %}<|{{ m['role'] }}|>{{ m.content | trim }}\n{% endfor %}"
    template += b"{% if add_generation_prompt %}<|assistant|>{% endif %}"
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": "{{ 1 }}"}
    settings = json.dumps(named)

    def read() -> None:
        found = load_template(load_tokenizer(place), place)
        found.encode_all([chat], lambda where, why: None)
        if found._renderer is not None:
            talk = Chat(torch.nn.Identity(), Sampler(), 0, found._renderer)
            talk.messages = messages
            talk._prompt()

    def of_template(data: bytes) -> None:
        (place / "tokenizer_config.json").write_text(settings)
        (place / "chat_template.jinja").write_bytes(data)
        read()

    def of_settings(data: bytes) -> None:
        (place / "chat_template.jinja").unlink(missing_ok=True)
        (place / "tokenizer_config.json").write_bytes(data)
        read()

    return {
        "chat templates": Reader(of_template, [template], 0.0009, words=[*LOOPS]),
        "settings of tokenizers": Reader(of_settings, [settings.encode()], 0.0009),
    }


def _parquet(folder: Path) -> Reader:
    import pyarrow
    from pyarrow import parquet

    path = folder / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two", None]}), path)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for _ in texts._parquet(path, "text", lambda where, why: None):
            pass

    return Reader(read, [path.read_bytes()], 0.02)


# Mutations ------------------------------------------------------------------------------------------------------------

STRANGE = (b"", b"null", b"true", b"-1", b"1e999", b"NaN", b"9" * 5000, b'"', b"\\ud800", b"\xff", b"\0", b"[", b"{", b"]" * 9)
STRANGE += (
    b"[" * 3000,
    b"a." * 200,
    b"(" * 60,
    b"{}",
    b"[]",
    b"18446744073709551616",
    b"0.1",
    b"\x1b[2J",
    b"../..",
    b"re:(a+)+$",
)


def _words(seeds: list[bytes]) -> list[bytes]:
    """Return the words, numbers and marks of the seeds."""
    found = {word for seed in seeds for word in re.findall(rb'"[^"]{0,40}"|[\w.+-]{1,40}|[^\w\s]', seed)}
    return sorted(found)[:2000]


def mutated(draw: random.Random, corpus: list[bytes], words: list[bytes]) -> bytes:
    """Return an input of the corpus after one to four changes."""
    data = bytearray(draw.choice(corpus))
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, size = draw.randrange(len(data) + 1), draw.choice((1, 2, 4, 16, 64))
        match draw.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size]
            case 3:
                data[at:at] = draw.choice(words or [b"x"])
            case 4:
                end = data.find(b",", at)
                data[at : end if 0 <= end < at + 100 else at + size] = draw.choice(STRANGE)
            case 5:
                other = draw.choice(corpus)
                data[at:] = other[draw.randrange(len(other) + 1) :]
            case _:
                word = draw.choice(words or [b"x"])
                found = data.find(word, at)
                if found >= 0:
                    data[found : found + len(word)] = draw.choice(words)
    return bytes(data[:100_000])


class Coverage:
    """Pairs of consecutive lines of Dither and tomllib, as a traced execution sees them."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()
        self._wanted: dict[str, bool] = {}

    def grows(self, work: Callable[[], object]) -> bool:
        """Do some work, and return whether it reached anything new. Exceptions pass through, and count."""
        found: set[tuple[int, int, int]] = set()

        def calls(frame: FrameType, event: str, _: object) -> Any:
            name = frame.f_code.co_filename
            if name not in self._wanted:
                self._wanted[name] = any(part in name for part in TRACED)
            if not self._wanted[name]:
                return None
            code, before = hash(frame.f_code), 0

            def lines(frame: FrameType, event: str, _: object) -> Any:
                nonlocal before
                if event == "line":
                    found.add((code, before, frame.f_lineno))
                    before = frame.f_lineno
                return lines

            return lines

        sys.settrace(calls)
        try:
            work()
        finally:
            sys.settrace(None)
            new = found - self.seen
            self.seen |= new
            self.grown = bool(new)
        return self.grown


def _cpu() -> float:
    """Return the seconds of CPU time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Let allocations fail beyond the limit of memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def attempt(reader: Reader, data: bytes, coverage: Coverage | None) -> tuple[bool, str]:
    """Return whether an input reached anything new, and what is wrong, or ""."""
    began, fault = _cpu(), ""
    try:
        if coverage is None:
            reader.read(data)
        else:
            coverage.grows(lambda: reader.read(data))
    except reader.refusals as error:
        if "\n" in str(error):
            fault = f"a message of two lines: {error}"
    except Exception:
        fault = traceback.format_exc(limit=-3)
    if (spent := _cpu() - began) > SECONDS:
        fault = f"took {spent:.1f} s"
    return coverage is not None and coverage.grown, fault and f"{fault}\non {data[:300]!r}"


def fuzz(
    *,
    executions: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    names: tuple[str, ...] = (),
    light: bool = False,
) -> list[Row]:
    """Fuzz the readers, and return a line of a scoreboard for each.

    Args:
        executions: How many inputs, over all readers; by default as many as fit into `seconds`.
        seconds: The most time, the same for each reader; by default no limit. With both, whichever ends first.
        seed: The seed of all mutations: the same number of executions gives the same inputs.
        names: Only these readers; by default all.
        light: Leave out the readers that import transformers.
    """
    warnings.simplefilter("ignore")
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="dither-fuzz-", dir=memory))
    rows = []
    try:
        chosen = {name: reader for name, reader in readers(folder, light).items() if not names or name in names}
        whole = sum(reader.share for reader in chosen.values())
        for name, reader in chosen.items():
            most = round((executions or 1 << 40) * reader.share / whole)
            end = time.monotonic() + (seconds or 1e9) / len(chosen)
            rows.append(_one(name, reader, most, end, random.Random(f"{seed} {name}")))
    finally:
        shutil.rmtree(folder)
    return rows


def _one(name: str, reader: Reader, most: int, end: float, draw: random.Random) -> Row:
    coverage, corpus, faults, done = Coverage(), list(reader.seeds), dict[str, str](), 0
    for data in reader.seeds:
        _, fault = attempt(reader, data, coverage)
        if fault:
            faults.setdefault(fault.splitlines()[-2][:200], fault)
    began = time.monotonic()
    with _bounded():
        while done < most and time.monotonic() < end:
            data = mutated(draw, corpus, reader.words)
            new, fault = attempt(reader, data, coverage if done % 16 == 0 or done < 500 else None)
            done += 1
            if new and len(data) < 20_000:
                corpus.append(data)
            if fault:
                faults.setdefault(fault.splitlines()[-2][:200], fault)  # one of each kind
    rate = done / max(time.monotonic() - began, 1e-9)
    what = f"fuzzed {name}: {done:,} inputs, {len(coverage.seen):,} branches, {rate:,.0f} per s"
    return Row(what, "0", str(len(faults)), not faults, tuple(faults.values()))


def main() -> int:
    """The command: 0 when nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="READER", help="such as plans; all by default")
    parser.add_argument("--executions", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.executions is None and given.seconds is None:
        given.seconds = 60.0
    rows = fuzz(executions=given.executions, seconds=given.seconds, seed=given.seed, names=tuple(given.names))
    for row in rows:
        print(f"{'PASS' if row.passed else 'FAIL'}  {row.what:72} {row.target:>12} {row.figure:>12}", flush=True)
        for fault in row.faults[:5]:
            print("      " + fault.replace("\n", "\n      "), flush=True)
    return int(not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
