"""Compare the ranks of a run: configs, code and data when it starts, weights from time to time, and arithmetic.

Weights are compared by a 64-bit digest that the device computes, so that one number per rank is exchanged. A digest is a sum of
all words of the tensors, each times an odd number that depends on its place, modulo 2^64: one flipped bit always changes it.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dither.errors import DitherError, UserError
from dither.nn import step_context
from dither.nn.step import untouched
from dither.ops.ranks import local
from dither.settings import values
from dither.train.config import Config
from dither.train.ranks import Ranks, everywhere
from dither.train.trainer import Trainer
from dither.versions import version

OWN = ("run.device",)
"""Fields that may differ between ranks."""

CHUNK = 1 << 22
"""Elements per pass of a digest, which takes 24 times as many bytes of memory."""


class DisagreementError(DitherError):
    """The ranks have other weights, or compute other bits, though everything that they started from is equal."""


# The start ------------------------------------------------------------------------------------------------------------


def facts_of_config(config: Config) -> dict[str, str]:
    """Return what must be equal on all ranks before anything is built: the fields of the config, and the code.

    >>> facts_of_config(Config())["optim.lr"]
    '0.003'
    """
    found = {path: str(value) for path, value in values(config).items()}
    code = {"the version of dither": version(), "the code of dither": _code(), "the version of torch": str(torch.__version__)}
    return {name: value for name, value in found.items() if name not in OWN} | code


def facts_of_trainer(trainer: Trainer) -> dict[str, str]:
    """Return what must be equal on all ranks before the first step: the step, the corpus, the plan, and every tensor.

    Of a model that is cut, tensors must be equal on the ranks with the same part, which their names say.
    """
    tensors = _tensors(trainer)
    words = {
        "the step": str(trainer.done),
        "the corpus": trainer.corpus.sha256,
        "the plan": hashlib.sha256(trainer.conversion.plan.to_json().encode()).hexdigest(),
    }
    numbers = digests(tensors.values(), trainer.ranks.device).tolist()
    part = f" in part {trainer.layout.part}" if trainer.layout.cut else ""
    return words | {f"{_title(name)}{part}": f"{number:#x}" for name, number in zip(tensors, numbers, strict=True)}


KINDS = {"model": "weight", "optimizer": "optimizer state", "resting": "bitwidth", "oscillation": "movement"}
"""Kinds of tensors in a checkpoint, in words."""


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the weights and optimizer states on this rank, which are the same on all ranks with the same part of the model."""
    return {name: local(tensor) for name, tensor in trainer.pack("", 0.0)[0].items() if not name.startswith("rng:")}


def _title(name: str) -> str:
    """Return the name of a tensor of a checkpoint in words.

    >>> _title("model:head.weight"), _title("optimizer:head.weight:exp_avg")
    ('the weight head.weight', 'the optimizer state head.weight:exp_avg')
    """
    kind, _, rest = name.partition(":")
    return f"the {KINDS.get(kind, kind)} {rest}"


