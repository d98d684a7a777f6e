"""The complete state of training as tensors and plain values, for checkpoints.

Random bits have no state: they follow from seeds, names and the step. The state of torch's generators, which dropout uses, is
saved too.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.checkpoint.layout import empty_like, local_part, pieces_of
from dither.checkpoint.read import SavedTensors, TensorSource
from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.norms import wide_parameters
from dither.ops import ranks
from dither.optim.adamw import AdamW
from dither.optim.groups import PREVIOUS
from dither.spec import Plan


class Stored:
    """Tensors by name: those of a mapping, or those of a checkpoint, which are read when they are asked for.

    >>> stored = Stored({"weight": torch.ones(2)})
    >>> stored.described("weight"), stored.read("weight")
    ((torch.float32, torch.Size([2])), tensor([1., 1.]))
    """

    def __init__(self, tensors: "Mapping[str, Tensor] | TensorSource | Stored") -> None:
        self._tensors: Mapping[str, Tensor] | TensorSource = tensors._tensors if isinstance(tensors, Stored) else tensors
        names = self._tensors.tensors if isinstance(self._tensors, TensorSource) else self._tensors
        self.names: list[str] = list(names)
        self._known = frozenset(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def described(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and the shape of a tensor."""
        if isinstance(self._tensors, TensorSource):
            saved = self._tensors.tensors[name]
            return saved.dtype, torch.Size(saved.shape)
        return self._tensors[name].dtype, self._tensors[name].shape

    def read(self, name: str, like: Tensor | None = None) -> Tensor:
        """Return a tensor: the part of it that this rank holds of the DTensor `like`, or else all of it."""
        if isinstance(self._tensors, TensorSource):
            if not isinstance(like, DTensor):
                return self._tensors.box(name)
            target = empty_like(like, *self.described(name))
            self._tensors.fill(name, target)
            return target
        value = self._tensors[name]
        if isinstance(like, DTensor) and not isinstance(value, DTensor):
            target = empty_like(like, value.dtype, value.shape)
            local = local_part(target)
            for piece in pieces_of(target, name):
                box = tuple(slice(begin, begin + size) for begin, size in zip(piece.offset, piece.shape, strict=True))
                local[piece.local].copy_(value[box])
            return target
        return value


class StoredState(Mapping[str, Any]):
    """The optimizer state of a parameter, whose tensors are read when they are asked for.

    Args:
        stored: The tensors.
        parameter: The parameter. States of its shape, and the scales of blocks of its rows, have its layout.
    """

    def __init__(self, stored: Stored, parameter: Tensor) -> None:
        self.stored, self.parameter = stored, parameter
        self.tensors: dict[str, str] = {}
        self.numbers: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self.tensors:
            return self.numbers[key]
        _, shape = self.stored.described(self.tensors[key])
        own = self.parameter.shape
        follows = (shape == own and key != "step") or (key.endswith("_scale") and len(own) > 0 and shape[:-1] == own[:-1])
        return self.stored.read(self.tensors[key], self.parameter if follows else None)

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.numbers

    def __len__(self) -> int:
        return len(self.tensors) + len(self.numbers)


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


