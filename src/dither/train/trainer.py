"""A model in training: built from a config, with one optimizer step, evaluation, and the state between steps."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dither import checkpoint
from dither.checkpoint import SavedTensors
from dither.checkpoint.format import STEP, step_path
from dither.checkpoint.state import Resumed, pack, plan_of, unpack
from dither.data import Batch, Corpus, Loader, held_out
from dither.errors import UserError
from dither.evaluate.held_out import Perplexity, batch_losses, evaluating
from dither.models import CausalLM, HuggingFace, build, compile_blocks, flops_per_token, hf
from dither.models.causal import PlainLM
from dither.models.generation import PaddedLogits, default_prompt, sample_text
from dither.models.lora import adapt, narrow_base
from dither.models.open import check_same_base, load_weights, origin_of
from dither.models.presets import blank, draw_parts
from dither.models.transformers_models import check_output_layer
from dither.nn import GraphedPasses, Linear, bitwidth_loss, convert, effective_precision, param_groups, step_context
from dither.nn.bitwidths import block_bitwidths
from dither.nn.frozen import FrozenLinear
from dither.nn.step import reshard
from dither.nn.stored import store_weights
from dither.numerics import Monitor, NumericsReport
from dither.ops.ranks import gather
from dither.optim import OscillationReset, Training, muon_groups, roles, training
from dither.optim.roles import Role
from dither.parallel.apply import allocate
from dither.snip.controller import Snip
from dither.snip.dry_run import TrainingSetup
from dither.spec.layer import chunk_rows
from dither.spec.modes import MOST_NORM
from dither.spec.random import Stream
from dither.spec.schedule import PlanSchedule
from dither.train.config import Config, loads, schedule
from dither.train.guard import GRACE, Guard, Interrupted, Signals
from dither.train.layout import RankLayout, check_stages
from dither.train.passes import Passes, nonfinite_weight, uses_graphs
from dither.train.pipeline import Pipeline, check_micro_batches, check_pipeline, check_snip_stages
from dither.train.plans import PlanEvent, RunPlans, known_plans, make_schedule, steps_for_snip, with_measured
from dither.train.ranks import Ranks
from dither.train.resume import check_changes, resolved
from dither.train.teacher import Teacher


class Numbers(NamedTuple):
    """The results of a step, on the host."""

    number: int
    """The number of the step, from 1."""
    loss: float
    grad_norm: float
    """The norm of the gradients, without the loss scale and before clipping."""
    signals: float
    """The sum of the signals of all ranks."""
    loss_scale: float
    """The loss scale; 1 if losses are not scaled."""


class Trainer:
    """The model, the optimizer and all other state that a step changes; the same on every rank.

    Args:
        config: The config of the run.
        corpus: The tokens.
        ranks: The ranks of the run.
        layout: How ranks share the batches and the model; by default each of them holds the whole model.
        initial: Load the initial weights of `model.weights`. False if a checkpoint will be restored.
        say: Called with a sentence when the run departs from its defaults.
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        ranks: Ranks,
        *,
        layout: RankLayout | None = None,
        initial: bool = True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        config = resolved(config)
        self.config, self.corpus, self.ranks = config, corpus, ranks
        self.layout = layout or RankLayout.whole(ranks)
        data = config.data
        self.parts = ranks.share(data.batch, data.micro_batch, self.layout.data_world)
        self.loader = Loader(corpus.train, data.sequence, data.batch, data.seed)
        self.held_out = held_out(corpus.held_out, data.sequence, _held_out_count(config, corpus))
        self.sources = known_plans(config, None if initial else Path(config.run.out))
        """Plans of files and of fp8-auto by name, which a resumed run does not read or measure again."""
        drawn_later = self.layout.cut and config.model.ours and config.model.weights is None
        self.model = blank(_sizes(config, corpus), ranks.device) if drawn_later else _model(config, corpus, ranks.device)
        if (initial or config.lora.rank) and config.model.weights is not None:
            load_weights(self.model, config.model.weights)
        teacher = None if config.qat.teacher is None else Teacher(config.qat, self.model, ranks.device)
        tokens = data.batch // self.layout.data_world // self.parts * data.sequence
        self.sources = with_measured(self.sources, config, self.model, ranks, tokens, say)
        planned, precision = make_schedule(config, self.sources), config.precision
        self.conversion = convert(
            self.model,
            planned.changes[0].plan,
            fallback=precision.fallback,
            seed=config.run.seed,
            emulate=precision.emulate,
            engines=precision.engines,
            memory=precision.memory,
        )
        if precision.weights == "fp8":
            _check_stored(config, ranks)
            store_weights(self.model)
        if precision.logits == "chunked":
            _chunk_loss(self.model, ranks)
        self.base: dict[str, Any] | None = None
        """The origin of the base of adapters; None if there are none."""
        if config.lora.rank is not None:
            say(str(adapt(self.model, config.lora, config.run.seed)))
            self.base = origin_of(config.model.weights, config.model.hf)
        adam_roles = roles(self.model) if config.optim.optimizer == "adam-mini" else None
        codes = (module for module in self.model.modules() if type(module) is FrozenLinear)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.parameters += sum(layer.in_features * layer.out_features for layer in codes)
        """The number of parameters of the whole model, frozen ones that exist as codes included."""
        self.flops = flops_per_token(self.model, data.sequence)
        self.pipeline = _pipeline(self)
        """The stages of this rank; None if there is no pipeline."""
        if self.pipeline is not None:
            self.conversion = self.conversion.stage(self.model)
        stages = () if self.pipeline is None else tuple(self.pipeline.stages.values())
        self.layout.shard(self.model, config, stages)
        _check_release(self)
        if drawn_later:
            allocate(self.model)
            assert isinstance(self.model, PlainLM)
            draw_parts(self.model, config.run.seed)
        self.training = _training(config, self.model, adam_roles)
        self.training.optimizer.stages = self.layout.pipeline_group
        self.lr_shares = [group["lr"] / config.optim.lr for group in self.training.optimizer.param_groups]
        """The learning rate of each group of the optimizer, divided by optim.lr."""
        self.guided = guided_share(self.model, self.layout.pipeline_group)
        """This rank's share of the blocks whose bitwidths a loss guides; 0 if there are none."""
        compiles = ranks.device.type == "cuda" and config.parallel.schedule != "zero-bubble"  # which splits backward passes
        self.compiled = compiles if config.run.compile is None else config.run.compile
        if self.compiled:
            torch._dynamo.reset()  # graphs of an earlier run in this process would count towards Dynamo's limit
            compile_blocks(self.model)
        self.passes = Passes(
            self.model,
            self.training,
            self.layout,
            pipeline=self.pipeline,
            parts=self.parts,
            sequence=data.sequence,
            device=ranks.device,
            teacher=teacher,
        )
        taught = teacher is not None
        if uses_graphs(config.run.cuda_graphs, self.ranks, self.training, self.parts, compiled=self.compiled, teacher=taught):
            self.passes.graphs = GraphedPasses(self.model, self.passes.eager, say, self.training.optimizer.released)
        self.guard = Guard(config.guard)
        self.signals: Signals | None = None
        """Signals that end evaluations, estimates and samples early, and steps after some time, with `Interrupted`."""
        snip = _make_snip(self, planned, say)
        fallback = config.monitor.fallback
        self.plans = RunPlans(self.conversion, planned, snip, compiled=self.compiled, fallback=fallback, say=say)
        self.oscillation = _make_oscillation(self, planned)
        """Resets weights that oscillate between two codes; None if they are left alone."""
        self.reset_share: Tensor | None = None
        """Share of the watched weights that the last step has reset, 0-d; None if it has reset none."""
        self.monitor: Monitor | None = None
        if config.monitor.every:  # the loop reports warnings
            every, optimizer, scaler = config.monitor.every, self.training.optimizer, self.training.scaler
            self.monitor = Monitor(self.model, optimizer, every=every, scaler=scaler, group=ranks.group, tell=lambda _: None)
        self.done = 0
        """Number of steps done, including skipped ones."""
        self.offset = 0
        """Number of batches skipped after spikes."""
        self.loss_ema: float | None = None
        self.time = 0.0
        """Seconds of training before the last resume."""
        # Torch's generators, used only by dropout, are seeded in each step, so that no rank needs to save their state.
        self._dropout = Stream(config.run.seed, "torch", f"rank {self.layout.data_rank}").key

    @property
    def lr(self) -> float:
        """Learning rate of the next step, or of the last one."""
        return schedule(self.config, min(self.done, self.config.run.steps - 1))

    @property
    def precision(self) -> str:
        """The precision in force in one line: mode, casts with their engines, states, and how passes run."""
        chosen, layers = self.config.precision, self.conversion.layers
        cast = [layer for layer in layers if not layer.precision.uncast]
        parts = [f"mode {chosen.mode}, which computes in {chosen.dtypes.plan.compute}"]
        if cast:
            engines = ", ".join(sorted({engine for layer in cast for engine in layer.engines}))
            name = "plans by step" if chosen.schedule else chosen.recipe or chosen.plan or self.config.qat.format or "the plan"
            parts.append(f"{name} in {len(cast)} of {len(layers)} linear layers ({engines})")
        parts.append(f"states {chosen.states or chosen.dtypes.states}")
        parts += ["compiled"] * bool(self.compiled) + ["CUDA graphs"] * (self.passes.graphs is not None)
        return ", ".join(parts)

    @property
    def scaled(self) -> bool:
        """True if losses are scaled: overflows of gradients then lower the scale and do not concern the guard."""
        return self.training.scaler.is_enabled()

    def set_lr(self) -> None:
        """Give each group of the optimizer its learning rate in the next step."""
        for group, share in zip(self.training.optimizer.param_groups, self.lr_shares, strict=True):
            group["lr"] = self.lr * share

    def step(self, batch: Batch, signal: float = 0.0) -> Tensor:
        """Do one optimizer step. Return float32[4] on the device: mean loss, gradient norm, sum of all signals, loss scale.

        A loss or gradient that is not finite changes no weight: it makes all gradients NaN, and the optimizer skips the step.
        If the guard stops such runs, later steps change no weight either: a GPU begins the next step before the host knows.
        """
        optimizer, passes = self.training.optimizer, self.passes
        self.set_lr()
        # On a CPU, torch.manual_seed would also queue the seed for a GPU, with a stack trace: milliseconds, and memory.
        seed = torch.manual_seed if self.ranks.device.type == "cuda" else torch.default_generator.manual_seed
        seed((self._dropout + self.done) % (1 << 63))
        released = nullcontext() if optimizer.released is None else optimizer.released.enabling()
        with nullcontext() if self.plans.snip is None else self.plans.snip.noise(self.done):
            with nullcontext() if self.signals is None else self.signals.abandoned(GRACE), released:
                total = passes.gradients(batch, self.done)
            with passes.clock.part("gradients of ranks") if self.ranks.world > 1 else nullcontext():
                self.layout.reduce_gradients(self.training)
        if self.guided:  # after the sum over ranks, so that additions have the same order with any number of them
            with passes.clock.part("backward"):
                self.training.backward(bitwidth_loss(self.model) * self.guided)
        with passes.clock.part("optimizer"):
            self.training.step()
            if self.oscillation is not None:
                self.reset_share = self.oscillation.after_step(self.done + 1)
        norm = torch.zeros_like(total) if optimizer.grad_norm is None else optimizer.grad_norm
        scale = torch.ones_like(total) if self.training.loss_scale is None else self.training.loss_scale
        numbers = self.ranks.add(torch.stack([total * self.layout.counted, torch.full_like(total, signal)]))
        numbers = torch.stack([numbers[0], norm, numbers[1], scale])
        if self.config.guard.nonfinite == "stop":
            # Scaled gradients may overflow: the scale is lowered then, and the run continues.
            passes.sound &= numbers[0].isfinite() if self.scaled else numbers.isfinite().all()
        self.done += 1
        return numbers

    def choose(self, batch: Batch) -> list[PlanEvent]:
        """Apply the plans of the schedule and of SNIP that are due before the step on a batch, and return them."""
        snip = self.plans.snip
        while snip is not None and not snip.is_ready(self.done, seconds=0.5):
            if self.told:
                raise Interrupted(self.told)
        estimates = functools.partial(_for_estimates, self, batch, (snip and snip.effort.tokens) or 0)
        return self.plans.before_step(self.done, estimates, functools.partial(self.passes.warm_up, batch, self.done))

    def look(self, batch: Batch) -> NumericsReport | None:
        """Measure the numerics of the model after a step, in an extra pass over part of its batch that changes nothing.

        With loss scaling the pass computes in float32: FP16 gradients no longer show what underflowed.
        """
        if self.monitor is None:
            return None
        pieces = _for_estimates(
            self, batch, max(self.config.monitor.tokens, self.config.data.sequence * self.layout.data_world)
        )

        def run(step: int) -> None:
            with step_context(self.model, step=step) as at:
                for part in pieces:
                    at.row(part.first * self.config.data.sequence)
                    loss = self.model(part.inputs, part.targets) if self.scaled else self.passes.loss(self.model, part)
                    self.training.backward(loss / len(pieces))

        again = functools.partial(run, self.done) if self.config.monitor.margin else None
        with self.monitor.aside(self.done, again):
            run(self.done - 1)
        return self.monitor.report

    @property
    def told(self) -> str:
        """The name of the signal that this rank received, or ""."""
        return "" if self.signals is None else self.signals.received

    @property
    def tokens(self) -> int:
        """Number of tokens trained on so far."""
        return self.done * self.config.data.batch * self.config.data.sequence

    def culprit(self, number: int) -> str:
        """Return the name of the first tensor that is not finite in step `number`, with its rank if there are several, or "".

        The step is recomputed, module by module, so it must be the last one that changed or would have changed a weight.
        """
        batch = self.loader.batch(number - 1 + self.offset, self.layout.data_rank, self.layout.data_world).to(self.ranks.device)
        found = self.ranks.gather(nonfinite_weight(self.model)) if self.layout.cut else []
        if not any(found) and self.pipeline is None:  # no pass through a pipeline ends before it has run
            self.layout.synchronize(self.model, last=True)
            found = self.ranks.gather(self.passes.replay(batch, number - 1))
        rank, first = next(((rank, name) for rank, name in enumerate(found) if name), (0, ""))
        return f"{first} on rank {rank}" if first and self.ranks.world > 1 else first

    # Evaluation --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model into eval mode, without gradients, in the compute dtype of training."""
        try:
            with evaluating(self.model), self.training.forward():
                yield
        finally:
            reshard(self.model)

    def evaluate(self) -> Perplexity:
        """Return the mean loss and bits per byte on the held-out windows. Each rank computes its share of them."""
        layout, windows = self.layout, self.held_out
        with self._evaluating():
            losses = batch_losses(
                self.model if self.pipeline is None else self.pipeline.loss,
                windows.part(layout.data_rank, layout.data_world),
                max(1, self.config.data.batch // layout.data_world // self.parts),
                device=self.ranks.device,
                spare=windows.rows(0, 1),
                most=math.ceil(len(windows.tokens) / layout.data_world) if layout.cut else 0,
                stop=lambda: layout.any(bool(self.told)),
            )
            total = sum(losses, torch.zeros((), dtype=torch.float64, device=self.ranks.device)) * layout.counted
        told = torch.full_like(total, float(bool(self.told)))
        nats, stopped = self.ranks.add(torch.stack([total, told])).tolist()
        if stopped and self.signals is not None:
            raise Interrupted(self.told or "SIGTERM")
        return Perplexity.of(nats, windows, self.corpus.held_out)

    @functools.cached_property
    def prompt(self) -> str:
        """The prompt of samples."""
        given = self.config.run.sample_prompt
        return default_prompt(self.corpus) if given is None else given

    def sample(self) -> str:
        """Generate text after the prompt, on every rank if the model is cut; the seed and the step determine it."""

        def check() -> None:
            if self.layout.any(bool(self.told)):
                raise Interrupted(self.told or "SIGTERM")

        model: nn.Module = self.model
        if self.layout.cut:
            logits = self.model if self.pipeline is None else self.pipeline.logits
            model = PaddedLogits(self.model, logits, self.layout.layout.tp)
        run = self.config.run
        with self._evaluating():
            seed = (run.seed + self.done) % (1 << 63)
            return sample_text(model, self.corpus.tokenizer, self.prompt, run.sample_tokens, seed, check)

    def bitwidths(self) -> dict[str, Any] | None:
        """Return the learned bitwidths of the sampled layers by name, or None if no layer is sampled."""
        return self._of_stages(learned_bitwidths) or None

    def block_bitwidths(self) -> dict[str, Any]:
        """Return the learned bitwidths of the blocks of each sampled layer. Every rank of a cut model must call this."""
        return self._of_stages(block_bitwidths)

    def _of_stages(self, measure: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Any]:
        """Return what is measured of the sampled layers of all stages, by name."""
        layers = (module for module in self.model.modules() if isinstance(module, Linear))
        own = measure(self.model) if any(layer.precision.sampling for layer in layers) else {}
        stages = [own] if self.pipeline is None else gather(own, self.layout.pipeline_group)
        return {name: layer for stage in stages for name, layer in stage.items()}

    # State -------------------------------------------------------------------------------------------------------------

    def pack(self, config: str, seconds: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the contents of a checkpoint: the state that the next step depends on, and what must not change until then.

        If the model is cut, every rank must call this, and tensors are those of this rank.
        """
        others = {
            "config": config,
            "corpus": self.corpus.sha256,
            "fallback": self.plans.least,
            "guard": self.guard.state(),
            "loss_ema": self.loss_ema,
            "offset": self.offset,
            "snip": None if self.plans.snip is None else self.plans.snip.state_dict(),
            "time": seconds,
            **({} if self.base is None else {"base": self.base}),
        }
        moved: dict[str, Tensor] = {}
        if self.oscillation is not None:
            window = self.oscillation.state_dict()
            moved = {f"oscillation:{name}": value for name, value in window.pop("tensors").items()}
            others["oscillation"] = window
        optimizer, scaler = self.training.optimizer, self.training.scaler
        tensors, plain = pack(
            self.model,
            optimizer,
            step=self.done,
            plan=self.conversion.plan,
            scaler=scaler,
            others=others,
            group=self.layout.saving_group,
        )
        return tensors | moved, plain

    def restore(self, path: Path) -> Resumed:
        """Restore a checkpoint of this run. One of another model, corpus or config raises a UserError and changes nothing."""
        with SavedTensors(path) as saved:
            others = _check_saved(path, saved.plain, self)
            if (plan := plan_of(saved.plain)) is not None:
                self.plans.apply(plan)
                if self.pipeline is not None:
                    self.conversion.gather(self.layout.pipeline_group)
            window = None if self.oscillation is None else _saved_window(self.oscillation, saved, others)
            optimizer, scaler = self.training.optimizer, self.training.scaler
            resumed = unpack(self.model, optimizer, saved, saved.plain, scaler=scaler, stage=self.pipeline is not None)
        if self.plans.snip is not None and others.get("snip") is not None:
            self.plans.snip.load_state_dict(others["snip"])
        if self.oscillation is not None and window is not None:
            self.oscillation.load_checked(window)
        self.plans.least = dict(others["fallback"])
        self.guard.restore(others["guard"])
        self.done, self.offset, self.time = resumed.step, others["offset"], others["time"]
        self.loss_ema = others["loss_ema"]
        self.passes.sound.fill_(True)
        return resumed

    def learn(self, loss: float) -> None:
        """Add a finite loss to the moving average."""
        self.loss_ema = loss if self.loss_ema is None else 0.95 * self.loss_ema + (1 - 0.95) * loss


def _estimated_loss(trainer: Trainer, model: nn.Module, part: Batch) -> Tensor | None:
    """Return the loss of a micro-batch, unless a signal arrived on any rank: then raise Interrupted on all of them."""
    if trainer.signals is not None:
        told = trainer.ranks.add(torch.tensor(float(bool(trainer.told)), device=trainer.ranks.device))
        if float(told):
            raise Interrupted(trainer.told or "SIGTERM")
    if trainer.pipeline is not None:
        return trainer.pipeline.estimate(part, trainer.training)
    return trainer.passes.loss(model, part)


def _held_out_count(config: Config, corpus: Corpus) -> int | None:
    """Return the number of held-out sequences per evaluation, or None for all."""
    wanted, there = config.run.eval_sequences, (len(corpus.held_out) - 1) // config.data.sequence
    return None if wanted == 0 or wanted >= there else wanted


def _for_estimates(trainer: Trainer, batch: Batch, tokens: int) -> list[Batch]:
    """Return part of a batch for estimates, in micro-batches of equal size: at most as large as those of a step.

    Fewer tokens than a sequence has are the first ones of one sequence, or all of it if the model is cut.

    If blocks are compiled, at most a quarter as large: estimates run uncompiled, which needs half as much activation memory
    again, and they keep gradients for comparison. A run that just fits into memory would not fit any more.
    """
    sequence = trainer.config.data.sequence
    wanted = tokens // sequence // trainer.layout.data_world
    if not wanted and trainer.layout.cut:  # parts of a model take whole sequences
        wanted = 1
    if not wanted:  # less than a sequence
        length = max(1, tokens // trainer.layout.data_world) + 1
        counted = None if batch.counted is None else batch.counted[:1, :length]
        return [replace(batch, tokens=batch.tokens[:1, :length], counted=counted)]
    rows = min(wanted, len(batch.tokens))
    largest = math.ceil(len(batch.tokens) / trainer.parts / (4 if trainer.compiled else 1))
    pieces = math.ceil(rows / largest)
    return list(batch.rows(0, rows - rows % pieces).split(pieces))


def _check_saved(path: Path, plain: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return the values of the run in a checkpoint; raise a UserError if they are of another corpus, config or base."""
    config, corpus = trainer.config, trainer.corpus
    others = plain.get("others")
    kinds = {"config": (str,), "corpus": (str,), "fallback": (dict,), "guard": (dict,), "offset": (int,), "time": (float, int)}
    kinds |= {"loss_ema": (float, int, type(None)), "snip": (dict, type(None))}
    if not isinstance(others, dict) or any(type(others.get(key)) not in kind for key, kind in kinds.items()):
        raise UserError(f"The checkpoint {str(path)!r} was not made by `dither train`: it lacks the state of a run.")
    if others["corpus"] != corpus.sha256:
        raise UserError(
            f"The checkpoint {str(path)!r} was trained on other tokens than those in {str(corpus.folder)!r}: use the "
            "same data, or train in another folder."
        )
    saved = loads(others["config"], f"config of {path.name}", functools.partial(plan_of, plain))
    check_changes(saved, config, int(plain.get("step", 0)), str(path.parent.parent))
    check_same_base(others.get("base"), trainer.base, path)
    return others


def learned_bitwidths(model: nn.Module) -> dict[str, Any]:
    """Return the learned bitwidths of sampled layers by name, as plain values."""
    return {
        each.name: {
            "weights": each.weights,
            "mean": each.mean,
            "deviation": each.deviation,
            "min": each.min,
            "max": each.max,
            "histogram": [[bits, share] for bits, share in each.histogram.items()],
            "bins": [[low, share] for low, share in each.bins.items()],
            "formats": dict(each.formats),
        }
        for each in effective_precision(model).layers
    }


def guided_share(model: nn.Module, stages: Any) -> float:
    """Return the share of this rank's stage in all blocks of weights whose bitwidths a loss guides, or 0."""
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    guided = (layer.bitwidth for layer in layers if layer.precision.sampling is not None and layer.precision.sampling.loss)
    own = sum(bitwidth.numel() for bitwidth in guided if bitwidth is not None)
    return own / sum(gather(own, stages)) if own and stages is not None else float(own > 0)


def _pipeline(trainer: Trainer) -> Pipeline | None:
    """Cut the model to the stages of this rank, and return them; None if there is no pipeline."""
    config, layout = trainer.config, trainer.layout
    if layout.layout.pp == 1:
        return None
    check_pipeline(trainer.model)
    layout.layout.check(trainer.model)
    check_stages(config, len(trainer.model.blocks))
    check_micro_batches(config, trainer.parts)
    assert isinstance(trainer.model, PlainLM)
    pipeline = Pipeline(trainer.model, config, layout, trainer.parts)
    trainer.model = pipeline.model
    return pipeline


def _make_snip(trainer: Trainer, planned: PlanSchedule, say: Callable[[str], None]) -> Snip | None:
    """Return the controller that chooses precisions during training, or None."""
    snip = trainer.config.snip
    if snip.target is None:
        return None
    if trainer.pipeline is not None:
        if len(trainer.pipeline.stages) > 1:
            raise UserError(
                f"SNIP takes the stages of a pipeline with one stage per rank, and parallel.schedule="
                f"{trainer.config.parallel.schedule!r} has two: use '1f1b' or 'zero-bubble', or no snip.target."
            )
        check_snip_stages(snip.stages, trainer.pipeline.sizes)
        snip = replace(snip, stages=tuple(trainer.pipeline.sizes))
    cut = trainer.layout.cut
    setup = TrainingSetup(
        group=trainer.layout.data_group if cut else None,
        pipeline=trainer.layout.pipeline_group if cut else None,
        adds_gradients=cut,
        step_tokens=trainer.config.data.batch * trainer.config.data.sequence,
        steps=steps_for_snip(planned, snip.start, trainer.config.run.steps),
        products=trainer.training.backward_context,
    )
    made = Snip(
        trainer.conversion,
        trainer.training.optimizer,
        snip,
        forward=functools.partial(_estimated_loss, trainer),
        setup=setup,
        seed=trainer.config.run.seed,
        on_failure=lambda _: None,  # the loop reports what became of the estimates
    )
    say(made.effort.describe())
    return made


def _make_oscillation(trainer: Trainer, planned: PlanSchedule) -> OscillationReset | None:
    """Return what resets oscillating weights, checked for all plans that the run may have, or None."""
    settings, snip = trainer.config.oscillation, trainer.plans.snip
    if settings.start is None:
        return None
    names = [layer.name for layer in trainer.conversion.layers]
    later = [plan.for_layer(name) for plan in (change.plan for change in planned.changes[1:]) for name in names]
    later += [] if snip is None else [option.precision for option in snip.options]
    return OscillationReset(
        trainer.model,
        trainer.training.optimizer,
        start=settings.first(trainer.config.run.steps),
        period=settings.period,
        window=settings.window,
        ratio=settings.ratio,
        others=dict.fromkeys(each for each in later if each is not None),
    )


def _saved_window(reset: OscillationReset, saved: SavedTensors, others: Mapping[str, Any]) -> Any:
    """Return the window of oscillating weights in a checkpoint, checked."""
    prefix = "oscillation:"
    tensors = {name.removeprefix(prefix): saved.read(name) for name in saved.tensors if name.startswith(prefix)}
    return reset.checked({**(others.get("oscillation") or {}), "tensors": tensors})


def _training(config: Config, model: CausalLM, adam_roles: Mapping[str, Role] | None) -> Training:
    """Return the optimizer of a converted model, with its loss scaling and gradient formats; roles are for adam-mini."""
    scaled = config.precision.dtypes.plan.loss_scaling
    made = training(
        model,
        config.precision.mode,
        config.optim.lr,
        gradients=config.precision.gradients,
        loss_scaling=config.loss_scaling if scaled else None,
        groups=_groups(config, model),
        muon=_muon(config),
        roles=adam_roles,
        betas=config.optim.betas,
        eps=config.optim.eps,
        # A scaled step computes the norm only if it clips; the largest float32 never clips.
        max_norm=config.optim.max_norm or (MOST_NORM if scaled else None),
        nonfinite="skip",  # decided on the device, before any weight changes; the guard learns of it later
        seed=config.run.seed,
        release=config.optim.release_gradients,
        clip_norm="previous" if config.optim.clip_norm == "previous" else None,
        error_feedback=config.optim.error_feedback,
        states_on=config.optim.states_on,
        **({} if config.precision.states is None else {"states": config.precision.states}),
    )
    if made.optimizer.released is not None:
        made.optimizer.released.enabled = False  # until a step: estimates and the monitor only look at gradients
    if config.lora.rank is not None:
        narrow_base(model, config.precision.mode)
    return made


def _groups(config: Config, model: CausalLM) -> list[dict[str, Any]]:
    """Return the parameter groups of a model."""
    muon, decay = config.muon, config.optim.weight_decay
    if config.optim.optimizer != "muon":
        return param_groups(model, weight_decay=decay)
    return muon_groups(
        model,
        weight_decay=decay if muon.matrix_decay is None else muon.matrix_decay,
        lr=muon.matrix_lr,
        embedding_lr=muon.embedding_lr,
        output_lr=muon.output_lr,
        adamw_decay=decay,
        adamw_eps=config.optim.eps,
    )


def _muon(config: Config) -> dict[str, Any] | None:
    """Return the options of Muon, or None."""
    muon = config.muon
    options = {name: getattr(muon, name) for name in ("momentum", "nesterov", "adjust_lr_fn", "ns_steps")}
    options["eps"] = 1e-7  # the least norm of a matrix; optim.eps is that of AdamW's groups
    return options if config.optim.optimizer == "muon" else None


def _sizes(config: Config, corpus: Corpus) -> Any:
    """Return the config of a preset with the vocabulary of the corpus."""
    tokens = corpus.tokenizer.vocab_size
    if config.model.vocab is not None and config.model.vocab < tokens:
        raise UserError(
            f"model.vocab={config.model.vocab} is less than the {tokens} tokens of the tokenizer: increase or remove it."
        )
    sizes = config.model.sizes(config.model.vocab or tokens)
    _check_positions(sizes, config.data.sequence)
    return sizes


def _check_stored(config: Config, ranks: Ranks) -> None:
    """Raise if weights are to be stored in FP8 and the run has something that does not go with them."""
    others = {
        f"{ranks.world} ranks": ranks.world > 1,
        "snip.target": config.snip.target is not None,
        "lora.rank": config.lora.rank is not None,
        f"optim.optimizer={config.optim.optimizer!r}": config.optim.optimizer == "adam-mini",
        "monitor.fallback": config.monitor.fallback,
    }
    for name, present in others.items():
        if present:
            raise UserError(
                f"precision.weights='fp8' is for a whole model on one device, with AdamW or Muon and one plan, and here is "
                f"{name}: leave one of them out."
            )


def _chunk_loss(model: CausalLM, ranks: Ranks) -> None:
    """Let a model compute its loss in parts, or raise."""
    if ranks.world > 1:
        raise UserError(f"precision.logits='chunked' is for one device, and here are {ranks.world} ranks: leave it out.")
    if isinstance(model, HuggingFace):
        check_output_layer(model.hf)
        layer: Any = model.get_output_embeddings()
    else:
        layer = model.lm_head
    model.loss_rows = chunk_rows(layer.out_features)


def _check_release(trainer: Trainer) -> None:
    """Raise if gradients are to be released, and a step has other gradients to add to those of its backward pass."""
    if not trainer.config.optim.release_gradients:
        return
    if trainer.ranks.world > 1:
        raise UserError(
            f"optim.release_gradients uses gradients in the backward pass, and those of {trainer.ranks.world} ranks are "
            "reduced after it: train on one GPU, or without it."
        )
    if trainer.parts > 1:
        raise UserError(
            "optim.release_gradients uses gradients in the backward pass, and "
            f"data.micro_batch={trainer.config.data.micro_batch} accumulates those of {trainer.parts} "
            "passes: set data.micro_batch to data.batch, or leave release_gradients out."
        )


def _model(config: Config, corpus: Corpus, device: torch.device) -> CausalLM:
    tokens, sequence, seed = corpus.tokenizer.vocab_size, config.data.sequence, config.run.seed
    plan = config.precision.dtypes.plan
    # Without masters, parameters become BF16 anyway: in float32 they might not fit into a GPU that trains them.
    dtype = torch.bfloat16 if plan.parameters == "bf16" and not plan.master else torch.float32
    if config.model.ours:
        return build(_sizes(config, corpus), seed=seed, device=device, dtype=dtype)
    if config.model.vocab is not None and config.model.hf is not None:
        raise UserError("model.vocab is for presets only: the config of a Hugging Face model sets its vocabulary.")
    # The base of adapters is never needed in float32: its codes are made from the weights as they are in the files, or are
    # those of the files.
    source, adapts = config.model.hf or config.model.mixtral(config.model.vocab or tokens), config.lora.rank is not None
    model = hf(source, seed=seed, device=device, dtype=None if adapts else dtype, codes=adapts)
    if model.embedding.num_embeddings < tokens:
        raise UserError(
            f"The model has a vocabulary of {model.embedding.num_embeddings} tokens, and the tokenizer has {tokens}: increase "
            "vocab_size in its config.json, or set data.tokenizer to the tokenizer.json that belongs to the model."
        )
    _check_positions(model.config, sequence)
    return model


def _check_positions(sizes: Any, sequence: int) -> None:
    longest = getattr(sizes, "max_position_embeddings", None)
    if longest is not None and sequence > longest:
        raise UserError(f"data.sequence={sequence} is longer than the {longest} positions of the model.")


def restore_newest(trainer: Trainer, folder: Path, say: Callable[[str], None], *, before: int | None = None) -> int | None:
    """Restore the newest whole checkpoint in a folder and return its step, or None if there is no checkpoint yet.

    Args:
        trainer: The trainer to restore. Rank 0 chooses the checkpoint for all ranks.
        folder: The folder of checkpoints.
        say: Called with the reasons for which checkpoints are passed over, and with the step.
        before: Only checkpoints before this step count.
    """
    ranks, found = trainer.ranks, -1
    with ranks.shared_errors():
        if ranks.main:
            path, skipped = checkpoint.newest(folder, before=before)
            for _, why in skipped:
                say(why)
            found = -1 if path is None else checkpoint.step_of(path)
            if path is None and (broken := [why for each, why in skipped if STEP.fullmatch(each.name)]):
                say(f"None of the {len(broken)} checkpoints is complete.")
                # Not the result of a kill: starting from scratch would discard what might be repaired.
                raise UserError(
                    f"No checkpoint in {str(folder)!r} can be resumed, for the reasons above: put a complete one there, or "
                    "remove them to start from the beginning."
                )
    found = ranks.agree(found)
    if found < 0:
        say("There is no checkpoint yet: the run starts from the beginning.")
        return None
    with ranks.shared_errors():
        trainer.restore(step_path(folder, found))
    say(f"Resuming from step {found}.")
    return found
