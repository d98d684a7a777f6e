"""`dither doctor`: examine and test this machine."""

from typing import Annotated

import tyro

from dither.commands.arguments import Json


def doctor(
    elements: int = 1900, engines: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None, json: Json = False
) -> int:
    """Examine this machine, and test that kernels and devices agree bit for bit.

    It shows versions and devices, tries matrix products, runs the self-test, and recommends precisions for models of several
    sizes. The exit code is 0 if all bits agree and 1 if any differ. Without a GPU the kernels run in Triton's interpreter, in
    about 20 seconds on two cores. On a GPU the first run compiles them, which takes minutes.

    Args:
        elements: Elements per cast of the self-test; the run time is proportional to it.
        engines: A file in which to record the native matrix units of the GPU that pass; precision.engines reads it.
    """
    from dither.tools.doctor import run

    return run(elements, engines, json=json)
