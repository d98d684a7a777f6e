"""AdamW whose weights and states may have 16 or 8 bits: one pass over memory, many tensors a launch, nothing read back.

The update itself is `dither.reference.adamw`. This file finds out which tensors take part and where they lie, at every step:
groups, states and parameters may be edited at any time. Launches are kept for as long as nothing that they know has changed.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from dither.adam_update import HYPER, Piece
from dither.compiler import disable
from dither.errors import DitherError, UserError
from dither.nn.tensor_parallel import local
from dither.optim.launches import Launch, Part, Slot
from dither.optim.options import check_numbers, check_optimizer, check_torchs, read_numbers, rounding_of
from dither.optim.shards import as_matrix, reduce_cuts, shards, spread_over
from dither.optim.states import OWN, States
from dither.random import Stream, check_backend
from dither.reference.adamw import FORMATS
from dither.torch_ops import implementation


class NonFiniteError(DitherError):
    """A gradient holds NaN or Inf; the step that met it changed nothing."""


class AdamW(States):
    """AdamW for float32, bfloat16 and float16 parameters, of one process or spread over several (DTensor: FSDP2, TP).

    Takes the place of `torch.optim.AdamW`: same arguments and defaults, groups, hooks, schedules and states.

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
        max_norm: float | None = None,
        nonfinite: str | None = None,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        """Options of rounding and storage (`weights` to `master`, `maximize`, `seed`) may also differ between parameter groups.

        params: `model.named_parameters()`, `model.parameters()`, or groups of either. Unnamed parameters draw random bits by
            their place; see `name_parameters`.
        lr, betas: numbers, or 0-d tensors; those on the parameters' device are read there, and by a CUDA graph at every replay.
        amsgrad, differentiable: False; anything else is refused, as it would not be done.
        maximize: move along the gradient instead of against it.
        foreach, fused: torch's choice of implementation; there is one here, so that they change nothing.
        capturable: True makes `nonfinite="skip"` the default, since a captured step cannot wait; steps can be captured anyway.
        weights: rounding of 16-bit parameters: "stochastic" (the default), "nearest", or "kahan" (nearest, the lost part kept
            in 16 bits). `bf16_stochastic_round` is torchao's name: True means "stochastic", False "nearest".
        states: "fp32", "bf16", "dynamic8", "int8", "e4m3", "e5m2" or "e3m4"; by default fp32 for float32 parameters, else bf16.
            Parameters of one dimension (norms, biases) keep fp32 moments where others have 8 bits.
        state_rounding: "stochastic" (the default of bf16) or "nearest" (of 8 bits).
        block: how many neighbours in a row share a scale of an 8-bit state, from 16 to 2048.
        min_8bit_size: parameters of fewer elements keep fp32 moments where others have 8 bits.
        master: "fp32" keeps float32 weights as a state and rounds them to the parameters (mixed precision's O2).
        max_norm: clip the norm of all gradients together to this, in the same pass.
        nonfinite: what a NaN or Inf in a gradient does: "raise" (the default) names the tensor and waits for the device once a
            step, "skip" leaves everything as it was, counts, and waits for nothing; "unchecked" trusts the gradients and reads
            them once.
        seed: of the streams that stochastic roundings draw from, one for each parameter.
        """
        if capturable and nonfinite == "raise":
            raise UserError("capturable=True is for steps that never wait, and nonfinite='raise' waits: use nonfinite='skip'.")
        nonfinite = nonfinite or ("skip" if capturable else "raise")
        check_optimizer(max_norm, nonfinite)
        flags = {"foreach": foreach, "fused": fused, "capturable": capturable}
        check_torchs({"amsgrad": amsgrad, "differentiable": differentiable, "maximize": maximize, **flags})
        if foreach and fused:
            raise UserError("foreach=True and fused=True name two implementations: torch takes one of them, and so does this.")
        self.max_norm, self.nonfinite, self.backend = max_norm, nonfinite, check_backend(backend)
        self.steps = torch.zeros((), dtype=torch.int64)
        """How many steps were done, 0-d int64, on the parameters' device from the first step on."""
        self.skipped = torch.zeros((), dtype=torch.int64)
        """How many were skipped for gradients that were not finite."""
        self.grad_norm: Tensor | None = None
        """Norm of all gradients in the last step, before clipping; None where none was taken."""
        self._formats = {}
        self._forget()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "weights": rounding_of(weights, bf16_stochastic_round) or "stochastic",
            "states": states,
            "state_rounding": state_rounding,
            "block": block,
            "min_8bit_size": min_8bit_size,
            "master": master,
            "seed": seed,
        }
        super().__init__(_listed(params), defaults)

    @disable  # kernels write through addresses, which no graph can know
    @Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. With `torch.amp.GradScaler`, gradients are unscaled in the same pass."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look()
        active, gradients = self._gradients()
        if not active:
            return loss
        numbers = self._numbers()
        matrices = [
            g.contiguous() if slot.is_matrix else as_matrix(self._work(slot, g).contiguous())
            for slot, g in zip(active, gradients, strict=True)
        ]
        self._arrange(active, matrices)
        self._write_hyper(numbers)
        for staged, work in self._copies:
            staged.copy_(work)

        # GradScaler sets these two for the time of a step; it has looked at the gradients then.
        loss_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        checks = self.nonfinite != "unchecked" and found_inf is None
        squares = self._square_sum(active, matrices) if checks or self.max_norm else None
        constants, norm, skip = self._code.prepare(
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
        """Return the parameters that have a gradient, and these, checked.

        This and what follows runs for every tensor in every step: lists are built whole, which takes a third of the time.
        """
        found = [p.grad for p in self._parameters]
        active = [slot for slot, gradient in zip(self._slots, found, strict=True) if gradient is not None]
        gradients = [gradient for gradient in found if gradient is not None]
        if {gradient.layout for gradient in gradients} - {torch.strided} or {g.dtype for g in gradients} - FORMATS.keys():
            for slot, gradient in zip(active, gradients, strict=True):
                if gradient.layout != torch.strided:
                    raise UserError(
                        f"The gradient of {slot.name} is sparse, and a step changes all elements: "
                        "use dense gradients (nn.Embedding(sparse=False))."
                    )
                if gradient.dtype not in FORMATS:
                    raise UserError(f"Gradients are float32, bfloat16 or float16; that of {slot.name!r} is {gradient.dtype}.")
        return active, [local(gradient) for gradient in gradients] if self._spread else gradients

    def _numbers(self) -> list[list[Any]]:
        """Return rates, betas, eps and decay of each group, checked where the host knows them."""
        found = []
        for number, group in enumerate(self.param_groups):
            numbers = read_numbers(group)
            if number >= len(self._written) or self._written[number] != _known(numbers):
                check_numbers(numbers)
            found.append(numbers)
        return found

    def _write_hyper(self, numbers: list[list[Any]]) -> None:
        """Bring hyperparameters to the device where they changed; a fill each, no copy from the host."""
        for number, (first, end) in enumerate(self._rows):
            known, before = _known(numbers[number]), self._written[number]
            if known == before and None not in known:
                continue
            rows = self._hyper[first:end]
            for column, value in enumerate(numbers[number]):
                if isinstance(value, Tensor):
                    rows[:, column].copy_(value.reshape(()))
                elif not before or before[column] != value:
                    rows[:, column].fill_(value)
            self._written[number] = known

    def _work(self, slot: Slot, part: Tensor) -> Tensor:
        """Return a parameter's or gradient's local part as the tensor that is worked on."""
        return part

    def _arrange(self, active: list[Slot], matrices: list[Tensor]) -> None:
        """Group the active parameters into launches, unless they, their states and counts lie where they did in the last step.

        What launches were made of stays alive as long as they do, so that no other tensor can have come to its place.
        """
        tensors = self._tensors(active)
        signature = (self.backend, [slot.index for slot in active], [m.dtype for m in matrices], self._addresses(tensors))
        if signature == self._signature:
            return
        self._signature = None  # until all of this is done
        device = self._device_of(active)
        if self._hyper.shape[0] != len(self._slots) + 1 or self._hyper.device != device:
            self._make_tables(device)
        for place, slot in enumerate(active):
            active[place] = self._slots[slot.index] = slot = self._up_to_date(slot)
            matrices[place] = as_matrix(matrices[place])  # the parameter may have been no matrix before, or be none now
            state = self._settle(slot)
            state["step"] = self._counted_at(slot.index, state["step"])
        self.steps, self.skipped = self._counted_at(-1, self.steps), self.skipped.to(device)
        self._code = implementation("adamw", device, self.backend)
        self._make_launches(active, matrices)
        mask = torch.zeros(len(self._slots), dtype=torch.float64)
        mask[[slot.index for slot in active]] = 1.0
        self._hyper[:-1, HYPER.index("active")] = mask.to(device)
        self._signature = (*signature[:3], self._addresses(self._tensors(active)))

    def _tensors(self, active: list[Slot]) -> list[Any]:
        """Return all that launches are made of: counts, parameters, states."""
        parameters = [slot.parameter for slot in active]
        states = [state.values() for state in map(self.state.get, parameters) if state]
        return [self.steps, self.skipped, *parameters, *chain.from_iterable(states)]

    def _addresses(self, tensors: list[Any]) -> list[Any]:
        """Return where tensors lie; what else somebody has put into a state stands for itself."""
        if self._spread:
            tensors = [local(x) for x in tensors]
        try:
            return list(map(Tensor.data_ptr, tensors))
        except TypeError:
            return [x.data_ptr() if isinstance(x, Tensor) else id(x) for x in tensors]

    def _device_of(self, active: list[Slot]) -> torch.device:
        devices = {local(slot.parameter).device for slot in active}
        if len(devices) > 1:
            raise UserError(
                f"The parameters of one optimizer lie on one device, and these lie on {', '.join(sorted(map(str, devices)))}: "
                "make an optimizer for each."
            )
        (device,) = devices
        return device

    def _make_tables(self, device: torch.device) -> None:
        """Make the tables of all parameters: hyperparameters, and counts of steps, of which `state[p]["step"]` is a view.

        One more row counts the optimizer's own steps.
        """
        self._counted = torch.zeros(len(self._slots) + 1, dtype=torch.int64, device=device)
        self._hyper = torch.zeros((len(self._slots) + 1, len(HYPER)), dtype=torch.float64, device=device)
        self._hyper[-1] = torch.tensor([1.0, 0.5, 0.5, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
        ends = [0, *accumulate(len(group["params"]) for group in self.param_groups)]
        self._rows = list(pairwise(ends))
        for group, (first, end) in zip(self.param_groups, self._rows, strict=True):
            self._hyper[first:end, HYPER.index("sign")] = -1.0 if group["maximize"] else 1.0
        self._written = [() for _ in self.param_groups]

    def _counted_at(self, index: int, count: Tensor) -> Tensor:
        """Return the table's entry, which has taken over a count that lies elsewhere."""
        entry = self._counted[index]
        return count if count.data_ptr() == entry.data_ptr() else entry.copy_(count)

    def _make_launches(self, active: list[Slot], matrices: list[Tensor]) -> None:
        self._copies = []
        kinds: dict[Any, list[Part]] = {}
        for place, slot in enumerate(active):
            work = self._work(slot, local(slot.parameter).detach())
            if matrices[place].numel() != work.numel():
                raise UserError(
                    f"The gradient of {slot.name} has {matrices[place].numel()} numbers and the parameter has {work.numel()}: "
                    "it belongs to what the parameter was before."
                )
            if not work.is_contiguous():
                staged = torch.empty_like(work, memory_format=torch.contiguous_format)
                self._copies.append((staged, work))
                work = staged
            key = (slot.update, work.dtype, matrices[place].dtype, spread_over(slot.parameter))
            for found in self._parts(place, slot, as_matrix(work)) if work.numel() else []:
                kinds.setdefault(key, []).append(found)
        self._launches = [
            Launch(
                self._batch(self._code)([part.piece for part in parts], key[0]), tuple(parts), active[parts[0].place].parameter
            )
            for key, parts in kinds.items()
        ]

    def _batch(self, code: Any) -> Any:
        return code.Batch

    def _parts(self, place: int, slot: Slot, work: Tensor) -> list[Part]:
        """Return the pieces of a parameter whose local matrix is `work`."""
        kept = self.state[slot.parameter]
        state = {key: as_matrix(local(kept[key])) for key in OWN if key in kept and key != "step"}
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
            found.append(Part(place, shard.start, shard.end, piece, shard.end - shard.start == work.shape[0]))
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
                    f"Step {int(self.steps) + 1}: the gradient of {slot.name} holds {count} NaN "
                    f"or Inf among {gradient.numel()} numbers, so no weight was changed; nonfinite='skip' would go on."
                )
        for group in self.param_groups:
            check_numbers(read_numbers(group, wait=True))  # the only other reason that this process can see
        raise NonFiniteError(
            f"Step {int(self.steps) + 1}: another process has a gradient with NaN or Inf, so no weight was changed."
        )


AdamW._step_supports_amp_scaling = True  # type: ignore[attr-defined]
AdamW.step.hooked = True  # torch would run hooks and its profiler inside of a compiled graph


def _listed(params: Iterable[Any]) -> list[Any]:
    if isinstance(params, Tensor):
        raise UserError(
            "An optimizer takes a list of parameters, or of groups of them, and one tensor was given: write [tensor]."
        )
    listed = list(params)
    if not listed:
        raise UserError("There are no parameters to optimize: the list is empty (was an iterator used up before?).")
    return listed


def _known(numbers: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if isinstance(value, Tensor) else value for value in numbers)
