"""The update of AdamW: against torch's, against exactly rounded operations in numpy, and its roundings over many steps."""

import copy
import itertools
import math

import numpy as np
import oracles
import pytest
import torch
from sweeps import sweep
from tiny import same
from torch import Tensor, nn

import dither
from dither import Stream
from dither.errors import UserError
from dither.ops.reference import adamw, state_maps
from dither.optim import AdamMini, AdamW, Role
from dither.spec.optimizer import BITS, BLOCKS, MAPS, ODD_FACTOR, WHOLE, Update

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parameters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()}


# Against torch --------------------------------------------------------------------------------------------------------


def test_clipping_is_that_of_torch() -> None:
    shapes = {"a": (20, 30), "b": (9,)}
    ours, theirs = parameters(shapes), parameters(shapes)
    mine = dither.optim.AdamW(ours.items(), lr=1e-2, max_norm=0.5)
    torchs = torch.optim.AdamW(theirs.values(), lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    for step in range(20):
        for name, shape in shapes.items():
            gradient = torch.randn(shape, generator=generator) * 10.0 ** (step % 5 - 3)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        mine.step()
        torchs.step()
        torch.testing.assert_close(mine.grad_norm, norm, rtol=1e-6, atol=0)
    for name in shapes:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


# Against numpy --------------------------------------------------------------------------------------------------------

ROWS, COLUMNS, BLOCK, NAME, SEED = 3, 43, 16, "layers.0.weight", 11
STATES = [
    *((states, "nearest") for states in (*WHOLE, *BLOCKS)),
    *((states, "stochastic") for states in ("bf16", *BLOCKS) if states not in MAPS),
]


def hard_gradient(step: int) -> Tensor:
    """Of many sizes, zeros and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(100 + step)
    gradient = torch.randn(ROWS, COLUMNS, generator=generator)
    gradient = torch.ldexp(gradient, torch.randint(-20, 3, (ROWS, COLUMNS), generator=generator))
    gradient[0, :5] = torch.tensor([0.0, -0.0, 1e-40, -1e-30, 1e15])
    gradient[1, 16:32] = 0.0
    return gradient


def random_bits(purpose: str, step: int) -> np.ndarray:
    """By randomgen, from the stream's key."""
    key = Stream(SEED, purpose, NAME).key
    return np.stack([oracles.row_bits(key, row, step, COLUMNS, 16) for row in range(ROWS)])


MODES = [
    (*states, weights, dtype)
    for states, weights, dtype in itertools.product(STATES, ["stochastic", "nearest", "kahan", "master"], DTYPES)
]
MODES += [
    (*states, f"{weights}, fed back", dtype)
    for states, weights, dtype in itertools.product(STATES, ["stochastic", "nearest"], ["bf16", "fp16"])
    if "fp32" in states or "stochastic" in states
]


@pytest.mark.sampled(cover=2)
@pytest.mark.parametrize(
    ("states", "rounding", "weights", "dtype"), sweep(MODES, key=lambda mode: (mode[:2], *mode[2:]))
)  # every pair of states, weights and dtype; the triples are exhaustive
def test_steps_of_every_mode_are_those_of_numpy_bit_for_bit(states: str, rounding: str, weights: str, dtype: str) -> None:
    """Three steps, each exactly rounded operation written out; roundings by gfloat, random bits by randomgen."""
    parameter = parameters({NAME: (ROWS, COLUMNS)}, DTYPES[dtype], 3)[NAME]
    options = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    fed = weights.endswith("fed back")
    weights = weights.removesuffix(", fed back")
    storage = {"master": "fp32", "weights": "nearest"} if weights == "master" else {"weights": weights, "error_feedback": fed}
    optimizer = dither.optim.AdamW(
        [(NAME, parameter)], states=states, state_rounding=rounding, block=BLOCK, seed=SEED, **storage, **options
    )
    w = parameter.detach().float().numpy().copy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    extra = w.copy() if weights == "master" else np.zeros_like(w)
    for step in (1, 2, 3):
        parameter.grad = hard_gradient(step).clamp(-6e4, 6e4).to(DTYPES[dtype])
        optimizer.step()

        c = oracles.adamw_constants(step, options["lr"], options["betas"], options["eps"], options["weight_decay"])
        m, v = oracles.adamw_moments(parameter.grad.float().numpy(), m, v, c)
        move = oracles.adamw_move(m, v, c)
        if weights == "master":
            extra = extra * c["decay"] - move
            w = oracles.stored(extra, dtype)
        elif weights == "kahan" and dtype != "fp32":
            change = extra - (c["shrink"] * w + move)
            new = oracles.stored(w + change, dtype)
            extra, w = oracles.stored(change - (new - w), dtype), new
        else:
            drawn = random_bits("optimizer weight", step) if weights == "stochastic" else None
            wide = w * c["decay"] - move
            w = oracles.stored(wide, dtype, drawn)
            if fed:
                m = m - (wide - w) * (np.sqrt(v) * c["root"] + c["eps"]) * c["feedback"]
        assert not oracles.mismatches(parameter.detach().float().numpy(), w).any()

        state = optimizer.state[parameter]
        drawn = random_bits("optimizer moments", step) if rounding == "stochastic" and states != "fp32" else None
        draws = (drawn, None if drawn is None else drawn * ODD_FACTOR % 65536)
        for key, random in zip(("exp_avg", "exp_avg_sq"), draws, strict=True):
            value = m if key == "exp_avg" else v
            if states in WHOLE:
                back = oracles.stored(value, states, random)
                assert not oracles.mismatches(state[key].float().numpy(), back).any()
            else:
                codes, scales, back = oracles.stored_in_blocks(value, states, BLOCK, key == "exp_avg", random)
                assert (state[key].numpy() == codes).all()
                assert (state[f"{key}_scale"].numpy() == scales).all()
            m, v = (back, v) if key == "exp_avg" else (m, back)
        for key in ("master", "remainder"):
            if key in state:
                assert not oracles.mismatches(state[key].float().numpy(), extra).any()


@pytest.mark.parametrize(("stored", "spacing"), [("bf16", 2.0**-8), ("e4m3", 2.0**-4)])
def test_error_feedback_makes_up_for_rounding_to_nearest(stored: str, spacing: float) -> None:
    """Steps are a 40th of the spacing below 1. To nearest, weights stand still; with feedback they follow float32 ones.

    A tenth of what was lost is made up for in the next step, so that up to five spacings wait until the sum rounds away from 1.
    """
    steps, lr, weights = 320, spacing / 40, []
    for feedback in (None, False, True):
        net = nn.Sequential(dither.nn.Linear(16, 16, bias=False, precision=dither.recipe("fp8-current").default, name="0"))
        nn.init.constant_(net[0].weight, 1.0)
        if feedback is not None and stored == "bf16":
            net.bfloat16()
        elif feedback is not None:
            dither.nn.store_weights(net, torch.float32)
        options = {} if feedback is None else {"weights": "nearest", "error_feedback": feedback}
        optimizer = dither.optim.AdamW(net.named_parameters(), lr, weight_decay=0.0, states="fp32", **options)
        (parameter,) = net.parameters()
        for _ in range(steps):
            parameter.grad = torch.ones(16, 16, dtype=parameter.dtype)
            optimizer.step()
        weights.append(net[0].weight.detach().float())
    wide, alone, fed = weights
    assert float(wide.mean()) == pytest.approx(1 - steps * lr, rel=1e-4)
    assert bool((alone == 1).all())
    assert float((fed - wide).abs().max()) < 6 * spacing


@pytest.mark.parametrize(
    ("options", "dtype", "words"),
    [
        ({"error_feedback": 1}, torch.bfloat16, "error_feedback is True or False"),
        ({}, torch.float32, "all parameters are float32"),
        ({"weights": "kahan"}, torch.bfloat16, "weights='kahan' keeps it"),
        ({"master": "split24"}, torch.bfloat16, "master='split24' keeps it"),
        ({"states": "dynamic4"}, torch.bfloat16, "dynamic4 states that are rounded to nearest lose these"),
        ({"state_rounding": "nearest"}, torch.bfloat16, "bf16 states that are rounded to nearest lose these"),
        ({"betas": (0.0, 0.9)}, torch.bfloat16, r"betas\[0\] is at least 0.125"),
        ({"eps": 1e26}, torch.bfloat16, "multiplies errors by eps"),
        ({"share": {"w": Role.rows_each(1)}}, torch.bfloat16, "neither Adam-mini nor the matrices of Muon"),
    ],
)
def test_error_feedback_that_could_not_work_is_refused(options: dict[str, object], dtype: torch.dtype, words: str) -> None:
    with pytest.raises(UserError, match=words):
        dither.optim.AdamW([("w", torch.zeros(4, 4, dtype=dtype))], **{"error_feedback": True, **options})


def test_second_moments_that_overflow_give_nan_and_not_a_weight_that_stands_still() -> None:
    parameter = parameters({"w": (1, 4)})["w"]
    optimizer = dither.optim.AdamW([("w", parameter)], lr=1e-2)
    parameter.grad = torch.tensor([[1e20, 1e18, 1.0, -1e30]])
    optimizer.step()
    assert parameter.isnan().tolist() == [[True, False, False, True]]


def test_quotients_below_the_normal_numbers_lose_nothing() -> None:
    """Moments of 10^-38 over eps = 10^5 are subnormal numbers of few bits; with the factor 2^48 they have all of them."""
    for size in (1e-36, 3e-38, 7e-40):
        parameter = torch.zeros(1, 1, requires_grad=True)
        optimizer = dither.optim.AdamW([("w", parameter)], lr=1e10, betas=(0.9, 0.95), eps=1e5, weight_decay=0.0)
        parameter.grad = torch.full((1, 1), size)
        optimizer.step()
        c = oracles.adamw_constants(1, 1e10, (0.9, 0.95), 1e5, 0.0)
        m, v = oracles.adamw_moments(parameter.grad.numpy(), np.float32(0), np.float32(0), c)
        assert -parameter.item() == oracles.adamw_move(m, v, c).item()
        assert -parameter.item() == pytest.approx(1e10 / (1 - 0.9) * float(m.item()) / 1e5, rel=1e-6)


def test_bias_corrections_of_many_steps() -> None:
    """Powers by squaring are those of logarithms, as near as float32 can tell."""
    for beta1, beta2 in ((0.9, 0.95), (0.95, 0.999), (0.0, 0.9999)):
        for t in (1, 2, 3, 10, 777, 10**5, 2**31 + 5):
            hyper = torch.tensor([[1e-3, beta1, beta2, 1e-8, 0.1, 1.0, 1.0]], dtype=torch.float64)
            constants, _, _ = adamw.prepare(hyper, torch.tensor([t - 1]), torch.tensor(0), None, None, None, 0.0)
            left1, left2 = (np.float32(-math.expm1(t * math.log(beta)) if beta else 1.0) for beta in (beta1, beta2))
            assert constants[0, 7].item() == pytest.approx(float(np.float32(1e-3) / left1) * 2.0**-48, rel=1.2e-7)
            assert constants[0, 8].item() == pytest.approx(float(1 / np.sqrt(left2)), rel=1.2e-7)


# What roundings do over many steps ------------------------------------------------------------------------------------


def test_stochastic_weights_are_unbiased_over_steps() -> None:
    """Steps far below half a unit of the last place: nearest stands still, stochastic weights move on average."""
    size, steps, lr = (64, 256), 50, 1e-4
    moved = {}
    for weights in ("nearest", "stochastic"):
        parameter = torch.ones(size, dtype=torch.bfloat16, requires_grad=True)
        optimizer = dither.optim.AdamW([("w", parameter)], lr=lr, weight_decay=0.0, weights=weights, states="fp32")
        parameter.grad = torch.ones_like(parameter)
        for _ in range(steps):
            optimizer.step()
        moved[weights] = parameter.detach().double() - 1.0
    assert (moved["nearest"] == 0).all()
    # A constant gradient moves by lr a step. Below 1 the spacing is 2^-8, so a step of lr rounds by a draw of variance
    # p (1 - p) 2^-16 with p = lr 2^8, independent of the others.
    p = lr * 2.0**8
    deviation = math.sqrt(steps * p * (1 - p)) * 2.0**-8 / math.sqrt(math.prod(size))
    assert abs(moved["stochastic"].mean().item() + lr * steps) < 5 * deviation + lr * steps * 1e-5
    assert moved["stochastic"].std().item() == pytest.approx(math.sqrt(steps * p * (1 - p)) * 2.0**-8, rel=0.05)


def test_the_bits_of_the_two_moments_are_a_permutation_and_hardly_correlated() -> None:
    """All 65536 draws: the second is as uniform as the first, and roundings by both are nearly independent."""
    first = np.arange(65536)
    second = first * ODD_FACTOR % 65536
    assert (np.sort(second) == first).all()
    # If independent, the correlation of 65536 pairs would have a standard deviation of 2^-8; the lattice does better.
    assert abs(np.corrcoef(first, second)[0, 1]) < 2.0**-10
    # The events "rounds up" with probabilities p and q, over all draws: how far both together are from p q.
    for p, q in itertools.product((1 / 16, 1 / 4, 1 / 2, 3 / 4), repeat=2):
        together = np.mean((first >= 65536 * (1 - p)) & (second >= 65536 * (1 - q)))
        assert abs(together - p * q) < 2.0**-8, (p, q)
    assert BITS == 16


# The dynamic 8-bit map -------------------------------------------------------------------------------------------------


CODES = torch.arange(256).to(torch.uint8)


@pytest.mark.parametrize("signed", [True, False])
def test_values_are_those_of_bitsandbytes(signed: bool) -> None:
    values = state_maps.decode(CODES, signed).numpy()
    assert (np.diff(values) > 0).all()
    assert (values == oracles.dynamic_values(signed)).all()  # its own formula, bit for bit
    exact = oracles.dynamic_map(signed)
    assert (np.abs(values - exact) <= 2 * np.spacing(np.abs(exact))).all()  # bitsandbytes' numbers, within two roundings
    assert values[255] == 1.0
    assert values[127 if signed else 0] == 0.0


def numbers(signed: bool) -> np.ndarray:
    """Every value, the middles between neighbours and what is just beside them, powers of two, and 10^4 of every size."""
    values = oracles.dynamic_map(signed)
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    generator = np.random.default_rng(4)
    spread = (generator.random(10_000) * 10.0 ** generator.uniform(-9, 0, 10_000)).astype(np.float32)
    points = np.concatenate([values, middles, spread, 2.0 ** np.arange(-149, 1).astype(np.float32), np.float32([0.0, 1.0])])
    points = np.concatenate([points, np.nextafter(points, np.float32(2)), np.nextafter(points, np.float32(-2))])
    points = np.concatenate([points, -points]) if signed else np.abs(points)
    return points[np.abs(points) <= 1].astype(np.float32)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed: bool) -> None:
    """By search, in float64. At the middle of two values float32 cannot tell which is nearer: there either will do."""
    points = numbers(signed)
    codes = state_maps.encode(torch.from_numpy(points), signed).numpy().astype(int)
    values = oracles.dynamic_map(signed).astype(np.float64)
    distance = np.abs(values[codes] - points)
    best = np.abs(values[oracles.dynamic_code(points, signed)] - points)
    assert (distance - best <= 4 * np.spacing(np.abs(points)).astype(np.float64)).all()
    assert (distance > best).mean() < 0.05  # only those beside a middle


