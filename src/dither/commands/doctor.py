"""`dither doctor`: examine and test this machine."""

from typing import Annotated

import tyro

from dither.doctor import ELEMENTS, run


def doctor(elements: int = ELEMENTS, engines: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None) -> int:
    """Show versions and devices, try matrix products, test that kernels and devices agree bit for bit, and give advice.

    The exit code is 0 when all bits agree and 1 when any differ. Without a GPU the kernels run in Triton's interpreter,
    in about 20 seconds on two cores. On a GPU the first run compiles them, which takes minutes. The advice at the end is which
    precision to use on this machine, for models of several sizes, and why.

    Args:
        elements: How many elements each cast of the self-test gets; the time grows with it.
        engines: A file to record the GPU's native matrix units in, those whose every bit was right: precision.engines names it.
    """
    return run(elements, engines)
