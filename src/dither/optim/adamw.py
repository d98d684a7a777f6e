"""AdamW with 16-bit or 8-bit weights and states: one pass over memory, many tensors per launch, no device-to-host reads.

The formulas are in `dither.ops.reference.adamw`. An optimizer is built in layers, each a class in its own file: `Members`
(parameters and their options), `States` (formats of the moments), `SavedStates` (state_dict), `Tables` (device tables and
kernel batches), and `AdamW` (the step).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from dither.errors import DitherError, UserError
from dither.nn.sharded.tensor_parallel import local
from dither.ops.backend import disable
from dither.ops.reference.adamw import FORMATS
from dither.optim.groups import check_numbers, check_optimizer, check_torchs, read_numbers, rounding_of
from dither.optim.shards import as_matrix, reduce_cuts, spread_over
from dither.optim.slots import Arrangement, Slot
from dither.optim.tables import Tables, known_numbers
from dither.spec.random import check_backend


class NonFiniteError(DitherError):
    """Raised when a gradient holds NaN or Inf. The step has changed nothing."""


class AdamW(Tables):
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
        max_norm: float | None = None,
        nonfinite: str | None = None,
        seed: int = 0,
        backend: str = "auto",
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
        states: format of both moments: "fp32", "bf16", "dynamic8", "companded8", "int8", "e4m3", "e5m2" or "e3m4". The default
            is fp32 for float32 parameters, else bf16. One-dimensional parameters (norms, biases) keep fp32 moments instead of
            8-bit ones.
        state_rounding: "stochastic" (the default of bf16) or "nearest" (the default of 8 bits).
        block: how many neighbours in a row share the scale of an 8-bit state, from 16 to 2048.
        min_8bit_size: parameters with fewer elements keep fp32 moments instead of 8-bit ones.
        master: "fp32" keeps float32 weights as a state and rounds them to the parameters (mixed precision O2). "split" keeps
            the same numbers as bfloat16 parameters and 16 more bits, "split24" 24-bit numbers as parameters and 8 more bits.
        max_norm: clip the norm of all gradients together to this value, in the same pass.
        nonfinite: what to do if a gradient holds NaN or Inf. "raise" (the default) names the tensor; it waits for the device
            once per step. "skip" changes nothing, counts the step in `skipped`, and does not wait. "unchecked" does not look.
        seed: seed of the random streams, one stream per parameter.
        backend: "auto" (by device), "kernel" or "reference".
        """
        if capturable and nonfinite == "raise":
            raise UserError("capturable=True is for steps that never wait, and nonfinite='raise' waits: use nonfinite='skip'.")
        nonfinite = nonfinite or ("skip" if capturable else "raise")
        check_optimizer(max_norm, nonfinite)
        flags = {"foreach": foreach, "fused": fused, "capturable": capturable}
        check_torchs({"amsgrad": amsgrad, "differentiable": differentiable, "maximize": maximize, **flags})
        if foreach and fused:
            raise UserError("foreach=True and fused=True select two implementations: set at most one of them, as for torch.")
        self.max_norm, self.nonfinite, self.backend = max_norm, nonfinite, check_backend(backend)
        self.steps = torch.zeros((), dtype=torch.int64)
        """Number of steps taken, 0-d int64, on the parameters' device from the first step on."""
        self.skipped = torch.zeros((), dtype=torch.int64)
        """Number of steps skipped because a gradient was not finite, 0-d int64."""
        self.previous_squares: Tensor | None = None
        """Squared norm of the gradients of the last step, 0-d float64, if `release_gradients` clips by it."""
        self.grad_norm: Tensor | None = None
        """Norm of all gradients in the last step, before clipping; None if the step did not compute it."""
        self._formats = {}
        self._forget()
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
            "seed": seed,
        }
        super().__init__(_listed(params), defaults)

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
        self._look()
        active, gradients = self._gradients(self._slots)
        if not active:
            return loss
        numbers = self._numbers()
        matrices = self._matrices(active, gradients)
        arranged = self._arrange(active, matrices)
        self._activate([slot.index for slot in active])
        self._write_hyper(numbers)

        # Set by GradScaler for the duration of a step. It has already checked the gradients then.
        loss_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        checks = self.nonfinite != "unchecked" and found_inf is None
        squares = self._square_sum(active, matrices, arranged) if checks or self.max_norm else None
        constants, norm, skip = self._code.prepare(
            self._hyper, self._counted, self.skipped, squares, loss_scale, found_inf, float(self.max_norm or 0.0)
        )
        self.grad_norm = None if squares is None else norm
        if checks and self.nonfinite == "raise":
            self._refuse(skip, active, gradients)
        self._change(active, matrices, arranged, constants, skip)
        return loss

    def _change(
        self, active: list[Slot], matrices: list[Tensor], arranged: Arrangement, constants: Tensor, skip: Tensor
    ) -> None:
        """Update the active parameters and their states, and tell autograd."""
        for staged, work in arranged.copies:
            staged.copy_(work)
        self._update(active, matrices, arranged, constants, skip)
        for staged, work in arranged.copies:
            work.copy_(staged)
        # Kernels write through addresses, which autograd does not see: caches keyed by a weight's version must expire.
        torch.autograd.graph.increment_version([slot.parameter for slot in active])

    def _matrices(self, active: list[Slot], gradients: list[Tensor]) -> list[Tensor]:
        """Return the gradients as contiguous matrices."""
        return [
            g.contiguous() if slot.is_matrix else as_matrix(self._work(slot, g).contiguous())
            for slot, g in zip(active, gradients, strict=True)
        ]

    def _gradients(self, slots: list[Slot]) -> tuple[list[Slot], list[Tensor]]:
        """Return (those of the slots whose parameters have a gradient, their local gradients), checked.

        This runs for every tensor in every step. List comprehensions take a third of a loop's time.
        """
        every = [slot.parameter.grad for slot in slots]
        active = [slot for slot, gradient in zip(slots, every, strict=True) if gradient is not None]
        gradients = [gradient for gradient in every if gradient is not None]
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
        """Return [lr, beta1, beta2, eps, weight_decay] of each group; numbers on the host are checked."""
        all_numbers = []
        for number, group in enumerate(self.param_groups):
            numbers = read_numbers(group)
            if number >= len(self._written) or self._written[number] != known_numbers(numbers):
                check_numbers(numbers)
            all_numbers.append(numbers)
        return all_numbers

    def _square_sum(self, active: list[Slot], matrices: list[Tensor], arranged: Arrangement) -> Tensor:
        """Return the sum of squares of all gradients over all ranks, 0-d float64.

        In float64 the order of the additions hardly ever changes the norm, which is float32.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self._hyper.device)
        # A rank that holds no part of some parameters contributes zero, so that every rank joins the all-reduce.
        sums = {spread_over(slot.parameter): (zero.clone(), slot.parameter) for slot in active}
        for batch in arranged.batches:
            sums[spread_over(batch.parameter)][0].add_(batch.batch.square_sum(batch.gradients(matrices)))
        for total, parameter in sums.values():
            reduce_cuts(total, parameter)
        whole = torch.stack([total for total, _ in sums.values()]).sum()
        if self.stages is not None:
            torch.distributed.all_reduce(whole, group=self.stages)
        return whole

    def _update(
        self, active: list[Slot], matrices: list[Tensor], arranged: Arrangement, constants: Tensor, skip: Tensor
    ) -> None:
        for batch in arranged.batches:
            batch.batch.step(batch.gradients(matrices), constants, self.steps, skip)

    def _refuse(self, skip: Tensor, active: list[Slot], gradients: list[Tensor]) -> None:
        """Raise if the step was skipped, and say why."""
        if skip.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UserError("A step that is captured in a CUDA graph cannot wait for its gradients: use nonfinite='skip'.")
        if not bool(skip):
            return
        for slot, gradient in zip(active, gradients, strict=True):
            if not bool(gradient.isfinite().all()):
                count = int((~gradient.isfinite()).sum())
                raise NonFiniteError(
                    f"Step {int(self.steps) + 1}: the gradient of {slot.name} holds {count} NaN or Inf "
                    f"among {gradient.numel()} numbers, so no weight was changed; use nonfinite='skip' to skip such steps."
                )
        for group in self.param_groups:
            check_numbers(read_numbers(group, wait=True))  # the only other reason that this rank can see
        raise NonFiniteError(
            f"Step {int(self.steps) + 1}: another rank has a gradient with NaN or Inf, so no weight was changed."
        )


AdamW._step_supports_amp_scaling = True  # type: ignore[attr-defined]
AdamW.step.hooked = True  # or torch would run hooks and its profiler inside a compiled graph


def _listed(params: Iterable[Any]) -> list[Any]:
    if isinstance(params, Tensor):
        raise UserError("An optimizer takes a list of parameters, or of groups of them, and got one tensor: pass [tensor].")
    listed = list(params)
    if not listed:
        raise UserError("The list of parameters is empty: pass at least one (was a generator consumed before?).")
    return listed
