"""Grouped products of experts against the loop over experts: the same codes, and products within their error bounds."""

import copy

import pytest
import torch
import transformers
from torch import Tensor

from dither import Cast, step_context
from dither.exporting import rollout
from dither.nn import Linear, clipping, convert, experts, grouped
from dither.nn.bitwidths import learned_parameters
from dither.nn.layers import Conv1D
from dither.ops import backend
from dither.optim.training import Float32Products
from dither.spec import LayerPrecision, MemoryOptions, Plan
from dither.spec.deployment import DEPLOYMENTS

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
SIZES |= {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16}
TOKENS = 21
"""Odd, so that no expert has a whole number of groups by chance."""

KINDS = ("mixtral", "gpt_oss")  # gpt-oss has biases and matrices [in, out]
GROUPED = {
    "uncast": (None, None, None),
    "tiles": ("e4m3 tile(32) pow2_ceil", "e4m3 tile(32) pow2_ceil", "e4m3 tile(32) pow2_ceil"),
    "blocks of weights": ("e4m3 tile(16)", "e4m3 block(32)", "e4m3 tile(32)"),
    "blocks of inputs": ("e4m3 block(16)", None, "e4m3 tile(32)"),
    "weights alone": (None, "e2m1 tile(32)", None),
    "gradients alone": (None, None, "e5m2 tile(8)"),
    "learned clips": DEPLOYMENTS["mxfp4"].precision(learned_clip=True),
}
LOOPED = {
    "a scale per tensor": ("e4m3 tensor", None, None),
    "a scale per row": (None, "e4m3 row", None),
    "two levels": ("nvfp4", None, None),
    "random bits": (None, None, "e4m3 tile(32) stochastic(8)"),
    "transforms": ("mxfp4 hadamard(16)",) * 3,
    "groups that span experts": (None, "e4m3 block(64)", None),
    "delayed scales": ("e4m3 tensor delayed(4)", None, None),
}


def module(kind: str, casts: LayerPrecision | tuple[str | None, ...], **options: object) -> torch.nn.Module:
    """A module of four converted experts. Learned clips are from 0.5 to 0.9."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)  # biases too
    precision = casts if isinstance(casts, LayerPrecision) else LayerPrecision.of(*casts)
    convert(model, Plan((("*.experts.*", precision),)), **options)
    for parameter in learned_parameters(model):
        parameter.data.uniform_(0.5, 0.9)
    made: torch.nn.Module = model.model.layers[0].mlp.experts
    return made


def route(uneven: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens with features of many magnitudes, two experts of each, and their shares.

    If `uneven`, all tokens come to experts 1 and 2, except that the first comes to 0 and 1, and none to 3.
    """
    random = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, 32, generator=random) * torch.randn(TOKENS, 1, generator=random).exp()
    ids = torch.stack([torch.randperm(4, generator=random)[:2] for _ in range(TOKENS)])
    if uneven:
        ids = torch.tensor([1, 2]).repeat(TOKENS, 1)
        ids[0] = torch.tensor([0, 1])
    return x, ids, torch.rand(TOKENS, 2, generator=random)


def learn(each: torch.nn.Module, x: Tensor, ids: Tensor, shares: Tensor) -> dict[str, Tensor]:
    """The output and all gradients."""
    x, shares = x.clone().requires_grad_(), shares.clone().requires_grad_()
    y = each(x, ids, shares)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y))
    gradients = {name: parameter.grad for name, parameter in each.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "shares": shares.grad, **gradients}


