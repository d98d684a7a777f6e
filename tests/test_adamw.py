"""The update of AdamW: against torch's, against exactly rounded operations in numpy, and its roundings over many steps."""

import importlib.util
import itertools
import logging
import math
import warnings

import numpy as np
import oracles
import pytest
import torch
from sweeps import sweep
from torch import Tensor

import dither
from dither import Stream
from dither.ops.reference import adamw
from dither.spec.optimizer import BITS, BLOCKS, MAPS, ODD_FACTOR, WHOLE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parameters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()}


# Against torch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_float32_is_torch_adamw(weight_decay: float, betas: tuple[float, float]) -> None:
    """100 steps of a changing learning rate; one parameter has no gradient in every third step, and counts its own steps."""
    shapes = {"matrix": (33, 17), "row": (1, 50), "bias": (7,), "experts": (3, 5, 11), "scalar": ()}
    ours, theirs = parameters(shapes), parameters(shapes)
    options = {"lr": 1e-2, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8}
    mine = dither.optim.AdamW(ours.items(), **options)
    torchs = torch.optim.AdamW(theirs.values(), **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        for optimizer in (mine, torchs):
            optimizer.param_groups[0]["lr"] = 1e-2 * (0.5 + 0.5 * math.cos(step / 20))
        for name, shape in shapes.items():
            gradient = None if name == "bias" and step % 3 == 1 else torch.randn(shape, generator=generator)
            ours[name].grad = theirs[name].grad = gradient
        mine.step()
        torchs.step()
    for name in shapes:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine.state[ours[name]][key], torchs.state[theirs[name]][key], rtol=1e-6, atol=1e-6)
    assert int(mine.state[ours["bias"]]["step"]) == 67
    assert int(mine.steps) == 100


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


@pytest.mark.parametrize(
    ("states", "rounding", "weights", "dtype"), sweep(MODES, key=lambda mode: (mode[:2], *mode[2:]))
)  # every pair of states, weights and dtype; the triples are exhaustive
def test_steps_of_every_mode_are_those_of_numpy_bit_for_bit(states: str, rounding: str, weights: str, dtype: str) -> None:
    """Three steps, each exactly rounded operation written out; roundings by gfloat, random bits by randomgen."""
    parameter = parameters({NAME: (ROWS, COLUMNS)}, DTYPES[dtype], 3)[NAME]
    options = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    storage = {"master": "fp32", "weights": "nearest"} if weights == "master" else {"weights": weights}
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
            w = oracles.stored(w * c["decay"] - move, dtype, drawn)
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


def decayed(rounding: str | None, steps: int) -> Tensor:
    """1024 second moments that start at 1, in bfloat16, after steps with gradients of zero."""
    parameter = torch.zeros(16, 64, dtype=torch.bfloat16, requires_grad=True)
    optimizer = dither.optim.AdamW([("w", parameter)], lr=1e-3, betas=(0.9, 0.9981), states="bf16", state_rounding=rounding)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    for _ in range(steps):
        optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"].double()


def test_bfloat16_second_moments_decay_only_with_stochastic_rounding() -> None:
    steps = 370
    assert (decayed("nearest", 3) == 1.0).all()  # and so for ever: each step does the same
    v = decayed(None, steps)  # stochastic is the default of bf16
    # A rounding is unbiased, and moves y by less than a unit of its last place, at most 2^-7 y, so with a variance of at most
    # 2^-16 y^2: the mean square grows by at most 1 + 2^-16 a step beside the decay, and the variance is below what follows.
    beta2 = float(np.float32(0.9981))
    expected = beta2**steps
    deviation = expected * math.sqrt(((1 + 2.0**-16) ** steps - 1) / v.numel())
    assert abs(v.mean().item() - expected) < 5 * deviation
    assert expected < 0.5


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


# 8-bit states beside those of others ----------------------------------------------------------------------------------


