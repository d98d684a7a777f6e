"""The record of a conversion: which layers were converted, which were not, and why."""

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

from dither.precision import OPERANDS, PRODUCTS, LayerPrecision, Plan


@dataclass(frozen=True)
class ConvertedLayer:
    """One converted layer."""

    name: str
    out_features: int
    in_features: int
    precision: LayerPrecision
    engines: tuple[str, ...]
    """Engines of fprop, dgrad and wgrad; `torch` if nothing is cast."""
    share: float
    """Fraction of the multiplications of all linear layers."""
    note: str = ""
    """The reason why `fallback=` was used instead of the plan's casts, or ""."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        engines = dict(zip(PRODUCTS, self.engines, strict=True))
        return {**vars(self), "precision": self.precision.to_dict(), "engines": engines}


@dataclass(frozen=True)
class LeftAlone:
    """A module with parameters that was not converted."""

    name: str
    reason: str
    share: float
    """Fraction of the multiplications of all linear layers; 0 for other modules."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Conversion:
    """The record of `convert` or `apply_plan`, layer by layer. Prints as a table, in which `*` stands for a number."""

    plan: Plan
    layers: tuple[ConvertedLayer, ...]
    left_alone: tuple[LeftAlone, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "layers": [layer.to_dict() for layer in self.layers],
            "left_alone": [module.to_dict() for module in self.left_alone],
        }

    def __rich__(self) -> Group:
        table = Table("layers", "count", "out x in", *OPERANDS, "engines", "share", box=box.SIMPLE_HEAD)
        rest = [f"compute {self.plan.compute}; parameters {self.plan.parameters or 'as they were'}"]
        for pattern, layers in alike(self.layers, name_of, lambda a: (a.out_features, a.in_features, a.precision, a.engines)):
            first = layers[0]
            casts = (first.precision.cell(operand) for operand in OPERANDS)
            engines = first.engines[0] if len(set(first.engines)) == 1 else ", ".join(first.engines)
            size = f"{first.out_features} x {first.in_features}"
            table.add_row(pattern, str(len(layers)), size, *casts, engines, f"{sum(layer.share for layer in layers):.1%}")
            instead = "runs uncast" if first.precision.uncast else "multiplies in float32"
            rest += [f"{instead}: {pattern} ({len(layers)}): {first.note}"] * bool(first.note)
        for pattern, modules in alike(self.left_alone, name_of, lambda module: module.reason):
            share = f", {sum(module.share for module in modules):.1%}" if modules[0].share else ""
            rest.append(f"left alone: {pattern} ({len(modules)}{share}): {modules[0].reason}")
        return Group(table, *rest)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=1000, color_system=None, highlight=False, markup=False)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def alike(entries: Iterable[Any], name: Callable[[Any], str], key: Callable[[Any], object]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (pattern, entries) of entries with the same key whose names differ only in numbers."""
    groups: dict[object, list[Any]] = {}
    for entry in entries:
        numberless = tuple("*" if part.isdigit() else part for part in name(entry).split("."))
        groups.setdefault((numberless, key(entry)), []).append(entry)
    for group in groups.values():
        parts = zip(*(name(entry).split(".") for entry in group), strict=True)
        yield ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts), group


def name_of(entry: Any) -> str:
    """Return the name of an entry, as a key for `alike`."""
    return str(entry.name)
