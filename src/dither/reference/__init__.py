"""The definition of every operation in pure torch, on any device, written to be read. `dither.kernels` agrees bit for bit."""
