"""Optimizer states in host memory: the bits of resident ones, slots, the order of copies, and what is refused."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import TokenNet
from torch import Tensor, nn

import dither
from dither import UserError, checkpoint
from dither.nn import store_weights
from dither.optim import AdamMini, AdamW, Muon, Role, host_states, muon_groups, release_gradients
from dither.optim import states as optimizer_states
from dither.optim.batches import Arrangement
from dither.optim.host_states import CopyStream, HostStates, StatePart
from dither.spec.optimizer import SLOTS

STEPS = 6


def net(dtype: torch.dtype = torch.bfloat16) -> TokenNet:
    torch.manual_seed(0)
    return TokenNet(words=90, width=24, inner=40, blocks=2, tied=False).to(dtype)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 1,000 weights: the embedding has 2,160, a block 2,024."""
    monkeypatch.setattr(host_states, "STREAMED", 1000)


def loss_of(model: nn.Module, step: int, part: int = 0) -> Tensor:
    tokens = torch.randint(90, (20,), generator=torch.Generator().manual_seed(10 * step + part))
    found: Tensor = model(tokens, bool(step % 2))
    return found


def train(model: nn.Module, optimizer: AdamW, steps: range, passes: int = 1) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        for part in range(passes):
            (loss_of(model, step, part) / passes).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}:{key}": value.clone() for key, value in optimizer.state[p].items()}
    found |= {"steps": optimizer.steps.clone(), "skipped": optimizer.skipped.clone()}
    return found if optimizer.grad_norm is None else found | {"norm": optimizer.grad_norm.clone()}


def assert_same(one: tuple[nn.Module, AdamW], other: tuple[nn.Module, AdamW]) -> None:
    ours, theirs = everything(*one), everything(*other)
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


ROLES = {name: Role.whole() if p.dim() < 2 else Role.rows_each(2) for name, p in net().named_parameters()}

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {},
    "companded8": {"states": "companded8", "block": 16},
    "dynamic8": {"states": "dynamic8"},
    "dynamic4": {"states": "dynamic4", "block": 16},
    "e4m3 stochastic": {"states": "e4m3", "state_rounding": "stochastic"},
    "kahan": {"weights": "kahan"},
    "masters": {"master": "fp32", "states": "fp32"},
    "split masters": {"master": "split"},
    "24-bit masters": {"master": "split24", "states": "dynamic4", "block": 16},
    "Adam-mini": {"make": lambda model, **options: AdamMini(model.named_parameters(), ROLES, **options)},
    "Muon": {"make": lambda model, **options: Muon(muon_groups(model), **options), "states": "companded8", "block": 16},
}


def made(kind: str, states_on: str, **more: Any) -> tuple[TokenNet, AdamW]:
    options = {"lr": 1e-2, "nonfinite": "skip", **KINDS[kind], **more}
    make: Callable[..., AdamW] = options.pop("make", lambda model, **rest: AdamW(model.named_parameters(), **rest))
    model = net(options.pop("dtype", torch.bfloat16))
    return model, make(model, states_on=states_on, **options)


# Bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_resident_states_with_clipping_and_accumulation(kind: str) -> None:
    resident, host = (made(kind, where, max_norm=0.5) for where in ("device", "host"))
    for run in (resident, host):
        train(*run, range(STEPS), passes=2)
    assert_same(resident, host)
    assert int(host[1].state[host[0].sometimes]["step"]) == STEPS // 2


@pytest.mark.parametrize("kind", KINDS)
def test_bits_with_released_gradients(kind: str) -> None:
    runs = [made(kind, where, max_norm=0.5) for where in ("device", "host")]
    for run in runs:
        release_gradients(*run, clip_norm="previous")
        train(*run, range(STEPS))
    assert_same(*runs)


