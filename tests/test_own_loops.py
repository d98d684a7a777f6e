"""Loops that Dither does not own: however they recompute, accumulate and compile, the bits are those of the plain run.

A run is compared with one that differs in a single respect: it recomputes activations, or its blocks are compiled. Weights and
gradients after two optimizer steps must be equal bit for bit.
"""

import contextlib
import copy
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from lazily import Lazy
from tiny import same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dither
from dither import UserError
from dither.models import build as build_preset
from dither.nn import GraphedPasses, Linear, convert, draws, linear, param_groups, step_context
from dither.nn.bitwidths import watch_guidance
from dither.nn.convert import ConvertedLayer, _warn_of_slow_engines
from dither.spec import Cast, LayerPrecision, Plan, Sampling

transformers = Lazy("transformers")

SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))

PLANS = {
    "fp4-block": dither.recipe("fp4-block"),
    "gaussws": Plan(default=LayerPrecision(sampling=Sampling(b_init=4.0, b_target=3.0))),
    "inputs": Plan(default=LayerPrecision(input_sampling=Sampling(b_init=4.0, b_target=3.0))),
    "everything": Plan(
        default=LayerPrecision.of("e2m1 tile(32) stochastic(16)", "e2m1 block(32)", "e2m1 tile(32) stochastic(16)")
    ).with_sampling(Sampling(b_init=1.5, b_target=1.0)),
    "bf16-sr": None,
}
CHECKPOINTS = {"none": None, "non-reentrant": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
REMARKS = [
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # Dynamo looks at it
    "ignore:.*use_reentrant parameter should be passed explicitly",
    "ignore:None of the inputs have requires_grad=True",
]
pytestmark = [pytest.mark.filterwarnings(remark) for remark in REMARKS]


def build(method: str, checkpointing: str = "none", compiled: bool = False) -> nn.Module:
    """A tiny Llama of Hugging Face, converted; its gradient checkpointing is theirs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZE, num_key_value_heads=1, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    config.loss_type = "ForCausalLM"
    model = transformers.LlamaForCausalLM(config).train()
    if PLANS[method] is not None:
        convert(model, PLANS[method])
    if method == "bf16-sr":
        model.bfloat16()
    if CHECKPOINTS[checkpointing] is not None:
        # Older releases have it under another name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(CHECKPOINTS[checkpointing])
        if checkpointing == "reentrant":  # which needs an input with a gradient
            model.enable_input_require_grads()
    if compiled:
        torch._dynamo.reset()
        for block in model.model.layers:
            block.compile(backend="aot_eager")
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return dither.optim.AdamW(param_groups(model), lr=1e-2, betas=(0.9, 0.95))


def own_loop(model: nn.Module, parts: int) -> None:
    optimizer = optimizer_of(model)
    for step in range(2):
        with step_context(model, step=step):
            for ids in IDS.chunk(parts):
                (model(ids, labels=ids).loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def loop_without_steps(model: nn.Module, parts: int) -> None:
    optimizer = optimizer_of(model)
    for _ in range(2):
        for ids in IDS.chunk(parts):
            (model(ids, labels=ids).loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


LOOPS = {"own loop": own_loop, "own loop without step_context": loop_without_steps}


def trained(loop: Callable[..., None], method: str, checkpointing: str, parts: int, compiled: bool = False) -> list[Tensor]:
    model = build(method, checkpointing, compiled)
    model.checkpointing = checkpointing
    with contextlib.redirect_stdout(io.StringIO()):
        loop(model, parts)
    return [parameter.detach().clone() for parameter in model.parameters()]


def cases(checkpointing: Iterable[str] = ("non-reentrant", "reentrant")) -> list:
    return list(itertools.product(LOOPS, PLANS, checkpointing, (1, 2)))


@pytest.mark.sampled(
    only=[
        "own loop-inputs-reentrant-2",
        "own loop-bf16-sr-non-reentrant-2",
        "own loop without step_context-gaussws-non-reentrant-1",
    ]
)
@pytest.mark.parametrize(("loop", "method", "checkpointing", "parts"), cases())
def test_recomputation_draws_what_forward_drew(loop, method, checkpointing, parts):
    plain = trained(LOOPS[loop], method, "none", parts)
    assert same(trained(LOOPS[loop], method, checkpointing, parts), plain)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("loop", "method", "checkpointing", "parts"), cases(CHECKPOINTS))
def test_compiled_blocks_draw_what_eager_blocks_draw(loop, method, checkpointing, parts):
    """Checkpointing is around the compiled blocks: what is recomputed is compiled code."""
    plain = trained(LOOPS[loop], method, "none", parts)
    assert same(trained(LOOPS[loop], method, checkpointing, parts, compiled=True), plain)


@pytest.mark.sampled(without=["everything"])
@pytest.mark.parametrize("method", ["everything", "inputs"])
def test_checkpointing_within_a_compiled_graph(method):
    """The compiled backward recomputes by itself."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        block = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32))
        torch.manual_seed(0)
        for parameter in block.parameters():
            nn.init.normal_(parameter)
        convert(block, PLANS[method])
        call = (lambda x, block=block: checkpoint(block, x, use_reentrant=False)) if compiled else block
        call = torch.compile(call, backend="aot_eager") if compiled else call
        with step_context(block, step=3):
            outputs = [call(x) for x in inputs(3, grad=True)]
            for y in (outputs[1], outputs[0], outputs[2]):  # in any order
                y.square().sum().backward()
        found.append([parameter.grad for parameter in block.parameters()])
    # Autograd adds up gradients in the order of backward; both runs have the same.
    assert same(*found)


# Rows -------------------------------------------------------------------------------------------------------------------


def inputs(count: int, *, grad: bool = False, tokens: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(tokens, 32, generator=generator).requires_grad_(grad) for _ in range(count)]


def layer_of(method: str = "fp4-block", features: int = 32) -> Linear:
    torch.manual_seed(0)
    return Linear(32, features, precision=PLANS[method].default, name="up", seed=3)


def gradient(layer: nn.Module, x: Tensor, call=None) -> Tensor:
    x = x.clone().requires_grad_()
    y = layer(x) if call is None else call(x)
    y.square().sum().backward()
    return x.grad


def test_equal_micro_batches_draw_different_bits():
    layer, x = layer_of(), inputs(1)[0]
    with step_context(layer, step=0):
        first, second = gradient(layer, x), gradient(layer, x)
    assert not torch.equal(first, second)


def test_counted_rows_are_those_of_the_whole_batch():
    """Accumulation without a word about rows draws what explicit rows draw, and what the whole batch draws."""
    layer, batch = layer_of(), torch.cat(inputs(3))
    with step_context(layer, step=4):
        counted = torch.cat([gradient(layer, x) for x in batch.split(8)])
    with step_context(layer, step=4) as at:
        given = []
        for start in range(0, 24, 8):
            at.row(start)
            given.append(gradient(layer, batch[start : start + 8]))
    assert torch.equal(counted, torch.cat(given))
    with step_context(layer, step=4):
        whole = gradient(layer, batch)
    assert torch.allclose(counted, whole, rtol=1e-5, atol=1e-6)  # only sums within a product may differ in their order


def test_given_rows_are_not_counted_on():
    layer, x = layer_of(), inputs(1)[0]
    with step_context(layer, step=4, row=16):
        first, second = gradient(layer, x), gradient(layer, x)
    assert torch.equal(first, second)


def test_ranks_draw_their_rows_in_turn(monkeypatch):
    """Two ranks with two micro-batches each draw together what one process draws for four."""
    layer, batch = layer_of(), torch.cat(inputs(4))
    with step_context(layer, step=2):
        whole = [gradient(layer, x) for x in batch.split(8)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
        with step_context(layer, step=2):
            assert [torch.equal(gradient(layer, batch.split(8)[2 * i + rank]), whole[2 * i + rank]) for i in range(2)] == [
                True
            ] * 2
    outside = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
        outside.append(gradient(layer_of(), batch[:8]))
    assert not torch.equal(*outside)


def test_a_pipeline_recomputes_with_the_rows_of_each_forward():
    """Two forward passes before their backward passes, as pipelines do, with rows given, in either order."""
    for method, reentrant, order in itertools.product(("fp4-block", "everything", "inputs"), (False, True), ((0, 1), (1, 0))):
        found = []
        for call in (None, lambda layer, x, reentrant=reentrant: checkpoint(layer, x, use_reentrant=reentrant)):
            layer, xs = layer_of(method), inputs(2, grad=True)
            with step_context(layer, step=1) as at:
                outputs = []
                for index, x in enumerate(xs):
                    at.row(index * 8)
                    outputs.append(layer(x) if call is None else call(layer, x))
                for index in order:
                    outputs[index].square().sum().backward()
            found.append([x.grad for x in xs] + [parameter.grad for parameter in layer.parameters()])
        assert same(*found), (method, reentrant, order)


def test_a_layer_that_is_used_twice_in_a_region_recomputes_both_calls():
    for reentrant in (False, True):
        found = []
        for again in (False, True):
            layer, x = layer_of(), inputs(1, grad=True)[0]
            twice = lambda x, layer=layer: layer(layer(x))  # noqa: E731
            with step_context(layer, step=1):
                y = checkpoint(twice, x, use_reentrant=reentrant) if again else twice(x)
                y.square().sum().backward()
            found.append([x.grad, layer.weight.grad])
        assert same(*found)


def test_nested_reentrant_checkpoints():
    found = []
    for again in (False, True):
        layer, x = layer_of("everything"), inputs(1, grad=True)[0]
        inner = (lambda x, layer=layer: checkpoint(layer, x, use_reentrant=True)) if again else layer
        outer = lambda x, inner=inner, layer=layer: layer(torch.relu(inner(x)))  # noqa: E731
        with step_context(layer, step=1):
            y = checkpoint(outer, x, use_reentrant=True) if again else outer(x)
            y.square().sum().backward()
        found.append([x.grad, layer.weight.grad])
    assert same(*found)


def test_what_cannot_be_recomputed_says_so():
    """Nested non-reentrant checkpoints hide one frame behind another; a backward hook is no recomputation at all."""
    layer, x = layer_of(), inputs(1, grad=True)[0]
    inner = lambda x: checkpoint(layer, x, use_reentrant=False)  # noqa: E731
    y = checkpoint(lambda x: torch.sin(inner(torch.sin(x))), x, use_reentrant=False)
    with pytest.raises(UserError, match="'up' draws random bits and is called during backward"):
        y.sum().backward()
    y = torch.sin(x)
    y.register_hook(lambda grad: layer(grad))
    with pytest.raises(UserError, match="during backward"):
        y.sum().backward()


@pytest.mark.parametrize("method", ["fp4-block", "gaussws", "everything"])
def test_a_backward_after_the_step_recomputes_or_says_so(method):
    found = []
    for again in (False, True):
        layer, x = layer_of(method), inputs(1, grad=True)[0]
        with step_context(layer, step=1):
            y, late = (checkpoint(layer, x, use_reentrant=False) if again else layer(x) for _ in range(2))
        y.square().sum().backward()
        found.append([x.grad.clone(), layer.weight.grad.clone()])
        if again and method != "fp4-block":  # inside of another step, a sampled weight has the noise of that one
            with step_context(layer, step=2), pytest.raises(UserError, match="inside the step_context of the forward pass"):
                late.square().sum().backward()
    assert same(*found)


def test_two_backward_passes_recompute_alike():
    layer, x = layer_of(), inputs(1, grad=True)[0]
    y = checkpoint(layer, x, use_reentrant=False).square().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)


def test_nothing_is_kept_of_a_graph_that_is_gone():
    layer, x = layer_of(), inputs(1, grad=True)[0]
    before = len(draws._frames)
    for _ in range(3):
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert len(draws._frames) == before


def test_experts_count_the_rows_of_the_whole_batch():
    """An expert that got no token of one micro-batch draws for the next what it would have drawn anyway."""
    config = transformers.MixtralConfig(**SIZE, num_local_experts=4, num_experts_per_tok=1, num_key_value_heads=2)
    config.loss_type = "ForCausalLM"
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).train()
    convert(model, "fp4-block")
    experts = [layer for layer in model.modules() if isinstance(layer, Linear) and ".experts." in layer.name]
    with step_context(model, step=0):
        for ids in IDS:
            model(ids[None], labels=ids[None]).loss.backward()
        assert {layer.draws.rows for layer in experts} == {IDS.numel()}


