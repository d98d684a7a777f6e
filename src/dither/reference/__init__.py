"""What every operation means: pure torch, on any device, written to be read. `dither.kernels` must agree bit for bit."""
