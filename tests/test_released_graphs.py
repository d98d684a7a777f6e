"""Backward passes that update weights, captured as CUDA graphs: on a CPU, where a tape of operations stands for a graph.

A replay computes the recorded operations again, on the same tensors. As in a graph, what Python does in the pass is done once,
at the capture, and what it computes stays: numbers, and where tensors are. An operation that waits for the device is refused.
Unlike a graph, a capture runs the pass, and undoes what it changed. The optimizer's operations, which read numbers on a CPU,
are recorded as a whole: they are one kernel each on a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import TokenNet, same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dither
from dither import UserError
from dither.nn import GraphedPasses
from dither.ops.reference import adamw
from dither.optim import Role, Training, training
from dither.train.passes import uses_graphs


class Tape(TorchDispatchMode):
    """Records operations, with the tensors they read and wrote."""

    running: "Tape | None" = None
    """The tape of the capture under way."""

    def __init__(self) -> None:
        super().__init__()
        self._within = False  # an operation that is recorded as a whole
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record one operation."""
        kwargs = kwargs or {}
        if self._within:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._keep(given if func._schema.is_mutable else ())
        result = func(*args, **kwargs)
        memory = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        fresh = [x for x in made if x.untyped_storage().data_ptr() not in memory]
        # New tensors of operations that only look at their arguments are computed again; views and changes are as they were.
        self.operations.append((func, args, kwargs, made if len(fresh) == len(made) else []))
        return result

    def whole(self, func: Any, args: Any, kwargs: Any, changed: Sequence[Tensor]) -> Any:
        """Run and record a function of several operations, which changes some tensors."""
        self._within = True
        self._keep(changed)
        result = func(*args, **kwargs)
        self._within = False
        self.operations.append((func, args, kwargs, [x for x in tree_leaves(result) if isinstance(x, Tensor)]))
        return result

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            self._before.setdefault(id(x), (x, x.clone()))

    def undo(self) -> None:
        """Restore what the recorded operations have changed."""
        for x, values in reversed(self._before.values()):
            x.copy_(values)

    @torch.no_grad()
    def replay(self) -> None:
        """Compute everything again."""
        for func, args, kwargs, made in self.operations:
            results = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for x, values in zip(made, results, strict=False):
                x.copy_(values)


def recorded(func: Any, changed: Callable[..., Sequence[Tensor]]) -> Any:
    """Return a function that a tape records as a whole; `changed` returns the tensors that it changes."""

    @wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        tape = Tape.running
        return func(*args, **kwargs) if tape is None else tape.whole(func, args, kwargs, changed(*args))

    return run


@pytest.fixture
def taped_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """Let `GraphedPasses` capture passes on a CPU; return the tapes made so far."""
    tapes: list[Tape] = []

    @contextmanager
    def graph(tape: Tape, **_: object) -> Iterator[None]:
        tapes.append(tape)
        Tape.running = tape
        try:
            with tape:
                yield
        finally:
            Tape.running = None
            with torch.no_grad():
                tape.undo()

    state = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", {None: state})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**40))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Tape.running is not None)
    monkeypatch.setattr(adamw, "prepare", recorded(adamw.prepare, lambda hyper, steps, skipped, *_: [steps, skipped]))

    def changed(batch: Any, gradients: Sequence[Tensor], *_: object) -> list[Tensor]:
        return [*gradients, *(x for piece in batch.pieces for x in adamw._tensors(piece).values())]

    for kind, name in ((adamw.Batch, "step"), (adamw.MiniBatch, "step"), (adamw.MuonBatch, "momentum")):
        monkeypatch.setattr(kind, name, recorded(vars(kind)[name], changed))
    return tapes


# Training ----------------------------------------------------------------------------------------------------------------


def net() -> TokenNet:
    torch.manual_seed(0)
    return TokenNet(words=16, width=32, inner=32, blocks=2, tied=True)


def started(recipe: str = "", **options: Any) -> Training:
    """A small model whose gradients are released."""
    model = net()
    if recipe:
        dither.convert(model, recipe)
    return training(model, "o1", lr=1e-2, release=True, **{"nonfinite": "skip", **options})


def pass_of(run: Training) -> Any:
    def one(tokens: Tensor) -> Tensor:
        with run.forward():
            loss = run.model(tokens, False)  # one parameter is never used
        run.backward(loss)
        return loss

    return one


def train(run: Training, steps: range, passes: Any) -> list[Tensor]:
    """Train with another learning rate and other tokens in each step; return losses and norms."""
    found = []
    for step in steps:
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        tokens = torch.randint(16, (20,), generator=torch.Generator().manual_seed(step))
        with dither.step_context(run.model, step=step):
            found.append(passes(tokens).detach())
        run.step()
        found += [] if run.optimizer.grad_norm is None else [run.optimizer.grad_norm]
    return found


def everything(run: Training) -> list[Tensor]:
    found = [p.detach() for p in run.model.parameters()]
    for p in run.model.parameters():
        found += [value for _, value in sorted(run.optimizer.state[p].items())]
    return [x.clone() for x in (*found, run.optimizer.steps, run.optimizer.skipped)]


pytestmark = pytest.mark.filterwarnings("ignore:step_context has no effect")

