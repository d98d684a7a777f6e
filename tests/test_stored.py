"""Weights that exist only as FP8 codes: their rounding, their layers, and what the optimizer makes of them."""

import copy
import weakref
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor, nn

import dither
from dither import Cast, LayerPrecision, UserError
from dither.checkpoint import pack, unpack
from dither.nn import Linear, StoredLinear, restore_weights, store_weights
from dither.ops.reference import weight_codes
from dither.optim import AdamW, Muon, muon_groups

# Rounding -------------------------------------------------------------------------------------------------------------


def moved_weights(block: int) -> tuple[Tensor, Tensor]:
    """Codes of a matrix under their scales, and float32 weights after a step that makes some groups larger, some smaller."""
    generator = torch.Generator().manual_seed(block)
    start = torch.ldexp(torch.randn(40, 72, generator=generator), torch.randint(-9, 1, (40, 72), generator=generator))
    codes, scale = weight_codes.encode(start, block, None)
    w = weight_codes.decode(codes, scale, block)
    step = torch.ldexp(torch.randn(w.shape, generator=generator), torch.randint(-14, -3, w.shape, generator=generator))
    step[3, 5] = 4 * w.abs().max()  # its group's scale doubles at least twice
    w[8:32] /= 64.0  # and theirs shrink
    return w - step, scale


@pytest.mark.parametrize("block", [0, 32])
def test_the_mean_over_all_draws_is_the_weight(block: int) -> None:
    """Exactly, whatever becomes of the scale: k of the 2^24 draws round up, where k / 2^24 is the place between neighbours.

    Rounding is monotonic in the draw, so that the two draws beside the border tell k.
    """
    w, before = moved_weights(block)
    scale = weight_codes.scales(weight_codes.group_amax(w, block))
    assert bool((scale > before).any())
    if block:
        assert bool((scale < before).any())
    least = weight_codes.spread(scale, block, *w.shape).expand(w.shape) * 2.0**-9
    checked = 0
    low, _ = weight_codes.encode(w, block, torch.zeros(w.shape, dtype=torch.int32))
    high, _ = weight_codes.encode(w, block, torch.full(w.shape, 2**24 - 1, dtype=torch.int32))
    below, above = (weight_codes.decode(codes, scale, block).double() for codes in (low, high))
    border = torch.full(w.shape, 2**24, dtype=torch.int32)
    for row, column in [(r, c) for r in range(40) for c in range(72) if low[r, c] != high[r, c]]:
        x, one, two = (Fraction(float(t[row, column])) for t in (w, below, above))
        place = (x - one) / (two - one) * 2**24
        if abs(x) >= Fraction(float(least[row, column])):
            assert place.denominator == 1
            checked += 1
        border[row, column] -= int(place)  # truncated below the least number
    assert checked > 1000
    first, _ = weight_codes.encode(w, block, border.clamp(max=2**24 - 1))
    last, _ = weight_codes.encode(w, block, border - 1)
    differs = low.view(torch.uint8) != high.view(torch.uint8)
    up = border < 2**24
    assert torch.equal(first.view(torch.uint8)[differs & up], high.view(torch.uint8)[differs & up])
    assert torch.equal(last.view(torch.uint8)[differs], low.view(torch.uint8)[differs])


def test_the_mean_over_all_draws_is_the_largest_weight_of_a_group() -> None:
    """All 2^24 draws of a group's maximum, where the scale has just doubled."""
    w = torch.full((4096, 4096), -449.7)
    codes, scale = weight_codes.encode(w, 0, torch.arange(2**24, dtype=torch.int32).view_as(w))
    assert scale == 2
    values, counts = codes.view(torch.uint8).unique(return_counts=True)
    numbers = [Fraction(float(each)) for each in weight_codes.decode(values[None].view(torch.float8_e4m3fn), scale, 0)[0]]
    assert len(numbers) == 2
    mean = sum(number * count for number, count in zip(numbers, counts.tolist(), strict=True)) / 2**24
    assert mean == Fraction(float(w[0, 0]))


