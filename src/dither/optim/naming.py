"""Names of an optimizer's parameters. They determine the random bits that a parameter draws, so they must be unique.

Names come from `model.named_parameters()`, or from a model that is given later. Unnamed parameters are named by position:
"group 0, parameter 3". Saved states identify unnamed parameters by position too, so a resumed run draws the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dither.errors import UserError


def names_of(groups: Sequence[Mapping[str, Any]], number: int) -> list[str]:
    """Return the names of the parameters of group `number`: its own, or names by position.

    >>> names_of([{"params": ["a"], "param_names": ["weight"]}, {"params": ["b", "c"]}], 1)
    ['group 1, parameter 0', 'group 1, parameter 1']
    """
    group = groups[number]
    own = group.get("param_names")
    if own is None:
        return [f"group {number}, parameter {index}" for index in range(len(group["params"]))]
    if len(own) != len(group["params"]):
        raise UserError(
            f"Parameter group {number} has {len(group['params'])} parameters and {len(own)} names: "
            "change its 'params' and 'param_names' together."
        )
    return list(own)


def check_names(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a name or a parameter occurs twice."""
    names: set[str] = set()
    parameters: dict[int, str] = {}
    for number, group in enumerate(groups):
        for name, parameter in zip(names_of(groups, number), group["params"], strict=True):
            if id(parameter) in parameters:
                raise UserError(
                    f"The parameter {name!r} is the same tensor as {parameters[id(parameter)]!r}, and would be updated twice: "
                    "list it once."
                )
            if name in names:
                raise UserError(
                    f"Two parameters are called {name!r}, and would draw the same random bits: give each a unique name."
                )
            names.add(name)
            parameters[id(parameter)] = name


def names_from(model: nn.Module | Iterable[tuple[str, Tensor]], groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the names that a model has for the parameters of each group."""
    named = model.named_parameters() if isinstance(model, nn.Module) else model
    known = {id(parameter): name for name, parameter in named}
    for number, group in enumerate(groups):
        for name, parameter in zip(names_of(groups, number), group["params"], strict=True):
            if id(parameter) not in known:
                raise UserError(
                    f"The parameter {name!r} of shape {tuple(parameter.shape)} is not one of the model's: "
                    "pass the model that the optimizer was created for."
                )
    return [[known[id(parameter)] for parameter in group["params"]] for group in groups]
