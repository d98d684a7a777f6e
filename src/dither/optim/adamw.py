"""AdamW with 16-bit or 8-bit weights and states: one pass over memory, many tensors per launch, no device-to-host reads.

The formulas are in `dither.ops.reference.adamw`. Here are the optimizer and its step. `groups` has the options and names of
parameters, `states` the formats of the moments, `batches` the device tables and the kernel launches, and `foreign` the states
of other libraries.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from dither.errors import DitherError, UserError
from dither.nn.sharded.gather import coded_of
from dither.ops.backend import disable
from dither.ops.ranks import as_matrix, local
from dither.ops.reference.adamw import FORMATS
from dither.optim import foreign, states
from dither.optim.batches import Arrangement, Batches
from dither.optim.groups import (
    IMPLEMENTATIONS,
    MEANING,
    NUMBERS,
    PREVIOUS,
    WATCHED,
    Member,
    check_group,
    check_names,
    check_numbers,
    check_optimizer,
    check_torchs,
    members_of,
    names_from,
    read_numbers,
    rounding_of,
    update_of,
)
from dither.optim.host_states import HostStates
from dither.optim.roles import Role
from dither.optim.states import Moments, State
from dither.spec.optimizer import CONSTANTS, LOSSLESS, NEWTON_SCHULZ, Update
from dither.spec.random import check_backend


class NonFiniteError(DitherError):
    """Raised when a gradient holds NaN or Inf. The step has changed nothing."""


class AdamW(Optimizer):
    """AdamW for float32, bfloat16 and float16 parameters, unsharded or DTensors (FSDP2, tensor parallelism).

    A drop-in replacement for `torch.optim.AdamW`: it has the same arguments, defaults, groups, hooks, schedules and states.

    >>> import dither, torch
    >>> model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-3, max_norm=1.0)
    >>> model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step()
    >>> int(optimizer.steps), optimizer.state[model.weight]["exp_avg"].dtype
    (1, torch.bfloat16)
    """

    stages: Any = None
    """Ranks with other parameters, such as the stages of a pipeline: they share one norm, and skip a step together."""
    own_options: Mapping[str, Any] = {}
    """Further options of groups, with their defaults: those of `Muon`."""
    released: Any = None
    """The `ReleasedGradients` of `release_gradients`: backward passes update the parameters, and `step` ends the step."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        weights: str | None = None,
        bf16_stochastic_round: bool | None = None,
        states: str | None = None,
        state_rounding: str | None = None,
        block: int = 128,
        min_8bit_size: int = 0,
        master: str | None = None,
        error_feedback: bool = False,
        share: Mapping[str, Role] | None = None,
        max_norm: float | None = None,
        nonfinite: str | None = None,
        seed: int = 0,
        backend: str = "auto",
        states_on: str = "device",
    ) -> None:
        """Create the optimizer. Parameter groups may override `weights` to `master`, `maximize` and `seed`.

        params: `model.named_parameters()`, `model.parameters()`, or groups of either. Unnamed parameters draw random bits by
            their position in the list; see `name_parameters`.
        lr, betas: numbers or 0-d tensors. Tensors on the parameters' device are read there, at each replay of a CUDA graph too.
        amsgrad, differentiable: must be False; other values are refused.
        maximize: move along the gradient instead of against it.
        foreach, fused: torch's choice of implementation. They are accepted and have no effect: there is one implementation.
        capturable: True makes `nonfinite="skip"` the default, since a captured step cannot wait. Any step can be captured.
        weights: rounding of 16-bit parameters: "stochastic" (the default), "nearest", or "kahan" (to nearest, with the rounding
            error kept in 16 bits).
        bf16_stochastic_round: torchao's name for the same: True means weights="stochastic", False weights="nearest".
        states: format of both moments: "fp32", "bf16", "companded8", "dynamic8", "dynamic4", "int8", "e4m3", "e5m2" or "e3m4".
            The default is fp32 for float32 parameters, else bf16. One-dimensional parameters (norms, biases) keep fp32 moments
            instead of those of 8 or 4 bits.
        state_rounding: "stochastic" (the default of bf16) or "nearest" (the default of 8 bits).
        block: how many neighbours in a row share the scale of a state of 8 or 4 bits, from 16 to 2048.
        min_8bit_size: parameters with fewer elements keep fp32 moments instead of those of 8 or 4 bits.
        master: "fp32" keeps float32 weights as a state and rounds them to the parameters (mixed precision O2). "split" keeps
            the same numbers as bfloat16 parameters and 16 more bits, "split24" 24-bit numbers as parameters and 8 more bits.
        error_feedback: subtract what the rounding of a weight loses from its first moment, so that the next updates make up for
            it (ECO), with 16-bit weights or weights in FP8 codes, and states in fp32 or rounded stochastically.
        share: roles of the parameters by name, such as `dither.optim.roles(model)`: rows then share second moments (Adam-mini).
        max_norm: clip the norm of all gradients together to this value, in the same pass.
        nonfinite: what to do if a gradient holds NaN or Inf. "raise" (the default) names the tensor; it waits for the device
            once per step. "skip" changes nothing, counts the step in `skipped`, and does not wait. "unchecked" does not look.
        seed: seed of the random streams, one stream per parameter.
        backend: "auto" (by device), "kernel" or "reference".
        states_on: memory of the states: "device" (the parameters'), or "host": pinned host memory, from which the states of
            some parameters at a time are copied to the device for their update, and back. The bits are the same. On a CPU the
            copies are made too, and save nothing.
        """
        if capturable and nonfinite == "raise":
            raise UserError("capturable=True is for steps that never wait, and nonfinite='raise' waits: use nonfinite='skip'.")
        nonfinite = nonfinite or ("skip" if capturable else "raise")
        check_optimizer(max_norm, nonfinite, states_on)
        flags = {"foreach": foreach, "fused": fused, "capturable": capturable}
        check_torchs({"amsgrad": amsgrad, "differentiable": differentiable, "maximize": maximize, **flags})
        if foreach and fused:
            raise UserError("foreach=True and fused=True select two implementations: set at most one of them, as for torch.")
        self.max_norm, self.nonfinite, self.backend = max_norm, nonfinite, check_backend(backend)
        self.states_on = states_on
        self._host = HostStates() if states_on == "host" else None
        self.steps = torch.zeros((), dtype=torch.int64)
        """Number of steps taken, 0-d int64, on the parameters' device from the first step on."""
        self.skipped = torch.zeros((), dtype=torch.int64)
        """Number of steps skipped because a gradient was not finite, 0-d int64."""
        self.previous_squares: Tensor | None = None
        """Squared norm of the gradients of the last step, 0-d float64, if `release_gradients` clips by it."""
        self.grad_norm: Tensor | None = None
        """Norm of all gradients in the last step, before clipping; None if the step did not compute it."""
        self.share = None if share is None else dict(share)
        """Adam-mini: the role of each parameter by name; None if each element has a second moment."""
        self._written_as: dict[Tensor, Update] = {}  # of each state; its group may say something else since
        self._batches: Batches | None = None  # None until the groups are read
        self._seen: Any = None  # the groups that they were made of
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "weights": rounding_of(weights, bf16_stochastic_round, master) or "stochastic",
            "states": states,
            "state_rounding": state_rounding,
            "block": block,
            "min_8bit_size": min_8bit_size,
            "master": master,
            "error_feedback": error_feedback,
            "seed": seed,
            **self.own_options,
        }
        super().__init__(_listed(params), defaults)
        if error_feedback and not any(member.update.error_feedback for member in members_of(self.param_groups, self.share)):
            raise UserError(
                "error_feedback=True makes up for the rounding of weights, and all parameters are float32: leave it out, or "
                "use 16-bit parameters or dither.nn.store_weights."
            )

    @property
    def state(self) -> defaultdict[Any, State]:
        """States by parameter. With states_on="host" they lie in host memory, and reading this waits for copies to it."""
        if self._host is not None:
            self._host.wait()
        return self._states

    @state.setter
    def state(self, states: defaultdict[Any, State]) -> None:
        if self._host is not None:
            self._host.forget()
        self._states = states

    # A step --------------------------------------------------------------------------------------------------------------

    @disable  # kernels write through addresses, which no graph can know
    @Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the loss of `closure`, if it is given.

        With `torch.amp.GradScaler`, gradients are unscaled in the same pass.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.released is not None:
            self.released.finish()
            return loss
        step = self.begin()
        step.add(self.members())
        step.finish()
        return loss

    def begin(self, expected: Sequence[Member] | None = None) -> "Step":
        """Begin a step, which is taken by `add` and ended by `finish`; see `Step`.

        expected: the members that may take part, if they are added in several parts; None for one part.
        """
        return Step(self, expected)

    def members(self) -> list[Member]:
        """Return all parameters with their names and formats, in the order of the groups."""
        return self._up_to_date().members

    def moments(self, parameter: Tensor) -> Moments:
        """Return the moments of a parameter as float32, of this rank's shard; nothing waits for the device.

        >>> import dither, torch
        >>> layer = torch.nn.Linear(512, 8)
        >>> optimizer = dither.optim.AdamW8bit(layer.parameters(), lr=1e-3)
        >>> layer(torch.ones(1, 512)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.moments(layer.weight).m.dtype, optimizer.moments(layer.weight).m.shape
        (torch.float32, torch.Size([8, 512]))
        """
        member = self.member(parameter)
        state = self._on_device(parameter)
        if not state:
            raise UserError(f"The parameter {member.name!r} has no moments yet: they are created at its first step.")
        return states.decode(state, member, self._written_as.get(parameter, member.update))

    def _on_device(self, parameter: Tensor) -> State:
        """Return the state of a parameter on its device: copied there, if it lies in host memory."""
        device = local(parameter).device
        return {key: states.on_device(value, device) for key, value in self.state.get(parameter, {}).items()}

    def wide_weight(self, parameter: Tensor) -> Tensor:
        """Return the float32 weight of a parameter, of this rank's shard: its master, or the weight with its remainder."""
        return states.wide_weight(self._on_device(parameter), self.member(parameter))

    @torch.no_grad()
    def write_weight(self, parameter: Tensor, values: Tensor, where: Tensor) -> None:
        """Set the float32 weight of a parameter, of this rank's shard, to `values` where the bool tensor `where` is True.

        Masters and remainders follow, the parameter is rounded to nearest, and moments stay.
        """
        there = self._on_device(parameter)
        states.write_weight(there, self.member(parameter), values, where)
        for key, value in self.state.get(parameter, {}).items():
            if there[key] is not value:
                value.copy_(there[key])

    def member(self, parameter: Tensor) -> Member:
        """Return the name and format of a parameter."""
        batches = self._up_to_date()
        if id(parameter) not in batches.by_parameter:
            raise UserError(f"The optimizer does not have this parameter of shape {tuple(parameter.shape)}.")
        return batches.members[batches.by_parameter[id(parameter)]].refreshed()

    # Groups --------------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options; see `torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):
            for key in ("max_norm", "nonfinite", "backend", "share", "states_on"):
                if key in param_group:
                    raise UserError(f"{key} is an option of the whole optimizer, not of a parameter group.")
            if "use_muon" in param_group and "use_muon" not in self.defaults:
                raise UserError(f"use_muon is an option of the groups of dither.optim.Muon, not of {type(self).__name__}'s.")
            master = param_group.get("master", self.defaults["master"])
            weights = rounding_of(param_group.get("weights"), param_group.pop("bf16_stochastic_round", None), master)
            if weights is not None:
                param_group["weights"] = weights
            if not isinstance(param_group["params"], Tensor | set):
                param_group["params"] = list(param_group["params"])
                tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in param_group["params"]]
                if len(set(map(id, tensors))) < len(tensors):
                    raise UserError("A parameter group has the same parameter twice, and would update it twice: list it once.")
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            check_names(self.param_groups)
            for member in members_of(self.param_groups, self.share):
                if member.group is self.param_groups[-1]:
                    member.check()
        except UserError:
            self.param_groups.pop()
            raise
        self._batches = None

    def name_parameters(self, model: nn.Module | Iterable[tuple[str, Tensor]]) -> None:
        """Take the names of the parameters from their model, if the optimizer was made from `model.parameters()`.

        Random bits depend on names, so call this before the first step. Afterwards new names are refused, unless nothing is
        rounded stochastically.

        >>> import dither, torch
        >>> model = torch.nn.Linear(8, 8).to(torch.bfloat16)
        >>> optimizer = dither.optim.AdamW(model.parameters())
        >>> optimizer.name_parameters(model)
        >>> optimizer.param_groups[0]["param_names"]
        ['weight', 'bias']
        """
        named = names_from(model, self.param_groups)
        before = [group.get("param_names") for group in self.param_groups]
        if named == before:
            return
        taken = int(self.steps)
        if taken and any(member.draws for member in members_of(self.param_groups, self.share)):
            raise UserError(
                f"Names choose random bits, and this optimizer has taken {taken} steps with other ones: name its parameters "
                "before the first step, or leave them as they are."
            )
        for group, names in zip(self.param_groups, named, strict=True):
            group["param_names"] = names
        try:
            check_names(self.param_groups)
        except UserError:
            for group, old in zip(self.param_groups, before, strict=True):
                group.pop("param_names") if old is None else group.update(param_names=old)
            raise
        self._batches = None

    def _up_to_date(self) -> Batches:
        """Return the batches of the members, made anew if groups were edited: parameters, names, or options but numbers."""
        seen = [
            (list(map(id, group["params"])), group.get("param_names"), [group.get(key) for key in WATCHED])
            for group in self.param_groups
        ]
        if self._batches is not None and seen == self._seen:
            return self._batches
        for group in self.param_groups:
            check_group(group, wait=False)
        check_names(self.param_groups)
        members = members_of(self.param_groups, self.share)
        self._batches = Batches(list(self.param_groups), members)
        if self._host is not None:
            self._host.forget()
        self._written_as = {p: update for p, update in self._written_as.items() if id(p) in self._batches.by_parameter}
        # Copies of the names, which may be edited in place. Members keep the parameters alive, so that no id is reused.
        self._seen = [(ids, None if names is None else list(names), options) for ids, names, options in seen]
        return self._batches

    def _settle(self, member: Member) -> State:
        """Return the state of a parameter, created or converted to the format that it should have now."""
        state: State = self._states[member.parameter]
        states.settle(state, member, self._written_as.get(member.parameter, member.update), self._keep(member))
        self._written_as[member.parameter] = member.update
        return state

    def _keep(self, member: Member) -> Callable[[Tensor], Tensor] | None:
        """Return what moves a tensor of a parameter's state to where it is kept; None means to the parameter's device."""
        return None if self._host is None else partial(self._host.keep, device=local(member.parameter).device)

    # Saving and loading --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return a state dictionary like torch's. Each group also has the optimizer's `steps` and `skipped`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        batches = self._up_to_date()
        for member in batches.members:
            if self.state.get(member.parameter):
                batches.members[member.index] = member = member.refreshed()
                self._settle(member)
        groups, end = [], 0
        for group in self.param_groups:
            saved = {key: value for key, value in group.items() if key != "params"}
            saved["betas"] = list(group["betas"])
            saved = {key: _plain(value) if key in (*NUMBERS, "initial_lr") else value for key, value in saved.items()}
            if "param_names" in saved:
                saved["param_names"] = list(saved["param_names"])
            indices = list(range(end, end := end + len(group["params"])))
            saved |= {"params": indices, "steps": int(self.steps), "skipped": int(self.skipped)}
            groups.append(saved if self.previous_squares is None else saved | {PREVIOUS: float(self.previous_squares)})
        # New dictionaries: in the optimizer's own, the steps are views of one table.
        packed_states: dict[Any, Any] = {key: value for key, value in self.state.items() if not isinstance(key, Tensor)}
        for parameter, state in self.state.items():
            if state and id(parameter) in batches.by_parameter:
                packed_states[batches.by_parameter[id(parameter)]] = {**state, "step": state["step"].clone()}
        packed: dict[str, Any] = {"state": packed_states, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer with the same parameters, formats and seed, or of another library's AdamW.

        States of `torch.optim.AdamW` and of bitsandbytes' AdamW are converted to this optimizer's format, rounded to nearest.
        Everything is checked first: if something does not fit, an error is raised and nothing has changed.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved_groups, saved_states = deepcopy(state_dict["param_groups"]), state_dict["state"]
        sizes = [[len(group["params"]) for group in groups] for groups in (saved_groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise UserError(f"The state has groups of {sizes[0]} parameters, and this optimizer has groups of {sizes[1]}.")
        own = any("weights" in group for group in saved_groups)
        members = members_of(self.param_groups, self.share)
        groups = [
            self._loaded_group(group, saved, own, [member for member in members if member.group is group])
            for group, saved in zip(self.param_groups, saved_groups, strict=True)
        ]
        saved_of = [(saved, index) for saved in saved_groups for index in saved["params"]]
        if own:  # the updates that states were saved with: the next step converts masters of another kind
            updates = [
                update_of(member.group | {"master": saved.get("master", member.group["master"])}, member.parameter)
                for member, (saved, _) in zip(members, saved_of, strict=True)
            ]
            members = [replace(member, update=update) for member, update in zip(members, updates, strict=True)]
        load = states.loaded if own else foreign.loaded
        loaded_states: defaultdict[Any, Any] = defaultdict(dict)
        indices = {index for _, index in saved_of}
        loaded_states.update({key: value for key, value in saved_states.items() if key not in indices})
        for member, (_, index) in zip(members, saved_of, strict=True):
            if saved_states.get(index):
                state, keep = load(saved_states[index], member), self._keep(member)
                loaded_states[member.parameter] = state if keep is None else states.kept(state, keep)
        counts = (int(state["step"]) for state in loaded_states.values() if "step" in state)
        steps = saved_groups[0].get("steps", 0) if own else max(counts, default=0)

        for group, loaded in zip(self.param_groups, groups, strict=True):
            for key, value in loaded.items():
                if isinstance(group.get(key), Tensor) and key in (*NUMBERS, "initial_lr"):
                    group[key].fill_(value)  # in place: a CUDA graph or the user reads this tensor
                else:
                    group[key] = value
        self.state = loaded_states
        self.steps = torch.tensor(steps, dtype=torch.int64)
        self.skipped = torch.tensor(saved_groups[0].get("skipped", 0), dtype=torch.int64)
        previous = saved_groups[0].get(PREVIOUS)
        self.previous_squares = None if previous is None else torch.tensor(previous, dtype=torch.float64)
        self._written_as = {member.parameter: member.update for member in members}
        self._batches = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _loaded_group(
        self, group: dict[str, Any], saved: dict[str, Any], own: bool, members: Sequence[Member]
    ) -> dict[str, Any]:
        """Return the entries that a saved group sets in this optimizer's group: numbers, names, custom keys."""
        for key in MEANING if own else ():
            same = {saved.get(key), group[key]} <= LOSSLESS if key == "master" else False
            if key in saved and saved[key] != group.get(key) and not same:
                raise UserError(
                    f"The state was saved with {key}={saved[key]!r}, and this optimizer has {key}={group.get(key)!r}: "
                    f"create it with {key}={saved[key]!r}."
                )
        if not own:
            foreign.check_group(saved)
        theirs, ours = saved.get("param_names"), group.get("param_names")
        for name, mine in zip(theirs or [], ours or [], strict=False):
            if name != mine:
                raise UserError(
                    f"The state is that of {name!r} where this optimizer has {mine!r}: pass the parameters in the saved order."
                )
        if own and theirs is None and ours is not None and any(member.draws for member in members):
            raise UserError(
                "The state is that of unnamed parameters, whose random bits depend on their positions, and this optimizer "
                "has names: create it from model.parameters(), as the saved one."
            )
        left = {"params", "steps", "skipped", PREVIOUS, *MEANING} if own else {"params", *foreign.OPTIONS}
        loaded = {key: value for key, value in saved.items() if key not in left and key not in IMPLEMENTATIONS}
        for key in (*NUMBERS, "initial_lr"):
            if key in loaded:
                loaded[key] = tuple(map(_plain, loaded[key])) if key == "betas" else _plain(loaded[key])
        check_numbers(read_numbers(group | loaded, wait=True))
        check_torchs(group | loaded)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        kept = ["max_norm", "nonfinite", "backend", "states_on", "share", "_written_as"]
        kept += ["steps", "skipped", "grad_norm", "previous_squares"]
        return {**super().__getstate__(), **{key: getattr(self, key) for key in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._host = HostStates() if state["states_on"] == "host" else None
        super().__setstate__(state)
        self.state = self.__dict__.pop("state")
        self._batches = self._seen = None


AdamW._step_supports_amp_scaling = True  # type: ignore[attr-defined]
AdamW.step.hooked = True  # or torch would run hooks and its profiler inside a compiled graph


class Step:
    """One step of an optimizer, taken in one part or in several, such as a block of layers at a time.

    A step in one part clips by its own norm, and gradients that are not finite change nothing. Of several parts, the first are
    updated before the others are known: they clip by the norm of the previous step, and gradients that are not finite keep
    their own part and later ones from changing.
    """

    def __init__(self, optimizer: AdamW, expected: Sequence[Member] | None) -> None:
        self.optimizer, self.expected = optimizer, expected
        self._batches = optimizer._up_to_date()
        if optimizer._host is not None:
            optimizer._host.begin()
        if expected:  # all tables are written before the first part, which a CUDA graph may have captured
            numbers = self._batches.check()
            self._count_expected()
            self._batches.write(numbers)
        self._constants: Tensor | None = None  # None before the first part
        self._skip = self._first_skip = torch.zeros(0)
        """0-d int32: 1 if gradients so far, or those of the first part, are not finite."""
        self._squares: Tensor | None = None
        """Sum of the squares of the gradients so far, 0-d float64; None if it is not needed."""
        self._updated: set[int] = set()
        self._used: list[Arrangement] = []  # kept alive: a CUDA graph that captured this step reads their tables

    @property
    def begun(self) -> bool:
        """True from the first part on."""
        return self._constants is not None

    def key(self) -> object:
        """Return what the kernels of all parts depend on, besides numbers on the device: options, and addresses of tensors."""
        optimizer = self.optimizer
        tables = [self._batches.hyper, *(() if (previous := optimizer.previous_squares) is None else (previous,))]
        return (
            *self._signature(list(self.expected or ()), []),
            *(optimizer.max_norm, optimizer.nonfinite, *((table.device, table.data_ptr()) for table in tables)),
        )

    def replay(self, captured: "Step") -> list[Member]:
        """Take the parts of a captured step, which a CUDA graph has replayed, as those of this one; return their members."""
        self._constants, self._squares = captured._constants, captured._squares
        self._skip, self._first_skip, self._updated = captured._skip, captured._first_skip, set(captured._updated)
        members = [self._batches.members[index] for index in sorted(self._updated)]
        torch.autograd.graph.increment_version([member.parameter for member in members])
        return members

    def add(self, members: Sequence[Member], unit: str = "") -> list[Member]:
        """Update those members that have a gradient, and return them; `unit` names this part of a step."""
        active, gradients = self._gradients(members)
        if not active:
            return active
        optimizer, batches = self.optimizer, self._batches
        numbers = batches.check() if self.expected is None else []
        matrices = [
            as_matrix((g if member.role is None else member.oriented(g)).contiguous())
            for member, g in zip(active, gradients, strict=True)
        ]
        arranged = self._arranged(unit, active, matrices)
        self._used.append(arranged)
        if self.expected is None:
            batches.activate(active)
            batches.write(numbers)

        # Set by GradScaler for the duration of a step. It has already checked the gradients then.
        found_inf = getattr(optimizer, "found_inf", None)
        checks = optimizer.nonfinite != "unchecked" and found_inf is None
        squares = None
        if checks or optimizer.max_norm:
            zero = torch.zeros((), dtype=torch.float64, device=batches.hyper.device)
            squares = arranged.squares(active, matrices, zero, optimizer.stages if self.expected is None else None)
        self._advance(squares, found_inf)
        if checks and optimizer.nonfinite == "raise" and self.expected is None:
            self._refuse(active, gradients)
        assert self._constants is not None
        if optimizer._host is None:
            arranged.update(active, matrices, self._constants, optimizer.steps, self._skip)
        else:
            self._update_lent(optimizer._host, unit, active, matrices)
        self._updated.update(member.index for member in active)
        return active

    def finish(self) -> None:
        """End the step: count it and keep the norm. Of several parts, raise if a gradient was not finite."""
        optimizer, batches = self.optimizer, self._batches
        if self.expected is None or self._constants is None:
            return
        idle = [index for index in batches.active or () if index not in self._updated]
        if idle:
            batches.counts[idle] -= (1 - self._first_skip).long()
        optimizer.grad_norm = None if self._squares is None else self._squares.sqrt().float()
        if self._squares is None:
            return
        optimizer.skipped += self._skip - self._first_skip
        if optimizer.max_norm:
            before = optimizer.previous_squares
            if before is None or before.device != self._squares.device:
                before = (self._squares if before is None else before).to(self._squares.device, copy=True)
                optimizer.previous_squares = before
            # In place: a CUDA graph of the backward pass reads it there.
            before.copy_(torch.where(self._squares.isfinite(), self._squares, before))
        if optimizer.nonfinite == "raise" and bool(self._skip):
            partly = (
                "no weight was changed"
                if bool(self._first_skip)
                else "the weights whose gradients came before it in the backward pass were changed, and the others were not"
            )
            raise NonFiniteError(
                f"Step {int(optimizer.steps) + int(self._first_skip)}: a gradient holds NaN or Inf, and {partly}; use "
                "nonfinite='skip' to skip such steps."
            )

    def _gradients(self, members: Sequence[Member]) -> tuple[list[Member], list[Tensor]]:
        """Return (those of the members whose parameters have a gradient, their local gradients), checked.

        This runs for every tensor in every step. List comprehensions take a third of a loop's time.
        """
        every = [member.parameter.grad for member in members]
        active = [member for member, gradient in zip(members, every, strict=True) if gradient is not None]
        gradients = [gradient for gradient in every if gradient is not None]
        if {gradient.layout for gradient in gradients} - {torch.strided} or {g.dtype for g in gradients} - FORMATS.keys():
            for member, gradient in zip(active, gradients, strict=True):
                if gradient.layout != torch.strided:
                    raise UserError(
                        f"The gradient of {member.name} is sparse, and a step changes all elements: "
                        "use dense gradients (nn.Embedding(sparse=False))."
                    )
                if gradient.dtype not in FORMATS:
                    raise UserError(f"Gradients are float32, bfloat16 or float16; that of {member.name!r} is {gradient.dtype}.")
        return active, [local(gradient) for gradient in gradients] if self._batches.sharded else gradients

    def _ready(self, members: Sequence[Member]) -> None:
        """Make the tables of the optimizer, unless they are there, and let its counts of steps be part of them."""
        optimizer, batches = self.optimizer, self._batches
        if optimizer._host is not None:
            optimizer._host.check([member for member in members if not optimizer._states.get(member.parameter)])
        device = batches.ready(members, optimizer.backend)
        optimizer.steps, optimizer.skipped = batches.count_at(-1, optimizer.steps), optimizer.skipped.to(device)

    def _count_expected(self) -> None:
        """Move the counts of all expected members into the table before it counts this step."""
        optimizer, batches = self.optimizer, self._batches
        assert self.expected is not None
        self._ready(self.expected)
        batches.activate(self.expected)
        first, size = batches.counts.data_ptr(), batches.counts.itemsize
        for member in self.expected:
            state = optimizer._states.get(member.parameter)
            if not state:
                batches.counts[member.index] = 0
            elif not isinstance(step := state.get("step"), Tensor) or step.data_ptr() != first + member.index * size:
                state = optimizer._settle(member.refreshed())
                state["step"] = batches.count_at(member.index, state["step"])

    def _arranged(self, unit: str, active: list[Member], matrices: list[Tensor]) -> Arrangement:
        """Return the batches of the active members: those of the unit's last step, unless an address has moved."""
        optimizer, batches = self.optimizer, self._batches
        signature = self._signature(active, matrices)
        if (kept := batches.kept(unit, signature)) is not None:
            return kept
        self._ready(active)
        for i, member in enumerate(active):
            active[i] = batches.members[member.index] = member = member.refreshed()
            matrices[i] = as_matrix(matrices[i])  # the parameter's number of dimensions may have changed
            new = not optimizer._states.get(member.parameter)
            state, count = optimizer._settle(member), batches.counts[member.index]
            # In a step of several parts the table already counts this step.
            state["step"] = count if new and self.expected is not None else batches.count_at(member.index, state["step"])
        made = batches.arrange(self._signature(active, matrices), active, matrices, optimizer._states)
        batches.arranged[unit] = made
        return made

    def _update_lent(self, host: HostStates, unit: str, active: list[Member], matrices: list[Tensor]) -> None:
        """Update the active members in groups whose states are copied from host memory and back."""
        optimizer, batches = self.optimizer, self._batches
        assert self._constants is not None
        for number, parts in enumerate(host.groups(active)):
            members = [active[part.position] for part in parts]
            gradients = [part.of(matrices[part.position]) for part in parts]
            states_of = [optimizer._states[member.parameter] for member in members]
            with host.lent(f"{unit}, group {number}", parts, states_of, batches.hyper.device) as loan:
                there = {member.parameter: state for member, state in zip(members, loan.states, strict=True)}
                signature = self._signature(members, gradients, there)
                if loan.arranged is None or loan.arranged.signature != signature:
                    rows = [part.rows for part in parts]
                    loan.arranged = batches.arrange(signature, members, gradients, there, rows)
                loan.arranged.update(members, gradients, self._constants, optimizer.steps, self._skip)

    def _signature(self, active: list[Member], matrices: list[Tensor], there: Mapping[Tensor, State] | None = None) -> Any:
        """Return what the batches of the members are made of; `there` are their states, by default the optimizer's."""
        optimizer, parameters = self.optimizer, [member.parameter for member in active]
        found = optimizer._states if there is None else there
        states_of = [state.values() for state in map(found.get, parameters) if state]
        memory = [parameter if (coded := coded_of(parameter)) is None else coded.memory for parameter in parameters]
        tensors = [optimizer.steps, optimizer.skipped, *memory, *chain.from_iterable(states_of)]
        return self._batches.signature(optimizer.backend, active, matrices, tensors)

    def _advance(self, squares: Tensor | None, found_inf: Tensor | None) -> None:
        """Count the squares of another part; the first one begins the step."""
        optimizer, batches = self.optimizer, self._batches
        if self._constants is not None:
            if squares is not None:
                assert self._squares is not None
                self._squares = self._squares + squares
                self._skip = self._skip | (squares - squares != 0)  # NaN - NaN and Inf - Inf are NaN
            return
        clip_by, loss_scale = squares, getattr(optimizer, "grad_scale", None)
        if self.expected is not None:
            previous = optimizer.previous_squares if optimizer.max_norm else None
            clip_by = None if previous is None else previous.to(batches.hyper.device)
            found_inf = None if squares is None else (squares - squares != 0).float()
        self._constants, norm, skip = batches.code.prepare(
            batches.hyper, batches.counts, optimizer.skipped, clip_by, loss_scale, found_inf, float(optimizer.max_norm or 0.0)
        )
        if batches.ratios is not None:
            self._constants[:, CONSTANTS.index("size")].mul_(batches.ratios)
        self._squares, self._skip, self._first_skip = squares, skip, skip
        if self.expected is None:
            optimizer.grad_norm = None if squares is None else norm

    def _refuse(self, active: list[Member], gradients: list[Tensor]) -> None:
        """Raise if the step was skipped, and say why."""
        if self._skip.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UserError("A step that is captured in a CUDA graph cannot wait for its gradients: use nonfinite='skip'.")
        if not bool(self._skip):
            return
        number = int(self.optimizer.steps) + 1
        for member, gradient in zip(active, gradients, strict=True):
            if not bool(gradient.isfinite().all()):
                count = int((~gradient.isfinite()).sum())
                raise NonFiniteError(
                    f"Step {number}: the gradient of {member.name} holds {count} NaN or Inf "
                    f"among {gradient.numel()} numbers, so no weight was changed; use nonfinite='skip' to skip such steps."
                )
        for group in self.optimizer.param_groups:
            check_numbers(read_numbers(group, wait=True))  # the only other reason that this rank can see
        raise NonFiniteError(f"Step {number}: another rank has a gradient with NaN or Inf, so no weight was changed.")


class AdamMini(AdamW):
    """Adam-mini (Zhang et al., 2024): AdamW with one second moment per head or row (`share=`) instead of one per weight.

    It takes named parameters with roles. Options are those of `AdamW`; `states` (of the first moment) is fp32 or bf16.

    >>> import dither, torch
    >>> model = torch.nn.Linear(8, 4)
    >>> roles = {"weight": dither.optim.Role.rows_each(1), "bias": dither.optim.Role.whole()}
    >>> optimizer = dither.optim.AdamMini(model.named_parameters(), roles, lr=1e-3)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["exp_avg_sq"].shape
    torch.Size([4])
    """

    def __init__(self, params: Iterable[Any], roles: Mapping[str, Role], lr: float | Tensor = 1e-3, **options: Any) -> None:
        """Create the optimizer.

        params: named parameters, such as `model.named_parameters()`.
        roles: `dither.optim.roles(model)`, or a dictionary with a role per parameter name.
        lr, options: as `AdamW`.
        """
        super().__init__(params, lr, share=roles, **options)


class AdamW8bit(AdamW):
    """AdamW with states="dynamic8" and block=256, with the arguments of torchao's and bitsandbytes' class of this name.

    As in `AdamW`, 16-bit parameters are rounded stochastically (`bf16_stochastic_round=False` for to nearest), and
    one-dimensional parameters keep fp32 moments. `min_8bit_size` exempts small matrices too (bitsandbytes: 4096).

    >>> import dither, torch
    >>> model = torch.nn.Linear(512, 8)
    >>> optimizer = dither.optim.AdamW8bit(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 512)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["exp_avg"].dtype, optimizer.state[model.weight]["exp_avg_scale"].shape
    (torch.uint8, torch.Size([8, 2]))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block_size: int | None = None,
        optim_bits: int = 32,
        is_paged: bool = False,
        **options: Any,
    ) -> None:
        """Create the optimizer.

        params, lr, betas, eps, weight_decay, amsgrad: as `AdamW`.
        block_size: torchao's name for `block`; 256 by default.
        optim_bits: 8 or 32 (bitsandbytes' default). It has no effect, as in bitsandbytes' class of this name.
        is_paged: must be False; states_on="host" keeps states in host memory.
        options: further options of `AdamW`, such as `bf16_stochastic_round`.
        """
        if is_paged:
            raise UserError("is_paged=True moves states to the CPU when memory is short: use states_on='host'.")
        if optim_bits not in (8, 32):
            raise UserError(f"optim_bits is 8, or bitsandbytes' default of 32, which means 8 here too, not {optim_bits!r}.")
        if options.get("states", "dynamic8") != "dynamic8":
            raise UserError(f"AdamW8bit has states='dynamic8': use AdamW for states={options['states']!r}.")
        if block_size is not None and options.get("block", block_size) != block_size:
            raise UserError(
                f"block_size={block_size!r} and block={options['block']!r} are two names of one option: choose one."
            )
        options = {"states": "dynamic8", "block": 256 if block_size is None else block_size, **options}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class Muon(AdamW):
    """Muon (Jordan et al., 2024): orthogonalized momentum for matrices, and AdamW for other parameters, in one optimizer.

    Groups with use_muon=True, the default, hold matrices [rows, columns] or experts [experts, rows, columns]; those with
    use_muon=False are AdamW's, and transposed=True says that matrices are [inputs, outputs], as GPT-2's. `muon_groups(model)`
    makes all of them. The arguments are those of `torch.optim.Muon`; storage, clipping
    and everything else are `AdamW`'s.

    >>> import dither, torch
    >>> model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 16)).bfloat16()
    >>> optimizer = dither.optim.Muon(dither.optim.muon_groups(model), lr=0.02)
    >>> model(torch.arange(4)).float().square().mean().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model[1].weight]), sorted(optimizer.state[model[0].weight])
    (['exp_avg', 'step'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NEWTON_SCHULZ,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "bf16",
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.95),
        **options: Any,
    ) -> None:
        """Create the optimizer. Parameter groups may override all of these but `params`.

        params, lr, weight_decay: as `AdamW`; all groups share them.
        momentum, nesterov: of the gradients of matrices.
        ns_coefficients, ns_steps: of the Newton-Schulz iteration; see `dither.optim.orthogonal`.
        eps: the least norm that a matrix is divided by; in AdamW's groups as in `AdamW`, and 1e-8.
        adjust_lr_fn: scale of a matrix's updates: "original" (the default), sqrt(max(1, rows / columns)), or "match_rms_adamw",
            0.2 sqrt(max(rows, columns)), with which AdamW's learning rate and decay serve.
        ns_dtype: format of the products of the iteration, "bf16", as torch's, or "fp32".
        betas: of AdamW's groups.
        options: further options of `AdamW`; `states` is the format of the momentum too.
        """
        self.own_options = {
            "use_muon": True,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "transposed": False,
        }
        super().__init__(params, lr, betas, eps, weight_decay, **options)
        if not any(group["use_muon"] for group in self.param_groups):
            raise UserError("No group of Muon has use_muon=True, so there is nothing to orthogonalize: use dither.optim.AdamW.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices, or with use_muon=False of other parameters."""
        if isinstance(param_group, dict) and param_group.get("use_muon") is False:
            param_group.setdefault("eps", 1e-8)
        super().add_param_group(param_group)


def _listed(params: Iterable[Any]) -> list[Any]:
    if isinstance(params, Tensor):
        raise UserError("An optimizer takes a list of parameters, or of groups of them, and got one tensor: pass [tensor].")
    listed = list(params)
    if not listed:
        raise UserError("The list of parameters is empty: pass at least one (was a generator consumed before?).")
    return listed


def _plain(value: Any) -> Any:
    """Return a one-element tensor as a number, lists and tuples element by element, and anything else unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, Tensor) else value
