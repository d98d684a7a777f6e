"""Tasks for a Llama of 134 M parameters: ARC-easy, PIQA, LAMBADA and BLiMP in BF16, FP8, FP4 and by learned bitwidths.

Three steps, which may run on different machines:

    PYTHONPATH=src python3 benchmarks/tasks.py requests QUESTIONS TOKENIZER requests.npz   # needs lm-eval
    PYTHONPATH=src python3 benchmarks/tasks.py answer TOKENS requests.npz answers.npz      # the GPU; needs torch alone
    PYTHONPATH=src python3 benchmarks/tasks.py score QUESTIONS TOKENIZER requests.npz answers.npz > table.md   # needs lm-eval

QUESTIONS is a folder of arc_easy.jsonl.xz and so on, TOKENIZER a tokenizer.json, TOKENS a folder by `dither data prepare` with
the same tokenizer. `requests` lets lm-eval write out its requests as tokens. `answer` trains two models by `dither train` from
the same seed, and computes the log likelihood of every request for each model and each cast:

    O1        float32 parameters, BF16 autocast
    GaussWS   the same with rounded normal noise in the weights; b_t decays from 6 to --b-target until 1 % of
              the way is left

    BF16                 as trained, without noise
    FP8 products         inputs and weights of all layers but the output's cast as by the recipe fp8-block
    FP4 products         the same by fp4-block
    FP8 weights          weights alone: e4m3 in blocks of 128 x 128
    FP4 weights          weights alone: nvfp4
    learned bitwidths    weights of GaussWS alone: each layer in the narrowest format that carries its bitwidths

`score` lets lm-eval aggregate the answers. Differences are paired by question. With `--tiny`, `answer` trains models of 0.5 M
parameters for a few steps on a CPU.
"""

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

TASKS = ("arc_easy", "piqa", "lambada_openai", "blimp")
NAMES = {"arc_easy": "ARC-easy", "piqa": "PIQA", "lambada_openai": "LAMBADA", "blimp": "BLiMP"}
ARMS = ("O1", "GaussWS")
PLANS = {"fp8-block": "FP8 products", "fp4-block": "FP4 products"}
CASTS = {"e4m3:block(128)": "FP8 weights", "nvfp4": "FP4 weights", "learned": "learned bitwidths"}
LEFT = 0.01
"""Fraction of the way from b_init to b_target that is left after the last step."""

FULL: dict[str, Any] = {
    "preset": "llama-134m",
    "vocab": 32000,
    "sequence": 1024,
    "batch": 64,
    "lr": 6e-4,
    "log": 50,
    "eval": 256,
}
TINY: dict[str, Any] = {"preset": "tiny", "vocab": None, "sequence": 64, "batch": 4, "lr": 3e-3, "log": 5, "eval": 8}


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


def settings(arm: str, size: dict[str, Any], arguments: argparse.Namespace, out: Path) -> list[str]:
    """Return the settings of an arm."""
    from dither.train import config

    found = [
        f'data.sources=["{arguments.tokens}"]',
        f"model.preset={size['preset']}",
        *([f"model.vocab={size['vocab']}"] if size["vocab"] else []),
        f"data.sequence={size['sequence']}",
        f"data.batch={arguments.batch or size['batch']}",
        f"data.seed={arguments.seed}",
        f"optim.lr={size['lr']}",
        "precision.mode=o1",
        f"run.steps={arguments.steps}",
        f"run.seed={arguments.seed}",
        f"run.log_every={size['log']}",
        f"run.eval_sequences={size['eval']}",
        "run.eval_every=0",
        "run.sample_every=0",
        "run.save_every=0",
        f"run.device={arguments.device}",
        f'run.out="{out}"',
    ]
    if arm == "O1":
        return found
    plain = config.override(config.Config(), found)
    rate = -math.log(LEFT) / sum(config.schedule(plain, step) for step in range(arguments.steps))
    guidance = f'[{{kind="weight_decay", rate={rate:.6g}}}]'
    return [
        *found,
        f'precision.sampling={{parts="{arguments.parts}", b_init=6.0, b_target={arguments.b_target}, guidance={guidance}}}',
    ]


