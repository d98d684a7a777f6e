"""Optimizers of parameters that are spread over processes (DTensor): the same bits as in one process, however they are cut."""

import copy
from collections.abc import Callable, Iterable, Mapping
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import on_ranks

from dither import UserError
from dither.ops import ranks
from dither.ops.ranks import reduce_shards, shards
from dither.optim import AdamMini, AdamW, Muon, NonFiniteError, Role, host_states, muon_groups

# One body for every cut -----------------------------------------------------------------------------------------------

STEPS = 2
SHAPES = {"matrix": (10, 383), "norm": (10,), "experts": (2, 6, 383), "few": (2, 383)}
"""2, 3, 4 and 8 ranks cut 383 columns at multiples of 16, the width of blocks, and the last part is shorter."""
ROLES = {"matrix": Role.rows_each(5), "norm": Role.whole(), "experts": Role.rows_each(4), "few": Role.whole()}

KINDS: dict[str, dict[str, object]] = {
    "bf16 stochastic": {"dtype": torch.bfloat16},
    "kahan": {"dtype": torch.bfloat16, "weights": "kahan", "states": "bf16"},
    "masters": {"dtype": torch.bfloat16, "master": "fp32", "states": "fp32"},
    "split masters": {"dtype": torch.bfloat16, "master": "split", "states": "fp32"},
    "24-bit masters": {"dtype": torch.bfloat16, "master": "split24", "states": "dynamic4", "block": 16},
    "dynamic8": {"dtype": torch.bfloat16, "states": "dynamic8", "block": 16},
    "e4m3 stochastic": {"dtype": torch.float32, "states": "e4m3", "state_rounding": "stochastic", "block": 16},
    "error feedback": {"dtype": torch.bfloat16, "error_feedback": True},
    "Adam-mini": {"dtype": torch.bfloat16, "mini": True},
    "Muon": {"dtype": torch.bfloat16, "muon": True},
    "Muon in 8 bits": {"dtype": torch.bfloat16, "muon": True, "states": "companded8", "block": 16, "master": "split24"},
}


CUTS = ("rows", "columns", "inner columns", "replicated")
ALL = dict.fromkeys(KINDS, CUTS)
FEW = {
    "error feedback": ("rows", "replicated"),
    "24-bit masters": ("columns", "rows"),
    "e4m3 stochastic": ("inner columns", "columns"),
    "Adam-mini": ("columns", "inner columns"),
    "Muon": ("rows", "inner columns"),
}
"""Cuts of the ordinary tests: every way to round, masters, states in blocks, and sums over ranks, each cut with two of them."""


def make(named: dict[str, Tensor], kind: dict[str, object], **more: object) -> AdamW:
    options = {key: value for key, value in kind.items() if key not in ("dtype", "mini", "muon")} | more
    if "muon" in kind:
        matrices = {name: tensor for name, tensor in named.items() if tensor.dim() > 1}
        rest = [(name, tensor) for name, tensor in named.items() if name not in matrices]
        groups = [{"params": list(matrices.items())}, {"params": rest, "use_muon": False}]
        return Muon(groups, lr=1e-2, **options)
    return AdamMini(named.items(), ROLES, lr=1e-2, **options) if "mini" in kind else AdamW(named.items(), lr=1e-2, **options)


