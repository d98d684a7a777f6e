"""The type that gradients are kept, accumulated and reduced in, and norms that stay in float32."""

import copy
import math
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import dither
from dither import UserError
from dither.optim import MODES, training


def weight_of_ones(mode: str, **options: object) -> dither.optim.Training:
    """One row of 4096 weights, whose gradient is the input."""
    layer = nn.Linear(4096, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    return training(layer, mode, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, **options)


def accumulate(run: dither.optim.Training, times: int, value: float) -> Tensor:
    """The gradient after `times` backward passes that give each weight a gradient of `value`."""
    for _ in range(times):
        run.backward((run.model.weight * value).float().sum())
    gradient = run.model.weight.grad
    assert gradient is not None
    return gradient


# O2 -------------------------------------------------------------------------------------------------------------------


def test_o2_accumulates_gradients_in_float32() -> None:
    """In bfloat16, 1024 gradients of 1/1024 stop at 0.25, where a sum no longer moves."""
    gradient = accumulate(weight_of_ones("o2"), 1024, 1 / 1024)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.ones_like(gradient))


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's, on processors without bfloat16
@pytest.mark.parametrize("mode", ["o2", "bf16-sr"])
def test_a_model_with_batch_norm_trains(mode: str) -> None:
    run = training(normed(), mode, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    losses = []
    for _ in range(40):
        with run.forward():
            loss = (run.model(x) - x[:, :1]).float().square().mean()
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses
    norm = run.model[1]
    assert {each.dtype for each in (*norm.parameters(), norm.running_mean, norm.running_var)} == {torch.float32}


def test_o2_keeps_norms_in_float32() -> None:
    run = training(normed(), "o2", lr=1e-2, betas=(0.9, 0.95))
    dtypes = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    wide, narrow = torch.float32, torch.bfloat16
    assert dtypes == {
        f"{i}.{kind}": wide if i in (1, 3) else narrow for i in range(5) for kind in ("weight", "bias")
    }
    with run.forward():
        assert run.model(torch.randn(4, 8).bfloat16()).dtype == narrow
