"""Numbers as a person would write them, the same in the terminal and on the page."""

import math

ABSENT = "-"


def fixed(value: float | None, digits: int = 4, sign: bool = False) -> str:
    """Format a number with `digits` digits after the decimal point.

    >>> fixed(1.23456), fixed(0.5, 2, sign=True), fixed(None)
    ('1.2346', '+0.50', '-')
    """
    if value is None:
        return ABSENT
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}" if abs(value) < 1e9 else f"{value:.4g}"


def short(value: float | None) -> str:
    """Format a count with three digits.

    >>> short(950), short(12_340), short(1.5e9), short(0.25)
    ('950', '12.3 k', '1.5 G', '0.25')
    """
    if value is None:
        return ABSENT
    power = min(4, max(0, math.floor(math.log10(abs(value)) / 3 + 1e-9))) if value else 0
    return f"{value / 1000**power:.3g}{('', ' k', ' M', ' G', ' T')[power]}"


def size(value: float | None) -> str:
    """Format a number of bytes.

    >>> size(3 << 30)
    '3 GiB'
    """
    if value is None:
        return ABSENT
    power = min(4, max(0, math.floor(math.log2(value) / 10))) if value >= 1 else 0
    return f"{value / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def duration(seconds: float | None) -> str:
    """Format seconds in words.

    >>> duration(12.5), duration(200), duration(7500)
    ('12.5 s', '3 min 20 s', '2 h 5 min')
    """
    if seconds is None:
        return ABSENT
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def share(value: float | None) -> str:
    """Format a fraction as a percentage; small fractions differ from zero.

    >>> share(0.5), share(0.00012), share(1e-7), share(0.0), share(None)
    ('50 %', '0.012 %', '< 0.001 %', '0 %', '-')
    """
    if value is None:
        return ABSENT
    if 0 < abs(value) < 1e-5:
        return "< 0.001 %"
    return f"{100 * value:.2g} %" if abs(value) < 0.0995 else f"{100 * value:.3g} %"
