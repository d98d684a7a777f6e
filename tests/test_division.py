"""Why `over_max` in kernels/scaling.py is rounded to nearest: its steps on a GPU, simulated exactly, for every mantissa.

A GPU multiplies by the rounded inverse of the divisor and corrects once by the fused residual. tests/gpu runs the kernel
itself over the same numbers; this runs anywhere.
"""

from fractions import Fraction

import numpy as np
import pytest

from dither.spec.formats import Format


def fused(a: np.ndarray, b: np.float32, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once to float32: in float64, where only a sum that ends in a tie is in doubt, and by Fraction then."""
    product = a.astype(np.float64) * np.float64(b)  # 48 bits: exact
    total = product + c
    result = total.astype(np.float32)
    doubtful = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    for i in np.flatnonzero(doubtful):
        exact = Fraction(float(a[i])) * Fraction(float(b)) + Fraction(float(c[i]))
        near = [np.nextafter(result[i], np.float32(side)) for side in (-np.inf, np.inf)] + [result[i]]
        result[i] = min(near, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.int32)) & 1))
    return result


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m4", "e3m2", "e2m3", "e2m1", "int8", "int4", "fp16", "e4m10", "e5m6"])
def test_one_correction_of_a_product_with_the_inverse_is_the_rounded_quotient(name: str) -> None:
    divisor = np.float32(Format.parse(name).max)
    inverse = np.float32(1.0 / float(divisor))
    mantissas = (np.arange(1 << 23, dtype=np.int32) | 127 << 23).view(np.float32)
    quotient = mantissas * inverse
    corrected = fused(fused(quotient, -divisor, mantissas), inverse, quotient)
    assert int((corrected != mantissas / divisor).sum()) == 0


def test_the_correction_is_needed() -> None:
    mantissas = (np.arange(1 << 23, dtype=np.int32) | 127 << 23).view(np.float32)
    assert int((mantissas * np.float32(1 / 448) != mantissas / np.float32(448)).sum()) > 1_000_000
