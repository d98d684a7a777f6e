"""Arms of a comparison as data: a named precision with its own settings, and the sweep of a field.

>>> arm = Arm.parse("bf16-sr@lr=2e-3,states=dynamic8")
>>> arm.name, arm.settings
('bf16-sr', (('optim.lr', '2e-3'), ('precision.states', 'dynamic8')))
>>> arm.folder(arm.config(Config()))
'bf16-sr@optim.lr=0.002,precision.states=dynamic8'
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dither.errors import UserError
from dither.report.run_folder import number
from dither.settings import toml, value_at
from dither.spec import PARTS, Sampling, did_you_mean
from dither.spec.modes import AUTO, MODES
from dither.spec.recipes import ALIASES, MEASURED, RECIPES, recipe_name
from dither.train import config as configs
from dither.train.config import SAMPLING_KEY, Config, Precision

NAMES = ("fp32", "bf16", "fp8-block", "fp4-block", "gaussws:od", "bf16-sr")
"""The default arms of a comparison."""

NOISES = {"gaussws": "rounded_normal", "diffq": "uniform"}
"""Samplings by their names in the papers."""

NAMED = ("precision.mode", "precision.recipe", "precision.plan", "precision.schedule")
"""Fields that the name of an arm sets, so that the common config cannot."""

SHARED: Mapping[str, str] = {
    **dict.fromkeys(
        ("data.sources", "data.kind", "data.tokenizer", "data.held_out"), "all arms read the same text, which --set chooses"
    ),
    **dict.fromkeys(("data.seed", "run.seed"), "all arms have the same seeds, which --seeds counts"),
    "run.out": "each run has a folder of its own, below --out",
    **dict.fromkeys(("precision.mode", "precision.recipe"), "the arm's name says it, as in bf16-sr+fp8-block"),
}
"""Fields that an arm cannot set, and why."""

LONGEST = 120
"""Most characters in the name of a folder."""


@dataclass(frozen=True)
class Arm:
    """An arm of a comparison: a precision and its own settings, as `NAME` or `NAME@FIELD=VALUE,...`."""

    text: str
    """The arm as it was written."""
    name: str
    """A recipe, a mode, a sampling, or several joined by `+`."""
    settings: tuple[tuple[str, str], ...] = ()
    """Paths of fields and their values in TOML, in alphabetical order."""

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Parse an arm; a mistake is a UserError.

        A field is written as its path (`optim.lr`) or any ending of it that belongs to one field alone (`lr`).

        >>> Arm.parse("gaussws:od@b_target=3").settings
        (('precision.sampling.b_target', '3'),)
        """
        name, at, rest = text.partition("@")
        sampled = precision_of(name).sampling is not None
        found: dict[str, str] = {}
        for setting in split(rest) if at else ():
            field, equals, value = setting.partition("=")
            if not equals or not field.strip() or not value.strip():
                raise UserError(f"The settings of an arm are written {name}@lr=2e-3,eps=1e-6, not {text!r:.80}.")
            path = find_field(field.strip())
            if path in SHARED:
                raise UserError(f"The arm {text!r:.80} cannot set {path}: {SHARED[path]}.")
            if path.startswith(f"{SAMPLING_KEY}.") and not sampled:
                raise UserError(
                    f"The arm {text!r:.80} sets {path} but has no sampling: name one, as in {name}+gaussws:od@{setting}."
                )
            if path in found:
                raise UserError(f"The arm {text!r:.80} sets {path} twice: set it once.")
            found[path] = value.strip()
        return cls(text, name, tuple(sorted(found.items())))

    def at(self, path: str, value: str) -> "Arm":
        """Return the arm with one more setting, under the same text."""
        if path in dict(self.settings):
            raise UserError(f"The arm {self.text!r:.80} sets {path}, which is swept: remove one of them.")
        if path.startswith(f"{SAMPLING_KEY}.") and precision_of(self.name).sampling is None:
            raise UserError(f"The arm {self.text!r:.80} has no sampling, so {path} cannot be swept for it: remove it.")
        return replace(self, settings=tuple(sorted([*self.settings, (path, value)])))

    def config(self, common: Config) -> Config:
        """Return the config of the arm: the common one, with the precision and the settings of the arm."""
        named = replace(common, precision=precision_of(self.name, common.precision))
        if not self.settings:
            return named
        try:
            return configs.override(named, [f"{path}={value}" for path, value in self.settings])
        except UserError as error:
            raise UserError(f"In the arm {self.text!r}: {error}") from None

    def folder(self, config: Config) -> str:
        """Return the name of the folder of the arm, which is the same for every spelling of its settings."""
        base = self.name.replace(":", "-")
        if not self.settings:
            return base
        texts = [f"{path}={plain(value_at(config, path))}" for path, _ in self.settings]
        whole = f"{base}@{','.join(texts)}"
        safe = re.sub(r"[^\w.+=@,-]+", "-", whole, flags=re.ASCII)
        if safe == whole and len(safe) <= LONGEST:
            return safe
        # Characters were replaced, so that two arms could share a name: a hash distinguishes them.
        return f"{safe[: LONGEST - 9]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Sweep:
    """The values of one field with which every arm is trained.

    >>> Sweep.parse("lr=5e-4,1e-3,2e-3")
    Sweep(path='optim.lr', values=('5e-4', '1e-3', '2e-3'))
    """

    path: str
    values: tuple[str, ...]
    """The values as they were written, in TOML."""

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """Parse a sweep `FIELD=VALUE,VALUE,...`."""
        field, equals, rest = text.partition("=")
        values = tuple(value.strip() for value in split(rest))
        if not equals or len(values) < 2 or not all(values):
            raise UserError(f"A sweep is a field with at least two values, as in optim.lr=5e-4,1e-3,2e-3, not {text!r:.80}.")
        path = find_field(field.strip())
        if path in SHARED:
            raise UserError(f"{path} cannot be swept: {SHARED[path]}.")
        return cls(path, values)


