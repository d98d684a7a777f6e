"""The definition of every operation in pure torch, on any device, written to be read. `ops.triton` agrees bit for bit."""
