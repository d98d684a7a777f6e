"""The record of an export."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ExportedLayer:
    """A linear layer of an exported model."""

    name: str
    shape: tuple[int, ...]
    """Outputs and inputs; before them the number of experts, if there are any."""
    format: str
    bits: float
    """Bits per weight in the file, scales included."""
    error: float
    """Norm of the change divided by the norm of the weight."""
    reason: str = ""
    """Why it stays in 16 bits though another format was asked for, or ""."""

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Check:
    """A comparison of the logits of the exported folder, as transformers loads it, with those of our dequantized model."""

    difference: float
    """The largest difference of two logits."""
    largest: float
    """The largest magnitude of a logit."""
    tokens: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Export:
    """An exported model. Prints as a few lines."""

    path: Path
    format: str
    layers: tuple[ExportedLayer, ...]
    parameters: int
    bytes: int
    """Bytes of all files of weights."""
    loss_before: float | None = None
    """Loss before the cast."""
    loss_after: float | None = None
    check: Check | None = None
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[ExportedLayer, ...]:
        """Return the layers that stay in 16 bits for a reason."""
        return tuple(layer for layer in self.layers if layer.reason)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = asdict(self)
        found["path"] = self.path.name
        found["layers"] = [{**asdict(layer), "shape": list(layer.shape)} for layer in self.layers]
        return found | {"notes": list(self.notes), "provenance": dict(self.provenance)}

    def sizes(self) -> list[tuple[str, int, int, float]]:
        """Return (format, layers, weights, bits per weight) of the linear layers, by format."""
        rows = []
        for format in dict.fromkeys(layer.format for layer in self.layers):
            here = [layer for layer in self.layers if layer.format == format]
            weights = sum(layer.weights for layer in here)
            rows.append((format, len(here), weights, sum(layer.bits * layer.weights for layer in here) / max(weights, 1)))
        return rows

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.parameters:,} parameters in {_megabytes(self.bytes)}"]
        lines += [
            f"  {format}: {count} {'layer' if count == 1 else 'layers'}, {weights:,} weights, {bits:.2f} bits each"
            for format, count, weights, bits in self.sizes()
        ]
        reasons: dict[str, list[str]] = {}
        for layer in self.kept:
            reasons.setdefault(layer.reason, []).append(layer.name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(f"  in 16 bits: {', '.join(names[:2])}{more}: {reason}")
        if self.loss_before is not None and self.loss_after is not None:
            change = self.loss_after - self.loss_before
            lines.append(f"  held-out loss {self.loss_before:.4f} -> {self.loss_after:.4f} nats per token ({change:+.4f})")
        if self.check is not None:
            apart, largest = f"{self.check.difference:.2g}", f"{self.check.largest:.3g}"
            lines.append(f"  checked with transformers: logits differ by at most {apart}, and the largest is {largest}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def _megabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.2f} MB"
