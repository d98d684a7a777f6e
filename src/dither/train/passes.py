"""The passes of an optimizer step over its micro-batches, and the time that their parts take."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

import torch
from torch import Tensor, nn

from dither.data import Batch
from dither.errors import UserError
from dither.models import CausalLM
from dither.nn import GraphedPasses, Linear, step_context
from dither.nn.step import untouched
from dither.ops.ranks import local
from dither.optim import Training
from dither.train.layout import RankLayout
from dither.train.pipeline import Pipeline
from dither.train.ranks import Ranks
from dither.train.teacher import Teacher


def uses_graphs(
    wanted: bool | None, ranks: Ranks, training: Training, parts: int, *, compiled: bool, teacher: bool = False
) -> bool:
    """Return whether passes are replayed as CUDA graphs; raise UserError if they are asked for and impossible.

    Args:
        wanted: `run.cuda_graphs`; None means wherever they are possible.
        ranks: The ranks of the run.
        training: The optimizer, the loss scaling and the gradients.
        parts: Micro-batches per step.
        compiled: True if blocks are compiled.
        teacher: True if there is a teacher.
    """
    obstacles = {
        "the run is not on a GPU": ranks.device.type != "cuda",
        "blocks are not compiled": not compiled,
        "there are several ranks": ranks.world > 1,
        "there is a teacher": teacher,
        "losses are scaled": training.scaler.is_enabled(),
        "released gradients update states in host memory": training.optimizer.released is not None
        and training.optimizer.states_on == "host",
        "gradients of several micro-batches are rounded stochastically": training.gradients.kind == "bf16-sr" and parts > 1,
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), "")
    if wanted and reason:
        raise UserError(f"run.cuda_graphs=true is impossible, since {reason}: leave it out, and passes run without graphs.")
    return wanted is not False and not reason


class StepClock:
    """Sums up the seconds of parts of steps, and never waits for a GPU.

    On a GPU, the seconds are those that its stream takes: events are recorded before and after each part, and read when the GPU
    has passed them.

    >>> clock = StepClock(torch.device("cpu"))
    >>> with clock.part("forward"):
    ...     _ = torch.ones(8, 8) @ torch.ones(8, 8)
    >>> list(clock.take()), clock.take()
    (['forward'], {})
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: dict[str, float] = {}
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._unused: list[torch.cuda.Event] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as that of a part. Parts are not nested. A part that raises is not counted."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began)
            return
        begin = self._record()
        yield
        self._pending.append((name, begin, self._record()))
        self._collect()

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call; what the GPU has not done yet is left for the next one."""
        self._collect()
        found, self._seconds = self._seconds, {}
        return found

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _record(self) -> torch.cuda.Event:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _collect(self) -> None:
        """Add up the parts that the GPU has done, in their order."""
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            name, begin, end = self._pending.popleft()
            self._add(name, begin.elapsed_time(end) / 1000)
            self._unused += (begin, end)


BOTH = "forward and backward"
"""The name of a part that is not divided: of a pipeline, whose passes overlap, and of a CUDA graph."""


def _untimed(part: str) -> AbstractContextManager[None]:
    return nullcontext()


class Passes:
    """The forward and backward passes of a step over this rank's micro-batches.

    Args:
        model: The model, or the stages of this rank.
        training: The optimizer, the loss scaling and the compute dtype.
        layout: How ranks share the batches and the model.
        pipeline: The stages of this rank; None if there is no pipeline.
        parts: Micro-batches per step on this rank.
        sequence: Tokens per sequence.
        device: The device of the model.
        teacher: The model whose predictions are learned too, or None.
    """

    def __init__(
        self,
        model: CausalLM,
        training: Training,
        layout: RankLayout,
        *,
        pipeline: Pipeline | None,
        parts: int,
        sequence: int,
        device: torch.device,
        teacher: Teacher | None = None,
    ) -> None:
        self.teacher = teacher
        self.model, self.training, self.layout, self.pipeline = model, training, layout, pipeline
        self.parts, self.sequence, self.clock = parts, sequence, StepClock(device)
        self.graphs: GraphedPasses | None = None
        """Replays passes as CUDA graphs; None if they run one operation after the other."""
        self.sound = torch.ones((), dtype=torch.bool, device=device)
        """False makes all gradients NaN, so that the optimizer skips the step."""
        self._share = torch.ones((), device=device)
        """The weight of the current micro-batch of this rank in the mean loss, where CUDA graphs read it."""

    def gradients(self, batch: Batch, step: int) -> Tensor:
        """Accumulate this rank's share of the gradients of a step, and return its share of the mean loss."""
        total = torch.zeros_like(self._share)
        with ExitStack() as stack:
            with self.clock.part("casts of weights"):
                at = stack.enter_context(step_context(self.model, step=step, group=self.layout.data_group))
            if self.pipeline is not None:
                self._share.fill_(self._even_share)
                with self.clock.part(BOTH):
                    losses = self.pipeline.gradients(batch, at, self.training, self._weighed)
                return sum((loss * self._share for loss in losses), total)
            for number, part in enumerate(batch.split(self.parts)):
                self.layout.synchronize(self.model, last=number == self.parts - 1)
                at.row(part.first * self.sequence)
                self._share.copy_(torch.full_like(total, self._even_share) if part.weight is None else part.weight)
                total += self._pass(part.inputs, part.targets, first=number == 0) * self._share
        return total

    @property
    def _even_share(self) -> float:
        """The weight of one micro-batch of this rank in the mean loss, where all tokens count."""
        return 1 / (self.parts * self.layout.data_world)

    def _pass(self, inputs: Tensor, targets: Tensor, *, first: bool) -> Tensor:
        """Accumulate the gradients of one micro-batch, and return its mean loss."""
        if self.graphs is None:
            return self.eager(inputs, targets, self.clock.part)
        with self.clock.part(BOTH):  # a graph has no events inside
            return self.graphs(inputs, targets, first=first)

    def eager(self, inputs: Tensor, targets: Tensor, part: Callable[[str], AbstractContextManager[None]] = _untimed) -> Tensor:
        """Accumulate the gradients of one micro-batch operation by operation, and return its mean loss."""
        with part("forward"):
            loss = self._forward(self.model, inputs, targets)
        with part("backward"):
            self.training.backward(self._weighed(loss))
        return loss.detach()

    def _weighed(self, loss: Tensor) -> Tensor:
        """Return a micro-batch's share of the mean loss; NaN gradients let the optimizer skip the step."""
        return loss * torch.where(loss.detach().isfinite() & self.sound, self._share, torch.nan)

    def loss(self, model: nn.Module, part: Batch) -> Tensor:
        """Return the mean loss of a micro-batch, 0-d, in the compute dtype of the run."""
        return self._forward(model, part.inputs, part.targets)

    def trial(self, part: Batch) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss of a micro-batch and this rank's gradients, which are reduced over ranks if the model is cut."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not self.layout.cut:
            loss = self.loss(self.model, part)
            return loss, list(torch.autograd.grad(loss, parameters, allow_unused=True))
        if self.pipeline is not None:
            found = self.pipeline.estimate(part, self.training)
            loss = torch.zeros_like(self._share) if found is None else found
        else:  # FSDP2 hands out gradients in backward only
            self.layout.synchronize(self.model, last=True)
            loss = self.loss(self.model, part)
            self.training.backward(loss)
        return loss.detach(), [parameter.grad for parameter in parameters]

    def warm_up(self, batch: Batch, step: int) -> None:
        """Run the first micro-batch of the next step forward and backward without any effect, so that blocks are compiled."""
        if self.pipeline is not None:  # its first step compiles
            return
        part = next(iter(batch.split(self.parts)))
        with suppress(_NoEffect), magnitudes_kept(self.model), step_context(self.model, step=step) as at:
            at.row(part.first * self.sequence)
            self.trial(part)
            if self.layout.cut:
                self.training.optimizer.zero_grad()
            raise _NoEffect

    def replay(self, batch: Batch, step: int) -> str:
        """Return the first weight, output or gradient that is not finite in a step, in words, or "". Nothing changes.

        Args:
            batch: This rank's share of the batch.
            step: The step, from 0, whose update has not changed the model.
        """
        if weight := nonfinite_weight(self.model):
            return weight
        found: list[str] = []

        def look(name: str, output: object) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not found and isinstance(first, Tensor) and first_nonfinite([(name, local(first))]):
                found.append(f"the output of {name}")

        with untouched(self.model), ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if name:
                    hook = module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
                    hooks.callback(hook.remove)
            with step_context(self.model, step=step) as at:
                for part in batch.split(self.parts):
                    at.row(part.first * self.sequence)
                    loss = self.loss(self.model, part)
                    if not found and first_nonfinite([("loss", loss.detach())]):
                        found.append("the loss")
                    self.training.backward(loss)
            # Backward runs from the last layer to the first.
            gradients = [(name, local(parameter.grad)) for name, parameter in self.model.named_parameters()]
            bad = first_nonfinite(reversed(gradients))
        return found[0] if found else f"the gradient of {bad}" if bad else ""

    def _forward(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.training.forward():
            if self.teacher is not None:
                return self.teacher.loss(model(inputs), inputs, targets)
            loss: Tensor = model(inputs, targets)
        return loss


@contextmanager
def magnitudes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the largest magnitudes that delayed scaling has seen in the step, which passes inside raise."""
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    seen = [getattr(layer, f"_{operand}_largest") for layer in layers for operand in layer.delayed.operands]
    kept = [magnitude.clone() for magnitude in seen]
    try:
        yield
    finally:
        if seen:
            torch._foreach_copy_(seen, kept)


class _NoEffect(Exception):  # noqa: N818 - not an error: it leaves a step_context without any effect
    pass


def nonfinite_weight(model: nn.Module) -> str:
    """Return the first weight of this rank that is not finite, in words, or ""."""
    weight = first_nonfinite((name, local(parameter)) for name, parameter in model.named_parameters())
    return f"the weight {weight}" if weight else ""


def first_nonfinite(tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """Return the name of the first tensor with NaN or Inf, or "". Synchronizes with the device once per tensor.

    >>> first_nonfinite([("a", torch.ones(2)), ("b", torch.tensor([1.0, float("nan")]))])
    'b'
    """
    return next((name for name, tensor in tensors if tensor is not None and not bool(tensor.isfinite().all())), "")
