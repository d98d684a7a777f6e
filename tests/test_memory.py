"""Estimated memory beside measured peaks, and beside what autograd keeps."""

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx

import dither
from dither.errors import UserError
from dither.models import PRESETS, GPT2Config, LlamaConfig, build, parameter_count
from dither.models.presets import skeleton
from dither.nn.linear import Linear
from dither.nn.step import step_context
from dither.optim import host_states
from dither.optim.states import layout
from dither.spec import Cast, MemoryOptions
from dither.spec.recipes import recipe
from dither.tools.memory import (
    GIB,
    PARTS,
    Setting,
    Shape,
    StepPasses,
    code_bytes,
    estimate,
    largest_batch,
    llama3_of,
    llama_of,
    shape_of,
)

SIZES = {
    "134m": (shape_of(PRESETS["llama-134m"]), 24),
    "360m": (shape_of(PRESETS["llama-360m"]), 16),
    "1b": (shape_of(PRESETS["llama-1b"]), 8),
    "3b": (shape_of(PRESETS["llama-3b"]), 3),
}
"""The sizes of `dither bench train`: model, and sequences of 2048 tokens in a step."""

MEASURED = [
    # docs/benchmarks.md: peaks on an H200, blocks compiled, fused cross entropy; test_advice.py has those of other casts
    ("1b", "o1", "fp4-block", 40.10),
    ("134m", "o1", "kept", 22.31),
    ("134m", "o1", "recomputed", 22.14),
    ("360m", "o1", "kept", 34.32),
    ("360m", "o1", "recomputed", 33.74),
    ("1b", "o1", "kept", 42.38),
    ("1b", "o1", "recomputed", 40.27),
    ("3b", "o1", "kept", 61.45),
]
"""(size, mode, recipe or kind of sampling, peak in GiB)."""


def setting(mode: str, what: str | None) -> Setting:
    if what in ("kept", "recomputed"):
        return Setting(mode=mode, sampling=what)
    memory = MemoryOptions("codes", "both")
    return Setting(mode=mode, precision=None if what is None else recipe(what).default, memory=memory)


@pytest.mark.parametrize(("size", "mode", "what", "peak"), MEASURED)
def test_estimates_are_within_a_percent_of_measured_peaks(size, mode, what, peak):
    shape, batch = SIZES[size]
    found = estimate(shape, setting(mode, what), StepPasses(batch=batch, sequence=2048))
    assert found.moment == "loss"
    assert found.peak / GIB == pytest.approx(peak, rel=0.01)


def test_less_is_saved_and_held_as_the_options_say():
    """At 1B: input codes 1 byte of 2 d + q + f per token and block, weight codes 1 byte per weight and layout."""
    shape, batch = SIZES["1b"]
    made = {
        (save, hold): estimate(
            shape,
            replace(setting("o1", "fp8-current"), memory=MemoryOptions(save, hold)),
            StepPasses(batch=batch, sequence=2048),
        ).moments["loss"]
        for save in ("codes", "input")
        for hold in ("both", "one", "none")
    }
    assert made["input", "both"]["input_codes"] == 0
    assert made["codes", "both"]["input_codes"] == pytest.approx(batch * 2048 * 22 * (3 * 2048 + 5632), rel=1e-4)
    held = [made["codes", hold]["weight_codes"] - made["codes", "none"]["weight_codes"] for hold in ("both", "one")]
    assert held == pytest.approx([2 * shape.block_weights, shape.block_weights], rel=1e-4)
    assert made["codes", "both"]["activations"] == made["input", "none"]["activations"]
    assert sum(made["codes", "one"].values()) / GIB == pytest.approx(38.86, rel=0.01)  # measured on an H200


@pytest.mark.parametrize(("options", "peak"), [(("codes", "both"), 34.34), (("input", "none"), 30.05)])
def test_swiglu_keeps_two_codes(options, peak):
    """Peaks of a 1B Llama that an H200 measured."""
    shape, batch = SIZES["1b"]
    found = estimate(
        shape,
        replace(setting("o1", "fp8-current"), memory=MemoryOptions(*options, swiglu="fp8")),
        StepPasses(batch=batch, sequence=2048),
    )
    assert found.peak / GIB == pytest.approx(peak, rel=0.01)


LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=176, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=256
)
GPT2 = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=256)
B, S = 3, 32


def partitioned(graph, inputs):
    """Decide as Inductor does what backward saves, and generate no code."""
    return compile_fx(graph, inputs, inner_compile=lambda part, *_, **__: make_boxed_func(part.forward))


