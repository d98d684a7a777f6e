"""Stages of a model for a pipeline: some of its blocks, the embedding in the first, the norm and the output in the last."""

from collections.abc import Collection

from torch import nn

from dither.errors import UserError
from dither.models.causal import CausalLM, PlainLM
from dither.models.presets import skeleton
from dither.nn.absent import Absent


def check_pipeline(model: CausalLM) -> None:
    """Raise if a model cannot be divided into stages."""
    if not isinstance(model, PlainLM):
        raise UserError("A pipeline divides the models of presets, and not those of Hugging Face: use parallel.pp=1.")
    if model.config.tie_word_embeddings:
        raise UserError(
            f"The output layer of {type(model).__name__} shares the weight of the embedding, and a pipeline has them on two "
            "ranks: use parallel.pp=1, or a model with tie_word_embeddings=False."
        )


def stage_of(model: PlainLM, blocks: Collection[int]) -> PlainLM:
    """Return a model with some blocks of `model`, which both share, and with the embedding and the output if these are theirs.

    Names are those of the whole model. The first stage takes tokens [B, S] and the others activations [B, S, D]; all but the
    last return activations.

    >>> from dither.models import build
    >>> stage = stage_of(build("tiny"), [1])
    >>> [name for name, _ in stage.named_parameters()][-2:]
    ['model.norm.weight', 'lm_head.weight']
    """
    check_pipeline(model)
    stage = skeleton(model.config)
    last = len(model.blocks) - 1
    for number, block in enumerate(model.blocks):
        stage.blocks[number] = block if number in blocks else Absent()
    stage.is_stage = True
    own, theirs = _backbone(stage), _backbone(model)
    for child, module in theirs.named_children():
        if child in ("embed_tokens", "wte", "wpe"):
            setattr(own, child, module if 0 in blocks else None)
        elif module is not model.blocks:
            setattr(own, child, module if last in blocks else None)
    stage.lm_head = model.lm_head if last in blocks else None  # type: ignore[assignment]
    stage.train(model.training)
    return stage


def _backbone(model: PlainLM) -> nn.Module:
    """Return the module of a model that holds its blocks."""
    return next(module for name, module in model.named_children() if name != "lm_head")


def set_length(stage: PlainLM, length: int | None) -> None:
    """Set the tokens per sequence of the next passes, of which a later stage may get a part on each rank; None: all of them."""
    _backbone(stage).length = length  # type: ignore[assignment]
