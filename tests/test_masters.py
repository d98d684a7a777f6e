"""Masters that are split into bfloat16 weights and more bits: lossless in 16 bits, 24-bit numbers in 8, converted both ways."""

import copy

import pytest
import torch
from torch import Tensor, nn

import dither
from dither.errors import UserError
from dither.ops.reference import adamw
from dither.optim import AdamMini, AdamW, Role


def hard_masters() -> Tensor:
    """Random bits, every tie of some exponents with both signs, subnormal numbers, zeros, the largest numbers, Inf, NaN."""
    anything = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 16,), generator=torch.Generator().manual_seed(0))
    ties = (torch.arange(0x3F00, 0x4100) << 16) + 0x8000
    near = torch.cat([ties - 1, ties + 1])
    special = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
    positive = torch.cat([ties, near, special])
    bits = torch.cat([anything, positive, positive - (1 << 31)])
    return bits.to(torch.int32).view(torch.float32)


def test_split_masters_are_lossless_and_weights_the_nearest() -> None:
    master = hard_masters()
    weight, low, tie = adamw.split(master)
    joined = adamw.join(weight, low, tie)
    nan = master.isnan()
    assert torch.equal(joined.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert joined[nan].isnan().all()
    assert torch.equal(weight[~nan].view(torch.int16), master[~nan].bfloat16().view(torch.int16))  # torch rounds to even
    assert tie.sum() > 500  # without them, 16 bits would not do


def test_masters_of_24_bits() -> None:
    master = hard_masters()
    usual = master.isfinite() & (master.abs() > 1e-30) & (master.abs() < 1e38)
    weight, low = adamw.split24(master)
    joined = adamw.join24(weight, low)
    assert ((joined - master).abs() / master.abs())[usual].max() <= 2.0**-16
    assert torch.equal(joined.view(torch.int32) & 0xFF, torch.zeros_like(joined, dtype=torch.int32))
    assert joined[master.isnan()].isnan().all()
    nearest = (joined - weight.float()).abs() <= (joined - joined.bfloat16().float()).abs()
    assert nearest[usual].all()
    again = adamw.split24(joined)
    assert torch.equal(again[0][usual], weight[usual])
    assert torch.equal(again[1][usual], low[usual])


# The optimizer --------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8)).to(torch.bfloat16)


def steps(net: nn.Module, optimizer: AdamW, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def wide(net: nn.Module, optimizer: AdamW) -> list[Tensor]:
    """Everything that the next step depends on: wide weights, moments, weights."""
    found = []
    for p in net.parameters():
        state = optimizer.state[p]
        found += [adamw.wide_weight(p.detach(), state), state["exp_avg"], state["exp_avg_sq"].abs(), p.detach().clone()]
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def make_ties(net: nn.Module, optimizer: AdamW) -> None:
    """Set every third float32 master half way between two bfloat16 numbers."""
    for p in net.parameters():
        bits = optimizer.state[p]["master"].view(torch.int32).view(-1)
        bits[::3] = (bits[::3] >> 16 << 16) + 0x8000
        p.data.copy_(optimizer.state[p]["master"])


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("lr", [1e-2, 0.0])
def test_split_masters_take_the_steps_of_float32_masters(states: str, lr: float) -> None:
    """Ties among them: with lr=0 they stay, and only the sign of the second moment tells which way they were rounded."""
    nets = model(), model()
    pair = [AdamW(n.named_parameters(), lr=lr, weight_decay=0.1, states=states, master="fp32") for n in nets]
    for net, optimizer in zip(nets, pair, strict=True):
        steps(net, optimizer, range(2))
        make_ties(net, optimizer)
    pair[1].param_groups[0]["master"] = "split"  # converted by the next step
    for number in range(2, 30):
        for net, optimizer in zip(nets, pair, strict=True):
            steps(net, optimizer, range(number, number + 1))
        assert same(wide(nets[0], pair[0]), wide(nets[1], pair[1])), number
    state = pair[1].state[nets[1][0].weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master_low"}
    assert state["master_low"].dtype == torch.int16
    if not lr:
        assert state["exp_avg_sq"].signbit().any()
    moments = dither.optim.torch_state_dict(pair[1])["state"][0]["exp_avg_sq"]
    assert torch.equal(moments, pair[0].state[nets[0][0].weight]["exp_avg_sq"].float())
    pair[1].param_groups[0]["master"] = "fp32"  # and back
    steps(nets[0], pair[0], range(30, 31))
    steps(nets[1], pair[1], range(30, 31))
    assert same(wide(nets[0], pair[0]), wide(nets[1], pair[1]))
    assert not pair[1].state[nets[1][0].weight]["exp_avg_sq"].signbit().any()


@pytest.mark.parametrize(("first", "then"), [("fp32", "split"), ("split", "fp32"), ("split", "split"), ("split24", "split24")])
def test_states_load_into_either_kind(first: str, then: str) -> None:
    """The state is loaded before the weights, as a checkpoint does it."""
    net, straight = model(), model()
    saved = AdamW(net.named_parameters(), lr=1e-2, states="fp32", master=first)
    steps(net, saved, range(3))
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(saved.state_dict())
    other = model()
    loaded = AdamW(other.named_parameters(), lr=1e-2, states="fp32", master=then)
    loaded.load_state_dict(state)
    other.load_state_dict(weights)
    steps(other, loaded, range(3, 6))
    one = AdamW(straight.named_parameters(), lr=1e-2, states="fp32", master=first)
    steps(straight, one, range(6))
    assert same(wide(straight, one), wide(other, loaded))
    assert loaded.state_dict()["param_groups"][0]["master"] == then


def test_kahan_and_24_bits_convert() -> None:
    net = model()
    optimizer = AdamW(net.named_parameters(), lr=1e-4, weights="kahan")
    steps(net, optimizer, range(5))
    before = adamw.wide_weight(net[0].weight.detach(), optimizer.state[net[0].weight])
    optimizer.param_groups[0].update(weights="nearest", master="split24")
    optimizer.state_dict()
    after = adamw.wide_weight(net[0].weight.detach(), optimizer.state[net[0].weight])
    assert (after - before).abs().max() <= 2.0**-16 * before.abs().max()
    assert optimizer.state[net[0].weight]["master_low"].dtype == torch.int8


def test_24_bits_keep_steps_that_bfloat16_loses() -> None:
    """Steps of 2^-12 of the weight: nearest loses all of them, 24 bits keep each to 2^-16."""
    ends = {}
    for name, options in {"nearest": {}, "split24": {"master": "split24"}}.items():
        w = nn.Parameter(torch.full((4, 64), 1.0, dtype=torch.bfloat16))
        optimizer = AdamW([("w", w)], lr=2.0**-12, weight_decay=0.0, weights="nearest", **options)
        for _ in range(64):
            w.grad = torch.ones_like(w)
            optimizer.step()
        ends[name] = w.detach().float()
    assert (ends["nearest"] == 1).all()
    assert torch.allclose(ends["split24"], torch.tensor(1 - 64 * 2.0**-12), atol=2.0**-8)


def test_what_cannot_be_split() -> None:
    w = [("w", nn.Parameter(torch.zeros(4, 64, dtype=torch.bfloat16)))]
    with pytest.raises(UserError, match="one bit in the sign of the second moment, which states='dynamic8'"):
        AdamW(w, master="split", states="dynamic8")
    with pytest.raises(UserError, match="Adam-mini shares second moments: use master='fp32' or 'split24'"):
        AdamMini(w, {"w": Role.rows_each(1)}, master="split")
    with pytest.raises(UserError, match=r"'w' is torch.float16: use master='fp32'"):
        AdamW([("w", nn.Parameter(torch.zeros(4, 64, dtype=torch.float16)))], master="split24")
    with pytest.raises(UserError, match="weights='kahan' keeps what a rounding loses, and so does master='split'"):
        AdamW(w, master="split", weights="kahan")
    with pytest.raises(UserError, match="saved with master='split', and this optimizer has master='split24'"):
        AdamW(w, master="split24").load_state_dict(AdamW(w, master="split").state_dict())


def test_modes_and_bytes() -> None:
    bytes_per_weight = {}
    for mode in ("o2", "o2-split", "bf16-kahan", "bf16-24"):
        net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.RMSNorm(64))
        run = dither.optim.training(net, mode, lr=1e-3)
        for p in net.parameters():
            p.grad = torch.ones_like(p, dtype=p.grad_dtype)
        run.optimizer.step()
        state = run.optimizer.state[net[0].weight]
        held = [net[0].weight.detach(), *(value for key, value in state.items() if key != "step")]
        bytes_per_weight[mode] = sum(t.nbytes for t in held) / net[0].weight.numel()
    assert bytes_per_weight == {"o2": 14, "o2-split": 12, "bf16-kahan": 8, "bf16-24": 7}
    assert set(run.optimizer.state[net[1].weight]) == {"step", "exp_avg", "exp_avg_sq", "master_low"}
