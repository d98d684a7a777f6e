"""The complete state of training as tensors and plain values, for checkpoints.

Random bits have no state: they follow from seeds, names and the step. The state of torch's generators, which dropout uses, is
saved too.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.norms import wide_parameters
from dither.optim.options import NEWER
from dither.precision import Plan

KEYS = ("step", "same", "layers", "optimizer", "scaler", "plan", "others")


class Resumed(NamedTuple):
    """The values that `unpack` returns."""

    step: int
    plan: Plan | None
    others: dict[str, Any]


def pack(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    plan: Plan | None = None,
    scaler: torch.amp.GradScaler | None = None,
    others: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of training as (tensors, plain values) for `checkpoint.save`. The tensors are not copied.

    It holds weights, histories of delayed scaling, bitwidths (also of disabled samplings), the precision and seed of each
    layer, the state of the optimizer, and the loss scale.

    Args:
        model: The model.
        optimizer: Its optimizer.
        step: The number of steps done.
        plan: The plan of the model.
        scaler: The gradient scaler.
        others: Plain values of the caller, such as the position in the data.

    >>> import dither, torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-2)
    >>> tensors, plain = pack(model, optimizer, step=7, others={"sequence": 56})
    >>> sorted(tensors)
    ['model:bias', 'model:weight', 'rng:cpu']
    >>> unpack(model, optimizer, tensors, plain)
    Resumed(step=7, plan=None, others={'sequence': 56})
    """
    values, same = _model_state(model)
    tensors = {f"model:{name}": value for name, value in values.items()}
    tensors |= {f"resting:{name}:{key}": layer.resting_bitwidths[key] for name, layer, key in _resting(model)}
    saved = optimizer.state_dict()
    numbers: dict[str, dict[str, Any]] = {}
    for index, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer:{index}:{key}"] = value
            else:
                numbers.setdefault(str(index), {})[key] = value
    tensors |= {f"rng:{kind}": state for kind, state in _generators(model)}
    return tensors, {
        "step": step,
        "same": same,
        "layers": {name: _layer(layer) for name, layer in _layers(model)},
        "optimizer": {"groups": [_plain_group(group) for group in saved["param_groups"]], "numbers": numbers},
        "scaler": None if scaler is None else scaler.state_dict(),
        "plan": None if plan is None else plan.to_dict(),
        "others": dict(others or {}),
    }


def unpack(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    *,
    scaler: torch.amp.GradScaler | None = None,
) -> Resumed:
    """Restore the state that `pack` returned into a model, optimizer and scaler that were built like the saved ones.

    Everything is checked first: a UserError names what does not fit, and no weight has changed then. If the plan changed during
    training, apply the saved one, `plan_of(plain)`, with `dither.apply_plan` before.
    """
    step = _check_keys(plain)
    _check_layers(model, plain["layers"])
    weights = _check_weights(model, _widened(model, optimizer, tensors), plain["same"])
    resting = {f"resting:{name}:{key}": (layer, key) for name, layer, key in _resting(model)}
    for name in (name for name in tensors if name.startswith("resting:")):
        resting.setdefault(name, _resting_place(model, name))
    state = _optimizer_state(optimizer, tensors, plain["optimizer"])
    loss_scale = _check_scaler(scaler, plain["scaler"])
    generators = _check_generators(model, tensors)
    plan = plan_of(plain)
    _fits("optimizer state", type(optimizer).__name__, optimizer.load_state_dict, state)
    if scaler is not None and loss_scale:
        _fits("loss scale", type(scaler).__name__, scaler.load_state_dict, loss_scale)
    model.load_state_dict(weights)
    for name, (layer, key) in resting.items():
        if name in tensors:
            layer.resting_bitwidths[key] = nn.Parameter(tensors[name].to(layer.weight.device, copy=True))
        else:
            del layer.resting_bitwidths[key]
    for kind, saved in generators.items():
        put = torch.set_rng_state if kind == "cpu" else torch.cuda.set_rng_state
        _fits("generator", kind, put, saved)
    return Resumed(step, plan, plain["others"])


def plan_of(plain: Mapping[str, Any]) -> Plan | None:
    """Return the saved plan, or None."""
    return None if plain.get("plan") is None else Plan.from_dict(plain["plan"])


