"""The layout of a run: how many ranks share the data, the weights, the features and the layers of a model."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dither.errors import UserError
from dither.settings import Count, check

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
"""The dimensions of a mesh, outermost first: ranks that exchange most are next to each other."""


@dataclass(frozen=True)
class Layout:
    """Numbers of ranks by kind of parallelism. Their product is the number of ranks of the run.

    >>> Layout(dp_shard=4, tp=2).ranks
    8
    >>> str(Layout(dp_shard=4, tp=2))
    'dp_shard=4 tp=2'
    """

    dp_replicate: Count = 1
    """Replicas of the model, each trained on its part of the batch; gradients are all-reduced."""
    dp_shard: Count = 1
    """Ranks that shard weights, gradients and optimizer states by FSDP2, each trained on its part of the batch."""
    tp: Count = 1
    """Ranks that share the features of each layer by tensor parallelism. They see the same tokens."""
    pp: Count = 1
    """Stages of a pipeline, each with some of the layers."""

    def __post_init__(self) -> None:
        check("parallel", self)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the numbers of ranks by the dimensions of a mesh."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the layout."""
        return math.prod(self.sizes.values())

    @property
    def batch_parts(self) -> int:
        """Return the number of parts into which a batch is divided."""
        return self.dp_replicate * self.dp_shard

    def check_world(self, world: int) -> None:
        """Raise unless the layout has `world` ranks.

        >>> Layout(tp=2).check_world(3)
        Traceback (most recent call last):
        dither.errors.UserError: The layout tp=2 has 2 ranks, and the run has 3: make the product of its sizes 3.
        """
        if self.ranks != world:
            raise UserError(
                f"The layout {self} has {self.ranks} ranks, and the run has {world}: make the product of its sizes {world}."
            )

    def check(self, model: nn.Module) -> None:
        """Raise if `model` cannot be divided by this layout.

        Heads, features and scale groups must not be split by `tp`, and there must not be more stages than layers.

        >>> from dither.models import build
        >>> Layout(tp=3).check(build("tiny"))
        Traceback (most recent call last):
        dither.errors.UserError: 4 attention heads cannot be divided by tp=3.
        """
        from dither.parallel.roles import check_model  # imports models, which need safetensors

        check_model(model, tp=self.tp, pp=self.pp)

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of the layout over all ranks of the default process group.

        It has the dimensions "pp", "dp_replicate", "dp_shard" and "tp", in this order. Those of size 1 are kept, so that
        `mesh["tp"]` always exists.
        """
        if not torch.distributed.is_initialized():
            raise UserError("A mesh needs a process group: start with torchrun and call torch.distributed.init_process_group.")
        self.check_world(torch.distributed.get_world_size())
        sizes = tuple(getattr(self, name) for name in DIMENSIONS)
        return init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Layout":
        """Return the layout of a mesh with names among "pp", "dp_replicate", "dp_shard" and "tp"."""
        names = mesh.mesh_dim_names or ()
        if not names or set(names) - set(DIMENSIONS) or list(names) != [name for name in DIMENSIONS if name in names]:
            raise UserError(
                f"parallelize takes a mesh with dimensions named among {', '.join(map(repr, DIMENSIONS))}, in this order, "
                f"not {names!r}: make one by dither.parallel.Layout(...).mesh(device_type)."
            )
        return cls(**{name: mesh.size(number) for number, name in enumerate(names)})

    def __str__(self) -> str:
        """Return the sizes above 1."""
        sizes = [f"{name}={getattr(self, name)}" for name in DIMENSIONS if getattr(self, name) > 1]
        return " ".join(sizes) or "of one rank"
