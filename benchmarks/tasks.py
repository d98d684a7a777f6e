"""Tasks for runs of `dither train` and `dither ladder`, also after casts: ARC-easy, PIQA, LAMBADA and BLiMP.

Three steps, which may run on different machines:

    PYTHONPATH=src python3 benchmarks/tasks.py requests QUESTIONS TOKENIZER requests.npz      # needs lm-eval
    PYTHONPATH=src python3 benchmarks/tasks.py answer requests.npz answers.npz o1=RUN sr=RUN   # the GPU; needs torch alone
    PYTHONPATH=src python3 benchmarks/tasks.py score QUESTIONS TOKENIZER requests.npz answers.npz > table.md   # needs lm-eval

QUESTIONS is a folder of arc_easy.jsonl.xz and so on, TOKENIZER the tokenizer.json of the runs. `requests` lets lm-eval write
out its requests as tokens. `answer` computes the log likelihood of every request for each run as it is and after each of
--casts and --plans, as `dither eval` takes them, and the held-out loss. `score` lets lm-eval aggregate the answers:
differences, paired by question, from the same run as trained and, for runs as trained, from the first run.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

TASKS = ("arc_easy", "piqa", "lambada_openai", "blimp")
NAMES = {"arc_easy": "ARC-easy", "piqa": "PIQA", "lambada_openai": "LAMBADA", "blimp": "BLiMP"}
AS_TRAINED = "as trained"

# Requests -------------------------------------------------------------------------------------------------------------


def harness_model(tokenizer: str, stored: dict[str, np.ndarray] | None, answers: Any) -> Any:
    """Return a model of lm-eval that collects the tokens of requests, or compares them with stored ones and gives answers.

    Args:
        tokenizer: The tokenizer.json.
        stored: The requests to compare with, or None to collect them in `collected`.
        answers: (log likelihoods, greedy) of the stored requests, or None.
    """
    from lm_eval.api.model import TemplateLM

    from dither.data import load_tokenizer

    class Requests(TemplateLM):
        """Requests in the order in which lm-eval makes them."""

        def __init__(self) -> None:
            super().__init__()
            self.text_tokenizer = load_tokenizer(tokenizer)
            self.collected: list[tuple[list[int], list[int]]] = []

        @property
        def eot_token_id(self) -> int:
            """The token after each document."""
            return self.text_tokenizer.end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            """Return the tokens of a text."""
            return self.text_tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            self.collected += [(context, continuation) for _, context, continuation in requests]
            if stored is None:
                return [(0.0, False)] * len(requests)
            if sha256(packed(self.collected)) != sha256(stored):
                sys.exit("The questions or the tokenizer are others than those of the requests.")
            return [(float(nats), bool(greedy)) for nats, greedy in zip(*answers, strict=True)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            """No task here asks for it."""
            raise NotImplementedError

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            """No task here asks for it."""
            raise NotImplementedError

    return Requests()


def packed(requests: list[tuple[list[int], list[int]]]) -> dict[str, np.ndarray]:
    """Return requests as arrays: all tokens, and the lengths of contexts and continuations."""
    tokens = [token for context, continuation in requests for token in (*context, *continuation)]
    lengths = [(len(context), len(continuation)) for context, continuation in requests]
    return {"tokens": np.array(tokens, np.uint16), "lengths": np.array(lengths, np.uint16)}


def unpacked(stored: dict[str, np.ndarray]) -> list[tuple[list[int], list[int]]]:
    """Return the requests of `packed` arrays."""
    requests, place, tokens = [], 0, stored["tokens"].tolist()
    for context, continuation in stored["lengths"].tolist():
        middle, end = place + context, place + context + continuation
        requests.append((tokens[place:middle], tokens[middle:end]))
        place = end
    return requests


def sha256(stored: dict[str, np.ndarray]) -> str:
    """Return the SHA-256 of packed requests."""
    return hashlib.sha256(stored["tokens"].tobytes() + stored["lengths"].tobytes()).hexdigest()


def write_requests(arguments: argparse.Namespace) -> None:
    """Write the requests of the tasks as tokens."""
    from dither.integrations import lm_eval

    lm = harness_model(arguments.tokenizer, None, None)
    with tempfile.TemporaryDirectory() as folder:
        tasks = lm_eval.Tasks.parse(arguments.tasks, Path(arguments.questions), arguments.limit)
        lm_eval.scores(lm, lm_eval.load_tasks(tasks, Path(folder)), arguments.limit)
    stored = packed(lm.collected)
    meta = {"tasks": list(arguments.tasks), "limit": arguments.limit}
    np.savez_compressed(arguments.requests, meta=np.array(json.dumps(meta)), **stored)
    count, size = len(lm.collected), Path(arguments.requests).stat().st_size
    print(f"{arguments.requests}: {count:,} requests, {len(stored['tokens']):,} tokens, {size / 2**20:.2f} MiB")


# Answers --------------------------------------------------------------------------------------------------------------


def answer(arguments: argparse.Namespace) -> None:
    """Write the answers of each run and cast."""
    from dither.evaluate import TaskScore, log_likelihoods
    from dither.evaluate import variants as evaluation
    from dither.train.ranks import joined

    with np.load(arguments.requests) as file:
        stored = {name: file[name] for name in ("tokens", "lengths")}
    requests, began = unpacked(stored), time.monotonic()
    arrays: dict[str, np.ndarray] = {}
    meta: dict[str, Any] = {"sha256": sha256(stored), "runs": {}}
    variants = evaluation.Variants(casts=tuple(arguments.casts), plans=tuple(arguments.plans))
    with joined(arguments.device) as ranks:
        for text in arguments.runs:
            name, _, run = text.partition("=")
            if not run:
                sys.exit(f"Name each run, as in o1={text}.")
            found: list[tuple[list[float], list[bool]]] = []

            def score(subject: Any, found: list[Any] = found, name: str = name) -> tuple[TaskScore, ...]:
                rows = subject.model.embedding.num_embeddings
                answers = log_likelihoods(subject.model, requests, vocab_size=rows, logits=arguments.logits)
                found.append(([each.nats for each in answers], [each.greedy for each in answers]))
                print(f"[{time.monotonic() - began:6.1f} s] {name}: {len(found)} models answered", flush=True)
                return ()

            result = evaluation.evaluate(
                run, variants=variants, score=score, sequences=arguments.sequences, device=ranks.device
            )
            meta["runs"][name] = [variant.to_dict(result.base) for variant in result.variants]
            for variant, (nats, greedy) in zip(result.variants, found, strict=True):
                arrays[f"{name}/{variant.label}/nats"] = np.array(nats)
                arrays[f"{name}/{variant.label}/greedy"] = np.array(greedy)
            np.savez_compressed(arguments.answers, meta=np.array(json.dumps(meta)), **arrays)


# Scores ---------------------------------------------------------------------------------------------------------------


def score_answers(arguments: argparse.Namespace) -> None:
    """Print tables of scores and of paired differences."""
    from dither.evaluate.variants import Variant
    from dither.integrations import lm_eval

    with np.load(arguments.requests) as file:
        stored, asked = {name: file[name] for name in ("tokens", "lengths")}, json.loads(str(file["meta"]))
    with np.load(arguments.answers) as file:
        meta, arrays = json.loads(str(file["meta"])), {name: file[name] for name in file.files if name != "meta"}
    if meta["sha256"] != sha256(stored):
        sys.exit("The answers are to other requests.")
    scored: dict[tuple[str, str], Variant] = {}
    with tempfile.TemporaryDirectory() as folder:
        tasks = lm_eval.Tasks.parse(asked["tasks"], Path(arguments.questions), asked["limit"])
        loaded = lm_eval.load_tasks(tasks, Path(folder))
        for run, rows in meta["runs"].items():
            for label in (row["label"] for row in rows):
                answers = arrays[f"{run}/{label}/nats"], arrays[f"{run}/{label}/greedy"]
                lm = harness_model(arguments.tokenizer, stored, answers)
                scored[run, label] = Variant(label, "cast", None, None, lm_eval.scores(lm, loaded, asked["limit"]))
    print(tables(meta, scored))


def tables(meta: dict[str, Any], scored: dict[tuple[str, str], Any]) -> str:
    """Return two tables in Markdown: scores, and differences."""
    rows = {(run, row["label"]): row for run, found in meta["runs"].items() for row in found}
    first = next(iter(meta["runs"]))
    columns = [(each.task, each.metric) for each in next(iter(scored.values())).tasks]
    heads = [f"{NAMES.get(task, task)} {_metric(metric)}" for task, metric in columns]
    lines = [["run", "cast", "bits per weight", "held-out loss, nats per token", "bits per byte", *heads]]
    lines.append(["---"] * len(lines[0]))
    for (run, label), variant in scored.items():
        text, bits = rows[run, label]["held_out"], rows[run, label]["bits"]
        cells = [run, label, f"{bits:.2f}" if bits else "", f"{text['loss']:.4f}", _shown(text["bits_per_byte"], 4)]
        for score in variant.tasks:
            digits, factor = (1, 1.0) if score.logarithmic else (2, 100.0)
            cells.append(f"{score.value * factor:.{digits}f} ± {(score.standard_error or 0.0) * factor:.{digits}f}")
        lines.append(cells)
    changes = [["run", "cast", "compared with", "held-out loss, nats per token", *_change_heads(columns)]]
    changes.append(["---"] * len(changes[0]))
    for (run, label), variant in scored.items():
        base = (first if label == AS_TRAINED else run, AS_TRAINED)
        if base == (run, label):
            continue
        loss = rows[run, label].get("loss_change")
        cells = [run, label, " ".join(base)]
        cells.append("" if loss is None else _difference(loss["mean"], loss["standard_error"], 4, loss["decided"]))
        for score in variant.tasks:
            change = variant.task_change(score, scored[base])
            digits, factor = (4, 1.0) if score.logarithmic else (2, 100.0)
            cells.append(_difference(change.mean * factor, (change.error or 0.0) * factor, digits, change.decided))
        changes.append(cells)
    return "\n".join("".join("| " + " | ".join(line) + " |\n" for line in table) for table in (lines, changes))


def _metric(metric: str) -> str:
    return {"acc": "accuracy, %", "acc_norm": "length-normalized accuracy, %", "perplexity": "perplexity"}.get(metric, metric)


def _change_heads(columns: list[tuple[str, str]]) -> list[str]:
    units = {"acc": "accuracy, points", "acc_norm": "length-normalized accuracy, points", "perplexity": "nats per question"}
    return [f"{NAMES.get(task, task)} {units.get(metric, metric)}" for task, metric in columns]


def _difference(mean: float, error: float | None, digits: int, decided: bool) -> str:
    """Return a difference, in bold if it exceeds the bounds of its 95 % confidence interval around 0."""
    text = f"{mean:+.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
    return f"**{text}**" if decided else text


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Run one of the three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    asking = steps.add_parser("requests")
    asking.add_argument("questions")
    asking.add_argument("tokenizer")
    asking.add_argument("requests")
    asking.add_argument("--tasks", nargs="+", default=TASKS)
    asking.add_argument("--limit", type=int)
    asking.set_defaults(run=write_requests)
    answering = steps.add_parser("answer")
    answering.add_argument("requests")
    answering.add_argument("answers")
    answering.add_argument("runs", nargs="+", metavar="NAME=RUN")
    answering.add_argument("--casts", nargs="*", default=("nvfp4",))
    answering.add_argument("--plans", nargs="*", default=())
    answering.add_argument("--sequences", type=int, default=256, help="sequences of held-out text")
    answering.add_argument("--device", default="auto")
    answering.add_argument("--logits", type=int, default=1 << 30, help="most logits per forward pass")
    answering.set_defaults(run=answer)
    scoring = steps.add_parser("score")
    for name in ("questions", "tokenizer", "requests", "answers"):
        scoring.add_argument(name)
    scoring.set_defaults(run=score_answers)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