def start(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradient(name: str, step: int, dtype: torch.dtype) -> Tensor:
    """Multiples of 2^-4 below 4: their squares add up exactly, in any order."""
    generator = torch.Generator().manual_seed(100 * step + list(SHAPES).index(name))
    return (torch.randint(-63, 64, SHAPES[name], generator=generator) / 16).to(dtype)


def run(kind: dict[str, object], cut: Callable[[str, Tensor], Tensor], **more: object) -> tuple[dict[str, Tensor], AdamW]:
    """Weights and optimizer after some steps, of parameters and gradients that `cut` spreads."""
    dtype = kind["dtype"]
    parameters = {name: nn.Parameter(cut(name, tensor)) for name, tensor in start(dtype).items()}
    optimizer = make(parameters, kind, **more)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = None if name == "few" and step == 1 else cut(name, gradient(name, step, dtype))
        optimizer.step()
    return parameters, optimizer


def full(x: Tensor) -> Tensor:
    x = x.int() if x.dtype == torch.int16 else x  # which no backend gathers
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def assert_same(whole: tuple[dict[str, Tensor], AdamW], cut: tuple[dict[str, Tensor], AdamW], context: object = None) -> None:
    """Weights and states of two runs, bit for bit."""
    for name, expected in whole[0].items():
        assert torch.equal(full(cut[0][name]), full(expected)), (context, name)
        theirs = cut[1].state[cut[0][name]]
        for key, state in whole[1].state[expected].items():
            assert torch.equal(full(theirs[key]), full(state)), (context, name, key)
    assert int(whole[1].steps) == int(cut[1].steps)


def distribute(x: Tensor, mesh: DeviceMesh, where: list[Placement]) -> DTensor:
    return distribute_tensor(x, mesh, where, src_data_rank=None)


def check_cuts(mesh: DeviceMesh, cases: Mapping[str, Iterable[str]], **more: object) -> None:
    """By rows, by columns, in the middle: uneven shards, and empty ones (two rows over three processes)."""
    for label, cuts in cases.items():
        kind = KINDS[label]
        whole = run(kind, lambda _, x: x.clone())
        for how in cuts:

            def cut(_: str, x: Tensor, how: str = how) -> Tensor:
                where = Replicate() if how == "replicated" else Shard(min(CUTS.index(how), x.dim() - 1))
                return distribute(x, mesh, [where])

            found = run(kind, cut, **more)
            assert_same(whole, found, (label, how))
            moment = found[1].state[found[0]["matrix"]]["exp_avg"]
            assert isinstance(moment, DTensor)
            assert moment.placements == found[0]["matrix"].placements


def pairs() -> DeviceMesh:
    """A group that is not the whole world: scales of blocks, and the sums of Adam-mini, are exchanged in it."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "within"))["within"]


@on_ranks(3)
def test_cuts() -> None:
    check_cuts(init_device_mesh("cpu", (3,)), FEW)


@on_ranks(4)
def test_cuts_in_pairs() -> None:
    check_cuts(pairs(), {"dynamic8": ("columns", "rows"), "Adam-mini": ("rows", "columns")})


@on_ranks(exhaustive=(4,))
def test_all_cuts_in_pairs() -> None:
    check_cuts(pairs(), ALL)


@on_ranks(exhaustive=(2, 3, 4, 8))
def test_all_cuts() -> None:
    check_cuts(init_device_mesh("cpu", (dist.get_world_size(),)), ALL)


@on_ranks(4)
def test_meshes() -> None:
    """Two dimensions of processes: rows and columns cut, one cut and copied over the other, and rows cut by both (FSDP, TP)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for label in ("bf16 stochastic", "Adam-mini", "Muon"):
        kind = KINDS[label]
        whole = run(kind, lambda _, x: x.clone(), max_norm=1.0)
        for pair in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(0)]):

            def where(x: Tensor, pair: list[Placement] = pair) -> list[Placement]:
                return [p if p.is_replicate() or p.dim < x.dim() else Shard(0) for p in pair]

            assert_same(whole, run(kind, lambda _, x, w=where: distribute(x, mesh, w(x)), max_norm=1.0), (label, pair))

    # Tensor parallelism cuts the rows first, and FSDP each of its parts: what a process holds lies together.
    x = torch.arange(16.0 * 8).reshape(16, 8)
    part = distribute(x, mesh["tensor"], [Shard(0)]).to_local().chunk(2)[mesh.get_local_rank("data")]
    piece = DTensor.from_local(part, mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False)
    (found,) = shards(piece)
    assert torch.equal(part, x[found.row : found.row + 4])
    total = part.double().square().sum()
    reduce_shards(total, piece)
    assert total == x.double().square().sum()


