"""The complete state of training as tensors and plain values, for checkpoints.

Random bits have no state: they follow from seeds, names and the step. The state of torch's generators, which dropout uses, is
saved too.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dither.checkpoint.read import LoadedTensors, TensorSource
from dither.errors import UserError
from dither.nn.linear import Linear
from dither.ops import ranks
from dither.optim.adamw import AdamW
from dither.optim.groups import PREVIOUS
from dither.spec import Plan

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
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of training as (tensors, plain values) for `checkpoint.save`. The tensors are not copied.

    It holds weights, histories of delayed scaling, bitwidths (also of disabled samplings), the precision and seed of each
    layer, the state of the optimizer, and the loss scale.

    With a group this is collective: each rank returns the tensors that it holds, and the plain values of all ranks. Ranks may
    hold different layers, such as the stages of a pipeline, if the parameters of their optimizers have names.

    Args:
        model: The model: all of it, or this rank's stage.
        optimizer: Its optimizer.
        step: The number of steps done.
        plan: The plan of the model.
        scaler: The gradient scaler.
        others: Plain values of the caller, such as the position in the data.
        group: The ranks that save together; None means this process alone.

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
    tensors |= {f"resting:{name}:{key}": layer.resting_bitwidths[key] for name, layer, key in resting_bitwidths(model)}
    saved = optimizer.state_dict()
    groups = [_plain_group(each) for each in saved["param_groups"]]
    names = {i: key for each, plain in zip(saved["param_groups"], groups, strict=True) for i, key in _pairs(each, plain)}
    numbers: dict[str, dict[str, Any]] = {}
    for index, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer:{names.get(index, index)}:{key}"] = value
            else:
                numbers.setdefault(str(names.get(index, index)), {})[key] = value
    if group is None or dist.get_rank(group) == 0:
        tensors |= {f"rng:{kind}": state for kind, state in _generators(model)}
    parts = {
        "same": same,
        "layers": {name: layer_settings(layer) for name, layer in converted_linears(model)},
        "optimizer": {"groups": groups, "numbers": numbers},
    }
    return tensors, {
        "step": step,
        **(parts if group is None else _of_all_ranks(parts, sorted(values), group)),
        "scaler": None if scaler is None else scaler.state_dict(),
        "plan": None if plan is None else plan.to_dict(),
        "others": dict(others or {}),
    }


def _pairs(group: Mapping[str, Any], plain: Mapping[str, Any]) -> Iterator[tuple[int, str | int]]:
    return zip(group["params"], plain["params"], strict=True)


def _of_all_ranks(parts: dict[str, Any], held: list[str], group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the plain values of all ranks as those of one model. Ranks of a pipeline hold different tensors and layers."""
    digest = hashlib.sha256(json.dumps([held, parts], sort_keys=True).encode()).digest()
    if len(set(ranks.gather(digest, group))) == 1:
        return parts
    everyone = ranks.gather(parts, group)
    first = everyone[0]["optimizer"]["groups"]
    params: list[dict[str, None]] = [{} for _ in first]
    for rank, each in enumerate(everyone):
        groups = each["optimizer"]["groups"]
        if len(groups) != len(first):
            raise UserError(f"Rank 0 has {len(first)} parameter groups, and rank {rank} has {len(groups)}.")
        for number, (own, other) in enumerate(zip(groups, first, strict=True)):
            if any(isinstance(name, int) for name in own["params"]):
                raise UserError("Ranks hold different parameters, which need names: pass model.named_parameters().")
            for key in (set(own) | set(other)) - {"params"}:
                if own.get(key) != other.get(key):
                    raise UserError(
                        f"Parameter group {number} has {key}={other.get(key)!r:.80} on rank 0 and {own.get(key)!r:.80} on "
                        f"rank {rank}."
                    )
            params[number] |= dict.fromkeys(own["params"])
    return {
        "same": {key: value for each in everyone for key, value in each["same"].items()},
        "layers": {key: value for each in everyone for key, value in each["layers"].items()},
        "optimizer": {
            "groups": [own | {"params": list(names)} for own, names in zip(first, params, strict=True)],
            "numbers": {key: value for each in everyone for key, value in each["optimizer"]["numbers"].items()},
        },
    }


