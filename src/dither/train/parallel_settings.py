"""The section `[parallel]` of a config: how the ranks of a run share its batches and its model."""

import math
from dataclasses import dataclass
from typing import Literal

from dither.errors import UserError
from dither.spec.fields import check_at_least, check_types

VIRTUAL = {"1f1b": 1, "interleaved-1f1b": 2, "zero-bubble": 1}
"""Stages per rank of each pipeline schedule."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The shares of ranks in the batches and the model. By default every rank holds the whole model.

    >>> Parallel(dp_shard=2, tp=2).sizes(8)
    {'pp': 1, 'dp_replicate': 2, 'dp_shard': 2, 'tp': 2}
    """

    dp_replicate: int | None = None
    """Number of replicas of the model, each with its share of the batch; by default as many as the ranks allow."""
    dp_shard: int = 1
    """Number of ranks that share the parameters, gradients and optimizer states of a replica, block by block (FSDP2)."""
    tp: int = 1
    """Number of ranks that share each matrix product (tensor parallelism)."""
    pp: int = 1
    """Number of ranks that share the blocks, as a pipeline; the micro-batches of a step pass through it."""
    schedule: Literal["1f1b", "interleaved-1f1b", "zero-bubble"] = "1f1b"
    """Order of the passes in a pipeline; interleaved-1f1b gives each rank two stages."""
    sequence_parallel: bool = True
    """With tp: shard the residual stream and the norms along the sequence between matrix products."""
    loss_parallel: bool = True
    """With tp: compute the loss on logits that stay sharded over the vocabulary."""
    gather: Literal["weights", "codes"] = "weights"
    """With dp_shard: gather weights, or in fewer bytes the codes or samples that each rank makes of its shard once per step."""
    reduce: Literal["fp32", "bf16", "bf16-sr"] = "fp32"
    """With dp_shard: exchange gradients in float32, or in bfloat16 rounded to nearest or stochastically; sums are float32."""
    checkpointing: Literal["none", "full", "selective"] = "none"
    """Activations to recompute in backward: none, those of whole blocks, or all but the results of matrix products."""

    def __post_init__(self) -> None:
        check_types("parallel", self)
        for name in ("dp_replicate", "dp_shard", "tp", "pp"):
            check_at_least(f"parallel.{name}", getattr(self, name), 1)
        if self.dp_shard == 1 and (self.gather, self.reduce) != ("weights", "fp32"):
            raise UserError(
                f"parallel.gather={self.gather!r} and parallel.reduce={self.reduce!r} are exchanges of FSDP2: set "
                "parallel.dp_shard as well."
            )
        if self.pp == 1 and self.schedule != "1f1b":
            raise UserError(f"parallel.schedule={self.schedule!r} is the order of a pipeline: set parallel.pp as well.")

    @property
    def stages(self) -> int:
        """The number of pipeline stages, over all ranks."""
        return self.pp * VIRTUAL[self.schedule] if self.pp > 1 else 1

    @property
    def cuts(self) -> bool:
        """True if ranks hold parts of the model."""
        return self.dp_shard * self.tp * self.pp > 1

    def sizes(self, world: int) -> dict[str, int]:
        """Return the size of each dimension of the mesh of `world` ranks, outermost first; raise unless they multiply to it."""
        own = {"pp": self.pp, "dp_shard": self.dp_shard, "tp": self.tp}
        rest = math.prod(own.values())
        replicas = max(world // rest, 1) if self.dp_replicate is None else self.dp_replicate
        sizes = {"pp": self.pp, "dp_replicate": replicas, "dp_shard": self.dp_shard, "tp": self.tp}
        if math.prod(sizes.values()) != world:
            given = own if self.dp_replicate is None else sizes
            said = " x ".join(f"parallel.{name}={size}" for name, size in given.items() if size > 1 or name == "dp_replicate")
            least = f"a multiple of {rest}" if self.dp_replicate is None else str(math.prod(sizes.values()))
            raise UserError(
                f"{said} needs {least} ranks, and there {'is' if world == 1 else 'are'} {world}: start as many by "
                "torchrun or by dither train --nproc, or change [parallel]."
            )
        return sizes
