"""Optimizer states in pinned host memory: the bits of resident ones, the memory they leave, copies that nothing overtakes."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import Block
from torch import nn

from dither import UserError
from dither.optim import AdamMini, AdamW, Muon, Role, host_states, muon_groups, release_gradients
from dither.optim.batches import Arrangement
from dither.optim.host_states import CopyStream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 6
WIDTH = 1024


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 2 * WIDTH, bias=False, norm=True) for _ in range(4))).to("cuda", torch.bfloat16)


def roles(net: nn.Module) -> dict[str, Role]:
    return {name: Role.whole() if p.dim() < 2 else Role.rows_each(64) for name, p in net.named_parameters()}


KINDS: dict[str, Callable[..., AdamW]] = {
    "bf16": lambda net, **options: AdamW(net.named_parameters(), **options),
    "companded8": lambda net, **options: AdamW(net.named_parameters(), states="companded8", **options),
    "dynamic8": lambda net, **options: AdamW(net.named_parameters(), states="dynamic8", weights="kahan", **options),
    "dynamic4": lambda net, **options: AdamW(net.named_parameters(), states="dynamic4", **options),
    "masters": lambda net, **options: AdamW(net.named_parameters(), states="fp32", master="fp32", **options),
    "split masters": lambda net, **options: AdamW(net.named_parameters(), master="split", **options),
    "mini": lambda net, **options: AdamMini(net.named_parameters(), roles(net), **options),
    "Muon": lambda net, **options: Muon(muon_groups(net), states="companded8", **options),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a matrix: AdamW's are divided."""
    monkeypatch.setattr(host_states, "STREAMED", WIDTH * WIDTH)


def made(kind: str, states_on: str, *, released: bool = False, **options: Any) -> tuple[nn.Module, AdamW]:
    net = network()
    optimizer = KINDS[kind](net, lr=1e-2, nonfinite="skip", max_norm=1.0, states_on=states_on, **options)
    if released:
        release_gradients(net, optimizer, clip_norm="previous")
    return net, optimizer


def train(net: nn.Module, optimizer: AdamW, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(64, WIDTH, generator=generator).to("cuda", torch.bfloat16)
        net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: tuple[nn.Module, AdamW], other: tuple[nn.Module, AdamW]) -> None:
    for (name, p), q in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert torch.equal(p, q), name
        ours, theirs = one[1].state[p], other[1].state[q]
        assert set(ours) == set(theirs)
        assert all(torch.equal(value.cpu(), theirs[key].cpu()) for key, value in ours.items()), name


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_resident_states(kind: str, released: bool) -> None:
    resident, host = (made(kind, where, released=released) for where in ("device", "host"))
    for run in (resident, host):
        train(*run, range(STEPS))
    assert_same(resident, host)
    states = [value for state in host[1].state.values() for key, value in state.items() if key != "step"]
    assert all(value.device.type == "cpu" and value.is_pinned() for value in states)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("late", ["copies", "updates", "both"])
def test_nothing_overtakes(late: str, released: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, or updates, that take some milliseconds more: without each wait of a stream, bits would differ."""
    resident = made("companded8", "device", released=released)
    train(*resident, range(STEPS))
    copy, update = CopyStream.copy, Arrangement.update

    def late_copy(self: CopyStream, targets: Any, sources: Any) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(4_000_000)
        copy(self, targets, sources)

    def late_update(*arguments: Any) -> None:
        torch.cuda._sleep(4_000_000)
        update(*arguments)

    if late != "updates":
        monkeypatch.setattr(CopyStream, "copy", late_copy)
    if late != "copies":
        monkeypatch.setattr(Arrangement, "update", late_update)
    host = made("companded8", "host", released=released)
    train(*host, range(STEPS))
    assert_same(resident, host)


@pytest.mark.parametrize("kind", ["bf16", "dynamic4", "masters"])
def test_the_memory_of_states_is_free(kind: str) -> None:
    """All but the slots of it."""
    used = {}
    train(*made(kind, "device"), range(1))  # the workspaces of products
    for where in ("device", "host"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        net, optimizer = made(kind, where)
        train(net, optimizer, range(3))
        torch.cuda.synchronize()
        used[where] = torch.cuda.memory_allocated() - before
        slots = 0 if optimizer._host is None else sum(slot.nbytes for slot in optimizer._host.slots)
        states = sum(v.nbytes for state in optimizer.state.values() for key, v in state.items() if key != "step")
        del net, optimizer
    assert 0 < slots < states
    assert used["device"] - used["host"] == pytest.approx(states - slots, abs=1 << 20)


@pytest.fixture
def no_synchronisation() -> Iterator[Callable[[], None]]:
    """A function from whose call on a wait for the device is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("released", [False, True])
def test_a_step_waits_for_nothing(released: bool, no_synchronisation: Callable[[], None]) -> None:
    net, optimizer = made("companded8", "host", released=released)
    train(net, optimizer, range(2))
    x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    no_synchronisation()
    for _ in range(3):
        net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_cannot_be_captured() -> None:
    net, optimizer = made("bf16", "host")
    train(net, optimizer, range(2))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(UserError, match="a CUDA graph cannot capture it"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_compiled_blocks() -> None:
    runs = []
    for where in ("device", "host"):
        net, optimizer = made("companded8", where, released=True)
        for block in net:
            block.compile()
        train(net, optimizer, range(STEPS))
        runs.append((net, optimizer))
    assert_same(*runs)


def test_a_state_moves_between_memories() -> None:
    """Saved with states in host memory and loaded into resident ones, and the other way round."""
    straight = made("dynamic8", "device")
    train(*straight, range(STEPS))
    for first, then in (("host", "device"), ("device", "host")):
        net, optimizer = made("dynamic8", first)
        train(net, optimizer, range(3))
        other, again = made("dynamic8", then)
        other.load_state_dict(net.state_dict())
        again.load_state_dict(optimizer.state_dict())
        held = [value for state in again.state.values() for key, value in state.items() if key != "step"]
        assert all(value.is_pinned() == (then == "host") for value in held)
        train(other, again, range(3, STEPS))
        assert_same(straight, (other, again))
