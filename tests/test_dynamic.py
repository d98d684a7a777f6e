"""The dynamic 8-bit map: against bitsandbytes' formula in exact fractions, and the kernel's codes against the reference's."""

import numpy as np
import oracles
import pytest
import torch

from dither.ops.reference import adamw, state_maps
from dither.ops.reference.adamw import Piece
from dither.spec.optimizer import Update

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


def test_values_are_those_of_bitsandbytes_by_its_own_code() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    for signed in (True, False):
        theirs = functional.create_dynamic_map(signed).numpy()
        assert (np.abs(state_maps.decode(CODES, signed).numpy() - theirs) <= 4 * np.spacing(np.abs(theirs))).all()


@pytest.mark.parametrize("signed", [True, False])
def test_every_value_is_its_own_nearest(signed: bool) -> None:
    assert (state_maps.encode(state_maps.decode(CODES, signed), signed) == CODES).all()


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
    m, scale = adamw.zero_state((1, 32), update, True, torch.device("cpu"))
    piece = Piece(torch.zeros(1, 32), m, m, scale, scale, None, 0, 0, (0, 0), 0)
    adamw._store(piece, m, scale, value, torch.zeros((), dtype=torch.int64), update, 1)
    assert scale.tolist() == [[2.0**-126] * 2]
    # Values up to 2^-4 of the scale lie in the decade whose 32 parts are 0.09 / 32 wide.
    assert bool(((adamw.load_state(m, scale, update, True) - value).abs() <= 2.0**-126 * 0.09 / 32 / 2 * 1.01).all())
