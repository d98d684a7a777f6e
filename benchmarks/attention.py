"""Causal attention in BF16 by backend: that of torch's choice, cuDNN's, and FlashAttention's.

PYTHONPATH=src python3 benchmarks/attention.py            # on a GPU
"""

from contextlib import nullcontext

import torch
from grouped import milliseconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SHAPES = {
    "134m": (24, 12, 12, 2048, 64),
    "1b": (8, 32, 32, 2048, 64),
    "3b": (3, 24, 24, 2048, 128),
    "8b": (2, 32, 8, 4096, 128),
}
"""Sequences, heads, key heads, tokens and head width."""

BACKENDS = {"chosen": None, "cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}


def passes(shape: tuple[int, int, int, int, int], backend: SDPBackend | None) -> float:
    """Return the milliseconds of forward and backward."""
    batch, heads, keys, tokens, width = shape
    like = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(batch, tokens, n, width, **like).transpose(1, 2).requires_grad_() for n in (heads, keys, keys))
    dy = torch.randn(batch, tokens, heads, width, **like).transpose(1, 2)

    def both() -> None:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != keys)
        torch.autograd.grad(out, (q, k, v), dy)

    return milliseconds(both, 10)


def main() -> None:
    """Print a row for each shape."""
    for name, shape in SHAPES.items():
        print(name, ", ".join(f"{backend} {passes(shape, kind):.3f} ms" for backend, kind in BACKENDS.items()))


if __name__ == "__main__":
    main()
