"""The modes of train.py as values: a method, and parts after it that begin with a plus sign. train.py describes them.

>>> mode = parse_mode("recipe:fp8-block+output+sr+fsdp")
>>> mode.method, mode.name, mode.output, mode.narrow, mode.fsdp
('recipe', 'fp8-block', True, True, 'fsdp')
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """A mode of train.py."""

    method: str
    """o1, bf16-nearest, bf16-sr, torchao-tensorwise, torchao-rowwise, recipe, gaussws or diffq."""
    name: str = ""
    """The recipe, or the parts of the model whose weights are sampled."""
    output: bool = False
    """True if the output layer has the precision of the recipe too."""
    sr: bool = False
    """True if bfloat16 parameters are updated with stochastic rounding: bf16-sr, and recipes with +sr."""
    states: str | None = None
    """Format of the optimizer's states with stochastic rounding; None for bfloat16."""
    release: bool = False
    """True if parameters are updated in the backward pass."""
    save: str = "codes"
    hold: str = "both"
    swiglu: str = "exact"
    """Fields of MemoryOptions."""
    recompute: bool = False
    """True if sampled weights are computed again in backward."""
    optimizer: str = ""
    """Dither's optimizer, adamw or adam-mini; "" for torch's AdamW."""
    fsdp: str = ""
    """fsdp or fsdp-codes if FSDP2 shards the model."""

    @property
    def narrow(self) -> bool:
        """True if parameters are bfloat16."""
        return self.sr or self.method == "bf16-nearest"


PARTS: dict[str, tuple[str, object]] = {
    "output": ("output", True),
    "sr": ("sr", True),
    "companded8": ("states", "companded8"),
    "dynamic8": ("states", "dynamic8"),
    "release": ("release", True),
    "input": ("save", "input"),
    "one": ("hold", "one"),
    "none": ("hold", "none"),
    "swiglu": ("swiglu", "fp8"),
    "recompute": ("recompute", True),
    "adamw": ("optimizer", "adamw"),
    "adam-mini": ("optimizer", "adam-mini"),
    "fsdp": ("fsdp", "fsdp"),
    "fsdp-codes": ("fsdp", "fsdp-codes"),
}
"""Field of a mode that each part sets, and its value, in the order in which the parts are written."""

FIELDS = {
    "o1": ("optimizer", "fsdp"),
    "bf16-nearest": ("fsdp",),
    "bf16-sr": ("states", "release", "fsdp"),
    "torchao-tensorwise": ("fsdp",),
    "torchao-rowwise": ("fsdp",),
    "recipe": ("output", "sr", "states", "release", "save", "hold", "swiglu", "fsdp"),
    "gaussws": ("recompute", "optimizer", "fsdp"),
    "diffq": ("recompute", "optimizer", "fsdp"),
}
"""Fields that the parts of each method may set."""

SAMPLED = ("all", "od", "qkv", "out", "up", "down")
"""Parts of a model whose weights gaussws and diffq sample."""


def parse_mode(text: str) -> Mode:
    """Return the mode that a text describes. Raise a ValueError with one sentence if there is no such mode.

    >>> parse_mode("bf16-sr+release+release")
    Traceback (most recent call last):
    ValueError: In the mode 'bf16-sr+release+release', +release is given twice or contradicts another part.
    """
    begin, *parts = text.split("+")
    method, colon, name = begin.partition(":")
    sampled = method in ("gaussws", "diffq")
    fits = name in SAMPLED if sampled else re.fullmatch(r"[\w-]+", name) if method == "recipe" else not colon
    if method not in FIELDS or not fits:
        raise ValueError(f"There is no mode {text!r}: --help lists the modes.")
    known = [part for part, (field, _) in PARTS.items() if field in FIELDS[method]]
    takes = f"{method} takes +{', +'.join(known)}, in this order"
    found: dict[str, object] = {"sr": True} if method == "bf16-sr" else {}
    last = -1
    for part in parts:
        if part not in known:
            raise ValueError(f"In the mode {text!r}, +{part} is unknown: {takes}.")
        field, value = PARTS[part]
        if field in found:
            raise ValueError(f"In the mode {text!r}, +{part} is given twice or contradicts another part.")
        if known.index(part) < last:
            raise ValueError(f"In the mode {text!r}, +{part} is too late: {takes}.")
        found[field], last = value, known.index(part)
    mode = Mode(method, name, **found)
    if (mode.states or mode.release) and not mode.sr:
        raise ValueError(f"In the mode {text!r}, 8-bit states and +release need +sr.")
    return mode
