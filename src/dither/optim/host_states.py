"""Optimizer states in host memory, streamed through slots of device memory, one group of parameters at a time.

While one group is updated in its slot, the next ones are copied into others, and earlier ones back, on streams of their own:

    copies to the device   | a to slot 0 | b to slot 1 | c to slot 2 | ...
    updates                              | a           | b           | c
    copies to the host                                 | a           | b

A backward pass that updates (`release_gradients`) has the gradients of a whole block at once, several groups, and leaves its
products time for the copies of the next block: half of the slots are filled ahead, if the step has had the same groups as the
last one so far. Between steps, host memory has all states, and no slot has any. On a CPU the same copies are made, one after
the other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.ops.ranks import as_matrix, local
from dither.optim.groups import Member
from dither.optim.states import OWN, State, layout
from dither.spec.optimizer import SLOTS, STREAMED

ALIGNED = 512
"""Bytes that a tensor in a slot begins at a multiple of, as in torch's own allocations."""

TENSORS = tuple(key for key in OWN if key != "step")
"""The entries of a state that lie in host memory."""


class StatePart(NamedTuple):
    """A parameter of a group, or some of its rows."""

    position: int
    """The position of the parameter among those that are updated."""
    rows: slice | None
    """Rows of its local matrix; None for all of it."""

    def of(self, matrix: Tensor) -> Tensor:
        """Return the rows of a matrix of the parameter."""
        return matrix if self.rows is None else matrix[self.rows]


