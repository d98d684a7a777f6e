"""A model in training: what is built for a config, one optimizer step, one evaluation, and the state between them."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dither.data import Batch, Corpus, Loader, held_out, is_prepared, load_tokenizer, open_tokens, prepare
from dither.data.text import STDLIB
from dither.errors import UserError
from dither.evaluate.held_out import summed_loss
from dither.models import CausalLM, build, compile_blocks, generate, hf, preset
from dither.nn import Linear, apply_plan, bitwidth_loss, convert, effective_precision, param_groups, step_context
from dither.numerics import Monitor, Report
from dither.optim import MODES, roles, training
from dither.optim.options import MOST_NORM
from dither.random import Stream
from dither.snip import Decision, Snip
from dither.train import checkpoint
from dither.train.config import Config, fixed_changes, loads, schedule
from dither.train.distributed import Ranks
from dither.train.guard import Guard, first_nonfinite
from dither.train.metrics import smoothed
from dither.train.state import Resumed, pack, plan_of, unpack

TOKENS = "tokens"
"""Where a run keeps the tokens that it prepared itself."""

SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50


class Numbers(NamedTuple):
    """What a step gave, on the host."""

    number: int
    """Of the step, from 1 on."""
    loss: float
    grad_norm: float
    """Of the gradients without the loss scale, before clipping."""
    signals: float
    """The sum of all ranks' signals, in the units that they were given in."""
    loss_scale: float
    """What the loss was multiplied by; 1 where losses are not scaled."""


class Evaluation(NamedTuple):
    """Of held-out text."""

    loss: float
    bits_per_byte: float | None
    """None where it is not known how many bytes the tokens stand for."""
    tokens: int


def open_corpus(config: Config, folder: Path, ranks: Ranks) -> Corpus:
    """The tokens that a config names: a prepared folder, or text, which is prepared into the run's own folder once."""
    sources = config.data.sources or (STDLIB,)
    own = folder / TOKENS
    if len(sources) == 1 and is_prepared(sources[0]):
        corpus = open_tokens(sources[0])
    else:
        if ranks.main and not is_prepared(own):
            prepare(sources, own, load_tokenizer(config.data.tokenizer), held_out=config.data.held_out)
        ranks.agree(0)  # everybody waits for the first to have prepared them
        corpus = open_tokens(own, verify=True)
        if corpus.sources != sources:
            raise UserError(
                f"The tokens in {str(own)!r} were made from {', '.join(corpus.sources)}, and data.sources now says "
                f"{', '.join(sources)}: name those, or train in another folder."
            )
    if config.data.tokenizer != "bytes" and load_tokenizer(config.data.tokenizer).sha256 != corpus.tokenizer.sha256:
        raise UserError(
            f"The tokens in {str(corpus.folder)!r} were made by another tokenizer than data.tokenizer="
            f"{config.data.tokenizer!r}: leave that out, or prepare them again."
        )
    return corpus


def unigram_entropy(corpus: Corpus) -> float | None:
    """Of the held-out text in nats, where tokens are bytes: the loss of a model that knows only how often each byte comes."""
    if corpus.tokenizer.json is not None:
        return None
    counts = np.sum([np.bincount(shard, minlength=corpus.tokenizer.vocab_size) for shard in corpus.held_out.shards], axis=0)
    shares = counts[counts > 0] / len(corpus.held_out)
    return float(-(shares * np.log(shares)).sum())


