"""The dtype of gradients: backward passes accumulate in it, ranks all-reduce in it, and the optimizer reads it.

`parameter.grad` has this dtype whatever the parameter's dtype is, so clipping, scaling and inspection work as usual.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.bitwidths import learned_parameters
from dither.spec import did_you_mean
from dither.spec.modes import GRADIENTS
from dither.spec.random import Stream, matrix_size

Count = Callable[[], Tensor]
"""A function that returns the number of the optimizer step, 0-d int64."""


class Gradients:
    """Keep the gradients of a model's parameters in one dtype. Those of bitwidths and clips stay float32.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1, bias=False).bfloat16()
    >>> gradients = Gradients(layer, "fp32")
    >>> for _ in range(1024):
    ...     (layer.weight / 1024).sum().backward()
    >>> layer.weight.grad  # bfloat16 would have stopped at 0.25
    tensor([[1., 1.]])
    """

    def __init__(self, model: nn.Module, kind: str, *, seed: int = 0, step: Count | None = None) -> None:
        """Set the dtype of the gradients of all trainable parameters of `model`.

        kind: "fp32", "bf16" or "bf16-sr".
        seed, step: with the parameter's name, the rank and the backward pass, they determine the random bits of "bf16-sr".
        """
        if kind not in GRADIENTS:
            known = ", ".join(GRADIENTS)
            raise UserError(f"There are no gradients={kind!r}{did_you_mean(kind, GRADIENTS)}: choose from {known}.")
        self.model, self.kind, self.seed = model, kind, seed
        self.passes = 0
        """Number of backward passes since the last step."""
        self._step: Count = step or (lambda: torch.zeros((), dtype=torch.int64))
        self._nodes: list[Any] = []  # kept alive: torch recreates a node that nothing references, without its hooks
        self._sums: dict[int, Tensor] = {}
        learned = {id(parameter) for parameter in learned_parameters(model)}
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.requires_grad and id(parameter) not in learned:
                self._keep(name, parameter)

    def _keep(self, name: str, parameter: Tensor) -> None:
        """Set the gradient dtype of one parameter."""
        dtype = torch.float32 if self.kind == "fp32" else torch.bfloat16
        if isinstance(parameter, DTensor):
            if parameter.dtype == dtype and self.kind != "bf16-sr":
                return
            raise UserError(
                f"gradients={self.kind!r} is for parameters that one process holds, and {name!r} is sharded, in "
                f"{parameter.dtype}: FSDP2 reduces in its MixedPrecisionPolicy's reduce_dtype, and keeps the parameter's type."
            )
        gradient, parameter.grad = parameter.grad, None
        # None leaves the gradient of a pass in its own dtype. The hooks add it to the sum and round.
        parameter.grad_dtype = None if self.kind == "bf16-sr" else dtype
        parameter.grad = None if gradient is None else gradient.to(dtype)
        if self.kind == "bf16-sr":
            self._round_sums(name, parameter)

    # Stochastic sums ---------------------------------------------------------------------------------------------------

    def _round_sums(self, name: str, parameter: Tensor) -> None:
        """Add hooks around the accumulation of one parameter: set the sum aside before it, add and round after it."""
        node = get_gradient_edge(parameter).node
        # Weak references: node, parameter and hooks form a cycle through C++, which Python's collector cannot see.
        self_reference, parameter_reference = weakref.ref(self), weakref.ref(parameter)

        def before(_: object) -> None:
            target, gradients = parameter_reference(), self_reference()
            if gradients is not None and target is not None and target.grad is not None:
                gradients._sums[id(target)] = target.grad
                target.grad = None

        def after(target: Tensor) -> None:
            gradients = self_reference()
            if gradients is not None:
                gradients._add(name, target)

        node.register_prehook(before)
        self._nodes.append(node)
        parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add(self, name: str, parameter: Tensor) -> None:
        """Add the earlier sum to the new gradient in float32, and round the result stochastically to bfloat16."""
        earlier, new = self._sums.pop(id(parameter), None), parameter.grad
        assert new is not None
        if earlier is None and new.dtype == torch.bfloat16:
            return
        total = new.float() if earlier is None else earlier.float().add_(new)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        purpose = f"gradient {rank}.{self.passes}"
        parameter.grad = rounded_sums(total, Stream(self.seed, purpose, name), self._step())

    # Several ranks -----------------------------------------------------------------------------------------------------

    def _present(self) -> Iterator[Tensor]:
        return (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)

    @torch.no_grad()
    def all_reduce(self, group: Any = None) -> None:
        """Sum the gradients over the ranks of `group` in their own dtype, with one collective per dtype.

        Gradients of "bf16-sr" are sent as bfloat16, summed in float32, and rounded stochastically once.
        """
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for gradient in self._present():
            kinds.setdefault(gradient.dtype, []).append(gradient)
        for dtype, gradients in kinds.items():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            if self.kind == "bf16-sr" and dtype == torch.bfloat16:
                flat = self._stochastic_sum(flat, group)
            else:
                dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def _stochastic_sum(self, flat: Tensor, group: Any) -> Tensor:
        """Return the sum over ranks (reduce-scatter and all-gather): each rank sums and rounds its share of the elements."""
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        size = -(-flat.numel() // world)
        sent = torch.nn.functional.pad(flat, (0, world * size - flat.numel()))
        received, whole = torch.empty_like(sent), torch.empty_like(sent)
        # As bytes: not every backend supports bfloat16.
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
        parts = received.view(world, size)
        total = functools.reduce(torch.Tensor.add_, parts[1:], parts[0].float())  # in the order of ranks
        stream = Stream(self.seed, "gradient reduction", "")
        rounded = rounded_sums(total[None], stream, self._step(), (0, rank * size))[0]
        dist.all_gather_into_tensor(whole.view(torch.uint8), rounded.view(torch.uint8), group=group)
        return whole[: flat.numel()]


def rounded_sums(total: Tensor, stream: Stream, step: int | Tensor, offset: tuple[int, int] = (0, 0)) -> Tensor:
    """Return float32 sums as bfloat16, rounded stochastically."""
    draw = stream.draw(step, matrix_size(total), offset, total.device)
    # Not `ops.round_to`, which waits for the device to check for NaN. Here NaN and Inf pass; the optimizer checks for them.
    rounded: Tensor = torch.ops.dither.round_to(
        total, "bf16", "stochastic(16)", False, draw.key, draw.step, draw.row, draw.column, "auto"
    )
    return rounded.to(torch.bfloat16)
