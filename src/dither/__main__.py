"""Run the command line as `python -m dither`."""

import sys

from dither.cli import main

if __name__ == "__main__":
    sys.exit(main())
