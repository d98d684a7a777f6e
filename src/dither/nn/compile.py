"""Forward and backward passes as CUDA graphs: one launch per micro-batch in place of thousands.

A small model's kernels take less time than their launches, and casts add launches: without graphs, FP8 would be slower than
BF16 there. A graph reads inputs, weights, levels of casts and places of random bits where they were at capture, so optimizer
steps and plans of the same families change its results without a new capture.

Entering a step and the optimizer stay outside: they are one launch and two, and leave the GPU no gaps (`benchmarks/gaps.py`).
Updates of released gradients (`dither.optim.release_gradients`) are part of backward, and of the graph.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from dither.errors import UserError
from dither.nn.layers import Absent
from dither.nn.linear import Linear
from dither.nn.step import StepContext

GRAPHS = 256
"""The most graphs of a block's code: one per kind of block, and per grad mode, dtype and shape that it is called with."""


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compile the repeated blocks of `model` in place, each by itself.

    `options` are those of `torch.compile`, with `fullgraph=True` unless given otherwise. Blocks are the children of one class
    in the outermost `nn.ModuleList` or `nn.Sequential` that has at least two of them, as in the models of Hugging Face,
    torchtitan and this library. A model without such a list is compiled as a whole. Call it before or after `dither.convert`:
    what is compiled, on the first call, is a block as it is then. Blocks that `parallelize` recomputes in backward recompute
    their compiled forward passes.

    Blocks that differ in constants, as BF16 beside FP8, have a graph each. Dynamo's limit on graphs per function does not apply
    to them; levels of one family share a graph (`Conversion.prepare`).

    >>> from dither.models import build
    >>> compile_blocks(build("tiny"))
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"dither.compile takes a torch.nn.Module, not {model!r}.")
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "dither.compile takes the model itself, not what torch.compile returned: compile it once, by dither.compile(model) "
            "or by torch.compile(model)."
        )
    blocks = find_blocks(model) or {"": model}
    options = {"fullgraph": True, **options}
    has_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    if has_limit:
        options.setdefault("recompile_limit", GRAPHS)
    for block in blocks.values():
        if checkpoint.state(block) is not None:  # its hooks cannot be compiled, the forward pass that they call can
            block.forward = types.MethodType(_Limited(torch.compile(type(block).forward, **options)), block)
            continue
        block.compile(**options)
        if not has_limit:
            block._compiled_call_impl = _Limited(block._compiled_call_impl)


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that torch.compile or `compile_blocks` has compiled.

    >>> from dither.models import build
    >>> compile_blocks(model := build("tiny"))
    >>> compiled_modules(model)
    ['model.layers.0', 'model.layers.1']
    """

    def compiled(module: nn.Module) -> bool:
        forward = getattr(vars(module).get("forward"), "__func__", None)
        return module._compiled_call_impl is not None or isinstance(forward, _Limited)

    whole = [""] if isinstance(model, torch._dynamo.OptimizedModule) else []
    return whole + [name for name, module in model.named_modules() if compiled(module)]


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by name: the children of its outermost lists of modules of one class.

    >>> from dither.models import build
    >>> list(find_blocks(build("tiny")))[:2]
    ['model.layers.0', 'model.layers.1']
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in found) or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [(number, child) for number, child in module.named_children() if not isinstance(child, Absent)]
        kinds = {type(child) for _, child in children}
        if len(module) >= 2 and len(kinds) == 1 and any(True for child in module for _ in child.children()):
            found |= {f"{name}.{number}" if name else number: child for number, child in children}
    return found


def block_variants(model: nn.Module) -> frozenset[object]:
    """Return what distinguishes the graphs of a model's blocks: one entry per kind of block and precision of its layers.

    Levels of one family do not count, since they share a graph. `compile_blocks` compiles about as many graphs as there are
    entries, for training and again for evaluation.

    >>> import dither
    >>> from dither.models import build
    >>> model = build("tiny")
    >>> fp8 = dither.recipe("fp8-row").default
    >>> _ = dither.convert(model, dither.Plan(layers=(("*.0.mlp.*", dither.LayerPrecision()),), default=fp8))
    >>> len(block_variants(model))
    2
    """
    blocks = find_blocks(model) or {"": model}
    return frozenset(
        (type(block), tuple((name, module.constants()) for name, module in block.named_modules() if isinstance(module, Linear)))
        for block in blocks.values()
    )


class _Limited:
    """A compiled function with a limit of its own on its graphs, whether or not `torch.compile` takes one."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.limit = torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=16 * GRAPHS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.limit:
            return self.compiled(*args, **kwargs)


WARMUP = 3
"""Steps before a capture: blocks are compiled, and kernels chosen, in the first of them."""