@on_ranks(3, exhaustive=(2, 4, 8))
def test_clipping() -> None:
    """The norm over all shards clips as in one process; a replicated parameter counts once."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kind = KINDS["bf16 stochastic"]
    whole = run(kind, lambda _, x: x.clone(), max_norm=2.0)

    def mixed(name: str, x: Tensor) -> Tensor:
        return x.clone() if name == "norm" else distribute(x, mesh, [Replicate()] if name == "few" else [Shard(0)])

    cut = run(kind, mixed, max_norm=2.0)
    assert_same(whole, cut)
    assert whole[1].grad_norm is not None
    assert whole[1].grad_norm.item() > 2.0
    assert torch.equal(whole[1].grad_norm, cut[1].grad_norm)


@on_ranks(3)
def test_nonfinite() -> None:
    """One process has the NaN; all refuse, or skip, together."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for nonfinite in ("raise", "skip"):
        w = nn.Parameter(distribute(torch.ones(4, 8), mesh, [Shard(0)]))
        optimizer = AdamW([("w", w)], lr=1e-2, nonfinite=nonfinite)
        bad = torch.ones(4, 8)
        bad[3, 2] = torch.nan
        w.grad = distribute(bad, mesh, [Shard(0)])
        if nonfinite == "skip":
            optimizer.step()
            assert int(optimizer.skipped) == 1
        else:
            here = w.grad.to_local().isnan().any()
            with pytest.raises(NonFiniteError, match="gradient of w holds 1 NaN" if here else "another rank has a gradient"):
                optimizer.step()
        assert torch.equal(full(w), torch.ones(4, 8))
        assert int(optimizer.steps) == 0