def kept_by_autograd(config, mode: str, what: str | None, memory: MemoryOptions, compiled: bool = False) -> int:
    """Bytes that autograd keeps of one more block, besides parameters and what layers hold."""
    totals = []
    for layers in (1, 2):
        model = build(replace(config, **{"n_layer" if config is GPT2 else "num_hidden_layers": layers}))
        model = model.bfloat16() if mode == "bf16-sr" else model
        if what is not None:
            dither.convert(model, what, memory=memory)
        for block in model.blocks[1:] if compiled else ():  # only the added block is counted
            block.compile(fullgraph=True, backend=partitioned)
        found: dict[int, torch.UntypedStorage] = {}

        def pack(x, found=found):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        autocast = torch.autocast("cpu", torch.bfloat16) if mode == "o1" else contextlib.nullcontext()
        text = torch.randint(256, (B, S + 1), generator=torch.Generator().manual_seed(0))
        step = contextlib.nullcontext() if what is None else step_context(model, step=0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), step, autocast:
            model(text[:, :-1], text[:, 1:])
            layers = [module for module in model.modules() if isinstance(module, Linear)]
            held = [part for layer in layers for codes in layer.cache.codes or () if codes for part in codes]
            own = {
                x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), *filter(torch.is_tensor, held))
            }
        totals.append(sum(storage.nbytes() for place, storage in found.items() if place not in own))
    return totals[1] - totals[0]


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    ("mode", "what", "memory"),
    [
        ("fp32", None, MemoryOptions()),
        ("o1", None, MemoryOptions()),
        ("bf16-sr", None, MemoryOptions()),
        ("o1", "fp8-current", MemoryOptions()),
        ("o1", "fp8-block", MemoryOptions()),
        ("o1", "fp8-current", MemoryOptions("input")),
        ("o1", "fp8-current", MemoryOptions(swiglu="fp8")),
        ("o1", "fp8-block", MemoryOptions("input", swiglu="fp8")),
    ],
)
def test_uncompiled_activations_are_what_autograd_keeps(config, mode, what, memory):
    """Exactly, but for the scales of ragged groups."""
    if config is GPT2 and memory.swiglu == "fp8":
        with pytest.raises(UserError, match="GatedMLP"):
            kept_by_autograd(config, mode, what, memory)
        return
    shapes = [shape_of(replace(config, **{"n_layer" if config is GPT2 else "num_hidden_layers": n})) for n in (1, 2)]
    how, passes = replace(setting(mode, what), compiled=False, memory=memory), StepPasses(batch=B, sequence=S)
    made = [estimate(each, how, passes) for each in shapes]
    ours = [sum(found.moments["loss"][part] for part in ("activations", "input_codes")) for found in made]
    if what is None:  # copies of weights are kept by autograd too; codes are held by layers
        ours = [total + found.moments["loss"]["weight_codes"] for total, found in zip(ours, made, strict=True)]
    assert ours[1] - ours[0] == pytest.approx(kept_by_autograd(config, mode, what, memory), rel=1e-9 if what is None else 0.02)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_compiled_blocks_keep_no_inputs_that_they_can_compute_again():
    """Nor anything else of the size of the residual stream: a graph saves constants too."""
    memory = MemoryOptions("input", hold="none")
    how, passes = replace(setting("o1", "fp8-current"), memory=memory), StepPasses(batch=B, sequence=S)
    shapes = [shape_of(replace(LLAMA, num_hidden_layers=number)) for number in (1, 2)]
    one, two = (
        sum(estimate(shape, how, passes).moments["loss"][part] for part in ("activations", "input_codes")) for shape in shapes
    )
    assert kept_by_autograd(LLAMA, "o1", "fp8-current", memory, compiled=True) == pytest.approx(two - one, rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_shapes_are_those_of_models(name):
    """By sizes alone for Llama and GPT-2; others may have fewer biases, and are then counted."""
    shape = shape_of(PRESETS[name])
    assert shape.parameters == parameter_count(PRESETS[name])
    assert shape.counted is None or PRESETS[name].model_type not in ("llama", "gpt2")
    assert replace(shape, counted=None).parameters == pytest.approx(shape.parameters, rel=0.01)


def test_static_parts_are_bytes_per_parameter():
    """Resident bytes per parameter of the table of optimizer steps in docs/benchmarks.md: 16, 8, 10, 16 and 6.06."""
    shape = SIZES["1b"][0]

    def resident(**given) -> float:
        parts = estimate(shape, Setting(**given), StepPasses(sequence=64)).moments["update"]
        return sum(parts[part] for part in ("weights", "masters", "states", "gradients")) / shape.parameters

    assert resident(mode="fp32") == resident(mode="o1") == 16
    assert resident(mode="bf16-sr") == 8
    assert resident(mode="bf16-kahan") == 10
    assert resident(mode="fp16-o2") == 18
    assert resident(mode="o2-split") == 16
    assert resident(mode="bf16-24") == 9
    assert resident(mode="o2", gradients="bf16") == 16
    assert resident(mode="bf16-sr", states="dynamic8") == pytest.approx(6.0625)
    assert resident(mode="bf16-sr", states="dynamic4") == pytest.approx(5.0625)
    saved = resident(mode="bf16-sr") - resident(mode="bf16-sr", weights="fp8")
    assert saved == pytest.approx(shape.block_weights / shape.parameters)
    assert resident(mode="bf16-sr", optimizer="adam-mini") == 6
    # The guide: AdamW in FP32 has 12 bytes of states and weights, in INT8 6 (blocks of 2048).
    guide = estimate(shape, Setting(mode="o1", states="int8", state_block=2048), StepPasses(sequence=64)).parts
    assert (guide["weights"] + guide["states"]) / shape.parameters == pytest.approx(6, abs=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "adam-mini", "muon"])