@pytest.mark.parametrize("kind", ["dynamic4", "Muon"])
def test_weights_that_exist_as_codes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scale is that of the whole matrix after the step: they are not divided."""
    monkeypatch.setattr(host_states, "STREAMED", 300)
    runs = []
    options = dict(KINDS[kind])
    make = options.pop("make", lambda model, **rest: AdamW(model.named_parameters(), **rest))
    for where in ("device", "host"):
        model = net(torch.float32)
        dither.convert(model, "fp8-current")
        store_weights(model, torch.float32)
        runs.append((model, make(model, lr=1e-2, states_on=where, **options)))
        for step in range(STEPS):
            with dither.step_context(model, step=step):
                loss_of(model, step).backward()
                runs[-1][1].step()
            runs[-1][1].zero_grad()
    packed = [checkpoint.pack(*run, step=STEPS)[0] for run in runs]
    assert set(packed[0]) == set(packed[1])
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in packed[0].values())
    for name, tensor in packed[0].items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), packed[1][name].reshape(-1).view(torch.uint8)), name


def test_steps_that_are_skipped() -> None:
    runs = [made("companded8", where) for where in ("device", "host")]
    for model, optimizer in runs:
        train(model, optimizer, range(2))
        before = copy.deepcopy(everything(model, optimizer))
        loss_of(model, 2).backward()
        model.head.weight.grad[3, 3] = torch.inf
        optimizer.step()
        optimizer.zero_grad()
        assert int(optimizer.skipped) == 1
        assert torch.equal(before["head.weight:exp_avg"], optimizer.state[model.head.weight]["exp_avg"])
        train(model, optimizer, range(3, STEPS))
    assert_same(*runs)


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize(("first", "then"), [("host", "device"), ("device", "host"), ("host", "host")])
@pytest.mark.parametrize("kind", ["bf16", "companded8", "dynamic4", "split masters", "Muon"])
def test_a_checkpoint_opens_with_either(kind: str, first: str, then: str) -> None:
    straight, saved, other = made(kind, "device"), made(kind, first), made(kind, then)
    train(*straight, range(STEPS))
    train(*saved, range(3))
    tensors, plain = copy.deepcopy(checkpoint.pack(*saved, step=3))
    assert "states_on" not in plain["optimizer"]["groups"][0]  # what is saved does not say where it was
    checkpoint.unpack(*other, tensors, plain)
    train(*other, range(3, STEPS))
    assert_same(straight, other)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_copies_of_the_optimizer(how: Callable[[Any], Any]) -> None:
    straight = made("dynamic8", "host")
    train(*straight, range(3))
    other = how(straight)
    assert other[1].states_on == "host"
    for run in (straight, other):
        train(*run, range(3, STEPS))
    assert_same(straight, other)


def cleared(model: TokenNet, optimizer: AdamW) -> None:
    optimizer.state.clear()


def replaced(model: TokenNet, optimizer: AdamW) -> None:
    state = optimizer.state[model.head.weight]
    state["exp_avg"] = state["exp_avg"].flip(0)


def written(model: TokenNet, optimizer: AdamW) -> None:
    optimizer.state[model.head.weight]["exp_avg_scale"].mul_(2)


def reformatted(model: TokenNet, optimizer: AdamW) -> None:
    for group in optimizer.param_groups:
        group["states"] = "bf16"


def reset(model: TokenNet, optimizer: AdamW) -> None:
    wide = optimizer.wide_weight(model.head.weight)
    optimizer.write_weight(model.head.weight, wide + 1, wide > 0)


def loaded(model: TokenNet, optimizer: AdamW) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def of_torch(model: TokenNet, optimizer: AdamW) -> None:
    optimizer.load_state_dict(copy.deepcopy(dither.optim.torch_state_dict(optimizer)))


def added(model: TokenNet, optimizer: AdamW) -> None:
    model.more = nn.Parameter(torch.ones(24, dtype=torch.bfloat16))
    model.layers[0].register_parameter("more", model.more)
    optimizer.add_param_group({"params": [("more", model.more)]})
    model.more.grad = torch.ones_like(model.more)


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("edit", [cleared, replaced, written, reformatted, reset, loaded, of_torch, added])
@pytest.mark.parametrize("kind", ["dynamic8", "24-bit masters"])
def test_edits_between_steps(kind: str, edit: Callable[[TokenNet, AdamW], None]) -> None:
    runs = [made(kind, where) for where in ("device", "host")]
    for model, optimizer in runs:
        train(model, optimizer, range(3))
        edit(model, optimizer)
        train(model, optimizer, range(3, STEPS))
    assert_same(*runs)


def test_states_that_are_replaced_are_freed() -> None:
    model, optimizer = made("dynamic8", "host")
    train(model, optimizer, range(2))
    old = weakref.ref(optimizer.state[model.layers[0].up.weight]["exp_avg"])
    loaded(model, optimizer)
    gc.collect()
    assert old() is None


# Slots and the order of copies ----------------------------------------------------------------------------------------


class LateStream(CopyStream):
    """Copies as late as the order of streams allows: what nothing waits for is never copied."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.queue: list[Callable[[], None]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.queue[self.done - 1]()

    def copy(self, targets: Any, sources: Any) -> None:
        self.queue.append(lambda: CopyStream.copy(self, targets, sources))

    def mark(self) -> Any:
        return self, len(self.queue)

    def follow(self, mark: Any) -> None:
        if mark is not None:
            self.queue.append(lambda: mark[0].run(mark[1]))

    def lead(self, mark: Any) -> None:
        self.run(mark[1])

    def wait(self) -> None:
        self.run(len(self.queue))


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(
    ("kind", "streamed", "slots"), [("companded8", 1000, SLOTS), ("masters", 1000, SLOTS), ("Muon", 300, 2)]
)
def test_bits_if_copies_are_late(kind: str, streamed: int, slots: int, released: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "CopyStream", LateStream)
    monkeypatch.setattr(host_states, "STREAMED", streamed)
    resident, host = (made(kind, where) for where in ("device", "host"))
    for run in (resident, host):
        if released:
            release_gradients(*run)
        train(*run, range(STEPS))
    late = {key: state["exp_avg"].clone() for key, state in host[1]._states.items()}
    assert any(not torch.equal(late[key], state["exp_avg"]) for key, state in host[1].state.items())  # which has waited
    assert host[1]._host is not None
    assert len(host[1]._host.slots) == slots
    assert_same(resident, host)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record ("in" or "out", first address in host memory) of each group that is copied."""
    found: list[tuple[str, int]] = []
    streams: list[CopyStream] = []

    class Recorded(CopyStream):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            streams.append(self)

        def copy(self, targets: Any, sources: Any) -> None:
            into = streams.index(self) % 2 == 0
            found.append(("in", sources[0].data_ptr()) if into else ("out", targets[0].data_ptr()))
            super().copy(targets, sources)

    monkeypatch.setattr(host_states, "CopyStream", Recorded)
    return found


@pytest.mark.parametrize("released", [False, True])
def test_the_next_groups_are_copied_before_this_one_goes_back(released: bool, copies: list[tuple[str, int]]) -> None:
    model, optimizer = made("bf16", "host")
    if released:
        release_gradients(model, optimizer)
    train(model, optimizer, range(0, 4, 2))  # without the parameter of odd steps
    del copies[:]
    train(model, optimizer, range(4, 5))
    ins = [place for place, (way, _) in enumerate(copies) if way == "in"]
    first = [copies[place][1] for place in ins]
    assert len(first) == len(set(first)) > 6
    assert first == [address for way, address in copies if way == "out"]
    # in 0 to in 4, out 0, in 5, out 1 ...: four groups are on their way while one is updated.
    assert ins == [*range(5), *range(6, 2 * len(first) - 4, 2)]
    # A step with other groups copies each once, and at most four ahead in vain.
    del copies[:]
    train(model, optimizer, range(5, 6))
    ways = [way for way, _ in copies]
    assert len(first) < ways.count("out") <= ways.count("in") <= ways.count("out") + 4


def test_what_was_copied_ahead_in_vain_is_copied_again() -> None:
    """A group that followed in the last step and did not in this one may have been edited before the next."""
    streams, cpu = HostStates(), torch.device("cpu")
    states = {name: [{"exp_avg": torch.ones(4)}] for name in "abc"}
    parts = [StatePart(0, None)]
    for step in ("abc", "ab", "c"):
        streams.begin()
        if step == "c":
            states["c"][0]["exp_avg"].fill_(7)
        for name in step:
            with streams.lent(name, parts, states[name], cpu) as loan:
                loan.states[0]["exp_avg"].add_(1)
    assert [float(states[name][0]["exp_avg"][0]) for name in "abc"] == [3, 3, 8]


def test_weights_are_written_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters of resets lie in host memory: what was written to a copy on the device goes there."""
    runs = [made("24-bit masters", where) for where in ("device", "host")]
    train(*runs[0], range(2))
    reset(*runs[0])
    train(*runs[1], range(2))
    monkeypatch.setattr(optimizer_states, "on_device", lambda value, device: value.clone() if value.dim() else value)
    reset(*runs[1])
    assert_same(*runs)


