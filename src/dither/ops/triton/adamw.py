"""AdamW, Adam-mini and Muon, as in `dither.ops.reference.adamw`: many tensors per launch and one pass over memory.

This file is the host's part: `prepare` computes the constants of a step, and a `Batch` launches the kernels of
`dither.ops.triton.adamw_kernels` on tensors that are updated alike. The one-letter constants are listed in
`dither.ops.triton.adamw_kernels`, the columns of the tables in `dither.ops.triton.adamw_tables`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.reference import weight_codes
from dither.ops.reference.adamw import FORMATS, UNIT, Piece
from dither.ops.triton import BoundKernel, native, state_maps
from dither.ops.triton.adamw_kernels import (
    LANES,
    _adamw_kernel,
    _mini_kernel,
    _run_squares_kernel,
    _squares_kernel,
    _weight_scales_kernel,
)
from dither.ops.triton.adamw_tables import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    FEEDBACK,
    HYPER_ACTIVE,
    HYPER_BETA1,
    HYPER_BETA2,
    HYPER_EPS,
    HYPER_LR,
    HYPER_ROW,
    HYPER_SIGN,
    HYPER_WEIGHT_DECAY,
    REST1,
    REST2,
    ROOT,
    ROW,
    SCALE,
    SHRINK,
    SIZE,
    PieceTable,
)
from dither.ops.triton.rounding import RoundingConstants, fields
from dither.ops.triton.scales import Scaling, scaling_fields
from dither.ops.triton.weight_codes import RUN
from dither.spec import Cast
from dither.spec.optimizer import BITS, CONSTANTS, LEAST_BETA, LEAST_SIZE, MAPS, Update


@dataclass(frozen=True)
class Program:
    """The work of one program of a kernel, and its resources."""

    tile: int
    """Elements of a tile: eight per thread."""
    tiles: int
    """Tiles of a program."""
    registers: int
    """Registers per thread."""

    def warps(self, tile: int) -> int:
        """Return the number of warps for tiles of another size."""
        return tile // 256


PROGRAMS = {"whole": Program(1024, 8, 72), "blocks": Program(512, 16, 64), "mini": Program(512, 16, 64)}
"""By kind of states: the best of a sweep on an H200."""

SQUARES = 1024
"""Elements of a tile where squares are added up."""

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8}
TYPES |= {torch.int16: tl.int16, torch.int8: tl.int8, torch.float8_e4m3fn: tl.uint8}
INTEGERS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}


LEAST, LEAST_MOMENTUM = tl.constexpr(LEAST_SIZE), tl.constexpr(LEAST_BETA)


@triton.jit
def _power(base, exponent):
    """Return base^exponent by squaring, for exponents below 2^32: products round alike everywhere, as `pow` does not."""
    result = base * 0 + 1
    for _ in tl.static_range(32):
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit(do_not_specialize=["rows"])
def _prepare_kernel(
    hyper_ptr, steps_ptr, skipped_ptr, squares_ptr, loss_scale_ptr, found_inf_ptr, constants_ptr, norm_ptr, skip_ptr, max_norm,
    rows,
    CLIP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the constants of a step, its gradient norm and whether it is skipped; one program does all rows.

        factor = min(1, max_norm / (norm + 1e-6)) / loss_scale      1 / loss_scale without CLIP
        skip   = 1 if the squares are not finite, found_inf is set, or an active row's lr or betas are out of range
        t      = steps done, this one included

    The formulas of the columns are at the end of `dither.spec.optimizer`. ROWS is `rows`, rounded up to a power of two.
    """
    inverse = tl.full((), 1.0, tl.float32)
    if loss_scale_ptr is not None:
        inverse = tl.div_rn(inverse, tl.load(loss_scale_ptr))
    norm = inverse * 0.0
    factor = inverse
    skip = tl.full((), 0, tl.int32)
    if squares_ptr is not None:
        squares = tl.load(squares_ptr)
        skip = (squares - squares != 0.0).to(tl.int32)  # NaN - NaN and Inf - Inf are NaN
        norm = (tl.sqrt(squares) * inverse.to(tl.float64)).to(tl.float32)
        if CLIP:
            quotient = tl.div_rn(max_norm, norm + 1e-6)
            factor = tl.where(quotient > 1.0, 1.0, quotient) * inverse  # NaN stays
    if found_inf_ptr is not None:
        skip = tl.where(tl.load(found_inf_ptr) != 0.0, 1, skip)

    row = tl.arange(0, ROWS)
    inside = row < rows
    hyper = hyper_ptr + row * HYPER_ROW
    lr = tl.load(hyper + HYPER_LR, mask=inside, other=0.0)
    beta1 = tl.load(hyper + HYPER_BETA1, mask=inside, other=0.0)
    beta2 = tl.load(hyper + HYPER_BETA2, mask=inside, other=0.0)
    active = tl.load(hyper + HYPER_ACTIVE, mask=inside, other=0.0)
    sound = (lr >= 0.0) & (lr < float("inf")) & (beta1 >= 0.0) & (beta1 < 1.0) & (beta2 >= 0.0) & (beta2 < 1.0)
    skip = tl.maximum(skip, tl.max(tl.where((active != 0.0) & (sound == 0), 1, 0)))
    tl.store(skipped_ptr, tl.load(skipped_ptr) + skip)
    tl.store(norm_ptr, norm)
    tl.store(skip_ptr, skip)

    done = tl.load(steps_ptr + row, mask=inside, other=0)
    done += active.to(tl.int64) * (1 - skip)
    tl.store(steps_ptr + row, done, mask=inside)
    t = tl.maximum(done, 1)
    root = tl.sqrt_rn((1 - _power(beta2, t)).to(tl.float32))
    shrink = lr * tl.load(hyper + HYPER_WEIGHT_DECAY, mask=inside, other=0.0)
    out = constants_ptr + row * ROW
    tl.store(out + SCALE, factor * tl.load(hyper + HYPER_SIGN, mask=inside, other=1.0).to(tl.float32), mask=inside)
    tl.store(out + BETA1, beta1.to(tl.float32), mask=inside)
    tl.store(out + REST1, (1 - beta1).to(tl.float32), mask=inside)
    tl.store(out + BETA2, beta2.to(tl.float32), mask=inside)
    tl.store(out + REST2, (1 - beta2).to(tl.float32), mask=inside)
    tl.store(out + DECAY, (1 - shrink).to(tl.float32), mask=inside)
    tl.store(out + SHRINK, shrink.to(tl.float32), mask=inside)
    size = tl.div_rn(lr.to(tl.float32), (1 - _power(beta1, t)).to(tl.float32)) * 2.0**-48
    tl.store(out + SIZE, size, mask=inside)
    tl.store(out + ROOT, tl.div_rn(root * 0.0 + 1.0, root), mask=inside)
    tl.store(out + EPS, tl.load(hyper + HYPER_EPS, mask=inside, other=0.0).to(tl.float32), mask=inside)
    pays = (beta1 >= LEAST_MOMENTUM) & (size >= LEAST)
    ratio = tl.div_rn((1 - beta1).to(tl.float32), tl.where(pays, beta1, 1.0).to(tl.float32))
    tl.store(out + FEEDBACK, tl.where(pays, tl.div_rn(ratio, tl.where(pays, size, 1.0) * 2.0**48), 0.0), mask=inside)