def pack_sharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    plan: Plan | None = None,
    scaler: torch.amp.GradScaler | None = None,
    others: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what `pack` returns, for `sharded.save`: the tensors that this rank holds, and the plain values of all ranks.

    Collective: every rank of the group calls this. Ranks may hold different layers, such as the stages of a pipeline, if the
    parameters of their optimizers have names. The state of torch's generators is that of the first rank.

    Args:
        model: This rank's model: all of it, or a stage.
        optimizer: Its optimizer.
        step: The number of steps done.
        plan: The plan of the model.
        scaler: The gradient scaler.
        others: Plain values of the caller. Those of the first rank are saved.
        group: The process group; None means all ranks.

    >>> import dither, torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-2)
    >>> tensors, plain = pack_sharded(model, optimizer, step=7)
    >>> sorted(tensors), plain["step"]
    (['model:bias', 'model:weight', 'rng:cpu'], 7)
    """
    tensors, plain = pack(model, optimizer, step=step, plan=plan, scaler=scaler, others=others)
    own = {key: plain[key] for key in ("same", "layers", "optimizer")}
    held = sorted(name for name in tensors if name.startswith("model:"))
    digest = hashlib.sha256(json.dumps([held, own], sort_keys=True).encode()).digest()
    digests = ranks.gather(digest, group)
    first = not dist.is_initialized() or dist.get_rank(group) == 0
    if not first:
        tensors = {name: value for name, value in tensors.items() if not name.startswith("rng:")}
    if len(set(digests)) == 1:
        return tensors, plain
    everyone = ranks.gather(own, group)
    groups, numbers = _merged([each["optimizer"] for each in everyone])
    index = {name: str(i) for each in groups for i, name in zip(each["params"], each["param_names"], strict=True)}
    names = {
        str(i): name
        for each in plain["optimizer"]["groups"]
        for i, name in zip(each["params"], each["param_names"], strict=True)
    }

    def renamed(name: str) -> str:
        kind, *rest = name.split(":")
        return ":".join((kind, index[names[rest[0]]], *rest[1:])) if kind == "optimizer" else name

    plain["same"] = {key: value for each in everyone for key, value in each["same"].items()}
    plain["layers"] = {key: value for each in everyone for key, value in each["layers"].items()}
    plain["optimizer"] = {"groups": groups, "numbers": numbers}
    return {renamed(name): value for name, value in tensors.items()}, plain


def _merged(optimizers: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the parameter groups and plain states of the optimizers of all ranks as those of one optimizer."""
    first = optimizers[0]["groups"]
    names: list[dict[str, None]] = [{} for _ in first]
    numbers: dict[str, dict[str, Any]] = {}
    for rank, optimizer in enumerate(optimizers):
        if len(optimizer["groups"]) != len(first):
            raise UserError(f"Rank 0 has {len(first)} parameter groups, and rank {rank} has {len(optimizer['groups'])}.")
        for number, (group, other) in enumerate(zip(optimizer["groups"], first, strict=True)):
            if group.get("param_names") is None:
                raise UserError("Ranks hold different parameters, which need names: pass model.named_parameters().")
            for key in (set(group) | set(other)) - {"params", "param_names"}:
                if group.get(key) != other.get(key):
                    raise UserError(
                        f"Parameter group {number} has {key}={other.get(key)!r:.80} on rank 0 and {group.get(key)!r:.80} on "
                        f"rank {rank}."
                    )
            names[number] |= dict.fromkeys(group["param_names"])
            for index, name in zip(group["params"], group["param_names"], strict=True):
                if str(index) in optimizer["numbers"]:
                    numbers[name] = optimizer["numbers"][str(index)]
    groups, count = [], 0
    for group, named in zip(first, names, strict=True):
        groups.append({**group, "params": list(range(count, count + len(named))), "param_names": list(named)})
        count += len(named)
    index = {name: str(i) for each in groups for i, name in zip(each["params"], each["param_names"], strict=True)}
    return groups, {index[name]: values for name, values in numbers.items()}


