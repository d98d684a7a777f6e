"""Captured passes of own loops without a GPU: what is refused. Replays are compared in tests/gpu/test_graphs_gpu.py."""

import pytest
import torch

import dither
from dither import UserError
from dither.models import build
from dither.nn import GraphedPasses, step_context


def test_a_model_that_is_not_on_a_gpu():
    with pytest.raises(UserError, match="takes a model on one GPU, and the parameters of this one are on cpu"):
        dither.capture_passes(build("tiny"), lambda tokens: tokens)
    with pytest.raises(UserError, match="takes a model and a function, not str and function"):
        dither.capture_passes("model", lambda tokens: tokens)
    with pytest.raises(UserError, match="are on nowhere"):
        dither.capture_passes(torch.nn.ReLU(), lambda tokens: tokens)


def passes_of(recipe: str):
    model = build("tiny")
    dither.convert(model, recipe)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, tokens)
        loss.backward()
        return loss

    return model, GraphedPasses(model, run)


def test_shapes_stay_and_steps_are_named():
    """Before a capture passes run as usual; the first call fixes the shapes, and random bits need a step."""
    model, passes = passes_of("fp4-block")
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with pytest.raises(UserError, match=r"'model.layers.0.self_attn.q_proj' draws random bits.*step_context"):
        passes(tokens)
    with step_context(model, step=0):
        assert passes(tokens).isfinite()
        with pytest.raises(UserError, match=r"here \[2, 16\] \(torch.int64\), not \[1, 16\] \(torch.int64\): pad the batches"):
            passes(tokens[:1])


def test_counted_rows_move_on_with_a_captured_pass():
    """A replay draws for the rows after those counted so far, and counts its own."""
    model, _ = passes_of("fp4-block")
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    with step_context(model, step=3) as at:
        layer(torch.randn(16, 128))
        assert layer.draws.rows == 16
        at.move_rows(32)
        assert layer.draw_place.tolist() == [3, 16]
        at.move_rows(32)
        assert layer.draw_place.tolist() == [3, 48]
        assert layer.draws.rows == 80
