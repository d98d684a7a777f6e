"""What may be done to an optimizer between two steps: states, groups and parameters edited, named, moved, replaced."""

from typing import Any

import pytest
import torch
from test_torch_optim import MAKERS, backward, every, numbers, parameters, same, train
from torch import Tensor, nn

from dither import UserError
from dither.optim import AdamMini, AdamW, Role

# State ----------------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("how", ["clear", "replace", "delete"])
def test_a_state_that_is_cleared_begins_anew(make: Any, how: str) -> None:
    """As an optimizer that is made then, but for the optimizer's own count of steps, which chooses random bits."""
    params = parameters(torch.bfloat16)
    optimizer = make(params.items(), lr=1e-2)
    train(params.values(), optimizer, range(3))
    others = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    fresh = make(others.items(), lr=1e-2)
    fresh.steps += 3
    if how == "clear":
        optimizer.state.clear()
    elif how == "replace":
        optimizer.state = type(optimizer.state)(dict)
    else:
        for p in params.values():
            del optimizer.state[p]
    train(params.values(), optimizer, range(3, 5))
    train(others.values(), fresh, range(3, 5))
    assert same(numbers(params, optimizer), numbers(others, fresh))
    assert [int(optimizer.state[p]["step"]) for p in params.values()] == [2, 2, 2]
    assert int(optimizer.steps) == 5


@every
@pytest.mark.parametrize("how", ["tensor", "data", "in place", "dictionary"])
def test_tensors_of_a_state_that_are_replaced(make: Any, how: str) -> None:
    """A moment of zeros and another count, however they come there, are what the next step starts from."""
    runs = []
    for edit in (how, "in place"):
        params = parameters(torch.bfloat16)
        optimizer = make(params.items(), lr=1e-2)
        train(params.values(), optimizer, range(2))
        state = optimizer.state[params["bias"]]
        zeros, count = torch.zeros_like(state["exp_avg"]), torch.tensor(7)
        if edit == "tensor":
            state["exp_avg"], state["step"] = zeros, 7
        elif edit == "data":
            state["exp_avg"].data, state["step"].data = zeros, count
        elif edit == "dictionary":
            optimizer.state[params["bias"]] = {**state, "exp_avg": zeros, "step": count.float()}
        else:
            state["exp_avg"].zero_()
            state["step"].fill_(7)
        train(params.values(), optimizer, range(2, 4))
        assert int(optimizer.state[params["bias"]]["step"]) == 9
        runs.append(numbers(params, optimizer))
        saved = optimizer.state_dict()["state"][1]
        assert all(torch.equal(saved[key], value) for key, value in optimizer.state[params["bias"]].items())
    assert same(*runs)


def test_states_that_cannot_be() -> None:
    p = nn.Parameter(torch.zeros(4, 8))
    optimizer = AdamW([("w", p)], lr=1e-2)
    train([p], optimizer, range(1))
    for state, words in (
        ({"exp_avg": torch.zeros(4, 8)}, "has exp_avg and no step"),
        ({"step": 1, "exp_avg": torch.zeros(4, 8)}, "'exp_avg_sq' of w is None"),
        (
            {"step": 1, "exp_avg": torch.zeros(3, 8), "exp_avg_sq": torch.zeros(3, 8)},
            r"torch.float32 \(3, 8\), and the parameter",
        ),
        ({"step": -1, "exp_avg": p.data, "exp_avg_sq": p.data}, "step=-1, which is not a number of steps"),
    ):
        optimizer.state[p] = state
        with pytest.raises(UserError, match=words):
            optimizer.step()
    del optimizer.state[p]
    optimizer.step()


@every
def test_batches_are_kept_while_nothing_changes(make: Any) -> None:
    """New gradients, rates and betas, values written in place, a save: none of them makes the host prepare anything anew."""
    params = parameters(torch.bfloat16)
    optimizer = make(params.items(), lr=1e-2)
    train(params.values(), optimizer, range(1))
    held = optimizer._batches.arranged[""]
    optimizer.param_groups[0].update(lr=1e-3, betas=(0.8, 0.9))
    optimizer.state[params["bias"]]["exp_avg"].zero_()
    params["bias"].data.zero_()
    optimizer.state_dict()
    train(params.values(), optimizer, range(1, 3))
    assert optimizer._batches.arranged[""] is held
    optimizer.state[params["bias"]]["exp_avg"] = torch.zeros_like(optimizer.state[params["bias"]]["exp_avg"])
    train(params.values(), optimizer, range(3, 4))
    assert optimizer._batches.arranged[""] is not held


# Parameters -----------------------------------------------------------------------------------------------------------


@every
def test_a_parameter_that_is_replaced_takes_its_place(make: Any) -> None:
    """The old one no longer moves; the new one has its name, and a state of its own from its first step on."""
    params = parameters(torch.bfloat16)
    optimizer = make(params.items(), lr=1e-2)
    train(params.values(), optimizer, range(2))
    old, new = params["matrix"], torch.ones_like(params["matrix"]).requires_grad_()
    held = old.detach().clone()
    optimizer.param_groups[0]["params"][0] = new
    params["matrix"] = new
    backward([old, *params.values()], 2)
    optimizer.step()
    assert torch.equal(old, held)
    assert not torch.equal(new, torch.ones_like(new))
    assert int(optimizer.state[new]["step"]) == 1
    assert set(optimizer.state_dict()["state"]) == {0, 1, 2}  # the old one's is nobody's any more