# The model ------------------------------------------------------------------------------------------------------------


def _model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by name, each once, and the names of tied ones: {second name: first name}."""
    first: dict[int, str] = {}
    values: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise UserError(f"{name!r} in the state of {type(model).__name__} is a {type(value).__name__}, not a tensor.")
        if id(value) in first:
            same[name] = first[id(value)]
        else:
            first[id(value)] = name
            values[name] = value.detach()
    return values, same


def _layers(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield name, module


def _layer(layer: Linear) -> dict[str, Any]:
    """Return what else determines the results of a layer: its casts, and the source of its random bits."""
    return {"precision": layer.precision.to_dict(), "compute": layer.compute, "name": layer.name, "seed": layer.seed}


def _resting(model: nn.Module) -> Iterator[tuple[str, Linear, str]]:
    """Yield the bitwidths of disabled samplings, which are not in the state_dict."""
    for name, layer in _layers(model):
        for key in layer.resting_bitwidths:
            if layer._parameters.get(key) is None:
                yield name, layer, key


def _resting_place(model: nn.Module, tensor: str) -> tuple[Linear, str]:
    _, name, key = [*tensor.split(":"), "", ""][:3]
    layer = dict(_layers(model)).get(name)
    if layer is None or key not in layer._parameters:
        raise UserError(f"The checkpoint has the bitwidths {tensor!r} of a layer that {type(model).__name__} does not have.")
    return layer, key


def _generators(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield "cpu", torch.get_rng_state()
    if any(parameter.is_cuda for parameter in model.parameters()):
        yield "cuda", torch.cuda.get_rng_state()


def _check_generators(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the saved states of the generators of this model's devices."""
    found = {}
    for kind, now in _generators(model):
        saved = tensors.get(f"rng:{kind}", now)
        if (saved.dtype, saved.shape) != (now.dtype, now.shape):
            raise UserError(
                f"The saved state of the generator {kind!r} is {saved.dtype} {tuple(saved.shape)}, and torch's is "
                f"{now.dtype} {tuple(now.shape)}."
            )
        found[kind] = saved
    return found


def _check_layers(model: nn.Module, saved: Any) -> None:
    ours = {name: _layer(layer) for name, layer in _layers(model)}
    if not isinstance(saved, dict):
        raise UserError("The checkpoint's layers are not an object of names: it was not made by pack.")
    for name in sorted(set(ours) ^ set(saved)):
        has, lacks = ("model", "checkpoint") if name in ours else ("checkpoint", "model")
        raise UserError(f"The {has} has a converted layer {name!r} and the {lacks} does not: convert as the saved model was.")
    for name, layer in ours.items():
        for key, value in layer.items():
            if not isinstance(saved[name], dict) or saved[name].get(key) != value:
                theirs = saved[name].get(key) if isinstance(saved[name], dict) else saved[name]
                raise UserError(
                    f"The {key} of the layer {name!r} was {theirs!r} when it was saved and is {value!r} now: "
                    "convert the model as the saved one was, or bring it to the saved plan by dither.apply_plan."
                )


def _check_weights(model: nn.Module, tensors: Mapping[str, Tensor], same: Any) -> dict[str, Tensor]:
    ours, tied = _model_state(model)
    if same != tied:
        raise UserError(f"The checkpoint's tied weights are {same!r}, and those of {type(model).__name__} are {tied!r}.")
    theirs = {name.removeprefix("model:"): value for name, value in tensors.items() if name.startswith("model:")}
    for name in sorted(set(ours) ^ set(theirs)):
        has, lacks = ("model", "checkpoint") if name in ours else ("checkpoint", "model")
        raise UserError(f"The {has} has a tensor {name!r} and the {lacks} does not: build the model as the saved one was.")
    for name, value in ours.items():
        if (theirs[name].dtype, theirs[name].shape) != (value.dtype, value.shape):
            raise UserError(
                f"The tensor {name!r} was saved as {theirs[name].dtype} {tuple(theirs[name].shape)} and the model has "
                f"{value.dtype} {tuple(value.shape)}: build it as the saved one was."
            )
    return theirs | {name: theirs[first] for name, first in tied.items()}


