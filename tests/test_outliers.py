"""Outlier channels of TetraJet-v2: products and choices against a second writing, compiled, saved, resumed and refused."""

import copy
import shutil
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from runs import NARROW, config_of, lines, tensors_of
from tiny import random
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import dither
from dither import Cast, LayerPrecision, MemoryOptions, Outliers, Plan, Stream, UserError, convert, recipe, step_context
from dither.evaluate.variants import Variants
from dither.models import build
from dither.nn import Conv1D, Linear, compile_blocks, freeze_base
from dither.nn.outliers import largest
from dither.nn.step import untouched
from dither.ops.reference import transforms
from dither.optim import AdamW, OscillationReset
from dither.spec import Sampling, Transform
from dither.train.config import Config, override
from dither.train.loop import train

STEP, SEED, K, N, M = 7, 0, 192, 128, 96
MX, SR = "e4m3 tile(32) pow2_ceil", "nvfp4 stochastic(16)"
CHOSEN = Outliers(share=0.1, steps=1)
PLAN = recipe("tetrajet2").with_outliers(CHOSEN)


def inputs(seed: int, rows: int = M, features: int = K) -> Tensor:
    """Inputs in which every seventh channel is an outlier."""
    return random(rows, features, seed=seed) * torch.where(torch.arange(features) % 7 == 3, 30.0, 1.0)


def chosen_layer(precision: LayerPrecision, channels: list[int], *, transposed: bool = False, **options: Any) -> Linear:
    """A layer whose outlier channels are these."""
    module = nn.Sequential(Conv1D(N, K) if transposed else nn.Linear(K, N))
    with torch.no_grad():
        weight = random(N, K, seed=3)
        module[0].weight.copy_(weight.T if transposed else weight)
        module[0].bias.copy_(random(N, seed=4))
    convert(module, Plan(default=precision), all_layers=True, seed=SEED, **options)
    layer = module[0]
    layer.name = "layer"
    layer._register_draws(layer.device)
    state = layer.state_dict() | {"outlier_channels": torch.tensor(channels)}
    layer.load_state_dict(state)
    assert layer.outlying.chosen
    return layer