@every
def test_parameters_that_are_removed_or_change_their_group(make: Any) -> None:
    """What is left goes on as it would have: names, not places, choose the bits of named parameters."""
    runs = []
    for edited in (False, True):
        params = parameters(torch.bfloat16)
        named = list(params.items())
        optimizer = make([{"params": named[:2]}, {"params": named[2:], "lr": 1e-2}], lr=1e-2)
        train(params.values(), optimizer, range(2))
        if edited:
            for key in ("params", "param_names"):
                optimizer.param_groups[0][key].pop(0)
                optimizer.param_groups[1][key].append(optimizer.param_groups[0][key].pop(0))
            optimizer.param_groups.pop(0)
        train([params["bias"], params["scalar"]], optimizer, range(2, 4))
        kept = {name: params[name] for name in ("bias", "scalar")}
        runs.append(numbers(kept, optimizer))
    assert same(*runs)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UserError, match="1 parameters and 2 names: change its 'params' and 'param_names' together"):
        optimizer.step()


@every
def test_data_that_is_swapped(make: Any) -> None:
    """The weights of another tensor, of other strides, under the same parameter."""
    runs = []
    for swapped in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = make(params.items(), lr=1e-2)
        train(params.values(), optimizer, range(2))
        start = torch.linspace(-1, 1, 320).reshape(10, 32).bfloat16()
        if swapped:
            params["matrix"].data = start.t().contiguous().t()
        else:
            params["matrix"].data.copy_(start)
        train(params.values(), optimizer, range(2, 4))
        runs.append(numbers(params, optimizer))
    assert same(*runs)
    params["bias"].data = torch.zeros(11, dtype=torch.bfloat16)
    backward(params.values())
    with pytest.raises(
        UserError, match=r"'exp_avg' of bias .*\(10,\), and the parameter is torch.bfloat16 \(11,\)|does not fit"
    ):
        optimizer.step()


def test_a_gradient_of_what_a_parameter_was_before() -> None:
    p = nn.Parameter(torch.zeros(4, 8))
    optimizer = AdamW([("w", p)], lr=1e-2)
    backward([p])
    p.data = torch.zeros(3)
    with pytest.raises(UserError, match="gradient of w has 32 numbers and the parameter has 3"):
        optimizer.step()


# Groups ---------------------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"states": "fp32"}, {"states": "bf16"}),
    ({"states": "bf16"}, {"states": "fp32"}),
    ({"states": "dynamic8", "block": 16}, {"states": "fp32"}),
    ({"states": "fp32"}, {"states": "dynamic8", "block": 16}),
    ({"states": "dynamic8", "block": 32}, {"block": 16}),
    ({"states": "int8", "block": 16}, {"states": "e4m3"}),
    ({"weights": "nearest"}, {"weights": "stochastic"}),
    ({"weights": "stochastic"}, {"weights": "kahan"}),
    ({"weights": "kahan"}, {"weights": "nearest"}),
    ({"weights": "nearest"}, {"master": "fp32"}),
    ({"weights": "nearest", "master": "fp32"}, {"master": None}),
    ({"weights": "nearest", "master": "fp32"}, {"master": None, "weights": "kahan"}),
    ({}, {"seed": 5}),
    ({}, {"lr": 1e-3, "betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.5}),
    ({"states": "dynamic8", "block": 16}, {"min_8bit_size": 1000}),
]


@pytest.mark.parametrize(("first", "then"), OPTIONS, ids=str)
def test_options_that_change_take_effect(first: dict[str, Any], then: dict[str, Any]) -> None:
    """As an optimizer with the new options that is given the old one's moments, brought to their format.

    A save before the next step has the new format already, and resumes alike.
    """
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params.items(), lr=1e-2, **first)
    train(params.values(), optimizer, range(3))
    moments = {name: optimizer.moments(p) for name, p in params.items()}
    extras = {
        name: {k: optimizer.state[p][k] for k in ("master", "remainder") if k in optimizer.state[p]}
        for name, p in params.items()
    }
    others = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    fresh = AdamW(others.items(), **{"lr": 1e-2, **first, **then})
    fresh.steps += 3
    optimizer.param_groups[0].update(then)
    saved = optimizer.state_dict()
    for name, p in others.items():
        old = moments[name]
        fresh.state[p] = {"step": old.step.clone(), "exp_avg": old.m.clone(), "exp_avg_sq": old.v.clone(), **extras[name]}
    third = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    again = AdamW(third.items(), **{"lr": 1.0, **first, **then})
    again.load_state_dict(saved)
    for values, each in ((params, optimizer), (others, fresh), (third, again)):
        train(values.values(), each, range(3, 5))
    assert same(numbers(params, optimizer), numbers(others, fresh))
    assert same(numbers(params, optimizer), numbers(third, again))