def check_facts(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Raise a UserError, the same on every rank, that names the first facts that differ and the ranks.

    >>> check_facts(Ranks(torch.device("cpu")), {"optim.lr": "0.003"})
    """
    if ranks.world == 1:
        return
    short = {name: " ".join(value.split()) for name, value in facts.items()}
    shown = {name: value if len(value) <= 80 else hashlib.sha256(value.encode()).hexdigest() for name, value in short.items()}
    gathered = ranks.gather(shown)
    names = dict.fromkeys(name for found in gathered for name in found)
    # A part of a model that is cut is on some ranks only.
    values = {name: [found.get(name, None if " in part (" in name else "missing") for found in gathered] for name in names}
    different = [name for name in names if len({value for value in values[name] if value is not None}) > 1]
    if different:
        said = "; ".join(_difference(name, values[name]) for name in different[:3])
        more = f"; and {len(different) - 3} more" if len(different) > 3 else ""
        raise everywhere(UserError(f"The ranks differ: {said}{more}. Start every rank with the same config, data and code."))


def _difference(name: str, values: Sequence[str | None]) -> str:
    """Return which ranks have which values of a fact. None is that of a rank which the fact does not concern.

    >>> _difference("optim.lr", ["0.003", "0.002", "0.003"])
    'optim.lr is 0.003 on ranks 0 and 2, and 0.002 on rank 1'
    """
    known = dict.fromkeys(value for value in values if value is not None)
    groups = {value: [rank for rank, other in enumerate(values) if other == value] for value in known}
    said = sorted(groups.items(), key=lambda group: -len(group[1]))
    return f"{name} is " + ", and ".join(f"{value:.64} on {name_ranks(ranks)}" for value, ranks in said[:4])


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> name_ranks([1]), name_ranks([0, 2, 3]), name_ranks(range(20))
    ('rank 1', 'ranks 0, 2 and 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    few = [str(rank) for rank in ranks[:8]]
    last = f"{len(ranks) - 8} more" if len(ranks) > 8 else few.pop()
    return f"ranks {', '.join(few)} and {last}"


def _code() -> str:
    """Return the SHA-256 of the sources of Dither, which an editable installation may change without a new version."""
    root, sha256 = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sha256.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return sha256.hexdigest()


# Weights --------------------------------------------------------------------------------------------------------------


def digests(tensors: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
    """Return a 64-bit digest of each tensor, computed on `device` or on its own: int64[number of tensors].

    >>> weight = torch.zeros(3)
    >>> before = digests([weight])
    >>> weight.view(torch.int32)[1] ^= 1  # the smallest change that there is
    >>> bool(digests([weight]) == before)
    False
    """
    found = [_digest(tensor, device) for tensor in tensors]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64)


def _digest(tensor: Tensor, device: torch.device | None) -> Tensor:
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().reshape(-1)
    flat = flat.view(torch.uint8) if flat.element_size() not in words else flat.view(words[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=device or flat.device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK].to(total.device).to(torch.int64)
        total += (part * _odd_numbers(start, part.numel(), total.device)).sum()
    return total


def _odd_numbers(start: int, count: int, device: torch.device) -> Tensor:
    """Return an odd number for each place, int64; sums wrap modulo 2^64."""
    place = torch.arange(start + 1, start + 1 + count, device=device) * 0x1E3779B97F4A7C15
    return ((place ^ (place >> 31)) * 0x3F58476D1CE4E5B9) | 1


def compare_states(trainer: Trainer) -> None:
    """Raise a DisagreementError, the same on every rank, if weights or optimizer states differ. Waits for the device."""
    ranks = trainer.ranks
    if all(len(same) == 1 for same in trainer.layout.replicas):
        return
    tensors = _tensors(trainer)
    own = digests(tensors.values(), ranks.device)
    total = (own * _odd_numbers(0, own.numel(), own.device)).sum()
    # One number per rank in a vector of zeros: the sum over ranks holds all of them.
    totals = torch.zeros(ranks.world, dtype=torch.int64, device=ranks.device)
    totals[ranks.rank] = total
    values = ranks.add(totals).tolist()
    if all(len({values[rank] for rank in same}) == 1 for same in trainer.layout.replicas):
        return
    everyone = ranks.gather(dict(zip(tensors, own.tolist(), strict=True)))
    same = next(same for same in trainer.layout.replicas if len({values[rank] for rank in same}) > 1)
    names = [name for name in everyone[same[0]] if len({everyone[rank].get(name) for rank in same}) > 1]
    first = _title(names[0]) if names else "their number"
    raise everywhere(
        DisagreementError(
            f"After step {trainer.done} the ranks have other weights or optimizer states, though they started with the same: "
            f"{_culprits([values[rank] for rank in same], same)}, in {len(names)} tensors, first in {first}. Nothing of this "
            "step is saved. Check the memory and the devices of that rank, and resume with --resume."
        )
    )


def _culprits(values: Sequence[object], ranks: Sequence[int] | None = None) -> str:
    """Return which ranks differ from the majority; `ranks` are those that have the values, by default the first ones.

    >>> _culprits([7, 5, 7]), _culprits([7, 5]), _culprits([7, 5], [1, 3])
    ('rank 1 differs from the others', 'rank 1 differs from rank 0', 'rank 3 differs from rank 1')
    """
    ranks = range(len(values)) if ranks is None else ranks
    common = max(dict.fromkeys(values), key=list(values).count)  # the first of equally frequent ones: that of the first rank
    other = [rank for rank, value in zip(ranks, values, strict=True) if value != common]
    against = f"rank {ranks[0]}" if len(values) == 2 else "the others"
    return f"{name_ranks(other)} {'differs' if len(other) == 1 else 'differ'} from {against}"


# Arithmetic -----------------------------------------------------------------------------------------------------------


def recompute(trainer: Trainer) -> None:
    """Compute the loss and gradients of one micro-batch of the next step again, and compare the bits. Nothing changes.

    Every rank computes the first micro-batch of rank 0, so that a device that is always wrong differs from the others. A single
    process, and ranks that hold parts of the model, compute it twice. A difference raises a DisagreementError that names the
    rank.
    """
    ranks, sharded = trainer.ranks, trainer.layout.cut
    once = ranks.gather(_computed(trainer))
    if ranks.world > 1 and not sharded and len(set(once)) == 1:
        return
    again = ranks.gather(_computed(trainer))
    unsteady = [rank for rank, pair in enumerate(zip(once, again, strict=True)) if pair[0] != pair[1]]
    if not unsteady and (sharded or ranks.world == 1):  # of parts, a wrong bit of one rank may reach all of them
        return
    said = f"{name_ranks(unsteady)} computed other bits in two passes over" if unsteady else f"{_culprits(once)} in"
    if ranks.world == 1:
        said = "the process computes other bits when it repeats"
    raise everywhere(
        DisagreementError(
            f"Before step {trainer.done + 1} a check of the hardware failed: {said} the same micro-batch with the same "
            "weights. Take the device out of service, and resume with --resume from a checkpoint that you trust."
        )
    )


def _computed(trainer: Trainer) -> int:
    """Return the digest of the loss and the gradients of the first micro-batch of rank 0, in deterministic kernels."""
    data, ranks = trainer.config.data, trainer.ranks
    world = trainer.layout.data_world
    batch = trainer.loader.batch(trainer.done + trainer.offset, 0, world, (0, trainer.parts)).to(ranks.device)
    with untouched(trainer.model), _deterministic():
        torch.manual_seed(trainer.done)  # the same dropout on every rank
        with step_context(trainer.model, step=trainer.done) as at:
            at.row(batch.first * data.sequence)
            loss, gradients = trainer.passes.trial(batch)
            found = digests([loss, *(local(gradient) for gradient in gradients if gradient is not None)])
    return int((found * _odd_numbers(0, found.numel(), found.device)).sum())


@contextmanager
def _deterministic() -> Iterator[None]:
    """Choose deterministic kernels inside, where there are any."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.use_deterministic_algorithms(True, warn_only=True)
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