def test_what_lies_beyond_the_map() -> None:
    beyond = torch.tensor([1.5, torch.inf, torch.nan, -1.0, -1.5, -torch.inf, 1e-45, -1e-45, -0.0])
    assert state_maps.encode(beyond, True).tolist() == [255, 255, 255, 0, 0, 0, 127, 127, 127]
    assert state_maps.encode(beyond[[0, 1, 2, 6]], False).tolist() == [255, 255, 255, 0]


def test_a_block_of_subnormal_numbers_comes_back() -> None:
    """Its scale stops at 2^-126, in both directions: the values then fill less of the map, and lose no factor."""
    update = Update("nearest", "dynamic8", block=16)
    value = torch.linspace(-1, 1, 32).reshape(1, 32) * 2.0**-130
    m, scale = adamw.store_state(value, update, True)
    assert scale.tolist() == [[2.0**-126] * 2]
    # Values up to 2^-4 of the scale lie in the decade whose 32 parts are 0.09 / 32 wide.
    assert bool(((adamw.load_state(m, scale, update, True, 32) - value).abs() <= 2.0**-126 * 0.09 / 32 / 2 * 1.01).all())


# Masters that are split into bfloat16 weights and more bits ------------------------------------------------------------


def hard_masters() -> Tensor:
    """Random bits, every tie of some exponents with both signs, subnormal numbers, zeros, the largest numbers, Inf, NaN."""
    anything = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 16,), generator=torch.Generator().manual_seed(0))
    ties = (torch.arange(0x3F00, 0x4100) << 16) + 0x8000
    near = torch.cat([ties - 1, ties + 1])
    special = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
    positive = torch.cat([ties, near, special])
    bits = torch.cat([anything, positive, positive - (1 << 31)])
    return bits.to(torch.int32).view(torch.float32)