Pass = Callable[..., Tensor]
"""Forward and backward of some tensors: adds to the gradients and returns the loss, 0-d."""


class ReleasedUpdates(Protocol):
    """The updates of weights that a backward pass makes: `dither.optim.ReleasedGradients`."""

    enabled: bool

    def begin(self) -> object:
        """Begin a step: write its numbers to the device. Return what its kernels depend on besides these."""

    def captured(self) -> Any:
        """Return the updates of the pass that was just captured."""

    def replayed(self, updates: Any) -> None:
        """Take the updates of a replayed pass as made."""

    def cancel(self) -> None:
        """Forget the step that has begun, after a capture that failed."""


def capture_passes(model: nn.Module, run: Pass, released: ReleasedUpdates | None = None) -> "GraphedPasses":
    """Return a function that replays `run`, a forward and backward pass, as a CUDA graph from the fourth step on.

    The result takes the tensors that `run` takes, always of the same shapes and dtypes, and returns the loss; losses and
    gradients have the same bits as those of `run`. Call it inside `dither.step_context`, once per micro-batch, and let
    `optimizer.zero_grad()` set gradients to None after the step, as it does by default. The gradients of captured passes are
    the same tensors in each step, so copy one that is kept. Random bits, learning rates and plans change from step to step as
    usual: a plan that brings other constants leads to another capture. Evaluate with the model itself.

    Args:
        model: A model on a GPU, best compiled by `dither.compile`. Several ranks, and a GradScaler, are not supported.
        run: A function that computes the loss of some tensors, calls backward, and returns the loss. It must not wait for the
            device, as by `loss.item()`.
        released: What `dither.optim.release_gradients` returned, if gradients are released: their updates are captured too.

    A training loop, on a GPU:

        passes = dither.capture_passes(model, run)
        for step, (tokens, targets) in enumerate(batches):
            with dither.step_context(model, step=step):
                loss = passes(tokens, targets)
            optimizer.step()
            optimizer.zero_grad()
    """
    if not isinstance(model, nn.Module) or not callable(run):
        raise UserError(f"capture_passes takes a model and a function, not {type(model).__name__} and {type(run).__name__}.")
    devices = {parameter.device for parameter in model.parameters()}
    if {device.type for device in devices} != {"cuda"} or len(devices) > 1:
        names = ", ".join(sorted(map(str, devices))) or "nowhere"
        raise UserError(f"capture_passes takes a model on one GPU, and the parameters of this one are on {names}.")
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise UserError("capture_passes does not capture the communication of several ranks: run the passes without it.")
    return GraphedPasses(model, run, released=released)