def unpack(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor] | SavedTensors,
    plain: Mapping[str, Any],
    *,
    scaler: torch.amp.GradScaler | None = None,
    stage: bool = False,
) -> Resumed:
    """Restore the state that `pack` returned into a model, optimizer and scaler that were built like the saved ones.

    Everything is checked first: a UserError names what does not fit, and no weight has changed then. If the plan changed during
    training, apply the saved one, `plan_of(plain)`, with `dither.apply_plan` before.

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
    stored = Stored(tensors)
    step = _check_keys(plain)
    _check_layers(model, plain["layers"], stage)
    saved = plain["optimizer"]
    widened = _widened(model, optimizer, saved.get("groups") if isinstance(saved, dict) else None, stored)
    sources = _check_weights(model, widened, stored, plain["same"], stage)
    resting = {f"resting:{name}:{key}": (layer, key) for name, layer, key in _resting(model)}
    for name in (name for name in stored.names if name.startswith("resting:")):
        if name not in resting and (place := _resting_place(model, name, stage)) is not None:
            resting[name] = place
    state = _optimizer_state(optimizer, stored, plain["optimizer"], stage)
    loss_scale = _check_scaler(scaler, plain["scaler"])
    generators = _check_generators(model, stored)
    plan = plan_of(plain)
    ours, tied = _model_state(model)
    for name, source in sources.items():
        stored.read(source, ours[name])  # verified, before anything changes, and not kept: there is memory for one model only
    _fits("optimizer state", type(optimizer).__name__, optimizer.load_state_dict, state)
    if scaler is not None and loss_scale:
        _fits("loss scale", type(scaler).__name__, scaler.load_state_dict, loss_scale)
    for name, source in sources.items():
        ours[name].copy_(stored.read(source, ours[name]))
    model.load_state_dict(ours | {name: ours[first] for name, first in tied.items()})  # modules note that they were loaded
    for name, (layer, key) in resting.items():
        if name in stored:
            found = stored.read(name, layer.resting_bitwidths.get(key))
            layer.resting_bitwidths[key] = nn.Parameter(found.to(layer.weight.device, copy=True))
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
            yield name, layer, key


def _resting_place(model: nn.Module, tensor: str, stage: bool) -> tuple[Linear, str] | None:
    _, name, key = [*tensor.split(":"), "", ""][:3]
    layer = dict(_layers(model)).get(name)
    if layer is None and stage:
        return None
    if layer is None or key not in layer._parameters:
        raise UserError(f"The checkpoint has the bitwidths {tensor!r} of a layer that {type(model).__name__} does not have.")
    return layer, key


def _generators(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield "cpu", torch.get_rng_state()
    if any(parameter.is_cuda for parameter in model.parameters()):
        yield "cuda", torch.cuda.get_rng_state()


def _check_generators(model: nn.Module, stored: Stored) -> dict[str, Tensor]:
    """Return the saved states of the generators of this model's devices."""
    found = {}
    for kind, now in _generators(model):
        saved = stored.read(f"rng:{kind}") if f"rng:{kind}" in stored else now
        if (saved.dtype, saved.shape) != (now.dtype, now.shape):
            raise UserError(
                f"The saved state of the generator {kind!r} is {saved.dtype} {tuple(saved.shape)}, and torch's is "
                f"{now.dtype} {tuple(now.shape)}."
            )
        found[kind] = saved
    return found


def _check_layers(model: nn.Module, saved: Any, stage: bool) -> None:
    ours = {name: _layer(layer) for name, layer in _layers(model)}
    if not isinstance(saved, dict):
        raise UserError("The checkpoint's layers are not an object of names: it was not made by pack.")
    for name in sorted(set(ours) - set(saved) if stage else set(ours) ^ set(saved)):
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


def _check_weights(model: nn.Module, widened: Mapping[str, str], stored: Stored, same: Any, stage: bool) -> dict[str, str]:
    """Return the name of the stored tensor of each tensor of the model, tied ones once."""
    ours, tied = _model_state(model)
    if same != tied and not (stage and isinstance(same, dict) and tied.items() <= same.items()):
        raise UserError(f"The checkpoint's tied weights are {same!r}, and those of {type(model).__name__} are {tied!r}.")
    theirs = {name.removeprefix("model:"): name for name in stored.names if name.startswith("model:")} | dict(widened)
    if stage:  # the first of tied tensors may be in another stage
        theirs = {name: theirs[same.get(name, name)] for name in ours if same.get(name, name) in theirs}
    for name in sorted(set(ours) ^ set(theirs)):
        has, lacks = ("model", "checkpoint") if name in ours else ("checkpoint", "model")
        raise UserError(f"The {has} has a tensor {name!r} and the {lacks} does not: build the model as the saved one was.")
    for name, value in ours.items():
        dtype, shape = stored.described(theirs[name])
        if (dtype, shape) != (value.dtype, value.shape):
            raise UserError(
                f"The tensor {name!r} was saved as {dtype} {tuple(shape)} and the model has "
                f"{value.dtype} {tuple(value.shape)}: build it as the saved one was."
            )
    return theirs


def _widened(model: nn.Module, optimizer: torch.optim.Optimizer, groups: Any, stored: Stored) -> dict[str, str]:
    """Return the float32 masters of norms that earlier versions of O2 saved in 16 bits: {name in the model: stored name}."""
    wide, found = wide_parameters(model, all_norms=True), {}
    order = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    masters = {name: f"optimizer:{order.get(id(p))}:master" for name, p in model.named_parameters()}
    for group in groups if isinstance(groups, list) else ():
        names, indices = (group.get(key) if isinstance(group, dict) else None for key in ("param_names", "params"))
        if isinstance(names, list) and isinstance(indices, list):
            masters |= {str(name): f"optimizer:{index}:master" for name, index in zip(names, indices, strict=False)}
    for name, parameter in model.named_parameters():
        saved, master = f"model:{name}", masters[name]
        if id(parameter) in wide and saved in stored and master in stored:
            kinds = [stored.described(each)[0] for each in (saved, master)]
            if kinds[1] == parameter.dtype != kinds[0]:
                found[name] = master
    return found


