"""AdamW whose weights and states may have 16 or 8 bits: one pass over memory, many tensors a launch, nothing read back.

The update itself is `dither.reference.adamw`; this file finds out which tensors take part and where they lie.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import DitherError, UserError
from dither.nn.cut import local
from dither.operators import implementation
from dither.optim.shards import as_matrix, like, reduce_cuts, shards, spread_over
from dither.random import Stream, check_backend, matrix_size
from dither.reference.adamw import FORMATS, zero_state
from dither.update import HYPER, Piece, Update

NONFINITE = ("raise", "skip", "unchecked")
MEANING = ("weights", "states", "state_rounding", "block", "master", "seed")
"""What in a parameter group decides what the saved numbers mean: a state is loaded only where these agree."""


class NonFiniteError(DitherError):
    """A gradient holds NaN or Inf; the step that met it changed nothing."""


MOST_NORM = torch.finfo(torch.float32).max
"""The largest norm that gradients can be clipped to: norms are float32."""


@dataclass(frozen=True)
class Slot:
    """A parameter of the optimizer, and its row in the tables of hyperparameters and steps."""

    index: int
    group: dict[str, Any]
    name: str
    parameter: Tensor
    update: Update


@dataclass(frozen=True)
class Part:
    """A piece of an active parameter: rows `start` to `end` of the local matrix of active parameter number `place`."""

    place: int
    start: int
    end: int
    piece: Piece
    run: int = 0
    """Adam-mini: the number of the piece's first run in the parameter."""


