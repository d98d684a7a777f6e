"""Tests of the example plugin."""

import dither_penta  # noqa: F401 (registers)
import torch

import dither


def test_every_number_is_one_of_five_times_its_scale():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    codes = dither.quantize(x, "penta32")
    values = (codes.dequantize().view(4, 2, 32) / codes.scale.view(4, 2, 1)).round(decimals=5)
    assert set(values.unique().tolist()) == set(torch.tensor([-1, -0.4, 0, 0.4, 1]).tolist())


def test_the_coin_has_the_right_mean():
    x = torch.full((1 << 16,), 0.3)  # between 0 and 0.4: 0.4 with probability 3/4
    rounded = dither.round_to(x, "penta", "coin(16)", stream=dither.Stream(0, "test", "coin"))
    sigma = 0.4 * (0.75 * 0.25 / x.numel()) ** 0.5
    assert abs(rounded.double().mean().item() - 0.3) < 5 * sigma