def test_adam_mini_changes_its_format() -> None:
    params = parameters(torch.bfloat16)
    optimizer = MAKERS["mini"](params.items(), lr=1e-2)
    train(params.values(), optimizer, range(2))
    before = [(optimizer.state[p]["exp_avg"].float(), optimizer.state[p]["exp_avg_sq"].clone()) for p in params.values()]
    optimizer.param_groups[0]["states"] = "fp32"
    optimizer.state_dict()
    for p, (m, v) in zip(params.values(), before, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], m)
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], v)
    train(params.values(), optimizer, range(2, 3))
    assert optimizer.state[params["matrix"]]["exp_avg"].dtype == torch.float32


def test_a_group_that_comes_to_have_an_option_that_cannot_be() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params.values(), lr=1e-2)
    train(params.values(), optimizer, range(1))
    for key, value, words in (
        ("states", "e9m9", "no state format"),
        ("seed", -1, "seed is an integer"),
        ("master", 3, "master is"),
    ):
        held = optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = value
        with pytest.raises(UserError, match=words):
            optimizer.step()
        optimizer.param_groups[0][key] = held
    optimizer.step()


# Names ----------------------------------------------------------------------------------------------------------------


def twins(count: int = 4) -> list[Tensor]:
    """Tensors that only random bits can tell apart."""
    return [torch.ones(16, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]


def all_differ(params: list[Tensor]) -> bool:
    return all(not torch.equal(a, b) for i, a in enumerate(params) for b in params[:i])


def test_unnamed_parameters_never_draw_the_same_bits() -> None:
    """In one list, in groups as Hugging Face's Trainer makes them, and in a group that comes later."""
    params = twins()
    optimizer = AdamW([{"params": params[:2]}, {"params": params[2:3], "weight_decay": 1e-2}], lr=1e-4)
    optimizer.add_param_group({"params": params[3:]})
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all_differ(params)
    moments = [optimizer.state[p]["exp_avg"] for p in params]
    assert all_differ(moments)


def test_a_model_that_becomes_bfloat16_later() -> None:
    """Of unnamed float32 parameters, before or after the first step: moments become bfloat16 with it."""
    for steps in (0, 2):
        net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
        optimizer = AdamW(net.parameters(), lr=1e-4)
        for p in net.parameters():
            p.data.fill_(1.0)
        for step in range(steps + 1):
            if step == steps:
                net.bfloat16()
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert all_differ([p.detach() for p in net.parameters()])
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_names_that_are_given_later_are_those_given_at_once() -> None:
    runs = []
    for later in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(16, 16).bfloat16()
        optimizer = AdamW(net.parameters() if later else net.named_parameters(), lr=1e-2)
        if later:
            optimizer.name_parameters(net)
        optimizer.name_parameters(net.named_parameters())  # again: nothing to do
        train(net.parameters(), optimizer, range(2))
        optimizer.name_parameters(net)
        runs.append([p.detach().clone() for p in net.parameters()])
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    assert same(*runs)


def test_names_that_come_too_late_or_from_elsewhere() -> None:
    net = nn.Linear(16, 16).bfloat16()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(UserError, match=r"'group 0, parameter 0' of shape .* is not one of the model's"):
        optimizer.name_parameters(nn.Linear(16, 16))
    with pytest.raises(UserError, match="Two parameters are called 'w'"):
        optimizer.name_parameters([("w", p) for p in net.parameters()])
    assert "param_names" not in optimizer.param_groups[0]
    train(net.parameters(), optimizer, range(2))
    with pytest.raises(UserError, match="has taken 2 steps with other ones: name its parameters before the first step"):
        optimizer.name_parameters(net)
    plain = AdamW(net.parameters(), lr=1e-2, weights="nearest", state_rounding="nearest")
    train(net.parameters(), plain, range(1))
    plain.name_parameters(net)  # nothing is drawn


def test_a_resumed_run_has_the_names_that_it_had() -> None:
    """Unnamed goes on unnamed; names that were saved are taken over; a change of names is refused."""
    net = nn.Linear(16, 16).bfloat16()
    places, named = AdamW(net.parameters(), lr=1e-2), AdamW(net.named_parameters(), lr=1e-2)
    for optimizer in (places, named):
        train(net.parameters(), optimizer, range(1))
    with pytest.raises(
        UserError, match=r"random bits depend on their positions, and this optimizer has names: create it from model\.param"
    ):
        AdamW(net.named_parameters(), lr=1e-2).load_state_dict(places.state_dict())
    other = AdamW(net.parameters(), lr=1e-2)
    other.load_state_dict(named.state_dict())
    assert other.param_groups[0]["param_names"] == ["weight", "bias"]
    assert [member.name for member in other.members()] == ["weight", "bias"]


def test_adam_mini_takes_names() -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"Adam-mini finds roles by name: pass model\.named_parameters\(\)"):
        AdamMini(net.parameters(), {"weight": Role.whole(), "bias": Role.whole()})