class CopyStream:
    """Copies in one direction, beside the work of the device: in a CUDA stream, or on a CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies, which the host does not wait for."""
        with torch.cuda.stream(self.stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def mark(self) -> "torch.cuda.Event | None":
        """Return the end of the copies so far."""
        return None if self.stream is None else self.stream.record_event()

    def follow(self, mark: "torch.cuda.Event | None") -> None:
        """Let later copies wait for a mark of another stream."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark)

    def follow_work(self) -> None:
        """Let later copies wait for the work of the current stream so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def lead(self, mark: "torch.cuda.Event | None") -> None:
        """Let later work of the current stream wait for the copies up to a mark."""
        if self.stream is not None and mark is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(mark)

    def use(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor, when it is freed, from other uses until the copies are done."""
        if self.stream is not None:
            tensor.record_stream(self.stream)

    def wait(self) -> None:
        """Let the host wait for the copies so far."""
        if self.stream is not None:
            self.stream.synchronize()


@dataclass
class Loan:
    """A group of states in host memory, and their places in a slot."""

    slot: int
    addresses: list[int]
    host: list[Tensor]
    device: list[Tensor]
    states: list[State]
    """The states as the update reads them: the tensors of the slot by their names."""
    arranged: Any = None
    """The `Arrangement` that updates them; None before the first update."""
    arrived: "torch.cuda.Event | None" = None
    """The end of the copies to the slot."""


class HostStates:
    """Keeps optimizer states in host memory, pinned if the parameters are on a GPU, and lends them to the device."""

    def __init__(self) -> None:
        self.slots: list[Tensor] = []
        """The buffers on the device, uint8."""
        self._most = SLOTS  # or two, if a group is larger than STREAMED
        self._left: dict[int, torch.cuda.Event | None] = {}  # the end of the last copies from each slot
        self._loans: dict[str, Loan] = {}
        self._order: list[str] = []  # the groups of this step, so far
        self._previous: list[str] = []  # those of the step before
        self._ahead: dict[int, Loan] = {}  # groups that were copied before they were asked for, by their place in the step
        self._streams: tuple[CopyStream, CopyStream] | None = None  # to the device and back; None before the first loan
        self._busy = False  # whether copies may be under way

    # Host memory ---------------------------------------------------------------------------------------------------------

    def keep(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of a state in host memory, pinned for `device` if that is a GPU: itself, if it is there already."""
        part = local(tensor)
        pins = device.type == "cuda"
        if part.device.type == "cpu" and part.is_pinned() == pins:
            return tensor
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=pins).copy_(part)
        if not isinstance(tensor, DTensor):
            return host
        # DTensor.from_local would move it to the device of the mesh.
        return DTensor(host, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def check(self, members: Sequence[Member]) -> None:
        """Raise if host memory is too small for the states of these parameters, which do not exist yet."""
        if not members:
            return
        needed, there = sum(map(_state_bytes, members)), available_memory()
        if there is not None and needed > there:
            raise UserError(
                f"The states of {len(members)} parameters need {needed / 2**30:.1f} GiB of host memory, and "
                f"{there / 2**30:.1f} GiB are available: use states of fewer bits, or states_on='device'."
            )

    def wait(self) -> None:
        """Wait until host memory has all states, so that they can be read and written there."""
        if self._busy and self._streams is not None:
            for stream in self._streams:
                stream.wait()
        self._busy = False

    def forget(self) -> None:
        """Forget all groups: states or parameters were replaced."""
        self.wait()
        self._loans, self._order, self._previous, self._ahead = {}, [], [], {}

    # Loans ---------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step."""
        self._previous, self._order, self._ahead = self._order, [], {}

    def groups(self, members: Sequence[Member]) -> list[list[StatePart]]:
        """Divide parameters into groups of neighbours with `STREAMED` weights at most.

        Parameters that ranks update together are in the same group on each of them, since whole parameters are counted.
        """
        found: list[list[StatePart]] = [[]]
        size = 0
        for position, member in enumerate(members):
            parts: list[slice | None] = [None]
            part = local(member.parameter)
            rows = part.numel() // max(part.shape[-1], 1) if part.dim() > 1 else 1
            divides = member.role is None and not member.muon and member.coded is None and part.numel() > STREAMED
            if divides and rows > 1:
                height = max(1, STREAMED // part.shape[-1])
                height -= height % 16 if height > 16 else 0  # parts of any dtype begin at multiples of 16 bytes
                parts = [slice(start, min(start + height, rows)) for start in range(0, rows, height)]
            elif part.numel() > STREAMED:
                self._most = 2
            for rows_of_part in parts:
                weights = member.parameter.numel() if len(parts) == 1 else STREAMED
                if found[-1] and size + weights > STREAMED:
                    found.append([])
                    size = 0
                found[-1].append(StatePart(position, rows_of_part))
                size += weights
        return [group for group in found if group]

    @contextmanager
    def lent(self, name: str, parts: Sequence[StatePart], states: Sequence[State], device: torch.device) -> Iterator[Loan]:
        """Lend the states of a group to the device inside the context, and copy them back after it.

        name: the name of the group, the same in each step.
        parts, states: the parts of parameters, and the whole state of each in host memory.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UserError("A step with states_on='host' copies states on other streams, and a CUDA graph cannot capture it.")
        loan = self._loan(name, parts, states, device)
        assert self._streams is not None
        into, back = self._streams
        place, self._busy = len(self._order), True
        if self._ahead.pop(place, None) is not loan:
            self._ahead = {}
            self._fetch(loan, back.mark())
        into.lead(loan.arrived)
        self._order.append(name)
        if self._previous[place : place + 1] == [name]:
            self._fetch_ahead(place)
        try:
            yield loan
        except BaseException:
            back.follow_work()  # also of an update that failed, since the slot is used again
            self._left[loan.slot] = back.mark()
            raise
        back.follow_work()
        back.copy(loan.host, loan.device)
        self._left[loan.slot] = back.mark()

    def _fetch_ahead(self, place: int) -> None:
        """Copy the groups that followed in the last step: those of half of the slots.

        Their slots are free after the last copies from there. These come after their own copies to the host in the last step,
        when they were in the same slots or earlier ones.
        """
        for at in range(place + 1, min(place + 1 + self._most // 2, len(self._previous))):
            following = self._loans.get(self._previous[at])
            if following is None or following.slot != at % self._most:
                break
            if at not in self._ahead:
                self._fetch(following, self._left.get(following.slot))
                self._ahead[at] = following

    def _fetch(self, loan: Loan, after: "torch.cuda.Event | None") -> None:
        """Copy a group to its slot after copies to the host, by which the slot is free and host memory up to date."""
        assert self._streams is not None
        into, _ = self._streams
        into.follow(after)
        into.copy(loan.device, loan.host)
        loan.arrived = into.mark()

    def _loan(self, name: str, parts: Sequence[StatePart], states: Sequence[State], device: torch.device) -> Loan:
        """Return the group's loan: that of the last step, unless a tensor or its slot has changed."""
        keys = [[key for key in TENSORS if key in state] for state in states]
        host = [
            part.of(as_matrix(tensor)) if part.rows is not None else tensor
            for part, state, names in zip(parts, states, keys, strict=True)
            for tensor in (local(state[key]) for key in names)
        ]
        addresses = [tensor.data_ptr() for tensor in host]
        slot, known = len(self._order) % self._most, self._loans.get(name)
        if known is not None and (known.slot, known.addresses) == (slot, addresses):
            return known
        self._previous = []  # this step differs from the last one: nothing is copied ahead
        ends: list[int] = [0]
        for tensor in host:
            ends.append(ends[-1] + -(-tensor.nbytes // ALIGNED) * ALIGNED)
        self._reserve(ends[-1], slot, device)
        there = [
            self.slots[slot][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(host, ends, strict=False)
        ]
        left = iter(there)
        lent = [{key: next(left) for key in names} for names in keys]
        self._loans[name] = Loan(slot, addresses, host, there, lent)
        return self._loans[name]

    def _reserve(self, size: int, slot: int, device: torch.device) -> None:
        """Make the slots up to number `slot`, and all of them large enough, on the device."""
        fits = bool(self.slots) and self.slots[0].numel() >= size and self.slots[0].device == device
        fits = fits and len(self.slots) <= self._most
        count = min(self._most, max(slot + 1, len(self.slots)))
        size = max(size, self.slots[0].numel() if self.slots else 0)
        if not fits:
            self.wait()
            self._loans, self._ahead, self._left = {}, {}, {}
            if not self.slots or self.slots[0].device != device:
                self._streams = CopyStream(device), CopyStream(device)
            self.slots = []  # freed before they are made anew
        assert self._streams is not None
        made = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count - len(self.slots))]
        self.slots += made
        for stream in self._streams if made else ():
            stream.follow_work()  # which may still use what was freed there
            for each in made:
                stream.use(each)


def _state_bytes(member: Member) -> int:
    return sum(dtype.itemsize * shape.numel() for dtype, shape in layout(member).values())


def available_memory() -> int | None:
    """Return the bytes of host memory that can be allocated: of the machine, and at most the limit of the container."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return found
    return min(found, int(limit)) if limit.isdigit() else found