# The step ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, dither.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_inside_ends_the_step(make):
    """What follows is cast from the new weights."""
    layer, x = layer_of(), inputs(1)[0]
    optimizer = make(layer.named_parameters(), lr=0.1)
    with step_context(layer, step=0) as at:
        gradient(layer, x)
        held = layer(x)
        optimizer.step()
        after = layer(x)
        with pytest.raises(UserError, match="step_context 0 has ended"):
            at.row(8)
    assert not torch.equal(held, after)
    assert torch.equal(after, layer(x))
    with step_context(layer, step=1):  # the optimizer of other weights ends nothing
        other = make(nn.Linear(2, 2).named_parameters(), lr=0.1)
        other.step()
        assert layer.cache.ready


def test_an_optimizer_inside_moves_histories_on_once():
    layer = Linear(32, 24, precision=dither.recipe("fp8-delayed").default, name="up")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step, x in enumerate(inputs(3)):
        with step_context(layer, step=step):
            gradient(layer, x)
            optimizer.step()
        assert layer.input_history.count_nonzero() == step + 1
        assert layer.input_history[0] == x.abs().amax()


def test_compiled_code_notices_an_optimizer_inside():
    torch._dynamo.reset()
    layer, x = layer_of(), inputs(1)[0]
    call = torch.compile(layer, backend="aot_eager")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with step_context(layer, step=0):
        gradient(layer, x, call)
        optimizer.step()
        assert torch.equal(call(x), layer(x))