def unpack(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor] | TensorSource,
    plain: Mapping[str, Any],
    *,
    scaler: torch.amp.GradScaler | None = None,
    stage: bool = False,
) -> Resumed:
    """Restore the state that `pack` returned into a model, optimizer and scaler that were built like the saved ones.

    Everything is checked first: a UserError names what does not fit, and no weight has changed then. If the plan changed during
    training, apply the saved one, `plan_of(plain)`, with `Conversion.switch` before.

    The layout may be another one than that of the saved training: parameters may be DTensors, and the optimizer may have its
    parameters in another order if they have names.

    Args:
        model: The model.
        optimizer: Its optimizer.
        tensors: The tensors, or an open checkpoint, of which this rank reads the parts that it holds.
        plain: The plain values.
        scaler: The gradient scaler.
        stage: The model is a stage of a pipeline: the checkpoint has more tensors, which are left out.
    """
    source = tensors if isinstance(tensors, TensorSource) else LoadedTensors(tensors)
    step = _check_keys(plain)
    copy_model = _checked_model(model, source, plain, stage)
    state = optimizer_state(optimizer, source, plain["optimizer"], stage)
    loss_scale = _check_scaler(scaler, plain["scaler"])
    generators = _check_generators(model, source)
    plan = plan_of(plain)
    copy_model(verify_only=True)
    _fits("optimizer state", type(optimizer).__name__, optimizer.load_state_dict, state)
    if scaler is not None and loss_scale:
        _fits("loss scale", type(scaler).__name__, scaler.load_state_dict, loss_scale)
    copy_model()
    for kind, saved in generators.items():
        put = torch.set_rng_state if kind == "cpu" else torch.cuda.set_rng_state
        _fits("generator", kind, put, saved)
    return Resumed(step, plan, plain["others"])


def restore_model(model: nn.Module, tensors: TensorSource, plain: Mapping[str, Any]) -> None:
    """Restore the weights, histories and bitwidths that `pack` returned into a model that was built like the saved one."""
    _check_keys(plain)
    _checked_model(model, tensors, plain, stage=False)()


def plan_of(plain: Mapping[str, Any]) -> Plan | None:
    """Return the saved plan, or None."""
    return None if plain.get("plan") is None else Plan.from_dict(plain["plan"])


# The model ------------------------------------------------------------------------------------------------------------


def _checked_model(model: nn.Module, source: TensorSource, plain: Mapping[str, Any], stage: bool) -> Callable[..., None]:
    """Raise unless the tensors of a checkpoint fit a model. Return the function that copies them into it, one at a time."""
    _check_layers(model, plain["layers"], stage)
    stored_as = _check_weights(model, source, plain["same"], stage)
    resting = {f"resting:{name}:{key}": (layer, key) for name, layer, key in resting_bitwidths(model)}
    for name in (name for name in source.tensors if name.startswith("resting:") and name not in resting):
        if (place := _resting_place(model, name, stage)) is not None:
            resting[name] = place

    @torch.no_grad()
    def copy(verify_only: bool = False) -> None:
        ours, tied = _model_state(model)
        for name, stored in stored_as.items():
            value = source.read(stored, ours[name])  # verified; not kept, since there is memory for one model only
            if not verify_only:
                ours[name].copy_(value)
        if verify_only:
            return
        model.load_state_dict(ours | {name: ours[first] for name, first in tied.items()})  # modules note that they were loaded
        for name, (layer, key) in resting.items():
            if name in source.tensors:
                found = source.read(name, layer.resting_bitwidths.get(key))
                layer.resting_bitwidths[key] = nn.Parameter(found.to(layer.weight.device, copy=True))
            else:
                del layer.resting_bitwidths[key]

    return copy


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


def converted_linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yield the converted linear layers of a model, each expert of a group too."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))


def layer_settings(layer: Linear) -> dict[str, Any]:
    """Return what else determines the results of a layer, as plain values: its casts, and the source of its random bits."""
    return {"precision": layer.precision.to_dict(), "compute": layer.choice.compute, "name": layer.name, "seed": layer.seed}


def resting_bitwidths(model: nn.Module) -> Iterator[tuple[str, Linear, str]]:
    """Yield (name, layer, key) of the bitwidths of disabled samplings, which are not in the state_dict."""
    for name, layer in converted_linears(model):
        for key in layer.resting_bitwidths:
            yield name, layer, key


