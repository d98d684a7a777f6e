"""Configurations by name: `torchtitan --module dither.integrations.torchtitan --config llama3_8b_snip`.

The debug sizes and the 8B width with four layers train on bytes of torchtitan's source code and need no other files. The 8B
configurations have torchtitan's own data and tokenizer.
"""

from typing import Any

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

from dither.integrations.torchtitan.configs import ByteLoader, ByteTokenizer, dither_config
from dither.integrations.torchtitan.trainer import DitherTrainer
from dither.snip.settings import SnipSettings
from dither.spec import Sampling
from dither.spec.recipes import recipe

GAUSSWS = recipe("bf16").with_sampling(Sampling())
BF16_SR: dict[str, Any] = {"weights": "stochastic", "states": "companded8"}
"""Options of AdamW: BF16 weights without a float32 copy, and 8-bit moments."""


def _on_bytes(base: Trainer.Config) -> Trainer.Config:
    """Replace data and tokenizer by those that need no files, and switch off checkpoints and validation."""
    base.dataloader, base.tokenizer = ByteLoader.Config(), ByteTokenizer.Config()
    base.checkpoint.enable = base.validator.enable = False
    base.validator.dataloader = ByteLoader.Config(infinite=False)
    base.metrics.log_freq = 1
    base.compile = CompileConfig(enable=True, components=["model", "loss"])
    return base


def _debug() -> Trainer.Config:
    return _with_whole_loss(_on_bytes(llama3.llama3_debugmodel()))


def _8b(layers: int | None = None) -> Trainer.Config:
    base = llama3.llama3_8b()
    base.compile = CompileConfig(enable=True, components=["model", "loss"])
    if layers is not None:
        assert base.model_spec is not None
        base.model_spec.model.layers = base.model_spec.model.layers[:layers]
        base = _with_whole_loss(_on_bytes(base))
        base.profiler.enable_profiling = base.metrics.enable_tensorboard = False
    return base


def _with_whole_loss(base: Trainer.Config) -> Trainer.Config:
    """Replace the chunked loss by one that SNIP can differentiate, and that works with torch 2.11 and 2.12 too."""
    base.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(base.model_spec))
    return base


def llama3_debug_bf16() -> Trainer.Config:
    """torchtitan's own trainer, for comparison."""
    return _debug()


def llama3_debug_fp8_block() -> DitherTrainer.Config:
    """FP8 with scales per 1 x 128 and 128 x 128."""
    return dither_config(_debug(), "fp8-block")


def llama3_debug_gaussws() -> DitherTrainer.Config:
    """Weights sampled with learned bitwidths."""
    return dither_config(_debug(), GAUSSWS)


def llama3_debug_bf16_sr() -> DitherTrainer.Config:
    """BF16 weights rounded stochastically, 8-bit moments."""
    return dither_config(_debug(), "bf16-pure", optimizer=BF16_SR)


def llama3_debug_snip() -> DitherTrainer.Config:
    """FP8 or FP4 per layer, chosen by SNIP after a few steps."""
    settings = SnipSettings(target=0.5, start=4, delay=2, tokens=2048)
    return dither_config(_debug(), "fp8-block", snip=settings)


def llama3_8b_4layers_bf16() -> Trainer.Config:
    """The first four layers of the 8B model in torchtitan's own trainer, for comparison."""
    return _8b(4)


def llama3_8b_4layers_fp8_block() -> DitherTrainer.Config:
    """FP8 with scales per 1 x 128 and 128 x 128, at the width of the 8B model."""
    return dither_config(_8b(4), "fp8-block")


def llama3_8b_4layers_gaussws() -> DitherTrainer.Config:
    """Weights sampled with learned bitwidths, at the width of the 8B model."""
    return dither_config(_8b(4), GAUSSWS)


def llama3_8b_4layers_bf16_sr() -> DitherTrainer.Config:
    """BF16 weights rounded stochastically, 8-bit moments, at the width of the 8B model."""
    return dither_config(_8b(4), "bf16-pure", optimizer=BF16_SR)


def llama3_8b_fp8_block() -> DitherTrainer.Config:
    """FP8 with scales per 1 x 128 and 128 x 128."""
    return dither_config(_8b(), "fp8-block")


def llama3_8b_gaussws() -> DitherTrainer.Config:
    """Weights sampled with learned bitwidths."""
    return dither_config(_8b(), GAUSSWS)


def llama3_8b_bf16_sr() -> DitherTrainer.Config:
    """BF16 weights rounded stochastically, 8-bit moments."""
    return dither_config(_8b(), "bf16-pure", optimizer=BF16_SR)


def llama3_8b_snip() -> DitherTrainer.Config:
    """FP8 or FP4 per layer, chosen by SNIP: three quarters of the FLOPs in FP4."""
    return dither_config(_with_whole_loss(_8b()), "fp8-block", snip=SnipSettings(target=0.75))
