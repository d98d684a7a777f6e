"""`python -m dither.doctor`: the work of `dither doctor`, on a machine that has torch but not the command line's packages."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from dither.doctor.report import run
from dither.doctor.self_test import ELEMENTS, compare_operations, load_kernels, operations
from dither.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m dither.doctor` and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dither.doctor", description="Examine and test this machine.")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="elements per cast of the self-test")
    parser.add_argument("--engines", help="a file in which to record the native matrix units that passed")
    parser.add_argument("--interpret", action="store_true", help="only compare, on the CPU, and print JSON")
    parser.add_argument("--share", default="0/1", help="with --interpret: which part of the work, such as 0/2")
    given = parser.parse_args(arguments)
    if not given.interpret:
        try:
            return run(given.elements, given.engines)
        except UserError as error:
            print(f"dither.doctor: error: {error}", file=sys.stderr)
            return 2
    index, count = map(int, given.share.split("/"))
    torch.set_num_threads(1)  # the other cores work on other shares
    # In pairs, because stochastic casts, which take longer, alternate with others.
    share = [each for number, each in enumerate(operations(given.elements)) if number // 2 % count == index]
    print(json.dumps([asdict(check) for check in compare_operations(share, "cpu", load_kernels())]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
