"""Quality of sampled weights on real text: held-out loss after training, and after casting the trained weights to FP6 and FP4.

    PYTHONPATH=src python3 benchmarks/sampling_quality.py --prepare TEXT... --train train.npy --held-out held_out.npy
    PYTHONPATH=src python3 benchmarks/sampling_quality.py --train train.npy --held-out held_out.npy --json quality.json
    PYTHONPATH=src python3 benchmarks/sampling_quality.py --device cpu --tiny  # random text, in seconds: the script runs
    PYTHONPATH=src python3 benchmarks/sampling_quality.py --table quality-*.json  # from several processes

A small Llama is trained from scratch once per arm and seed. Runs of one seed begin with the same weights and read the same
text in the same order, so that arms are compared by differences within a seed; the tables have their mean and its standard
error. All runs share a process: blocks of one arm are compiled once. Results are written after each run, and runs that --json
has already are not repeated; --minutes begins no run that would not end in time. Arms are
METHOD[:PARTS][/B_TARGET][@OPERATOR]:

    bf16                 float32 parameters, bfloat16 autocast (O1): the baseline
    gaussws:all          rounded normal noise in every layer's weight but the output's; parts as in Sampling: od, qkv, ...
    gaussws:all/3        the same down to b_t = 3, and from as much above it as --b-init is above --b-target
    diffq:all            uniform noise instead; at equal b_t its variance is 1/12 against 75/256, at 0.91 bits less the same
    auto:all             gaussws with bitwidths of each layer's own, chosen by its sensitivity in the trained bf16 model
                         of the same seed, so that their mean is --b-target
    inputs:all           gaussws on the layers' inputs instead of their weights; both:all on both
    bf16@fp8-block       no noise; operands cast as the recipe says (any recipe that casts)
    gaussws:all@fp4-block, diffq:all@fp4-block, ...

b_t goes from --b-init to --b-target by a decay of the bitwidths that leaves the fraction --left of the way after the last
step, or by the loss term with weight --lambda. Noise that could vanish in the operator is not limited, since arms should show
its effect; --clamp limits b_t to safe values.
"""

import argparse
import json
import lzma
import math
import random
import re
import statistics
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from targets import choose_targets

import dither
from dither import LayerPrecision, Plan, step_context
from dither.evaluate.deployment import deploy
from dither.evaluate.held_out import replaced
from dither.models import Llama, LlamaConfig, compile_blocks
from dither.nn import bitwidth_loss, param_groups, sampling_parameters
from dither.nn.bitwidths import effective_precision
from dither.spec import BitwidthLoss, Sampling, WeightDecay

END = "<|endoftext|>"
"""The line between two documents of a text, and the token after each."""

ARMS = "bf16,gaussws:all,gaussws:od,diffq:all,bf16@fp8-block,gaussws:all@fp8-block,diffq:all@fp8-block"
ARMS += ",bf16@fp4-block,gaussws:all@fp4-block,diffq:all@fp4-block"
NOISES = {"gaussws": "rounded_normal", "diffq": "uniform", "auto": "rounded_normal"}
NOISES |= {"inputs": "rounded_normal", "both": "rounded_normal"}
GROUPS = ("block(32)", "block(128)", "tensor")
CASTS = [f"{element} {group}" for element in ("e2m3", "e3m2", "e2m1", "int4") for group in GROUPS]
"""What trained weights are cast to: FP6, FP4 and INT4, with scales for blocks and for whole tensors."""


# Text -----------------------------------------------------------------------------------------------------------------


def documents(path: Path) -> list[str]:
    """Return the documents of a text file, `.xz` or plain, which are separated by lines `<|endoftext|>`."""
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
        return [text for text in file.read().split(f"\n{END}\n") if text.strip()]


