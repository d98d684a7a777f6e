"""Plan: the precision of every linear layer of a model, with its JSON form."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dither.errors import UserError
from dither.precision.checks import checked_keys
from dither.precision.layer import OPERANDS, SAMPLINGS, LayerPrecision
from dither.precision.patterns import matches
from dither.precision.sampling import Sampling
from dither.safe_files import Refused, from_json, read_text


@dataclass(frozen=True)
class Plan:
    """How every linear layer of a model is cast, and what the rest of the model is computed in.

    A rule's pattern is a layer's name, a glob in which `*` crosses dots, or `re:` and a regular expression; it must match the
    whole name, and the first rule that matches decides.

    >>> fp8 = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)")
    >>> plan = Plan(layers=(("*.down_proj", None),), default=fp8, compute="bf16")
    >>> plan.for_layer("model.layers.0.mlp.up_proj") == fp8
    True
    >>> print(plan.for_layer("model.layers.0.mlp.down_proj"))
    None
    """

    layers: tuple[tuple[str, LayerPrecision | None], ...] = ()
    """Rules, pattern and precision; None leaves a layer alone."""
    default: LayerPrecision | None = None
    """The precision of the layers that no rule matches; None leaves them alone."""
    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What uncast operations compute in: `bf16` and `fp16` mean under autocast to them, `fp32` without autocast."""
    parameters: Literal["fp32", "bf16", "fp16"] | None = None
    """The type of the model's parameters; None leaves them as they are."""
    master: bool = False
    """Whether the optimizer keeps an fp32 copy of the parameters."""
    loss_scaling: bool = False
    """Whether the loss is scaled to keep small gradients alive, as `torch.amp.GradScaler` does."""
    provenance: Mapping[str, str | int | float | bool | None] = field(default_factory=dict, hash=False)
    """Where the plan comes from, in plain values, such as a recipe's name; nothing reads it."""

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple | list):
            raise UserError(
                f"A plan's layers are a tuple of pairs, a pattern and a LayerPrecision or None, not {self.layers!r}."
            )
        rules = tuple(_rule(rule) for rule in self.layers)
        if twice := [pattern for pattern, count in Counter(pattern for pattern, _ in rules).items() if count > 1]:
            raise UserError(f"A plan has two rules for {twice[0]!r}, of which the second would never be used: keep one.")
        if not isinstance(self.default, LayerPrecision | None):
            raise UserError(f"A plan's default is a LayerPrecision or None, not {self.default!r}.")
        for name, choices in (("compute", COMPUTE), ("parameters", (*COMPUTE, None))):
            if (given := getattr(self, name)) not in choices:
                raise UserError(f"A plan's {name} is one of {', '.join(map(repr, choices))}, not {given!r}.")
        for name in ("master", "loss_scaling"):
            if not isinstance(given := getattr(self, name), bool):
                raise UserError(f"A plan's {name} is true or false, not {given!r}.")
        if self.master and self.parameters in ("fp32", None):
            raise UserError(
                "A plan with master=True keeps an fp32 copy of parameters='bf16' or 'fp16'; "
                f"given was parameters={self.parameters!r}."
            )
        if not isinstance(self.provenance, Mapping):
            raise UserError(f"A plan's provenance is a dictionary of plain values, not {self.provenance!r}.")
        for key, value in self.provenance.items():
            plain = isinstance(key, str) and isinstance(value, str | int | float | None)
            if not plain or (isinstance(value, float) and not math.isfinite(value)):
                raise UserError(
                    f"A plan's provenance holds strings, finite numbers, true, false and null, not {key!r}: {value!r}."
                )
        object.__setattr__(self, "layers", rules)
        object.__setattr__(self, "provenance", MappingProxyType(dict(self.provenance)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_dict, (self.to_dict(),)  # a mapping proxy cannot be pickled or copied

    def for_layer(self, name: str) -> LayerPrecision | None:
        """The precision of the layer of that name, or None if it is left alone; samplings only where `parts` say so."""
        found = next((precision for pattern, precision in self.layers if matches(pattern, name)), self.default)
        return found and found.on(name)

    def with_sampling(self, sampling: Sampling | None, *, input_sampling: Sampling | None = None) -> "Plan":
        """The plan with these samplings in the default and in every rule that does not leave its layers alone.

        >>> print(Plan(compute="bf16").with_sampling(Sampling(parts="od")).for_layer("model.layers.0.mlp.down_proj"))
        sampling rounded_normal(32) 6 to 4 decay(0.1) parts='od'
        """

        def sampled(precision: LayerPrecision) -> LayerPrecision:
            return replace(precision, sampling=sampling, input_sampling=input_sampling)

        rules = tuple((pattern, precision and sampled(precision)) for pattern, precision in self.layers)
        return replace(self, layers=rules, default=sampled(self.default or LayerPrecision()))

    def diff(self, other: "Plan") -> dict[str, tuple[str, str]]:
        """What differs, by its place: here and in the other plan.

        >>> Plan(compute="bf16").diff(Plan(default=LayerPrecision.of(weight="mxfp8")))
        {'default': ('left alone', 'weight e4m3 tile(32) pow2 nearest'), 'compute': ('bf16', 'fp32')}
        """
        mine, theirs = self._entries(), other._entries()
        places = dict.fromkeys((*mine, *theirs))  # a set in order
        differ = {place: (mine.get(place, "absent"), theirs.get(place, "absent")) for place in places}
        return {place: pair for place, pair in differ.items() if pair[0] != pair[1]}

    def _entries(self) -> dict[str, str]:
        """The plan as lines of text: where, and what."""
        rules = {f"layers {pattern}": str(precision or "left alone") for pattern, precision in self.layers}
        order = {"layers": ", ".join(pattern for pattern, _ in self.layers)} if rules else {}
        fields = {name: str(getattr(self, name)) for name in ("compute", "parameters", "master", "loss_scaling")}
        origin = {f"provenance {key}": str(value) for key, value in self.provenance.items()}
        return {**order, **rules, "default": str(self.default or "left alone"), **fields, **origin}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "version": PLAN_VERSION,
            "layers": [[pattern, precision and precision.to_dict()] for pattern, precision in self.layers],
            "default": self.default and self.default.to_dict(),
            "compute": self.compute,
            "parameters": self.parameters,
            "master": self.master,
            "loss_scaling": self.loss_scaling,
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Plan":
        """The inverse of `to_dict`; every key but the version may be missing, an unknown one is an error."""
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > PLAN_VERSION:  # first, since a newer plan may have any keys
            raise UserError(
                f"This plan has version {version}, and this Dither reads versions up to {PLAN_VERSION}: use a newer one."
            )
        data = checked_keys("plan", data, PLAN_KEYS)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise UserError(f"A plan in JSON has the key 'version' with the number {PLAN_VERSION}, not {version!r}.")
        rules = data.get("layers", [])
        if not isinstance(rules, list) or not all(isinstance(rule, list) and len(rule) == 2 for rule in rules):
            raise UserError(f"A plan's layers in JSON are a list of [pattern, precision], not {rules!r}.")
        given = {key: value for key, value in data.items() if key not in ("version", "layers", "default")}
        return cls(
            layers=tuple((pattern, _precision(precision, version)) for pattern, precision in rules),
            default=_precision(data.get("default"), version),
            **given,
        )

    def to_json(self) -> str:
        """JSON with one rule a line."""
        fields = self.to_dict()
        rules = ",\n    ".join(json.dumps(rule) for rule in fields["layers"])
        lines = {key: json.dumps(value) for key, value in fields.items()} | (
            {"layers": f"[\n    {rules}\n  ]"} if rules else {}
        )
        return "{\n" + ",\n".join(f'  "{key}": {line}' for key, line in lines.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The inverse of `to_json`."""
        try:
            data = from_json(text.encode())
        except (Refused, UnicodeEncodeError) as error:
            raise UserError(f"This cannot be read as a plan: {error}.") from None
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that `save` wrote."""
        try:
            text = read_text(path)
        except Refused as error:
            raise UserError(f"The plan {str(path)!r} cannot be read: {error}.") from None
        try:
            return cls.from_json(text)
        except UserError as error:
            raise UserError(f"In the plan {str(path)!r}: {error}") from None

    def __str__(self) -> str:
        """A table: a line for each rule, the default, and the rest of the model."""
        rows = [("layers", *OPERANDS), *((pattern, *_cells(precision)) for pattern, precision in self.layers)]
        rows.append(("all others" if self.layers else "all", *_cells(self.default)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        rest = [f"compute {self.compute}", f"parameters {self.parameters or 'as they are'}"]
        rest += ["fp32 master copy"] * self.master + ["loss scaling"] * self.loss_scaling
        rest += [f"{key}: {value}" for key, value in self.provenance.items()]
        return "\n".join([*lines, "; ".join(rest)])


PLAN_VERSION = 3
"""The version of a plan in JSON; a change that older readers would misread makes it one more.

2: samplings. 3: overrides; a sampling without the key `beyond` warns, where in versions 1 and 2 it clamps.
"""

PLAN_KEYS = ("version", "layers", "default", "compute", "parameters", "master", "loss_scaling", "provenance")

COMPUTE = ("fp32", "bf16", "fp16")


def _rule(given: object) -> tuple[str, LayerPrecision | None]:
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[0], str) or not given[0]:
        raise UserError(f"A plan's layers are pairs of a pattern and a LayerPrecision or None, not {given!r}.")
    pattern, precision = given
    if not isinstance(precision, LayerPrecision | None):
        raise UserError(f"The plan's rule for {pattern!r} is a LayerPrecision or None, not {precision!r}.")
    matches(pattern, "")  # so that a wrong regular expression is found here
    return pattern, precision


def _precision(data: Any, version: int) -> LayerPrecision | None:
    """Return a layer's precision from a plan of that version; None leaves the layer alone."""
    if version < 3 and isinstance(data, dict):  # the default of `beyond` was "clamp" when these were written
        old = {name: data[name] for name in SAMPLINGS if isinstance(data.get(name), dict)}
        data = data | {name: {"beyond": "clamp"} | sampling for name, sampling in old.items()}
    return None if data is None else LayerPrecision.from_dict(data)


def _cells(precision: LayerPrecision | None) -> tuple[str, ...]:
    if precision is None:
        return ("left alone", "", "")
    return tuple(precision.cell(name) for name in OPERANDS)
