"""Muon: torch's own over a hundred steps, formats of weights and momentum, groups by role, resuming, and bad input."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dither
from dither import UserError
from dither.numerics.monitor import last_update
from dither.optim import Muon, muon_groups
from dither.optim.orthogonal import orthogonalize
from dither.optim.training import Float32Products
from dither.snip.update_rules import update_rules_of
from dither.spec.optimizer import NEWTON_SCHULZ
from dither.tools.memory import Setting, StepPasses, estimate, llama_of

SHAPES = ((24, 16), (16, 40))


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter((0.05 * torch.randn(shape, generator=generator)).to(dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    """Steps with gradients that point to a fixed matrix, with noise: their scales vary a lot."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (10.0 ** (step % 5 - 3) * (parameter.detach().float() - 0.02 + 0.3 * noise)).to(parameter.dtype)
        optimizer.step()


def distance(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> float:
    """The largest relative distance of the ways that both have gone."""
    pairs = zip(ours, theirs, weights(), strict=True)
    return max(float(((a.float() - b).norm() / (b - start).norm()).detach()) for a, b, start in pairs)


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"nesterov": False, "momentum": 0.8, "weight_decay": 1.0, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-2},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torchs_muon_in_float32(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds what it orthogonalizes to bfloat16, by a method that this test disables: the rest is all float32."""
    ours, theirs = weights(), weights()
    train(Muon([(f"w{i}", w) for i, w in enumerate(ours)], lr=0.02, ns_dtype="fp32", **options), ours, range(100))
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    train(torch.optim.Muon(theirs, lr=0.02, **options), theirs, range(100))
    assert distance(ours, theirs) < 2e-5


def test_torchs_muon_in_bfloat16() -> None:
    """Rounded products: neither is nearer to float32 than about 2^-8, and errors of a hundred steps average out."""
    ours, theirs = weights(), weights()
    train(Muon([(f"w{i}", w) for i, w in enumerate(ours)], lr=0.02), ours, range(100))
    with Float32Products():  # or torch 2.13 warns, on a CPU without such products
        train(torch.optim.Muon(theirs, lr=0.02), theirs, range(100))
    assert 0 < distance(ours, theirs) < 2.0**-7


def test_orthogonalizes_each_expert_by_itself() -> None:
    u = torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1.0, 1e6])[:, None, None]
    for dtype in (torch.float32, torch.bfloat16):
        each = torch.stack([orthogonalize(x, NEWTON_SCHULZ, 5, 1e-12, dtype) for x in u])
        found = orthogonalize(u, NEWTON_SCHULZ, 5, 1e-12, dtype)
        torch.testing.assert_close(found, each, rtol=0, atol=1e-5 if dtype == torch.float32 else 2.0**-6)
        values = torch.linalg.svdvals(found.float())
        assert 0.6 < values.min() <= values.max() < 1.3
    assert torch.equal(orthogonalize(torch.zeros(4, 2), NEWTON_SCHULZ, 5, 1e-7), torch.zeros(4, 2).bfloat16())


@pytest.mark.parametrize(
    "storage",
    [
        {"states": "bf16"},
        {"states": "companded8", "block": 16},
        {"states": "e4m3", "block": 16, "master": "split24"},
        {"master": "fp32", "states": "fp32"},
    ],
    ids=str,
)
def test_bfloat16_weights_follow_float32_and_resume(storage: dict[str, Any]) -> None:
    exact, ours = weights(), weights(torch.bfloat16)
    train(Muon([(f"w{i}", w) for i, w in enumerate(exact)], lr=2e-2), exact, range(20))
    named = [(f"w{i}", w) for i, w in enumerate(ours)]
    optimizer = Muon(named, lr=2e-2, **storage)
    train(optimizer, ours, range(10))
    again = [nn.Parameter(w.detach().clone()) for w in ours]
    resumed = Muon([(name, w) for (name, _), w in zip(named, again, strict=True)], lr=1.0, momentum=0.0, **storage)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, ours, range(10, 20))
    train(resumed, again, range(10, 20))
    for a, b in zip(ours, again, strict=True):
        assert torch.equal(a, b)
        assert all(torch.equal(optimizer.state[a][key], resumed.state[b][key]) for key in optimizer.state[a])
        assert "exp_avg_sq" not in optimizer.state[a]
    # Weights below 2^-2 lie 2^-10 apart: twenty stochastic roundings add at most sqrt(20) 2^-11, 0.03 of their way.
    assert distance(ours, exact) < 0.05


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.hidden = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
        self.output = nn.Linear(16, 50, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(self.embedding(x))
        found: Tensor = self.output(y + y @ self.experts.mean(0))
        return found


def groups_of(model: nn.Module, **options: Any) -> dict[str, dict[str, Any]]:
    return {name: group for group in muon_groups(model, **options) for name, _ in group["params"]}


def test_groups_by_role() -> None:
    torch.manual_seed(0)
    net = Net()
    found = groups_of(net, weight_decay=0.3, lr=0.02, embedding_lr=0.2, output_lr=0.004, adamw_decay=0.0)
    matrices = {name for name, group in found.items() if group["use_muon"]}
    assert matrices == {"hidden.0.weight", "hidden.2.weight", "experts"}
    assert set(found) == {name for name, _ in net.named_parameters()}
    rates = {name: (group.get("lr"), group["weight_decay"]) for name, group in found.items()}
    assert rates["experts"] == (0.02, 0.3)
    assert rates["embedding.weight"] == (0.2, 0.0)
    assert rates["output.weight"] == (0.004, 0.0)
    assert rates["hidden.1.weight"] == (None, 0.0)

    # AdamW's part has AdamW's bits.
    other = copy.deepcopy(net)
    both = Muon(muon_groups(net), lr=1e-2), dither.optim.AdamW(dither.nn.param_groups(other), lr=1e-2, betas=(0.9, 0.95))
    for model, optimizer in zip((net, other), both, strict=True):
        for number in range(2):
            model.zero_grad()
            for index, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * number + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) == (name not in matrices), name


def test_converted_and_tied_models_have_the_same_roles() -> None:
    def hidden(model: nn.Module) -> set[str]:
        return {name for name, group in groups_of(model).items() if group["use_muon"]}

    for name, tied in itertools.product(("tiny", "gpt2-tiny"), (True, False)):
        model = dither.models.build(dither.models.preset(name, vocab_size=64, tie_word_embeddings=tied), seed=0)
        before = hidden(model)
        assert before == {name for name, p in model.named_parameters() if p.dim() > 1 and (".h." in name or ".layers." in name)}
        dither.convert(model, "fp8-block")
        assert hidden(model) == before
        groups = groups_of(model)
        assert all(groups[matrix].get("transposed", False) == (name == "gpt2-tiny") for matrix in before)


def test_released_gradients_have_the_same_bits() -> None:
    torch.manual_seed(2)
    nets = [Net().bfloat16()]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [Muon(muon_groups(net), lr=1e-2, nonfinite="skip") for net in nets]
    dither.optim.release_gradients(nets[1], optimizers[1])
    for step, (net, optimizer) in itertools.product(range(3), zip(nets, optimizers, strict=True)):
        net(torch.arange(step, step + 8)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    ours = weights()
    optimizer = Muon([(f"w{i}", w) for i, w in enumerate(ours)], lr=0.02, nonfinite="skip")
    train(optimizer, ours, range(2))
    before = [(w.detach().clone(), optimizer.state[w]["exp_avg"].clone()) for w in ours]
    ours[1].grad[0, 0] = torch.nan  # type: ignore[index]
    optimizer.step()
    assert int(optimizer.skipped) == 1
    for w, (weight, momentum) in zip(ours, before, strict=True):
        assert torch.equal(w, weight)
        assert torch.equal(optimizer.state[w]["exp_avg"], momentum)


@pytest.mark.parametrize("options", [{"nesterov": False}, {"transposed": True, "maximize": True, "momentum": 0.5}], ids=str)
def test_what_snip_and_the_monitor_know_of_a_step(options: dict[str, Any]) -> None:
    """SNIP's rule foretells the next step, and the monitor finds it again, if there is no Nesterov momentum."""
    parameters = weights()
    optimizer = Muon([{"params": [("a", parameters[0]), ("b", parameters[1])], **options}], lr=0.02, ns_dtype="fp32")
    train(optimizer, parameters, range(3))
    optimizer.zero_grad()
    for w in parameters:
        rule = update_rules_of(optimizer, {"layer": w})["layer"]
        assert rule.t == 4
        before, w.grad = w.detach().clone(), torch.randn(w.shape, generator=torch.Generator().manual_seed(5))
        foretold = rule.update(w.grad)
        optimizer.step()
        moved = before * (1 - 0.02 * 0.1) - w.detach()
        torch.testing.assert_close(moved, foretold, rtol=1e-4, atol=1e-6)
        if not options.get("nesterov", True):
            last = last_update(optimizer, w, optimizer.param_groups[0])
            torch.testing.assert_close(last.update, before - w.detach(), rtol=1e-2, atol=1e-5)
        w.grad = None


def test_memory_is_estimated_without_second_moments() -> None:
    shape = llama_of(1e9)
    kinds = [Setting(mode="bf16-sr", optimizer=name) for name in ("adamw", "muon")]
    adamw, muon = (estimate(shape, kind, StepPasses(sequence=128)).moments["update"] for kind in kinds)
    assert adamw["states"] - muon["states"] == 2 * shape.block_weights
    assert muon["temporaries"] > 2 * shape.block_weights


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"momentum": 1.0}, r"momentum is a number from 0 to below 1, such as 0\.95, not 1\.0"),
    ({"momentum": "high"}, "momentum is a number from 0 to below 1"),
    ({"states": "int7"}, "There is no state format 'int7'.*: choose from fp32, bf16, dynamic8"),
    ({"master": "split"}, "Muon has no second moments: use master='fp32' or 'split24'"),
    ({"adjust_lr_fn": "rms"}, "adjust_lr_fn is 'original', 'match_rms_adamw' or None, not 'rms'"),
    ({"ns_dtype": "fp8"}, "ns_dtype is 'bf16' or 'fp32', not 'fp8'"),
    ({"ns_steps": 0}, "ns_steps is a number of iterations from 1 to 99, not 0"),
    ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients are three numbers, such as .*, not \(1\.0, 2\.0\)"),
    ({"nesterov": 1}, "nesterov is True or False, not 1"),
    ({"eps": 0.0}, "eps is a number from 1e-30 to 1e30"),
)