@dataclass(frozen=True)
class Launch:
    """Pieces that are updated together, and whose sums of squares are added up over the same processes."""

    batch: Any
    parts: tuple[Part, ...]
    parameter: Tensor
    """One of the parameters, to tell which processes those are."""

    def gradients(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the parts, from the matrices of the active parameters."""
        return [
            matrices[part.place]
            if part.end - part.start == matrices[part.place].shape[0]
            else matrices[part.place][part.start : part.end]
            for part in self.parts
        ]


class AdamW(torch.optim.Optimizer):
    """AdamW for float32, bfloat16 and float16 parameters, of one process or spread over several (DTensor: FSDP2, TP).

    >>> import dither, torch
    >>> model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-3, max_norm=1.0)
    >>> model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step()
    >>> int(optimizer.steps), optimizer.state[model.weight]["exp_avg"].dtype
    (1, torch.bfloat16)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        weights: str = "stochastic",
        states: str | None = None,
        state_rounding: str | None = None,
        block: int = 128,
        master: str | None = None,
        max_norm: float | None = None,
        nonfinite: str = "raise",
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        """Options of rounding and storage (`weights` to `seed`) may also differ between parameter groups.

        params: `model.named_parameters()`, or groups of it; unnamed parameters will do where nothing is rounded stochastically.
        lr: a number, or a 0-d tensor on the parameters' device, which a CUDA graph reads anew at every replay.
        weights: rounding of 16-bit parameters: "stochastic", "nearest", or "kahan" (nearest, the lost part kept in 16 bits).
        states: "fp32", "bf16", "dynamic8", "int8", "e4m3", "e5m2" or "e3m4"; by default fp32 for float32 parameters, else bf16.
            Parameters of one dimension (norms, biases) keep fp32 moments where others have 8 bits.
        state_rounding: "stochastic" (the default of bf16) or "nearest" (of 8 bits).
        block: how many neighbours in a row share a scale of an 8-bit state.
        master: "fp32" keeps float32 weights as a state and rounds them to the parameters (mixed precision's O2).
        max_norm: clip the norm of all gradients together to this, in the same pass.
        nonfinite: what a NaN or Inf in a gradient does: "raise" names the tensor (and waits for the device once a step), "skip"
            leaves everything as it was, counts, and waits for nothing; "unchecked" trusts the gradients and reads them once.
        seed: of the streams that stochastic roundings draw from, one for each parameter name.
        """
        if nonfinite not in NONFINITE:
            raise UserError(f"nonfinite={nonfinite!r} is unknown: choose from {', '.join(map(repr, NONFINITE))}.")
        if max_norm is not None and not (isinstance(max_norm, int | float) and 0 < max_norm <= MOST_NORM):
            raise UserError(
                f"max_norm is a positive number, or None for no clipping, and at most {MOST_NORM:g}, not {max_norm!r}."
            )
        self.max_norm, self.nonfinite, self.backend = max_norm, nonfinite, check_backend(backend)
        self.steps = torch.zeros((), dtype=torch.int64)
        """How many steps were done, 0-d int64, on the parameters' device from the first step on."""
        self.skipped = torch.zeros((), dtype=torch.int64)
        """How many were skipped for gradients that were not finite."""
        self.grad_norm: Tensor | None = None
        """Norm of all gradients in the last step, before clipping; None where none was taken."""
        self._forget()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "weights": weights,
            "states": states,
            "state_rounding": state_rounding,
            "block": block,
            "master": master,
            "seed": seed,
        }
        super().__init__(_not_empty(params), defaults)

    # What takes part ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; see `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            for slot in self._slots_of(len(self.param_groups) - 1, 0):
                self._check_slot(slot)
            _check_names(self.param_groups)
        except UserError:
            self.param_groups.pop()
            raise
        self._forget()

    def _forget(self) -> None:
        """Look anew, at the next step, at what takes part and where it lies."""
        self._slots: list[Slot] = []
        self._signature: tuple[Any, ...] = ()
        self._launches: list[Launch] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._hyper = torch.empty(0)
        self._written: list[tuple[Any, ...]] = []

    def _slots_of(self, number: int, first: int) -> list[Slot]:
        group = self.param_groups[number]
        names = group.get("param_names") or [""] * len(group["params"])
        pairs = zip(names, group["params"], strict=True)
        return [Slot(first + i, group, name, p, self._update_of(group, p)) for i, (name, p) in enumerate(pairs)]

    def _update_of(self, group: dict[str, Any], parameter: Tensor) -> Update:
        states = group["states"] or ("fp32" if parameter.dtype == torch.float32 else "bf16")
        rounding = group["state_rounding"] or ""
        update = Update(group["weights"], states, rounding, group["block"], group["master"] == "fp32")
        # A norm or a bias is small, matters much, and is what FSDP cuts at any place.
        return (
            Update(update.weights, "fp32", "", update.block, update.master)
            if update.in_blocks and parameter.dim() < 2
            else update
        )

    def _check_slot(self, slot: Slot) -> None:
        parameter, update = slot.parameter, slot.update
        called = f"the parameter {slot.name!r}" if slot.name else f"a parameter of shape {tuple(parameter.shape)}"
        if parameter.dtype not in FORMATS:
            raise UserError(f"Parameters are float32, bfloat16 or float16, and {called} is {parameter.dtype}.")
        rounds = parameter.dtype != torch.float32 and not update.master and update.weights == "stochastic"
        if (rounds or update.draws_states) and not slot.name:
            raise UserError(
                f"Stochastic rounding draws its bits by the parameter's name, and {called} has none: pass "
                "model.named_parameters() instead of model.parameters(), or round to nearest."
            )
        if update.in_blocks:
            for shard in shards(parameter):
                end = shard.column + local(parameter).shape[-1]
                if shard.column % update.block or (end % update.block and end != parameter.shape[-1]):
                    fits = math.gcd(shard.column, end) & -math.gcd(shard.column, end)  # the largest power of two in both
                    raise UserError(
                        f"{called[0].upper()}{called[1:]} is cut at columns {shard.column} to {end}, inside a block of "
                        f"{update.block} that shares a scale: "
                        + (f"use block={min(fits, 1024)}, or cut" if fits >= 16 else "cut")
                        + f" at multiples of {update.block}."
                    )

    # State -------------------------------------------------------------------------------------------------------------

    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        part, update = local(slot.parameter), slot.update
        state = {"step": torch.zeros((), dtype=torch.int64, device=part.device)}
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            values, scale = zero_state(matrix_size(part), update, signed, part.device)
            state[key] = like(slot.parameter, values.view(part.shape))
            if scale is not None:
                blocks = math.ceil(slot.parameter.shape[-1] / update.block)
                state[f"{key}_scale"] = like(slot.parameter, scale.view(*part.shape[:-1], scale.shape[-1]), blocks)
        return state | self._extra_state(slot)

    def _extra_state(self, slot: Slot) -> dict[str, Tensor]:
        """What is kept beside the moments: float32 weights, or what rounding them lost."""
        parameter = slot.parameter.detach()
        if slot.update.master:
            return {"master": parameter.float().clone(memory_format=torch.contiguous_format)}
        if slot.update.weights == "kahan" and parameter.dtype != torch.float32:
            return {"remainder": torch.zeros_like(parameter, memory_format=torch.contiguous_format)}
        return {}

    def _build(self) -> None:
        """Tables of all parameters on their device; `state[p]["step"]` becomes a view of one."""
        self._slots = []
        for number in range(len(self.param_groups)):
            self._slots += self._slots_of(number, len(self._slots))
        devices = {local(slot.parameter).device for slot in self._slots}
        if len(devices) > 1:
            raise UserError(
                f"The parameters of one optimizer lie on one device, and these lie on {', '.join(sorted(map(str, devices)))}: "
                "make an optimizer for each."
            )
        (device,) = devices
        for slot in self._slots:
            self._check_slot(slot)
            if not self.state[slot.parameter]:
                self.state[slot.parameter].update(self._new_state(slot))
        # One more row counts the optimizer's own steps.
        own = [self.state[slot.parameter]["step"].to(device) for slot in self._slots]
        counted = torch.stack([*own, self.steps.to(device)])
        self._counted, self.steps, self.skipped = counted, counted[-1], self.skipped.to(device)
        for slot in self._slots:
            self.state[slot.parameter]["step"] = counted[slot.index]
        self._hyper = torch.zeros((len(self._slots) + 1, len(HYPER)), dtype=torch.float64, device=device)
        self._hyper[-1] = torch.tensor([1.0, 0.5, 0.5, 1.0, 0.0, 1.0], dtype=torch.float64)
        self._written = [() for _ in self.param_groups]

    def _write_hyper(self) -> None:
        """Bring hyperparameters to the device where they changed; a fill each, no copy from the host."""
        first = 0
        for number, group in enumerate(self.param_groups):
            rows = self._hyper[first : first + len(group["params"])]
            first += len(group["params"])
            lr = group["lr"]
            values = (None if isinstance(lr, Tensor) else float(lr), *group["betas"], group["eps"], group["weight_decay"])
            for column, value in enumerate(values):
                if value is None:
                    rows[:, column].copy_(lr.reshape(()))
                elif not self._written[number] or self._written[number][column] != value:
                    rows[:, column].fill_(value)
            self._written[number] = values

    # The step ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. With `torch.amp.GradScaler`, gradients are unscaled in the same pass."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._slots:
            self._build()
        active, gradients = self._gradients()
        if not active:
            return loss
        self._write_hyper()
        code = implementation("adamw", self._hyper.device, self.backend)
        matrices = [as_matrix(self._work(slot, g).contiguous()) for slot, g in zip(active, gradients, strict=True)]
        self._arrange(active, matrices, code)
        for staged, work in self._copies:
            staged.copy_(work)

        # GradScaler sets these two for the time of a step; it has looked at the gradients then.
        loss_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        checks = self.nonfinite != "unchecked" and found_inf is None
        squares = self._square_sum(active, matrices) if checks or self.max_norm else None
        constants, norm, skip = code.prepare(
            self._hyper, self._counted, self.skipped, squares, loss_scale, found_inf, float(self.max_norm or 0.0)
        )
        self.grad_norm = None if squares is None else norm
        if checks and self.nonfinite == "raise":
            self._refuse(skip, active, gradients)
        self._update(active, matrices, constants, skip)
        for staged, work in self._copies:
            work.copy_(staged)
        # The kernels wrote through addresses: whoever keeps something by a weight's version must see that it is new.
        torch.autograd.graph.increment_version([slot.parameter for slot in active])
        return loss

    def _gradients(self) -> tuple[list[Slot], list[Tensor]]:
        active, gradients = [], []
        for slot in self._slots:
            gradient = slot.parameter.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise UserError(
                    f"The gradient of {slot.name or tuple(slot.parameter.shape)} is sparse, and a step changes all elements: "
                    "use dense gradients (nn.Embedding(sparse=False))."
                )
            if gradient.dtype not in FORMATS:
                raise UserError(f"Gradients are float32, bfloat16 or float16; that of {slot.name!r} is {gradient.dtype}.")
            active.append(slot)
            gradients.append(local(gradient))
        return active, gradients

    def _work(self, slot: Slot, part: Tensor) -> Tensor:
        """A parameter's or gradient's local part as the tensor that is worked on."""
        return part

    def _arrange(self, active: list[Slot], matrices: list[Tensor], code: Any) -> None:
        """Group the active parameters into launches, unless they are the ones of the last step, where they were."""
        held = [local(slot.parameter) for slot in active]
        signature = tuple((s.index, p.data_ptr(), m.dtype) for s, p, m in zip(active, held, matrices, strict=True))
        if signature == self._signature:
            return
        self._signature, self._copies = signature, []
        kinds: dict[Any, list[Part]] = {}
        for place, (slot, part) in enumerate(zip(active, held, strict=True)):
            work = self._work(slot, part.detach())
            if not work.is_contiguous():
                staged = torch.empty_like(work, memory_format=torch.contiguous_format)
                self._copies.append((staged, work))
                work = staged
            key = (slot.update, work.dtype, matrices[place].dtype, spread_over(slot.parameter))
            for found in self._parts(place, slot, as_matrix(work)) if work.numel() else []:
                kinds.setdefault(key, []).append(found)
        self._launches = [
            Launch(self._batch(code)([part.piece for part in parts], key[0]), tuple(parts), active[parts[0].place].parameter)
            for key, parts in kinds.items()
        ]
        mask = torch.zeros(len(self._slots), dtype=torch.float64)
        mask[[slot.index for slot in active]] = 1.0
        self._hyper[:-1, HYPER.index("active")] = mask.to(self._hyper.device)

    def _batch(self, code: Any) -> Any:
        return code.Batch

    def _parts(self, place: int, slot: Slot, work: Tensor) -> list[Part]:
        """The pieces of a parameter whose local matrix is `work`."""
        state = {key: as_matrix(local(value)) for key, value in self.state[slot.parameter].items() if key != "step"}
        extra = state.get("master", state.get("remainder"))
        found = []
        for shard in shards(slot.parameter):
            rows = slice(shard.start, shard.end)
            tensors = [
                None if t is None else t[rows]
                for t in (
                    work,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state.get("exp_avg_scale"),
                    state.get("exp_avg_sq_scale"),
                    extra,
                )
            ]
            piece = Piece(*tensors, shard.row, shard.column, self._keys(slot), slot.index)  # type: ignore[arg-type, call-arg]
            found.append(Part(place, shard.start, shard.end, piece))
        return found

    def _keys(self, slot: Slot) -> tuple[int, int]:
        seed = slot.group["seed"]
        return Stream(seed, "optimizer weight", slot.name).key, Stream(seed, "optimizer moments", slot.name).key

    def _square_sum(self, active: list[Slot], matrices: list[Tensor]) -> Tensor:
        """Of all gradients of all processes, float64, 0-d: hardly ever does the order of its additions show in float32."""
        zero = torch.zeros((), dtype=torch.float64, device=self._hyper.device)
        # A process that holds nothing of some parameters adds its zero with the others.
        sums = {spread_over(slot.parameter): (zero.clone(), slot.parameter) for slot in active}
        for launch in self._launches:
            sums[spread_over(launch.parameter)][0].add_(launch.batch.square_sum(launch.gradients(matrices)))
        for total, parameter in sums.values():
            reduce_cuts(total, parameter)
        return torch.stack([total for total, _ in sums.values()]).sum()

    def _update(self, active: list[Slot], matrices: list[Tensor], constants: Tensor, skip: Tensor) -> None:
        for launch in self._launches:
            launch.batch.step(launch.gradients(matrices), constants, self.steps, skip)

    def _refuse(self, skip: Tensor, active: list[Slot], gradients: list[Tensor]) -> None:
        if skip.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UserError("A step that is captured in a CUDA graph cannot wait for its gradients: use nonfinite='skip'.")
        if not bool(skip):
            return
        for slot, gradient in zip(active, gradients, strict=True):
            if not bool(gradient.isfinite().all()):
                count = int((~gradient.isfinite()).sum())
                raise NonFiniteError(
                    f"Step {int(self.steps) + 1}: the gradient of {slot.name or tuple(slot.parameter.shape)} holds {count} NaN "
                    f"or Inf among {gradient.numel()} numbers, so no weight was changed; nonfinite='skip' would go on."
                )
        raise NonFiniteError(
            f"Step {int(self.steps) + 1}: another process has a gradient with NaN or Inf, so no weight was changed."
        )

    # Saving and loading ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's, of tensors and plain numbers; each group also has the optimizer's `steps` and `skipped`."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["steps"], group["skipped"] = int(self.steps), int(self.skipped)
            if isinstance(group["lr"], Tensor):
                group["lr"] = float(group["lr"])
            group["betas"] = list(group["betas"])
        # New dictionaries: torch's are the optimizer's own, whose steps are views of one table.
        saved["state"] = {index: {**state, "step": state["step"].clone()} for index, state in saved["state"].items()}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, of an optimizer with the same parameters, formats and seed."""
        saved_groups, saved_states = state_dict["param_groups"], state_dict["state"]
        sizes = [[len(group["params"]) for group in groups] for groups in (saved_groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise UserError(f"The state has groups of {sizes[0]} parameters, and this optimizer has groups of {sizes[1]}.")
        slots: list[Slot] = []
        for number, (saved, group) in enumerate(zip(saved_groups, self.param_groups, strict=True)):
            for key in MEANING:
                if key in saved and saved[key] != group[key]:
                    raise UserError(
                        f"The state was saved with {key}={saved[key]!r}, and this optimizer has {key}={group[key]!r}: "
                        "make it as the saved one was made."
                    )
            names = zip(saved.get("param_names", []), group.get("param_names", []), strict=False)
            for theirs, ours in names:
                if theirs != ours:
                    raise UserError(f"The state is that of {theirs!r} where this optimizer has {ours!r}: the order differs.")
            slots += self._slots_of(number, len(slots))
        loaded = []
        for slot, saved_index in zip(slots, (i for group in saved_groups for i in group["params"]), strict=True):
            loaded.append(self._loaded(slot, saved_states[saved_index]) if saved_index in saved_states else {})
        for saved, group in zip(saved_groups, self.param_groups, strict=True):
            for key in ("lr", "betas", "eps", "weight_decay", "initial_lr"):
                if key in saved and isinstance(group.get(key), Tensor):
                    group[key].fill_(saved[key])  # the tensor that a CUDA graph, or its owner, reads
                elif key in saved:
                    group[key] = tuple(saved[key]) if key == "betas" else saved[key]
        for slot, state in zip(slots, loaded, strict=True):
            self.state[slot.parameter] = state
        self.steps = torch.tensor(saved_groups[0].get("steps", 0), dtype=torch.int64)
        self.skipped = torch.tensor(saved_groups[0].get("skipped", 0), dtype=torch.int64)
        self._forget()

    def _loaded(self, slot: Slot, saved: dict[str, Any]) -> dict[str, Tensor]:
        """A saved state in this optimizer's own tensors, which must be of the same kind."""
        state = self._new_state(slot)
        if set(saved) != set(state):
            raise UserError(
                f"The state of {slot.name or tuple(slot.parameter.shape)} has {', '.join(sorted(saved))}, "
                f"and this optimizer keeps {', '.join(sorted(state))}."
            )
        for key, ours in state.items():
            theirs = saved[key] if isinstance(saved[key], Tensor) else torch.tensor(saved[key], dtype=ours.dtype)
            if (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
                raise UserError(
                    f"The state {key!r} of {slot.name or tuple(slot.parameter.shape)} is {theirs.dtype} {tuple(theirs.shape)}, "
                    f"and this optimizer keeps {ours.dtype} {tuple(ours.shape)}."
                )
            if isinstance(theirs, DTensor) != isinstance(ours, DTensor):
                raise UserError(
                    f"The state {key!r} of {slot.name or tuple(slot.parameter.shape)} is "
                    f"{'a DTensor' if isinstance(theirs, DTensor) else 'one whole tensor'} and the optimizer's is not: load it "
                    "by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
                )
            ours.copy_(theirs)
        return state

    def __getstate__(self) -> dict[str, Any]:
        kept = ("max_norm", "nonfinite", "backend", "steps", "skipped", "grad_norm")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


AdamW._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _not_empty(params: Iterable[Any]) -> list[Any]:
    listed = [params] if isinstance(params, Tensor) else list(params)
    if not listed:
        raise UserError("There are no parameters to optimize: the list is empty (was an iterator used up before?).")
    return listed


def _check_group(group: dict[str, Any]) -> None:
    """Hyperparameters of a group; formats are checked with its parameters."""
    lr, betas, eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise UserError(f"A learning rate is one number, not a tensor of shape {tuple(lr.shape)}.")
    elif not isinstance(lr, int | float) or isinstance(lr, bool) or not 0 < lr < math.inf:
        raise UserError(f"The learning rate is a positive number, not {lr!r}; a schedule may lower it to 0 later.")
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise UserError(f"betas are two numbers from 0 to below 1, such as (0.9, 0.95), not {betas!r}.")
    if not isinstance(eps, int | float) or not 1e-30 <= eps <= 1e30:
        raise UserError(
            f"eps is a number from 1e-30 to 1e30, such as 1e-8, not {eps!r}: it keeps the division by a zero moment away."
        )
    if not isinstance(decay, int | float) or not 0 <= decay < math.inf:
        raise UserError(f"weight_decay is a number from 0 on, such as 0.1, not {decay!r}.")
    if group["master"] not in (None, "fp32"):
        raise UserError(f"master is None or 'fp32', not {group['master']!r}.")
    Stream(group["seed"], "", "")  # says what is wrong with a seed
    if not group["params"]:
        raise UserError("A parameter group is empty.")


def _check_names(groups: Sequence[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for group in groups:
        for name in group.get("param_names") or []:
            if name in seen:
                raise UserError(f"Two parameters are called {name!r}, and would draw the same random bits.")
            seen.add(name)
