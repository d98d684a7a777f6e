"""The goals of the benchmarks on an H200, and the words for a figure beside its goal.

    train.py        speed and peak memory relative to BF16 autocast (o1) in the same run; the share of casts in a step
    quantize.py     bandwidth of a cast relative to that of a copy
    optimizers.py   bandwidth of a step relative to that of a copy

>>> against(1.15, 1.25), against(1.26, 1.25), against(0.94, 0.79, least=False)
('1.25, missed by 0.100', '1.25, reached', '0.79, missed by 0.150')
"""

SPEED = {
    "recipe:fp8-current": {"1b": 1.38, "3b": 1.40, "8b4": 1.48},
    "recipe:fp8-current+sr": {"1b": 1.55, "3b": 1.60, "8b4": 1.65},
    "recipe:fp8-current+output+sr": {"1b": 1.55, "3b": 1.60, "8b4": 1.65},
    "recipe:fp8-block": {"1b": 1.25, "3b": 1.28, "8b4": 1.33},
    "recipe:fp8-block-2d": {"1b": 1.25, "3b": 1.28, "8b4": 1.33},
    "bf16-sr": {"1b": 1.12, "3b": 1.18},
}
"""Least speed relative to o1, by mode of train.py and size."""

MEMORY = {
    "recipe:fp8-current": {"1b": 0.79, "3b": 0.82, "8b4": 0.85},
    "recipe:fp8-current+sr+companded8": {"1b": 0.55, "3b": 0.45},
    "bf16-sr": {"1b": 0.75, "3b": 0.58},
}
"""Most peak memory relative to o1, by the beginning of a mode and size: endings such as +input save memory."""

CASTS = 0.10
"""Largest share of a step's time that casts may take."""

BOTH_LAYOUTS = {"e4m3 tile(128) fp32 nearest": 0.80}
"""Least share of a copy's bandwidth of a cast in both layouts."""

OPTIMIZERS = {
    "dither, bf16 stochastic": 0.93,
    "dither, bf16, dynamic8 states": 0.75,
    "dither, bf16, companded8 states": 0.75,
    "dither Adam-mini, bf16 stochastic": 0.85,
}
"""Least share of a copy's bandwidth, by row of optimizers.py."""


def against(value: float | None, goal: float | None, *, least: bool = True) -> str:
    """Return the goal, and whether a figure reaches it; "" without a goal. With `least`, larger figures are better."""
    if goal is None:
        return ""
    if value is None:
        return f"{goal:.2f}"
    missing = goal - value if least else value - goal
    return f"{goal:.2f}, " + ("reached" if missing <= 0 else f"missed by {missing:.3f}")


def speed(mode: str, size: str, ratio: float | None) -> str:
    """Return the cell of a mode's speed."""
    return against(ratio, SPEED.get(_known(mode, SPEED), {}).get(size))


def memory(mode: str, size: str, ratio: float | None) -> str:
    """Return the cell of a mode's peak memory."""
    return against(ratio, MEMORY.get(_known(mode, MEMORY), {}).get(size), least=False)


def _known(mode: str, table: dict[str, dict[str, float]]) -> str:
    """Return the longest mode of a table that this one is, perhaps with more endings."""
    return max((known for known in table if mode == known or mode.startswith(f"{known}+")), key=len, default="")
