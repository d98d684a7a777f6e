"""The ideas of PyTorch's own optimizer tests (test/test_optim.py), on Dither's optimizers, with torch.optim.AdamW as oracle."""

import copy
import inspect
import io
import json
import math
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny import same
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dither import UserError
from dither.optim import AdamMini, AdamW, AdamW8bit, Role, bitsandbytes_state_dict, torch_state_dict

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (10, 32), "bias": (10,), "scalar": ()}
ROLES = {name: Role.whole() for name in SHAPES}

MAKERS: dict[str, Callable[..., AdamW]] = {
    "fp32": lambda named, **options: AdamW(named, **options),
    "bf16": lambda named, **options: AdamW(named, states="bf16", **options),
    "8bit": lambda named, **options: AdamW8bit(named, block_size=16, **options),
    "mini": lambda named, **options: AdamMini(named, ROLES, **options),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in SHAPES.items()}


def copied(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in params.items()}


def backward(params: Iterable[Tensor], step: int = 0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(params: Iterable[Tensor], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(params, step)
        optimizer.step()


def numbers(params: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and states, copied."""
    states = [t for p in params.values() for t in optimizer.state[p].values()]
    return [t.detach().clone() for t in (*params.values(), *states)]


# In place of torch's --------------------------------------------------------------------------------------------------


def test_arguments_and_defaults_are_those_of_torch() -> None:
    """Each of torch's, at its place, with its default."""
    theirs = inspect.signature(torch.optim.AdamW).parameters
    for optimizer in (AdamW, AdamW8bit):
        ours = inspect.signature(optimizer).parameters
        for place, (name, parameter) in enumerate(theirs.items()):
            if name in ours:
                assert ours[name].default == parameter.default, name
                if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                    assert list(ours)[place] == name
            else:
                assert optimizer is AdamW8bit
                assert "options" in ours
    params = parameters()
    group = AdamW(params.values()).param_groups[0]
    expected = torch.optim.AdamW(params.values()).param_groups[0]
    for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
        assert group[key] == expected[key], key


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("noncontiguous", [False, True])
def test_a_run_is_that_of_torch(maximize: bool, noncontiguous: bool) -> None:
    """Groups with their own numbers, a changing rate; a parameter that has no gradient at times counts its own steps."""
    shapes = {**SHAPES, "experts": (3, 5, 11)}
    results = []
    for optimizer_class in (AdamW, torch.optim.AdamW):
        generator = torch.Generator().manual_seed(0)
        drawn = {name: torch.randn(*shape, 2, generator=generator)[..., 0] for name, shape in shapes.items()}
        params = {name: (p if noncontiguous else p.contiguous()).requires_grad_() for name, p in drawn.items()}
        groups = [
            {"params": [params["matrix"], params["experts"]], "lr": 1e-2},
            {"params": [params["bias"], params["scalar"]], "weight_decay": 0.5, "betas": (0.8, 0.9), "eps": 1e-6},
        ]
        optimizer = optimizer_class(groups, lr=3e-3, maximize=maximize)
        for step in range(30):
            optimizer.param_groups[0]["lr"] = 1e-2 * (0.5 + 0.5 * math.cos(step / 20))
            backward(params.values(), step)
            if step % 3 == 1:
                params["bias"].grad = None
            optimizer.step()
        results.append((params, optimizer.state))
        assert "maximize" in repr(optimizer)
    (ours, state), (theirs, torchs) = results
    for name, p in theirs.items():
        assert ours[name].is_contiguous() == p.is_contiguous()
        torch.testing.assert_close(ours[name], p, rtol=1e-5, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[ours[name]][key], torchs[p][key], rtol=1e-6, atol=1e-6)
        assert int(state[ours[name]]["step"]) == int(torchs[p]["step"]) == (20 if name == "bias" else 30)


@every
def test_maximize_is_the_negated_gradient(make: Callable[..., AdamW]) -> None:
    """Bit for bit, in a group of its own, and when a group is changed on the way."""
    runs = []
    for maximize in (True, False):
        params = parameters(torch.bfloat16)
        optimizer = make([{"params": params.items(), "maximize": maximize}], lr=1e-2)
        for step in range(4):
            backward(params.values(), step)
            if step == 2:
                optimizer.param_groups[0]["maximize"] = not maximize
            if not optimizer.param_groups[0]["maximize"]:
                for p in params.values():
                    p.grad.neg_()
            optimizer.step()
        runs.append(numbers(params, optimizer))
    assert same(*runs)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: schedules.CosineAnnealingLR(o, T_max=7),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=2),
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=1e-2, total_steps=20),
    "cyclic": lambda o: schedules.CyclicLR(o, base_lr=1e-4, max_lr=1e-2, step_size_up=3, cycle_momentum=True),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str, tensor: bool) -> None:
    """OneCycleLR and CyclicLR change betas too; a rate that is a tensor is filled in place."""
    results = []
    for optimizer_class in (AdamW, torch.optim.AdamW):
        params = parameters()
        lr = torch.tensor(1e-2) if tensor else 1e-2
        optimizer = optimizer_class(params.values(), lr=lr)
        scheduler = SCHEDULES[schedule](optimizer)
        for step in range(12):
            backward(params.values(), step)
            optimizer.step()
            scheduler.step(*([1.0] if schedule == "plateau" else []))
        results.append((params, optimizer.param_groups[0]))
    for name in SHAPES:
        torch.testing.assert_close(results[0][0][name], results[1][0][name], rtol=1e-5, atol=1e-6)
    assert results[0][1]["betas"] == results[1][1]["betas"]
    assert float(results[0][1]["lr"]) == float(results[1][1]["lr"])


