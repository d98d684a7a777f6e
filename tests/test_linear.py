"""Linear layers with cast operands: gradients against float64, state, steps, compiled code, memory.

X is [M, K], W [N, K] and dY [M, N]; the reference here casts with `dither.quantize` and multiplies in float64.
"""

import copy
import io
import itertools
from collections.abc import Callable

import pairs
import pytest
import torch
from tiny import TwoLayers, conv1d, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dither
from dither import Cast, PerformanceWarning, Stream, UserError
from dither.models.causal import output_loss
from dither.nn import FrozenLinear, functional
from dither.nn.functional import State
from dither.nn.linear import Linear
from dither.nn.step import step_context
from dither.ops import backend as devices
from dither.ops.reference import quantize
from dither.spec import LayerPrecision

PRECISIONS = {
    "fp8-current": ("e4m3 tensor", "e4m3 tensor", "e5m2 tensor"),
    "fp8-row": ("e4m3 row", "e4m3 row", "e4m3 row"),
    "fp8-block": ("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)"),
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8"),
    "mxfp6": ("mxfp6", "mxfp6", "mxfp6"),
    "mxfp4": ("mxfp4", "mxfp4", "mxfp4 stochastic(16)"),
    "nvfp4": ("nvfp4", "e2m1 block(16) nvfp4", "nvfp4 stochastic(16)"),
    "fp4-block": ("e2m1 tile(128)", "e2m1 block(128)", "e2m1 tile(128) stochastic(16)"),
    "all stochastic": ("e2m1 tile(16) stochastic(8)", "e2m1 tile(32) stochastic(8)", "e2m1 row stochastic(24)"),
    "int8": ("int8 tensor", "int8 tensor", "int8 tensor"),
    "int8-row": ("int8 row", "int8 row", "int8 row"),
    "fp4 forward": (
        "e2m1 tile(16)",
        "e2m1 block(16)",
        "e5m2 tensor",
        {"input_grad.weight": "e4m3 tensor", "weight_grad.input": "e4m3 tensor"},
    ),
    "blocks of inputs": ("e4m3 tile(16)", "e4m3 block(16)", "e4m3 tile(16)", {"weight_grad.input": "e4m3 block(16)"}),
    "bf16 weight gradient": ("e4m3 tile(16)", "nvfp4", "e2m1 tile(16) stochastic(8)", {"weight_grad": "bf16"}),
    "cast backward": (
        None,
        None,
        "e2m1 tile(16) stochastic(16)",
        {"input_grad.weight": "e2m1 block(16)", "weight_grad.input": "e2m1 tile(32) stochastic(8)"},
    ),
    "two roundings": ("e4m3 row", "e4m3 row", "e2m1 row stochastic(8)", {"weight_grad.grad": "e2m1 row stochastic(24)"}),
    "input only": ("e4m3 row", None, None),
    "weight only": (None, "e2m1 tile(16)", None),
    "grad only": (None, None, "e2m1 tile(16) stochastic(16)"),
    "unscaled": ("e4m3", "bf16", "e5m2"),
}
DELAYED = ("e4m3 tensor delayed(4)", "e4m3 tensor delayed(4)", "e5m2 tensor delayed(4)")
SIZES = [(21, 40, 24), (130, 144, 160)]
SEED, NAME, STEP, ROW = 3, "layers.0.up", 7, 1000


def precision(name: str) -> LayerPrecision:
    return LayerPrecision.of(*(DELAYED if name == "fp8-delayed" else PRECISIONS[name]))