@pytest.mark.parametrize(("options", "sentence"), BAD, ids=str)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Muon([("w", nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)))], **options)


def test_bad_parameters_and_states() -> None:
    matrix, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    with pytest.raises(UserError, match=r"'bias' is \(4,\): put it into a group with use_muon=False, as .*muon_groups"):
        Muon([("w", matrix), ("bias", bias)])
    with pytest.raises(UserError, match=r"No group of Muon has use_muon=True.*: use dither\.optim\.AdamW"):
        Muon([{"params": [("bias", bias)], "use_muon": False}])
    with pytest.raises(UserError, match="Embedding has no trainable matrices beside embeddings and its output layer"):
        muon_groups(nn.Embedding(4, 4))
    with pytest.raises(UserError, match=r"use_muon is an option of the groups of dither\.optim\.Muon, not of AdamW's"):
        dither.optim.AdamW([{"params": [("w", matrix)], "use_muon": True}])
    optimizer, adamw = Muon([("w", matrix)]), dither.optim.AdamW([("w", matrix)])
    matrix.grad = torch.ones(4, 4)
    optimizer.step()
    with pytest.raises(UserError, match="saved with use_muon=True, and this optimizer has use_muon=None"):
        adamw.load_state_dict(optimizer.state_dict())
    with pytest.raises(UserError, match="whose matrices have no second moments for another library's AdamW"):
        dither.optim.torch_state_dict(optimizer)
    other = torch.optim.AdamW([matrix])
    other.step()
    with pytest.raises(UserError, match="that of another library's optimizer, and 'w' is one of Muon's matrices here"):
        optimizer.load_state_dict(other.state_dict())
