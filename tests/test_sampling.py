"""Sampled weights: the noise and its distribution, 2^x, the weight, its gradients, shards, and what is refused."""

import itertools
import math
from collections import Counter

import ml_dtypes
import numpy as np
import oracles
import pairs
import pytest
import torch

import dither
from dither import Stream, UserError
from dither.ops.reference import sampling
from dither.spec import NOISES
from dither.spec.random import Draw

STREAM = Stream(5, "sample", "model.layers.0.mlp.down_proj.weight")
DRAWN = [kind for kind in NOISES if kind != "none"]
P_EXACT = [math.erfc((2 * k - 1) / math.sqrt(2)) for k in (1, 2, 3)]


def draw_at(rows: int, columns: int, offset: tuple[int, int] = (0, 0), step: int = 3) -> Draw:
    return STREAM.draw(step, (rows, columns), offset, "cpu")


def weight(rows: int, columns: int, block: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and bitwidths from 2 to 9."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator)
    return w, 2 + 7 * torch.rand(sampling.block_count(rows, columns, block), generator=generator)


# The noise ------------------------------------------------------------------------------------------------------------


def test_counts_over_all_eleven_bits_are_those_of_equation_8():
    patterns = torch.tensor([sign << 15 | u << 5 for sign in (0, 1) for u in range(1024)], dtype=torch.int32)
    counts = Counter(sampling.noise_of(patterns, "rounded_normal").int().tolist())
    assert counts == {2: 3, -2: 3, 1: 288, -1: 288, 0: 1466}  # 3/2048, 9/64, and the rest, of 2048


def test_exact_thresholds_are_the_normal_distributions_to_half_a_unit():
    assert list(sampling.ROUNDED_NORMAL_EXACT) == [round(2**31 * p) for p in P_EXACT]
    assert round(2**31 * math.erfc(7 / math.sqrt(2))) == 0  # so |R| = 4 does not occur
    for k, t in enumerate(sampling.ROUNDED_NORMAL_EXACT, start=1):
        bits = torch.tensor([t - 1, t, t - 1 - 2**31, t - 2**31]).int()
        assert sampling.noise_of(bits, "rounded_normal_exact").tolist() == [k, k - 1, -k, 1 - k]


def test_uniform_noise_is_every_sixteen_bit_fraction_rounded_to_bfloat16():
    r = sampling.noise_of(torch.arange(65536, dtype=torch.int32), "uniform")
    exact = (2 * np.arange(65536) + 1) / 2**17 - 0.5
    assert (r.numpy() == exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    assert torch.equal(r, -r.flip(0))  # symmetric, so the mean is exactly 0
    assert r.abs().max() == 0.5
    assert r.abs().min() == 2.0**-17
    # Rounding moves |R| <= 1/2 by at most 2^-9 / 2, which moves R^2 by at most 2^-10; most of it cancels.
    assert abs(float((r.double() ** 2).mean()) - 1 / 12) < 2e-6


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize(("row", "step"), [(0, 0), (77, 3), (2**32 - 1, 2**32 - 1)])
def test_noise_is_what_another_generator_and_integers_give(kind, row, step):
    drawn = sampling.noise(Draw(STREAM.key, torch.tensor(step), row, 0), 1, 700, kind)
    assert drawn.dtype == torch.float32
    assert (drawn[0].double().numpy() == oracles.noise_row(STREAM.key, row, step, 700, kind)).all()


@pytest.mark.parametrize("kind", ["rounded_normal", "rounded_normal_exact", "none"])
@pytest.mark.parametrize("columns", [1, 8, 41])
def test_packed_noise_is_sign_and_magnitude_in_four_bits(kind, columns):
    draw = draw_at(50, columns, (2, 5))
    words = sampling.packed_noise(draw, 50, columns, kind)
    assert words.shape == (50, -(-columns // 8))
    assert words.dtype == torch.int32
    codes = oracles.unpack(words.numpy().view(np.uint8), 4, words.shape[1] * 8)
    r = np.where(codes & 8, -1.0, 1.0) * (codes & 7)
    assert (r[:, :columns] == sampling.noise(draw, 50, columns, kind).numpy()).all()
    assert (codes[:, columns:] == 0).all()


def chi_square_bound(freedom: int) -> float:
    """What a chi-square variable exceeds once in 10^9 (Wilson and Hilferty, z = 6)."""
    width = 2 / (9 * freedom)
    return freedom * (1 - width + 6 * math.sqrt(width)) ** 3


SIZE = 1024


def pair(kind: str, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two drawings of 2^20 numbers that must have nothing to do with each other."""

    def drawn(name: str = "a", step: int = 0, row: int = 0, column: int = 0) -> torch.Tensor:
        draw = Stream(0, "sample", name).draw(step, (SIZE, SIZE), (row, column), "cpu")
        return sampling.noise(draw, SIZE, SIZE, kind)

    other = {
        "layers": {"name": "b"},
        "steps": {"step": 1},
        "rows": {"row": 1},
        "columns": {"column": 1},
        "calls": {"column": 8},
    }
    return drawn(), drawn(**other[what])


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("what", ["layers", "steps", "rows", "columns", "calls"])
def test_nothing_is_correlated(kind, what):
    a, b = pair(kind, what)
    n = a.numel()
    # Sums of n products of independent numbers of mean 0 have this deviation; six of them is one chance in 10^9.
    sigma = math.sqrt(n) * float((a.double() ** 2).mean().sqrt() * (b.double() ** 2).mean().sqrt())
    assert abs(float((a.double() * b).sum())) < 6 * sigma
    # Independent, not only uncorrelated: signs and zeros of both, against the product of their own shares.
    cells = (a.sign() + 1) * 3 + b.sign() + 1
    counts = torch.bincount(cells.long().flatten(), minlength=9).double().view(3, 3)
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / n
    used = expected > 0
    assert float(((counts - expected) ** 2 / expected)[used].sum()) < chi_square_bound(4)


# 2^x ------------------------------------------------------------------------------------------------------------------


def ulp_errors(x: torch.Tensor) -> torch.Tensor:
    """|pow2(x) - 2^x| in units of the last place of 2^x, float64."""
    true = np.exp2(x.double().numpy())
    unit = np.spacing(np.exp2(np.floor(np.log2(true))).astype(np.float32)).astype(np.float64)
    return torch.from_numpy(np.abs(sampling.pow2(x).double().numpy() - true) / unit)


def test_pow2_of_every_fraction_of_24_bits():
    # All multiples of 2^-24 that are float32 numbers; over all 436,207,616 fractions from 2^-27 on it is 1.2272 too.
    fractions = torch.arange(-(2**23), 2**23 + 1, dtype=torch.int32).float() * 2.0**-24
    worst = max(float(ulp_errors(part).max()) for part in fractions.split(1 << 20))
    assert 1.2 < worst < 1.228


def test_pow2_is_exact_for_integers_and_stops_at_normal_numbers():
    powers = torch.arange(-126.0, 128.0)
    assert torch.equal(sampling.pow2(powers), torch.ldexp(torch.ones(254), powers.int()))
    beyond = torch.tensor([-126.5, -1e30, -torch.inf, 127.5, 1e30, torch.inf, torch.nan])
    assert torch.equal(sampling.pow2(beyond)[:6], torch.tensor([2.0**-126] * 3 + [2.0**127] * 3))
    assert sampling.pow2(beyond)[6].isnan()
    assert float(ulp_errors(torch.linspace(-126, 127, 100_001)).max()) < 1.228


# The weight -----------------------------------------------------------------------------------------------------------

SHAPES = [(64, 96), (70, 45), (1, 33), (33, 1)]


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [16, 32])
def test_sampled_weights_are_those_of_a_loop(kind, shape, block):
    w, b_t = weight(*shape, block)
    r = np.stack([oracles.noise_row(STREAM.key, 32 + i, 3, 64 + shape[1], kind)[64:] for i in range(shape[0])])
    expected = oracles.sampled(w.numpy(), b_t.numpy(), r, sampling.pow2(1 - b_t).numpy(), block)
    draw = draw_at(*shape, (32, 64))
    for dtype, stored in [(torch.float32, np.float32), (torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)]:
        w_hat, amax = sampling.sample(w, b_t, draw, kind, block, dtype)
        assert w_hat.dtype == dtype
        assert (w_hat.float().numpy() == expected.astype(stored).astype(np.float32)).all()
    for dtype, name in [(torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")]:
        w_hat, _ = sampling.sample(w, b_t, draw, kind, block, dtype)
        codes = w_hat.view(torch.uint8).numpy()
        assert (oracles.decode(name, codes) == oracles.round_gfloat(name, expected)).all()
    blocks = itertools.product(range(0, shape[0], block), range(0, shape[1], block))
    largest = [float(w[i : i + block, j : j + block].abs().max()) for i, j in blocks]
    assert amax.flatten().tolist() == largest


def test_overflow_is_inf_in_16_bits_and_the_largest_number_in_8():
    w, b_t, draw = torch.full((32, 32), 3e38), torch.ones(1, 1), draw_at(32, 32)
    w[:16] = 60000.0
    r = sampling.noise(draw, 32, 32, "rounded_normal")
    half, _ = sampling.sample(w, b_t, draw, "rounded_normal", 32, torch.float16)
    assert bool(half[16:].isinf()[r[16:] >= 0].all())
    for dtype, largest in [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)]:
        eight, _ = sampling.sample(w, b_t, draw, "none", 32, dtype)
        assert bool((eight.float() == largest).all())


def test_a_zero_of_the_noise_leaves_the_weight_and_a_block_of_zeros_stays_one():
    w, b_t = weight(64, 64, 32)
    w[:32] = 0.0
    w[0, ::2] = -0.0
    draw = draw_at(64, 64)
    w_hat, amax = sampling.sample(w, b_t, draw, "rounded_normal", 32, torch.float32)
    still = sampling.noise(draw, 64, 64, "rounded_normal") == 0
    assert torch.equal(w_hat.view(torch.int32)[still], w.view(torch.int32)[still])
    assert torch.equal(w_hat[:32], w[:32])
    assert amax[0].tolist() == [0.0, 0.0]
    assert bool((w_hat[32:] != w[32:])[~still[32:]].any())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_block_and_shows(value):
    w, b_t = weight(64, 64, 32)
    clean, _ = sampling.sample(w, b_t, draw_at(64, 64), "rounded_normal", 32, torch.bfloat16)
    w[40, 5] = value
    w_hat, amax = sampling.sample(w, b_t, draw_at(64, 64), "rounded_normal", 32, torch.bfloat16)
    assert amax.isfinite().tolist() == [[True, True], [False, True]]
    found, moved = w_hat[32:, :32], sampling.noise(draw_at(64, 64), 64, 64, "rounded_normal")[32:, :32] != 0
    if value != value:
        assert found.isnan().all()
    else:
        assert found[8, 5] == value
        moved[8, 5] = True
        assert (found[moved].abs() > 2.0**125).all()
        assert torch.equal(found[~moved], w[32:, :32][~moved].bfloat16())
    assert torch.equal(w_hat[:32], clean[:32])
    assert torch.equal(w_hat[32:, 32:], clean[32:, 32:])


def test_a_bitwidth_that_is_no_number_shows_and_huge_ones_do_not_break():
    w = torch.ones(32, 128)
    b_t = torch.tensor([[torch.nan, 1e30, -1e30, torch.inf]])
    w_hat, _ = sampling.sample(w, b_t, draw_at(32, 128), "uniform", 32, torch.float32)
    assert bool(w_hat[:, :32].isnan().all())
    assert bool((w_hat[:, 32:64] == 1).all())
    assert bool((w_hat[:, 64:96].abs() > 2.0**100).all())
    assert bool((w_hat[:, 96:] == 1).all())


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_weights(shape):
    w, b_t = weight(*shape, 32)
    w_hat, amax = sampling.sample(w, b_t, draw_at(*shape), "rounded_normal", 32, torch.bfloat16)
    assert (w_hat.shape, amax.shape) == (shape, b_t.shape)
    grad, grad_b_t = sampling.sample_backward(w_hat, amax, b_t, draw_at(*shape), "rounded_normal", 32, torch.float32)
    assert (grad.shape, grad_b_t.shape) == (shape, b_t.shape)


@pytest.mark.parametrize("kind", DRAWN)
def test_shards_are_pieces_of_the_whole(kind):
    w, b_t = weight(100, 150, 32)
    whole, amax = sampling.sample(w, b_t, draw_at(100, 150), kind, 32, torch.bfloat16)
    _, grad_b_t = sampling.sample_backward(w, amax, b_t, draw_at(100, 150), kind, 32, torch.float32)
    for (top, bottom), (left, right) in itertools.product([(0, 2), (2, 4)], [(0, 1), (1, 5)]):
        rows, columns = slice(top * 32, bottom * 32), slice(left * 32, right * 32)
        piece, bits = w[rows, columns], b_t[top:bottom, left:right]
        draw = draw_at(*piece.shape, (top * 32, left * 32))
        w_hat, found = sampling.sample(piece, bits, draw, kind, 32, torch.bfloat16)
        assert torch.equal(w_hat, whole[rows, columns])
        assert torch.equal(found, amax[top:bottom, left:right])
        _, part = sampling.sample_backward(piece, found, bits, draw, kind, 32, torch.float32)
        assert torch.equal(part, grad_b_t[top:bottom, left:right])


def test_a_step_may_bring_rows_and_a_key_to_add():
    w, b_t = weight(64, 64, 32)
    one, _ = sampling.sample(w, b_t, Draw(10, torch.tensor([7, 96, 5]), 32, 64), "rounded_normal", 32, torch.float32)
    two, _ = sampling.sample(w, b_t, Draw(15, torch.tensor(7), 128, 64), "rounded_normal", 32, torch.float32)
    assert torch.equal(one, two)
    assert not torch.equal(one, w)


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("shape", [(64, 96), (70, 45)])
def test_gradients_are_those_of_the_formula_in_float64(kind, shape):
    w, b_t = weight(*shape, 32)
    grad = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    draw = draw_at(*shape)
    _, amax = sampling.sample(w, b_t, draw, kind, 32, torch.float32)
    grad_w, grad_b_t = sampling.sample_backward(grad, amax, b_t, draw, kind, 32, torch.float32)

    w64, b64 = w.double().requires_grad_(), b_t.double().requires_grad_()
    spread = lambda x: x.repeat_interleave(32, 0)[: shape[0]].repeat_interleave(32, 1)[:, : shape[1]]  # noqa: E731
    r = sampling.noise(draw, *shape, kind).double()
    w_hat = w64 + r * spread(amax.double() * 2 ** (1 - b64))
    (w_hat * grad.double()).sum().backward()
    assert torch.equal(grad_w.double(), w64.grad)
    # Roundings of 2^-24: ten additions, four products, ln 2, and pow2, whose 1.23 units are up to 2.5; 1 - b_t is exact.
    sums = torch.nn.functional.pad((grad * r).abs(), (0, -shape[1] % 32, 0, -shape[0] % 32))
    sums = sums.view(b_t.shape[0], 32, b_t.shape[1], 32).sum((1, 3))
    bound = 20 * 2.0**-24 * sums * amax.double() * 2 ** (1 - b_t.double())
    assert bool(((grad_b_t.double() - b64.grad).abs() <= bound).all())
    assert kind == "none" or bool((grad_b_t != 0).all())


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_sums_of_blocks_join_two_numbers_at_a_time_in_a_known_order(block):
    x = pairs.hard_values(2 * block, 3 * block, torch.float32, 4, "cpu").clamp(-1e30, 1e30)
    found = sampling.block_sum(x, block)
    for i, j in itertools.product(range(2), range(3)):
        square = x[i * block : (i + 1) * block, j * block : (j + 1) * block]
        assert found[i, j].item() == float(oracles.block_total(square.numpy()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_w_is_that_of_the_result_in_the_type_of_w(dtype):
    b_t = torch.full((2, 2), 4.0)
    grad = pairs.hard_values(40, 40, torch.float32, 5, "cpu")
    grad_w, _ = sampling.sample_backward(grad, torch.ones(2, 2), b_t, draw_at(40, 40), "rounded_normal", 32, dtype)
    assert grad_w.dtype == dtype
    kind = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}[dtype]
    with np.errstate(over="ignore"):
        assert (grad_w.float().numpy() == grad.numpy().astype(kind).astype(np.float32)).all()
    assert (grad_w is grad) == (dtype == torch.float32)


# The public function and the operators --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample_can_be_differentiated(dtype):
    w, b_t = (x.requires_grad_() for x in weight(70, 45, 32))
    w_hat = dither.ops.sample(w, b_t, stream=STREAM, step=3, dtype=dtype)
    grad = torch.randn(70, 45, generator=torch.Generator().manual_seed(1)).to(dtype)
    w_hat.backward(grad)
    with torch.no_grad():
        expected, amax = sampling.sample(w, b_t, draw_at(70, 45), "rounded_normal", 32, dtype)
        gradients = sampling.sample_backward(grad, amax, b_t, draw_at(70, 45), "rounded_normal", 32, torch.float32)
    assert torch.equal(w_hat, expected)
    assert torch.equal(w.grad, gradients[0])
    assert torch.equal(b_t.grad, gradients[1])


def test_operators_keep_the_rules_of_torch():
    w, b_t = weight(40, 50, 32)
    ops, place = torch.ops.dither, (STREAM.key, torch.tensor(3), 32, 64)
    for kind, dtype in itertools.product(["rounded_normal", "none"], [torch.float32, torch.bfloat16, torch.float8_e4m3fn]):
        torch.library.opcheck(ops.sample, (w, b_t, *place, kind, 32, dtype, "reference"))
        if dtype.itemsize > 1:
            torch.library.opcheck(ops.sample_backward, (w, b_t, b_t, *place, kind, 32, dtype, "reference"))
    torch.library.opcheck(ops.bitwidth_grad, (w, b_t, b_t, *place, "rounded_normal", 32, "reference"))
    w, b_t = w.requires_grad_(), b_t.requires_grad_()
    torch.library.opcheck(ops.sample, (w, b_t, *place, "rounded_normal", 32, torch.float32, "reference"))
    for op in (ops.noise, ops.packed_noise):
        torch.library.opcheck(op, (STREAM.key, torch.tensor(3), 5, 19, 1, 2, "rounded_normal", "reference"))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled_bits_are_eager_bits_in_one_graph(compiler):
    torch._dynamo.reset()

    def run(w: torch.Tensor, b_t: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w_hat = dither.ops.sample(w, b_t, stream=STREAM, step=step, offset=(32, 64))
        return w_hat, *torch.autograd.grad((w_hat.float() ** 2).sum(), (w, b_t))

    compiled = torch.compile(
        lambda w, b_t, step: dither.ops.sample(w, b_t, stream=STREAM, step=step, offset=(32, 64)),
        fullgraph=True,
        backend=compiler,
    )
    for step in (0, 1):
        w, b_t = (x.requires_grad_() for x in weight(70, 45, 32, step))
        expected = run(w, b_t, torch.tensor(step))
        w_hat = compiled(w, b_t, torch.tensor(step))
        found = w_hat, *torch.autograd.grad((w_hat.float() ** 2).sum(), (w, b_t))
        assert all(map(torch.equal, expected, found))


def test_noise_is_what_sample_adds():
    r = dither.ops.noise((64, 64), stream=STREAM, step=3)
    w = torch.zeros(64, 64)
    w[::32, ::32] = 1.0
    w_hat = dither.ops.sample(w, torch.ones(2, 2), stream=STREAM, step=3, dtype=torch.float32)
    assert torch.equal(w_hat - w, r)
    words = dither.ops.noise((64, 64), stream=STREAM, step=3, packed=True)
    assert torch.equal(words, sampling.packed_noise(draw_at(64, 64), 64, 64, "rounded_normal"))


W, B = torch.zeros(64, 64), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"w": torch.zeros(64, 64, dtype=torch.float64)}, "sample takes float32, bfloat16 or float16"),
        ({"w": torch.zeros(4, 64, 64)}, "takes a matrix, not a tensor of shape"),
        ({"w": [[1.0]]}, "takes a torch.Tensor, not list"),
        ({"b_t": torch.ones(2, 3)}, r"64 x 64 weight in blocks of 32 .* shape \(2, 2\) on cpu, not a torch.float32 tensor of"),
        ({"b_t": torch.ones(2, 2).bfloat16()}, "are a float32 tensor"),
        ({"b_t": 4.0}, "not 4.0"),
        ({"noise": "gaussian"}, "There is no noise 'gaussian': choose one of rounded_normal, rounded_normal_exact, uniform"),
        ({"block": 48}, "16, 32, 64 or 128 wide, not 48"),
        ({"dtype": torch.float64}, "stored as one of float32, bfloat16, float16, float8_e4m3fn, float8_e5m2"),
        ({"stream": None}, "draws from stream=dither.Stream"),
        ({"offset": (32, 8)}, r"begins at a multiple of its block, 32, not at \(32, 8\)"),
        ({"offset": (33, 0)}, "begins at a multiple of its block, 32"),
        ({"backend": "cuda"}, "no backend 'cuda'"),
        ({"w": W.clone().requires_grad_(), "dtype": torch.float8_e4m3fn}, r"sample under torch.no_grad\(\), or to bfloat16"),
    ],
)
def test_what_sample_refuses(arguments, message):
    with pytest.raises(UserError, match=message):
        dither.ops.sample(**{"w": W, "b_t": B, "stream": STREAM, **arguments})


def test_uniform_noise_has_no_packed_form():
    with pytest.raises(UserError, match="'uniform' cannot be packed"):
        dither.ops.noise((4, 4), "uniform", stream=STREAM, packed=True)