ROLES = {name: Role.whole() if p.dim() < 2 else Role.rows_each(1) for name, p in net().named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "fp8-current", "states": "companded8", "block": 16},
        {"recipe": "fp4-block", "max_norm": 0.05, "clip_norm": "previous"},
        {"nonfinite": "unchecked"},
        {"roles": ROLES},
        {"muon": {}},
    ],
    ids=["fp8", "clipped", "unchecked", "mini", "muon"],
)
def test_replays_have_the_bits_of_ordinary_passes(options: dict[str, Any], taped_graphs: list[Tape]) -> None:
    """Rates, step numbers, norms and random bits of a replay are those of its step, not of the captured one."""
    ordinary, graphed = started(**options), started(**options)
    passes = GraphedPasses(graphed.model, pass_of(graphed), released=graphed.optimizer.released)
    expected, found = train(ordinary, range(8), pass_of(ordinary)), train(graphed, range(8), passes)
    assert len(taped_graphs) == 1  # in the fifth step; the first made the states
    assert same(expected, found)
    assert same(everything(ordinary), everything(graphed))
    assert all(p.grad is None for p in graphed.model.parameters())


def test_a_block_is_updated_by_one_launch_per_format_of_states(taped_graphs: list[Tape]) -> None:
    """Matrices have 8-bit states, vectors float32 ones; the constants of the step are computed once."""
    run = started("fp8-current", states="companded8", block=16)
    train(run, range(5), GraphedPasses(run.model, pass_of(run), released=run.optimizer.released))
    calls = [getattr(func, "__qualname__", "") for func, *_ in taped_graphs[0].operations]
    assert calls.count("prepare") == 1
    assert calls.count("Batch.step") == 2 * len(run.model.layers) + 1  # and the embedding


def test_a_loaded_state_is_captured_anew(taped_graphs: list[Tape]) -> None:
    options = {"max_norm": 0.05, "clip_norm": "previous"}
    ordinary, graphed = started(**options), started(**options)
    passes = GraphedPasses(graphed.model, pass_of(graphed), released=graphed.optimizer.released)
    for run, each in ((ordinary, pass_of(ordinary)), (graphed, passes)):
        train(run, range(6), each)
        run.load_state_dict(run.state_dict())
        train(run, range(6, 13), each)
    assert len(taped_graphs) == 2
    assert same(everything(ordinary), everything(graphed))


def test_a_loss_that_is_not_finite_is_skipped_in_a_replay(taped_graphs: list[Tape]) -> None:
    run = started(max_norm=1.0, clip_norm="previous")
    factor = torch.ones(())

    def one(tokens: Tensor) -> Tensor:
        loss = run.model(tokens, False) * factor
        run.backward(loss)
        return loss

    passes = GraphedPasses(run.model, one, released=run.optimizer.released)
    train(run, range(5), passes)
    before = everything(run)[:-1]
    factor.fill_(torch.nan)
    train(run, range(5, 6), passes)
    assert same(before, everything(run)[:-1])
    assert (int(run.optimizer.skipped), len(taped_graphs)) == (1, 1)
    factor.fill_(1.0)
    train(run, range(6, 7), passes)
    assert run.optimizer.grad_norm.isfinite()
    assert int(run.optimizer.steps) == 6


def test_a_failed_capture_changes_nothing(taped_graphs: list[Tape]) -> None:
    """Some units were updated on the tape before it failed; the step is then taken as usual."""
    ordinary, graphed = started(), started()

    def waits(_: Tensor) -> None:
        if Tape.running is not None:
            float(torch.ones(()))

    graphed.model.layers[0].up.weight.register_hook(waits)
    said: list[str] = []
    passes = GraphedPasses(graphed.model, pass_of(graphed), said.append, graphed.optimizer.released)
    train(ordinary, range(6), pass_of(ordinary))
    train(graphed, range(6), passes)
    assert [text.startswith("Passes run without CUDA graphs, since they cannot be captured") for text in said] == [True]
    assert same(everything(ordinary), everything(graphed))


def test_passes_that_only_look_at_gradients_run_as_usual(taped_graphs: list[Tape]) -> None:
    run = started()
    passes = GraphedPasses(run.model, pass_of(run), released=run.optimizer.released)
    train(run, range(5), passes)
    before = everything(run)
    run.optimizer.released.enabled = False
    passes(torch.zeros(20, dtype=torch.int64))
    assert run.model.layers[0].up.weight.grad is not None
    assert same(before, everything(run))


def test_passes_that_cannot_be(taped_graphs: list[Tape]) -> None:
    run = started()
    with pytest.raises(UserError, match=r"capture it by dither.capture_passes\(model, run, released=optimizer.released\)"):
        train(run, range(6), GraphedPasses(run.model, pass_of(run)))
    other = started()
    passes = GraphedPasses(other.model, pass_of(other), released=other.optimizer.released)
    train(other, range(5), passes)
    passes(torch.zeros(20, dtype=torch.int64))
    with pytest.raises(UserError, match=r"A second backward pass came before optimizer.step\(\)"):
        passes(torch.zeros(20, dtype=torch.int64))


def test_the_trainer_captures_released_gradients_unless_states_lie_in_host_memory() -> None:
    one_gpu: Any = SimpleNamespace(device=torch.device("cuda"), world=1)
    assert uses_graphs(None, one_gpu, started(), 1, compiled=True)
    streamed = started(states_on="host")
    assert not uses_graphs(None, one_gpu, streamed, 1, compiled=True)
    with pytest.raises(UserError, match="since released gradients update states in host memory: leave it out"):
        uses_graphs(True, one_gpu, streamed, 1, compiled=True)