def data(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, K], W [N, K], bias [N] and dY [M, N], with rows of unlike magnitude."""
    generator = torch.Generator().manual_seed(m + k + n)
    x, w, b, dy = (torch.randn(*shape, generator=generator) for shape in ((m, k), (n, k), (n,), (m, n)))
    return x * torch.logspace(-2, 2, m)[:, None], w / 10, b, dy * 1e-4


def layer_of(how: LayerPrecision, w: Tensor, bias: Tensor | None = None, **options) -> Linear:
    layer = Linear(w.shape[1], w.shape[0], bias is not None, w.device, precision=how, name=NAME, seed=SEED, **options)
    with torch.no_grad():
        layer.weight.copy_(w)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def cast(x: Tensor, how: Cast | None, axis: int, purpose: str, row: int, step: int = STEP) -> Tensor:
    """The numbers of a cast operand in float64."""
    if how is None:
        return x.double()
    stream = Stream(SEED, purpose, NAME)
    return dither.quantize(x, how, axis=axis, stream=stream, step=step, offset=(row, 0)).dequantize(torch.float32).double()


def products(x: Tensor, w: Tensor, dy: Tensor, how: LayerPrecision) -> dict[str, tuple[Tensor, Tensor]]:
    """The operands A [P, L] and B [Q, L] of each product, cast along L."""
    fwd, dx, dw = "forward", "input_grad", "weight_grad"
    return {
        fwd: (cast(x, how.cast(fwd, "input"), 1, "input", ROW), cast(w, how.cast(fwd, "weight"), 1, "weight", 0)),
        dx: (cast(dy, how.cast(dx, "grad"), 1, "grad", ROW), cast(w, how.cast(dx, "weight"), 0, "weight", 0).T),
        dw: (cast(dy, how.cast(dw, "grad"), 0, "grad", ROW).T, cast(x, how.cast(dw, "input"), 0, "input", ROW).T),
    }


def close(result: Tensor, operands: tuple[Tensor, Tensor], bias: Tensor | None = None) -> None:
    """`result` is A B^T + bias up to float32 additions: each of L and a few more operations may round by 2^-24."""
    a, b = operands
    wanted = a @ b.T + (0 if bias is None else bias.double())
    bound = (a.shape[1] + 8) * 2.0**-24 * (a.abs() @ b.abs().T + (0 if bias is None else bias.double().abs()))
    assert result.shape == wanted.shape
    assert bool(((result.double() - wanted).abs() <= bound).all())


def run(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the gradients of x and of the parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy.reshape(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


# Values ----------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_are_those_of_the_cast_operands(name: str, size: tuple[int, int, int], with_bias: bool) -> None:
    x, w, b, dy = data(*size)
    how = precision(name)
    layer = layer_of(how, w, b if with_bias else None)
    with step_context(layer, step=STEP, row=ROW):
        y, dx, dw, *db = run(layer, x, dy)
    expected = products(x, w, dy, how)
    close(y, expected["forward"], b if with_bias else None)
    close(dx, expected["input_grad"])
    close(dw, expected["weight_grad"])
    if with_bias:
        close(db[0][:, None], (dy.double().T, torch.ones(1, dy.shape[0], dtype=torch.float64)))


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4", "all stochastic", "fp4 forward", "cast backward"])
def test_a_weight_stored_transposed_gives_the_same_products(name: str) -> None:
    """As in Hugging Face's Conv1D. Blocks and tiles are the same, but stochastic bits follow the stored coordinates."""
    x, w, b, dy = data(*SIZES[0])
    how = precision(name)
    old = conv1d(w, b)
    layer = Linear.adopt(old, how, name=NAME, seed=SEED)
    assert layer.weight is old.weight
    assert (layer.in_features, layer.out_features, layer.nf) == (w.shape[1], w.shape[0], w.shape[0])
    with step_context(layer, step=STEP, row=ROW):
        y, dx, dw, _ = run(layer, x, dy)
    expected = products(x, w, dy, how)
    casts = how.casts_of("weight")  # forward sums over the stored rows, and the input gradient over the columns
    stored = [cast(w.T.contiguous(), casts[axis], axis, "weight", 0) for axis in (0, 1)]
    close(y, (expected["forward"][0], stored[0].T), b)
    close(dx, (expected["input_grad"][0], stored[1]))
    close(dw, expected["weight_grad"][::-1])
    layer.set_precision(LayerPrecision())
    assert same(run(layer, x, dy), run(old, x, dy))


