"""Batches on the GPU: those of the CPU, copied from page-locked memory while the GPU is still busy."""

import numpy as np
import pytest
import torch

from dither.data import BYTES, Loader, Prefetch, Tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_prefetched_batches_are_those_of_the_cpu():
    tokens = Tokens((np.random.default_rng(0).integers(0, 256, 1 << 20).astype("<u2"),), BYTES)
    loader = Loader(tokens, sequence=512, batch=64, seed=1)
    work = torch.randn(4096, 4096, device="cuda")
    with Prefetch(loader, 3, 80, rank=1, world=2, device="cuda", depth=4) as batches:
        seen = []
        for batch in batches:
            assert batch.tokens.is_cuda
            work = torch.nn.functional.normalize(work @ work)  # so that copies wait, and their memory must not be reused early
            seen.append(batch)
    assert [batch.step for batch in seen] == list(range(3, 80))
    for batch in seen:
        expected = loader.batch(batch.step, 1, 2)
        assert torch.equal(batch.inputs.cpu(), expected.inputs)
        assert torch.equal(batch.targets.cpu(), expected.targets)


def test_a_pinned_batch_is_copied_without_waiting():
    batch = Loader(Tokens((np.zeros(1 << 16, "<u2"),), BYTES), sequence=128, batch=16).batch(0)
    assert not batch.tokens.is_pinned()
    pinned = batch.pin()
    assert pinned.tokens.is_pinned()
    torch.cuda.set_sync_debug_mode("error")  # a copy that waits is an error
    try:
        pinned.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