# Names ----------------------------------------------------------------------------------------------------------------


def precision_of(name: str, base: Precision | None = None) -> Precision:
    """Return the precision of a name; fields that names do not set keep their values in `base`.

    Without a mode, it is the one that suits the device, as in a config: o1 on a GPU with BF16 units, fp32 elsewhere.

    >>> precision_of("fp8-block").mode, precision_of("bf16-sr+fp8-block").mode, precision_of("gaussws:od").sampling.parts
    ('auto', 'bf16-sr', 'od')
    """
    return _named(name, name.split("+"), base or Precision())


def _named(name: str, parts: Sequence[str], base: Precision, plan: str | None = None) -> Precision:
    """Return the precision of the parts of a name, with a plan's file if it is given."""
    found: dict[str, Any] = {}
    for part in parts:
        kind, value = _setting(part, base.sampling or Sampling())
        if kind in found:
            raise UserError(
                f"{name!r} names two of one kind, the second is {part!r}: combine one recipe, one mode and one sampling."
            )
        found[kind] = value
    return replace(base, **{"mode": AUTO, "recipe": None, "plan": plan, "schedule": (), "sampling": None, **found})


def _setting(part: str, sampling: Sampling) -> tuple[str, str | Sampling]:
    """Return the field of the precision that a part of a name sets, and its value."""
    noise, colon, layers = part.partition(":")
    if colon and noise in NOISES and layers in PARTS:
        return "sampling", replace(sampling, noise=NOISES[noise], parts=layers)  # type: ignore[arg-type]
    part = recipe_name(part)
    if part in RECIPES:
        # A recipe that sets the dtype of parameters is a mode: bf16 is o1, and plain bf16 weights are bf16-pure.
        of_mode = [mode for mode, each in MODES.items() if each.recipe == part]
        return ("mode", of_mode[0]) if of_mode else ("recipe", part)
    if part in MEASURED:
        return "recipe", part
    if part in MODES:
        return "mode", part
    samplings = [f"{noise}:{layers}" for noise in NOISES for layers in PARTS]
    known = [*RECIPES, *MEASURED, *ALIASES, *(mode for mode in MODES if mode not in RECIPES), *samplings]
    raise UserError(f"There is no precision {part!r:.80}{did_you_mean(part, known)}: choose from {', '.join(known)}.")


def precision_or_plan(name: str, base: Precision) -> Precision:
    """Return the precision of a name: as `dither compare` reads it, or with a plan's file in place of a recipe.

    >>> precision = precision_or_plan("bf16-sr+plan.json", Precision(states="dynamic8"))
    >>> precision.plan, precision.mode, precision.states
    ('plan.json', 'bf16-sr', 'dynamic8')
    """
    parts = name.split("+")
    plans = [part for part in parts if part.endswith(".json")]
    if len(plans) > 1:
        raise UserError(f"{name!r} names two plans: name only one.")
    return _named(name, [part for part in parts if part not in plans], base, *plans)


def check_used(settings: Sequence[str], sampled: bool) -> None:
    """Raise if a setting of all arms has no effect on any of them; `sampled` says that one samples weights."""
    for setting in settings:
        path = setting.partition("=")[0].strip()
        if path in NAMED:
            raise UserError(
                f"The setting {setting!r:.80} has no effect: in a comparison the names of the arms set the precision."
            )
        if path.startswith(f"{SAMPLING_KEY}.") and not sampled:
            raise UserError(f"The setting {setting!r:.80} has no effect: no arm samples weights, as gaussws:od does.")


# Fields ---------------------------------------------------------------------------------------------------------------


def find_field(name: str) -> str:
    """Return the path of a field of a config, given the path or an unambiguous ending of it.

    >>> find_field("optim.lr"), find_field("lr"), find_field("sampling.noise")
    ('optim.lr', 'optim.lr', 'precision.sampling.noise')
    """
    paths = [field.path for field in configs.describe()]
    found = [name] if name in paths else [path for path in paths if path.endswith(f".{name}")]
    if name == "schedule":  # of the learning rate; plans have a schedule too
        found = ["optim.schedule"]
    if len(found) > 1:
        raise UserError(f"A field {name!r:.80} is in several sections: write {' or '.join(found)}.")
    if not found:
        hint = did_you_mean(name, [*paths, *(path.rpartition(".")[2] for path in paths)])
        raise UserError(f"A config has no field {name!r:.80}{hint}: `dither train --fields` lists them.")
    return found[0]


def split(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes.

    >>> split('betas=[0.9, 0.99],lr=1e-3')
    ['betas=[0.9, 0.99]', 'lr=1e-3']
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def plain(value: object) -> str:
    """Return a value as TOML, and text without its quotes."""
    return value if isinstance(value, str) else toml(value)


def axis_value(value: object) -> str | float:
    """Return a value of a sweep as a number if it is one, else as text.

    >>> axis_value(8), axis_value("wsd"), axis_value([0.9, 0.95])
    (8.0, 'wsd', '[0.9, 0.95]')
    """
    found = number(value)
    return plain(value) if found is None else found