def test_leading_dimensions_are_rows() -> None:
    x, w, b, dy = data(24, 40, 16)
    layer = layer_of(precision("mxfp8"), w, b)
    flat = run(layer, x, dy)
    deep = run(layer, x.reshape(2, 3, 4, 40), dy)
    assert deep[0].shape == (2, 3, 4, 16)
    assert same([t.reshape(u.shape) for t, u in zip(deep, flat, strict=True)], flat)
    assert layer(x[0]).shape == (16,)
    assert layer(x[:0].reshape(0, 5, 40)).shape == (0, 5, 16)


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4"])
def test_strides_do_not_matter(name: str) -> None:
    """An input that lies along M, and the gradient of a sum, which is one number seen everywhere."""
    x, w, _, dy = data(*SIZES[0])
    layer = layer_of(precision(name), w)
    spread = dy[:1, :1].expand_as(dy)
    with step_context(layer, step=STEP):
        plain = run(layer, x, spread.contiguous())
        leaf = x.T.contiguous().T.requires_grad_()
        y = layer(leaf)
        assert same([y.detach(), *torch.autograd.grad(y, [leaf, layer.weight], spread)], plain)


@pytest.mark.parametrize("name", ["nvfp4", "fp8-current"])
def test_no_tokens_give_no_gradient(name: str) -> None:
    _, w, b, _ = data(*SIZES[0])
    layer = layer_of(precision(name), w, b)
    y, dx, dw, db = run(layer, torch.empty(0, w.shape[1]), torch.empty(0, w.shape[0]))
    assert y.shape == (0, w.shape[0])
    assert dx.shape == (0, w.shape[1])
    assert not dw.any()
    assert not db.any()


def test_without_casts_the_layer_is_nn_linear_bit_for_bit() -> None:
    x, w, b, dy = data(*SIZES[1])
    layer, plain = layer_of(LayerPrecision(), w, b), nn.Linear(*w.shape[::-1])
    plain.load_state_dict(layer.state_dict())
    assert list(layer.state_dict()) == list(plain.state_dict())
    with step_context(layer, step=0):
        assert same(run(layer, x, dy), run(plain, x, dy))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert same(run(layer, x, dy), run(plain, x, dy))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_autocast_decides_the_dtype_of_input_and_result_and_of_what_is_not_cast(dtype: torch.dtype, rounding: float) -> None:
    x, w, b, dy = data(*SIZES[0])
    dy = dy * 1e4  # normal numbers of float16
    how = precision("input only")
    layer = layer_of(how, w, b)
    assert layer(x.to(dtype)).dtype == dtype
    with torch.autocast("cpu", dtype):
        y, dx, dw, _ = run(layer, x, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, torch.float32, torch.float32)
    # As for nn.Linear, x is converted before it is cast, and dY and the weight that is not cast are of this dtype too.
    x, dy, w = (each.to(dtype).float() for each in (x, dy, w))
    close(dw, products(x, w, dy, how)["weight_grad"])
    assert torch.equal(dx, dx.to(dtype).float())
    for found, which, bias in ((y, "forward", b.double()), (dx, "input_grad", 0)):
        a, c = products(x, w, dy, how)[which]
        wanted = a @ c.T + bias
        assert bool(((found.double() - wanted).abs() <= rounding * wanted.abs() + 2.0**-16 * (a.abs() @ c.abs().T)).all())


@pytest.mark.parametrize(
    ("kind", "name"),
    [("linear", "fp8-delayed"), *itertools.product(("linear", "frozen", "output loss"), ("fp8-current", "fp8-block"))],
)
def test_under_autocast_a_float32_input_is_read_in_16_bits(kind: str, name: str) -> None:
    x, w, _, dy = data(32, 128, 128)
    targets = torch.arange(32)
    found = []
    for given in (x, x.bfloat16()):
        layer = layer_of(precision(name), w)
        if kind == "frozen":
            layer = FrozenLinear.freeze(layer.requires_grad_(False))
        leaf = given.clone().requires_grad_()
        with step_context(layer, step=STEP), torch.autocast("cpu", torch.bfloat16):
            y = output_loss(layer, leaf, targets) if kind == "output loss" else layer(leaf)
            y.backward(dy.bfloat16() if y.dim() else None)
        found.append([y.detach(), leaf.grad.float(), *(p.grad for p in layer.parameters()), *layer.buffers()])
    assert same(*found)


