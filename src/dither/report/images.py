"""Maps of a run as images, for trackers that show images: the same drawings as those of reports."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dither.precision import Plan
from dither.report.bitwidth_view import layer_bits
from dither.report.maps import grid_of, plan_operands
from dither.report.plots import heat_map, pixels, precision_map


def line_images(layers: Sequence[str], line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the images of a line of metrics by name, uint8[height, width, 3]; none for lines that are not drawn.

    A plan that took effect is drawn as the precision map of the layers, and learned bitwidths as a map of their means.

    Args:
        layers: Names of the converted layers.
        line: A line of metrics as `dither train` writes it.

    >>> from dither.recipes import recipe
    >>> layers = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    >>> found = line_images(layers, {"kind": "plan", "step": 8, "plan": recipe("fp8-block").to_dict(), "changed": True})
    >>> list(found), found["maps/precision"].shape[2]
    (['maps/precision'], 3)
    """
    if line["kind"] == "plan" and line.get("changed", True) and layers:
        grid = grid_of(layers)
        return {"maps/precision": pixels(precision_map(grid, plan_operands(grid.names, Plan.from_dict(line["plan"]))))}
    if line["kind"] == "bitwidths" and (found := layer_bits(line)):
        grid = grid_of(list(found))
        ends = math.floor(min(each.low for each in found.values())), math.ceil(max(each.high for each in found.values()))
        means = [found[name].mean for name in grid.names]
        title = f"Mean bitwidths at step {line['step']:,}"
        return {"maps/bitwidths": pixels(heat_map(grid, means, title, ends=(ends[0], max(ends[1], ends[0] + 1))))}
    return {}
