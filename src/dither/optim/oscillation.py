"""Reset of weights that oscillate between two codes: OsciReset of TetraJet-v2 (arXiv 2510.27527).

A weight near the threshold between two codes changes its code again and again while it hardly moves itself. With Q(w), the
number that the forward product reads of a weight w, a window of T steps adds up

    moved      = sum over t = 1 .. T of |w_t - w_(t-1)|
    moved_read = sum over t = 1 .. T of |Q(w_t) - Q(w_(t-1))|

and at its end a weight oscillates if moved_read >= ratio * moved > 0. It becomes Q(w_T), as far from thresholds as it can be.

    w = 0.249, 0.251, 0.249 and Q(w) = 0, 0.5, 0: moved_read / moved = 1 / 0.004 = 250, and w becomes 0
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.sites import Layer, converted_layers, linear_of
from dither.ops import fake_quantize
from dither.optim.adamw import AdamW
from dither.spec import Cast, LayerPrecision


class Movement(NamedTuple):
    """The weight of a layer in a window; all float32 and of the weight's shape."""

    weight: Tensor
    """The weight after the last step: its master, if it has one."""
    read: Tensor
    """What the forward product reads of it."""
    moved: Tensor
    moved_read: Tensor


class OscillationReset:
    """Resets the weights of a converted model that oscillate between two codes; call `after_step` after each optimizer step.

    It keeps 16 bytes per watched weight, in windows only. Watched are the weights that the forward product casts; a layer
    whose cast changes in a window is left out until the next one.

    >>> import dither, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    >>> conversion = dither.convert(model, "tetrajet2")
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-2)
    >>> reset = dither.optim.OscillationReset(model, optimizer, period=4, window=2)
    >>> for step in range(3):
    ...     with dither.step_context(model, step=step):
    ...         model(torch.ones(32, 32)).square().mean().backward()
    ...         optimizer.step()
    ...     share = reset.after_step(step + 1)
    >>> share.shape  # of the watched weights, how many were reset: the window began after step 1 and ends after step 3
    torch.Size([])
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        start: int = 1,
        period: int = 200,
        window: int = 50,
        ratio: float = 8.0,
        others: Iterable[LayerPrecision] = (),
    ) -> None:
        """Check the model and the numbers; nothing is watched yet.

        model: the converted model, whole on each rank.
        optimizer: its optimizer. Masters and remainders of `dither.optim.AdamW` are reset too.
        start: the step after which the first window begins, from 1.
        period: steps from the beginning of one window to that of the next.
        window: steps in a window.
        ratio: how many times as far as a weight the number that the product reads must move.
        others: precisions that layers may take later.
        """
        for name, value in (("start", start), ("period", period), ("window", window)):
            if type(value) is not int or value < 1:
                raise UserError(f"{name} of OscillationReset is a number of steps from 1 on, not {value!r:.40}.")
        if window >= period:
            raise UserError(f"A window of {window} steps does not fit into a period of {period}: make the period longer.")
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 <= ratio < float("inf"):
            raise UserError(f"ratio of OscillationReset is a number of at least 1, not {ratio!r:.40}.")
        self.model, self.optimizer = model, optimizer
        self.start, self.period, self.window, self.ratio = start, period, window, float(ratio)
        self.since: int | None = None
        """The step after which the present window began; None between windows."""
        self.movements: dict[str, Movement] = {}
        """What is watched in it, by layer."""
        self.casts: dict[str, str] = {}
        """The casts of these layers."""
        layers, held = converted_layers(model), {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, layer in layers.items():
            _check_weight(name, linear_of(layer), held)
        precisions = [*((f"The layer {name!r}", linear_of(layer).precision) for name, layer in layers.items())]
        precisions += [("A later plan", precision) for precision in others]
        for where, precision in precisions:
            check_precision(where, precision)
        if not any(precision.cast("forward", "weight") for _, precision in precisions):
            raise UserError(
                "No layer casts its weight in the forward product, so no weight oscillates: convert by a recipe such as "
                "tetrajet2, or leave the reset out."
            )

    @torch.no_grad()
    def after_step(self, step: int) -> Tensor | None:
        """Watch the weights after an optimizer step; `step` is the number of steps done, this one included.

        Return the share of the watched weights that were reset, 0-d float32, at the end of a window, and None otherwise.
        """
        if self.since is None:
            if step >= self.start and (step - self.start) % self.period == 0:
                self._begin(step)
            return None
        layers = converted_layers(self.model)
        for name in [name for name, cast in self.casts.items() if _casting(layers[name]) != cast]:
            del self.casts[name], self.movements[name]
        for name, last in self.movements.items():
            now = self._now(layers[name])
            last.moved.add_((now.weight - last.weight).abs_())
            last.moved_read.add_((now.read - last.read).abs_())
            last.weight.copy_(now.weight)
            last.read.copy_(now.read)
        return self._end(layers) if step - self.since >= self.window else None

    def _begin(self, step: int) -> None:
        """Begin a window with the present weights."""
        self.since = step
        for name, layer in converted_layers(self.model).items():
            if _cast(layer) is not None and linear_of(layer).learned_weight().requires_grad:
                self.movements[name], self.casts[name] = self._now(layer), _casting(layer)

    def _end(self, layers: Mapping[str, Layer]) -> Tensor:
        """Reset what oscillated and end the window."""
        device = next(self.model.parameters()).device
        reset, watched = torch.zeros((), device=device), 0
        for name, each in self.movements.items():
            oscillates = (each.moved > 0) & (each.moved_read >= self.ratio * each.moved)
            parameter = linear_of(layers[name]).learned_weight()
            if isinstance(self.optimizer, AdamW):
                self.optimizer.write_weight(parameter, each.read, oscillates)
            else:
                parameter.copy_(torch.where(oscillates, each.read.to(parameter.dtype), parameter))
            reset, watched = reset + oscillates.sum(), watched + oscillates.numel()
        self.since, self.movements, self.casts = None, {}, {}
        return reset / max(watched, 1)

    def _now(self, layer: Layer) -> Movement:
        """Return the weight of a layer, what its product reads of it, and movements of zero."""
        parameter = linear_of(layer).learned_weight().detach()
        if isinstance(self.optimizer, AdamW):
            wide = self.optimizer.wide_weight(linear_of(layer).learned_weight())
        else:
            wide = parameter.float()
        experts = [layer] if isinstance(layer, Linear) else [*layer.experts]
        read = torch.stack([_read(each) for each in experts]).view(parameter.shape)
        if (channels := linear_of(layer).outlier_channels) is not None and linear_of(layer).outlying.chosen:
            axis = 0 if linear_of(layer).transposed else 1  # outlier channels have more codes, and do not oscillate
            read.index_copy_(axis, channels, wide.index_select(axis, channels))
        return Movement(wide.clone(), read, torch.zeros_like(read), torch.zeros_like(read))

    # Saving and loading --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the present window: its first step, the casts of the watched layers, and tensors by name; not copied."""
        tensors = {f"{name}:{key}": value for name, each in self.movements.items() for key, value in each._asdict().items()}
        return {"since": self.since, "casts": dict(self.casts), "tensors": tensors}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; what does not fit raises a UserError and changes nothing."""
        self.load_checked(self.checked(state_dict))

    def checked(self, state_dict: Mapping[str, Any]) -> tuple[int | None, dict[str, str], dict[str, Movement]]:
        """Return the window of a saved state, copied to the devices of the weights; raise if it is not of this model."""
        since, casts, tensors = (state_dict.get(key) for key in ("since", "casts", "tensors"))
        layers = converted_layers(self.model)
        right = (since is None or (type(since) is int and since >= 1)) and isinstance(casts, dict) and isinstance(tensors, dict)
        if not right or not set(casts or ()) <= set(layers):
            raise UserError("The saved state of oscillating weights is not of this model: build it as the saved one was.")
        movements = {}
        for name in casts:  # type: ignore[union-attr]
            weight = linear_of(layers[name]).learned_weight()
            found = [tensors.get(f"{name}:{key}") for key in Movement._fields]  # type: ignore[union-attr]
            if not all(isinstance(each, Tensor) and each.shape == weight.shape for each in found):
                raise UserError(f"The saved movements of the layer {name!r} do not have the shape {tuple(weight.shape)}.")
            movements[name] = Movement(*(each.to(weight.device, torch.float32, copy=True) for each in found))
        return since, dict(casts), movements  # type: ignore[arg-type]

    def load_checked(self, window: tuple[int | None, dict[str, str], dict[str, Movement]]) -> None:
        """Continue a window that `checked` returned."""
        self.since, self.casts, self.movements = window


def check_precision(where: str, precision: LayerPrecision) -> None:
    """Raise if weights of this precision have no fixed codes to be reset to; `where` begins the sentence."""
    cast = precision.cast("forward", "weight")
    reasons = {
        "samples its weight": precision.sampling is not None,
        f"casts its weight by {str(cast)!r}, which draws random bits": cast is not None and cast.round.bits,
        f"casts its weight by {str(cast)!r}, after a transform": cast is not None and cast.transforming.size,
        f"casts its weight by {str(cast)!r}, with scales of earlier steps": cast is not None and cast.scaling.kind == "delayed",
        "learns where to clip its weight": precision.learned_clip,
    }
    for reason, there in reasons.items():
        if there:
            raise UserError(
                f"{where} {reason}, and oscillating weights are reset to fixed codes of their own: use forward casts of the "
                "weight such as those of tetrajet2, or leave the reset out."
            )


def _check_weight(name: str, layer: Linear, held: set[int]) -> None:
    """Raise if the weight of a layer cannot be reset."""
    if layer.CODES_ONLY:
        raise UserError(f"The weight of the layer {name!r} exists as codes only, and cannot oscillate: leave the reset out.")
    weight = layer.learned_weight()
    if isinstance(weight, DTensor):
        raise UserError(
            f"The weight of the layer {name!r} is sharded, and oscillating weights are watched whole: use replicas of the "
            "model, or leave the reset out."
        )
    if weight.requires_grad and id(weight) not in held:
        raise UserError(f"The optimizer does not have the weight of the layer {name!r}: pass it all parameters of the model.")


def _cast(layer: Layer) -> Cast | None:
    """Return the cast of the weight in the forward product."""
    return linear_of(layer).precision.cast("forward", "weight")


def _casting(layer: Layer) -> str:
    """Return a text that changes with what the forward product reads of a weight."""
    return f"{_cast(layer)}{' without outliers' if linear_of(layer).outlying.chosen else ''}"


def _read(layer: Linear) -> Tensor:
    """Return what the forward product reads of a weight, float32."""
    cast = layer.precision.cast("forward", "weight")
    assert cast is not None
    weight = layer.clipped_weight() if layer.outlying.chosen else layer.weight.detach()
    return fake_quantize(weight.float(), cast, axis=0 if layer.transposed else 1)