def test_only_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights and inputs without gradient; each needs one layout of the others."""
    x, w, b, dy = data(*SIZES[0])
    layer = layer_of(precision("nvfp4"), w, b)
    with step_context(layer, step=STEP):
        whole = run(layer, x, dy)
    layer.weight.requires_grad_(False)
    frozen = layer_of(precision("nvfp4"), w, b)
    frozen.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    with step_context(frozen, step=STEP):
        frozen(leaf).backward(dy)
    assert torch.equal(leaf.grad, whole[1])
    assert frozen.weight.grad is None
    learning = layer_of(precision("nvfp4"), w, b)
    with step_context(learning, step=STEP):
        learning(x).backward(dy)
    assert torch.equal(learning.weight.grad, whole[2])
    casts = []
    monkeypatch.setattr(quantize, "quantize", lambda *a, cast=quantize.quantize: casts.append(a[2]) or cast(*a))
    with torch.no_grad():
        assert torch.equal(learning(x), whole[0])
    assert casts == [1, 1]  # x and W, each along K
    casts.clear()
    frozen(x)
    assert casts == [1, 1]


def test_a_nan_reaches_the_result() -> None:
    x, w, b, dy = data(*SIZES[0])
    x[3, 5] = torch.nan
    for name in ("fp8-block", "nvfp4", "int8"):
        layer = layer_of(precision(name), w, b)
        y, _, dw, _ = run(layer, x, dy)
        assert bool(y[3].isnan().all())
        assert bool(dw[:, 5].isnan().all())


def test_second_derivatives_are_refused() -> None:
    x, w, b, _ = data(*SIZES[0])
    layer = layer_of(precision("fp8-block"), w, b)
    x = x.requires_grad_()
    with pytest.raises(UserError, match=r"'layers.0.up' has casts, which have no second derivative"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


# Bits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "kernel"])
def test_a_place_on_the_device_moves_the_rows(backend: str, device: str) -> None:
    x = data(33, 64, 8)[0].to(device)
    stream = Stream(1, "grad", "x")
    for text in ("e2m1 tile(16) stochastic(16)", "e2m1 row stochastic(8)", "e4m3 tensor fp32 stochastic(20)"):
        how = Cast.parse(text)
        wanted = dither.quantize(x, how, axis=0, stream=stream, step=5, offset=(70000, 0))
        place = torch.tensor([5, 70000, 0], device=device)
        found = torch.ops.dither.quantize(x, str(how), 0, None, "", stream.key, place, 0, 0, backend)
        assert pairs.differing(found[0], wanted.values) == 0
        both = torch.ops.dither.quantize_both(x, str(how), None, "", stream.key, place, 0, 0, backend)
        assert pairs.differing(both[2], wanted.values) == 0


def test_micro_batches_draw_the_bits_of_their_tokens() -> None:
    """Cast along N, a token's gradient does not depend on its neighbours: parts of the batch give parts of dX."""
    x, w, _, dy = data(32, 40, 64)
    layer = layer_of(precision("fp4-block"), w)
    with step_context(layer, step=4):
        whole = run(layer, x, dy)[1]
    with step_context(layer, step=4) as at:
        parts = []
        for start in (0, 8, 16, 24):
            at.row(start)
            parts.append(run(layer, x[start : start + 8], dy[start : start + 8])[1])
    # The same casts; only the order of additions may differ between products of 32 and of 8 rows.
    assert torch.allclose(torch.cat(parts), whole, rtol=1e-5, atol=1e-9)
    with step_context(layer, step=4):
        unmoved = run(layer, x[8:16], dy[8:16])[1]
    assert not torch.allclose(unmoved, whole[8:16], rtol=1e-3)


def test_backward_draws_where_its_forward_was() -> None:
    """The loop may move on, or fill the next step, before a backward: the place is that of the forward."""
    x, w, _, dy = data(16, 40, 32)
    layer = layer_of(precision("fp4-block"), w)
    x = x.requires_grad_()
    with step_context(layer, step=4) as at:
        first, second = [], []
        for start in (0, 16):
            at.row(start)
            second.append(layer(x))
        for y in reversed(second):
            first.insert(0, torch.autograd.grad(y, x, dy)[0])
    for start, found in zip((0, 16), first, strict=True):
        with step_context(layer, step=4, row=start):
            assert torch.equal(found, torch.autograd.grad(layer(x), x, dy)[0])


