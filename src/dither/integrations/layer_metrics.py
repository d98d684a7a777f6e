"""Numbers about the converted layers of a model, for the logs of training loops."""

from collections import Counter

from torch import nn

from dither.nn.deployment import bitwidth_range
from dither.nn.linear_sites import converted_layers, linear_of


def layer_metrics(model: nn.Module) -> dict[str, float]:
    """Return learned bitwidths in bits, and the share of converted weights in each format of the forward product.

    Sharded bitwidths are gathered, so all ranks call this.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 384))
    >>> _ = dither.convert(model, dither.Plan(layers=(("0", None),), default=dither.recipe("fp8-block").default))
    >>> layer_metrics(model)
    {'dither/weights_e4m3': 1.0}
    """
    layers = [linear_of(layer) for layer in converted_layers(model).values()]
    sizes: Counter[str] = Counter()
    for layer in layers:
        cast = layer.precision.cast("forward", "weight")
        sizes["uncast" if cast is None else str(cast.format)] += layer.weight.numel()
    total = sum(sizes.values())
    numbers = {f"dither/weights_{format}": size / total for format, size in sorted(sizes.items())}
    if any(layer.precision.sampling is not None for layer in layers):
        numbers |= dict(zip((f"dither/bitwidth_{name}" for name in ("mean", "min", "max")), bitwidth_range(model), strict=True))
    return numbers