@pytest.mark.parametrize(
    ("mode", "states"), [("bf16-sr", "companded8"), ("bf16-sr", "dynamic4"), ("o2", None), ("bf16-24", "bf16")]
)
@pytest.mark.parametrize("preset", ["llama-134m", "llama-8b"])
def test_states_in_host_memory_are_those_of_the_optimizer(preset, mode, states, optimizer):
    """Each tensor of a matrix rounded up to a power of two, and slots of the largest group."""
    if optimizer == "adam-mini" and states in ("companded8", "dynamic4"):
        return  # which it does not have
    model = skeleton(PRESETS[preset])
    options = {} if states is None else {"states": states}
    roles = dither.optim.roles(model) if optimizer == "adam-mini" else None
    made = dither.optim.training(model, mode, 1e-3, roles=roles, muon={} if optimizer == "muon" else None, **options).optimizer
    layouts = [(member, layout(member)) for member in made.members() if member.parameter.dim() > 1]
    shared = {"exp_avg_sq"} if optimizer == "adam-mini" else set()
    sizes = [kind.itemsize * size.numel() for _, each in layouts for key, (kind, size) in each.items() if key not in shared]
    shape, given = shape_of(PRESETS[preset]), {"mode": mode, "states": states, "optimizer": optimizer}
    on_gpu = estimate(shape, Setting(**given), StepPasses(sequence=64))
    found = estimate(shape, Setting(**given, states_on="host"), StepPasses(sequence=64))
    assert (on_gpu.host, on_gpu.streamed) == (0, 0)
    assert found.host == sum(1 << math.ceil(math.log2(size)) for size in sizes)
    assert found.streamed == pytest.approx(sum(sizes), rel=0.01)
    assert on_gpu.parts["masters"] + on_gpu.parts["states"] == pytest.approx(found.streamed)
    kept = host_states.HostStates()
    groups = kept.groups(made.members())
    largest = max(sum(part_bytes(made.members()[part.position], part.rows, shared) for part in group) for group in groups)
    assert found.parts["masters"] == 0
    slots = min(len(groups), kept._most)
    assert min(largest * slots, found.streamed) <= found.parts["states"] * 1.01
    assert found.parts["states"] == pytest.approx(found.streamed) or found.parts["states"] <= 1.15 * slots * largest


@pytest.mark.parametrize("where", ["device", "host"])
def test_watched_weights_have_four_numbers_in_float32(where):
    """That is what `OscillationReset` holds in a window."""
    model = build("tiny")
    dither.convert(model, "tetrajet2")
    reset = dither.optim.OscillationReset(model, dither.optim.AdamW(model.named_parameters(), lr=1e-3))
    reset.after_step(1)
    held = sum(4 * tensor.numel() for movement in reset.movements.values() for tensor in movement)
    given = {"mode": "bf16-sr", "precision": recipe("tetrajet2").default, "states_on": where}
    peaks = [
        estimate(shape_of(PRESETS["tiny"]), Setting(**given, watched=watched), StepPasses(sequence=64)).peak
        for watched in (False, True)
    ]
    assert peaks[1] - peaks[0] == held