def test_steps_inside_steps():
    """The outer one goes on where it was."""
    layer, x = layer_of(), inputs(1)[0]
    with step_context(layer, step=5):
        wanted = [gradient(layer, x) for _ in range(2)]
    with step_context(layer, step=5):
        found = [gradient(layer, x)]
        with step_context(layer, step=7):
            inner = gradient(layer, x)
        found.append(gradient(layer, x))
    assert same(found, wanted)
    with step_context(layer, step=7):
        assert torch.equal(gradient(layer, x), inner)
    assert not layer.cache.active


def test_errors_and_evaluation_leave_nothing_behind():
    layer, x = layer_of("everything"), inputs(1)[0]
    with step_context(layer, step=0):
        wanted = [gradient(layer, x) for _ in range(2)]
    with contextlib.suppress(RuntimeError), step_context(layer, step=0):
        raise RuntimeError
    assert not layer.cache.active
    with step_context(layer, step=0):
        found = [gradient(layer, x)]
        layer.eval()
        with torch.no_grad():
            layer(x)
        layer.train()
        with torch.no_grad():
            layer(x)
        found.append(gradient(layer, x))
    assert same(found, wanted)


@pytest.mark.parametrize("method", ["fp4-block", "everything"])
def test_copies_inside_a_step_are_outside(method):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    convert(model, PLANS[method])
    x = inputs(1)[0]
    with step_context(model, step=0):
        gradient(model, x)
        copies = [copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module, pickle.loads(pickle.dumps(model))]
    for made in copies:
        assert not made[0].cache.active
        assert not made[0].cache.ready
        assert made[0].draws is not model[0].draws
        assert made[0].draw_handle != model[0].draw_handle
        with step_context(made, step=4), step_context(model, step=4):
            assert torch.equal(gradient(made, x), gradient(model, x))
        buffer = io.BytesIO()
        torch.save(made, buffer)  # after a step


