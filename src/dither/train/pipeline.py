"""Pipelines: each rank holds some blocks of the model, and the micro-batches of a step pass through the ranks.

Schedules are those of torch.distributed.pipelining. Rank r of n has stage r, or, with two stages per rank, stages r and r + n.
A stage draws the random bits of the whole model: its layers have their names, and each micro-batch its rows.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dither.data import Batch
from dither.errors import UserError
from dither.models.causal import CausalLM, PlainLM
from dither.models.presets import skeleton
from dither.nn.layers import Absent
from dither.nn.step import StepContext
from dither.optim import Training
from dither.train.config import VIRTUAL, Config
from dither.train.layout import RankLayout


def check_pipeline(model: CausalLM) -> None:
    """Raise if a model cannot be divided into stages."""
    if not isinstance(model, PlainLM):
        raise UserError("A pipeline divides the models of presets, and not those of Hugging Face: use parallel.pp=1.")
    if model.config.tie_word_embeddings:
        raise UserError(
            f"The output layer of {type(model).__name__} shares the weight of the embedding, and a pipeline has them on two "
            "ranks: use parallel.pp=1, or a model with tie_word_embeddings=False."
        )


def stage_of(model: PlainLM, blocks: Collection[int]) -> PlainLM:
    """Return a model with some blocks of `model`, which both share, and with the embedding and the output if these are theirs.

    Names are those of the whole model. The first stage takes tokens [B, S] and the others activations [B, S, D]; all but the
    last return activations.

    >>> from dither.models import build
    >>> stage = stage_of(build("tiny"), [1])
    >>> [name for name, _ in stage.named_parameters()][-2:]
    ['model.norm.weight', 'lm_head.weight']
    """
    check_pipeline(model)
    stage = skeleton(model.config)
    last = len(model.blocks) - 1
    for number, block in enumerate(model.blocks):
        stage.blocks[number] = block if number in blocks else Absent()
    stage.is_stage = True
    own, theirs = _backbone(stage), _backbone(model)
    for child, module in theirs.named_children():
        if child in ("embed_tokens", "wte", "wpe"):
            setattr(own, child, module if 0 in blocks else None)
        elif module is not model.blocks:
            setattr(own, child, module if last in blocks else None)
    stage.lm_head = model.lm_head if last in blocks else None  # type: ignore[assignment]
    stage.train(model.training)
    return stage


def _backbone(model: PlainLM) -> nn.Module:
    """Return the module of a model that holds its blocks."""
    return next(module for name, module in model.named_children() if name != "lm_head")


def set_length(stage: PlainLM, length: int | None) -> None:
    """Set the tokens per sequence of the next passes, of which a later stage may get a part on each rank; None: all of them."""
    _backbone(stage).length = length  # type: ignore[assignment]


def blocks_per_stage(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage: as even as possible, with more in the first ones.

    >>> blocks_per_stage(22, 4)
    (6, 6, 5, 5)
    """
    return tuple(layers // stages + (number < layers % stages) for number in range(stages))


class Pipeline:
    """The stages of this rank, and the passes through all stages.

    The model is converted; `parts` is the number of micro-batches per step.
    """

    def __init__(self, model: PlainLM, config: Config, layout: RankLayout, parts: int) -> None:
        self.config, self.layout, self.parts = config, layout, parts
        self.group: Any = layout.pipeline_group
        self.rank, self.size = dist.get_rank(self.group), layout.layout.pp
        self.count = config.parallel.stages
        layers = len(model.blocks)
        self.sizes = blocks_per_stage(layers, self.count)
        """Blocks of each stage."""
        own = [number for number in range(self.count) if number % self.size == self.rank]
        firsts = [sum(self.sizes[:number]) for number in range(self.count)]
        blocks = {number: range(firsts[number], firsts[number] + self.sizes[number]) for number in own}
        self.model = stage_of(model, [block for each in blocks.values() for block in each])
        """All that this rank holds, under the names of the whole model."""
        single = len(own) == 1
        self.stages = {number: self.model if single else stage_of(model, blocks[number]) for number in own}
        """The stages of this rank by number."""
        self._schedules: dict[Any, Any] = {}

    @property
    def last(self) -> bool:
        """True if this rank has the last stage."""
        return self.count - 1 in self.stages

    # A step ------------------------------------------------------------------------------------------------------------

    def gradients(self, batch: Batch, at: StepContext, training: Training, weigh: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Run all micro-batches of a step forward and backward. Return their losses; none without the last stage.

        Args:
            batch: This rank's share of the batch.
            at: The step, whose row is set for each micro-batch.
            training: The compute dtype of the run.
            weigh: Returns what is differentiated for the loss of a micro-batch.
        """
        size, sequence = len(batch.tokens) // self.parts, self.config.data.sequence
        losses: list[Tensor] = []

        def compute(loss: Tensor, _: Tensor) -> Tensor:
            losses.append(loss.detach())
            return weigh(loss)

        with ExitStack() as stack:
            for stage in self.stages.values():
                _MicroBatches(at, batch.first * sequence, size * sequence, training).watch(stage, stack)
            self._run(self._schedule(self.parts, size, compute), training, batch)
        return losses

    def _run(self, schedule: Any, training: Training, batch: Batch) -> None:
        for stage in self.stages.values():
            set_length(stage, batch.inputs.shape[1])
        # A copy, since a stage of torch 2.11 compares strides, and contiguous() keeps those of a single sequence.
        first = (batch.inputs.clone(memory_format=torch.contiguous_format),) if 0 in self.stages else ()
        last = {"target": batch.targets, "targets": batch.targets} if self.last else {}
        with training.backward_context():
            schedule.step(*first, **last, return_outputs=False)

    def _schedule(self, parts: int, size: int, loss: Callable[[Tensor, Tensor], Tensor], *, estimate: bool = False) -> Any:
        """Return the schedule of `parts` micro-batches of `size` sequences. Its stages are kept, with their buffers."""
        key = parts, size, estimate
        if key not in self._schedules:
            stages = [self._stage(number, size) for number in self.stages]
            kind, several = _schedule_class("gpipe" if estimate else self.config.parallel.schedule)
            given: Any = stages if several else stages[0]
            function = _Loss()
            self._schedules[key] = kind(given, parts, loss_fn=function, scale_grads=False), function
        schedule, function = self._schedules[key]
        function.compute = loss
        return schedule

    def _stage(self, number: int, size: int) -> Any:
        from torch.distributed.pipelining import PipelineStage  # imports Dynamo, which takes seconds

        data, layout = self.config.data, self.layout.layout
        dtype = next(self.model.parameters()).dtype
        sequence = data.sequence // (layout.tp if self.config.parallel.sequence_parallel else 1)
        width = self.model.config.hidden_size
        between = torch.empty(size, sequence, width, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(size, data.sequence, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        return PipelineStage(
            self.stages[number],
            number,
            self.count,
            self.layout.ranks.device,
            input_args=(tokens if number == 0 else between,),
            output_args=(loss if number == self.count - 1 else between,),
            group=self.group,
        )

    def estimate(self, part: Batch, training: Training) -> Tensor | None:
        """Run a micro-batch forward and backward for SNIP. Return its loss, or None without the last stage."""
        losses: list[Tensor] = []

        def compute(loss: Tensor, _: Tensor) -> Tensor:
            losses.append(loss.detach())
            return loss

        with training.forward():
            self._run(self._schedule(1, len(part.tokens), compute, estimate=True), training, part)
        return losses[0] if losses else None

    # Forward only ------------------------------------------------------------------------------------------------------

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of sequences, without gradients; 0 without the last stage."""
        out = self._forward(inputs, targets)
        return torch.zeros((), device=inputs.device) if out is None else out

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [B, S, V] for tokens [B, S] on every rank of the pipeline, without gradients."""
        out = self._forward(tokens, None)
        vocabulary, source = self.model.config.vocab_size, (self.count - 1) % self.size
        if out is None:
            out = torch.empty(*tokens.shape, vocabulary, device=tokens.device)
        out = out.float().contiguous()
        dist.broadcast(out, group=self.group, group_src=source)
        return out

    def _forward(self, tokens: Tensor, targets: Tensor | None) -> Tensor | None:
        """Run all stages, one after the other; return the result of the last one where it is, else None."""
        x: Tensor = tokens
        length = tokens.shape[1]
        parallel, tp = self.config.parallel, self.layout.layout.tp
        shape = len(tokens), length // (tp if parallel.sequence_parallel else 1), self.model.config.hidden_size
        for number in range(self.count):
            if number not in self.stages:
                continue
            stage = self.stages[number]
            if number > 0 and number - 1 not in self.stages:
                x = torch.empty(shape, dtype=next(self.model.parameters()).dtype, device=tokens.device)
                dist.recv(x, group=self.group, group_src=(number - 1) % self.size)
            set_length(stage, length)
            x = stage(x, targets)
            if number < self.count - 1 and number + 1 not in self.stages:
                dist.send(x.contiguous(), group=self.group, group_dst=(number + 1) % self.size)
        return x if self.last else None


class _MicroBatches:
    """Sets the first row and the compute dtype of each micro-batch's forward pass; a stage runs them in order."""

    def __init__(self, at: StepContext, first: int, rows: int, training: Training) -> None:
        self.at, self.row, self.rows, self.training = at, first, rows, training
        self.context: AbstractContextManager[None] | None = None

    def watch(self, stage: PlainLM, stack: ExitStack) -> None:
        """Attach this to a stage until the stack ends."""
        stack.callback(stage.register_forward_pre_hook(self.before, prepend=True).remove)
        stack.callback(stage.register_forward_hook(self.after, always_call=True).remove)

    def before(self, *_: Any) -> None:
        """Begin a forward pass."""
        self.at.row(self.row)
        self.row += self.rows
        self.context = self.training.forward()
        self.context.__enter__()

    def after(self, *_: Any) -> None:
        """End a forward pass, also one that failed."""
        if self.context is not None:
            self.context.__exit__(None, None, None)
            self.context = None


class _Loss:
    """The loss function of a schedule, which is another one in each step."""

    compute: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.compute(output, target)


def _schedule_class(name: str) -> tuple[Any, bool]:
    """Return torch's class of a schedule, and whether it takes several stages per rank."""
    from torch.distributed import pipelining  # imports Dynamo, which takes seconds
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    return {
        "gpipe": (pipelining.ScheduleGPipe, False),
        "1f1b": (pipelining.Schedule1F1B, False),
        "interleaved-1f1b": (pipelining.ScheduleInterleaved1F1B, True),
        "zero-bubble": (ScheduleInterleavedZeroBubble, True),
    }[name]


def check_micro_batches(config: Config, parts: int) -> None:
    """Raise if a pipeline has fewer micro-batches than its schedule needs."""
    parallel = config.parallel
    ranks, virtual = parallel.pp, VIRTUAL[parallel.schedule]
    if ranks == 1:
        return
    if (parts < ranks * virtual and virtual == 1) or parts % ranks:
        raise UserError(
            f"A pipeline of parallel.pp={ranks} with schedule={parallel.schedule!r} needs a multiple of {ranks} micro-batches "
            f"per step, and there {'is' if parts == 1 else 'are'} {parts}: change data.batch or data.micro_batch."
        )


def check_snip_stages(given: Sequence[int], sizes: Sequence[int]) -> None:
    """Raise if the stages of `[snip]` are not those of the pipeline."""
    if given and tuple(given) != tuple(sizes):
        raise UserError(
            f"snip.stages={list(given)} are not the stages of the pipeline, {list(sizes)}: remove that setting, and SNIP takes "
            "the pipeline's."
        )