class Regression:
    """Least squares with 8 x 512 weights; the inputs' sizes span ten to the power `span`, the second moments' its square."""

    steps, lr = 120, 1e-2

    def __init__(self, seed: int, span: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = 10.0 ** (span * (torch.rand(512, generator=generator) - 0.5))
        self.inputs = torch.randn(self.steps, 16, 512, generator=generator) * sizes
        self.wanted = torch.randn(8, 512, generator=generator) / sizes / 16
        self.start = torch.randn(8, 512, generator=generator) * 0.02

    def gradient(self, w: Tensor, step: int) -> Tensor:
        x = self.inputs[step]
        return (x @ (w - self.wanted).T).T @ x / 16

    def train(self, optimizer_of: object) -> Tensor:
        """The weights after all steps of an optimizer, which is made from the parameter."""
        w = self.start.clone().requires_grad_()
        optimizer = optimizer_of(w)
        for step in range(self.steps):
            w.grad = self.gradient(w.detach(), step)
            optimizer.step()
        return w.detach()

    def distance(self, w: Tensor, exact: Tensor) -> float:
        """From where float32 AdamW arrives, as a share of the way that it went."""
        return ((w - exact).norm() / (exact - self.start).norm()).item()


class BitsAndBytes:
    """bitsandbytes' rule for 8-bit AdamW: blocks of 256 in memory order, scaled by their largest magnitude, to the nearest
    value of its map; the update takes the moments as they are before."""

    def __init__(self, w: Tensor, lr: float) -> None:
        self.w, self.lr, self.t = w, lr, 0
        self.m, self.v = torch.zeros_like(w, requires_grad=False), torch.zeros_like(w, requires_grad=False)

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        m = 0.9 * self.m + 0.1 * self.w.grad
        v = 0.95 * self.v + 0.05 * self.w.grad.square()
        left1, left2 = 1 - 0.9**self.t, math.sqrt(1 - 0.95**self.t)
        self.w.mul_(1 - self.lr * 0.1).sub_(self.lr * left2 / left1 * (m / (v.sqrt() + 1e-8 * left2)))
        self.m, self.v = self.rounded(m, True), self.rounded(v, False)

    @staticmethod
    def rounded(x: Tensor, signed: bool) -> Tensor:
        blocks = x.reshape(-1, 256)
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
        values = torch.from_numpy(oracles.dynamic_map(signed))
        middles = (values[1:] + values[:-1]) / 2
        return (values[torch.bucketize(blocks / scale, middles)] * scale).reshape(x.shape)


SETTINGS = {"lr": Regression.lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def ours(states: str) -> object:
    return lambda w: dither.optim.AdamW([("w", w)], states=states, **SETTINGS)


@pytest.mark.parametrize(("seed", "span"), [(0, 0.0), (1, 1.0)])
def test_dynamic8_is_no_further_from_float32_than_bitsandbytes(seed: int, span: float) -> None:
    problem = Regression(seed, span)
    exact = problem.train(lambda w: torch.optim.AdamW([w], **SETTINGS))
    assert problem.distance(problem.train(ours("fp32")), exact) < 1e-5
    theirs = problem.distance(problem.train(lambda w: BitsAndBytes(w, Regression.lr)), exact)
    mine = problem.distance(problem.train(ours("dynamic8")), exact)
    assert 0 < mine <= theirs < 0.05, (mine, theirs)


def test_dynamic8_is_no_further_from_float32_than_torchao() -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    logging.disable(logging.WARNING)  # of what is missing on this machine, which is no concern of ours
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao.optim as torchao
    finally:
        logging.disable(logging.NOTSET)
    problem = Regression(0, 1.0)
    exact = problem.train(lambda w: torch.optim.AdamW([w], **SETTINGS))
    with torch.compiler.set_stance("force_eager"):
        theirs = problem.distance(problem.train(lambda w: torchao.AdamW8bit([w], **SETTINGS)), exact)
    mine = problem.distance(problem.train(ours("dynamic8")), exact)
    assert 0 < mine <= theirs < 0.05, (mine, theirs)