def tokenizer_of(path: Path | None, texts: list[str], words: int):
    """Return the tokenizer in `path` (JSON of the `tokenizers` package), or a byte-level BPE trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if path is not None:
        return Tokenizer.from_file(str(path))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=words, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    )
    return made


def prepare(arguments: argparse.Namespace) -> None:
    """Write texts to two files of token ids, uint16: documents in a random but fixed order, each with an end token.

    Held out are the texts of --held-out-text, or every hundredth document.
    """
    texts = [text for path in arguments.prepare for text in documents(path)]
    random.Random(0).shuffle(texts)
    if arguments.held_out_text:
        held_out = [text for path in arguments.held_out_text for text in documents(path)]
    else:
        held_out, texts = texts[::100], [text for i, text in enumerate(texts) if i % 100]
    tokenizer = tokenizer_of(arguments.tokenizer, texts, arguments.words)
    end = tokenizer.token_to_id(END)
    if end is None or tokenizer.get_vocab_size() > 1 << 16:
        raise SystemExit(f"the tokenizer must have the token {END} and at most 65,536 words, to fit into uint16")
    for path, chosen, limit in ((arguments.train, texts, arguments.tokens), (arguments.held_out, held_out, None)):
        ids: list[np.ndarray] = []
        for start in range(0, len(chosen), 64):
            for encoded in tokenizer.encode_batch(chosen[start : start + 64], add_special_tokens=False):
                ids.append(np.array([*encoded.ids, end], dtype=np.uint16))
            if limit is not None and sum(map(len, ids)) >= limit:
                break
        np.save(path, np.concatenate(ids)[:limit])
        found = np.load(path, mmap_mode="r")
        characters = sum(map(len, chosen))
        print(f"{path}: {len(found):,} tokens, {path.stat().st_size / 2**20:.1f} MiB, of {characters:,} characters", flush=True)
    print(json.dumps({"words": tokenizer.get_vocab_size(), "end": end}))


def token_ids(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids for training and held out: of --train and --held-out, or of an artificial language with --tiny."""
    if arguments.tiny:
        # Something to learn: the next word is a function of the last one, or any word.
        noise = np.random.default_rng(0).integers(0, arguments.words, 200_000)
        ids = noise.copy()
        for i in range(1, len(ids)):
            ids[i] = noise[i] if noise[i] % 4 == 0 else (5 * ids[i - 1] + 7) % arguments.words
        train, held_out = ids[:-20_000], ids[-20_000:]
    else:
        train, held_out = (np.load(path, mmap_mode="r") for path in (arguments.train, arguments.held_out))
    for name, found in (("--train", train), ("--held-out", held_out)):
        if len(found) <= arguments.sequence or int(found.max()) >= arguments.words:
            raise SystemExit(f"{name} needs more than {arguments.sequence} tokens, all below {arguments.words} (--words)")
    return train, held_out