def test_slots_of_the_largest_group() -> None:
    model, optimizer = made("companded8", "host", block=128)
    train(model, optimizer, range(2))
    assert optimizer._host is not None
    slots = optimizer._host.slots
    # A matrix of 40 x 24 and its bias: codes and scales, twice, and two float32 moments; each tensor begins at 512 bytes.
    largest = 2 * (1024 + 512) + 2 * 512
    assert [slot.numel() for slot in slots] == [largest] * SLOTS
    before = [slot.data_ptr() for slot in slots]
    train(model, optimizer, range(2, 4))
    assert [slot.data_ptr() for slot in optimizer._host.slots] == before


def test_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made("bf16", "host")
    groups = HostStates().groups(optimizer.members())
    names = [[optimizer.members()[part.position].name for part in group] for group in groups]
    rows = [part.rows for group in groups for part in group if optimizer.members()[part.position].name == "embedding.weight"]
    assert rows == [slice(0, 32), slice(32, 64), slice(64, 90)]
    sizes = [sum(p.numel() for name, p in model.named_parameters() if name in group) for group in names]
    assert all(len(group) == 1 or size <= 1000 for group, size in zip(names, sizes, strict=True))
    assert [name for group in names for name in dict.fromkeys(group)].count("head.weight") == 3
    # What is orthogonalized or shares second moments is whole.
    monkeypatch.setattr(host_states, "STREAMED", 300)
    for kind in ("Muon", "Adam-mini"):
        _, other = made(kind, "host")
        members = [member for member in other.members() if member.muon or member.role is not None]
        assert all(part.rows is None for group in HostStates().groups(members) for part in group)