class GraphedPasses:
    """Passes over micro-batches that are captured after a few steps and replayed from then on.

    There are two graphs. The one for the first micro-batch of a step sets gradients, the one for the others adds to them. Both
    are captured again when a layer's constants or the place of a tensor change. Steps that measure magnitudes now and then
    (`dither.nn.delayed`) run as usual, and the graphs stay.

    Args:
        model: The model whose parameters get gradients.
        run: The pass, which must not wait for the device.
        say: Called with a sentence if a pass cannot be captured, or if its inputs have changed their shape; the pass then runs
            as usual. Without it, both are errors.
        released: The updates that the backward pass makes, which are part of the graph; None if it makes none. Passes in which
            these are not enabled run as usual.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Pass,
        say: Callable[[str], None] | None = None,
        released: ReleasedUpdates | None = None,
    ) -> None:
        self.run, self.say, self.released = run, say, released
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.layers = [module for module in model.modules() if isinstance(module, Linear)]
        self.possible = True
        """False after a capture that failed."""
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._forget(())

    def _forget(self, key: tuple[object, ...]) -> None:
        self.key, self.steps = key, 0
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self.losses: dict[bool, Tensor] = {}
        self.rows: dict[bool, int] = {}
        """Rows that a layer draws for in each graph."""
        self.gradients: list[Tensor | None] = []
        self.inputs: list[Tensor] = []
        self.updates: dict[bool, Any] = {}
        """The updates of released gradients in each graph."""

    def __call__(self, *inputs: Tensor, first: bool | None = None) -> Tensor:
        """Run or replay the pass. Return its loss, 0-d.

        `first` says that the parameters have no gradients yet; by default this is looked up.
        """
        released = self.released
        if not self.possible or (released is not None and not released.enabled):
            return self._run(inputs)
        step = self._step()
        measuring = any(layer.delayed.records and layer.delayed.every > 1 for layer in self.layers)
        first = all(parameter.grad is None for parameter in self.parameters) if first is None else first
        self._check_shapes(inputs)
        if first or released is not None:  # released gradients have one pass per step
            memory = tuple(parameter.data_ptr() for parameter in self.parameters)
            updates = None if released is None else released.begin()
            key = (*self.shapes, memory, updates, *(layer.cache_key() for layer in self.layers))
            if key != self.key:
                self._forget(key)
            self.steps += not measuring
        if self.steps <= WARMUP or measuring:
            return self._run(inputs)
        if first not in self.graphs and not self._capture(inputs, first=first):
            return self._run(inputs)
        for memory_of, given in zip(self.inputs, inputs, strict=True):
            memory_of.copy_(given)
        if first:
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient
        if step is not None:
            step.move_rows(self.rows[first])
        self.graphs[first].replay()
        if released is not None:
            released.replayed(self.updates[first])
        return self.losses[first].clone()  # the next replay overwrites it

    def _run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the pass as usual.

        A loss with its graph would keep nodes of autograd alive, which add gradients on the stream that they were made on: not
        on that of a later capture.
        """
        return self.run(*inputs).detach()

    def _step(self) -> StepContext | None:
        """Return the current step if its rows are counted; None if they are given, or if no layer draws random bits."""
        drawing = [layer for layer in self.layers if layer.draw_place is not None and not layer.precision.plain]
        steps = [layer.draws.step for layer in drawing]
        if any(step is None for step in steps):
            raise UserError(
                f"The layer {drawing[0].name!r} draws random bits, which a captured pass takes from the step: call it inside "
                "`with dither.step_context(model, step=...)`."
            )
        step = steps[0] if steps else None
        return step if isinstance(step, StepContext) and not step.given else None

    def _check_shapes(self, inputs: tuple[Tensor, ...]) -> None:
        shapes = [(given.shape, given.dtype) for given in inputs]
        if self.say is None and self.shapes and shapes != self.shapes:
            shown = [" and ".join(f"{list(shape)} ({dtype})" for shape, dtype in each) for each in (self.shapes, shapes)]
            raise UserError(
                f"Captured passes take tensors of the same shapes in every call, here {shown[0]}, not {shown[1]}: pad the "
                "batches, or run others without capture_passes."
            )
        self.shapes = shapes

    def _capture(self, inputs: tuple[Tensor, ...], *, first: bool) -> bool:
        """Capture a pass, without running it. Return False if that is impossible."""
        memory = torch.cuda.get_device_properties(inputs[0].device).total_memory
        if self.say is not None and 2 * torch.cuda.max_memory_allocated() > memory:
            # A graph keeps the memory of its pass, and evaluations need memory of their own.
            self.possible = False
            self.say("Passes run without CUDA graphs, since a step needs more than half of the GPU's memory.")
            return False
        graph = torch.cuda.CUDAGraph()
        before = [parameter.grad for parameter in self.parameters]
        if first:
            self.inputs = [given.clone() for given in inputs]
            for parameter in self.parameters:
                parameter.grad = None
        for layer in self.layers:
            layer.draws.captured = 0
        # Weights that autocast has cast before would be read from where a replay does not write them.
        torch.clear_autocast_cache()
        # A failed capture leaves the generator's own state in capture mode, in which it draws no more.
        generator = torch.cuda.default_generators[inputs[0].device.index]
        state = generator.clone_state()
        try:
            pool = None if first or True not in self.graphs else self.graphs[True].pool()
            # Other threads may copy weights to the host for a checkpoint meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                loss = self.run(*self.inputs).detach()
            self.rows[first] = self._drawn_rows()
            if self.released is not None:
                self.updates[first] = self.released.captured()
                self.released.begin()
        except (RuntimeError, UserError) as error:
            torch.cuda.synchronize()
            generator.graphsafe_set_state(state)
            if self.released is not None:
                self.released.cancel()
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            self._forget(self.key)
            self.possible = False
            why = str(error).splitlines()[0]
            if self.say is None:
                raise UserError(f"The pass cannot be captured as a CUDA graph: {why}") from None
            self.say(f"Passes run without CUDA graphs, since they cannot be captured: {why}")
            return False
        finally:
            torch.clear_autocast_cache()
        if first:
            self.gradients = [parameter.grad for parameter in self.parameters]
        self.graphs[first], self.losses[first] = graph, loss
        return True

    def _drawn_rows(self) -> int:
        """Return the rows that each layer draws for in the graph just captured; raise if layers differ."""
        counts = {layer.draws.captured for layer in self.layers if layer.draw_place is not None and layer.draws.captured}
        if len(counts) > 1:
            raise UserError(
                "its layers draw random bits for different numbers of rows: give them by step_context(...).row(...)."
            )
        return counts.pop() if counts else 0