class Text:
    """Token ids on the device, and the windows of the runs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.length, self.device = arguments.sequence, arguments.device
        train, held_out = token_ids(arguments)
        self.train = torch.from_numpy(np.array(train, dtype=np.int32)).to(self.device)
        windows = min((len(held_out) - 1) // self.length, arguments.held_out_windows)
        self.held_out = torch.from_numpy(np.array(held_out[: windows * self.length + 1], dtype=np.int64)).to(self.device)

    def order(self, seed: int, steps: int, batch: int) -> torch.Tensor:
        """Return the first tokens of the windows of each step, int64[steps, batch]: a function of the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(len(self.train) - self.length, (steps, batch), generator=generator).to(self.device)

    def windows(self, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and the tokens that follow them, int64[batch, length] each."""
        places = starts[:, None] + torch.arange(self.length + 1, device=self.device)
        found = self.train[places].long()
        return found[:, :-1], found[:, 1:]

    def held_out_loss(self, model: Llama, batch: int) -> float:
        """Return the mean loss over all windows of the held-out text, under autocast, with uncompiled blocks."""
        tokens, targets = self.held_out[:-1].view(-1, self.length), self.held_out[1:].view(-1, self.length)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad(), autocast(self.device), torch.compiler.set_stance("force_eager"):
            for part, follow in zip(tokens.split(batch), targets.split(batch), strict=True):
                total += model(part, follow).double() * len(part)
        return total.item() / len(tokens)


def autocast(device: str) -> torch.autocast:
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")  # BF16 products are slow on CPUs


# Arms -----------------------------------------------------------------------------------------------------------------


def parse_arm(arm: str) -> tuple[str, str, float | None, str]:
    """Return method, parts, target and operator of an arm."""
    methods = f"bf16|({'|'.join(NOISES)}):(?P<parts>[^/@]+)(/(?P<target>[0-9.]+))?"
    found = re.fullmatch(f"(?P<method>{methods})(@(?P<operator>.+))?", arm)
    if found is None:
        raise SystemExit(f"there is no arm {arm!r}: arms are METHOD[:PARTS][/B_TARGET][@OPERATOR], see --help")
    target = found["target"] and float(found["target"])
    return found["method"].partition(":")[0], found["parts"], target, found["operator"] or ""


def plan_of(arm: str, arguments: argparse.Namespace, targets) -> Plan:
    """Return the plan of an arm; `targets(parts)` chooses those of `auto`."""
    method, parts, target, operator = parse_arm(arm)
    compute = "bf16" if torch.device(arguments.device).type == "cuda" else "fp32"
    base = dither.recipe(operator) if operator else Plan(default=LayerPrecision())
    base = replace(base, compute=compute)
    if method == "bf16":
        return base
    if arguments.guidance == "loss":
        guidance = BitwidthLoss(arguments.lambda_)
    else:  # (1 - lr * rate)^steps = left
        guidance = WeightDecay((1 - arguments.left ** (1 / arguments.steps)) / arguments.bitwidth_lr)
    target = arguments.b_target if target is None else target
    sampling = Sampling(
        noise=NOISES[method],
        b_init=target + arguments.b_init - arguments.b_target,
        b_target=target,
        parts=parts,
        guidance=guidance,
        beyond="clamp" if arguments.clamp else "warn",
    )
    if method == "auto":
        return targets(sampling).plan(sampling, base)
    return base.with_sampling(
        None if method == "inputs" else sampling, input_sampling=sampling if method in ("inputs", "both") else None
    )


def build(plan: Plan, seed: int, arguments: argparse.Namespace) -> Llama:
    """Return a converted Llama with the weights of a seed, the same for every plan."""
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.ffn,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        vocab_size=arguments.words,
        max_position_embeddings=arguments.sequence,
    )
    with torch.device(arguments.device):
        model = Llama(config, generator=torch.Generator(arguments.device).manual_seed(seed))
    dither.convert(model, plan, seed=seed)
    return model


def rate(step: int, arguments: argparse.Namespace) -> float:
    """Return the learning rate of a step as a fraction of --lr: warmup, then a cosine to a tenth."""
    done = max(0.0, (step - arguments.warmup) / max(1, arguments.steps - arguments.warmup))
    return min(1.0, (step + 1) / arguments.warmup) * (0.55 + 0.45 * math.cos(math.pi * done))


def train(model: Llama, text: Text, seed: int, arguments: argparse.Namespace) -> float:
    """Train for all steps, and return the mean loss of the last tenth of them."""
    if arguments.compile:
        compile_blocks(model)
    groups = param_groups(model, weight_decay=arguments.weight_decay, bitwidth_lr=arguments.bitwidth_lr)
    fused = torch.device(arguments.device).type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=fused)
    bitwidths = {id(bitwidth) for bitwidth in sampling_parameters(model)}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in bitwidths]
    scheduled = [group for group in optimizer.param_groups if id(group["params"][0]) not in bitwidths]
    guided = bool(bitwidths) and arguments.guidance == "loss"
    order, losses = text.order(seed, arguments.steps, arguments.batch), []
    model.train()
    for step in range(arguments.steps):
        for group in scheduled:  # bitwidths keep their rate, so that their decay is what was asked for
            group["lr"] = arguments.lr * rate(step, arguments)
        with step_context(model, step=step):
            with autocast(arguments.device):
                loss = model(*text.windows(order[step]))
            (loss + bitwidth_loss(model) if guided else loss).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses[-max(1, arguments.steps // 10) :]).mean().item()


def evaluate(model: Llama, text: Text, arguments: argparse.Namespace) -> dict:
    """Return learned bitwidths, held-out loss, and held-out loss with weights in few bits."""
    found: dict = {}
    model.eval()
    sampled = [module for module in model.modules() if isinstance(module, dither.Linear) and module.precision.sampled]
    if sampled and sampled[0].precision.sampling is None:  # inputs alone
        b_t = torch.cat([layer.bitwidths(input=True).flatten() for layer in sampled])
        found["b_t"] = {"mean": b_t.mean().item(), "min": b_t.min().item(), "max": b_t.max().item()}
    elif sampled:
        learned = effective_precision(model)
        found["b_t"] = {"mean": learned.total.mean, "min": learned.total.min, "max": learned.total.max}
        found["b_t_layers"] = {layer.name: round(layer.mean, 4) for layer in learned.layers}
    found["operator_loss"] = text.held_out_loss(model, arguments.batch)
    # From here on the weights alone are in few bits: what the operator would cast again hides what casting them costs.
    dither.Conversion.of(model).switch(Plan(default=LayerPrecision()))
    found["loss"] = text.held_out_loss(model, arguments.batch)
    found["cast"] = {}
    for cast in CASTS:
        with replaced(model, deploy(model, Plan(default=LayerPrecision.of(weight=cast))).weights):
            found["cast"][cast] = text.held_out_loss(model, arguments.batch)
    return found


class Runs:
    """The results so far, and the data and models that runs share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.text = arguments, Text(arguments)
        known = (
            "json",
            "table",
            "minutes",
            "arms",
            "seeds",
            "prepare",
            "held_out_text",
            "tokenizer",
            "tokens",
            "train",
            "held_out",
        )
        self.settings = {name: value for name, value in vars(arguments).items() if name not in known}
        written = arguments.json and arguments.json.exists()
        self.results: list[dict] = json.loads(arguments.json.read_text()) if written else []
        self.trained: dict[int, dict[str, torch.Tensor]] = {}
        """Weights of the bf16 arm, by seed."""

    def find(self, arm: str, seed: int) -> dict | None:
        return next((r for r in self.results if (r["arm"], r["seed"], r["settings"]) == (arm, seed, self.settings)), None)

    def run(self, arm: str, seed: int) -> dict:
        """Train and evaluate one arm with one seed, and write the result."""
        began = time.perf_counter()
        model = build(plan_of(arm, self.arguments, lambda sampling: self.targets(sampling, seed)), seed, self.arguments)
        train_loss = train(model, self.text, seed, self.arguments)
        trained = time.perf_counter()
        if arm == "bf16":
            self.trained[seed] = {name: value.cpu() for name, value in model.state_dict().items()}
        result = {"arm": arm, "seed": seed, "train_loss": train_loss, **evaluate(model, self.text, self.arguments)}
        tokens = self.arguments.steps * self.arguments.batch * self.arguments.sequence
        result |= {"tokens_per_second": tokens / (trained - began), "seconds": time.perf_counter() - began}
        cuda = torch.device(self.arguments.device).type == "cuda"
        result |= {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}
        self.results.append(result | {"settings": self.settings})
        if self.arguments.json:
            self.arguments.json.write_text(json.dumps(self.results, indent=1) + "\n")
        return result

    def targets(self, sampling: Sampling, seed: int):
        """Return bitwidths per layer for the trained bf16 model of the seed, with --b-target as their mean."""
        if seed not in self.trained:
            self.run("bf16", seed)
        model = build(plan_of("bf16", self.arguments, None), seed, self.arguments)
        model.load_state_dict(self.trained[seed])
        batches = [self.text.windows(starts) for starts in self.text.order(seed + 10_000, 4, self.arguments.batch)]

        def loss(model: Llama, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            with autocast(self.arguments.device):
                return model(*batch)

        only = [name for name, module in model.named_modules() if isinstance(module, dither.Linear) and sampling.takes(name)]
        mean, headroom = sampling.b_target, sampling.b_init - sampling.b_target
        found = choose_targets(
            model, loss, batches, mean=mean, probes=(4.0,), headroom=headroom, sampling=sampling, only=only, seed=seed
        )
        print(found, flush=True)
        return found


def paired(results: list[dict], base: list[dict], value) -> str:
    """Return the mean difference of `value` to the base's over the seeds that both have, and its standard error."""
    theirs = {r["seed"]: value(r) for r in base}
    differences = [value(r) - theirs[r["seed"]] for r in results if r["seed"] in theirs]
    if not differences:
        return "-"
    error = f" +- {statistics.stdev(differences) / math.sqrt(len(differences)):.4f}" if len(differences) > 1 else ""
    return f"{statistics.fmean(differences):+.4f}{error}"


def print_tables(here: list[dict]) -> None:
    """Print the held-out loss of every arm, and the increase by each cast of its weights, with bf16 for comparison."""
    arms = list(dict.fromkeys(r["arm"] for r in here))
    base = [r for r in here if r["arm"] == "bf16"]
    print(
        f"\n{'arm':<24}{'seeds':>6}{'b_t':>7}{'loss':>9}{'in its operator':>17}{'loss - bf16':>20}{'of bf16':>9}{'k tok/s':>9}"
    )
    for arm in arms:
        mine = [r for r in here if r["arm"] == arm]
        loss, operator, speed = (
            statistics.fmean(r[key] for r in mine) for key in ("loss", "operator_loss", "tokens_per_second")
        )
        b_t = f"{statistics.fmean(r['b_t']['mean'] for r in mine):.2f}" if "b_t" in mine[0] else "-"
        theirs = {r["seed"]: r["loss"] for r in base}
        pairs = [(r["loss"], theirs[r["seed"]]) for r in mine if r["seed"] in theirs]
        ratio = f"{sum(a for a, _ in pairs) / sum(b for _, b in pairs) - 1:+.2%}" if pairs else "-"
        difference = paired(mine, base, lambda r: r["loss"])
        print(f"{arm:<24}{len(mine):>6}{b_t:>7}{loss:>9.4f}{operator:>17.4f}{difference:>20}{ratio:>9}{speed / 1e3:>9.1f}")
    casts = [cast for cast in CASTS if all(cast in r["cast"] for r in here)]
    for title, value in (
        ("what casting the weights adds to an arm's own loss", lambda r, cast: r["cast"][cast] - r["loss"]),
        ("loss after casting, less that of bf16 cast alike", None),
    ):
        print(f"\n{title}\n{'arm':<24}" + "".join(f"{cast:>20}" for cast in casts))
        for arm in arms:
            mine = [r for r in here if r["arm"] == arm]
            if value is None:
                cells = [paired(mine, base, lambda r, cast=cast: r["cast"][cast]) for cast in casts]
            else:
                cells = [f"{statistics.fmean(value(r, cast) for r in mine):+.4f}" for cast in casts]
            print(f"{arm:<24}" + "".join(f"{cell:>20}" for cell in cells))


TINY = {"hidden": 32, "ffn": 64, "layers": 1, "heads": 2, "words": 32, "sequence": 16, "batch": 8, "steps": 6, "warmup": 2}
TINY |= {
    "arms": "bf16,gaussws:all,diffq:od/3@fp8-block,auto:all,inputs:all,both:od",
    "seeds": "0,1",
    "held_out_windows": 16,
    "lr": 1e-2,
}


def read_results(paths: list[Path]) -> list[dict]:
    """Return the results of several files."""
    try:
        return [result for path in paths for result in json.loads(path.read_text())]
    except (OSError, ValueError) as error:
        raise SystemExit(f"these are not all results of earlier runs: {error}") from None


def arms_and_seeds(parser: argparse.ArgumentParser, arguments: argparse.Namespace, parse) -> tuple[list[str], list[int]]:
    """Return the arms and seeds to run; raise if an arm or the device does not exist."""
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --tiny shows that the script runs")
    arms = arguments.arms.split(",")
    for arm in arms:
        parse(arm)
    try:
        return arms, [int(seed) for seed in arguments.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds are integers separated by commas, such as 0,1,2, not {arguments.seeds!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="token ids to train on, uint16 .npy")
    parser.add_argument("--held-out", type=Path, help="token ids to evaluate on, uint16 .npy")
    parser.add_argument("--prepare", type=Path, nargs="+", help="texts, plain or .xz: write --train and --held-out, and end")
    parser.add_argument("--held-out-text", type=Path, nargs="+", help="with --prepare: texts to hold out")
    parser.add_argument("--tokenizer", type=Path, help="with --prepare: a tokenizer instead of one trained on the texts")
    parser.add_argument("--tokens", type=int, help="with --prepare: at most so many tokens to train on")
    parser.add_argument("--arms", default=ARMS, help=f"separated by commas; default {ARMS}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", type=Path, help="results, written after each run; runs found there are not repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run that would end later than this")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of these results, and end")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="per-block compilation (default: on a GPU)")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--words", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--held-out-windows", type=int, default=1024)
    parser.add_argument("--b-init", type=float, default=6.0)
    parser.add_argument("--b-target", type=float, default=4.0)
    parser.add_argument("--bitwidth-lr", type=float, default=1e-3)
    parser.add_argument("--guidance", choices=("decay", "loss"), default="decay")
    parser.add_argument(
        "--left", type=float, default=0.01, help="decay: share of the way to --b-target that is left at the end"
    )
    parser.add_argument("--lambda", type=float, default=1.0, dest="lambda_", help="loss: weight of the bitwidths' loss")
    parser.add_argument("--clamp", action="store_true", help="hold b_t where noise is safe in the operator")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on made-up text: the script runs, nothing else")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    arguments = parser.parse_args()
    if arguments.table:
        print_tables(read_results(arguments.table))
        return
    if (arguments.prepare or not arguments.tiny) and (arguments.train is None or arguments.held_out is None):
        parser.error("--train and --held-out name the files of token ids (--prepare makes them from texts)")
    if arguments.prepare:
        prepare(arguments)
        return
    arms, seeds = arms_and_seeds(parser, arguments, parse_arm)
    if arguments.compile is None:
        arguments.compile = arguments.device != "cpu"  # there it takes longer than it saves
    # What differs in constants is traced anew; past the limit dynamo would run it uncompiled, in silence.
    torch._dynamo.config.recompile_limit = 16 * len(arms) + 8
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch.set_float32_matmul_precision("high")
    warnings.filterwarnings("ignore", message=".*noise can vanish")  # it is what some arms are here to show
    runs, began, longest = Runs(arguments), time.perf_counter(), 0.0
    for seed in seeds:
        for arm in arms:
            if runs.find(arm, seed):
                continue
            if time.perf_counter() - began + longest > 60 * arguments.minutes:
                print(f"stopped before {arm} of seed {seed}: it would take longer than --minutes {arguments.minutes:g}")
                print_tables([r for r in runs.results if r["settings"] == runs.settings])
                return
            result = runs.run(arm, seed)
            longest = max(longest, result["seconds"])
            print(json.dumps({key: value for key, value in result.items() if key != "b_t_layers"}), flush=True)
    print_tables([r for r in runs.results if r["settings"] == runs.settings])


if __name__ == "__main__":
    main()