def alone(each: torch.nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_group_multiple", lambda *_: 0)
        return learn(each, *inputs)


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_experts_are_those_of_the_loop(kind, name, uneven):
    """Equal but for the order of sums: of at most 64 products each, and rows of zeros between.

    A cast of a number that sums in another order may take the neighbouring code, so codes are compared in the test below.
    """
    one = module(kind, GROUPED[name])
    other = copy.deepcopy(one)
    assert experts._group_multiple(one, route()[0]) > 0
    found, expected = learn(one, *route(uneven)), alone(other, *route(uneven))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if uneven and value.dim() == 3:
            assert found[key][3].eq(0).all()
        each = (found[key] - value).abs().reshape(len(value), -1).amax(1)  # an expert's gradients, or a token's
        assert (each <= 256 * 2**-24 * value.abs().reshape(len(value), -1).amax(1)).all(), key


@pytest.mark.parametrize("name", LOOPED)
def test_what_cannot_be_grouped_runs_one_by_one(name):
    each = module("mixtral", LOOPED[name])
    assert experts._group_multiple(each, route()[0]) == 0
    learn(each, *route())


def test_engines_of_experts_are_those_of_grouped_products(monkeypatch):
    monkeypatch.setattr(backend, "capability_of", lambda device: (9, 0))
    for gradients, forward in (("mxfp4", "bf16"), ("mxfp4 stochastic(16)", "fp8-mxfp4")):  # which run one by one
        first = module("mixtral", ("mxfp4", "mxfp4", gradients)).dither["gate_up_proj"].first
        assert tuple(first.engines("cuda").values()) == (forward, "bf16", "bf16")


@pytest.mark.parametrize("kind", KINDS)
def test_one_cast_makes_the_codes_of_all_experts(kind):
    """In both layouts, in a step: those of a cast of each expert's matrix by itself."""
    for casts in (GROUPED["tiles"], GROUPED["blocks of weights"]):
        model = module(kind, casts)
        layer = model.dither["gate_up_proj"]
        with step_context(model, step=0):
            assert [expert.cache.ready for expert in layer.experts] == [True, False, False, False]
            codes = layer.first.stacked_codes()
            for index, expert in enumerate(layer.experts):
                weight = layer.experts[index].weight
                alone = grouped.cast_weight(weight, expert.settings_for(weight).weight, grouped.State(), True, True)
                for have, want, axis in ((codes.along, alone.along, 0), (codes.across, alone.across, 1)):
                    for part, single in ((have.values, want.values), (have.scale, want.scale)):
                        assert torch.equal(part.float().chunk(4, axis)[index], single.float())


@pytest.mark.parametrize("memory", [MemoryOptions(save="input"), MemoryOptions(hold="none"), MemoryOptions(hold="one")])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_options_change_no_bit(kind, memory):
    one, other = module(kind, GROUPED["blocks of weights"]), module(kind, GROUPED["blocks of weights"], memory=memory)
    with step_context(one, step=0), step_context(other, step=0):
        expected, found = learn(one, *route()), learn(other, *route())
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("format", ["int4-g32", "nvfp4", "int8"])  # groups, a tensor scale of each expert, rows
@pytest.mark.parametrize("kind", KINDS)
def test_clips_of_experts_have_the_gradients_of_single_layers(kind, format, monkeypatch):
    """Bit for bit, of the inputs and output gradients of each expert; the last expert has no tokens."""
    monkeypatch.setattr(clipping, "AT_ONCE", 2 * 128 * 32)  # two of gate_up_proj, all of down_proj
    precision = DEPLOYMENTS[format].precision(learned_clip=True)
    one, seen = module(kind, precision), {}
    for parameter, layer in one.dither.items():
        for index, expert in enumerate(layer.experts):

            def keep(_, inputs, y, key=(parameter, index)):
                y.register_hook(lambda dy: seen.__setitem__(key, (inputs[0].detach(), y.detach(), dy)))

            expert.register_forward_hook(keep)
    with step_context(one, step=0):
        learn(one, *route(uneven=True))
    assert sorted(seen) == [(parameter, index) for parameter in ("down_proj", "gate_up_proj") for index in range(3)]
    for parameter, layer in one.dither.items():
        weights, clips = getattr(one, parameter), layer.first.clip
        assert clips.dtype == torch.float32
        assert [expert.clip for expert in layer.experts[1:]] == [None] * 3
        assert not clips.grad[3].any()
        for index in range(3):
            rows, columns = weights[index].shape
            same = Conv1D(columns, rows) if one.is_transposed else torch.nn.Linear(columns, rows)
            single = Linear.adopt(same, precision, name="single")
            with torch.no_grad():
                single.bias.zero_()
                single.weight.copy_(weights[index])
                single.clip.copy_(clips[index])
            x, y, dy = seen[parameter, index]
            assert torch.equal(single(x), y)
            single(x).backward(dy)
            assert clips.grad[index].any()
            assert torch.equal(clips.grad[index], single.clip.grad)
            assert torch.equal(weights.grad[index], single.weight.grad)


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_compiled_experts_learn_the_same_clips(format):
    torch._dynamo.reset()
    one = module("mixtral", DEPLOYMENTS[format].precision(learned_clip=True))
    other = copy.deepcopy(one)
    with step_context(one, step=0), step_context(other, step=0):
        expected = alone(one, *route())
        found = learn(torch.compile(other, backend="aot_eager"), *route())
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    assert sum("clip" in name for name in found) == 2
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_step_casts_what_calls_outside_of_it_cast():
    one = module("mixtral", GROUPED["tiles"])
    outside = learn(one, *route())
    one.zero_grad()
    with step_context(one, step=0):
        inside = learn(one, *route())
    assert all(torch.equal(inside[key], outside[key]) for key in outside)


def test_a_changed_weight_is_noticed_in_a_step():
    one = module("mixtral", GROUPED["tiles"])
    with pytest.raises(Exception, match="changed inside a step_context"), step_context(one, step=0):  # noqa: PT012
        with torch.no_grad():
            one.down_proj[3, 0, 0] += 1
        one(*route())


def test_bf16_experts_are_grouped_under_autocast():
    """Products in float32 with one rounding, as `training` has them on a CPU: bit for bit those of the loop."""
    one = module("mixtral", GROUPED["uncast"])
    other = copy.deepcopy(one)
    with Float32Products(), torch.autocast("cpu", torch.bfloat16):
        assert experts._group_multiple(one, route()[0]) == 1
        found, expected = one(*route()), None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "_group_multiple", lambda *_: 0)
            expected = other(*route())
    assert torch.equal(found, expected)


def test_hooks_on_an_expert_see_its_calls():
    one = module("mixtral", GROUPED["tiles"])
    seen = []
    handle = one.dither["down_proj"].experts[2].register_forward_hook(lambda *_: seen.append(1))
    hooked = one(*route())
    handle.remove()
    free = one(*route())
    assert seen == [1]
    assert (hooked - free).abs().max() <= 256 * 2**-24 * free.abs().max()


def test_a_rollout_splits_stacked_codes():
    one = module("mixtral", (None, "e4m3 block(128)", None))  # no whole block in 64 rows: one by one
    cast = Cast.parse("mxfp4")
    other = module("mixtral", (None, str(cast), None))
    for each, stacked in ((one, False), (other, True)):
        layer = each.dither["down_proj"]
        assert layer.first.grouped == stacked
        with step_context(each, step=0):
            for held, expert in zip(rollout._held_experts(layer), layer.experts, strict=True):
                assert held.shape == (32, 64)
                wanted = grouped.cast_weight(
                    expert.weight, expert.settings_for(expert.weight).weight, grouped.State(), True, False
                ).along
                assert torch.equal(held.values.float(), wanted.values.float())
                assert torch.equal(held.scale.float(), wanted.scale.float())
