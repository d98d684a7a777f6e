"""The start of `dither` and of `python -m dither`."""

import sys


def main() -> int:
    """Run the command line. Ctrl-C is one line also while its modules are imported."""
    try:
        from dither.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("dither: error: Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
