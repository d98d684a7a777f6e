"""The ideas of PyTorch's own optimizer tests (test/test_optim.py), on Dither's optimizers, with torch.optim.AdamW as oracle.

docs/optimizers.md has the table: which of them hold, which are refused, and why.
"""

import copy
import inspect
import io
import math
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dither
from dither import UserError
from dither.optim import AdamMini, AdamW, AdamW8bit, Role

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


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


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
    """Groups with their own rates and decays, a parameter that has no gradient at times."""
    results = []
    for optimizer_class in (AdamW, torch.optim.AdamW):
        generator = torch.Generator().manual_seed(0)
        params = {
            name: (
                torch.randn(*shape, 2, generator=generator)[..., 0]
                if noncontiguous
                else torch.randn(shape, generator=generator)
            )
            for name, shape in SHAPES.items()
        }
        params = {name: p.detach().requires_grad_() for name, p in params.items()}
        groups = [
            {"params": [params["matrix"]], "lr": 1e-2},
            {"params": [params["bias"], params["scalar"]], "weight_decay": 0.5, "betas": (0.8, 0.9), "eps": 1e-6},
        ]
        optimizer = optimizer_class(groups, lr=3e-3, maximize=maximize)
        for step in range(30):
            backward(params.values(), step)
            if step % 3 == 1:
                params["bias"].grad = None
            optimizer.step()
        results.append(params)
        assert "maximize" in repr(optimizer)
    for name in SHAPES:
        assert results[0][name].is_contiguous() == results[1][name].is_contiguous()
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-5, atol=1e-6)


@every
@pytest.mark.parametrize("maximize", [False, True])
def test_goes_in_the_right_direction(make: Callable[..., AdamW], maximize: bool) -> None:
    params = parameters()
    optimizer = make(params.items(), lr=1e-2, maximize=maximize)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = sum((p - 1).square().sum() for p in params.values())
        value.backward()
        return value

    first = optimizer.step(loss).item()
    for _ in range(9):
        optimizer.step(loss)
    assert (loss().item() > first) == maximize


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
    "step": lambda o: schedules.StepLR(o, step_size=3, gamma=0.5),
    "linear": lambda o: schedules.LinearLR(o, total_iters=5),
    "exponential": lambda o: schedules.ExponentialLR(o, gamma=0.9),
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
    """Rates and betas of one element, filled in place between steps, are what numbers would be."""
    runs = []
    for tensors in (False, True):
        params = parameters(torch.bfloat16)
        lr, beta = (torch.tensor(x, dtype=torch.float64).reshape(shape) for x in (1e-2, 0.9))
        optimizer = make(params.items(), lr=lr if tensors else 1e-2, betas=(beta, beta) if tensors else (0.9, 0.9))
        train(params.values(), optimizer, range(2))
        lr.fill_(3e-3)
        beta.fill_(0.8)
        if not tensors:
            optimizer.param_groups[0].update(lr=3e-3, betas=(0.8, 0.8))
        train(params.values(), optimizer, range(2, 4))
        runs.append(numbers(params, optimizer))
    assert same(*runs)


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
        for key, value in (("betas", (0.9, 1.0)), ("betas", (0.9,)), ("eps", 0.0), ("weight_decay", -1.0), ("maximize", 3)):
            held = optimizer.param_groups[0][key]
            optimizer.param_groups[0][key] = value
            with pytest.raises(UserError, match=key):
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


def test_several_dtypes_in_one_group() -> None:
    """Each as in an optimizer of its own."""
    together, apart = (
        {
            f"{name} {dtype}": p
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for name, p in parameters(dtype).items()
        }
        for _ in range(2)
    )
    train(together.values(), AdamW(together.items(), lr=1e-2), range(3))
    optimizers = [AdamW([item], lr=1e-2) for item in apart.items()]
    for step in range(3):
        backward(apart.values(), step)
        for optimizer in optimizers:
            optimizer.step()
    assert same([p.detach() for p in together.values()], [p.detach() for p in apart.values()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_dtypes_that_are_refused(dtype: torch.dtype) -> None:
    p = torch.zeros(3, dtype=dtype, requires_grad=dtype != torch.int32)
    with pytest.raises(UserError, match=rf"float32, bfloat16 or float16, and the parameter 'w' is {dtype}"):
        AdamW([("w", p)])


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


@pytest.mark.parametrize(
    ("name", "named"), [(name, named) for name in MAKERS for named in (False, True) if named or name != "mini"]
)
def test_states_go_on_where_they_were(name: str, named: bool) -> None:
    """Through torch.save with weights_only; a state is deterministic, loading does not change it, and copies are equal.

    Adam-mini takes named parameters only.
    """
    make = MAKERS[name]
    runs = []
    for halted in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = make(params.items() if named else params.values(), lr=1e-2)
        train(params.values(), optimizer, range(3))
        if halted:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            held = copy.deepcopy(saved)
            params = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
            optimizer = make(params.items() if named else params.values(), lr=0.5)
            optimizer.load_state_dict(saved)
            for found in (saved, optimizer.state_dict()):
                torch.testing.assert_close(found["state"], held["state"], rtol=0, atol=0)
                assert found["param_groups"] == held["param_groups"]
        train(params.values(), optimizer, range(3, 6))
        runs.append(numbers(params, optimizer))
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
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_all_that_is_public(make: Callable[..., AdamW], how: str) -> None:
    params = parameters(torch.bfloat16)
    optimizer = make(params.items(), lr=1e-2, max_norm=1.0)
    train(params.values(), optimizer, range(2))
    held = (params, optimizer)
    others, again = copy.deepcopy(held) if how == "deepcopy" else pickle.loads(pickle.dumps(held))
    public = [{key for key in each.__dict__ if not key.startswith("_")} for each in (optimizer, again)]
    assert public[0] == public[1]
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
    ("options", "words"),
    [
        ({"amsgrad": True}, r"amsgrad=True keeps .*: use torch\.optim\.AdamW"),
        ({"differentiable": True}, r"differentiable=True needs .*: use torch\.optim\.AdamW"),
        ({"foreach": True, "fused": True}, "two implementations"),
        ({"fused": "yes"}, "fused is True, False or None, not 'yes'"),
        ({"maximize": 1}, "maximize is True or False, not 1"),
        ({"capturable": True, "nonfinite": "raise"}, "use nonfinite='skip'"),
        ({"betas": (0.9, torch.ones(2))}, r"A beta is one number, not a tensor of shape \(2,\)"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_that_would_lie(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        AdamW(parameters().values(), **options)


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
    with pytest.raises(UserError, match=r"got one tensor: pass \[tensor\]"):
        AdamW(a)
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


def test_a_compiled_step() -> None:
    runs = []
    for compiled in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = AdamW(params.values(), lr=1e-2)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(3):
            backward(params.values(), number)
            step()
        runs.append(numbers(params, optimizer))
    assert same(*runs)
    assert dither.optim.AdamW.step.hooked
