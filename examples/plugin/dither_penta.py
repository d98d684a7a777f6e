"""Penta: five values per number, as a plugin of Dither.

    pip install ./examples/plugin
    dither train precision.recipe=penta

Installed, its names are found by entry points. Without installation, `dither train --plugin examples/plugin/dither_penta.py
precision.recipe=penta` does the same for one run.
"""

import dither

PENTA = dither.Format.from_values("penta", [-1, -0.4, 0, 0.4, 1])


def coin(fraction, odd, random):
    """Round away from zero with the probability `fraction`, so that the mean is exact."""
    return fraction + random >= 1


COIN = dither.RoundingRule("coin", coin, "either neighbour, unbiased", random=True)
PENTA32 = dither.NamedCast("penta32", "penta", "tile(32)", "fp32")

dither.register(PENTA, COIN, PENTA32)

RECIPE = dither.register(
    dither.Recipe.of(
        "penta",
        "penta32",
        "penta32",
        "penta32 coin(16)",
        about="Five values with a float32 scale per 32 numbers; gradients are rounded by a coin.",
    )
)