def test_delayed_scaling_follows_the_weights_without_a_step():
    """Histories move on when the weight has changed, as they do at the end of a step_context."""
    told, untold = (Linear(32, 24, precision=dither.recipe("fp8-delayed").default, name="up") for _ in range(2))
    untold.load_state_dict(told.state_dict())
    for step, x in enumerate(inputs(4)):
        with step_context(told, step=step):
            wanted = gradient(told, x)
        assert torch.equal(gradient(untold, x), wanted)
        for layer in (told, untold):
            with torch.no_grad():
                layer.weight.mul_(1.5)
    assert untold.weight_history.count_nonzero() == 3  # the last step is taken in by the next call
    with pytest.raises(Exception, match="compiled code cannot tell where a step ends"):
        torch.compile(untold, backend="aot_eager", fullgraph=True)(inputs(1)[0])


def test_delayed_scaling_on_several_ranks_wants_a_step(monkeypatch):
    layer = Linear(32, 24, precision=dither.recipe("fp8-delayed").default, name="up")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="several ranks cannot tell where a step ends"):
        layer(inputs(1)[0])


def test_dynamic_shapes_of_sampled_layers_compile_whole():
    torch._dynamo.reset()
    eager, compiled = layer_of("gaussws"), layer_of("gaussws")
    call = torch.compile(compiled, backend="aot_eager", dynamic=True, fullgraph=True)
    for step, tokens in enumerate((8, 12)):
        x = inputs(1, tokens=tokens)[0]
        with step_context(eager, step=step), step_context(compiled, step=step):
            assert torch.equal(gradient(compiled, x, call), gradient(eager, x))
    assert torch.equal(eager.bitwidth.grad, compiled.bitwidth.grad)