def _widened(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with the float32 masters of norms that earlier versions of O2 saved in 16 bits."""
    wide, found = wide_parameters(model, all_norms=True), dict(tensors)
    indices = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for name, parameter in model.named_parameters():
        saved, master = tensors.get(f"model:{name}"), tensors.get(f"optimizer:{indices.get(id(parameter))}:master")
        if id(parameter) in wide and saved is not None and master is not None and master.dtype == parameter.dtype:
            found[f"model:{name}"] = master if saved.dtype != parameter.dtype else saved
    return found


# The optimizer --------------------------------------------------------------------------------------------------------


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group with lists for tuples, and a number for a learning rate in a tensor."""
    return {
        key: list(value) if isinstance(value, tuple) else value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
    }


def _optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], saved: Any) -> dict[str, Any]:
    """Return the argument of `optimizer.load_state_dict`, after checking its form."""
    right = isinstance(saved, dict) and set(saved) == {"groups", "numbers"}
    if not right or not isinstance(saved["groups"], list) or not isinstance(saved["numbers"], dict):
        raise UserError("The checkpoint's optimizer is not an object of groups and numbers: it was not made by pack.")
    ours = [_plain_group(group) for group in optimizer.state_dict()["param_groups"]]
    if len(saved["groups"]) != len(ours):
        raise UserError(f"The checkpoint has {len(saved['groups'])} parameter groups, and the optimizer has {len(ours)}.")
    for number, (theirs, own) in enumerate(zip(saved["groups"], ours, strict=True)):
        if not isinstance(theirs, dict) or theirs.get("params") != own["params"]:
            raise UserError(f"Parameter group {number} of the checkpoint does not hold the parameters of the optimizer's.")
        for key, value in own.items():
            if key in NEWER and key not in theirs:
                continue
            if key not in theirs or (_kind(theirs[key]) != _kind(value) and None not in (theirs[key], value)):
                raise UserError(
                    f"Parameter group {number} of the checkpoint has {key}={theirs.get(key)!r:.80} "
                    f"where the optimizer has {value!r:.80}."
                )
    state: dict[int, dict[str, Any]] = {}
    known = {str(index): index for group in ours for index in group["params"]}
    entries: list[tuple[Any, ...]] = [
        (*name.split(":")[1:], value) for name, value in tensors.items() if name.startswith("optimizer:")
    ]
    for index, numbers in saved["numbers"].items():
        entries += [(index, key, value) for key, value in (numbers.items() if isinstance(numbers, dict) else [("", numbers)])]
    for entry in entries:
        if len(entry) != 3 or entry[0] not in known:
            raise UserError(f"The checkpoint has an optimizer state of parameter {entry[0]!r:.40}, which the optimizer lacks.")
        state.setdefault(known[entry[0]], {})[entry[1]] = entry[2]
    return {"state": state, "param_groups": saved["groups"]}


def _kind(value: object) -> Any:
    if isinstance(value, list):
        return [_kind(each) for each in value]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def _check_scaler(scaler: torch.amp.GradScaler | None, saved: Any) -> dict[str, Any]:
    ours = {} if scaler is None else scaler.state_dict()
    theirs = {} if saved is None else saved
    if not isinstance(theirs, dict) or set(theirs) != set(ours) or any(_kind(value) != "number" for value in theirs.values()):
        raise UserError(
            f"The checkpoint's loss scale has {', '.join(theirs) if isinstance(theirs, dict) and theirs else 'nothing'}, and "
            f"this training keeps {', '.join(ours) or 'none'}: use the mode of the saved one."
        )
    return theirs


def _check_keys(plain: Mapping[str, Any]) -> int:
    if not isinstance(plain, Mapping) or set(plain) != set(KEYS) or not isinstance(plain["others"], dict):
        raise UserError(f"The plain values of a training have the keys {', '.join(KEYS)}: these were not made by pack.")
    if type(plain["step"]) is not int or plain["step"] < 0:
        raise UserError(f"The step of a training is an integer from 0 on, not {plain['step']!r:.40}.")
    return plain["step"]


def _fits(what: str, where: str, load: Any, saved: Any) -> None:
    """Call `load` with a saved value; turn any error of torch into a UserError about the file."""
    try:
        load(saved)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise UserError(f"The saved {what} does not fit {where}: {type(error).__name__} {error!s:.200}.") from None
