"""Casts of one layout into memory that is there, transposed codes and factors of a tensor: kernels against the reference."""

import pairs
import pytest
import torch

from dither import Cast
from dither.ops.reference import quantize
from dither.ops.reference import quantize as reference_quantize
from dither.ops.reference import scales as reference_scaling

pytest.importorskip("triton", reason="the kernels need Triton")

from dither.ops.triton import quantize as kernel_quantize
from dither.ops.triton import quantize as kernel_transposing
from dither.ops.triton import scales as kernel_scaling


@pytest.mark.parametrize("text", ["e4m3 tile(128)", "e4m3 row", "e2m1 block(32)", "e4m3 tensor", "e2m1 tile(32) pow2"])
def test_one_layout_into_memory_that_is_there(text: str, device: str) -> None:
    cast = Cast.parse(text)
    old, new = (pairs.hard_values(40, 160, torch.float32, seed, device).nan_to_num(0, 9, -9) for seed in (21, 22))
    for axis in (0, 1):
        results = []
        for code in (reference_quantize, kernel_quantize):
            held = code.quantize(old, cast, axis, None, None, cast.element)[:2]
            found = code.quantize(new, cast, axis, None, None, cast.element, held)[:2]
            assert [part.data_ptr() for part in found] == [part.data_ptr() for part in held]
            results.append(found)
        fresh = reference_quantize.quantize(new, cast, axis, None, None, cast.element)[:2]
        assert sum(map(pairs.differing, *results)) == sum(map(pairs.differing, fresh, results[0])) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("shape", [(256, 128), (130, 33), (1, 5), (0, 4)])
def test_transposed_codes(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    bits = torch.randint(0, 256, (shape[0], shape[1] * dtype.itemsize), generator=torch.Generator().manual_seed(0))
    codes = bits.to(torch.uint8).view(dtype).to(device)
    assert pairs.differing(quantize.transposed(codes), kernel_transposing.transposed(codes)) == 0


@pytest.mark.parametrize("text", ["e4m3 tensor", "e5m2 tensor"])
def test_factors_of_a_tensor(text: str, device: str) -> None:
    for value in (0.0, 1e-45, 1e-39, 1e-3, 3.7, 448.0, 3e38, torch.inf, torch.nan):
        amax = torch.tensor(value, device=device)
        both = reference_scaling.tensor_factors(amax, Cast.parse(text)), kernel_scaling.tensor_factors(amax, Cast.parse(text))
        assert sum(map(pairs.differing, *both)) == 0, value