# What is converted, and what is said ---------------------------------------------------------------------------------------


def test_adapters_of_peft_are_left_alone():
    import peft

    adapt = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)), adapt)
    record = convert(model, "fp8-block")
    assert not any("lora" in layer.name for layer in record.layers)
    assert sum(layer.name.endswith("q_proj.base_layer") for layer in record.layers) == 2
    reasons = {module.name: module.reason for module in record.left_alone}
    assert {why for name, why in reasons.items() if "lora" in name} == {"an adapter of Linear"}
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora" in name)


def test_narrow_layers_and_routers_are_left_alone_unless_asked_for():
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(64, 8, bias=False)
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
            self.down, self.up = nn.Linear(64, 4), nn.Linear(4, 64)

    reasons = {module.name: module.reason for module in convert(Mixture(), "fp8-block").left_alone}
    assert reasons == {
        "gate": "a router to 8 experts",
        "down": "narrow, 4 x 64, like adapters and routers",
        "up": "narrow, 64 x 4, like adapters and routers",
    }
    assert convert(Mixture(), "fp8-block", all_layers=True).left_alone == ()
    named = convert(Mixture(), Plan(default=LayerPrecision(), layers=(("gate", LayerPrecision()),)))
    assert "gate" in [layer.name for layer in named.layers]


def test_a_sampled_model_in_float64_says_so():
    layer = layer_of("gaussws").double()
    for context in (contextlib.nullcontext(), step_context(layer, step=0)):
        with pytest.raises(UserError, match=r"'up' samples numbers of torch.float32, .* and has torch.float64"), context:
            layer(inputs(1)[0].double())


def test_bitwidths_in_the_wrong_group_are_noticed_once():
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, PLANS["gaussws"])
    model(inputs(1)[0]).sum().backward()
    optimizer = torch.optim.AdamW(model.named_parameters(), weight_decay=0.3)
    with pytest.warns(UserWarning, match=r"'0.bitwidth' are optimized with weight_decay=0.3, and their guidance asks for 0.1"):
        optimizer.step()
    optimizer.step()  # warnings are errors here
    right = nn.Sequential(nn.Linear(32, 32))
    convert(right, PLANS["gaussws"])
    right(inputs(1)[0]).sum().backward()
    torch.optim.AdamW(param_groups(right)).step()
    forgotten = weakref.ref(right)
    watch_guidance(right)
    del right
    assert forgotten() is None
    optimizer.step()


