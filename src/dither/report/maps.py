"""Draw layers as a grid: one row per kind of layer, one column per block of the model."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dither.errors import UserError
from dither.formats import Format
from dither.precision import OPERANDS, LayerPrecision, Plan

OTHER = ""
"""Column of layers outside of blocks."""


@dataclass(frozen=True)
class Cell:
    """A cell of a grid."""

    text: str
    """Text in the cell, if there is room, and in the legend."""
    about: str
    """Full description."""
    style: str
    """Class of the page's style sheet, which colours the cell."""


@dataclass(frozen=True)
class Row:
    """Layers of one kind, and one of their operands."""

    label: str
    part: str
    cells: tuple[Cell | None, ...]
    """One cell per column; None if the block has no such layer."""


@dataclass(frozen=True)
class Grid:
    """A grid of a model's layers."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    legend: tuple[Cell, ...]

    @property
    def wide(self) -> bool:
        """Return True if there are too many columns for text in the cells."""
        return len(self.columns) > 12


def place(name: str) -> tuple[str, str]:
    """Return the kind of a layer and the index of its block.

    >>> place("model.layers.11.mlp.up_proj"), place("lm_head")
    (('mlp.up_proj', '11'), ('lm_head', ''))
    """
    match = re.match(r"(?:.*?\.)?(\d{1,9})\.(.+)", name, flags=re.DOTALL)
    return (match[2], match[1]) if match else (name, OTHER)


def precision_map(plan: Plan, names: Iterable[str]) -> Grid:
    """Return a grid of the casts of each operand of each layer.

    >>> from dither.recipes import recipe
    >>> grid = precision_map(recipe("fp8-current"), ["h.0.up", "h.0.down", "h.1.up", "h.1.down"])
    >>> grid.columns, [(row.label, row.part, row.cells[0].text) for row in grid.rows[:3]]
    (('0', '1'), [('up', 'input', 'e4m3'), ('up', 'weight', 'e4m3'), ('up', 'grad', 'e5m2')])
    """
    cells: dict[tuple[str, str, str], Cell] = {}
    for name in names:
        kind, column = place(name)
        precision = plan.for_layer(name) or LayerPrecision()
        for operand in OPERANDS:
            cells[kind, operand, column] = _cast_cell(precision, operand, plan.compute)
    return _grid(cells)


def bitwidth_map(bits: Mapping[str, float]) -> Grid:
    """Return a grid of the mean bitwidth of each layer, in ten shades from the smallest to the largest.

    >>> [cell.style for cell in bitwidth_map({"h.0.up": 4.0, "h.1.up": 6.0}).rows[0].cells]
    ['shade0', 'shade9']
    """
    least, most = min(bits.values(), default=0.0), max(bits.values(), default=0.0)
    cells: dict[tuple[str, str, str], Cell] = {}
    for name, mean in bits.items():
        shade = min(9, int(10 * (mean - least) / (most - least))) if most > least else 5
        kind, column = place(name)
        cells[kind, "", column] = Cell(f"{mean:.1f}", f"{name}: {mean:.3f} bits", f"shade{shade}")
    return _grid(cells)


def _grid(cells: Mapping[tuple[str, str, str], Cell]) -> Grid:
    columns = sorted({column for _, _, column in cells}, key=lambda column: (column == OTHER, int(column or 0), column))
    kinds = dict.fromkeys((kind, part) for kind, part, _ in cells)
    rows = tuple(Row(kind, part, tuple(cells.get((kind, part, column)) for column in columns)) for kind, part in kinds)
    legend = {(cell.text, cell.style): cell for cell in cells.values()}
    return Grid(tuple(columns), rows, tuple(legend[key] for key in sorted(legend)))


def _cast_cell(precision: LayerPrecision, operand: str, compute: str) -> Cell:
    texts = [compute if cast is None else cast.format for cast in precision.casts_of(operand)]
    sampling = {"input": precision.input_sampling, "weight": precision.sampling}.get(operand)
    text = "|".join(dict.fromkeys(texts))  # both if the operand's two products differ
    style = f"bits{_family(texts[0])}" + (" second" if texts[0] in ("e5m2", "e3m4", "int8", "e3m2", "int4", "fp16") else "")
    if sampling is not None:
        text, style = f"{text} sampled", f"{style} sampled"
    return Cell(text, precision.cell(operand), style)


def _family(name: str) -> int:
    """Return the bits of a format, rounded up to a width that the style sheet has a colour for."""
    try:
        bits = Format.parse(name).bits
    except UserError:
        return 32
    return next(width for width in (4, 6, 8, 16, 32) if bits <= width)