def test_scales_are_the_least_powers_of_two_that_clip_nothing() -> None:
    amax = torch.cat(
        [torch.rand(1000) * 10.0 ** torch.randint(-9, 9, (1000,)), torch.tensor([448.0, 448.00003, 1.75, 1.7500001])]
    )
    scale = weight_codes.scales(amax)
    assert bool((amax <= 448 * scale).all())
    assert bool((amax > 224 * scale).all())
    assert bool((scale.log2() == scale.log2().round()).all())


def test_a_weight_that_does_not_move_keeps_its_value() -> None:
    """Under any draw and any scale that leaves it a normal number; with scales of max / 448 all weights would move."""
    w = weight_codes.decode(*weight_codes.encode(torch.randn(32, 32), 0, None), 0)
    w = w[:, w[0].abs() > 0.1]
    w[0, 0] = 30.0  # a scale eight times as large or so
    for draw in (0, 2**24 - 1):
        codes, scale = weight_codes.encode(w, 0, torch.full(w.shape, draw, dtype=torch.int32))
        kept = weight_codes.decode(codes, scale, 0)
        normal = w.abs() >= scale * 2.0**-6
        assert bool(normal.float().mean() > 0.5)
        assert torch.equal(kept[normal], w[normal])


# Layers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["e4m3 tensor", "e4m3 block(32)"])
def test_products_are_those_of_an_ordinary_layer_with_the_same_numbers(cast: str) -> None:
    """Whose groups have the largest code as their maximum, so that its own casts lose nothing."""
    known = Cast.parse(cast)
    x8 = Cast.parse("e4m3 tensor" if known.group.kind == "tensor" else "e4m3 tile(32)")
    layer = Linear(64, 96, precision=LayerPrecision(input=x8, weight=known, grad=x8), name="up")
    with torch.no_grad():
        layer.weight[::32, ::32] = 0.4375  # 448 / 1024
    stored = StoredLinear.store(copy.deepcopy(layer), torch.float32)
    with torch.no_grad():
        layer.weight.copy_(stored.dequantize())
    x = torch.randn(48, 64)
    results = []
    for each, weight in ((layer, layer.weight), (stored, stored.learned_weight())):
        given = x.clone().requires_grad_()
        y = each(given)
        y.square().sum().backward()
        results.append([y.detach(), given.grad, weight.grad, each.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Sequential(nn.Linear(32, 160), nn.GELU()), nn.Sequential(nn.Linear(160, 32), nn.GELU()))
    dither.convert(made, "fp8-current", seed=1)
    store_weights(made, torch.float32)
    return made


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
    for step in steps:
        with dither.step_context(net, step=step):
            loss = (net(x) - x.roll(1, 1)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


OPTIMIZERS: dict[str, Callable[[nn.Module], AdamW]] = {
    "adamw": lambda net: AdamW(net.named_parameters(), lr=1e-2, states="dynamic4", block=16, nonfinite="skip"),
    "feedback": lambda net: AdamW(net.named_parameters(), lr=1e-2, states="bf16", error_feedback=True, nonfinite="skip"),
    "muon": lambda net: Muon(muon_groups(net), lr=2e-2, states="companded8", block=16, nonfinite="skip"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_resumed_and_released_has_the_same_bits(kind: str) -> None:
    optimizer_of, straight = OPTIMIZERS[kind], model()
    first, last = (
        train(straight, optimizer, steps) for optimizer in [optimizer_of(straight)] for steps in (range(3), range(3, 9))
    )
    assert last < 0.9 * first
    codes = {name: tensor.view(torch.uint8) for name, tensor in straight.state_dict().items() if name.endswith("codes")}
    assert len(codes) == 2

    released = model()
    optimizer = optimizer_of(released)
    dither.optim.release_gradients(released, optimizer)
    train(released, optimizer, range(9))

    half = model()
    optimizer = optimizer_of(half)
    train(half, optimizer, range(4))
    tensors, plain = pack(half, optimizer, step=4)
    resumed = model(seed=9)
    again = optimizer_of(resumed)
    unpack(resumed, again, {name: tensor.clone() for name, tensor in tensors.items()}, plain)
    train(resumed, again, range(4, 9))
    copied = copy.deepcopy(half)
    assert torch.equal(copied[0][0].weight, half[0][0].weight)
    for other in (released, resumed):
        state = other.state_dict()
        assert all(torch.equal(tensor, state[name].view(torch.uint8)) for name, tensor in codes.items())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_compiled_is_eager(kind: str) -> None:
    codes = []
    for compiled in (False, True):
        torch.manual_seed(3)
        net = nn.Sequential(Linear(32, 32, bias=False, precision=dither.recipe("fp8-current").default, name="0"))
        store_weights(net, torch.float32)
        if compiled:
            net[0].compile(backend="aot_eager", fullgraph=True)
        train(net, OPTIMIZERS[kind](net), range(3))
        codes.append(net[0].weight_codes.view(torch.uint8))
    assert torch.equal(*codes)


@pytest.mark.parametrize(("cast", "group"), [("e4m3 tensor", (96, 160)), ("e4m3 block(32)", (32, 32))])
def test_muon_moves_weights_as_torchs_and_rounds_them_without_bias(
    cast: str, group: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same numbers, torch's Muon in float32 gives the weights; codes are their neighbours, at random."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)  # torch rounds what it orthogonalizes
    torch.manual_seed(4)
    net = nn.Sequential(Linear(160, 96, bias=False, precision=LayerPrecision(weight=Cast.parse(cast)), name="0"))
    net[0].weight.data.mul_(torch.linspace(-6, 0, 96).exp2()[:, None])  # groups of several scales
    layer = store_weights(net, torch.float32)["0"]
    parameter, theirs = layer.learned_weight(), nn.Parameter(layer.weight.detach())
    ours, torchs = Muon(net.named_parameters(), lr=0.02, ns_dtype="fp32"), torch.optim.Muon([theirs], lr=0.02)
    values, (rows, columns) = oracles.decode("e4m3", np.arange(127)), group
    bias = variance = excess = spread = 0.0
    for _ in range(4):
        theirs.data.copy_(layer.weight.detach())
        parameter.grad = torch.randn(96, 160)
        theirs.grad = parameter.grad.clone()
        for optimizer in (ours, torchs):
            optimizer.step()
        torch.testing.assert_close(ours.state[parameter]["exp_avg"], torchs.state[theirs]["momentum_buffer"])
        exact, stored, scale = (x.detach().double().numpy() for x in (theirs, layer.weight, layer.weight_scale))
        scale = scale.reshape(96 // rows, 160 // columns)
        largest = np.abs(exact).reshape(96 // rows, rows, 160 // columns, columns).max((1, 3))
        assert ((np.log2(scale) % 1 == 0) & (224 * scale < largest) & (largest <= 448 * scale)).all()
        y, stored = (x / scale.repeat(rows, 0).repeat(columns, 1) for x in (exact, stored))
        place = np.searchsorted(values, np.abs(y), side="right") - 1
        gap = values[place + 1] - values[place]
        up = (np.abs(y) - values[place]) / gap  # the chance of the neighbour that is farther from zero
        off = (stored - y) / gap
        assert (np.abs(off) < 1.001).all()
        bias, variance = bias + off.sum(), variance + (up * (1 - up)).sum()
        excess, spread = excess + (off**2 - up * (1 - up)).sum(), spread + (up * (1 - up) * (1 - 2 * up) ** 2).sum()
    assert abs(bias) < 5 * variance**0.5
    assert abs(excess) < 5 * spread**0.5  # rounded to nearest, the squares would add up to half


def test_muon_knows_an_output_layer_whose_weight_is_stored() -> None:
    net = nn.Sequential(nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 48, bias=False))
    dither.convert(net, "fp8-current", all_layers=True)
    assert set(store_weights(net, torch.float32)) == {"1", "2"}
    names = [[name for name, _ in group["params"]] for group in muon_groups(net)]
    assert names == [["1.weight"], ["0.weight"], ["2.weight"], ["1.bias"]]


def test_numbers_moves_and_restored_weights() -> None:
    net = model()
    layer = net[0][0]
    assert sum(p.numel() for p in net.parameters()) == 2 * 32 * 160 + 192
    assert layer.to(torch.bfloat16).weight_codes.dtype == torch.float8_e4m3fn
    numbers, parameter = layer.weight, layer.learned_weight()
    with pytest.raises(UserError, match="a change of it would be lost"):
        layer.weight.mul_(2)
    with pytest.raises(UserError, match="exists as codes, and only products can"):
        parameter + 1
    restore_weights(net)
    assert type(net[0][0]) is Linear
    assert torch.equal(net[0][0].weight, numbers)


def test_a_state_with_ordinary_weights_is_rounded_to_codes() -> None:
    """And is not left out, also with strict=False."""
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Sequential(nn.Linear(32, 160), nn.GELU()), nn.Sequential(nn.Linear(160, 32), nn.GELU()))
    state, kept = plain.state_dict(), plain[0][0].weight.clone()
    net = model()
    assert not any(net.load_state_dict(state, strict=False))
    assert "0.0.weight" in state
    codes, scale = weight_codes.encode(kept, 0, None)
    assert torch.equal(net[0][0].weight, weight_codes.decode(codes, scale, 0))
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.load_state_dict({**state, "0.0.weight": torch.ones(8, 8)})


@pytest.mark.parametrize(
    ("mode", "words"),
    [("o1", "the mode 'o1' keeps weights of its own"), ("bf16-sr", r"store_weights\(model, torch.bfloat16\)")],
)
def test_training_refuses_other_modes_and_gradients(mode: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        dither.optim.training(model(), mode, lr=1e-2)


def test_weights_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    dither.convert(model, "fp8-current")
    weights, left, store = [weakref.ref(weight) for weight in model.parameters()], [], StoredLinear.store

    def counting(layer: Linear, dtype: torch.dtype) -> StoredLinear:
        left.append(sum(weight() is not None for weight in weights))
        return store(layer, dtype)

    monkeypatch.setattr(StoredLinear, "store", counting)
    store_weights(model)
    assert left == [4, 3, 2, 1]


def test_weights_are_stored_once() -> None:
    with pytest.raises(UserError, match="stored as codes already"):
        store_weights(model())


REFUSED = [
    ({"weight": Cast.parse("e4m3 tile(128)")}, {}, "casts its weight by e4m3 tile"),
    ({"weight": Cast.parse("e5m2 tensor")}, {}, "casts its weight by e5m2"),
    ({"weight": Cast.parse("e4m3 tensor")}, {"master": "fp32"}, "exists only as FP8 codes.*master='fp32'"),
    ({"weight": Cast.parse("e4m3 tensor")}, {"master": "split24"}, "exists only as FP8 codes.*master='split24'"),
    ({"weight": Cast.parse("e4m3 tensor")}, {"weights": "kahan"}, "exists only as FP8 codes.*weights='kahan'"),
]


@pytest.mark.parametrize(("casts", "options", "words"), REFUSED)
def test_what_does_not_fit_is_refused(casts: dict[str, Cast], options: dict[str, str], words: str) -> None:
    net = nn.Sequential(Linear(32, 32, precision=LayerPrecision(**casts), name="0"))
    with pytest.raises(UserError, match=words):
        _ = store_weights(net, torch.float32), AdamW(net.named_parameters(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"error_feedback": True}, "error_feedback=True is for AdamW with a second moment per weight"),
        ({"master": "fp32"}, "exists only as FP8 codes, which AdamW and Muon round.*master='fp32'"),
    ],
)
def test_what_does_not_fit_muon_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Muon(muon_groups(model()), **options)


def test_tied_weights_are_refused() -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(32, 32), "output": nn.Linear(32, 32)})
    net["output"].weight = net["embedding"].weight
    net["output"] = Linear.adopt(net["output"], LayerPrecision(), name="output")
    net["output"].set_precision(LayerPrecision(weight=Cast.parse("e4m3 tensor")))
    with pytest.raises(UserError, match="shared with another layer"):
        store_weights(net)
