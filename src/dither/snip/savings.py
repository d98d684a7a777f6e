"""Cost of an option, in FLOPs or in measured seconds, and the savings of a choice of options (its efficiency).

A layer Y = X W^T with X: M x K and W: N x K has three products of M * N * K multiplications each:

    forward (fprop)        X, W
    input_grad (dgrad)     dY, W
    weight_grad (wgrad)    dY, X

A product is as fast as its wider operand allows. The efficiency of a choice is the fraction of the possible savings that it
reaches: 0 with every layer in its slowest option, 1 with every product in the narrowest format available. Between FP8 and FP4
it is SNIP's fraction of FLOPs that run in FP4, which needs both operands in FP4.
"""

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dither.console import Tick
from dither.errors import UserError
from dither.nn import Linear
from dither.snip.options import Option
from dither.snip.statistics import LayerStatistics
from dither.spec import PRODUCTS, Cast

Shape = tuple[int, int, int]
"""(M, N, K): tokens, output features and input features of a layer."""

SPEEDS: Mapping[int, float] = MappingProxyType({32: 0.5, 16: 1.0, 8: 2.0, 6: 2.0, 4: 4.0})
"""Speed of matrix units by the bits of their operands, relative to BF16. FP6 runs as fast as FP8 on the GPUs that have it."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds per layer, forward and backward, by shape and casts, on one kind of GPU."""

    device: str
    torch: str
    seconds: Mapping[Shape, Mapping[str, float]] = field(hash=False)
    """By (M, N, K), then by `str(option.precision)`."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**vars(self), "seconds": {shape_text(shape): dict(row) for shape, row in self.seconds.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LayerTimes":
        """Return the object that `to_dict` described."""
        return cls(data["device"], data["torch"], {_shape_of(text): dict(row) for text, row in data["seconds"].items()})

    def of(self, layer: str, shape: Shape, option: Option) -> float:
        """Return the seconds of a layer of a shape in an option; raise if they were not measured."""
        found = self.seconds.get(shape, {}).get(str(option.precision))
        if found is None:
            raise UserError(
                f"The times of {self.device!r} do not include the layer {layer!r} in {option.name} with (M, N, K) = {shape}: "
                "measure them on that GPU with dither.snip.measure_times."
            )
        return found


def shape_text(shape: Shape) -> str:
    """Return a shape as files and tables have it.

    >>> shape_text((8192, 5632, 2048))
    '8192 x 5632 x 2048'
    """
    return " x ".join(map(str, shape))


def _shape_of(text: str) -> Shape:
    m, n, k = map(int, text.split(" x "))
    return m, n, k


def costs(
    layers: Sequence[LayerStatistics],
    options: Sequence[Option],
    times: LayerTimes | None = None,
) -> list[list[float]]:
    """Return the cost of each layer in each option: its fraction of the model's FLOPs divided by their speed, or seconds.

    >>> from types import SimpleNamespace as Layer
    >>> from dither.snip.options import options
    >>> costs([Layer(name="up", M=8, N=4, K=4)], options("bf16,fp4-block"))[0]
    [1.0, 0.25]
    """
    if times is not None:
        return [[times.of(layer.name, (layer.M, layer.N, layer.K), option) for option in options] for layer in layers]
    per_product = [
        [1 / min(_speed(cast) for cast in option.precision.casts(product)) for product in PRODUCTS] for option in options
    ]
    return [[share * math.fsum(products) / 3 for products in per_product] for share in shares(layers)]


def efficiency(
    layers: Sequence[LayerStatistics],
    options: Sequence[Option],
    times: LayerTimes | None = None,
) -> list[list[float]]:
    """Return the fraction of the possible savings that each layer contributes in each option, as `solve` takes it.

    >>> from types import SimpleNamespace as Layer
    >>> from dither.snip.options import options
    >>> layers = [Layer(name="up", M=8, N=4, K=4), Layer(name="down", M=8, N=8, K=4)]
    >>> [[round(share, 3) for share in row] for row in efficiency(layers, options("fp8-block,fp4-block"))]
    [[0.0, 0.0, 0.0, 0.111, 0.0, 0.111, 0.111, 0.333], [0.0, 0.0, 0.0, 0.222, 0.0, 0.222, 0.222, 0.667]]
    """
    taken = costs(layers, options, times)
    most = [max(row) for row in taken]
    if times is not None:
        possible = math.fsum(slow - min(row) for slow, row in zip(most, taken, strict=True))
    else:  # the savings of the narrowest format for all operands, whether or not there is such an option
        found = {_speed(cast) for option in options for each in PRODUCTS for cast in option.precision.casts(each)}
        possible = 1 / min(found) - 1 / max(found)
        most = [share / min(found) for share in shares(layers)]
    if possible <= 0:
        what = "in FLOPs" if times is None else f"on {times.device!r}"
        names = ", ".join(option.name for option in options[:3])
        raise UserError(f"The options {names}, ... all cost the same {what}, so no target can choose among them.")
    # The slowest option saves nothing, even if rounding makes its sum of thirds a little larger than the whole.
    return [[max(0.0, slow - each) / possible for each in row] for slow, row in zip(most, taken, strict=True)]


def shares(layers: Sequence[LayerStatistics]) -> list[float]:
    """Return each layer's fraction of the multiplications of all layers."""
    if not layers:
        raise UserError("There is no layer to choose a precision for.")
    work = [layer.M * layer.N * layer.K for layer in layers]
    return [each / sum(work) for each in work]