@every
@pytest.mark.parametrize("shape", [(), (1,)])
def test_numbers_as_tensors(make: Callable[..., AdamW], shape: tuple[int, ...]) -> None:
    """Rates and betas of one element, filled in place between steps, are what numbers, or numpy's, would be."""
    runs = []
    for tensors in (False, True):
        params = parameters(torch.bfloat16)
        lr, beta = (torch.tensor(x, dtype=torch.float64).reshape(shape) for x in (2**-7, 0.9))
        optimizer = make(params.items(), lr=lr if tensors else np.float32(2**-7), betas=(beta, beta) if tensors else (0.9, 0.9))
        train(params.values(), optimizer, range(2))
        lr.fill_(3e-3)
        beta.fill_(0.8)
        if not tensors:
            optimizer.param_groups[0].update(lr=3e-3, betas=(0.8, 0.8))
        train(params.values(), optimizer, range(2, 4))
        runs.append(numbers(params, optimizer))
    assert same(*runs)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] is lr


def test_numbers_that_a_group_comes_to_have_are_checked() -> None:
    """At the next step, and nothing has changed then: negative, NaN, as a number or a tensor."""
    for tensor in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = AdamW(params.values(), lr=torch.tensor(1e-2) if tensor else 1e-2)
        train(params.values(), optimizer, range(2))
        before = numbers(params, optimizer)
        for value in (-1e-3, math.nan, math.inf):
            optimizer.param_groups[0]["lr"] = torch.tensor(value) if tensor else value
            with pytest.raises(UserError, match="learning rate is a number from 0 on"):
                optimizer.step()
            assert same(before, numbers(params, optimizer))
            with pytest.raises(UserError, match="learning rate is a number from 0 on"):
                AdamW(params.values(), lr=torch.tensor(value) if tensor else value)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        assert same([p.detach() for p in params.values()], before[: len(params)])
        for key, value, words in (
            ("betas", (0.9, 1.0), "betas"),
            ("betas", (0.9,), "betas"),
            ("eps", 0.0, "eps"),
            ("weight_decay", -1.0, "weight_decay"),
            ("maximize", 3, "maximize"),
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


# Gradients and states -------------------------------------------------------------------------------------------------


@every
def test_without_gradients_nothing_happens(make: Callable[..., AdamW]) -> None:
    params = parameters()
    optimizer = make(params.items(), lr=1e-2)
    before = [p.detach().clone() for p in params.values()]
    optimizer.step()
    assert not optimizer.state
    assert int(optimizer.steps) == 0
    assert same(before, [p.detach() for p in params.values()])
    backward(params.values())
    optimizer.zero_grad(set_to_none=False)  # zeros are gradients: without decay weights stay, and states are made
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert same(before, [p.detach() for p in params.values()])
    assert len(optimizer.state) == len(params)
    assert int(optimizer.steps) == 1


@every
def test_frozen_parameters_have_no_state(make: Callable[..., AdamW]) -> None:
    """As in torch: a state is made when the first gradient comes, and that is when its steps begin to count."""
    params = parameters(torch.bfloat16)
    params["matrix"].requires_grad_(False)
    optimizer = make(params.items(), lr=1e-2)
    trained = [params["bias"], params["scalar"]]
    train(trained, optimizer, range(2))
    assert set(optimizer.state) == set(trained)
    assert set(optimizer.state_dict()["state"]) == {1, 2}
    params["matrix"].requires_grad_()
    train(params.values(), optimizer, range(2, 3))
    assert [int(optimizer.state[p]["step"]) for p in params.values()] == [1, 3, 3]
    other = parameters(torch.bfloat16)
    again = make(other.items(), lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    assert [int(again.state[p]["step"]) for p in other.values()] == [1, 3, 3]


@every
def test_empty_parameters(make: Callable[..., AdamW]) -> None:
    params = {"matrix": torch.zeros(0, 32, requires_grad=True), "bias": torch.ones(10, requires_grad=True)}
    if make is MAKERS["mini"]:
        with pytest.raises(UserError, match="does not fit the parameter 'matrix', which has 0 rows"):
            make(params.items(), lr=1e-2)
        return
    optimizer = make(params.items(), lr=1e-2)
    train(params.values(), optimizer, range(2))
    assert (params["bias"] != 1).all()
    alone = make([("matrix", params["matrix"])], lr=1e-2)
    train([params["matrix"]], alone, range(2))
    assert int(alone.steps) == 2


def test_a_dtype_or_device_that_comes_later() -> None:
    net = nn.Linear(4, 4)
    optimizer = AdamW(net.parameters(), lr=1e-2)
    train(net.parameters(), optimizer, range(1))
    net.double()
    backward(net.parameters())
    with pytest.raises(UserError, match=r"'group 0, parameter 0' is torch\.float64"):
        optimizer.step()
    net.float()
    backward(net.parameters())
    optimizer.step()
    elsewhere = nn.Parameter(torch.zeros(3, device="meta"))
    mixed = AdamW([nn.Parameter(torch.zeros(3)), elsewhere])
    backward([mixed.param_groups[0]["params"][0]])
    elsewhere.grad = torch.zeros(3, device="meta")
    with pytest.raises(UserError, match="lie on one device, and these lie on cpu, meta"):
        mixed.step()


# Hooks ----------------------------------------------------------------------------------------------------------------


@every
def test_hooks_of_a_step(make: Callable[..., AdamW]) -> None:
    """Each once a step, in order; the first may change the arguments."""
    params = parameters()
    optimizer = make(params.items(), lr=1e-2)
    calls: list[str] = []
    heads = [
        register_optimizer_step_pre_hook(lambda o, args, kwargs: calls.append("global before")),
        register_optimizer_step_post_hook(lambda o, args, kwargs: calls.append("global after")),
        optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before")),
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("after")),
    ]
    for _ in range(2):
        optimizer.step(lambda: calls.append("closure"))
    assert calls == ["global before", "before", "closure", "after", "global after"] * 2
    for head in heads:
        head.remove()
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: seen.append(1)), {}))
    optimizer.step()
    assert (len(calls), seen) == (10, [1])


