"""The commands of the command line, one module each. Only `dither.cli` imports them."""
