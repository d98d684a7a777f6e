"""States of other libraries and of earlier versions: torch's AdamW, bitsandbytes' 8-bit AdamW, and Dither's own of before."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_torch_optim import MAKERS, every, parameters, train
from torch import Tensor, nn

from dither import UserError
from dither.optim import AdamMini, AdamW, AdamW8bit, Role, bitsandbytes_state_dict, torch_state_dict

FIXTURES = Path(__file__).parent / "fixtures"


STEP = 0.9 / 64
"""The largest distance between neighbours of the dynamic map, as a share of a block's largest magnitude."""


def read(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(FIXTURES / name, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def copied(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in params.items()}


# torch ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"maximize": True}, {"lr": torch.tensor(1e-2)}], ids=str)
def test_a_state_of_torch_goes_on(options: dict[str, Any]) -> None:
    """Three steps by torch, three by Dither, and three by torch again are nine by torch, to the last bits of float32."""
    params = parameters()
    options = {"lr": 1e-2, **options}
    theirs = torch.optim.AdamW(params.values(), **options)
    train(params.values(), theirs, range(3))
    straight, mine = copied(params), copied(params)
    whole = torch.optim.AdamW(straight.values(), **options)
    whole.load_state_dict(copy.deepcopy(theirs.state_dict()))  # torch shares counts of steps with what it loads
    train(straight.values(), whole, range(3, 9))

    ours = AdamW(mine.values(), lr=0.5)
    saved = theirs.state_dict()
    held = copy.deepcopy(saved)
    ours.load_state_dict(saved)
    torch.testing.assert_close(saved["state"], held["state"], rtol=0, atol=0)
    assert (int(ours.steps), ours.param_groups[0]["lr"]) == (3, float(options["lr"]))
    assert set(ours.param_groups[0]) == set(AdamW(mine.values()).param_groups[0])  # torch's own options are left out
    train(mine.values(), ours, range(3, 6))
    back = torch.optim.AdamW(mine.values(), lr=0.1)
    back.load_state_dict(torch_state_dict(ours))
    train(mine.values(), back, range(6, 9))
    for name, p in straight.items():
        torch.testing.assert_close(mine[name], p, rtol=1e-6, atol=1e-6)
        assert back.state[mine[name]]["step"] == 9


@every
def test_every_format_takes_a_state_of_torch(make: Any) -> None:
    """Moments are rounded to nearest once; masters are those of the weights when the next step comes."""
    params = parameters(torch.bfloat16)
    theirs = torch.optim.AdamW(params.values(), lr=1e-2)
    train(params.values(), theirs, range(3))
    ours = make(params.items(), master="fp32")
    ours.load_state_dict(theirs.state_dict())
    params["matrix"].data.mul_(2)
    ours.state_dict()  # brings states to their formats
    for member in ours.members():
        moments = ours.moments(member.parameter)
        expected = theirs.state[member.parameter]
        assert int(moments.step) == 3
        bound = {"bf16": 2**-8, "fp32": 0.0}.get(member.update.states, 0.04) * expected["exp_avg"].float().abs().max()
        assert (moments.m - expected["exp_avg"].float()).abs().max() <= bound
        second = expected["exp_avg_sq"].float()
        if make is MAKERS["mini"]:
            torch.testing.assert_close(moments.v, second.mean().expand_as(moments.v))
        else:
            assert (moments.v - second).abs().max() <= 0.04 * second.abs().max()
        assert torch.equal(ours.state[member.parameter]["master"].view(member.parameter.shape), member.parameter.float())
    train(params.values(), ours, range(3, 4))


@every
def test_every_format_goes_back_to_torch(make: Any) -> None:
    params = parameters(torch.bfloat16)
    ours = make(params.items(), lr=1e-2)
    train(params.values(), ours, range(3))
    saved = torch_state_dict(ours)
    theirs = torch.optim.AdamW(params.items())
    theirs.load_state_dict(saved)
    assert theirs.param_groups[0]["betas"] == (0.9, 0.999)
    again = make(params.items())
    again.load_state_dict(saved)
    for member in ours.members():
        if member.update.in_blocks:  # but for a block's largest number if it is negative: the map has 1, and no -1
            before, after = ours.moments(member.parameter), again.moments(member.parameter)
            for expected, found in ((before.m, after.m), (before.v, after.v)):
                assert (found - expected).abs().max() <= STEP / 2 * 1.001 * expected.abs().max()
            continue
        for key, value in ours.state[member.parameter].items():
            assert torch.equal(again.state[member.parameter][key], value), key  # what a format holds it takes back as it was
    train(params.values(), theirs, range(3, 4))


def test_a_transposed_role_goes_to_torch_and_back() -> None:
    net = nn.Linear(6, 4, bias=False)
    roles = {"weight": Role.rows_each(2, transposed=True)}
    ours = AdamMini(net.named_parameters(), roles, lr=1e-2)
    train(net.parameters(), ours, range(2))
    state, saved = ours.state[net.weight], torch_state_dict(ours)
    assert torch.equal(saved["state"][0]["exp_avg"], state["exp_avg"].t())
    assert torch.equal(saved["state"][0]["exp_avg_sq"], state["exp_avg_sq"].repeat_interleave(2).expand(4, 6))
    again = AdamMini(net.named_parameters(), roles)
    again.load_state_dict(saved)
    assert all(torch.equal(again.state[net.weight][key], state[key]) for key in state)


def test_states_of_others_that_are_refused() -> None:
    params = parameters()
    theirs = torch.optim.AdamW(params.values(), amsgrad=True)
    train(params.values(), theirs, range(1))
    ours = AdamW(params.values())
    with pytest.raises(UserError, match="saved with amsgrad=True"):
        ours.load_state_dict(theirs.state_dict())
    adam = torch.optim.Adam(params.values(), weight_decay=0.1)
    train(params.values(), adam, range(1))
    with pytest.raises(UserError, match=r"saved by Adam with weight_decay=0\.1, which went into the gradients"):
        ours.load_state_dict(adam.state_dict())
    plain = torch.optim.Adam(params.values())  # without decay there is no difference
    train(params.values(), plain, range(1))
    ours.load_state_dict(plain.state_dict())
    sgd = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    train(params.values(), sgd, range(1))
    with pytest.raises(UserError, match="has momentum_buffer, which is neither torch's AdamW's"):
        ours.load_state_dict(sgd.state_dict())
    with pytest.raises(UserError, match=r"moments of torch.float32 \(10, 32\), and the parameter is \(10,\)"):
        AdamW(list(params.values())[::-1][1:2] + list(params.values())[:1] + list(params.values())[2:]).load_state_dict(
            plain.state_dict()
        )
    assert int(ours.steps) == 1


# bitsandbytes ---------------------------------------------------------------------------------------------------------


def bitsandbytes_fixture(wrapped: bool) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """(state_dict, weights before the fourth step, weights after it), as its version 0.50.2 made them on a CPU."""
    tensors, metadata = read("bitsandbytes-0.50.2.safetensors")
    state: dict[int, dict[str, Any]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "state":
            index, key = rest.split("/")
            state.setdefault(int(index), {})[key] = int(value) if key == "step" else value
    if wrapped:
        state = {i: {"step": s.pop("step"), "__bnb_optimizer_quant_state__": s} for i, s in state.items()}
    weights = [{name: tensors[f"{when}/{name}"] for name in ("wide", "odd", "small")} for when in ("before", "after")]
    return {"state": state, "param_groups": json.loads(metadata["groups"])}, *weights


def fourth_step(params: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(1003)
    for p in params.values():
        p.grad = torch.randint(-127, 128, p.shape, generator=generator) / 16
    optimizer.step()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_of_bitsandbytes_goes_on(wrapped: bool) -> None:
    """The fourth step from its third state is its own, where moments are kept as they were decoded."""
    saved, before, after = bitsandbytes_fixture(wrapped)
    params = copied(before)
    optimizer = AdamW(params.values(), states="fp32", lr=0.5)
    optimizer.load_state_dict(saved)
    assert (int(optimizer.steps), optimizer.param_groups[0]["betas"]) == (3, (0.9, 0.99))
    assert "alpha" not in optimizer.param_groups[0]
    fourth_step(params, optimizer)
    for name, expected in after.items():
        assert not torch.equal(before[name], expected)
        torch.testing.assert_close(params[name].detach(), expected, rtol=2**-22, atol=2e-7)  # two roundings


def test_codes_of_bitsandbytes_stay_as_they_are() -> None:
    """Blocks of 256 in rows of whole blocks are the same here and there, and go back bit for bit; others are rounded anew."""
    saved, before, after = bitsandbytes_fixture(False)
    params = copied(before)
    optimizer = AdamW8bit(params.values(), lr=0.5)
    optimizer.load_state_dict(saved)
    theirs = saved["state"][0]
    state = optimizer.state[params["wide"]]
    assert torch.equal(state["exp_avg"], theirs["state1"])
    assert torch.equal(state["exp_avg_sq_scale"].flatten(), theirs["absmax2"])
    back = bitsandbytes_state_dict(optimizer)
    assert set(back["state"][0]) == set(theirs)
    assert back["param_groups"][0].items() >= {"lr": 0.01, "betas": (0.9, 0.99), "alpha": 0.0, "params": [0, 1, 2]}.items()
    for key, value in theirs.items():
        if isinstance(value, Tensor) and key.startswith("qmap"):
            torch.testing.assert_close(back["state"][0][key], value, rtol=1e-6, atol=0)
        else:
            assert back["state"][0][key] == value if key == "step" else torch.equal(back["state"][0][key], value), key
    assert all(torch.equal(back["state"][2][key], saved["state"][2][key]) for key in ("state1", "state2"))

    # Rounded once more each way: half a step of the map a time.
    plain = AdamW(params.values(), states="fp32")
    for source, bound in ((optimizer, STEP), (plain, STEP / 2)):
        if source is plain:
            plain.load_state_dict(saved)
        found = bitsandbytes_state_dict(source)
        other = AdamW(params.values(), states="fp32")
        other.load_state_dict(found)
        plain.load_state_dict(saved)
        for key in ("exp_avg", "exp_avg_sq"):
            expected, got = plain.state[params["odd"]][key], other.state[params["odd"]][key]
            assert (got - expected).abs().max() <= bound * 1.001 * expected.abs().max()
    fourth_step(params, optimizer)
    torch.testing.assert_close(params["wide"].detach(), after["wide"], rtol=2**-22, atol=2e-7)  # two roundings


def test_bitsandbytes_itself_goes_on() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    saved, before, after = bitsandbytes_fixture(False)
    params = copied(before)
    ours = AdamW8bit(params.values(), lr=0.5)
    ours.load_state_dict(saved)
    theirs = bitsandbytes.optim.AdamW8bit(params.values(), lr=0.5)
    theirs.load_state_dict(bitsandbytes_state_dict(ours))
    fourth_step(params, theirs)
    for name in ("wide", "small"):
        torch.testing.assert_close(params[name].detach(), after[name], rtol=2**-22, atol=2e-7)  # two roundings


def test_states_of_bitsandbytes_that_are_refused() -> None:
    saved, before, _ = bitsandbytes_fixture(False)
    params = copied(before)
    optimizer = AdamW(params.values())
    first = saved["state"][0]
    for change, words in (
        ({"absmax1": torch.ones(2)}, "2 scales for 4096 codes: only blocks of 256"),
        ({"qmap1": None}, "codes of 8 bits in state1 without qmap1 and absmax1"),
        ({"state1": torch.zeros(3)}, r"moments of torch.float32 \(3,\)"),
    ):
        with pytest.raises(UserError, match=words):
            optimizer.load_state_dict({**saved, "state": {**saved["state"], 0: {**first, **change}}})
    maximizing = AdamW(params.values(), maximize=True)
    with pytest.raises(UserError, match="no maximize=True"):
        bitsandbytes_state_dict(maximizing)