def answer(arguments: argparse.Namespace) -> None:
    """Train the models, and write the answers of each model and cast."""
    import torch

    from dither.evaluate import TaskScore, log_likelihoods
    from dither.evaluate import variants as evaluation
    from dither.train import config, loop
    from dither.train.ranks import joined
    from dither.train.records import Progress

    with np.load(arguments.requests) as file:
        stored = {name: file[name] for name in ("tokens", "lengths")}
    requests, began = unpacked(stored), time.monotonic()
    size = TINY if arguments.tiny else FULL
    arrays: dict[str, np.ndarray] = {}
    meta: dict[str, Any] = {"sha256": sha256(stored), "arms": {}, "steps": arguments.steps, "torch": torch.__version__}
    meta |= {"b_target": arguments.b_target, "parts": arguments.parts}

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="dither-tasks-") as folder:
        for arm in ARMS:
            out = Path(folder) / arm
            say(f"{arm}: training")
            with Progress(steps=arguments.steps) as progress:
                outcome = loop.train(config.override(config.Config(), settings(arm, size, arguments, out)), progress=progress)
            if outcome.code:
                sys.exit(outcome.why)
            say(f"{arm}: trained in {outcome.seconds:.0f} s, held-out loss {outcome.loss}")
            found: list[tuple[list[float], list[bool]]] = []

            def score(subject: Any, found: list[Any] = found, arm: str = arm) -> tuple[TaskScore, ...]:
                rows = subject.model.embedding.num_embeddings
                answers = log_likelihoods(subject.model, requests, vocab_size=rows, logits=arguments.logits)
                found.append(([each.nats for each in answers], [each.greedy for each in answers]))
                say(f"{arm}: {len(found)} of {len(PLANS) + len(CASTS) + (arm == 'GaussWS')} casts answered")
                return ()

            casts = tuple(cast for cast in CASTS if cast != "learned" or arm == "GaussWS")
            variants = evaluation.Variants(casts=casts, plans=tuple(PLANS))
            with joined(arguments.device) as ranks:
                device = ranks.device
            result = evaluation.evaluate(out, variants=variants, score=score, sequences=size["eval"], device=device)
            labels = ["BF16", *(CASTS[cast] for cast in casts), *PLANS.values()]
            rows = []
            for label, variant, (nats, greedy) in zip(labels, result.variants, found, strict=True):
                rows.append(variant.to_dict(result.base) | {"label": label})
                arrays[f"{arm}/{label}/nats"] = np.array(nats)
                arrays[f"{arm}/{label}/greedy"] = np.array(greedy)
            meta["arms"][arm] = {"rows": rows, "loss": outcome.loss, "seconds": outcome.seconds}
            np.savez_compressed(arguments.answers, meta=np.array(json.dumps(meta)), **arrays)
    say(f"done: {arguments.answers}")


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
        for arm, found in meta["arms"].items():
            for label in (row["label"] for row in found["rows"]):
                answers = arrays[f"{arm}/{label}/nats"], arrays[f"{arm}/{label}/greedy"]
                lm = harness_model(arguments.tokenizer, stored, answers)
                scored[arm, label] = Variant(label, "cast", None, None, lm_eval.scores(lm, loaded, asked["limit"]))
    print(tables(meta, scored))


def tables(meta: dict[str, Any], scored: dict[tuple[str, str], Any]) -> str:
    """Return two tables in Markdown: scores, and differences from BF16."""
    rows = {(arm, row["label"]): row for arm, found in meta["arms"].items() for row in found["rows"]}
    columns = [(each.task, each.metric) for each in next(iter(scored.values())).tasks]
    heads = [f"{NAMES.get(task, task)} {_metric(metric)}" for task, metric in columns]
    lines = [["model", "cast", "bits per weight", "held-out loss, nats per token", "bits per byte", *heads]]
    lines.append(["---"] * len(lines[0]))
    for (arm, label), variant in scored.items():
        text, bits = rows[arm, label]["held_out"], rows[arm, label]["bits"]
        cells = [arm, label, f"{bits:.2f}" if bits else "", f"{text['loss']:.4f}", _shown(text["bits_per_byte"], 4)]
        for score in variant.tasks:
            digits, factor = (1, 1.0) if score.logarithmic else (2, 100.0)
            cells.append(f"{score.value * factor:.{digits}f} ± {(score.standard_error or 0.0) * factor:.{digits}f}")
        lines.append(cells)
    changes = [["model", "cast", "compared with", "held-out loss, nats per token", *_change_heads(columns)]]
    changes.append(["---"] * len(changes[0]))
    for (arm, label), variant in scored.items():
        base = (arm, "BF16") if label != "BF16" else ("O1", "BF16")
        if base == (arm, label):
            continue
        loss = rows[arm, label].get("loss_change") if label != "BF16" else None
        cells = [arm, label, " ".join(base)]
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
    answering.add_argument("tokens")
    answering.add_argument("requests")
    answering.add_argument("answers")
    answering.add_argument("--steps", type=int, default=800)
    answering.add_argument("--batch", type=int)
    answering.add_argument("--seed", type=int, default=0)
    answering.add_argument("--parts", default="all", help="layers with noise: all, od, qkv, ...")
    answering.add_argument("--b-target", type=float, default=4.0, help="bitwidth at the end; 3 and less fit into FP4")
    answering.add_argument("--device", default="auto")
    answering.add_argument("--logits", type=int, default=1 << 30, help="most logits per forward pass")
    answering.add_argument("--tiny", action="store_true")
    answering.set_defaults(run=answer)
    scoring = steps.add_parser("score")
    for name in ("questions", "tokenizer", "requests", "answers"):
        scoring.add_argument(name)
    scoring.set_defaults(run=score_answers)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