@every
def test_hooks_of_saving_and_loading(make: Callable[..., AdamW]) -> None:
    params = parameters()
    optimizer = make(params.items(), lr=1e-2)
    train(params.values(), optimizer, range(1))
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "note": "kept"})
    optimizer.register_state_dict_post_hook(lambda o, saved: calls.append(saved["note"]))
    saved = optimizer.state_dict()
    assert saved["note"] == "kept"

    def change(o: AdamW, given: dict[str, Any]) -> dict[str, Any]:
        calls.append("load")
        groups = [{**group, "lr": 0.5} for group in given["param_groups"]]
        return {**given, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_pre_hook(lambda o, given: calls.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(f"loaded {o.param_groups[0]['lr']}"))
    optimizer.load_state_dict(saved)
    assert calls == ["save", "kept", "first", "load", "loaded 0.5"]
    assert saved["param_groups"][0]["lr"] == 1e-2  # what was given is not changed


# Saving and loading ---------------------------------------------------------------------------------------------------


KINDS: dict[str, Callable[..., AdamW]] = {
    **MAKERS,
    "kahan": lambda named, **options: AdamW(named, weights="kahan", states="int8", block=16, **options),
    "e4m3": lambda named, **options: AdamW(named, states="e4m3", state_rounding="stochastic", block=32, **options),
    "master": lambda named, **options: AdamW(named, states="fp32", weights="nearest", master="fp32", **options),
    "split roles": lambda named, **options: AdamMini(
        named, {**ROLES, "matrix": Role(((20, 4), (0, 1)), transposed=True)}, master="fp32", **options
    ),
}


@pytest.mark.parametrize(("name", "named"), [*((name, True) for name in KINDS), ("bf16", False), ("8bit", False)])
def test_states_go_on_where_they_were(name: str, named: bool) -> None:
    """Through torch.save with weights_only; saving and loading change nothing, and what was loaded is a copy."""
    runs = []
    for halted in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = KINDS[name](params.items() if named else params.values(), lr=1e-2, max_norm=1.0)
        train(params.values(), optimizer, range(3))
        if halted:
            torch.save(optimizer.state_dict(), file := io.BytesIO())
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            held = copy.deepcopy(saved)
            params = copied(params)
            optimizer = KINDS[name](params.items() if named else params.values(), lr=0.5, max_norm=1.0)
            optimizer.load_state_dict(saved)
            again = optimizer.state_dict()
            torch.testing.assert_close(again["state"], held["state"], rtol=0, atol=0)
            assert again["param_groups"] == held["param_groups"]
        train(params.values(), optimizer, range(3, 6))
        runs.append(numbers(params, optimizer))
    torch.testing.assert_close(saved["state"], held["state"], rtol=0, atol=0)
    assert same(*runs)


@every
def test_states_of_other_forms(make: Callable[..., AdamW]) -> None:
    """Groups of an older version, which lack options; counts as plain numbers or float32; custom keys of a group."""
    params = parameters(torch.bfloat16)
    optimizer = make([{"params": params.items(), "mine": {"a": [1]}}], lr=1e-2)
    train(params.values(), optimizer, range(2))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["maximize"], group["min_8bit_size"]
    for number, state in saved["state"].items():
        state["step"] = [state["step"].item(), state["step"].float(), state["step"].reshape(1)][number]
    other = parameters(torch.bfloat16)
    again = make(other.items(), lr=0.1)
    again.load_state_dict(saved)
    assert again.param_groups[0]["mine"] == {"a": [1]}
    assert again.param_groups[0]["mine"] is not saved["param_groups"][0]["mine"]
    for p, q in zip(params.values(), other.values(), strict=True):
        q.data.copy_(p)
    train(params.values(), optimizer, range(2, 4))
    train(other.values(), again, range(2, 4))
    assert same(numbers(params, optimizer), numbers(other, again))
    for key, value, words in (
        ("step", 1.5, r"step=1\.5, which is not a number of steps"),
        ("ema", 1.0, "has ema, .*keeps exp_avg"),
    ):
        with pytest.raises(UserError, match=words):
            again.load_state_dict({**saved, "state": {**saved["state"], 0: {**saved["state"][0], key: value}}})


@every
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_have_all_that_is_public(make: Callable[..., AdamW], how: str) -> None:
    params = parameters(torch.bfloat16)
    optimizer = make(params.items(), lr=1e-2, max_norm=1.0, nonfinite="skip")
    train(params.values(), optimizer, range(2))
    held = (params, optimizer)
    if how == "save":
        torch.save(held, file := io.BytesIO())
        file.seek(0)
        others, again = torch.load(file, weights_only=False)
    else:
        others, again = copy.deepcopy(held) if how == "deepcopy" else pickle.loads(pickle.dumps(held))
    public = [{key for key in each.__dict__ if not key.startswith("_")} for each in (optimizer, again)]
    assert public[0] == public[1]
    assert (again.max_norm, again.nonfinite) == (1.0, "skip")
    train(params.values(), optimizer, range(2, 4))
    train(others.values(), again, range(2, 4))
    assert same(numbers(params, optimizer), numbers(others, again))


def test_a_state_that_cannot_be_changes_nothing() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params.items(), lr=1e-2)
    train(params.values(), optimizer, range(2))
    before, saved = numbers(params, optimizer), optimizer.state_dict()
    for change, words in (
        ({"lr": -1.0}, "learning rate"),
        ({"lr": math.nan}, "learning rate"),
        ({"betas": [0.9, 1.5]}, "betas"),
        ({"amsgrad": True}, "amsgrad=True"),
        ({"maximize": "yes"}, "maximize is True or False"),
        ({"states": "fp32"}, "states='fp32'"),
    ):
        bad = {**saved, "param_groups": [{**saved["param_groups"][0], **change}]}
        with pytest.raises(UserError, match=words):
            optimizer.load_state_dict(bad)
    assert same(before, numbers(params, optimizer))
    assert optimizer.param_groups[0]["lr"] == 1e-2