def prepare(
    hyper: Tensor,
    steps: Tensor,
    skipped: Tensor,
    squares: Tensor | None,
    loss_scale: Tensor | None,
    found_inf: Tensor | None,
    max_norm: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (constants, norm, skip) of a step and count it in `steps` or in `skipped`; see the reference.

    hyper: float64[rows, 7]. steps: int64[rows]. skipped, squares, loss_scale, found_inf: 0-d.
    """
    rows = hyper.shape[0]
    constants = torch.empty((rows, ROW.value), dtype=torch.float32, device=hyper.device)
    norm = torch.empty((), dtype=torch.float32, device=hyper.device)
    skip = torch.empty((), dtype=torch.int32, device=hyper.device)
    launch = _prepare_launch(rows, float(max_norm))
    launch(hyper, steps, skipped, squares, loss_scale, found_inf, constants, norm, skip)
    return constants[:, : len(CONSTANTS)], norm, skip


@functools.lru_cache(maxsize=64)
def _prepare_launch(rows: int, max_norm: float) -> BoundKernel:
    constants = {"CLIP": bool(max_norm), "ROWS": triton.next_power_of_2(rows)}
    return BoundKernel(_prepare_kernel, 1, (max_norm, rows), constants, num_warps=1, enable_fp_fusion=False)


def _aligned(piece: Piece) -> bool:
    tensors = (piece.w, piece.m, piece.extra, None if piece.run else piece.v)
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _is_flat(piece: Piece, group: int) -> bool:
    """Return whether tiles may run over the ends of rows: rows and the shard begin at whole groups, addresses at 16 bytes."""
    columns = piece.w.shape[1]
    return _aligned(piece) and columns % group == 0 and piece.column % group == 0 and columns < 1 << 31


class Batch:
    """Tensors of one dtype that are updated alike; `step` changes them in place.

    One table (and launch) has the pieces whose tiles may run over the ends of rows, another one the rest.
    """

    rule = "adamw"
    """The kernel's RULE for a step."""

    def __init__(self, pieces: Sequence[Piece], update: Update) -> None:
        self.pieces = tuple(pieces)
        self.update = update
        coded = pieces[0].coded
        self.group = update.block if update.in_blocks else RUN.value if coded else LANES.value
        self.padded = self.group if update.in_blocks or coded else 1
        """Rows that tiles may not run over are padded to multiples of this."""
        self.program = PROGRAMS["blocks" if update.in_blocks else "whole"]
        self.tile = max(self.program.tile, self.group)  # a block lies within a tile
        self.tiles = max(1, self.program.tile * self.program.tiles // self.tile)
        self.tables = []
        for flat in (True, False):
            indices = [i for i, piece in enumerate(pieces) if _is_flat(piece, self.group) == flat]
            if indices:
                mine = [pieces[i] for i in indices]
                self.tables.append(PieceTable(mine, indices, [self._programs(piece, flat) for piece in mine], flat))

    def _programs(self, piece: Piece, flat: bool) -> int:
        rows, columns = piece.w.shape
        columns = columns if flat else -(-columns // self.padded) * self.padded
        return -(-rows * columns // (self.tile * self.tiles))

    def square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of the gradients, 0-d float64; it is finite if and only if all of them are."""
        parts = []
        for table in self.tables:
            kept = table.point(grads)
            out = torch.empty(table.programs, dtype=torch.float64, device=table.rows.device)
            if table.squares is None:
                constants = {"G_TYPE": TYPES[kept[0].dtype], "NATIVE": native(out.device)}
                constants |= {"ALIGNED": table.flat, "TILE": self.tile * self.tiles}
                table.squares = BoundKernel(_squares_kernel, table.programs, (), constants, num_warps=4, enable_fp_fusion=False)
            table.squares(table.rows, table.grads, table.owner, out)
            parts.append(out.sum())
        return torch.stack(parts).sum()

    def step(self, grads: Sequence[Tensor], constants: Tensor, step: Tensor, skip: Tensor) -> None:
        """Take one AdamW step with `grads` (contiguous, of one dtype, in the shapes of the weights), unless `skip` is 1.

        constants: float32[rows, 11], from `prepare`. step: 0-d int64, which random bits depend on. skip: 0-d int32.
        """
        if not self.pieces[0].coded:
            self._launch(self.rule, grads, constants, step, skip)
            return
        for table in self.tables:
            table.amax.zero_()
        for measures in (True, False):
            self._launch(self.rule, grads, constants, step, skip, measures)
        for table in self.tables:
            launch = _weight_scales_kernel[(len(table.indices),)]
            launch(table.rows, skip, BLOCK=self.pieces[0].block, TILE=256, num_warps=4)

    def _launch(
        self, rule: str, grads: Sequence[Tensor], constants: Tensor, step: Tensor, skip: Tensor, measures: bool = False
    ) -> None:
        """Launch the kernel for a RULE on each table."""
        for table in self.tables:
            kept = table.point(grads)
            device = table.rows.device
            if (rule, measures) not in table.updates:
                table.updates[rule, measures] = BoundKernel(
                    _adamw_kernel,
                    table.programs,
                    (),
                    {
                        "S": _state_scaling(self.update),
                        "KIND": _kind(self.update),
                        "GROUP": self.padded,
                        "FLAT": table.flat,
                        "BLOCK": self.pieces[0].block,
                        "FEEDS": not measures and self.update.error_feedback and self.pieces[0].w.itemsize < 4,
                        "RULE": rule,
                        "MEASURES": measures,
                        "G": fields(FORMATS[kept[0].dtype]),
                        "GH": RoundingConstants("nearest", 0, 32, True, native(device)),
                        "G_STORE": INTEGERS[kept[0].itemsize],
                        "TILE": self.tile,
                        "TILES": self.tiles,
                        **_kinds(self.pieces[0], kept[0], self.update, table.flat, native(device)),
                    },
                    num_warps=self.program.warps(self.tile),
                    maxnreg=self.program.registers,
                    enable_fp_fusion=False,
                )
            map_tables = state_maps.device_tables(device) if self.update.states in ("dynamic8", "dynamic4") else None
            table.updates[rule, measures](table.rows, table.grads, table.owner, constants, step, skip, map_tables)


class MuonBatch(Batch):
    """Matrices that Muon updates alike: `momentum` comes before their orthogonalization, `step` after it."""

    rule = "move"

    def momentum(self, grads: Sequence[Tensor], constants: Tensor, step: Tensor, skip: Tensor, *, nesterov: bool) -> None:
        """Update the momentum, and replace each gradient in place by what is orthogonalized, unless `skip` is 1."""
        self._launch("nesterov" if nesterov else "momentum", grads, constants, step, skip)


def _kind(update: Update) -> str:
    """Return how moments are kept, as `adam_elements` says."""
    return update.states if update.states in MAPS else "codes" if update.in_blocks else "whole"


def _kinds(piece: Piece, grad: Tensor, update: Update, aligned: bool, fast: bool) -> dict[str, object]:
    """Return the compile-time constants that AdamW and Adam-mini share."""
    format = weight_codes.E4M3 if piece.coded else FORMATS[piece.w.dtype]
    mode = update.master.replace("fp32", "master") or ("kahan" if update.weights == "kahan" and format.bits < 32 else "plain")
    mode = "codes" if piece.coded else mode
    draws = mode in ("plain", "codes") and update.weights == "stochastic" and format.bits < 32
    stochastic = RoundingConstants("stochastic", BITS, BITS, True, fast)
    of_weights = RoundingConstants("stochastic", weight_codes.BITS, 32, True, fast) if piece.coded else stochastic
    nearest = RoundingConstants("nearest", 0, 32, True, fast)
    return {
        "W": fields(format),
        "WH": of_weights if draws else nearest,
        "MODE": mode,
        "F": fields(update.format or UNIT),
        "FH": stochastic if update.draws_states else nearest,
        "W_TYPE": TYPES[piece.w.dtype],
        "W_STORE": INTEGERS[piece.w.itemsize],
        "E_TYPE": TYPES[piece.w.dtype if piece.extra is None else piece.extra.dtype],
        "G_TYPE": TYPES[grad.dtype],
        "S_TYPE": TYPES[piece.m.dtype],
        "S_STORE": INTEGERS[piece.m.itemsize],
        "ALIGNED": aligned,
    }


@functools.cache
def _state_scaling(update: Update) -> Scaling:
    """Return the constants by which a block's largest magnitude becomes its scale; without blocks they are not used."""
    if update.format is None:
        return Scaling("fp32", "fp32", 1.0, 0, 0, 0.0, 1.0, 1.0, 1.0, 0.0)
    return scaling_fields(Cast(update.states, "tensor", "fp32")) if update.in_blocks else _state_scaling(Update(states="int8"))


class MiniBatch(Batch):
    """Tensors that Adam-mini updates alike: one program per run, the rows that share a second moment."""

    def _programs(self, piece: Piece, flat: bool) -> int:
        return piece.v.numel()

    def square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of the gradients, 0-d float64."""
        return torch.stack([self._squares(table, grads).sum() for table in self.tables]).sum()

    def run_squares(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return, per piece, the sums of squares over the part of each run that it holds: float64[runs]."""
        sums: list[Tensor] = [grads[0]] * len(grads)
        for table in self.tables:
            parts = self._squares(table, grads).split([self.pieces[index].v.numel() for index in table.indices])
            for index, part in zip(table.indices, parts, strict=True):
                sums[index] = part
        return sums

    def _squares(self, table: PieceTable, grads: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of each run in a table, float64[programs]."""
        kept = table.point(grads)
        out = torch.empty(table.programs, dtype=torch.float64, device=table.rows.device)
        _run_squares_kernel[(table.programs,)](
            table.rows,
            table.grads,
            table.owner,
            out,
            G_TYPE=TYPES[kept[0].dtype],
            NATIVE=native(out.device),
            TILE=SQUARES,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return out

    def step(self, grads: Sequence[Tensor], constants: Tensor, step: Tensor, skip: Tensor, *, moved: bool = False) -> None:
        """Take one step, unless `skip` is 1. `moved` says that the second moments are already those after the step."""
        for table in self.tables:
            kept = table.point(grads)
            _mini_kernel[(table.programs,)](
                table.rows,
                table.grads,
                table.owner,
                constants,
                step,
                skip,
                FLAT=table.flat,
                MOVED=moved,
                TILE=PROGRAMS["mini"].tile,
                num_warps=PROGRAMS["mini"].warps(PROGRAMS["mini"].tile),
                maxnreg=PROGRAMS["mini"].registers,
                enable_fp_fusion=False,
                **_kinds(self.pieces[0], kept[0], self.update, table.flat, native(table.rows.device)),
            )