def test_states_are_read_on_the_device() -> None:
    """`moments` and `wide_weight` have the numbers of resident states."""
    runs = [made("24-bit masters", where) for where in ("device", "host")]
    for run in runs:
        train(*run, range(3))
    (model, resident), (other, host) = runs
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(resident.wide_weight(p), host.wide_weight(q))
        if resident.state[p]:
            assert torch.equal(resident.moments(p).v, host.moments(q).v)


# Refusals -------------------------------------------------------------------------------------------------------------


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"states_on='cpu' is unknown: choose from 'device', 'host'"):
        made("bf16", "cpu")
    model = net()
    with pytest.raises(UserError, match="states_on is an option of the whole optimizer"):
        AdamW([{"params": list(model.parameters()), "states_on": "host"}])
    with pytest.raises(UserError, match="use states_on='host'"):
        dither.optim.AdamW8bit(model.parameters(), is_paged=True)
    monkeypatch.setattr(host_states, "available_memory", lambda: 2000)
    model, optimizer = made("bf16", "host")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserError, match=r"need 0\.0 GiB of host memory, and 0\.0 GiB are available: use states of fewer bits"):
        train(model, optimizer, range(1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    release_gradients(model, optimizer)
    model.zero_grad()
    with pytest.raises(UserError, match="of host memory"):
        train(model, optimizer, range(1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_memory_of_this_machine() -> None:
    found = host_states.available_memory()
    assert found is None or 2**20 < found < 2**50


def test_an_update_that_fails_leaves_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step whose third group fails, the states of the first two are new, and the others those of before."""
    model, optimizer = made("bf16", "host")
    train(model, optimizer, range(2))
    before = {p: state["exp_avg"].clone() for p, state in optimizer.state.items()}
    update, calls = Arrangement.update, []

    def fails(*arguments: Any) -> None:
        update(*arguments)
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("broken")

    follows: list[CopyStream | None] = []
    monkeypatch.setattr(Arrangement, "update", fails)
    monkeypatch.setattr(CopyStream, "follow", lambda self, other: follows.append(other))
    with pytest.raises(RuntimeError, match="broken"):
        train(model, optimizer, range(2, 3))
    monkeypatch.undo()
    moved = [name for name, p in model.named_parameters() if not torch.equal(before[p], optimizer.state[p]["exp_avg"])]
    assert moved == ["embedding.weight"]
    assert torch.equal(before[model.embedding.weight][64:], optimizer.state[model.embedding.weight]["exp_avg"][64:])
    assert follows.count(None) == 3  # later copies wait for the update that failed, too
    optimizer.zero_grad()
    train(model, optimizer, range(2, 4))
