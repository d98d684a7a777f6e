"""MX and NVFP4 casts against torchao's, bit for bit. Skipped where torchao is not installed."""

import contextlib
import importlib.util
import io
import logging
import warnings

import pytest
import torch

import dither
from dither.spec.formats import Format

if importlib.util.find_spec("torchao") is None:
    pytest.skip("torchao is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def torchao():
    """torchao's modules; importing them warns about what is missing on this machine, which is no concern of ours."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            from torchao.prototype.mx_formats import config, constants, mx_tensor, nvfp4_tensor
    finally:
        logging.disable(logging.NOTSET)
    return {"config": config, "constants": constants, "mx": mx_tensor, "nvfp4": nvfp4_tensor}


def numbers(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """65,536 random numbers, their rows of very different magnitude, with a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 256, generator=generator) * torch.exp2(torch.randint(-30, 31, (256, 1), generator=generator).float())
    x[3, 64:128] = 0
    return x.to(dtype)


def unpacked(q: dither.Quantized) -> torch.Tensor:
    """6-bit codes one to a byte, as torchao keeps them."""
    octets = q.values.to(torch.int64).unflatten(-1, (-1, 3))
    word = octets[..., 0] | octets[..., 1] << 8 | octets[..., 2] << 16
    return torch.stack([word >> 6 * i & 63 for i in range(4)], -1).flatten(-2).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_mx_casts_equal_to_mx_with_floor(torchao, name, dtype):
    element = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e2m3": torchao["constants"].DTYPE_FP6_E2M3,
        "e3m2": torchao["constants"].DTYPE_FP6_E3M2,
        "e2m1": torch.float4_e2m1fn_x2,
    }[name]
    x = numbers(dtype)
    scale, codes = torchao["mx"].to_mx(x, element, 32, torchao["config"].ScaleCalculationMode.FLOOR)
    q = dither.quantize(x, f"{name} tile(32) pow2")
    ours = unpacked(q) if Format.parse(name).bits == 6 else q.values.view(torch.uint8)
    assert x.numel() == 65536
    assert torch.equal(ours, codes.view(torch.uint8).reshape(ours.shape))
    # The one disagreement: an all-zero block has the scale 1 with us, and the smallest there is, 2^-127, with torchao.
    zero = x.reshape(256, 8, 32).abs().amax(-1) == 0
    assert int(zero.sum()) == 2
    scale = scale.view(torch.uint8).reshape(256, 8)
    assert (scale[zero] == 0).all()
    assert (q.scale.view(torch.uint8)[zero] == 127).all()
    assert torch.equal(q.scale.view(torch.uint8)[~zero], scale[~zero])


def test_every_element_type_of_torchao_is_compared(torchao):
    assert len(torchao["constants"].SUPPORTED_ELEM_DTYPES) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_equals_its_quantizer(torchao, dtype):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, 100:] *= 4
    amax = dither.amax(x)
    tensor_scale = torchao["nvfp4"].per_tensor_amax_to_scale(amax)
    scale, codes = torchao["nvfp4"].nvfp4_quantize(x, 16, tensor_scale)
    q = dither.quantize(x, "nvfp4")
    assert x.numel() == 65536
    assert q.tensor_scale == tensor_scale == amax / (448 * 6)
    assert torch.equal(q.scale.view(torch.uint8), scale.view(torch.uint8).reshape(q.scale.shape))
    assert torch.equal(q.values, codes.view(torch.uint8))


def test_nvfp4_blocks_far_below_the_largest_use_e4m3_subnormals(torchao):
    # The one disagreement: torchao's block scales stop at the smallest normal E4M3 number, 2^-6; ours go on to 2^-9, so
    # that a block 2^-15 below the largest magnitude still has codes other than zero.
    x = torch.full((1, 32), 2688.0)
    x[0, 16:] = 6 * 2.0**-8
    scale, codes = torchao["nvfp4"].nvfp4_quantize(x, 16, torch.tensor(1.0))
    q = dither.quantize(x, "nvfp4")
    assert scale.float().flatten().tolist() == [448.0, 2.0**-6]
    assert q.scale.float().flatten().tolist() == [448.0, 2.0**-8]
    assert torch.equal(q.values[:, :8], codes[:, :8])
    assert torch.equal(q.dequantize(), x)