def products(layer: Linear, *, dtype: torch.dtype = torch.float32, step: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = inputs(1).to(dtype).requires_grad_(), random(M, N, seed=2).to(dtype)
    with step_context(layer, step=STEP):
        if not step:  # the weight is cast in the forward pass
            layer.cache.ready = False
        y = layer(x)
        y.backward(dy)
    dw = layer.weight.grad
    layer.zero_grad()
    assert dw is not None
    assert x.grad is not None
    return y.detach(), x.grad, dw.T if layer.transposed else dw


# The definition -------------------------------------------------------------------------------------------------------

CHANNELS = [3, 17, 24, 31, 38, 45, 52, 59, 66, 73, 80, 87, 94, 101, 108, 115, 122, 129, 136, 143, 150, 157, 164, 171, 178, 185]
CHANNELS += [0, 1, 2, 4, 190, 191]
CHANNELS.sort()


def cast(x: Tensor, text: str, axis: int, purpose: str = "") -> Tensor:
    return dither.fake_quantize(x, text, axis=axis, stream=Stream(SEED, purpose, "layer"), step=STEP)


def transformed(x: Tensor, axis: int) -> Tensor:
    place = torch.tensor([STEP, 0, Stream(SEED, "signs", "layer").key])
    return transforms.transform(x, Transform(32, "redrawn"), axis, place)


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """The operand [., K] without its outlier channels, and these alone."""
    kept = torch.zeros(K, dtype=torch.bool)
    kept[CHANNELS] = True
    return torch.where(kept, 0.0, x), x[:, CHANNELS]


def placed(rest: Tensor, few: Tensor) -> Tensor:
    """Both parts of an operand or a gradient in one matrix."""
    whole = rest.clone()
    whole[:, CHANNELS] = few
    return whole


def tetrajet2(x: Tensor, w: Tensor, dy: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """arXiv 2510.27527 with OutControl, as the authors' code computes it, sums in float64.

    Forward: NVFP4 without the channels, and these in MXFP8. Weight gradient: the columns of the channels in MXFP8, from the
    codes of forward; the others in NVFP4. Input gradient: all in NVFP4, from the codes of forward of either kind.
    """
    (x_rest, x_few), (w_rest, w_few) = parts(x), parts(w)
    x_rest, w_rest = (cast(part, "nvfp4", 1) for part in (x_rest, w_rest))
    x_few, w_few = (cast(part, MX, 1) for part in (x_few, w_few))
    y = x_rest.double() @ w_rest.double().T + x_few.double() @ w_few.double().T

    def rounded(w: Tensor) -> Tensor:  # random bits are those of the weight as it is stored
        w = transformed(w, 0)
        return cast(w.T, SR, 1, "weight").T if transposed else cast(w, SR, 0, "weight")

    w_few = rounded(torch.cat((torch.zeros(N, K), w_few), 1))[:, K:]  # it draws the bits of columns of its own
    w_read = placed(rounded(w_rest), w_few)
    dx = cast(transformed(dy, 1), SR, 1, "grad").double() @ w_read.double()
    dw_rest = cast(transformed(dy, 0), SR, 0, "grad").double().T @ cast(transformed(x_rest, 0), SR, 0, "input").double()
    dw_few = cast(dy, MX, 0).double().T @ cast(x_few, MX, 0).double()
    return y + random(N, seed=4), dx, placed(dw_rest, dw_few)


def nearest(x: Tensor, w: Tensor, dy: Tensor, _: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same without random bits and scales of tensors: there one cast of the whole weight, as the paper has it, decides."""
    (x_rest, x_few), (w_rest, w_few) = parts(x), parts(w)
    x_rest, w_rest = (cast(part, "e2m1 tile(16) pow2_ceil", 1) for part in (x_rest, w_rest))
    x_few, w_few = (cast(part, MX, 1) for part in (x_few, w_few))
    y = x_rest.double() @ w_rest.double().T + x_few.double() @ w_few.double().T
    mx4 = "e2m1 tile(16) pow2_ceil"
    dx = cast(dy, mx4, 1).double() @ cast(placed(w_rest, w_few), mx4, 0).double()
    dw_rest = cast(dy, mx4, 0).double().T @ cast(x_rest, mx4, 0).double()
    return y + random(N, seed=4), dx, placed(dw_rest, cast(dy, MX, 0).double().T @ cast(x_few, MX, 0).double())


NEAREST = replace(LayerPrecision.of(*["e2m1 tile(16) pow2_ceil"] * 3, requantize=True), outliers=CHOSEN)
DEFINITIONS = {"tetrajet2": (PLAN.default, tetrajet2), "nearest": (NEAREST, nearest)}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_products_are_those_of_the_definition(name, transposed):
    """A code that differs would move a sum by a thousandth at least; sums in another order move it by a millionth."""
    precision, definition = DEFINITIONS[name]
    layer = chosen_layer(precision, CHANNELS, transposed=transposed)
    weight = layer.weight.detach()
    expected = definition(inputs(1), weight.T if transposed else weight, random(M, N, seed=2), transposed)
    for mine, theirs in zip(products(layer), expected, strict=True):
        assert (mine - theirs).abs().max() < 3e-6 * theirs.abs().max()


def test_outliers_reduce_the_error_of_the_products():
    layer = chosen_layer(replace(PLAN.default, outliers=Outliers(share=0.15)), [*range(3, K, 7), 0, 1, 2, 4, 5])
    plain = Linear(K, N, precision=recipe("tetrajet2").default, name="layer", seed=SEED)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    exact = inputs(1) @ layer.weight.detach().T + layer.bias.detach()
    errors = [(products(each)[0] - exact).norm() / exact.norm() for each in (layer, plain)]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("memory", [MemoryOptions("input", "one"), MemoryOptions("codes", "none")])
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_of_a_step_and_memory_options_change_no_bit(memory, transposed):
    layer = chosen_layer(PLAN.default, CHANNELS, transposed=transposed)
    expected = products(layer)
    again = [products(layer, step=False), products(chosen_layer(PLAN.default, CHANNELS, transposed=transposed, memory=memory))]
    for found in again:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_sum_of_both_products_is_rounded_once():
    layer = chosen_layer(PLAN.default, CHANNELS).to(torch.bfloat16)
    assert layer.outlying.chosen
    x = inputs(1).bfloat16()
    (x_rest, x_few), (w_rest, w_few) = parts(x.float()), parts(layer.weight.detach().float())
    rest = cast(x_rest, "nvfp4", 1).double() @ cast(w_rest, "nvfp4", 1).double().T
    expected = (rest + cast(x_few, MX, 1).double() @ cast(w_few, MX, 1).double().T + layer.bias.detach().double()).bfloat16()
    with torch.no_grad():
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert (found != expected).float().mean() < 1e-3  # float32 sums next to a tie
    single = chosen_layer(PLAN.default, CHANNELS)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, dw = products(single)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)


# The choice -----------------------------------------------------------------------------------------------------------


def model_of(plan: Plan = PLAN, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    convert(model, plan, all_layers=True)
    return model


def trained(model: nn.Module, steps: range, micro: int = 1, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        with step_context(model, step=step):
            for part in inputs(step, 64, 64).chunk(micro):
                loss = model(part).square().mean() / micro
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_channels_with_the_largest_sums_of_norms_are_chosen_once():
    """Written a second time in float64: a norm per step over all of its tokens, and steps 2, 3 and 4 count."""
    model = model_of(recipe("tetrajet2").with_outliers(Outliers(share=0.2, start=2, steps=3)))
    seen: list[Tensor] = []
    model[2].register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().double()))
    trained(model, range(4))
    assert not model[2].outlying.chosen
    assert model[2].outlier_channels.tolist() == [-3] * 16  # two steps are measured; 0.2 of 64 is 12.8, rounded up to 16
    trained(model, range(4, 5))
    given = [inputs(step, 64, 64).double() for step in range(5)]
    norms = [sum(each[step].square().sum(0).sqrt() for step in (2, 3, 4)) for each in (seen, given)]
    for layer, expected in ((model[2], norms[0]), (model[0], norms[1])):
        assert layer.outlier_channels.tolist() == sorted(expected.argsort(descending=True)[:16].tolist())
        torch.testing.assert_close(layer.outlier_norms.double(), expected, rtol=1e-5, atol=0)
    before = [layer.outlier_channels.clone() for layer in (model[0], model[2])]
    trained(model, range(5, 8))
    assert all(torch.equal(one, layer.outlier_channels) for one, layer in zip(before, (model[0], model[2]), strict=True))
    assert largest(torch.tensor([2.0, 1.0, 2.0, 2.0]), 2).tolist() == [0, 2]


def test_micro_batches_recomputation_and_evaluation_do_not_change_the_choice():
    plan = recipe("tetrajet2").with_outliers(Outliers(share=0.2, start=1, steps=2))
    whole, split = model_of(plan), model_of(plan)
    trained(whole, range(4))
    with torch.no_grad():
        split(inputs(50, 64, 64))  # of no step
    trained(split, range(2), micro=4)
    before = split[0].outlier_norms.clone()
    with untouched(split):
        trained(split, range(2, 4))
    with suppress(ZeroDivisionError), step_context(split, step=2):
        split(inputs(50, 64, 64)).sum().backward()
        raise ZeroDivisionError  # a step that is not finished
    split.eval()
    with step_context(split, step=2):
        split(inputs(50, 64, 64))
    split.train()
    assert torch.equal(split[0].outlier_norms, before)
    assert split[0].outlying.measured == 1
    split.zero_grad()
    trained(split, range(2, 4), micro=4)
    assert torch.equal(whole[0].outlier_channels, split[0].outlier_channels)
    recomputed = model_of(plan)
    inner = recomputed[0].forward
    recomputed[0].forward = lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
    trained(recomputed, range(4))
    assert torch.equal(recomputed[0].outlier_channels, whole[0].outlier_channels)


def test_a_step_that_overflows_does_not_count():
    model = model_of(recipe("tetrajet2").with_outliers(Outliers(steps=2)))
    with step_context(model, step=0):
        model(inputs(0, 64, 64).index_fill(1, torch.tensor([5]), float("inf"))).sum().backward()
    assert model[0].outlier_norms.eq(0).all()
    trained(model, range(1, 2))
    assert 5 not in model[0].outlier_channels.tolist()


def test_plans_switch_to_outliers_and_keep_them():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    conversion = convert(model, "mxfp8", all_layers=True)
    trained(model, range(2))
    assert model[0].outlier_channels is None
    conversion.switch(PLAN)
    trained(model, range(2, 4))
    channels = model[0].outlier_channels.clone()
    assert channels.min() >= 0
    other = recipe("fp4-all-the-way").with_outliers(CHOSEN)
    conversion.switch(other)
    assert torch.equal(model[0].outlier_channels, channels)
    trained(model, range(4, 5))
    conversion.switch(recipe("tetrajet2").with_outliers(replace(CHOSEN, start=9)))
    assert not model[0].outlying.chosen
    conversion.switch("tetrajet2")
    assert "0.outlier_channels" not in model.state_dict()
    assert trained(model, range(5, 6))[0] > 0


# Saved, copied, compiled ----------------------------------------------------------------------------------------------


def test_plans_of_evaluations_have_no_outliers(tmp_path):
    """No training has chosen any, and the loss would be that of another plan."""
    path = tmp_path / "plan.json"
    PLAN.save(path)
    with pytest.raises(UserError, match="has outlier channels, which a training run chooses by its inputs"):
        Variants(plans=(str(path),))


def test_plans_in_json_keep_outliers(tmp_path):
    plan = replace(recipe("nvfp4").with_outliers(Outliers(share=0.05, start=500)), layers=(("*.down", LayerPrecision()),))
    assert Plan.from_json(plan.to_json()) == plan
    assert '"outliers": {"share": 0.05, "cast": "e4m3 tile(32) pow2_ceil nearest", "start": 500, "steps": 50}' in plan.to_json()
    assert "0.05 of the channels e4m3 tile(32) pow2_ceil nearest, from steps 500 to 549" in str(plan)
    assert plan.spared([f"blocks.{i}.up" for i in range(8)]).for_layer("blocks.7.up").outliers is None
    assert copy.deepcopy(plan) == plan


def test_a_saved_state_goes_on_with_the_same_bits():
    for stop in (1, 3):  # before the choice, and after it
        whole, plan = [], recipe("tetrajet2").with_outliers(Outliers(steps=2))
        first = model_of(plan)
        whole = trained(first, range(5), optimizer=AdamW(first.named_parameters(), lr=1e-2))
        second = model_of(plan)
        optimizer = AdamW(second.named_parameters(), lr=1e-2)
        begun = trained(second, range(stop), optimizer=optimizer)
        third = model_of(plan)
        third.load_state_dict(copy.deepcopy(second.state_dict()))
        moved = AdamW(third.named_parameters(), lr=1e-2)
        moved.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert begun + trained(third, range(stop, 5), optimizer=moved) == whole
        assert torch.equal(first[0].outlier_channels, third[0].outlier_channels)
        fourth = copy.deepcopy(third)
        assert torch.equal(fourth(inputs(9, 64, 64)), third(inputs(9, 64, 64)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_compiled_blocks_have_the_bits_of_eager_ones():
    plan, nets, graphs = recipe("tetrajet2").with_outliers(Outliers(start=1, steps=2)), [], []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Net())
        convert(nets[-1], plan, all_layers=True)
    torch.compiler.reset()
    compile_blocks(nets[1], backend=lambda graph, example: graphs.append(graph) or aot_eager(graph, example))
    counts = []
    for step in range(6):
        eager, compiled = (trained(net, range(step, step + 1), micro=2) for net in nets)
        assert eager == compiled
        counts.append(len(graphs))
    states = [net.state_dict() for net in nets]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert nets[1].blocks[1][2].outlying.chosen
    first = counts[0]  # graphs of tetrajet2 alone; measured steps and chosen channels need as many again
    assert counts == [first, 2 * first, 2 * first, 3 * first, 3 * first, 3 * first]


# Runs -----------------------------------------------------------------------------------------------------------------

TINY = (*NARROW, *("model.feed_forward=48", "outliers.start=0.1", "outliers.steps=3"))


OSCILLATION = ("oscillation.start=0.5", "oscillation.period=4", "oscillation.window=3")


@pytest.mark.sampled(only=["settings1"])
@pytest.mark.parametrize("settings", [("precision.mode=fp32",), ("precision.mode=bf16-sr", "precision.states=companded8")])
def test_a_run_resumes_bit_for_bit(text, tmp_path, settings):
    """Also within a window of `OscillationReset`."""
    whole = tmp_path / "whole"
    more = (*TINY, *OSCILLATION, *settings, "run.steps=10", "run.save_every=2", "run.keep_last=9")
    assert train(config_of(text, whole, more)).code == 0
    at = {step: tensors_of(whole, step) for step in (2, 6, 10)}
    name = next(name for name in at[2] if name.endswith("down_proj.outlier_channels"))
    assert at[2][name].tolist() == [-2] * 16  # step 1 is measured, of steps 1 to 3
    assert at[6][name].tolist() == at[10][name].tolist() == sorted(set(at[6][name].tolist()))
    assert [line["step"] for line in lines(whole, "oscillation")] == [8]
    assert all(0 < line["share"] < 1 for line in lines(whole, "oscillation"))
    assert any(name.startswith("oscillation:") and name.endswith(":moved") for name in at[6])
    for stop in (2, 6):  # in the measured steps, and after them
        out = tmp_path / f"from {stop}"
        shutil.copytree(whole, out)
        for later in (out / "checkpoints").iterdir():
            if later.name > f"step-{stop:08}":
                shutil.rmtree(later)
        assert train(config_of(text, out, more), resume=True).code == 0
        found = tensors_of(out, 10)
        assert at[10].keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in at[10].items())


def test_outliers_do_not_oscillate():
    """Their weights are watched as they are, and the others without them: in the paper's code only those in FP4 are."""
    model = model_of()
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    trained(model, range(2), optimizer=optimizer)
    channels = model[0].outlier_channels
    reset = OscillationReset(model, optimizer, period=4, window=3)
    reset.after_step(1)
    found = reset.movements["0"]
    weight = model[0].weight.detach()
    assert torch.equal(found.read[:, channels], weight[:, channels])
    rest = dither.fake_quantize(weight.index_fill(1, channels, 0), "nvfp4", axis=1)
    others = [i for i in range(64) if i not in channels.tolist()]
    assert torch.equal(found.read[:, others], rest[:, others])


def test_a_schedule_has_outliers_and_watches_weights_where_it_casts_to_few_bits(text, tmp_path):
    chosen = [each for each in TINY if not each.startswith("precision")]
    planned = ('precision.schedule=[[0, "fp32"], [3, "tetrajet2"]]', *OSCILLATION, "oscillation.start=0", "outliers.steps=1")
    assert train(config_of(text, tmp_path / "run", chosen, planned, "run.steps=8", "precision.mode=fp32")).code == 0
    first, second = (line["share"] for line in lines(tmp_path / "run", "oscillation"))
    assert first == 0 < second  # nothing is cast when the first window begins
    saved = tensors_of(tmp_path / "run", 8)
    found = [value for name, value in saved.items() if name.endswith("outlier_channels")]
    assert len(found) == 7
    assert all(each.min() >= 0 for each in found)  # measured in step 3


# What does not work ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"share": 0}, "above 0 and below 1, not 0"),
        ({"share": -0.1}, "above 0 and below 1, not -0.1"),
        ({"share": 1.5}, "above 0 and below 1, not 1.5"),
        ({"share": True}, "outliers.share is a finite number, not True"),
        ({"share": "half"}, "outliers.share is a finite number"),
        ({"share": float("nan")}, "outliers.share is a finite number, not nan"),
        ({"start": -1}, "outliers.start is an integer of at least 0"),
        ({"steps": 0}, "outliers.steps is an integer of at least 1"),
        ({"steps": 2.0}, "outliers.steps is an integer"),
        ({"cast": "mxfp8"}, "outliers.cast is of type Cast"),
        ({"cast": Cast.parse("e4m3 tensor delayed(16)")}, "without transform and delayed scales"),
        ({"cast": Cast.parse("mxfp8 hadamard(32)")}, "without transform and delayed scales"),
    ],
)
def test_wrong_outliers_are_refused_with_a_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Outliers(**changes)


@pytest.mark.parametrize("name", ["fp8-block", "bf16", "mxfp8", "mxfp4-rht", "int8"])
def test_recipes_without_few_bits_forward_are_refused(name):
    with pytest.raises(UserError, match="No forward product of this plan casts its operands to less than 8 bits"):
        recipe(name).with_outliers(Outliers())


def test_precisions_that_cannot_have_outliers_are_refused():
    base = recipe("tetrajet2").default
    for changes, sentence in (
        ({"sampling": Sampling()}, "without sampling, mask_clipped and learned_clip"),
        ({"input_sampling": Sampling()}, "without sampling"),
        ({"outliers": 0.1}, "takes Outliers or None"),
        ({"outliers": Outliers(cast=Cast.parse("mxfp4"))}, "Outlier channels of 4 bits are for an input and a weight"),
    ):
        with pytest.raises(UserError, match=sentence):
            replace(base, **{"outliers": Outliers(), **changes})
    with pytest.raises(UserError, match="without sampling, mask_clipped"):
        recipe("quartet").with_outliers(Outliers())
    delayed = LayerPrecision.of("e2m1 tile(16)", "e2m1 tile(16)", "e5m2 tensor delayed(16)")
    with pytest.raises(UserError, match="without delayed scaling"):
        replace(delayed, outliers=Outliers())
    for wrong in ({"share": 0.1, "channels": 3}, [0.1]):
        with pytest.raises(UserError, match="outliers"):
            LayerPrecision.from_dict({**base.to_dict(), "outliers": wrong})


def test_layers_that_cannot_have_outliers_are_refused():
    small = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64))
    with pytest.raises(UserError, match="The layer '0' has 16 inputs, of which 16 would be outlier channels"):
        convert(small, PLAN, all_layers=True)
    assert type(small[0]) is nn.Linear
    convert(small, PLAN, all_layers=True, fallback="bf16")
    assert small[0].precision.uncast
    model = model_of()
    with pytest.raises(UserError, match=r"belongs to none: run forward and backward inside .with dither.step_context"):
        model(inputs(1, 64, 64))
    with torch.no_grad():
        model(inputs(1, 64, 64))
    with pytest.raises(UserError, match="has outlier channels, and a frozen weight has one cast"):
        freeze_base(model.requires_grad_(False))