# The optimizer --------------------------------------------------------------------------------------------------------


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group with lists for tuples, and a number for a learning rate in a tensor."""
    return {
        key: list(value) if isinstance(value, tuple) else value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
    }


def _optimizer_state(optimizer: torch.optim.Optimizer, stored: Stored, saved: Any, stage: bool) -> dict[str, Any]:
    """Return the argument of `optimizer.load_state_dict`, after checking its form."""
    right = isinstance(saved, dict) and set(saved) == {"groups", "numbers"}
    if not right or not isinstance(saved["groups"], list) or not isinstance(saved["numbers"], dict):
        raise UserError("The checkpoint's optimizer is not an object of groups and numbers: it was not made by pack.")
    ours = [_plain_group(group) for group in optimizer.state_dict()["param_groups"]]
    if len(saved["groups"]) != len(ours):
        raise UserError(f"The checkpoint has {len(saved['groups'])} parameter groups, and the optimizer has {len(ours)}.")
    known: dict[str, int] = {}
    others: set[str] = set()
    groups = []
    for number, (theirs, own) in enumerate(zip(saved["groups"], ours, strict=True)):
        indices = _matched(theirs, own, stage)
        if indices is None:
            raise UserError(f"Parameter group {number} of the checkpoint does not hold the parameters of the optimizer's.")
        for key, value in own.items():
            if key in ("params", "param_names") or (key == PREVIOUS and key not in theirs):
                continue
            if key not in theirs or (_kind(theirs[key]) != _kind(value) and None not in (theirs[key], value)):
                raise UserError(
                    f"Parameter group {number} of the checkpoint has {key}={theirs.get(key)!r:.80} "
                    f"where the optimizer has {value!r:.80}."
                )
        known |= {str(index): mine for index, mine in zip(indices, own["params"], strict=True)}
        others |= {str(index) for index in theirs["params"]} - set(known)
        groups.append(theirs | {key: own[key] for key in ("params", "param_names") if key in own})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, StoredState] = {}

    def state_of(index: str) -> StoredState | None:
        if index in others and stage:
            return None
        if index not in known:
            raise UserError(f"The checkpoint has an optimizer state of parameter {index!r:.40}, which the optimizer lacks.")
        return state.setdefault(known[index], StoredState(stored, parameters[known[index]]))

    for name in (name for name in stored.names if name.startswith("optimizer:")):
        _, position, *keys = name.split(":")
        if len(keys) != 1:
            raise UserError(f"The checkpoint has an optimizer state of parameter {position!r:.40} without a key: {name!r:.80}.")
        if keys[0] == "step" and tuple(stored.described(name)[1]):
            raise UserError(f"The checkpoint has {name!r:.80} as {tuple(stored.described(name)[1])}, and it is one number.")
        found = state_of(position)
        if found is not None:
            found.tensors[keys[0]] = name
    for index, numbers in saved["numbers"].items():
        found = state_of(index)
        if found is not None:
            found.numbers |= numbers if isinstance(numbers, dict) else {"": numbers}
    # torch's own optimizers take dictionaries only.
    lazy = isinstance(optimizer, AdamW)
    return {"state": {index: each if lazy else dict(each) for index, each in state.items()}, "param_groups": groups}


def _matched(theirs: Any, own: Mapping[str, Any], stage: bool) -> list[int] | None:
    """Return the saved index of each parameter of a group, by names if both have them; None if the parameters are others."""
    saved = theirs.get("params") if isinstance(theirs, dict) else None
    if not isinstance(saved, list):
        return None
    names, ours = theirs.get("param_names"), own.get("param_names")
    if names is None or ours is None:
        return saved if saved == own["params"] else None
    if not isinstance(names, list) or len(names) != len(saved) or not all(isinstance(name, str) for name in names):
        return None
    indices = dict(zip(names, saved, strict=True))
    if len(indices) != len(saved) or not set(ours) <= set(indices) or (not stage and len(ours) != len(indices)):
        return None
    return [indices[name] for name in ours]


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
