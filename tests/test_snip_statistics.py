"""Statistics of a step: norms against float64 autograd, errors of casts, what an optimizer will do; nothing changes."""

import json
import math
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dither
from dither import LayerPrecision, Plan, Stream, UserError
from dither.optim import AdamMini, AdamW, Role
from dither.snip import Statistics, collecting, options, update_rules_of

LEVELS = ("fp8-block", "fp4-block")
CHOSEN = options("fp8-block,fp4-block")
STREAM = Stream(0, "snip", "")


class Net(nn.Module):
    """Two layers that read one input, and one that reads what they make of it: as in attention, gradients of inputs add up."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(40, 24), nn.Linear(40, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        return self.out(self.left(h) * torch.sigmoid(self.right(h))).square().mean()


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


def net(kind: type[Net] = Net, plan: Plan | str = Plan(default=LayerPrecision())) -> Net:  # noqa: B008 (frozen)
    torch.manual_seed(0)
    model = kind()
    dither.convert(model, plan)
    return model


def inputs(count: int = 2, tokens: int = 50) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, 40, generator=generator, requires_grad=True) for _ in range(count)]


def stepped(model: nn.Module, make=lambda p: torch.optim.AdamW(p, lr=1e-2), steps: int = 3):
    """An optimizer that has a state."""
    optimizer = make(list(model.named_parameters()))
    for x in inputs(steps):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def collected(model: nn.Module, optimizer, batches) -> Statistics:
    with collecting(model, CHOSEN, stream=STREAM) as seen:
        total = 0.0
        for x in batches:
            loss = model(x) / len(batches)
            loss.backward()
            total += loss.detach()
    weights = {name: getattr(model, name).weight for name in ("left", "right", "out")}
    return seen.statistics(update_rules_of(optimizer, weights), step=7, loss=total)


def test_options_are_all_combinations():
    assert [option.name for option in CHOSEN] == [f"{a}/{b}/{c}" for a in LEVELS for b in LEVELS for c in LEVELS]
    assert CHOSEN[0].precision == dither.recipe("fp8-block").default
    assert CHOSEN[-1].precision == dither.recipe("fp4-block").default
    assert [option.name for option in options("bf16,fp8-block")] == [
        "bf16/bf16/bf16",
        "fp8-block/fp8-block/fp8-block",
    ]  # no units multiply mixtures
    assert options("bf16,fp8-block")[0].precision == LayerPrecision()
    assert len(options("bf16,mxfp8")) == 8  # which BF16 units do
    assert all(option.runs for option in (*CHOSEN, *options("bf16,fp8-block,fp6-block,fp4-block,mxfp4,nvfp4")))
    e5m2 = LayerPrecision.of(*["e5m2 tile(128)"] * 3)
    assert [option.name for option in options(["fp8-current", e5m2]) if not option.runs] == ["e5m2/e5m2/e5m2"]  # a level stays
    assert options(CHOSEN) == CHOSEN
    # Levels without names are called by their formats, or by all of the cast where those meet.
    mx, fp4 = LayerPrecision.of(*["mxfp4"] * 3), LayerPrecision.of(*["e2m1 tile(128)"] * 3)
    assert options([mx, "fp8-block"])[0].name == "e2m1/e2m1/e2m1"
    assert options([mx, fp4])[0].name == "/".join(["e2m1 tile(32) pow2 nearest"] * 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fp8", "nothing to choose between"),
        ("fp8,fp9", "There is no level 'fp9'"),
        (["fp8-block", 4], "a LayerPrecision, not 4"),
        (["fp8-block", LayerPrecision(sampling=dither.Sampling())], "options only cast"),
        ([CHOSEN[0], CHOSEN[0]], "Two options have the same name"),
    ],
)
def test_options_that_are_none_are_named(given, said):
    with pytest.raises(UserError, match=said):
        options(given)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        *product([Net, Checkpointed], ["everything", "weights", "weights of inputs that need none"]),
        (Reentrant, "everything"),  # torch does not differentiate it by some inputs alone
    ],
)
def test_norms_are_those_of_float64_autograd(kind, asked):
    """Also of gradients of inputs that nobody asks for, so that autograd does not compute them."""
    model, batches = net(kind), inputs()
    optimizer = stepped(model)
    if asked == "everything":
        statistics = collected(model, optimizer, batches)
    else:
        weights = {name: getattr(model, name).weight for name in ("left", "right", "out")}
        with collecting(model, CHOSEN, stream=STREAM) as seen:
            losses = [model(x if asked == "weights" else x.detach()) / len(batches) for x in batches]
            parts = [torch.autograd.grad(loss, list(weights.values())) for loss in losses]
        gradients = dict(zip(weights, map(sum, zip(*parts, strict=True)), strict=True))
        statistics = seen.statistics(
            update_rules_of(optimizer, weights), step=7, loss=sum(losses).detach(), gradients=gradients
        )
    found = {layer.name: layer for layer in statistics.layers}

    wide = Net().double()
    wide.load_state_dict(model.state_dict())
    x = torch.cat([b.detach().double() for b in batches])
    h = torch.tanh(x)
    h_left, h_right = h.clone().requires_grad_(), h.clone().requires_grad_()  # one copy for each reader
    left, right = wide.left(h_left), wide.right(h_right)
    mixed = left * torch.sigmoid(right)
    mixed.retain_grad(), left.retain_grad(), right.retain_grad()
    out = wide.out(mixed)
    out.retain_grad()
    out.square().mean().backward()
    for name, tensors in {
        "left": (h_left, wide.left.weight, left),
        "right": (h_right, wide.right.weight, right),
        "out": (mixed, wide.out.weight, out),
    }.items():
        layer, (x_, w, y) = found[name], tensors
        expected = {"x": x_, "w": w, "y": y, "dy": y.grad, "dx": x_.grad, "dw": w.grad}
        for key, tensor in expected.items():
            assert layer.norms[key] == pytest.approx(tensor.norm().item(), rel=1e-5), (name, key)
        assert layer.M == 100
        assert w.shape == (layer.N, layer.K)


def test_errors_and_rows_are_those_of_the_casts():
    model, (x,) = net(), inputs(1)
    optimizer = stepped(model)
    layer = collected(model, optimizer, [x]).layers[0]
    h, w = torch.tanh(x.detach()), model.left.weight.detach()
    gradient = model.left.weight.grad
    for option in (CHOSEN[0], CHOSEN[-1]):
        error = dither.fake_quantize(h, option.input) - h
        assert layer.error("input", option.input) == pytest.approx(error.norm().item(), rel=1e-5)
        wrong = dither.fake_quantize(w, option.weight) - w
        assert layer.error("weight", option.weight) == pytest.approx(wrong.norm().item(), rel=1e-5)
        by_rows = sum(g.square().sum() * e.square().sum() for g, e in zip(gradient, wrong, strict=True)) / 40
        assert layer.rows["weight"][str(option.weight)] == pytest.approx(math.sqrt(by_rows), rel=1e-4)
        assert layer.deviation("input", option.input) == pytest.approx(error.square().mean().sqrt().item(), rel=1e-5)
    assert 0 < layer.error("grad", CHOSEN[0].grad) < layer.error("grad", CHOSEN[-1].grad) < layer.norms["dy"]
    assert layer.error("input", None) == 0.0
    # Row by row and all at once agree where rows are alike, and never differ by more than their inequality allows.
    at_once = layer.norms["dx"] * layer.deviation("input", CHOSEN[0].input)
    assert at_once / 3 < layer.rows["input"][str(CHOSEN[0].input)] < at_once * 3


def test_under_autocast_errors_are_those_of_the_converted_input():
    model, (x,) = net(), inputs(1)
    optimizer = stepped(model)
    with torch.autocast("cpu", torch.bfloat16):
        layer = collected(model, optimizer, [x]).layers[0]
    h = torch.tanh(x.detach()).bfloat16()
    assert layer.norms["x"] == pytest.approx(h.float().norm().item(), rel=1e-6)
    for option in (CHOSEN[0], CHOSEN[-1]):
        error = (dither.fake_quantize(h, option.input) - h).float()
        assert layer.error("input", option.input) == pytest.approx(error.norm().item(), rel=1e-6)


@pytest.mark.parametrize("plan", ["fp4-block", "fp8-delayed"])
def test_collecting_changes_nothing(plan):
    def train(collects: bool) -> list[torch.Tensor]:
        model = net(plan=plan)
        optimizer = AdamW(model.named_parameters(), lr=1e-2)
        for step, x in enumerate(inputs(4)):
            with dither.step_context(model, step=step):
                if collects:
                    with collecting(model, CHOSEN, stream=STREAM) as seen:
                        loss = model(x)
                        loss.backward()
                else:
                    loss = model(x)
                    loss.backward()
            if collects and step:
                weights = {name: getattr(model, name).weight for name in ("left", "right", "out")}
                seen.statistics(update_rules_of(optimizer, weights), step=step, loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_compiled_models_are_seen():
    model = net()
    optimizer = stepped(model)
    plainly = collected(model, optimizer, inputs())
    model.zero_grad()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    compiled(inputs()[0])  # compiled before there are hooks
    with collecting(model, CHOSEN, stream=STREAM) as seen:
        total = 0.0
        for x in inputs():
            loss = compiled(x) / 2
            loss.backward()
            total += loss.detach()
    weights = {name: getattr(model, name).weight for name in ("left", "right", "out")}
    assert seen.statistics(update_rules_of(optimizer, weights), step=7, loss=total) == plainly


def test_statistics_survive_json():
    model = net()
    statistics = collected(model, stepped(model), inputs())
    assert Statistics.from_dict(json.loads(json.dumps(statistics.to_dict()))) == statistics
    assert (statistics.step, len(statistics.layers)) == (7, 3)
    with pytest.raises(UserError, match="version 1"):
        Statistics.from_dict({**statistics.to_dict(), "version": 2})
    with pytest.raises(UserError, match="as this version writes"):
        Statistics.from_dict({"version": 1, "step": 1})


def test_a_nan_is_named_by_its_layer():
    model = net()
    optimizer = stepped(model)
    with torch.no_grad():
        model.right.weight[3, 5] = math.nan
    with pytest.raises(UserError, match="loss of step 7 is nan"):
        collected(model, optimizer, inputs())
    model = net()
    optimizer = stepped(model)
    model.right.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([2]), math.nan))
    with pytest.raises(UserError, match=r"'right' hold nan \(dw\)"):
        collected(model, optimizer, inputs())


def test_layers_that_are_missing_are_named():
    model = net()
    optimizer = stepped(model)
    weights = {name: getattr(model, name).weight for name in ("left", "right", "out")}
    with collecting(model, CHOSEN, stream=STREAM) as seen:
        pass
    with pytest.raises(UserError, match="'left' took no part"):
        seen.statistics(update_rules_of(optimizer, weights), step=0, loss=1.0)
    with pytest.raises(UserError, match="convert it first"), collecting(Net(), CHOSEN, stream=STREAM):
        pass
    model.out.weight.requires_grad_(False)
    with pytest.raises(UserError, match="'out' is frozen"), collecting(model, CHOSEN, stream=STREAM):
        pass


ROLES = {f"{name}.weight": Role.rows_each(rows) for name, rows in (("left", 8), ("right", 1), ("out", 8))}
ROLES |= {f"{name}.bias": Role.whole() for name in ("left", "right", "out")}
OPTIMIZERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95)),
    "fp32": lambda p: AdamW(p, lr=1e-2, states="fp32"),
    "bf16": lambda p: AdamW(p, lr=1e-2, states="bf16"),
    "dynamic8": lambda p: AdamW(p, lr=1e-2, states="dynamic8", block=16),
    "int8": lambda p: AdamW(p, lr=1e-2, states="int8", block=16),
    "e4m3": lambda p: AdamW(p, lr=1e-2, states="e4m3", block=16),
    "mini": lambda p: AdamMini(p, ROLES, lr=1e-2),
    "transposed": lambda p: AdamMini(p, ROLES | {"left.weight": Role.rows_each(4, transposed=True)}, lr=1e-2, weight_decay=0.1),
    "maximize": lambda p: AdamW(p, lr=1e-2, weight_decay=0.0, states="fp32", maximize=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_those_of_the_optimizers_step(kind):
    model = net()
    optimizer = stepped(model, OPTIMIZERS[kind])
    before = {name: getattr(model, name).weight.detach().clone() for name in ("left", "right", "out")}
    moments = update_rules_of(optimizer, {name: getattr(model, name).weight for name in before})
    model(inputs()[0]).backward()
    expected = {name: moments[name].update(getattr(model, name).weight.grad) for name in before}
    decay = 1 - 1e-2 * optimizer.param_groups[0]["weight_decay"]
    optimizer.step()
    for name, old in before.items():
        moved = decay * old - getattr(model, name).weight.detach()
        assert torch.allclose(moved, expected[name], rtol=1e-4, atol=2e-7), name


@pytest.mark.parametrize("kind", ["dynamic8", "mini"])
def test_slopes_are_derivatives_of_updates(kind):
    """h' is AdamW's derivative where eps does not matter; with Adam-mini, the diagonal of it."""
    model = net()
    optimizer = stepped(model, OPTIMIZERS[kind])
    moments = update_rules_of(optimizer, {"left": model.left.weight})["left"]
    model(inputs()[0]).backward()
    g = model.left.weight.grad.double()
    wide = type(moments)(moments.m.double(), moments.v.double(), moments.t, moments.lr, moments.betas, moments.eps,
                         moments.runs, moments.transposed)  # fmt: skip

    def moved(row: int, column: int, by: float) -> float:
        changed = g.clone()
        changed[row, column] += by
        m, v = wide.after(changed)
        b1, b2 = wide.betas
        return (wide.lr / (1 - b1**wide.t) * m / ((v / (1 - b2**wide.t)).sqrt() + wide.eps))[row, column].item()

    slope = moments.slope(model.left.weight.grad)
    for row, column in ((0, 0), (5, 7), (23, 39)):
        tiny = 1e-4 * float(moments.v[row, column].sqrt())
        derivative = (moved(row, column, tiny) - moved(row, column, -tiny)) / (2 * tiny)
        assert slope[row, column].item() == pytest.approx(abs(derivative), rel=2e-3)


def test_optimizers_without_moments_are_refused():
    model = net()
    weights = {"left": model.left.weight}
    with pytest.raises(UserError, match="no state of the layer 'left' yet"):
        update_rules_of(AdamW(model.named_parameters()), weights)
    with pytest.raises(UserError, match="does not have the weight of the layer 'left'"):
        update_rules_of(torch.optim.AdamW(model.out.parameters()), weights)


def test_moments_are_read_when_they_are_asked_for():
    layer = dither.Linear(8, 4, name="up")
    optimizer = dither.optim.AdamW([("up.weight", layer.weight)], lr=1e-2, states="dynamic8")
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    found = update_rules_of(optimizer, {"up": layer.weight})
    assert (list(found), len(found)) == (["up"], 1)
    before = found["up"]
    optimizer.step()
    assert (before.t, found["up"].t) == (2, 3)
    assert bool((found["up"].m > before.m).all())