@on_ranks(4)
def test_blocks() -> None:
    """128 columns over four processes are cut at 32, 64 and 96; 96 columns at 24, 48 and 72."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide, narrow = (nn.Parameter(distribute(torch.zeros(4, n, dtype=torch.bfloat16), mesh, [Shard(1)])) for n in (128, 96))
    with pytest.raises(UserError, match=r"'w' is sharded at columns \d+ to \d+, .*: use block=32, or shard at multiples of 64"):
        AdamW([("w", wide)], lr=1e-2, states="dynamic8", block=64)
    AdamW([("w", wide)], lr=1e-2, states="dynamic8", block=32)
    with pytest.raises(
        UserError, match=r"'w' is sharded at columns \d+ to \d+, inside a block of 32 .*: shard at multiples of 32"
    ):
        AdamW([("w", narrow)], lr=1e-2, states="dynamic8", block=32)
    with pytest.raises(UserError, match="min_8bit_size=385 gives fp32 moments"):
        AdamW([("w", narrow)], lr=1e-2, states="dynamic8", block=32, min_8bit_size=384)
    AdamW([("w", narrow)], lr=1e-2, states="dynamic8", block=32, min_8bit_size=385)


# FSDP2 and checkpoints ------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 17, bias=False), nn.ReLU(), nn.Linear(17, 5)).to(torch.bfloat16)


def backward(net: nn.Module, step: int) -> None:
    """Gradients that are the same in every process: FSDP averages them, here of equal numbers."""
    generator = torch.Generator().manual_seed(step)
    net(torch.randn(4, 12, generator=generator).to(torch.bfloat16)).float().square().sum().backward()


@on_ranks(2)
def test_states_in_host_memory() -> None:
    """In groups of 1,500 weights, of which a shard of the largest parameter has more: the bits of resident whole ones."""
    with mock.patch.object(host_states, "STREAMED", 1500):
        mesh = init_device_mesh("cpu", (2,))
        check_cuts(mesh, ALL, states_on="host")
        with mock.patch.object(Tensor, "is_pinned", return_value=True):  # so that each tensor is copied to host memory
            check_cuts(mesh, FEW, states_on="host")
    # Shards of 384 and 382 numbers: ranks divide parameters alike, though one rank's groups would have had room for more.
    named = {name: nn.Parameter(distribute(start(torch.bfloat16)[name], mesh, [Shard(-1)])) for name in ("few", "norm")}
    with mock.patch.object(host_states, "STREAMED", 388):
        groups = host_states.HostStates().groups(AdamW(named.items()).members())
    assert all(each == ranks.gather(groups)[0] for each in ranks.gather(groups))


@on_ranks(4)
def test_fsdp() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    def sharded() -> nn.Module:
        net = network()
        fully_shard(net[0])
        fully_shard(net)
        return net

    eight = {"states": "dynamic8", "block": 16, "weights": "kahan"}
    for options in ({}, eight, {**eight, "states_on": "host"}):
        single, net = network(), sharded()
        optimizers = [AdamW(n.named_parameters(), lr=1e-2, nonfinite="skip", **options) for n in (single, net)]
        for step in range(STEPS):
            for n, optimizer in zip((single, net), optimizers, strict=True):
                optimizer.zero_grad()
                backward(n, step)
                optimizer.step()
        for (name, expected), got in zip(single.named_parameters(), net.parameters(), strict=True):
            assert torch.equal(full(got), full(expected)), name

        # To a state by names and back, as torch's distributed checkpoints do; then both go on alike.
        for step in range(2):
            saved = copy.deepcopy(get_optimizer_state_dict(net, optimizers[1]))
            assert set(saved["state"]) == set(dict(net.named_parameters()))
            other = sharded()
            other.load_state_dict(net.state_dict())
            where = "host" if step else "device"  # a state opens in either memory
            again = AdamW(other.named_parameters(), lr=0.5, nonfinite="skip", **{**options, "states_on": where})
            set_optimizer_state_dict(other, again, saved)
            assert again.param_groups[0]["lr"] == 1e-2
            whole = {k: {n: full(t) for n, t in s.items()} for k, s in again.state_dict()["state"].items()}
            with pytest.raises(UserError, match=r"is one whole tensor .*: load it by .*set_optimizer_state_dict"):
                again.load_state_dict({**again.state_dict(), "state": whole})
            for n, optimizer in ((net, optimizers[1]), (other, again)):
                optimizer.zero_grad()
                backward(n, STEPS + step)
                optimizer.step()
            for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
                assert torch.equal(full(a), full(b)), (name, step)
                for key, state in optimizers[1].state[a].items():
                    assert torch.equal(full(state), full(again.state[b][key])), (name, key)


@on_ranks(2, 4)
def test_muon_under_fsdp() -> None:
    """Whole matrices are orthogonalized: the bits of one process, and of a state that is saved, loaded and used again."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    def network() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(12, 17), nn.ReLU(), nn.Linear(17, 16)).to(torch.bfloat16)

    nets = [network(), network(), network()]
    for net in nets[1:]:
        fully_shard(net[0])
        fully_shard(net)
    optimizers = [Muon(muon_groups(net), lr=1e-2, states="companded8", block=16, max_norm=1.0) for net in nets]

    def step(number: int, *which: int) -> None:
        for each in which:
            optimizers[each].zero_grad()
            backward(nets[each], number)
            optimizers[each].step()

    step(0, 0, 1)
    step(1, 0, 1)
    nets[2].load_state_dict(nets[1].state_dict())
    set_optimizer_state_dict(nets[2], optimizers[2], copy.deepcopy(get_optimizer_state_dict(nets[1], optimizers[1])))
    step(2, 0, 1, 2)
    for (name, expected), *others in zip(nets[0].named_parameters(), *(net.parameters() for net in nets[1:]), strict=True):
        for got in others:
            assert torch.equal(full(got), full(expected)), name