def check_same_layers(ours: Mapping[str, Any], saved: Mapping[str, Any], what: str, stage: bool = False) -> None:
    """Raise a UserError unless the same layers are converted here and in a saved state."""
    for name in sorted(set(ours) - set(saved) if stage else set(ours) ^ set(saved)):
        has, lacks = ("model", what) if name in ours else (what, "model")
        raise UserError(f"The {has} has a converted layer {name!r} and the {lacks} does not: convert as the saved model was.")


def _resting_place(model: nn.Module, tensor: str, stage: bool) -> tuple[Linear, str] | None:
    _, name, key = [*tensor.split(":"), "", ""][:3]
    layer = dict(converted_linears(model)).get(name)
    if layer is None and stage:
        return None
    if layer is None or key not in layer._parameters:
        raise UserError(f"The checkpoint has the bitwidths {tensor!r} of a layer that {type(model).__name__} does not have.")
    return layer, key


def _generators(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield "cpu", torch.get_rng_state()
    if any(parameter.is_cuda for parameter in model.parameters()):
        yield "cuda", torch.cuda.get_rng_state()


def _check_generators(model: nn.Module, source: TensorSource) -> dict[str, Tensor]:
    """Return the saved states of the generators of this model's devices."""
    found = {}
    for kind, now in _generators(model):
        saved = source.read(f"rng:{kind}") if f"rng:{kind}" in source.tensors else now
        if (saved.dtype, saved.shape) != (now.dtype, now.shape):
            raise UserError(
                f"The saved state of the generator {kind!r} is {saved.dtype} {tuple(saved.shape)}, and torch's is "
                f"{now.dtype} {tuple(now.shape)}."
            )
        found[kind] = saved
    return found


def _check_layers(model: nn.Module, saved: Any, stage: bool) -> None:
    ours = {name: layer_settings(layer) for name, layer in converted_linears(model)}
    if not isinstance(saved, dict):
        raise UserError("The checkpoint's layers are not an object of names: it was not made by pack.")
    check_same_layers(ours, saved, "checkpoint", stage)
    for name, layer in ours.items():
        for key, value in layer.items():
            if not isinstance(saved[name], dict) or saved[name].get(key) != value:
                theirs = saved[name].get(key) if isinstance(saved[name], dict) else saved[name]
                raise UserError(
                    f"The {key} of the layer {name!r} was {theirs!r} when it was saved and is {value!r} now: "
                    "convert the model as the saved one was, or bring it to the saved plan by conversion.switch."
                )


def _check_weights(model: nn.Module, source: TensorSource, same: Any, stage: bool) -> dict[str, str]:
    """Return the name of the stored tensor of each tensor of the model, tied ones once."""
    ours, tied = _model_state(model)
    if same != tied and not (stage and isinstance(same, dict) and tied.items() <= same.items()):
        raise UserError(f"The checkpoint's tied weights are {same!r}, and those of {type(model).__name__} are {tied!r}.")
    theirs = {name.removeprefix("model:"): name for name in source.tensors if name.startswith("model:")}
    if stage:  # the first of tied tensors may be in another stage
        theirs = {name: theirs[same.get(name, name)] for name in ours if same.get(name, name) in theirs}
    for name in sorted(set(ours) ^ set(theirs)):
        has, lacks = ("model", "checkpoint") if name in ours else ("checkpoint", "model")
        raise UserError(f"The {has} has a tensor {name!r} and the {lacks} does not: build the model as the saved one was.")
    for name, value in ours.items():
        saved = source.tensors[theirs[name]]
        if (saved.dtype, saved.shape) != (value.dtype, tuple(value.shape)):
            raise UserError(
                f"The tensor {name!r} was saved as {saved.dtype} {saved.shape} and the model has "
                f"{value.dtype} {tuple(value.shape)}: build it as the saved one was."
            )
    return theirs


# The optimizer --------------------------------------------------------------------------------------------------------


class SavedState(Mapping[str, Any]):
    """The optimizer state of a parameter, whose tensors are read when they are asked for.

    Args:
        source: The tensors.
        parameter: The parameter. States of its shape, and moments and scales whose rows are its rows, have its layout.
    """

    def __init__(self, source: TensorSource, parameter: Tensor) -> None:
        self.source, self.parameter = source, parameter
        self.tensors: dict[str, str] = {}
        self.numbers: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self.tensors:
            return self.numbers[key]
        shape, own = self.source.tensors[self.tensors[key]].shape, tuple(self.parameter.shape)
        rows = key.startswith("exp_avg") and len(own) > 1 and shape[:-1] == own[:-1]
        follows = (shape == own and key != "step") or rows
        return self.source.read(self.tensors[key], self.parameter if follows else None)

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.numbers

    def __len__(self) -> int:
        return len(self.tensors) + len(self.numbers)


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group as plain values: its parameters by name, or by position if they have no names."""
    plain = {
        key: list(value) if isinstance(value, tuple) else value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "param_names"
    }
    return plain | {"params": list(group.get("param_names") or group["params"])}


def optimizer_state(optimizer: torch.optim.Optimizer, source: TensorSource, saved: Any, stage: bool = False) -> dict[str, Any]:
    """Return the argument of `optimizer.load_state_dict`, after checking its form."""
    right = isinstance(saved, dict) and set(saved) == {"groups", "numbers"}
    if not right or not isinstance(saved["groups"], list) or not isinstance(saved["numbers"], dict):
        raise UserError("The checkpoint's optimizer is not an object of groups and numbers: it was not made by pack.")
    ours = optimizer.state_dict()["param_groups"]
    if len(saved["groups"]) != len(ours):
        raise UserError(f"The checkpoint has {len(saved['groups'])} parameter groups, and the optimizer has {len(ours)}.")
    index: dict[str, int] = {}
    others: set[str] = set()
    groups = []
    for number, (theirs, group) in enumerate(zip(saved["groups"], ours, strict=True)):
        own = _plain_group(group)
        params = _params_of(theirs)
        if params is None or not set(own["params"]) <= params or (not stage and len(own["params"]) != len(params)):
            raise UserError(f"Parameter group {number} of the checkpoint does not hold the parameters of the optimizer's.")
        for key, value in own.items():
            if key == "params" or (key == PREVIOUS and key not in theirs):
                continue
            if key not in theirs or (_kind(theirs[key]) != _kind(value) and None not in (theirs[key], value)):
                raise UserError(
                    f"Parameter group {number} of the checkpoint has {key}={theirs.get(key)!r:.80} "
                    f"where the optimizer has {value!r:.80}."
                )
        index |= {str(name): place for place, name in _pairs(group, own)}
        others |= {str(name) for name in params} - set(index)
        groups.append(theirs | {key: group[key] for key in ("params", "param_names") if key in group})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states: dict[int, SavedState] = {}

    def state_of(name: str) -> SavedState | None:
        if name in others and stage:
            return None
        if name not in index:
            raise UserError(f"The checkpoint has an optimizer state of parameter {name!r:.40}, which the optimizer lacks.")
        return states.setdefault(index[name], SavedState(source, parameters[index[name]]))

    for stored in (name for name in source.tensors if name.startswith("optimizer:")):
        name, _, key = stored.removeprefix("optimizer:").rpartition(":")
        if not name:
            raise UserError(f"The checkpoint has an optimizer state of parameter {key!r:.40} without a key: {stored!r:.80}.")
        if key == "step" and source.tensors[stored].shape:
            raise UserError(f"The checkpoint has {stored!r:.80} as {source.tensors[stored].shape}, and it is one number.")
        if (state := state_of(name)) is not None:
            state.tensors[key] = stored
    for name, numbers in saved["numbers"].items():
        if (state := state_of(name)) is not None:
            state.numbers |= numbers if isinstance(numbers, dict) else {"": numbers}
    # torch's own optimizers take dictionaries only.
    lazy = isinstance(optimizer, AdamW)
    return {"state": {place: state if lazy else dict(state) for place, state in states.items()}, "param_groups": groups}


def _params_of(group: Any) -> set[str | int] | None:
    """Return the parameters of a saved group, or None if they are not listed once each."""
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(params, list) or not all(isinstance(name, str | int) for name in params):
        return None
    return set(params) if len(set(params)) == len(params) else None


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