def _speed(cast: Cast | None) -> float:
    bits = 16 if cast is None else cast.element.bits  # uncast operands are multiplied in bf16
    return SPEEDS[min(known for known in SPEEDS if known >= bits)]


# Measuring times -------------------------------------------------------------------------------------------------------

TIMES_VERSION = 1

TOKENS = 8192
"""Maximum number of tokens per measurement; times of more tokens are extrapolated linearly."""

WARMUPS, REPEATS, REPLAYS = 3, 7, 10
"""Runs before a graph is captured; measurements per median; replays per measurement."""


def measure_times(
    shapes: Iterable[Shape],
    options: Sequence[Option],
    *,
    path: str | Path | None = None,
    device: torch.device | str = "cuda",
    tick: Tick = lambda done, total: None,
) -> LayerTimes:
    """Measure the time of a BF16 layer, forward and backward with all its casts, for each shape (M, N, K) and option.

    `path` is a JSON file of times. It is read first, and only what is missing is measured and added; times of several GPUs
    and versions of torch are kept apart. An option that the GPU cannot run is an error. `tick` is called after each shape.

        times = measure_times([(8192, 5632, 2048)], options("fp8-block,fp4-block"), path="times.json")
    """
    where = torch.device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise UserError(f"Times are measured on a CUDA GPU, and {str(where)!r} is not one here: use cost='flops'.")
    name = torch.cuda.get_device_name(where)
    known = {} if path is None else _read(Path(path))
    mine = known.setdefault(f"{name}, torch {torch.__version__}", {})
    asked = list(dict.fromkeys(shapes))
    for number, shape in enumerate(asked, 1):
        row = mine.setdefault(shape_text(shape), {})
        for option in options:
            if str(option.precision) not in row:
                row[str(option.precision)] = _measure(shape, option, where)
        if path is not None:
            new = Path(f"{path}.new")  # replaced atomically: a reader sees the old file or the new one
            new.write_text(json.dumps({"version": TIMES_VERSION, "times": known}, indent=1), encoding="utf-8")
            os.replace(new, path)
        tick(number, len(asked))
    return LayerTimes(name, str(torch.__version__), {shape: dict(mine[shape_text(shape)]) for shape in asked})


def read_times(path: str | Path) -> LayerTimes:
    """Return the times of a file that `measure_times` wrote, which must have those of one GPU and one version of torch."""
    known = _read(Path(path))
    if len(known) != 1:
        have = "no times" if not known else f"times of {len(known)} machines: {'; '.join(known)}"
        raise UserError(f"The file {str(path)!r} has {have}. Without a GPU, give a file with the times of one machine.")
    ((machine, rows),) = known.items()
    device, _, version = machine.rpartition(", torch ")
    try:
        return LayerTimes.from_dict({"device": device, "torch": version, "seconds": rows})
    except ValueError as error:
        raise UserError(f"The times {str(path)!r} cannot be read: {error}.") from None


def _measure(shape: Shape, option: Option, device: torch.device) -> float:
    tokens, n, k = shape
    m = min(tokens, TOKENS)
    layer = Linear(k, n, False, device, torch.bfloat16, precision=option.precision, name="timed")
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device=device, dtype=torch.bfloat16)

    def step() -> None:
        torch.autograd.grad(layer(x), (x, layer.weight), dy)

    # A captured graph: otherwise a small layer would measure how fast Python launches kernels.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        found: list[float] = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(stream)
            for _ in range(REPLAYS):
                graph.replay()
            end.record(stream)
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / REPLAYS)
    return statistics.median(found) * (tokens / m)


def _read(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Read the times of a file by GPU and torch version, shape and casts; return {} if there is no such file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != TIMES_VERSION:
            raise UserError(f"The times {str(path)!r} have version {data['version']!r}, not {TIMES_VERSION}: use another file.")
        times: dict[str, dict[str, dict[str, float]]] = data["times"]
        numbers = [number for rows in times.values() for row in rows.values() for number in row.values()]
        if not all(isinstance(number, float) and math.isfinite(number) and number > 0 for number in numbers):
            raise ValueError("a time is not a positive number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"The times {str(path)!r} cannot be read: {error!r:.200}.") from None
    return times