class Job:
    """Everything that a step changes, and how it does; the same on every rank."""

    def __init__(self, config: Config, corpus: Corpus, ranks: Ranks) -> None:
        self.config, self.corpus, self.ranks = config, corpus, ranks
        data = config.data
        self.parts = ranks.share(data.batch, data.micro_batch)
        self.loader = Loader(corpus.train, data.sequence, data.batch, data.seed)
        self.held_out = held_out(corpus.held_out, data.sequence, self._held_out_count())
        self.plan = config.precision.load_plan()
        self.model = _model(config, corpus, ranks.device)
        precision = config.precision
        self.conversion = convert(
            self.model,
            self.plan,
            fallback=precision.fallback,
            seed=config.run.seed,
            emulate=precision.emulate,
            engines=precision.engines,
        )
        scaled = MODES[config.precision.mode].plan.loss_scaling
        self.training = training(
            self.model,
            config.precision.mode,
            config.optim.lr,
            gradients=config.precision.gradients,
            loss_scaling=config.loss_scaling if scaled else None,
            groups=param_groups(self.model, weight_decay=config.optim.weight_decay),
            roles=roles(self.model) if config.optim.optimizer == "adam-mini" else None,
            betas=config.optim.betas,
            eps=config.optim.eps,
            # A scaled step takes its norm only where it clips; the largest float32 never does.
            max_norm=config.optim.max_norm or (MOST_NORM if scaled else None),
            nonfinite="skip",  # on the device, before any weight changes; the guard hears of it when the host looks
            seed=config.run.seed,
            **({} if config.precision.states is None else {"states": config.precision.states}),
        )
        self.guided = any(each.precision.sampling and each.precision.sampling.loss for each in self._layers())
        self.compiled = config.run.compile or (config.run.compile is None and ranks.device.type == "cuda")
        if self.compiled:
            torch._dynamo.reset()  # graphs of an earlier run in this process would count towards Dynamo's limit
            compile_blocks(self.model)
        self.guard = Guard(config.guard)
        self.snip = self._snip()
        self.monitor = self._monitor()
        self.done = 0
        """Steps done, skipped ones too."""
        self.offset = 0
        """Batches that were passed over after spikes."""
        self.loss_ema: float | None = None
        self.time = 0.0
        """Seconds that the lives before this one trained."""
        # Torch's generators, which only dropout draws from, start each step anew: no rank need keep what it had drawn.
        self._dropout = Stream(config.run.seed, "torch", f"rank {ranks.rank}").key
        self._sound = torch.ones((), dtype=torch.bool, device=ranks.device)

    def _held_out_count(self) -> int | None:
        wanted, there = self.config.run.eval_sequences, (len(self.corpus.held_out) - 1) // self.config.data.sequence
        return None if wanted == 0 or wanted >= there else wanted

    def _snip(self) -> Snip | None:
        """What chooses precisions on the way, if something does."""
        snip = self.config.snip
        if snip.target is None:
            return None
        made = Snip(
            self.model,
            self.training.optimizer,
            self.plan,
            options=snip.options,
            goal=snip.goal,
            schedule=snip.schedule,
            estimator=snip.estimator(self.config.run.seed),
            forward=self.loss,
        )
        made.on_failure = lambda _: None  # the loop reports what became of the statistics
        return made

    def choose(self, batch: Batch) -> Decision | None:
        """Before a step: statistics on its batch, or the plan that follows from earlier ones, if it is time for that."""
        if self.snip is None:
            return None
        decision = self.snip.before_step(self.done, lambda: self._for_estimates(batch, self.config.snip.tokens))
        self.plan = self.snip.plan
        return decision

    def _for_estimates(self, batch: Batch, tokens: int) -> list[Batch]:
        """What estimates are made on, in micro-batches of equal size: no larger than a step's, or a quarter of them.

        A quarter where blocks are compiled: estimates run uncompiled, which needs half as much memory again for what is kept
        between forward and backward, and they hold gradients to compare with. A run that just fits would not fit any more.
        """
        wanted = tokens // self.config.data.sequence // self.ranks.world
        rows = max(1, min(wanted, len(batch.tokens)))
        largest = math.ceil(len(batch.tokens) / self.parts / (4 if self.compiled else 1))
        pieces = math.ceil(rows / largest)
        return list(replace(batch, tokens=batch.tokens[: rows - rows % pieces]).split(pieces))

    def _monitor(self) -> Monitor | None:
        """Return what looks at numerics on the way, if something does."""
        every = self.config.monitor.every
        if not every:
            return None
        optimizer, scaler = self.training.optimizer, self.training.scaler
        # The loop tells what is wrong.
        return Monitor(self.model, optimizer, every=every, scaler=scaler, group=self.ranks.group, tell=lambda _: None)

    def look(self, batch: Batch) -> Report | None:
        """After a step: look at the numerics of the model, in an extra pass over a part of its batch that leaves no trace.

        With loss scaling the pass computes in float32: gradients in FP16 no longer show what was too small for it.
        """
        if self.monitor is None:
            return None
        pieces = self._for_estimates(batch, self.config.monitor.tokens)
        with self.monitor.aside(self.done), step_context(self.model, step=self.done - 1) as at:
            for part in pieces:
                at.row(part.first * self.config.data.sequence)
                loss = self.model(part.inputs, part.targets) if self.scaled else self.loss(self.model, part)
                self.training.backward(loss / len(pieces))
        return self.monitor.report

    def _layers(self) -> Iterator[Linear]:
        return (module for module in self.model.modules() if isinstance(module, Linear))

    @property
    def lr(self) -> float:
        """Of the step that comes next, or of the last."""
        return schedule(self.config, min(self.done, self.config.run.steps - 1))

    @property
    def tokens(self) -> int:
        """Trained on so far."""
        return self.done * self.config.data.batch * self.config.data.sequence

    # A step ------------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, signal: float = 0.0) -> Tensor:
        """One optimizer step: float32[4] on the device: mean loss, gradient norm, the sum of all ranks' signals, loss scale.

        A loss or gradient that is not finite changes no weight: it makes all gradients NaN, and the optimizer skips those.
        Where the guard's policy is to stop, no later step changes one either: a GPU has begun the next before the host looks.
        """
        optimizer = self.training.optimizer
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        torch.manual_seed((self._dropout + self.done) % (1 << 63))
        total = self._gradients(batch)
        self.training.gradients.all_reduce(self.ranks.group)
        self.training.step()
        norm = torch.zeros_like(total) if optimizer.grad_norm is None else optimizer.grad_norm
        scale = torch.ones_like(total) if self.training.loss_scale is None else self.training.loss_scale
        numbers = self.ranks.add(torch.stack([total, torch.full_like(total, signal)]))
        numbers = torch.stack([numbers[0], norm, numbers[1], scale])
        if self.config.guard.nonfinite == "stop":
            # Scaled gradients may overflow: the scale is lowered then, and the run goes on.
            self._sound &= numbers[0].isfinite() if self.scaled else numbers.isfinite().all()
        self.done += 1
        return numbers

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled: overflowing gradients are then a matter of the scale, and not of the guard."""
        return self.training.scaler.is_enabled()

    def _gradients(self, batch: Batch) -> Tensor:
        """This rank's share of the mean loss, after adding its share of the gradients."""
        share, world = 1 / (self.parts * self.ranks.world), self.ranks.world
        total = torch.zeros((), device=self.ranks.device)
        with step_context(self.model, step=self.done, group=self.ranks.group) as at:
            for part in batch.split(self.parts):
                at.row(part.first * self.config.data.sequence)
                loss = self.loss(self.model, part)
                gate = torch.where(loss.detach().isfinite() & self._sound, share, torch.nan)
                self.training.backward(loss * gate)
                total += loss.detach() * share
            if self.guided:
                self.training.backward(bitwidth_loss(self.model) / world)
        return total

    def loss(self, model: nn.Module, part: Batch) -> Tensor:
        """The mean loss of a micro-batch, 0-d, in what the run computes in."""
        with self.training.forward():
            loss: Tensor = model(part.inputs, part.targets)
        return loss

    def culprit(self, number: int) -> str:
        """The first tensor that is not finite in step `number`, and its rank where there are several; empty if none is found.

        The step is made again, module by module, so it must be the last that changed or would have changed a weight.
        """
        batch = self.loader.batch(number - 1 + self.offset, self.ranks.rank, self.ranks.world).to(self.ranks.device)
        found = self.ranks.gather(self._replay(number - 1, batch))
        rank, first = next(((rank, name) for rank, name in enumerate(found) if name), (0, ""))
        return f"{first} on rank {rank}" if first and self.ranks.world > 1 else first

    def _replay(self, step: int, batch: Batch) -> str:
        if weight := first_nonfinite(self.model.named_parameters()):
            return f"the weight {weight}"
        found: list[str] = []

        def look(name: str, output: object) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not found and isinstance(first, Tensor) and first_nonfinite([(name, first)]):
                found.append(f"the output of {name}")

        hooks = [
            module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
            for name, module in self.model.named_modules()
            if name
        ]
        try:
            # Leaving a step_context by an error leaves the histories of delayed scaling as they were.
            with suppress(_Replayed), _eager(self.model), step_context(self.model, step=step) as at:
                for part in batch.split(self.parts):
                    at.row(part.first * self.config.data.sequence)
                    with self.training.forward():
                        loss = self.model(part.inputs, part.targets)
                    if not found and first_nonfinite([("loss", loss.detach())]):
                        found.append("the loss")
                    self.training.backward(loss)
                raise _Replayed
            # Backward runs from the last layer to the first.
            gradients = [(name, parameter.grad) for name, parameter in self.model.named_parameters()]
            bad = first_nonfinite(reversed(gradients))
            return found[0] if found else f"the gradient of {bad}" if bad else ""
        finally:
            for hook in hooks:
                hook.remove()
            self.training.optimizer.zero_grad()

    # Looking at the model ----------------------------------------------------------------------------------------------

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """The model in eval mode, without gradients, computed in as it trains."""
        self.model.eval()
        try:
            with torch.no_grad(), self.training.forward():
                yield
        finally:
            self.model.train()

    def evaluate(self) -> Evaluation:
        """Mean loss and bits per byte of the held-out windows, of which each rank reads its share."""
        size = max(1, self.config.data.batch // self.ranks.world // self.parts)
        windows = self.held_out.tokens.tensor_split(self.ranks.world)[self.ranks.rank]
        with self._resting():
            total = summed_loss(self.model, windows.to(self.ranks.device), size)
        targets = self.held_out.targets
        nats, known = float(self.ranks.add(total)), self.corpus.held_out.exact or self.corpus.held_out.counts is not None
        size_in_bytes = self.corpus.held_out.bytes_of(targets) if known else 0.0
        bits = nats / math.log(2) / size_in_bytes if size_in_bytes else None
        return Evaluation(nats / targets.numel(), bits, targets.numel())

    def sample(self) -> str:
        """Text that follows the prompt; the step and the seed decide it."""
        run, tokenizer = self.config.run, self.corpus.tokenizer
        prompt = tokenizer.encode(run.sample_prompt) or [tokenizer.end]
        start = torch.tensor([prompt], device=self.ranks.device)
        generator = torch.Generator().manual_seed((run.seed + self.done) % (1 << 63))
        with self._resting():
            drawn = generate(
                self.model, start, run.sample_tokens, temperature=SAMPLE_TEMPERATURE, top_k=SAMPLE_TOP_K, generator=generator
            )
        # A model may have more words than the tokenizer has tokens.
        ids = [token for token in drawn[0, len(prompt) :].tolist() if token < tokenizer.vocab_size]
        return tokenizer.decode(ids)

    def bitwidths(self) -> dict[str, Any] | None:
        """What the sampled layers have learned, by name; None where nothing is sampled."""
        if not any(layer.precision.sampling for layer in self._layers()):
            return None
        found = effective_precision(self.model).layers
        return {
            each.name: {
                "mean": each.mean,
                "min": each.min,
                "max": each.max,
                "histogram": [[bits, share] for bits, share in each.histogram.items()],
            }
            for each in found
        }

    # State -------------------------------------------------------------------------------------------------------------

    def pack(self, config: str, seconds: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint keeps: everything that the next step depends on, and what must not have changed by then."""
        others = {
            "config": config,
            "corpus": self.corpus.sha256,
            "guard": self.guard.state(),
            "loss_ema": self.loss_ema,
            "offset": self.offset,
            "snip": None if self.snip is None else self.snip.state_dict(),
            "time": seconds,
        }
        optimizer, scaler = self.training.optimizer, self.training.scaler
        return pack(self.model, optimizer, step=self.done, plan=self.plan, scaler=scaler, others=others)

    def restore(self, path: Path) -> Resumed:
        """Go back to a checkpoint of this run; one of another model, corpus or config is a UserError, and changes nothing."""
        tensors, plain = checkpoint.load(path)
        others = self._check_others(path, plain)
        if (plan := plan_of(plain)) is not None and plan != self.plan:
            self.conversion, self.plan = apply_plan(self.model, plan), plan
        resumed = unpack(self.model, self.training.optimizer, tensors, plain, scaler=self.training.scaler)
        if self.snip is not None and others.get("snip") is not None:
            self.snip.load_state_dict(others["snip"])
        self.guard.restore(others["guard"])
        self.done, self.offset, self.time = resumed.step, others["offset"], others["time"]
        self.loss_ema = others["loss_ema"]
        self._sound.fill_(True)
        return resumed

    def _check_others(self, path: Path, plain: Mapping[str, Any]) -> dict[str, Any]:
        others = plain.get("others")
        kinds = {"config": (str,), "corpus": (str,), "guard": (dict,), "offset": (int,), "time": (float, int)}
        kinds |= {"loss_ema": (float, int, type(None)), "snip": (dict, type(None))}
        if not isinstance(others, dict) or any(type(others.get(key)) not in kind for key, kind in kinds.items()):
            raise UserError(f"The checkpoint {str(path)!r} was not made by `dither train`: it lacks what a run keeps.")
        if others["corpus"] != self.corpus.sha256:
            raise UserError(
                f"The checkpoint {str(path)!r} was trained on other tokens than those in {str(self.corpus.folder)!r}: name the "
                "same data, or train in another folder."
            )
        check_changes(loads(others["config"], f"config of {path.name}"), self.config, int(plain.get("step", 0)))
        return others

    def learn(self, loss: float) -> None:
        """Take a finite loss into the moving average."""
        self.loss_ema = smoothed(self.loss_ema, loss)


class _Replayed(Exception):  # noqa: N818 - not an error: the way out of a step_context that shall leave no trace
    pass


def check_changes(saved: Config, now: Config, done: int) -> None:
    """Raise unless a run of `done` steps may go on with another config."""
    if now.run.steps < done:
        raise UserError(f"run.steps={now.run.steps} is less than the {done} steps that the run has done.")
    if changed := fixed_changes(saved, now, done):
        raise UserError(
            f"A run cannot be resumed with another {changed[0]}"
            + "".join(f", {each}" for each in changed[1:])
            + ": take that back, or train in another folder by run.out."
        )


def _eager(model: nn.Module) -> Any:
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _model(config: Config, corpus: Corpus, device: torch.device) -> CausalLM:
    tokens, sequence, seed = corpus.tokenizer.vocab_size, config.data.sequence, config.run.seed
    if config.model.size is not None:
        if config.model.vocab is not None and config.model.vocab < tokens:
            raise UserError(
                f"model.vocab={config.model.vocab} is less than the tokenizer's {tokens} tokens: raise it, or leave it out."
            )
        sizes = preset(config.model.size, vocab_size=config.model.vocab or tokens)
        _check_positions(sizes, sequence)
        return build(sizes, seed=seed, device=device)
    if config.model.vocab is not None:
        raise UserError("model.vocab changes presets only: a Hugging Face model has the size that its config says.")
    model = hf(config.model.hf, seed=seed, device=device, dtype=torch.float32)
    if model.embedding.num_embeddings < tokens:
        raise UserError(
            f"The model {config.model.hf!r} knows {model.embedding.num_embeddings} tokens, and the tokenizer has {tokens}: "
            "give the model's own tokenizer.json as data.tokenizer."
        )
    _check_positions(model.config, sequence)
    return model


def _check_positions(sizes: Any, sequence: int) -> None:
    longest = getattr(sizes, "max_position_embeddings", None)
    if longest is not None and sequence > longest:
        raise UserError(f"data.sequence={sequence} is longer than the {longest} positions that the model has.")