def test_split_masters_are_lossless_and_weights_the_nearest() -> None:
    master = hard_masters()
    weight, low, tie = adamw.split(master)
    joined = adamw.join(weight, low, tie)
    nan = master.isnan()
    assert torch.equal(joined.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert joined[nan].isnan().all()
    assert torch.equal(weight[~nan].view(torch.int16), master[~nan].bfloat16().view(torch.int16))  # torch rounds to even
    assert tie.sum() > 500  # without them, 16 bits would not do


def test_masters_of_24_bits() -> None:
    master = hard_masters()
    usual = master.isfinite() & (master.abs() > 1e-30) & (master.abs() < 1e38)
    weight, low = adamw.split24(master)
    joined = adamw.join24(weight, low)
    assert ((joined - master).abs() / master.abs())[usual].max() <= 2.0**-16
    assert torch.equal(joined.view(torch.int32) & 0xFF, torch.zeros_like(joined, dtype=torch.int32))
    assert joined[master.isnan()].isnan().all()
    nearest = (joined - weight.float()).abs() <= (joined - joined.bfloat16().float()).abs()
    assert nearest[usual].all()
    again = adamw.split24(joined)
    assert torch.equal(again[0][usual], weight[usual])
    assert torch.equal(again[1][usual], low[usual])


# The optimizer --------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8)).to(torch.bfloat16)


def steps(net: nn.Module, optimizer: AdamW, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def wide(net: nn.Module, optimizer: AdamW) -> list[Tensor]:
    """Everything that the next step depends on: wide weights, moments, weights."""
    found = []
    for p in net.parameters():
        state = optimizer.state[p]
        found += [adamw.wide_weight(p.detach(), state), state["exp_avg"], state["exp_avg_sq"].abs(), p.detach().clone()]
    return found


def make_ties(net: nn.Module, optimizer: AdamW) -> None:
    """Set every third float32 master half way between two bfloat16 numbers."""
    for p in net.parameters():
        bits = optimizer.state[p]["master"].view(torch.int32).view(-1)
        bits[::3] = (bits[::3] >> 16 << 16) + 0x8000
        p.data.copy_(optimizer.state[p]["master"])


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("lr", [1e-2, 0.0])
def test_split_masters_take_the_steps_of_float32_masters(states: str, lr: float) -> None:
    """Ties among them: with lr=0 they stay, and only the sign of the second moment tells which way they were rounded."""
    nets = model(), model()
    pair = [AdamW(n.named_parameters(), lr=lr, weight_decay=0.1, states=states, master="fp32") for n in nets]
    for net, optimizer in zip(nets, pair, strict=True):
        steps(net, optimizer, range(2))
        make_ties(net, optimizer)
    pair[1].param_groups[0]["master"] = "split"  # converted by the next step
    for number in range(2, 30):
        for net, optimizer in zip(nets, pair, strict=True):
            steps(net, optimizer, range(number, number + 1))
        assert same(wide(nets[0], pair[0]), wide(nets[1], pair[1])), number
    state = pair[1].state[nets[1][0].weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master_low"}
    assert state["master_low"].dtype == torch.int16
    if not lr:
        assert state["exp_avg_sq"].signbit().any()
    moments = dither.optim.torch_state_dict(pair[1])["state"][0]["exp_avg_sq"]
    assert torch.equal(moments, pair[0].state[nets[0][0].weight]["exp_avg_sq"].float())
    pair[1].param_groups[0]["master"] = "fp32"  # and back
    steps(nets[0], pair[0], range(30, 31))
    steps(nets[1], pair[1], range(30, 31))
    assert same(wide(nets[0], pair[0]), wide(nets[1], pair[1]))
    assert not pair[1].state[nets[1][0].weight]["exp_avg_sq"].signbit().any()


@pytest.mark.parametrize(("first", "then"), [("fp32", "split"), ("split", "fp32"), ("split", "split"), ("split24", "split24")])
def test_states_load_into_either_kind(first: str, then: str) -> None:
    """The state is loaded before the weights, as a checkpoint does it."""
    net, straight = model(), model()
    saved = AdamW(net.named_parameters(), lr=1e-2, states="fp32", master=first)
    steps(net, saved, range(3))
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(saved.state_dict())
    other = model()
    loaded = AdamW(other.named_parameters(), lr=1e-2, states="fp32", master=then)
    loaded.load_state_dict(state)
    other.load_state_dict(weights)
    steps(other, loaded, range(3, 6))
    one = AdamW(straight.named_parameters(), lr=1e-2, states="fp32", master=first)
    steps(straight, one, range(6))
    assert same(wide(straight, one), wide(other, loaded))
    assert loaded.state_dict()["param_groups"][0]["master"] == then


def test_kahan_and_24_bits_convert() -> None:
    net = model()
    optimizer = AdamW(net.named_parameters(), lr=1e-4, weights="kahan")
    steps(net, optimizer, range(5))
    before = adamw.wide_weight(net[0].weight.detach(), optimizer.state[net[0].weight])
    optimizer.param_groups[0].update(weights="nearest", master="split24")
    optimizer.state_dict()
    after = adamw.wide_weight(net[0].weight.detach(), optimizer.state[net[0].weight])
    assert (after - before).abs().max() <= 2.0**-16 * before.abs().max()
    assert optimizer.state[net[0].weight]["master_low"].dtype == torch.int8


def test_what_cannot_be_split() -> None:
    w = [("w", nn.Parameter(torch.zeros(4, 64, dtype=torch.bfloat16)))]
    with pytest.raises(UserError, match="one bit in the sign of the second moment, which states='dynamic8'"):
        AdamW(w, master="split", states="dynamic8")
    with pytest.raises(UserError, match="Adam-mini shares second moments: use master='fp32' or 'split24'"):
        AdamMini(w, {"w": Role.rows_each(1)}, master="split")
    with pytest.raises(UserError, match=r"'w' is torch.float16: use master='fp32'"):
        AdamW([("w", nn.Parameter(torch.zeros(4, 64, dtype=torch.float16)))], master="split24")
    with pytest.raises(UserError, match="weights='kahan' keeps what a rounding loses, and so does master='split'"):
        AdamW(w, master="split", weights="kahan")
    with pytest.raises(UserError, match="saved with master='split', and this optimizer has master='split24'"):
        AdamW(w, master="split24").load_state_dict(AdamW(w, master="split").state_dict())


def test_modes_and_bytes() -> None:
    bytes_per_weight = {}
    for mode in ("o2", "o2-split", "bf16-kahan", "bf16-24"):
        net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.RMSNorm(64))
        run = dither.optim.training(net, mode, lr=1e-3)
        for p in net.parameters():
            p.grad = torch.ones_like(p, dtype=p.grad_dtype)
        run.optimizer.step()
        state = run.optimizer.state[net[0].weight]
        held = [net[0].weight.detach(), *(value for key, value in state.items() if key != "step")]
        bytes_per_weight[mode] = sum(t.nbytes for t in held) / net[0].weight.numel()
    assert bytes_per_weight == {"o2": 14, "o2-split": 12, "bf16-kahan": 8, "bf16-24": 7}
    assert set(run.optimizer.state[net[1].weight]) == {"step", "exp_avg", "exp_avg_sq", "master_low"}