def test_slow_autocast_is_said_once(monkeypatch):
    monkeypatch.setattr(linear, "slowdown", lambda dtype: 300.0)
    linear._warn_of_dtype.cache_clear()
    layer = Linear(32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(dither.PerformanceWarning, match="about 300 times slower than in float32"):
            layer(inputs(1)[0])
        layer(inputs(1)[0])
    linear._warn_of_dtype.cache_clear()
    monkeypatch.setattr(linear, "slowdown", lambda dtype: 1.0)
    run = dither.optim.training(nn.Sequential(layer), "o1", lr=1e-3)
    with run.forward(), torch.autocast("cpu", torch.bfloat16):
        layer(inputs(1)[0])
    assert linear._warn_of_dtype.cache_info().currsize == 0  # dither.optim's own way is not slow
    assert linear.slowdown(torch.float32) < 20


def test_engines_that_save_no_time_are_said():

    def layer(size: int, engine: str, share: float) -> ConvertedLayer:
        return ConvertedLayer("", size, size, LayerPrecision(), (engine,) * 3, share)

    with pytest.warns(
        dither.PerformanceWarning, match="100% of the model's multiplications are in layers with fewer than 1024"
    ):
        _warn_of_slow_engines([layer(768, "fp8", 1.0)])
    with pytest.warns(
        dither.PerformanceWarning, match="60% .* in formats that this GPU multiplies on BF16 units or in float32"
    ):
        _warn_of_slow_engines([layer(4096, "bf16", 0.6), layer(4096, "fp8", 0.4)])
    _warn_of_slow_engines([layer(2048, "fp8", 1.0)])


def test_places_are_found_where_torch_keeps_them():
    """What the identification of recomputations reads in torch; if this fails, recomputing raises, and nothing else changes."""
    assert hasattr(torch.utils.checkpoint, "_CheckpointFrame")
    assert torch._C._current_graph_task_id() == -1
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert "ctx" in torch.utils.checkpoint.CheckpointFunction.forward.__code__.co_varnames


def test_a_cast_that_rounds_to_nearest_asks_for_no_place():
    layer = Linear(32, 32, precision=LayerPrecision(input=Cast.parse("e4m3 tile(32)")))
    assert layer._place(8) is None


# Captured passes of own loops without a GPU ----------------------------------------------------------------------------


def test_a_model_that_is_not_on_a_gpu():
    with pytest.raises(UserError, match="takes a model on one GPU, and the parameters of this one are on cpu"):
        dither.capture_passes(build_preset("tiny"), lambda tokens: tokens)
    with pytest.raises(UserError, match="takes a model and a function, not str and function"):
        dither.capture_passes("model", lambda tokens: tokens)
    with pytest.raises(UserError, match="are on nowhere"):
        dither.capture_passes(torch.nn.ReLU(), lambda tokens: tokens)


def passes_of(recipe: str):
    model = build_preset("tiny")
    dither.convert(model, recipe)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, tokens)
        loss.backward()
        return loss

    return model, GraphedPasses(model, run)


def test_shapes_stay_and_steps_are_named():
    """Before a capture passes run as usual; the first call fixes the shapes, and random bits need a step."""
    model, passes = passes_of("fp4-block")
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with pytest.raises(UserError, match=r"'model.layers.0.self_attn.q_proj' draws random bits.*step_context"):
        passes(tokens)
    with step_context(model, step=0):
        assert passes(tokens).isfinite()
        with pytest.raises(UserError, match=r"here \[2, 16\] \(torch.int64\), not \[1, 16\] \(torch.int64\): pad the batches"):
            passes(tokens[:1])


def test_counted_rows_move_on_with_a_captured_pass():
    """A replay draws for the rows after those counted so far, and counts its own."""
    model, _ = passes_of("fp4-block")
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    with step_context(model, step=3) as at:
        layer(torch.randn(16, 128))
        assert layer.draws.rows == 16
        at.move_rows(32)
        assert layer.draw_place.tolist() == [3, 16]
        at.move_rows(32)
        assert layer.draw_place.tolist() == [3, 48]
        assert layer.draws.rows == 80
