"""Gradients released as they are used: the bits of the ordinary step, in units of a block, and what cannot go with it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dither
from dither.errors import UserError
from dither.optim import AdamW, NonFiniteError, Role, release_gradients, training
from dither.optim.released import unit_of
from dither.snip import Goal, Snip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied embedding, blocks, a head, and a parameter that only odd steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.sometimes = nn.Parameter(torch.ones(32))
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, odd: bool) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x * self.sometimes if odd else x).float(), tokens.flip(0))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(step: int) -> Tensor:
    return torch.randint(16, (20,), generator=torch.Generator().manual_seed(step))


def train(run: Any, steps: range) -> None:
    for step in steps:
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        with run.forward():
            loss = run.model(tokens(step), bool(step % 2))
        run.backward(loss)
        run.step()


def everything(run: Any) -> list[Tensor]:
    found = [p.detach().clone() for p in run.model.parameters()]
    for p in run.model.parameters():
        found += [value.clone() for _, value in sorted(run.optimizer.state[p].items())]
    return [*found, run.optimizer.steps.clone()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("bf16-sr", {}),
    ("bf16-sr", {"states": "companded8", "block": 16}),
    ("bf16-sr", {"gradients": "fp32", "nonfinite": "unchecked"}),
    ("bf16-kahan", {"gradients": "bf16-sr"}),
    ("o2-split", {}),
    ("o1", {}),
]


@pytest.mark.parametrize(("mode", "options"), KINDS, ids=str)
def test_the_bits_are_those_of_the_ordinary_step_and_after_a_resume(mode: str, options: dict[str, Any]) -> None:
    ordinary = training(net(), mode, lr=1e-2, **{"nonfinite": "skip", **options})
    train(ordinary, range(5))
    kept = {"nonfinite": "skip", **options}
    released = training(net(), mode, lr=1e-2, release=True, **kept)
    train(released, range(3))
    assert all(p.grad is None for p in released.model.parameters())
    weights, state = copy.deepcopy(released.model.state_dict()), copy.deepcopy(released.state_dict())
    train(released, range(3, 5))
    assert same(everything(ordinary), everything(released))
    other = net()
    resumed = training(other, mode, lr=1e-2, release=True, **kept)
    resumed.load_state_dict(state)
    other.load_state_dict(weights)
    train(resumed, range(3, 5))
    assert same(everything(ordinary), everything(resumed))
    assert int(ordinary.optimizer.state[ordinary.model.sometimes]["step"]) == 2


def test_adam_mini_and_graph_of_norms() -> None:
    """The norm is that of the ordinary step too, where it is computed."""
    roles = {name: Role.whole() if p.dim() < 2 else Role.rows_each(1) for name, p in net().named_parameters()}
    runs = [training(net(), "bf16-sr", lr=1e-2, roles=roles, release=release, nonfinite="skip") for release in (False, True)]
    for run in runs:
        train(run, range(3))
    assert same(everything(runs[0]), everything(runs[1]))
    torch.testing.assert_close(runs[0].optimizer.grad_norm, runs[1].optimizer.grad_norm, rtol=1e-6, atol=0)


def test_one_blocks_gradients_exist_at_a_time() -> None:
    model = net().to(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, nonfinite="unchecked")
    released = release_gradients(model, optimizer)
    assert sorted(released.units) == ["embedding.weight", "layers.0", "layers.1", "layers.2", "sometimes"]
    most, updates = 0, []
    begin = optimizer.begin

    def begin_counted(expected: list[Any]) -> Any:
        step = begin(expected)
        add = step.add

        def add_counted(*part: Any) -> list[Any]:
            updated = add(*part)
            updates.extend([len(updated)] if updated else [])
            return updated

        step.add = add_counted
        return step

    optimizer.begin = begin_counted

    def look(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.numel() for p in model.parameters() if p.grad is not None))

    for p in model.parameters():
        p.register_hook(look)
    for step in range(2):
        model(tokens(step), True).backward()
        optimizer.step()
    block = sum(p.numel() for p in model.layers[0].parameters())
    assert most <= block
    assert updates == [1, 6, 6, 6, 1] * 2  # one launch each: what is small goes with its block


def test_passes_aside_and_removal() -> None:
    model = net()
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    released = release_gradients(model, optimizer)
    released.enabled = False
    model(tokens(0), True).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert int(optimizer.steps) == 0
    optimizer.zero_grad()
    released.remove()
    model(tokens(0), True).backward()
    optimizer.step()
    assert int(optimizer.steps) == 1
    assert model.sometimes.grad is not None


# Norms and gradients that are not finite ------------------------------------------------------------------------------


def test_clipping_by_the_previous_norm() -> None:
    """A step scales its gradients as an ordinary one would whose gradients had the norm of the step before."""
    model, plain = net(), net()
    optimizer = AdamW(model.named_parameters(), lr=1e-2, max_norm=0.05, nonfinite="skip")
    release_gradients(model, optimizer, clip_norm="previous")
    other = AdamW(plain.named_parameters(), lr=1e-2)
    norms: list[float] = []
    for step in range(4):
        if step == 2:  # a resume in the middle
            state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
            model = net()
            optimizer = AdamW(model.named_parameters(), lr=1e-2, max_norm=0.05, nonfinite="skip")
            release_gradients(model, optimizer, clip_norm="previous")
            optimizer.load_state_dict(state)
            model.load_state_dict(weights)
        model(tokens(step), True).backward()
        optimizer.step()
        plain(tokens(step), True).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        if norms:
            for p in plain.parameters():
                p.grad *= min(1.0, 0.05 / (norms[-1] + 1e-6))
        other.step()
        other.zero_grad()
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)
        norms.append(float(norm))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert min(norms) > 0.05


@pytest.mark.parametrize("where", ["loss", "first block"])
def test_gradients_that_are_not_finite(where: str) -> None:
    """A loss that is not finite changes nothing; a gradient that comes late leaves what came before it changed."""
    for nonfinite in ("skip", "raise"):
        model = net()
        optimizer = AdamW(model.named_parameters(), lr=1e-2, nonfinite=nonfinite)
        release_gradients(model, optimizer)
        model(tokens(0), True).backward()
        optimizer.step()
        before = copy.deepcopy(model.state_dict())
        loss = model(tokens(1), True)
        if where == "loss":
            (loss * torch.nan).backward()
        else:
            handle = model.layers[0].up.weight.register_hook(lambda g: g * torch.inf)
            loss.backward()
            handle.remove()
        if nonfinite == "raise":
            words = "no weight was changed" if where == "loss" else "came before it in the backward pass were changed"
            with pytest.raises(NonFiniteError, match=f"Step 2: a gradient holds NaN or Inf, and .*{words}"):
                optimizer.step()
        else:
            optimizer.step()
            assert int(optimizer.skipped) == 1
            assert int(optimizer.steps) == (1 if where == "loss" else 2)
            assert not optimizer.grad_norm.isfinite()
        unchanged = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
        assert ("layers.2.up.weight" in unchanged) == (where == "loss")
        assert {"layers.0.up.weight", "layers.0.norm.weight", "embedding.weight"} <= unchanged
        model(tokens(2), True).backward()
        optimizer.step()
        assert optimizer.grad_norm.isfinite()
        assert all(p.isfinite().all() for p in model.parameters())


# What cannot be -------------------------------------------------------------------------------------------------------


def test_what_cannot_go_together() -> None:
    model = net()
    with pytest.raises(UserError, match=r"max_norm=1 clips by the norm of all gradients, .*pass clip_norm='previous'"):
        release_gradients(model, AdamW(model.named_parameters(), max_norm=1.0))
    with pytest.raises(UserError, match="has no max_norm: set it"):
        release_gradients(model, AdamW(model.named_parameters()), clip_norm="previous")
    with pytest.raises(UserError, match="clip_norm is 'previous' or None, not 'now'"):
        release_gradients(model, AdamW(model.named_parameters(), max_norm=1.0), clip_norm="now")
    with pytest.raises(UserError, match=r"takes an optimizer of dither.optim, not SGD"):
        release_gradients(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(UserError, match=r"'fp16-o2' scales losses, .*use release=True with a bfloat16 mode"):
        training(net(), "fp16-o2", lr=1e-2, release=True)
    with pytest.raises(UserError, match="clip_norm='previous' is for release=True"):
        training(net(), "bf16-sr", lr=1e-2, clip_norm="previous", max_norm=1.0)
    with pytest.raises(UserError, match="no trainable parameter of this Linear"):
        release_gradients(nn.Linear(2, 2), AdamW(model.named_parameters()))
    optimizer = AdamW(model.named_parameters())
    release_gradients(model, optimizer)
    with pytest.raises(UserError, match="already releases gradients"):
        release_gradients(model, optimizer)
    with pytest.raises(UserError, match="SNIP's estimates are backward passes that must change no weight"):
        Snip(dither.Conversion.of(model), optimizer, goal=Goal(target=0.5))
    model(tokens(0), True).backward()
    with pytest.raises(UserError, match=r"A second backward pass came before optimizer.step\(\)"):
        model(tokens(0), True).backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.grad_scale = scaler._get_scale_async()
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(UserError, match="A GradScaler unscales gradients after the backward pass"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"release_gradients": True}, "optim.max_norm=1 clips by it: set optim.clip_norm='previous', or optim.max_norm=0"),
        ({"clip_norm": "previous"}, "optim.clip_norm='previous' is for optim.release_gradients=true"),
    ],
)
def test_configs_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dither.train.config.Optim(**settings)


def test_units() -> None:
    assert [unit_of(name) for name in ("h.0.attn.w", "model.layers.12.x", "norm.weight", "0.weight", "a2.w", "0")] == [
        "h.0", "model.layers.12", "norm.weight", "0", "a2.w", "0",
    ]  # fmt: skip