def test_no_bits_are_drawn_twice_outside_a_step() -> None:
    x, w, _, dy = data(16, 40, 32)
    layer = layer_of(precision("fp4-block"), w)
    with step_context(layer, step=1):
        runs = [run(layer, x, dy)[1]]
    runs += [run(layer, x, dy)[1] for _ in range(2)]
    with step_context(layer, step=2):
        runs.append(run(layer, x, dy)[1])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(runs, 2))
    other = layer_of(precision("fp4-block"), w)
    assert torch.equal(run(other, x, dy)[1], runs[1])  # they are counted, so a repeated run repeats them


# Steps -----------------------------------------------------------------------------------------------------------------


def net_of(how: LayerPrecision) -> TwoLayers:
    torch.manual_seed(0)
    up = Linear(32, 48, precision=how, name="up", seed=SEED)
    return TwoLayers(up, Linear(48, 32, bias=False, precision=how, name="down", seed=SEED))


def train(net: TwoLayers, call: Callable[[Tensor], Tensor], steps: int = 2, micro: int = 4) -> list[Tensor]:
    """Some steps of gradient accumulation; every output, gradient and state they left."""
    found = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        with step_context(net, step=step) as at:
            for part in range(micro):
                at.row(part * 20)
                generator = torch.Generator().manual_seed(step * micro + part)
                x, dy = (torch.randn(4, 5, 32, generator=generator) for _ in range(2))
                y = call(x.requires_grad_())
                y.backward(dy)
                found += [y.detach(), x.grad]
        found += [p.grad for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [value.clone() for value in net.state_dict().values()]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_is_cast_once_a_step(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    cast_once = quantize.quantize

    def counting(x: Tensor, how: Cast, axis: int, *rest):
        if axis == 1:
            seen.append(tuple(x.shape))
        return cast_once(x, how, axis, *rest)

    monkeypatch.setattr(quantize, "quantize", counting)
    torch._dynamo.reset()
    net = net_of(precision("fp8-block"))
    call = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    train(net, call, steps=2, micro=4)
    weights = [shape for shape in seen if shape in ((48, 32), (32, 48))]
    assert len(weights) == 2 * 2
    assert len(seen) - len(weights) == 2 * 4 * 4  # two layers, and x and dY of each micro-batch
    seen.clear()
    with torch.no_grad():
        net(torch.randn(1, 32))
    net(torch.randn(1, 32))
    assert seen.count((48, 32)) == seen.count((32, 48)) == 2  # outside, each call casts for itself


@pytest.mark.parametrize("name", ["fp8-block", "fp4-block", "fp4 forward", "cast backward"])
def test_held_weights_are_not_used_after_they_changed(name: str) -> None:
    x, w, b, _ = data(*SIZES[0])
    layer = layer_of(precision(name), w, b)
    with step_context(layer, step=0):
        before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(3)
    after = layer_of(precision(name), 3 * w, b)(x)
    assert torch.equal(layer(x), after)
    assert not torch.equal(before, after)

    def change_and_call() -> None:
        with step_context(layer, step=1), torch.no_grad():
            layer.weight.mul_(2)
            with pytest.raises(UserError, match="changed inside a step_context"):
                layer(x)

    with pytest.raises(UserError, match="changed inside a step_context"):
        change_and_call()
    with pytest.raises(UserError, match="changed inside a step_context"), step_context(layer, step=1), torch.no_grad():
        layer.weight.mul_(2)  # nobody looked, until the end


def test_held_codes_stay_where_they_are() -> None:
    """A captured CUDA graph would read the same memory at the next step."""
    net = net_of(precision("fp4-block"))
    addresses = []
    for step in range(2):
        with step_context(net, step=step), torch.no_grad():
            codes = net.up.cache.codes
            addresses.append([codes.along.values.data_ptr(), codes.across.scale.data_ptr()])
        with torch.no_grad():
            net.up.weight.mul_(3)
    assert addresses[0] == addresses[1]


def test_a_step_says_what_is_wrong_with_it() -> None:
    net = net_of(precision("fp4-block"))
    with pytest.raises(UserError, match="from 0 to 2\\^31 - 1, not -1"), step_context(net, step=-1):
        pass
    with step_context(net, step=1) as at:
        with pytest.raises(UserError, match="index of a token"):
            at.row(-5)
        with pytest.raises(UserError, match="between steps"):
            net.up.set_precision(LayerPrecision())
    with step_context(net, step=1):  # an error inside ended the step before
        pass


# Delayed scaling -------------------------------------------------------------------------------------------------------


def test_a_step_of_a_model_that_was_not_converted_says_so() -> None:
    with pytest.warns(PerformanceWarning, match="convert it first"), step_context(nn.Linear(4, 4), step=0):
        pass


def test_delayed_scaling_follows_the_largest_magnitudes_of_earlier_steps() -> None:
    x, w, _, dy = data(16, 40, 24)
    layer = layer_of(precision("fp8-delayed"), w)
    current = layer_of(LayerPrecision.of("e4m3 tensor", "e4m3 tensor", "e5m2 tensor"), w)
    with step_context(layer, step=0):
        run(layer, 3 * x, 5 * dy)
        assert same(run(layer, x, dy), run(current, x, dy))  # nothing is known yet: the first step measures
    first = [x.abs().amax() * 3, w.abs().amax(), dy.abs().amax() * 5]
    for history, largest in zip((layer.input_history, layer.weight_history, layer.grad_history), first, strict=True):
        assert torch.equal(history, torch.stack([largest, *torch.zeros(3)]))
    with step_context(layer, step=1):
        y, dx, dw = run(layer, x, 100 * dy)

    def number(t: Tensor, text: str, amax: Tensor) -> Tensor:
        return dither.quantize(t, text, amax=amax).dequantize().double()

    xq, wq, gq = (number(t, text, a) for t, text, a in zip((x, w, 100 * dy), DELAYED, [f.clone() for f in first], strict=True))
    close(y, (xq, wq))
    close(dx, (gq, wq.T))
    close(dw, (gq.T, xq.T))
    assert bool((gq.abs() <= first[2].double() * 1.001).all())  # what grew a hundredfold saturates, until the next step
    assert torch.equal(layer.grad_history[:2], torch.stack([100 * dy.abs().amax(), first[2]]))


def test_a_step_without_a_number_repeats_the_last_magnitude() -> None:
    x, w, _, dy = data(16, 40, 24)
    layer = layer_of(precision("fp8-delayed"), w)
    with step_context(layer, step=0):
        run(layer, x, dy)
    known = [layer.input_history[0].clone(), layer.grad_history[0].clone()]
    x[0, 0] = torch.nan
    with step_context(layer, step=1):
        assert bool(run(layer, x, dy)[0].isnan().any())
    with step_context(layer, step=2):
        pass
    assert torch.equal(layer.input_history, torch.stack([known[0]] * 3 + [torch.tensor(0.0)]))
    assert torch.equal(layer.grad_history, torch.stack([known[1]] * 3 + [torch.tensor(0.0)]))


def test_a_layer_that_was_not_used_goes_on_measuring() -> None:
    net = net_of(precision("fp8-delayed"))
    with step_context(net, step=0):
        net.up(torch.randn(4, 32)).sum().backward()
    assert not net.up.delayed.measures_now
    assert net.down.delayed.measures_now


def test_histories_are_saved_and_loaded() -> None:
    x, w, b, dy = data(16, 40, 24)
    layer = layer_of(precision("fp8-delayed"), w, b)
    assert list(layer.state_dict()) == ["weight", "bias", "input_history", "weight_history", "grad_history"]
    with step_context(layer, step=0):
        run(layer, x, dy)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = layer_of(precision("fp8-delayed"), w * 0, b)
    other.load_state_dict(torch.load(file, weights_only=True))
    results = []
    for each in (layer, other, copy.deepcopy(layer)):
        with step_context(each, step=1):
            results.append(run(each, 2 * x, dy))
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    fresh = layer_of(precision("fp8-delayed"), w, b)
    with step_context(fresh, step=1):
        assert not same(run(fresh, 2 * x, dy), results[0])


def test_magnitudes_are_reduced_over_ranks_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_of(precision("fp8-delayed"))
    calls = []

    def all_reduce(tensor: Tensor, op, group) -> None:
        calls.append((tuple(tensor.shape), op, group))
        tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    group = object()
    x = torch.randn(4, 32)
    with step_context(net, step=0, group=group):
        run(net, x, torch.randn(4, 32))
    assert calls == [((6,), torch.distributed.ReduceOp.MAX, group)]
    assert net.up.input_history[0] == 2 * x.abs().amax()
    with step_context(net, step=1):
        run(net, x, torch.randn(4, 32))
    assert len(calls) == 1


# Compiled code, checkpointing, memory -----------------------------------------------------------------------------------


@pytest.mark.sampled(only=["fp8-delayed"])
@pytest.mark.parametrize("name", ["nvfp4", "all stochastic", "fp8-delayed", "cast backward", "blocks of inputs"])
def test_compiled_training_is_eager_training(name: str) -> None:
    torch._dynamo.reset()
    eager, compiled = net_of(precision(name)), net_of(precision(name))
    whole = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    assert same(train(eager, eager, 3, 2), train(compiled, whole, 3, 2))


def test_compiled_code_outside_steps() -> None:
    """Calls are counted there too; delayed scaling is refused, since nobody could tell steps apart."""
    torch._dynamo.reset()
    eager, compiled = net_of(precision("fp4-block")), net_of(precision("fp4-block"))
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(8, 32), torch.randn(8, 32)
    for _ in range(3):
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        eager(one).backward(dy)
        call(other).backward(dy)
        assert torch.equal(one.grad, other.grad)
    assert same([*eager.buffers()], [*compiled.buffers()])
    delayed = net_of(precision("fp8-delayed"))
    with pytest.raises(Exception, match="cannot tell where a step ends"):
        torch.compile(delayed, fullgraph=True, backend="aot_eager")(x)


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("name", ["fp4-block", "fp8-delayed", "all stochastic", "cast backward"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_same_bits_again(name: str, reentrant: bool) -> None:
    plain, saved = net_of(precision(name)), net_of(precision(name))
    call = lambda x: checkpoint(saved, x, use_reentrant=reentrant)  # noqa: E731
    assert same(train(plain, plain, 3, 2), train(saved, call, 3, 2))


# The module ------------------------------------------------------------------------------------------------------------


def test_a_layer_adopts_parameters_hooks_and_mode() -> None:
    old = nn.Linear(16, 8).eval()
    calls = []
    handles = [
        old.register_forward_hook(lambda *_: calls.append("forward")),
        old.register_forward_pre_hook(lambda *_: calls.append("pre")),
        old.register_full_backward_hook(lambda *_: calls.append("backward")),
    ]
    old.note = "kept"
    new = Linear.adopt(old, precision("mxfp8"), name="head", seed=1)
    assert new.weight is old.weight
    assert new.bias is old.bias
    assert (new.training, new.note, new.name) == (False, "kept", "head")
    new(torch.randn(2, 16).requires_grad_()).sum().backward()
    assert calls == ["pre", "forward", "backward"]
    for handle in handles:
        handle.remove()
    new(torch.randn(2, 16))
    assert len(calls) == 3
    new.register_buffer("mine", torch.ones(1))
    assert not hasattr(old, "mine")
    assert list(new.state_dict()) == ["weight", "bias", "mine"]


def test_what_cannot_be_adopted_says_so() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    for module in (nn.Embedding(4, 4), nn.LayerNorm(4), nn.ReLU(), Odd(4, 4)):
        with pytest.raises(UserError, match=f"'head' is a {type(module).__name__}"):
            Linear.adopt(module, LayerPrecision(), name="head")
    with pytest.raises(UserError, match="already: change it with set_precision"):
        Linear.adopt(Linear(4, 4), LayerPrecision(), name="head")
    with pytest.raises(UserError, match="takes a LayerPrecision, not 'fp8'"):
        Linear(4, 4, precision="fp8")


def test_engines_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "capability_of", lambda device: (9, 0))
    layer = Linear(256, 128, precision=precision("fp4-block"), name="up")
    assert layer.engines("cuda") == dict.fromkeys(["forward", "input_grad", "weight_grad"], "fp8-container")
    layer.set_precision(LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "mxfp8", {"weight_grad": "bf16"}))
    assert layer.engines("cuda") == {"forward": "fp8", "input_grad": "bf16-group", "weight_grad": "torch"}
    layer.set_precision(LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(8)"))
    with pytest.raises(UserError, match="The layer 'up', input grad product: no matrix units"):
        layer.engines("cuda")
    odd = Linear(256, 130, precision=precision("fp8-row"), name="odd")
    assert odd.engines("cuda") == {"forward": "bf16", "input_grad": "bf16", "weight_grad": "fp8"}
    emulated = Linear(256, 130, precision=precision("fp8-row"), emulate=True)
    assert set(emulated.engines("cuda").values()) == {"fp32"}
    verified = Linear(256, 128, precision=precision("mxfp8"), verified=["mxfp8"])
    # 16 tokens, which the weight gradient sums over, are too few for units that scale groups of 32.
    assert verified.engines("cuda") == {"forward": "mxfp8", "input_grad": "mxfp8", "weight_grad": "bf16"}
    assert set(verified.engines("cuda", tokens=64).values()) == {"mxfp8"}


def test_a_delayed_operand_beside_an_override_keeps_its_history() -> None:
    """The input is scaled by earlier steps forward, and not cast for the weight gradient."""
    x, w, _, dy = data(*SIZES[0])
    how = LayerPrecision.of("e4m3 tensor delayed(4)", "e4m3 tensor", "e5m2 tensor", {"weight_grad.input": None})
    layer = layer_of(how, w)
    for step in range(2):
        with step_context(layer, step=step):
            _, _, dw = run(layer, x * (step + 1), dy)
    assert layer.input_history[:2].tolist() == [2 * x.abs().amax(), x.abs().amax()]
    close(dw, (cast(dy, how.grad, 0, "grad", 0).T, 2 * x.double().T))


def test_a_layer_can_change_its_precision_and_its_dtype() -> None:
    x, w, b, dy = data(16, 40, 24)
    layer = layer_of(precision("fp8-delayed"), w, b)
    with step_context(layer, step=0):
        run(layer, x, dy)
    history = layer.grad_history.clone()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.grad_history, history)
    with step_context(layer, step=1):
        y, dx, dw, db = run(layer, x.bfloat16(), dy)
    assert {t.dtype for t in (y, dx, dw, db)} == {torch.bfloat16}
    layer.float()
    layer.set_precision(precision("mxfp8"))
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert same(run(layer, x, dy), run(layer_of(precision("mxfp8"), layer.weight.detach(), layer.bias.detach()), x, dy))
    assert "input e4m3 tile(32) pow2 nearest" in repr(layer)


def test_a_layer_that_was_made_without_memory_begins_anew() -> None:
    with torch.device("meta"):
        layer = Linear(40, 24, precision=LayerPrecision.of(DELAYED[0], DELAYED[1], "e2m1 tile(8) stochastic(8)"), name=NAME)
    layer.to_empty(device="cpu")
    assert not layer.input_history.any()
    assert layer.draw_place.tolist() == [0, 0]
    x, w, b, dy = data(16, 40, 24)
    layer.load_state_dict({**layer.state_dict(), "weight": w, "bias": b})
    with step_context(layer, step=0):
        assert bool(run(layer, x, dy)[1].isfinite().all())


def test_wrong_inputs_say_what_they_are() -> None:
    layer = Linear(16, 8, precision=precision("fp8-row"), name="up")
    with pytest.raises(UserError, match=r"'up' has a weight of shape \(8, 16\) and an input of \(2, 15\)"):
        layer(torch.randn(2, 15))
    with pytest.raises(UserError, match=r"'up' casts float32, bfloat16 and float16, not an input of torch.float64"):
        layer(torch.randn(2, 16, dtype=torch.float64))
    with pytest.raises(UserError, match="needs state=State"):
        functional.linear(torch.randn(2, 16), torch.randn(8, 16), None, precision("fp4-block"))
    place = State(place=torch.tensor([0, 0]), keys=torch.tensor([1, 2, 3]))
    assert functional.linear(torch.randn(2, 16), torch.randn(8, 16), None, precision("fp4-block"), state=place).shape == (2, 8)
