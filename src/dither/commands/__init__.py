"""What stands behind the commands of the command line, a module for each; `dither.cli` lists them."""
