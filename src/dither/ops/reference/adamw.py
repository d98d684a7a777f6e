"""The definition of an AdamW step (Loshchilov and Hutter, 2019): float32 arithmetic in a fixed order, then one rounding each
of weight and moments.

    g = grad * scale                       the gradient, divided by the loss scale and clipped; negated to maximize
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g g
    w = decay w - size * (m / (sqrt(v) * root + eps))

with decay = 1 - lr * weight_decay, size = lr / (1 - beta1^t) and root = 1 / sqrt(1 - beta2^t). The update uses m and v before
they are rounded. Each operation is exactly rounded, so that all devices agree; powers are products of float64 numbers. The
quotient is computed as 2^48 m / (...), and `size` includes the factor 2^-48: the quotient is then a normal number for every m,
without a special case for small ones. A second moment that overflowed gives NaN instead of a weight that never moves.

Adam-mini (Zhang et al., 2024) has one v per run of rows: g g above is then the mean over the run.

Muon (Jordan et al., 2024) has no v, and orthogonalizes what it moves matrices along (`dither.optim.orthogonal`):

    m = beta2 m + (1 - beta2) g            beta2 is the momentum
    u = beta2 m + (1 - beta2) g            with Nesterov momentum, else u = m; rounded to nearest to the gradient's dtype
    w = decay w - size * 2^48 O(u)

Master weights may be split into a bfloat16 weight, which the model reads, and more bits, which only the optimizer reads.

A float32 number is 16 upper and 16 lower bits. Its nearest bfloat16 number is the upper half, or the one above it if the lower
half is more than half a unit. The lower half as a signed number, from -2^15 to 2^15, says which:

    split      master = weight * 2^16 + low                  as integers, the bits of float32; low is int16
    split24    master = weight * 2^16 + low * 2^8            low is int8: a float with 8 bits of exponent and 15 of mantissa

Ties to even make 2^16 + 1 masters round to an even weight, one more than 16 bits can tell apart: low = 2^15 and low = -2^15
both occur. `split` returns this last bit separately, True for +2^15, and the optimizer keeps it in the sign of the second
moment, which is never negative. So the master is exactly the float32 number, and the weight is exactly that number rounded to
nearest even. Masters of 24 bits are rounded to nearest even; the weight is then the nearest one, ties away from zero.
FlashOptim (arXiv 2602.23349) keeps 24 bits as the error in units of 1/254 of the weight's spacing; here it is 1/256.

NaN has low = 0, so it stays NaN.

Weights may also be E4M3 codes with scales, of which there is no wider copy: `dither.ops.reference.weight_codes` has their
rounding.

Error feedback (ECO, arXiv 2601.22101) changes the first moment once more, after a weight w was rounded to q:

    m = m - feedback * ((w - q) * (sqrt(v) * root + eps))        feedback = (1 - beta1) / beta1 * (1 - beta1^t) / lr

While the moment decays, the part that was added moves the weight by w - q in all: in the next step by
lr / (1 - beta1^t) * beta1 / (sqrt(v) * root + eps) times that part, which is (1 - beta1) (w - q), and by beta1 times as much in
each step after it. So nothing is lost as long as lr / (1 - beta1^t) and second moments stay the same, and no memory is needed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from dither.ops import storage
from dither.ops.reference import philox, rounding, state_maps, weight_codes
from dither.ops.reference import scales as scaling
from dither.spec import Rounding, Scale
from dither.spec.formats import TABLE, Format
from dither.spec.optimizer import BITS, CONSTANTS, LEAST_BETA, LEAST_SIZE, ODD_FACTOR, Update
from dither.spec.random import Draw

LOW = {"split": torch.int16, "split24": torch.int8}
"""The dtype of the bits beside the weight, by kind of master."""


def split(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (bfloat16 weight, int16 low bits, bool tie) of float32 masters.

    >>> weight, low, tie = split(torch.tensor([1.0, 1.0 + 2**-20, 1.0 + 2**-7 - 2**-20, 1.0 + 2**-8]))
    >>> weight.tolist(), low.tolist(), tie.tolist()
    ([1.0, 1.0, 1.0078125, 1.0], [0, 8, -8, -32768], [False, False, False, True])
    """
    bits = master.view(torch.int32)
    upper = torch.where(master.isnan(), bits, bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    low = torch.where(master.isnan(), 0, bits - (upper << 16))
    weight = torch.where(master.isnan(), 0x7FC0, upper).to(torch.int16).view(torch.bfloat16)
    return weight, low.to(torch.int16), low == 0x8000


def join(weight: Tensor, low: Tensor, tie: Tensor) -> Tensor:
    """Return the float32 masters that `split` divided.

    >>> join(torch.tensor([1.0]).bfloat16(), torch.tensor([-32768]).short(), torch.tensor([True])) == 1 + 2**-8
    tensor([True])
    """
    return ((weight.view(torch.int16).int() << 16) + low.int() + (tie.int() << 16)).view(torch.float32)


def split24(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bfloat16 weight, int8 low bits) of float32 masters, rounded to 24 bits.

    >>> weight, low = split24(torch.tensor([1.0, 1.0 + 2**-15, 1.0 + 2**-8]))
    >>> weight.tolist(), low.tolist()
    ([1.0, 1.0, 1.0078125], [0, 1, -128])
    """
    bits = master.view(torch.int32)
    rounded = (bits + 0x7F + (bits >> 8 & 1)) >> 8 << 8
    upper = rounded + 0x8000 >> 16
    low = torch.where(master.isnan(), 0, rounded - (upper << 16) >> 8)
    weight = torch.where(master.isnan(), 0x7FC0, upper).to(torch.int16).view(torch.bfloat16)
    return weight, low.to(torch.int8)


def join24(weight: Tensor, low: Tensor) -> Tensor:
    """Return the float32 values of masters that `split24` divided.

    >>> join24(torch.tensor([1.0078125]).bfloat16(), torch.tensor([-128]).to(torch.int8))
    tensor([1.0039])
    """
    return ((weight.view(torch.int16).int() << 16) + (low.int() << 8)).view(torch.float32)


def wide_weight(weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 weight of a parameter's state: its master, the weight plus what is kept beside it, or the weight.

    All tensors are local ones in the orientation of `weight`.

    >>> wide_weight(torch.ones(1).bfloat16(), {"remainder": torch.full((1,), 2.0**-9).bfloat16()})
    tensor([1.0020])
    """
    if "master" in state:
        return state["master"]
    if "master_low" in state:
        low = state["master_low"]
        if low.dtype == torch.int8:
            return join24(weight.contiguous(), low)
        return join(weight.contiguous(), low, state["exp_avg_sq"].signbit())
    return weight.float() + state["remainder"].float() if "remainder" in state else weight.float()


FORMATS = {storage.DTYPES[name]: TABLE[name] for name in ("fp32", "bf16", "fp16")}


@dataclass(frozen=True)
class Piece:
    """A matrix of a parameter with its states, all contiguous, which a step changes in place.

    `w`, `m` and `v` are [rows, columns], the moments in the states' format, of 4 bits two to a byte. Moments in few bits have
    scales [rows, blocks per row]. Adam-mini's `v` is float32[runs], and Muon's is `m`, unused.
    """

    w: Tensor
    m: Tensor
    v: Tensor
    m_scale: Tensor | None
    v_scale: Tensor | None
    extra: Tensor | None
    """The float32 master weights, the low bits of split ones, Kahan's remainder, or the scales of a weight in codes, float32
    [group rows, group columns]; None if there is none of them."""
    row: int
    """Row of the first element in the whole parameter."""
    column: int
    """Column of the first element in the whole parameter."""
    keys: tuple[int, int]
    """Keys of the random streams of the weights and of the moments."""
    constants: int
    """The row of the constants that this piece uses."""
    run: int = 0
    """Adam-mini: number of rows that share one second moment (a run)."""
    lead: int = 0
    """Adam-mini: number of rows of the first run that lie before this piece, on another shard."""
    share: int = 0
    """Adam-mini: number of elements of the whole parameter in one run."""
    block: int = 0
    """Width of the squares that share a scale, if `w` has codes; 0 if all of it does."""

    @property
    def coded(self) -> bool:
        """Return True if the weight exists only as E4M3 codes."""
        return self.w.dtype == torch.float8_e4m3fn


def prepare(
    hyper: Tensor,
    steps: Tensor,
    skipped: Tensor,
    squares: Tensor | None,
    loss_scale: Tensor | None,
    found_inf: Tensor | None,
    max_norm: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (constants, norm, skip) of a step, and count it in `steps` or in `skipped`.

    hyper: float64[rows, 7], see `dither.spec.optimizer.HYPER`.
    steps: int64[rows]; active rows grow by one unless the step is skipped.
    skipped: 0-d int64; grows by one if the step is skipped.
    squares: 0-d float64, the sum of squares of the gradients, still multiplied by the loss scale; None if it is not needed.
    loss_scale, found_inf: 0-d float32, as `torch.amp.GradScaler` sets them, or None.
    max_norm: the norm to clip to; 0 does not clip.

    The results are constants (float32[rows, 11], see `dither.spec.optimizer.CONSTANTS`), norm (0-d float32, divided by the loss
    scale and before clipping; 0 without `squares`) and skip (0-d int32). A step is skipped (skip is 1) if `squares` is not
    finite, if `found_inf` is not 0, or if an active row has a negative or infinite lr or a beta outside [0, 1). Numbers on a
    device are checked here, where it costs nothing.
    """
    inverse = torch.ones((), dtype=torch.float32, device=hyper.device)
    if loss_scale is not None:
        inverse = torch.div(inverse, loss_scale)
    norm, factor, bad = torch.zeros_like(inverse), inverse, torch.zeros((), dtype=torch.bool, device=hyper.device)
    if squares is not None:
        bad = ~torch.isfinite(squares)
        norm = (squares.sqrt() * inverse.double()).float()
        if max_norm:
            limit = torch.full_like(norm, max_norm)
            factor = torch.minimum(torch.div(limit, norm + 1e-6), torch.ones_like(norm)) * inverse
    if found_inf is not None:
        bad = bad | (found_inf != 0)
    lr, beta1, beta2, eps, weight_decay, active, sign = hyper.unbind(1)
    sound = (lr >= 0) & (lr < torch.inf) & (beta1 >= 0) & (beta1 < 1) & (beta2 >= 0) & (beta2 < 1)
    skip = (bad | ((active != 0) & ~sound).any()).int()
    steps += active.long() * (1 - skip)
    skipped += skip
    t = steps.clamp(min=1)  # rows that are not active are not used
    rest1, rest2 = (1 - _power(torch.stack([beta1, beta2]), t)).float()
    size = torch.div(lr.float(), rest1) * 2.0**-48
    root = _sqrt(rest2)
    pays = (beta1 >= LEAST_BETA) & (size >= LEAST_SIZE)
    ratio = torch.div((1 - beta1).float(), torch.where(pays, beta1, 1.0).float())
    feedback = torch.where(pays, torch.div(ratio, torch.where(pays, size, 1.0) * 2.0**48), 0.0)
    columns = [
        factor * sign.float(),
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - lr * weight_decay,
        lr * weight_decay,
        size,
        torch.div(torch.ones_like(root), root),
        eps,
        feedback,
    ]
    return torch.stack([column.float() for column in columns], dim=1), norm, skip


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return base^exponent by squaring: products of float64 numbers round alike everywhere, unlike `pow`."""
    result = torch.ones_like(base)
    for _ in range(int(exponent.max()).bit_length()):
        result = torch.where(exponent & 1 == 1, result * base, result)
        base, exponent = base * base, exponent >> 1
    return result


class Batch:
    """Pieces that are updated alike; `step` changes them in place."""

    def __init__(self, pieces: Sequence[Piece], update: Update) -> None:
        self.pieces = tuple(pieces)
        self.update = update

    @cached_property
    def _large(self) -> list[tuple[int, list[Piece], int]]:
        """Numbers of the pieces that are updated one at a time, the parts of each, and the rows of a part."""
        return [(number, *_in_rows(piece)) for number, piece in enumerate(self.pieces) if not self._is_small(piece)]

    @cached_property
    def _small(self) -> tuple[list[int], Tensor]:
        """Numbers of the other pieces, and the row of the constants of each of their elements, int64."""
        numbers = [number for number, piece in enumerate(self.pieces) if self._is_small(piece)]
        rows = [torch.full((self.pieces[number].w.numel(),), self.pieces[number].constants) for number in numbers]
        return numbers, torch.cat([torch.empty(0, dtype=torch.int64), *rows]).to(self.pieces[0].w.device)

    def square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of the gradients, 0-d float64; it is finite if and only if all of them are."""
        return torch.stack([grad.double().square_().sum() for grad in grads]).sum()

    def step(self, grads: Sequence[Tensor], constants: Tensor, step: Tensor, skip: Tensor) -> None:
        """Take one AdamW step with `grads` (contiguous, in the shapes of the weights), unless `skip` is 1.

        constants: float32[rows, 11], from `prepare`. step: 0-d int64, which random bits depend on. skip: 0-d int32.
        """
        if bool(skip):
            return
        for number, parts, height in self._large:
            columns = constants[self.pieces[number].constants].unbind()
            for part, g in zip(parts, torch.split(grads[number], height), strict=True):
                self._update(part, g, columns, step)
        numbers, rows = self._small
        if numbers:
            # One update of all of them: vectors such as norms would take as long as matrices, one at a time.
            pieces = [self.pieces[number] for number in numbers]
            own = {key: [getattr(piece, key) for piece in pieces] for key in _tensors(pieces[0])}
            joined: dict[str, Any] = {key: _flat(tensors) for key, tensors in own.items()}
            columns = constants[rows].t().contiguous().unbind()
            self._update(replace(pieces[0], **joined), _flat([grads[number] for number in numbers]), columns, step)
            sizes = [piece.w.numel() for piece in pieces]
            for key, tensors in own.items():
                new = torch.split(joined[key], sizes)
                torch._foreach_copy_(tensors, [part.view_as(x) for part, x in zip(new, tensors, strict=True)])

    def _is_small(self, piece: Piece) -> bool:
        """Return True if a piece is updated together with others: a few elements, each independent of its row and column."""
        update = self.update
        rounds = piece.w.dtype != torch.float32 and not update.master and update.weights == "stochastic"
        return piece.w.numel() <= SMALL and not (piece.coded or rounds or update.draws_states or update.in_blocks)

    def _update(self, piece: Piece, grad: Tensor, constants: Sequence[Tensor], step: Tensor) -> None:
        """Update a piece in place, each operation rounded on its own; m and v are float32 states or copies of narrower ones."""
        c, update = dict(zip(CONSTANTS, constants, strict=True)), self.update
        g = grad.float() * c["scale"]
        columns = piece.w.shape[-1]
        m = load_state(piece.m, piece.m_scale, update, True, columns).mul_(c["beta1"]).add_(g * c["rest1"])
        v = load_state(piece.v, piece.v_scale, update, False, columns).mul_(c["beta2"]).add_(g.mul_(g).mul_(c["rest2"]))
        divisor = _divisor(v, c)
        lost, tie = _move(piece, _direction(m, v, divisor), c, step, update)
        if lost is not None:
            m.sub_(lost.mul_(divisor).mul_(c["feedback"]))
        v = v if tie is None else torch.where(tie, -v, v)
        random = _random(piece, step, piece.keys[1]) if update.draws_states else None
        _store(piece.m, piece.m_scale, m, update, True, random)
        _store(piece.v, piece.v_scale, v, update, False, None if random is None else random * ODD_FACTOR & 0xFFFF)


PART = 1 << 16
"""Elements of a piece per thread that are updated at a time: few enough for a cache, and calls of torch cost little."""

SMALL = 1 << 12
"""The most elements of a piece that is updated together with others."""


def _tensors(piece: Piece) -> dict[str, Any]:
    """Return the weights and states of a piece by their names."""
    found = {key: getattr(piece, key) for key in ("w", "m", "v", "m_scale", "v_scale", "extra")}
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _in_rows(piece: Piece) -> tuple[list[Piece], int]:
    """Return a piece, a large one as parts of some rows, and their number of rows: rows are independent of each other."""
    rows, columns = piece.w.shape
    if piece.coded:  # groups span rows
        return [piece], rows
    height = rows if piece.w.is_cuda else max(1, PART * torch.get_num_threads() // columns)
    parts = [
        replace(piece, **{key: x[first : first + height] for key, x in _tensors(piece).items()}, row=piece.row + first)
        for first in range(0, rows, height)
    ]
    return parts, height


class MiniBatch(Batch):
    """Pieces that Adam-mini updates alike."""

    def run_squares(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return, per piece, the sums of squares over the part of each run that it holds: float64[runs]."""
        sums = []
        for piece, grad in zip(self.pieces, grads, strict=True):
            run = (torch.arange(grad.shape[0], device=grad.device) + piece.lead) // piece.run
            sums.append(torch.zeros_like(piece.v, dtype=torch.float64).index_add_(0, run, grad.double().square().sum(1)))
        return sums

    def step(self, grads: Sequence[Tensor], constants: Tensor, step: Tensor, skip: Tensor, *, moved: bool = False) -> None:
        """Take one step, unless `skip` is 1. `moved` says that the second moments are already those after the step."""
        if bool(skip):
            return
        if not moved:
            for piece, sums in zip(self.pieces, self.run_squares(grads), strict=True):
                share = torch.full_like(sums, piece.share)
                piece.v.copy_(second_moment(piece.v, sums, share, constants[piece.constants]))
        for piece, grad in zip(self.pieces, grads, strict=True):
            c = dict(zip(CONSTANTS, constants[piece.constants].unbind(), strict=True))
            run = (torch.arange(grad.shape[0], device=grad.device) + piece.lead) // piece.run
            m = load_state(piece.m, None, self.update, True, piece.w.shape[-1])
            m = m.mul_(c["beta1"]).add_((grad.float() * c["scale"]).mul_(c["rest1"]))
            v = piece.v[run][:, None]
            _move(piece, _direction(m, v, _divisor(v, c)), c, step, self.update)
            random = _random(piece, step, piece.keys[1]) if self.update.draws_states else None
            _store(piece.m, None, m, self.update, True, random)


class MuonBatch(Batch):
    """Matrices that Muon updates alike: `momentum` comes before their orthogonalization, `step` after it."""

    def momentum(self, grads: Sequence[Tensor], constants: Tensor, step: Tensor, skip: Tensor, *, nesterov: bool) -> None:
        """Update the momentum, and replace each gradient in place by what is orthogonalized, unless `skip` is 1."""
        if bool(skip):
            return
        for number, parts, height in self._large:
            c = dict(zip(CONSTANTS, constants[self.pieces[number].constants].unbind(), strict=True))
            for part, grad in zip(parts, torch.split(grads[number], height), strict=True):
                g = (grad.float() * c["scale"]).mul_(c["rest2"])
                m = load_state(part.m, part.m_scale, self.update, True, part.w.shape[-1]).mul_(c["beta2"]).add_(g)
                along = g.add_(m * c["beta2"]) if nesterov else m
                grad.copy_(along if grad.dtype == torch.float32 else _nearest(along, FORMATS[grad.dtype]))
                random = _random(part, step, part.keys[1]) if self.update.draws_states else None
                _store(part.m, part.m_scale, m, self.update, True, random)

    def _is_small(self, piece: Piece) -> bool:
        return False

    def _update(self, piece: Piece, grad: Tensor, constants: Sequence[Tensor], step: Tensor) -> None:
        """Move the weights of a piece along `grad`, its orthogonalized direction."""
        _move(piece, grad.float() * 2.0**48, dict(zip(CONSTANTS, constants, strict=True)), step, self.update)


def second_moment(v: Tensor, sums: Tensor, share: Tensor, constants: Tensor) -> Tensor:
    """Return Adam-mini's second moments after a step: beta2 * v + rest2 * scale^2 * sums / share.

    v: float32[runs]. sums: float64[runs], sums of squares of the unscaled gradients. share: float64[runs], elements per run.
    """
    c: dict[str, Tensor] = dict(zip(CONSTANTS, constants, strict=True))
    factor = c["scale"].double()
    mean = torch.div(sums, share)
    return c["beta2"] * v + c["rest2"] * (mean * (factor * factor)).float()


def _divisor(v: Tensor, c: dict[str, Tensor]) -> Tensor:
    """Return sqrt(v) * root + eps."""
    return _sqrt(v).mul_(c["root"]).add_(c["eps"])


def _direction(m: Tensor, v: Tensor, divisor: Tensor) -> Tensor:
    """Return 2^48 m / divisor; 0 if its magnitude is below 2^-100, NaN if it or v is infinite."""
    quotient = (m * 2.0**48).div_(divisor)
    if math.isfinite(float(divisor.sum())) and math.isfinite(float(quotient.sum())):  # so are all of their elements
        return torch.nn.functional.hardshrink(quotient, LARGEST_FLUSHED)
    quotient = torch.where((v < torch.inf) & (quotient.abs() < torch.inf), quotient, torch.nan)
    return torch.where(quotient.abs() <= LARGEST_FLUSHED, 0.0, quotient)


LARGEST_FLUSHED = math.ldexp(2 - 2.0**-23, -101)
"""The largest float32 number below 2^-100."""


def _root(v: Tensor) -> Tensor:
    """Return sqrt(v); NaN if v is infinite."""
    return torch.where(v < torch.inf, _sqrt(v), torch.nan)


def _sqrt(x: Tensor) -> Tensor:
    """Return the square root of float32 `x`, rounded once.

    torch's own is not correctly rounded everywhere: on x86 it comes from a library that is accurate to about an ulp. In float64
    it has more than twice the bits, so that even one that is an ulp off rounds to the right float32 number. numpy's is the
    CPU's own, which is exact.
    """
    if x.is_cpu:
        with numpy.errstate(invalid="ignore"):
            return torch.from_numpy(numpy.sqrt(x.numpy()))
    return x.double().sqrt().float()


def _move(
    piece: Piece, direction: Tensor, c: dict[str, Tensor], step: Tensor, update: Update
) -> tuple[Tensor | None, Tensor | None]:
    """Move the weights along `direction`, 2^48 m / (sqrt(v) * root + eps), and round them as `update` says.

    Return what the rounding lost, float32, for error feedback; and which masters are ties, bool, if they are split: the sign of
    the second moment keeps that.
    """
    move, lost = direction.mul_(c["size"]), None
    if piece.coded:
        assert piece.extra is not None
        drawn = _random(piece, step, piece.keys[0], 32) if update.weights == "stochastic" else None
        w = weight_codes.decode(piece.w, piece.extra, piece.block) * c["decay"] - move
        codes, scale = weight_codes.encode(w, piece.block, drawn)
        piece.w.copy_(codes)
        piece.extra.copy_(scale)
        return (w.sub_(weight_codes.decode(codes, scale, piece.block)) if update.error_feedback else None), None
    format = FORMATS[piece.w.dtype]
    if update.master in LOW:
        assert piece.extra is not None
        if update.master == "split24":
            w, low = split24(join24(piece.w, piece.extra) * c["decay"] - move)
            tie = None
        else:
            master = join(piece.w, piece.extra, piece.v.signbit())
            w, low, tie = split(master * c["decay"] - move)
        piece.w.copy_(w)
        piece.extra.copy_(low)
        return None, tie
    if update.master:
        assert piece.extra is not None
        master = piece.extra * c["decay"] - move
        piece.extra.copy_(master)
        piece.w.copy_(_nearest(master, format))
    elif format.bits == 32:
        piece.w.mul_(c["decay"]).sub_(move)
    elif update.weights == "kahan":
        assert piece.extra is not None
        w = piece.w.float()
        # The change includes the error of earlier roundings; the error of this one is kept.
        change = piece.extra.float() - (c["shrink"] * w + move)
        rounded = _nearest(w + change, format)
        piece.w.copy_(rounded)
        piece.extra.copy_(_nearest(change - (rounded - w), format))
    else:
        w = piece.w.float() * c["decay"] - move
        stochastic = update.weights == "stochastic"
        random = _random(piece, step, piece.keys[0]) if stochastic else None
        rule = Rounding("stochastic", BITS) if stochastic else Rounding("nearest")
        piece.w.copy_(rounding.round_values(w, format, rule, False, random))
        lost = w.sub_(piece.w) if update.error_feedback else None
    return lost, None


def _nearest(x: Tensor, format: Format) -> Tensor:
    """Round float32 `x` to the nearest value of the format; overflow becomes Inf."""
    return rounding.round_values(x, format, Rounding("nearest"), False, None)


def _random(piece: Piece, step: Tensor, key: int, width: int = BITS) -> Tensor:
    """Return `width` random bits per element of a piece, int32[rows, columns]."""
    rows, columns = piece.w.shape
    return philox.random_bits(Draw(key, step, piece.row, piece.column), rows, columns, width)


def load_state(state: Tensor, scale: Tensor | None, update: Update, signed: bool, columns: int) -> Tensor:
    """Return a stored moment as float32[rows, columns]."""
    if not update.in_blocks:
        return state.float().abs() if update.master == "split" and not signed else state.float()
    assert scale is not None
    scales = scale.repeat_interleave(update.block, 1)[:, :columns]
    if update.packed:
        return state_maps.decode4(state_maps.unpack(state, columns), signed) * scales
    if update.states == "companded8":
        return state_maps.first_values(state.view(torch.int8).int()) * scales if signed else (state.float() * scales).square()
    values = state_maps.decode(state, signed) if update.format is None else rounding.decode(state.int(), update.format)
    return values * scales


def _store(state: Tensor, scale: Tensor | None, value: Tensor, update: Update, signed: bool, random: Tensor | None) -> None:
    """Round a float32 moment into its storage, by random bits if there are any."""
    stored, restore = store_state(value, update, signed, random)
    state.copy_(stored)
    if scale is not None and restore is not None:
        scale.copy_(restore)


def store_state(value: Tensor, update: Update, signed: bool, random: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return (stored values, scales) of a float32[rows, columns] moment, rounded by `random` bits, or to nearest without them.

    Formats without blocks return float32 numbers that the storage holds exactly, and None for the scales.
    """
    if update.states == "fp32":
        return value, None  # nothing to round; a CPU would spend two thirds of the step on it
    rule = Rounding("nearest") if random is None else Rounding("stochastic", BITS)
    if not update.in_blocks:
        assert update.format is not None
        return rounding.round_values(value, update.format, rule, False, random), None
    rows, columns = value.shape
    count = math.ceil(columns / update.block)
    if update.states == "companded8" and not signed:
        value = _root(value)
    padded = torch.nn.functional.pad(value.abs(), (0, count * update.block - columns))
    amax = padded.reshape(rows, count, update.block).amax(2)
    if update.states == "companded8":
        return _companded(value, torch.where(amax < torch.inf, amax, torch.nan), update.block, signed)
    format = update.format or UNIT
    known = scaling.factors(amax, None, format, Scale("fp32"), rule)
    scaled = value * known.multiply.repeat_interleave(update.block, 1)[:, :columns]
    if update.packed:
        # Codes of second moments have no zero, so that the scale says it.
        restore = known.restore if signed else torch.where(amax == 0, 0.0, known.restore)
        return state_maps.pack(state_maps.encode4(scaled, signed)), restore
    if update.format is None:
        codes = state_maps.encode(scaled, signed)
    else:
        codes = rounding.encode(rounding.round_values(scaled, format, rule, True, random), format)
    return codes.to(torch.uint8), known.restore


def _companded(value: Tensor, amax: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of first moments, or of roots of second moments, whose largest magnitudes per block are `amax`."""
    if signed:
        codes = state_maps.first_codes(value, amax.repeat_interleave(block, 1)[:, : value.shape[1]])
        return codes.to(torch.int8).view(torch.uint8), amax
    most = torch.full_like(amax, 255.0)
    multiply = torch.where(amax > 0, torch.div(most, amax), 0.0)
    codes = state_maps.second_codes(value, multiply.repeat_interleave(block, 1)[:, : value.shape[1]])
    return codes.to(torch.uint8), torch.div(amax, most)


UNIT = Format("unit", 8, 0, 0, 0, 1.0)
"""A stand-in for the dynamic map where only its largest value, 1, matters."""


def zero_state(shape: tuple[int, int], update: Update, signed: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return (storage, scales) of a moment before the first step: all zeros."""
    if not update.in_blocks:
        dtype = torch.float32 if update.states == "fp32" else torch.bfloat16
        return torch.zeros(shape, dtype=dtype, device=device), None
    code = {"dynamic8": 0x7F, "dynamic4": 0x77}.get(update.states, 0) if signed else 0
    scales = (shape[0], math.ceil(shape[1] / update.block))
    return (
        torch.full((shape[0], update.bytes_per_row(shape[1])), code, dtype=torch.uint8, device=device),
        torch.full(scales, 0.0 if update.packed and not signed else 1.0, device=device),
    )