def test_experts_snip_rollouts_and_kept_swiglus_refuse_outliers():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    with pytest.raises(UserError, match="only matrices can be split by channels"):
        convert(MixtralForCausalLM(config), PLAN, all_layers=True)
    model = nn.Sequential(nn.Linear(64, 64))
    conversion = convert(model, PLAN, all_layers=True)
    optimizer = AdamW(model.named_parameters())
    with pytest.raises(UserError, match="SNIP chooses casts of whole operands"):
        dither.snip.Snip(conversion, optimizer, dither.snip.SnipSettings(target=0.5))
    llama = build("tiny")
    convert(llama, PLAN)
    tokens = torch.arange(32).view(2, 16)
    with step_context(llama, step=0):
        llama(tokens, tokens).backward()
    with step_context(llama, step=1), pytest.raises(UserError, match="rollout_weights takes weights of one cast"):
        list(dither.rollout_weights(llama))
    llama = build("tiny")
    convert(llama, PLAN, memory=MemoryOptions(swiglu="fp8"))
    with step_context(llama, step=0), pytest.raises(UserError, match="takes outlier channels out of its input, which Memory"):
        llama(tokens, tokens)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["outliers.share=0.2"], "outliers.share=0.2 has no effect without outliers.start"),
        (["outliers.start=0.95"], "choose the channels after the last of run.steps=500"),
        (["outliers.start=0.1", "outliers.share=1"], "outliers.share"),
        (["outliers.start=0.1", "outliers.share=0"], "outliers.share"),
        (["outliers.start=0.1", "outliers.steps=0"], "outliers.steps"),
        (["outliers.start=-1"], "outliers.start"),
        (["outliers.start=0.1", "parallel.tp=2"], "does not go with parallel.tp=2"),
        (["outliers.start=0.1", "snip.target=0.5"], "does not go with snip.target"),
        (["outliers.start=0.1", "precision.sampling.noise=rounded_normal"], "does not go with precision.sampling"),
        (["outliers.start=0.1", "precision.swiglu=fp8"], "does not go with precision.swiglu"),
        (["outliers.start=0.1", "lora.rank=4", "model.weights=x"], "does not go with lora.rank"),
        (["outliers.start=0.1", "parallel.dp_shard=2", "parallel.gather=codes"], "does not go with parallel.gather"),
        (["outliers.start=0.1", "qat.format=nvfp4", "model.weights=x"], "does not go with qat.format"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        override(Config(), changes)


def test_a_run_without_few_bits_is_refused_before_it_is_built(text, tmp_path):
    settings = [*TINY, "precision.recipe=fp8-block", "run.steps=8"]
    with pytest.raises(UserError, match="No forward product of this plan casts its operands to less than 8 bits"):
        train(config_of(text, tmp_path / "run", settings))
    assert not (tmp_path / "run").exists()