def part_bytes(member, rows, shared) -> int:
    height = 1 if rows is None else (rows.stop - rows.start) / member.parameter.shape[0]
    return sum(height * kind.itemsize * size.numel() for key, (kind, size) in layout(member).items() if key not in shared)


@pytest.mark.parametrize(
    ("lean", "checkpointing", "measured"), [(False, "none", 85.0), (True, "none", 65.5), (True, "full", 44.5)]
)
def test_peaks_of_8b_on_an_h200(lean, checkpointing, measured):
    """transformers' Llama 3.1 8B with its own loss, 2 x 4096 tokens: docs/big-models.md."""
    setting = Setting(mode="bf16-sr", precision=recipe("fp8-current").default, states="companded8", float_logits=True)
    if lean:
        setting = replace(setting, released=True, memory=MemoryOptions("input", "none"))
    found = estimate(llama3_of(8e9), setting, StepPasses(batch=2, sequence=4096, checkpointing=checkpointing))
    assert found.peak / GIB == pytest.approx(measured, rel=0.03)


def test_moments_of_a_step():
    """Few tokens: gradients are the peak; many: activations; accumulation needs both; checkpointing trades them for a block."""
    shape, _ = SIZES["1b"]
    small, large = (estimate(shape, Setting(), StepPasses(batch=batch, sequence=128)) for batch in (1, 64))
    assert (small.moment, large.moment) == ("update", "loss")
    assert small.parts["gradients"] == 4 * shape.parameters
    assert large.parts["gradients"] == 0
    both = estimate(shape, Setting(), StepPasses(batch=64, sequence=128, number=2))
    assert both.peak == large.peak + 4 * shape.parameters
    again = estimate(shape, Setting(), StepPasses(batch=64, sequence=128, checkpointing="full"))
    assert again.moments["loss"]["activations"] == 64 * 128 * 22 * 2048 * 4
    assert again.moments["recompute"]["temporaries"] > large.parts["activations"] / 22
    assert again.peak < large.peak
    assert set(PARTS) == set(large.parts)


def test_codes():
    for text, expected in {
        "e4m3 tensor": 1 + 4 / 4096**2,
        "e4m3 block(128)": 1 + 4 / 128**2,
        "e4m3 row": 1 + 4 / 4096,
        "e2m1 tile(128)": 1 + 4 / 128,  # in E4M3 codes, for FP8 units
        "mxfp8": 1 + 1 / 32,
        "mxfp4": 0.5 + 1 / 32,
        "nvfp4": 0.5 + 1 / 16,
    }.items():
        assert code_bytes(Cast.parse(text), 4096, 4096) == expected, text


def test_the_largest_batch_fits_and_the_next_does_not():
    shape, how = SIZES["3b"][0], Setting(mode="bf16-sr")
    passes = StepPasses(sequence=2048)
    batch = largest_batch(shape, how, passes, memory=80 * GIB)
    assert estimate(shape, how, replace(passes, batch=batch)).peak <= 80 * GIB
    assert estimate(shape, how, replace(passes, batch=2 * batch)).peak > 80 * GIB
    assert largest_batch(shape, how, passes, memory=10 * GIB) == 0


@pytest.mark.parametrize("parameters", [5e7, 1.3e9, 13e9, 70e9])
def test_a_llama_of_a_size_has_about_that_size(parameters):
    assert llama_of(parameters).parameters == pytest.approx(parameters, rel=0.1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Setting(mode="bf61-sr"), "There is no memory.mode='bf61-sr'.*did you mean 'bf16-sr'"),
        (lambda: Setting(states="int3"), "There is no memory.states='int3'"),
        (lambda: Setting(gradients="fp8"), "memory.gradients is one of fp32, bf16, not 'fp8'"),
        (lambda: StepPasses(batch=0, sequence=1), "The batch is a positive integer, not 0"),
        (lambda: estimate(SIZES["1b"][0], Setting(released=True), StepPasses(number=2)), "several passes accumulate them"),
        (lambda: llama_of(12), "from 1e6 to 1e13"),
        (lambda: Shape(width=0, layers=1, heads=1, feed_forward=1, vocab=1), "The width of a model is a positive integer"),
    ],
)
def test_mistakes_are_sentences(wrong, said):
    with pytest.raises(UserError, match=said):
        wrong()