# Options of torch's ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}, {"capturable": True}, {"amsgrad": False}],
)
def test_choices_between_implementations_change_nothing(options: dict[str, Any]) -> None:
    runs = []
    for more in ({}, options):
        params = parameters(torch.bfloat16)
        optimizer = AdamW(params.values(), lr=1e-2, **more)
        assert optimizer.nonfinite == ("skip" if more.get("capturable") else "raise")
        train(params.values(), optimizer, range(3))
        runs.append(numbers(params, optimizer))
    assert same(*runs)


@pytest.mark.parametrize(
    "options", [{"amsgrad": True}, {"differentiable": True}, {"max_norm": 1.0}, {"nonfinite": "skip"}], ids=str
)
def test_options_of_a_group_that_would_lie(options: dict[str, Any]) -> None:
    key = next(iter(options))
    with pytest.raises(UserError, match=key):
        AdamW([{"params": parameters().values(), **options}])
    if key in ("amsgrad", "differentiable"):
        params = parameters()
        optimizer = AdamW(params.values())
        train(params.values(), optimizer, range(1))
        optimizer.param_groups[0].update(options)
        with pytest.raises(UserError, match=key):
            optimizer.step()


def test_lists_that_cannot_be() -> None:
    a, b = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    for given, words in (
        (a, r"got one tensor: pass \[tensor\]"),
        ([], "list of parameters is empty"),
        ([{"params": []}], "A parameter group is empty"),
        *(
            ([("w", torch.zeros(3, dtype=dtype))], rf"float32, bfloat16 or float16, and the parameter 'w' is {dtype}")
            for dtype in (torch.float64, torch.complex64, torch.int32)
        ),
    ):
        with pytest.raises(UserError, match=words):
            AdamW(given)
    with pytest.raises(UserError, match="same parameter twice"):
        AdamW([a, a])
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        AdamW([{"params": [a]}, {"params": [b, a]}])
    with pytest.raises(ValueError, match="with/without names"):
        AdamW([("a", a), b])
    with pytest.raises(ValueError, match="with/without names"):
        AdamW([{"params": [("a", a)]}, {"params": [b]}])
    with pytest.raises(TypeError, match="sets"):
        AdamW([{"params": {a, b}}])
    optimizer = AdamW([a, b])
    optimizer.param_groups[0]["params"].append(a)
    backward([a, b])
    with pytest.raises(UserError, match="'group 0, parameter 2' is the same tensor as 'group 0, parameter 0'"):
        optimizer.step()


