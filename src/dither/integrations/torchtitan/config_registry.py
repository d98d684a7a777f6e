"""Configurations of torchtitan with Dither: `torchtitan --module dither.integrations.torchtitan --config llama3_8b_snip`.

The debug sizes and the 8B width with four layers train on bytes of torchtitan's source code and need no other files. The 8B
configurations have torchtitan's own data and tokenizer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchtitan
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

from dither.errors import UserError
from dither.integrations.loops import is_state
from dither.integrations.torchtitan.layers import DitherConverter, read_plan
from dither.integrations.torchtitan.optimizers import DitherOptimizers
from dither.integrations.torchtitan.trainer import DTYPES, DitherMetrics, DitherTrainer
from dither.snip.settings import SnipSettings
from dither.spec import Plan, Sampling
from dither.spec.recipes import recipe


class ByteTokenizer(BaseTokenizer):  # type: ignore[misc]
    """A tokenizer whose tokens are the bytes of UTF-8.

    >>> ByteTokenizer(ByteTokenizer.Config()).encode("ab")
    [97, 98]
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Configuration without options."""

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        """Create the tokenizer. It reads no files: `tokenizer_path` is what torchtitan passes to every tokenizer."""
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return 256


class ByteLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches of bytes of the files in a folder, over and over; by default those of torchtitan's own source code.

    Each rank reads other sequences. The state is the number of batches read.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """`dataset_path` is a folder, and `dataset` a pattern of the files in it."""

        dataset: str = "**/*.py"
        dataset_path: str | None = None
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        """Read the files."""
        folder = Path(config.dataset_path or torchtitan.__path__[0])
        files = sorted(path for path in folder.glob(config.dataset) if path.is_file())
        text = b"\n".join(path.read_bytes() for path in files)
        self._shape = (local_batch_size, seq_len + 1)
        self._rank, self._ranks = dp_rank, dp_world_size
        self._batches = len(text) // (local_batch_size * (seq_len + 1))
        if self._batches < dp_world_size:
            raise UserError(
                f"The files {config.dataset!r} in {str(folder)!r} have {len(text)} bytes, which is less than one batch of "
                f"{local_batch_size} x {seq_len + 1} bytes for each of {dp_world_size} ranks: give dataloader.dataset_path."
            )
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._infinite, self._read = config.infinite, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield (inputs and positions, labels)."""
        size = self._shape[0] * self._shape[1]
        while self._infinite or (self._read + 1) * self._ranks <= self._batches:
            number = (self._read * self._ranks + self._rank) % self._batches
            rows = self._bytes[number * size : (number + 1) * size].view(self._shape).long()
            self._read += 1
            positions = torch.arange(self._shape[1] - 1).expand(self._shape[0], -1)
            yield {"input": rows[:, :-1].contiguous(), "positions": positions.contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches read."""
        return {"read": self._read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batches of a checkpoint."""
        if state_dict:
            self._read = int(state_dict["read"])


def dither_config(
    base: Trainer.Config,
    plan: Plan | str,
    *,
    optimizer: OptimizersContainer.Config | dict[str, Any] | None = None,
    snip: SnipSettings | None = None,
    **conversion: Any,
) -> DitherTrainer.Config:
    """Return a configuration of torchtitan that trains with a plan.

    Args:
        base: The configuration to begin with, such as `torchtitan.models.llama3.config_registry.llama3_8b()`. Its model is
            converted in place.
        plan: A plan, the name of a recipe, or the path of a plan in JSON.
        optimizer: A configuration, or options of `dither.optim.AdamW`, which replaces torch's AdamW in all groups of `base`.
        snip: Settings of SNIP; by default the plan does not change.
        **conversion: Further arguments of `DitherConverter.Config`, such as `skip` and `seed`.

    >>> from torchtitan.models.llama3.config_registry import llama3_debugmodel
    >>> config = dither_config(llama3_debugmodel(), "bf16-pure", optimizer={"weights": "stochastic", "states": "dynamic8"})
    >>> config.training.dtype, config.optimizer.param_groups[0].optimizer_kwargs["states"]
    ('bfloat16', 'dynamic8')
    """
    if base.model_spec is None:
        raise UserError("The configuration has no model_spec: begin with one of a config_registry of torchtitan.")
    plan = read_plan(plan)
    base.model_spec.model = DitherConverter.Config(plan=plan, **conversion).build().convert(base.model_spec.model)
    if (adapter := base.model_spec.state_dict_adapter) is not None:
        base.model_spec.state_dict_adapter = without_layer_states(adapter)
    dtype = base.training.dtype if plan.parameters is None else DTYPES[plan.parameters]
    changed = {
        "training": replace(base.training, dtype=dtype, mixed_precision_param=DTYPES[plan.compute], disable_cuda_graphs=True),
        "metrics": DitherMetrics.Config(**_entries(base.metrics)),
        "optimizer": optimizer if isinstance(optimizer, OptimizersContainer.Config) else _ours(base.optimizer, optimizer or {}),
        "snip": snip or SnipSettings(),
    }
    return DitherTrainer.Config(**{**_entries(base), **changed})


def _entries(config: Any) -> dict[str, Any]:
    return {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.init}


def _ours(config: OptimizersContainer.Config, options: dict[str, Any]) -> DitherOptimizers.Config:
    """Return the configuration with Dither's AdamW in the place of torch's."""
    groups = []
    for group in config.param_groups:
        if group.optimizer_name == "AdamW":
            group = replace(group, optimizer_name="dither.AdamW", optimizer_kwargs={**group.optimizer_kwargs, **options})
        groups.append(group)
    if options and all(group.optimizer_name != "dither.AdamW" for group in groups):
        raise UserError(f"No group of the optimizer is AdamW, which could take {options}: give optimizer=dither_adamw(...).")
    return DitherOptimizers.Config(**{**_entries(config), "param_groups": groups})


def without_layer_states(adapter: type[Any]) -> type[Any]:
    """Return an adapter to Hugging Face's format that leaves out what conversion added: bitwidths and histories."""

    class WithoutLayerStates(adapter):  # type: ignore[misc]
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            weights = {name: value for name, value in state_dict.items() if not is_state(name)}
            result: dict[str, Any] = super().to_hf(weights)
            return result

    return WithoutLayerStates


# Configurations by name -----------------------------------------------------------------------------------------------


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


SIZES: dict[str, Callable[[], Trainer.Config]] = {
    "llama3_debug": _debug,
    "llama3_8b_4layers": partial(_8b, 4),
    "llama3_8b": _8b,
}
TRAININGS: dict[str, tuple[Plan | str, dict[str, Any] | None]] = {
    "fp8_block": ("fp8-block", None),
    "gaussws": (GAUSSWS, None),
    "bf16_sr": ("bf16-pure", BF16_SR),
}
"""Plans and options of AdamW by name."""


def _configured(size: str, training: str) -> DitherTrainer.Config:
    plan, optimizer = TRAININGS[training]
    return dither_config(SIZES[size](), plan, optimizer=optimizer)


def _with_snip(size: str, settings: SnipSettings) -> DitherTrainer.Config:
    return dither_config(_with_whole_loss(SIZES[size]()), "fp8-block", snip=settings)


CONFIGURATIONS: dict[str, Callable[[], Trainer.Config]] = {
    **{f"{size}_{training}": partial(_configured, size, training) for size in SIZES for training in TRAININGS},
    "llama3_debug_snip": partial(_with_snip, "llama3_debug", SnipSettings(target=0.5, start=4, delay=2, tokens=2048)),
    "llama3_8b_snip": partial(_with_snip, "llama3_8b", SnipSettings(target=0.75)),
    "llama3_debug_bf16": _debug,
    "llama3_8b_4layers_bf16": partial(_8b, 4),
}
"""Configurations by name; those that end in bf16 are torchtitan's own, for comparison."""

globals().update(CONFIGURATIONS)  # where torchtitan looks for them
