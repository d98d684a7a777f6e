"""The passes of a run as CUDA graphs: when they are possible."""

from dither.errors import UserError
from dither.nn.graphed import GraphedPasses as GraphedPasses
from dither.optim import Training
from dither.train.distributed import Ranks


def uses_graphs(wanted: bool | None, ranks: Ranks, training: Training, parts: int, *, compiled: bool) -> bool:
    """Return whether passes are replayed as CUDA graphs; raise UserError if they are asked for and impossible.

    Args:
        wanted: `run.cuda_graphs`; None means wherever they are possible.
        ranks: The ranks of the run.
        training: The optimizer, the loss scaling and the gradients.
        parts: Micro-batches per step.
        compiled: True if blocks are compiled.
    """
    obstacles = {
        "the run is not on a GPU": ranks.device.type != "cuda",
        "blocks are not compiled": not compiled,
        "there are several ranks": ranks.world > 1,
        "losses are scaled": training.scaler.is_enabled(),
        "gradients are released as they are used": training.optimizer.released is not None,
        "gradients of several micro-batches are rounded stochastically": training.gradients.kind == "bf16-sr" and parts > 1,
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), "")
    if wanted and reason:
        raise UserError(f"run.cuda_graphs=true is impossible, since {reason}: leave it out, and passes run without graphs.")
    return wanted is not False and not reason