def test_names_of_other_libraries() -> None:
    """`bf16_stochastic_round`, `AdamW8bit`, `block_size`: the same bits under torchao's and bitsandbytes' names."""

    def run(make: Callable[..., AdamW], **options: Any) -> list[Tensor]:
        params = parameters(torch.bfloat16)
        optimizer = make(params.values(), lr=1e-2, **options)
        train(params.values(), optimizer, range(3))
        return numbers(params, optimizer)

    for flag, weights in ((True, "stochastic"), (False, "nearest")):
        assert same(run(AdamW, bf16_stochastic_round=flag), run(AdamW, weights=weights))
        assert same(run(AdamW, bf16_stochastic_round=flag, weights=weights), run(AdamW, weights=weights))
    assert not same(run(AdamW, bf16_stochastic_round=True), run(AdamW, bf16_stochastic_round=False))
    eight = run(AdamW, states="dynamic8", block=16)
    assert same(run(AdamW8bit, block_size=16, optim_bits=8, is_paged=False), eight)
    assert same(run(AdamW8bit, block=16), eight)
    assert same(run(AdamW8bit), run(AdamW, states="dynamic8", block=256))
    assert same(run(AdamW8bit, min_8bit_size=4096), run(AdamW, states="fp32"))
    group = {"params": parameters(torch.bfloat16).values(), "bf16_stochastic_round": False}
    assert AdamW([group]).param_groups[0]["weights"] == "nearest"
    for make, options, words in (
        (AdamW, {"bf16_stochastic_round": False, "weights": "stochastic"}, "choose one of them"),
        (AdamW, {"bf16_stochastic_round": 1}, "bf16_stochastic_round is True or False, not 1"),
        (AdamW, {"bf16_stochastic_round": True, "master": "fp32"}, "master='fp32' keeps wider weights"),
        (AdamW, {"min_8bit_size": -1}, "min_8bit_size is a number of elements"),
        (AdamW8bit, {"states": "bf16"}, "use AdamW for states='bf16'"),
        (AdamW8bit, {"block_size": 64, "block": 32}, "two names of one option"),
        (AdamW8bit, {"is_paged": True}, "is_paged=True"),
        (AdamW8bit, {"optim_bits": 4}, "optim_bits is 8"),
        (AdamW8bit, {"amsgrad": True}, "amsgrad=True"),
    ):
        with pytest.raises(UserError, match=words):
            make(parameters().values(), **options)


# torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, of a loss
@every
def test_a_compiled_training_function(make: Callable[..., AdamW]) -> None:
    """The graph breaks at the step, which runs as it always does: with a schedule, hooks and states of any age."""
    runs = []
    for compiled in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = make(params.items(), lr=1e-2)
        schedule = schedules.StepLR(optimizer, step_size=1, gamma=0.5)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda o, args, kwargs, calls=calls: calls.append(1))

        def step(x: Tensor, params: dict[str, Tensor] = params, optimizer: AdamW = optimizer) -> Tensor:
            loss = (params["matrix"] @ x + params["bias"] * params["scalar"]).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = torch.compile(step, backend="eager") if compiled else step
        losses = []
        for number in range(3):
            losses.append(run(torch.full((32,), 1.0 + number, dtype=torch.bfloat16)))
            schedule.step()
        assert len(calls) == 3
        runs.append([*numbers(params, optimizer), *losses])
    assert same(*runs)


# State ----------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(cover=1)
@every
@pytest.mark.parametrize("how", ["clear", "replace", "delete"])
def test_a_state_that_is_cleared_begins_anew(make: Any, how: str) -> None:
    """As an optimizer that is made then, but for the optimizer's own count of steps, which chooses random bits."""
    params = parameters(torch.bfloat16)
    optimizer = make(params.items(), lr=1e-2)
    train(params.values(), optimizer, range(3))
    others = copied(params)
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


@pytest.mark.sampled(cover=1)
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
        ({"step": 1, "exp_avg": torch.zeros(3, 8), "exp_avg_sq": torch.zeros(3, 8)}, r"torch.float32 \(3, 8\)"),
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


# Groups ---------------------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"states": "fp32"}, {"states": "bf16"}),
    ({"states": "bf16"}, {"states": "fp32"}),
    ({"states": "dynamic8", "block": 16}, {"states": "fp32"}),
    ({"states": "fp32"}, {"states": "dynamic8", "block": 16}),
    ({"states": "dynamic8", "block": 32}, {"block": 16}),
    ({"states": "int8", "block": 16}, {"states": "e4m3"}),
    ({"states": "dynamic4", "block": 16}, {"states": "fp32"}),
    ({"states": "companded8", "block": 16}, {"states": "dynamic4", "block": 32}),
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


def test_a_gradient_of_what_a_parameter_was_before() -> None:
    p = nn.Parameter(torch.zeros(4, 8))
    optimizer = AdamW([("w", p)], lr=1e-2)
    backward([p])
    p.data = torch.zeros(3)
    with pytest.raises(UserError, match="gradient of w has 32 numbers and the parameter has 3"):
        optimizer.step()


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
    others = copied(params)
    fresh = AdamW(others.items(), **{"lr": 1e-2, **first, **then})
    fresh.steps += 3
    optimizer.param_groups[0].update(then)
    saved = optimizer.state_dict()
    for name, p in others.items():
        old = moments[name]
        fresh.state[p] = {"step": old.step.clone(), "exp_avg": old.m.clone(), "exp_avg_sq": old.v.clone(), **extras[name]}
    third = copied(params)
    again = AdamW(third.items(), **{"lr": 1.0, **first, **then})
    again.load_state_dict(saved)
    for values, each in ((params, optimizer), (others, fresh), (third, again)):
        train(values.values(), each, range(3, 5))
    assert same(numbers(params, optimizer), numbers(others, fresh))
    assert same(numbers(params, optimizer), numbers(third, again))


# Names ----------------------------------------------------------------------------------------------------------------


def twins(count: int = 4) -> list[Tensor]:
    """Tensors that only random bits can tell apart."""
    return [torch.ones(16, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]


def all_differ(params: list[Tensor]) -> bool:
    return all(not torch.equal(a, b) for i, a in enumerate(params) for b in params[:i])


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


# States of other libraries and of earlier versions ---------------------------------------------------------------------


FIXTURES = Path(__file__).parent / "fixtures"


STEP = 0.9 / 64
"""The largest distance between neighbours of the dynamic map, as a share of a block's largest magnitude."""


def read(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(FIXTURES / name, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


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
