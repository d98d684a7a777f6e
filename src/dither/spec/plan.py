"""Plan: the precision of every linear layer of a model, with its JSON form."""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from dither.console import aligned
from dither.errors import UserError, checked_keys
from dither.files import Refused, from_json, read_text
from dither.spec import registry
from dither.spec.cast import Cast, Scale
from dither.spec.formats import Format
from dither.spec.layer import OPERANDS, PRODUCTS, LayerPrecision, Outliers, Override
from dither.spec.patterns import BOTH, check_pattern, escape, literal, matches
from dither.spec.sampling import Sampling

Compute = Literal["fp32", "bf16", "fp16"]

COMPUTE: tuple[Compute, ...] = get_args(Compute)


@dataclass(frozen=True)
class Plan:
    """The precision of every linear layer of a model, and the dtypes of the rest of the model.

    A rule's pattern is a layer's name, a glob in which `*` crosses dots, or `a & b` for the names that two globs match. It must
    match the whole name. The first rule that matches is used.

    >>> fp8 = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)")
    >>> plan = Plan(layers=(("*.down_proj", None),), default=fp8, compute="bf16")
    >>> plan.for_layer("model.layers.0.mlp.up_proj") == fp8
    True
    >>> print(plan.for_layer("model.layers.0.mlp.down_proj"))
    None
    """

    layers: tuple[tuple[str, LayerPrecision | None], ...] = ()
    """Rules: pairs of a pattern and a precision. None leaves a layer unchanged."""
    default: LayerPrecision | None = None
    """The precision of layers that no rule matches. None leaves them unchanged."""
    compute: Compute = "fp32"
    """The dtype of uncast operations: `bf16` and `fp16` by autocast, `fp32` without it."""
    parameters: Compute | None = None
    """The dtype of the model's parameters; None does not change it."""
    master: bool = False
    """True if the optimizer keeps fp32 master weights."""
    loss_scaling: bool = False
    """True if the loss is scaled so that small gradients do not underflow, as with `torch.amp.GradScaler`."""
    provenance: Mapping[str, str | int | float | bool | None] = field(default_factory=dict, hash=False)
    """The origin of the plan in plain values, such as the name of a recipe. For information only."""
    spare_last: float = 0.0
    """The share of a model's blocks, from the last one on, whose layers are not cast: `spared` makes rules of it."""

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple | list):
            raise UserError(
                f"A plan's layers are a tuple of pairs, a pattern and a LayerPrecision or None, not {self.layers!r}."
            )
        patterns = [rule[0] for rule in self.layers if isinstance(rule, tuple) and rule and isinstance(rule[0], str)]
        # First, since checking that many would take long.
        if (size := sum(len(pattern) for pattern in patterns if literal(pattern) is None)) > MOST_WILDCARDS:
            raise UserError(
                f"A plan's patterns with wildcards have {size:,} characters in all, and {MOST_WILDCARDS:,} are the most: write "
                "names, or fewer patterns."
            )
        rules = tuple(_rule(rule) for rule in self.layers)
        if twice := [pattern for pattern, count in Counter(pattern for pattern, _ in rules).items() if count > 1]:
            raise UserError(f"A plan has two rules for {twice[0]!r}, of which the second would never be used: keep one.")
        if not isinstance(self.default, LayerPrecision | None):
            raise UserError(f"A plan's default is a LayerPrecision or None, not {self.default!r}.")
        for name, choices in (("compute", COMPUTE), ("parameters", (*COMPUTE, None))):
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"A plan's {name} is one of {', '.join(map(repr, choices))}, not {value!r}.")
        for name in ("master", "loss_scaling"):
            if not isinstance(value := getattr(self, name), bool):
                raise UserError(f"A plan's {name} is true or false, not {value!r}.")
        if not isinstance(self.spare_last, int | float) or not 0 <= self.spare_last < 1:
            raise UserError(f"A plan's spare_last is a share of the blocks, from 0 to below 1, not {self.spare_last!r}.")
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

    @property
    def precisions(self) -> list[LayerPrecision]:
        """Return the precisions of the default and of the rules, without layers that are left alone."""
        return [each for each in (self.default, *(precision for _, precision in self.layers)) if each is not None]

    @property
    def uncast(self) -> bool:
        """Return True if neither the default nor any rule casts an operand."""
        return all(each.uncast for each in self.precisions)

    def for_layer(self, name: str) -> LayerPrecision | None:
        """Return the precision of the layer called `name`, without samplings of other `parts`; None: unchanged."""
        names, patterns = self._index
        exact = names.get(name, len(self.layers))
        first = next((place for place in patterns if place < exact and matches(self.layers[place][0], name)), exact)
        chosen = self.layers[first][1] if first < len(self.layers) else self.default
        return chosen and chosen.on(name)

    def for_layers(self, names: Collection[str]) -> "Plan":
        """Return the plan with the rules that match any of these layers, such as those of a stage of a pipeline.

        >>> plan = Plan(layers=(("blocks.0.*", None), ("blocks.1.*", None)))
        >>> plan.for_layers(["blocks.1.down"]).layers
        (('blocks.1.*', None),)
        """
        return replace(self, layers=tuple(rule for rule in self.layers if any(matches(rule[0], name) for name in names)))

    def spared(self, names: Collection[str]) -> "Plan":
        """Return the plan with rules for the blocks that `spare_last` leaves uncast in a model whose layers have these names.

        A block is what has a number in the names of its layers, such as layers.3 in "model.layers.3.mlp.up_proj". Shares are
        rounded to whole blocks.

        >>> plan = Plan(default=LayerPrecision.of("mxfp4", "mxfp4", "mxfp8"), spare_last=0.15)
        >>> [pattern for pattern, _ in plan.spared([f"layers.{i}.up" for i in range(12)]).layers]
        ['layers.10.*', 'layers.11.*']
        """
        if not self.spare_last:
            return self
        blocks: dict[str, set[int]] = {}
        for name in names:
            if found := re.match(r"((?:[^.]*[^.\d][^.]*\.)*)(\d+)\.", name):
                blocks.setdefault(found[1], set()).add(int(found[2]))
        base = self.default or LayerPrecision()
        none: dict[str, Any] = {"input": None, "weight": None, "grad": None, "overrides": (), "outliers": None}
        uncast = replace(base, **none, requantize=False, mask_clipped=False)
        rules = []
        for prefix, numbers in blocks.items():
            count = round(self.spare_last * len(numbers))
            rules += [(f"{escape(prefix)}{number}.*", uncast) for number in sorted(numbers)[len(numbers) - count :]]
        taken = {pattern for pattern, _ in self.layers}
        rules = [rule for rule in rules if rule[0] not in taken]
        return replace(self, layers=(*self.layers, *rules), spare_last=0.0)

    @functools.cached_property
    def _index(self) -> tuple[dict[str, int], list[int]]:
        """The place of the first rule for each name that is written out, and the places of the rules with wildcards."""
        literals = [literal(pattern) for pattern, _ in self.layers]
        names = {name: place for place, name in reversed(list(enumerate(literals))) if name is not None}
        return names, [place for place, name in enumerate(literals) if name is None]

    def with_sampling(self, sampling: Sampling | None, *, input_sampling: Sampling | None = None) -> "Plan":
        """Return the plan with these samplings in the default and in every rule that has a precision.

        >>> print(Plan(compute="bf16").with_sampling(Sampling(parts="od")).for_layer("model.layers.0.mlp.down_proj"))
        sampling rounded_normal(32) 6 to 4 decay(0.1) parts='od'
        """

        def sampled(precision: LayerPrecision) -> LayerPrecision:
            return replace(precision, sampling=sampling, input_sampling=input_sampling)

        rules = tuple((pattern, precision and sampled(precision)) for pattern, precision in self.layers)
        return replace(self, layers=rules, default=sampled(self.default or LayerPrecision()))

    def with_outliers(self, outliers: Outliers) -> "Plan":
        """Return the plan with outlier channels in every precision whose forward product casts to fewer bits than they have.

        >>> from dither.spec.recipes import recipe
        >>> recipe("tetrajet2").with_outliers(Outliers(start=500)).default.outliers.share
        0.1
        """
        if not self.takes_outliers(outliers):
            raise UserError(
                f"No forward product of this plan casts its operands to less than {outliers.cast.element.bits} bits, so there "
                "are no channels to keep in more: use a recipe such as tetrajet2, or leave the outliers out."
            )

        def kept(precision: LayerPrecision | None) -> LayerPrecision | None:
            return (
                replace(precision, outliers=outliers) if precision and outliers.widen(precision.casts("forward")) else precision
            )

        rules = tuple((pattern, kept(precision)) for pattern, precision in self.layers)
        return replace(self, layers=rules, default=kept(self.default))

    def takes_outliers(self, outliers: Outliers) -> bool:
        """Return True if `with_outliers` changes the plan."""
        return any(outliers.widen(each.casts("forward")) for each in self.precisions)

    def with_output(self, precision: LayerPrecision | None = None, *, layer: str = "*lm_head") -> "Plan":
        """Return the plan with a rule for the output layer, which plans leave alone unless a rule names it.

        Args:
            precision: The precision of the output layer; by default that of the plan's other layers.
            layer: The name of the output layer, or a pattern.

        >>> fp8 = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)")
        >>> Plan(default=fp8).with_output().layers == (("*lm_head", fp8),)
        True
        """
        chosen = self.default if precision is None else precision
        if chosen is None:
            raise UserError("This plan has no default precision: name that of the output layer, with_output(precision).")
        return replace(self, layers=((layer, chosen), *(rule for rule in self.layers if rule[0] != layer)))

    def diff(self, other: "Plan") -> dict[str, tuple[str, str]]:
        """Return the differences between two plans: {entry: (text in this plan, text in the other)}.

        >>> Plan(compute="bf16").diff(Plan(default=LayerPrecision.of(weight="mxfp8")))
        {'default': ('left alone', 'weight e4m3 tile(32) pow2 nearest'), 'compute': ('bf16', 'fp32')}
        """
        mine, theirs = self._entries(), other._entries()
        names = dict.fromkeys((*mine, *theirs))  # an ordered set
        pairs = {name: (mine.get(name, "absent"), theirs.get(name, "absent")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def _entries(self) -> dict[str, str]:
        """Return the entries of the plan as texts, for comparison."""
        rules = {f"layers {pattern}": str(precision or "left alone") for pattern, precision in self.layers}
        order = {"layers": ", ".join(pattern for pattern, _ in self.layers)} if rules else {}
        fields = {name: str(getattr(self, name)) for name in ("compute", "parameters", "master", "loss_scaling")}
        fields |= {"spare_last": str(self.spare_last)} if self.spare_last else {}
        origin = {f"provenance {key}": str(value) for key, value in self.provenance.items()}
        return {**order, **rules, "default": str(self.default or "left alone"), **fields, **origin}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "version": PLAN_VERSION,
            "layers": [[pattern, precision and precision.to_dict()] for pattern, precision in self.layers],
            "default": self.default and self.default.to_dict(),
            "compute": self.compute,
            "parameters": self.parameters,
            "master": self.master,
            "loss_scaling": self.loss_scaling,
            **({"spare_last": self.spare_last} if self.spare_last else {}),
            "provenance": dict(self.provenance),
            **({"definitions": definitions} if (definitions := _definitions(self)) else {}),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Plan":
        """Return the plan of a dictionary, the inverse of `to_dict`. Only the version is required; unknown keys are errors.

        Number formats that the dictionary defines are registered, unless the plan cannot be read.
        """
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > PLAN_VERSION:  # first, since a newer plan may have any keys
            raise UserError(f"This plan has version {version}, and this Dither reads version {PLAN_VERSION}: use a newer one.")
        data = checked_keys("plan", data, PLAN_KEYS)
        if version != PLAN_VERSION or isinstance(version, bool):
            raise UserError(f"A plan in JSON has the key 'version' with the number {PLAN_VERSION}, not {version!r}.")
        rules = data.get("layers", [])
        if not isinstance(rules, list) or not all(isinstance(rule, list) and len(rule) == 2 for rule in rules):
            raise UserError(f"A plan's layers in JSON are a list of [pattern, precision], not {rules!r}.")
        fields = {key: value for key, value in data.items() if key not in ("version", "layers", "default", "definitions")}
        with registry.registering("a plan"):
            _define(data.get("definitions", {}))
            return cls(
                layers=tuple((pattern, _precision(precision)) for pattern, precision in rules),
                default=_precision(data.get("default")),
                **fields,
            )

    def to_json(self) -> str:
        """Return JSON with one line per rule."""
        fields = self.to_dict()
        rules = ",\n    ".join(json.dumps(rule) for rule in fields["layers"])
        lines = {key: json.dumps(value) for key, value in fields.items()} | (
            {"layers": f"[\n    {rules}\n  ]"} if rules else {}
        )
        return "{\n" + ",\n".join(f'  "{key}": {line}' for key, line in lines.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan of a JSON text, the inverse of `to_json`."""
        try:
            data = from_json(text.encode())
        except (Refused, UnicodeEncodeError) as error:
            raise UserError(f"This cannot be read as a plan: {error}.") from None
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that `save` wrote."""
        try:
            text = read_text(path)
        except Refused as error:
            hint = "name a file that `dither plan RUN -o FILE` wrote, or the plan.json of a run"
            raise UserError(f"The plan {str(path)!r} cannot be read: {error}; {hint}.") from None
        try:
            return cls.from_json(text)
        except UserError as error:
            raise UserError(f"In the plan {str(path)!r}: {error}") from None

    def __str__(self) -> str:
        """Return a table with a line per rule, the default, and the rest of the model."""
        rows = [("layers", *OPERANDS), *((pattern, *_cells(precision)) for pattern, precision in self.layers)]
        rows.append(("all others" if self.layers else "all", *_cells(self.default)))
        rest = [f"compute {self.compute}", f"parameters {self.parameters or 'as they are'}"]
        rest += [f"the last {self.spare_last:.0%} of the blocks uncast"] * bool(self.spare_last)
        rest += ["fp32 master copy"] * self.master + ["loss scaling"] * self.loss_scaling
        origin = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in self.provenance.items()}
        rest += [f"{key}: {value}" for key, value in origin.items()]
        return "\n".join([*aligned(rows), "; ".join(rest)])


PLAN_VERSION = 3
"""The version of plans in JSON."""

MOST_WILDCARDS = 10_000
"""Most characters of all patterns of a plan with wildcards. Rules for single layers, perhaps thousands, are plain names."""

PLAN_KEYS = (
    *("version", "layers", "default", "compute", "parameters", "master", "loss_scaling", "spare_last"),
    *("provenance", "definitions"),
)

CODE: dict[str, registry.Table[Any]] = {
    "scale rules": registry.SCALES,
    "roundings": registry.ROUNDINGS,
    "transforms": registry.TRANSFORMS,
}
"""Definitions that a plan in JSON only names, with their origins, because they are code."""


def _definitions(plan: Plan) -> dict[str, Any]:
    """Return what the plan's casts need and Dither does not have: formats with their fields, and code by name."""
    casts = {cast for each in plan.precisions for operand in OPERANDS for cast in each.casts_of(operand) if cast is not None}
    casts |= {each.outliers.cast for each in plan.precisions if each.outliers is not None}
    words = {word for cast in casts for word in (cast.scaling.kind, cast.round.kind, cast.transforming.matrix)}
    formats = sorted({cast.format for cast in casts if registry.FORMATS.added(cast.format)})
    code = {kind: {name: table.origin[name] for name in sorted(words) if table.added(name)} for kind, table in CODE.items()}
    found = {"formats": [registry.FORMATS[name].to_dict() for name in formats], **code}
    return {kind: entries for kind, entries in found.items() if entries}


def _define(data: Any) -> None:
    """Register the formats of a plan's definitions, and check that its code is here."""
    data = checked_keys("plan's definitions", data, ("formats", *CODE))
    if not isinstance(formats := data.get("formats", []), list):
        raise UserError(f"The formats of a plan are a list of definitions, not {formats!r:.200}.")
    registry.register(*map(Format.from_dict, formats))
    for kind, table in CODE.items():
        if not isinstance(names := data.get(kind, {}), dict):
            raise UserError(f"The {kind} of a plan are origins by name, not {names!r:.200}.")
        for name, origin in names.items():
            if name not in table:
                raise UserError(
                    f"This plan needs the {table.kind} {name!r}, which is code of {origin!s:.200} and not registered here: "
                    "install its package, or pass its file as --plugin."
                )


def _rule(rule: object) -> tuple[str, LayerPrecision | None]:
    if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
        raise UserError(f"A plan's layers are pairs of a pattern and a LayerPrecision or None, not {rule!r}.")
    pattern, precision = rule
    if not isinstance(precision, LayerPrecision | None):
        raise UserError(f"The plan's rule for {pattern!r} is a LayerPrecision or None, not {precision!r}.")
    check_pattern(pattern)
    return pattern, precision


def _precision(data: Any) -> LayerPrecision | None:
    return None if data is None else LayerPrecision.from_dict(data)


def _cells(precision: LayerPrecision | None) -> tuple[str, ...]:
    if precision is None:
        return ("left alone", "", "")
    return tuple(precision.cell(name) for name in OPERANDS)


def with_forward_casts(plan: Plan, forward: Plan) -> Plan:
    """Return `plan` with the forward products of its layers cast as in `forward`.

    Backward products, samplings and everything that is not about layers stay those of `plan`. A layer that `plan` leaves alone
    stays so. A layer that `forward` leaves alone has an uncast forward product.

    >>> from dither.spec.recipes import recipe
    >>> late = with_forward_casts(recipe("fp4-block"), recipe("fp8-block"))
    >>> [str(late.default.cast(product, "weight")).split()[0] for product in ("forward", "input_grad")]
    ['e4m3', 'e2m1']
    """
    rules: dict[str, LayerPrecision | None] = {}
    # Names first: each is looked up in both plans. Then pairs of patterns, in an order that keeps the first match of both.
    for pattern, _ in (*forward.layers, *plan.layers):
        if (name := literal(pattern)) is not None:
            rules.setdefault(pattern, _joined(plan.for_layer(name), forward.for_layer(name)))
    ours, theirs = ([rule for rule in each.layers if literal(rule[0]) is None] for each in (plan, forward))
    for pattern, casts in theirs:
        for other, precision in ours:
            both = pattern if pattern == other else f"{pattern}{BOTH}{other}"
            rules.setdefault(both, _joined(precision, casts))
        rules.setdefault(pattern, _joined(plan.default, casts))
    for pattern, precision in ours:
        rules.setdefault(pattern, _joined(precision, forward.default))
    return replace(plan, layers=tuple(rules.items()), default=_joined(plan.default, forward.default))


def _joined(precision: LayerPrecision | None, forward: LayerPrecision | None) -> LayerPrecision | None:
    """Return `precision` with the casts of the forward product of `forward`."""
    if precision is None:
        return None
    source = forward or LayerPrecision()
    own = {operand: getattr(precision, operand) for operand in OPERANDS}
    overrides = []
    for product, operands in PRODUCTS.items():
        for operand in operands:
            cast = (source if product == "forward" else precision).cast(product, operand)
            if product == "forward" and cast is not None and cast.scaling.kind == "delayed":
                own[operand] = cast  # an override cannot be delayed, so the backward product has the override
            if cast != own[operand]:
                overrides.append(Override(product, operand, cast))  # type: ignore[arg-type]
    return replace(precision, **own, overrides=tuple(overrides), outliers=source.outliers)


def static_plan(plan: Plan, magnitudes: Mapping[str, Mapping[str, float]], headroom: float = 2.0) -> Plan:
    """Return a plan with `static(s)` in place of the measured or delayed scales of whole tensors.

    A value above `headroom` times the largest magnitude saturates. Scales of rows and groups stay as they are.

    Args:
        plan: A plan with one scale per tensor, such as `dither.recipe("fp8-current")`.
        magnitudes: The largest magnitudes by the name of a layer and by operand: input, weight, grad.
        headroom: The factor by which later values may be larger, at least 1.

    >>> from dither.spec.recipes import recipe
    >>> made = static_plan(recipe("fp8-current"), {"up": {"input": 8.0, "weight": 0.5, "grad": 1e-3}}, headroom=2)
    >>> print(made.for_layer("up").input)  # 16 becomes 448
    e4m3 tensor static(0.03573) nearest
    """
    if not headroom >= 1 or not math.isfinite(headroom):
        raise UserError(f"headroom is a number from 1 on, not {headroom!r}.")
    rules: dict[str, LayerPrecision] = {}
    for name, known in magnitudes.items():
        precision = plan.for_layer(name)
        if precision is None:
            continue
        limits = {operand: headroom * known.get(operand, 0.0) for operand in OPERANDS}
        changed = replace(
            precision,
            input=_static(precision.input, limits["input"]),
            weight=_static(precision.weight, limits["weight"]),
            grad=_static(precision.grad, limits["grad"]),
            overrides=tuple(replace(each, cast=_static(each.cast, limits[each.operand])) for each in precision.overrides),
        )
        if changed != precision:
            rules[escape(name)] = changed
    if not rules:
        raise UserError(
            "No operand of this plan has a static scale to take: it needs casts with one scale per tensor in a format with "
            "NaN, as in fp8-current and fp8-delayed, and the measured magnitudes of their layers."
        )
    kept = tuple(rule for rule in plan.layers if rule[0] not in rules)
    return replace(plan, layers=(*rules.items(), *kept), provenance={**plan.provenance, "headroom": float(headroom)})


def _static(cast: Cast | None, limit: float) -> Cast | None:
    """Return a cast that scales `limit` to the largest value of its format, if it has one scale per tensor."""
    if cast is None or cast.group.kind != "tensor" or not cast.element.nan or cast.transforming.size or not limit:
        return cast
    # Four digits, rounded up, within the range of `static`.
    scale = float(f"{min(max(limit / cast.element.max, 2.0**-120), 2.0**120) * 1.0005:.4g}")
    return replace(cast, scale=str(Scale("static", arguments=(scale,))))
