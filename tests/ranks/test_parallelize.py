"""`dither.parallelize`: any layout of ranks draws the noise, rounds by the bits and reads the weights of one rank.

One rank computes the reference, part of the batch by part, as the ranks of a data-parallel layout have them. Losses of a rank
are then compared bit by bit: one random bit that was drawn elsewhere, or one scale of other numbers, would change them. Under
tensor parallelism products are summed in another order, so weights are compared as products read them, and losses to the error
of float32.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sweeps import only
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import from_first, on_ranks, ranks

import dither
from dither import LayerPrecision, Plan, Sampling, UserError
from dither.models import GPT2, GPT2Config, GPTNeo, GPTNeoConfig, Llama, LlamaConfig
from dither.nn import functional, sampling
from dither.nn.functional import OperandCodes
from dither.nn.sharded.gather import coded_of
from dither.nn.sharded.scales import Groups, RowShard, in_whole_groups, split_amax
from dither.parallel import Layout, gathered
from dither.parallel.apply import BFloat16ReduceScatter, gather_codes, shard_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*noise can vanish")

FP8 = LayerPrecision.of("e4m3 tile(16)", "e4m3 block(16)", "e4m3 tile(16)")
FP8_2D = LayerPrecision.of("e4m3 tile(16)", "e4m3 block(16)", "e4m3 tile(16)", {"weight_grad.input": "e4m3 block(16)"})
FP4 = LayerPrecision.of("e2m1 tile(16)", "e2m1 block(16) fp32 stochastic(16)", "e2m1 tile(16) stochastic(16)")
MX = LayerPrecision.of("e4m3 tile(16) pow2_ceil", "e4m3 tile(16) pow2_ceil stochastic(8)", "e4m3 tile(16) pow2_ceil")
METHODS: dict[str, tuple[Plan, dict[str, Any]]] = {
    "fp8-block": (Plan(default=FP8), {}),
    "fp8-block-2d": (Plan(default=FP8_2D), {}),
    "fp8-row": (Plan(default=LayerPrecision.of("e4m3 row", "e4m3 row", "e4m3 row")), {}),
    "fp4-block": (Plan(default=FP4), {}),
    "mxfp8": (Plan(default=MX), {}),
    "gaussws": (Plan().with_sampling(Sampling(block=16)), {}),
    "gaussws-fp8": (Plan(default=FP8).with_sampling(Sampling(block=16, b_init=3.5, b_target=3)), {}),
    "bf16-sr": (Plan(parameters="bf16"), {"bf16_stochastic_round": True}),
    "dynamic8": (Plan(default=FP8), {"states": "dynamic8", "block": 32}),
    "adam-mini": (Plan(default=FP8), {"mini": True}),
}
"""Plans in small groups, and options of the optimizer."""

CLIPPED = Plan(default=replace(LayerPrecision.of(weight="e2m1 tile(16) pow2", requantize=True), learned_clip=True))
"""A plan that no tensor parallelism takes."""

ROWS, LENGTH = 24, 8


def config(**fields: Any) -> LlamaConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 64}
    return LlamaConfig(**sizes | fields)


def converted(method: str, made: Callable[[], nn.Module] | None = None) -> nn.Module:
    model = made() if made else Llama(config(), generator=torch.Generator().manual_seed(0))
    plan = CLIPPED if method == "learned-clip" else METHODS[method][0]
    if plan.parameters == "bf16":
        model.to(torch.bfloat16)
    dither.convert(model, replace(plan, parameters=None), seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".clip"):
                parameter.copy_(torch.linspace(0.3, 1.0, parameter.numel()).view_as(parameter))
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def batch_rank(layout: Layout) -> int:
    return dist.get_rank() // layout.tp % layout.batch_parts


def reference(
    method: str, parts: int, made: Callable[[], nn.Module] | None = None
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return the losses of each part of the batch on one rank, and the mean of their gradients."""
    model = converted(method, made)
    size, losses = ROWS // parts, []
    with dither.step_context(model, step=3) as at:
        for part in range(parts):
            at.row(part * size * LENGTH)
            text = tokens()[part * size : (part + 1) * size]
            loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
            losses.append(loss.detach())
    return losses, {name: p.grad / parts for name, p in model.named_parameters()}


def step_of(model: nn.Module, layout: Layout) -> torch.Tensor:
    """Run a step on this rank's part of the batch and return its loss."""
    size = ROWS // layout.batch_parts
    text = tokens()[batch_rank(layout) * size :][:size]
    with dither.step_context(model, step=3):
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
    return loss.detach()


@contextlib.contextmanager
def reading(model: nn.Module) -> Iterator[dict[str, dict[str, torch.Tensor]]]:
    """Yield the codes, scales and samples of weights that products read in forward passes, by layer and name.

    They are held for a step, gathered, or made in the pass, where FSDP2 gathers weights.
    """
    read: dict[str, dict[str, torch.Tensor]] = {}
    running: list[str] = []

    def note(**found: torch.Tensor | None) -> None:
        if running:
            read[running[0]] |= {name: x.detach().clone() for name, x in found.items() if x is not None and x.numel()}

    def note_codes(codes: OperandCodes) -> None:
        for layout, part in codes._asdict().items():
            note(**{f"{layout} {name}": x for name, x in (part._asdict() if part else {}).items()})

    def before(layer: dither.Linear, _: Any) -> None:
        running[:], read[layer.name] = [layer.name], {}
        coded, step = coded_of(layer.weight), layer.cache
        if codes := step.codes if coded is None else coded.codes:
            note_codes(codes)
        note(amax=step.w_amax if coded is None else coded.block_amax)
        if layer.program.uncast:
            note(w_hat=step.w_hat if coded is None else coded.w_hat)

    def cast(*arguments: Any, made: Callable[..., OperandCodes] = functional.cast_weight, **options: Any) -> OperandCodes:
        note_codes(codes := made(*arguments, **options))
        return codes

    def sample(weight: torch.Tensor, *arguments: Any, made: Callable[..., Any] = sampling.sample) -> Any:
        w_hat, amax = made(weight, *arguments)
        note(amax=amax)
        if running and layers[running[0]].program.uncast:
            note(w_hat=w_hat)
        return w_hat, amax

    layers = {layer.name: layer for layer in model.modules() if isinstance(layer, dither.Linear)}
    handles = [layer.register_forward_pre_hook(before) for layer in layers.values()]
    with mock.patch.object(functional, "cast_weight", cast), mock.patch.object(sampling, "sample", sample):
        yield read
    for handle in handles:
        handle.remove()


def weights_read(method: str, made: Callable[[], nn.Module] | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """Return the codes, scales and samples of weights that one rank reads."""
    single = converted(method, made)
    with reading(single) as known:
        step_of(single, Layout())
    return known


def cut(x: torch.Tensor, like: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the part of x in the shape of `like` that this rank has."""
    for dimension, (size, part) in enumerate(zip(x.shape, like.shape, strict=True)):
        if part < size:
            return x.narrow(dimension, part * rank, part)
    return x


def check_layout(layout: Layout, method: str, options: dict[str, Any], made: Callable[[], nn.Module] | None = None) -> None:
    (expected, gradients), known = from_first(lambda: (reference(method, layout.batch_parts, made), weights_read(method, made)))
    model = dither.parallelize(converted(method, made), layout.mesh("cpu"), **options)
    with reading(model) as read:
        loss = step_of(model, layout)
    own = expected[batch_rank(layout)]
    if layout.tp == 1:
        assert torch.equal(loss, own), (loss, own)
    else:
        assert (loss - own).abs() < 2e-3, (loss, own)
    if layout.tp > 1 or options.get("gather") == "codes":
        rank = dist.get_rank() % layout.tp
        for name, tensors in known.items():
            assert tensors.keys() == read[name].keys(), (name, tensors.keys(), read[name].keys())
            for what, one in tensors.items():
                other = _bytes(read[name][what])
                assert torch.equal(cut(_bytes(one), other, rank), other), (name, what)
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor), name
        assert p.grad.placements == p.placements, name
        found, known_grad = whole(p.grad).float(), gradients[name].float()
        bound = (2e-6 if layout.tp == 1 else 0.1) if known_grad.dtype == p.dtype else 0.02
        assert (found - known_grad).norm() <= bound * known_grad.norm() + 1e-9, (name, layout)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


LAYOUTS = {
    1: [Layout()],
    2: [Layout(dp_replicate=2), Layout(dp_shard=2), Layout(tp=2)],
    3: [Layout(dp_replicate=3), Layout(dp_shard=3)],
    4: [Layout(dp_shard=4), Layout(tp=4), Layout(dp_shard=2, tp=2), Layout(dp_replicate=2, dp_shard=2)],
    8: [Layout(dp_shard=8), Layout(tp=8), Layout(dp_shard=4, tp=2), Layout(dp_replicate=2, dp_shard=2, tp=2)],
}
ORDINARY = {
    (Layout(tp=2), "fp4-block", "weights"),
    (Layout(dp_shard=3), "mxfp8", "codes"),
    (Layout(dp_shard=2, tp=2), "gaussws-fp8", "codes"),
}
CASES = [
    only((layout, method, gather), (layout, method, gather) in ORDINARY)
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    if size > 1
    for method in ("fp8-block", "fp4-block", "mxfp8", "gaussws", "gaussws-fp8")
    for gather in (("weights", "codes") if layout.batch_parts > 1 else ("weights",))
]


@pytest.mark.parametrize(("layout", "method", "gather"), CASES, ids=str)
def test_weights_noise_and_roundings_are_those_of_one_rank(layout: Layout, method: str, gather: str) -> None:
    ranks(layout.ranks, check_layout, layout, method, {"gather": gather})


def mixture() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    sizes |= {"num_local_experts": 3, "num_experts_per_tok": 1, "num_key_value_heads": 2, "head_dim": 16}
    return dither.models.hf({"model_type": "mixtral", **sizes})


def check_clips() -> None:
    for made in (None, mixture):
        check_layout(Layout(dp_shard=2), "learned-clip", {"gather": "weights"}, made)
    with pytest.raises(UserError, match="learns where to clip its weight, which tp=2 shards"):
        dither.parallelize(converted("learned-clip"), Layout(tp=2).mesh("cpu"))
    model = dither.parallelize(converted("learned-clip"), Layout(dp_shard=2).mesh("cpu"), gather="codes")
    assert set(gathered(model).values()) == {"weights"}


def test_learned_clips_are_those_of_one_rank_or_refused() -> None:
    ranks(2, check_clips)


OUTLIERS = dither.recipe("tetrajet2").with_outliers(dither.Outliers(share=0.2, start=1, steps=2))


def outliers_of(kind: str, steps: int = 4) -> list[torch.Tensor]:
    """Train by one process with two micro-batches, or by two ranks with one each; return channels, norms and weights."""
    model = Llama(config(), generator=torch.Generator().manual_seed(0))
    dither.convert(model, OUTLIERS, seed=5)
    run: nn.Module = model
    if kind == "FSDP2":
        run = dither.parallelize(model, Layout(dp_shard=2).mesh("cpu"))
    elif kind == "DDP":
        run = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    parts = tokens().chunk(2)
    alone = dist.new_subgroups(1)[0] if kind == "one" else None
    for step in range(steps):
        with dither.step_context(model, step=step, group=alone):
            for text in parts if kind == "one" else [parts[dist.get_rank()]]:
                (run(text[:, :-1], text[:, 1:]) / (2 if kind == "one" else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(value) for value in model.state_dict().values()]


def check_outliers() -> None:
    """Ranks measure all tokens, and choose and train as one process does, bit for bit: sums of two are exact."""
    expected = outliers_of("one")
    for kind in ("FSDP2", "DDP"):
        assert all(torch.equal(one, other) for one, other in zip(outliers_of(kind), expected, strict=True)), kind
    model = Llama(config(), generator=torch.Generator().manual_seed(0))
    dither.convert(model, OUTLIERS)
    with pytest.raises(UserError, match="has outlier channels, whose choice tp=2 shards: use FSDP2 with tp=1"):
        dither.parallelize(model, Layout(tp=2).mesh("cpu"))
    assert set(gathered(dither.parallelize(model, Layout(dp_shard=2).mesh("cpu"), gather="codes")).values()) == {"weights"}


def test_outlier_channels_are_those_of_one_rank_or_refused() -> None:
    ranks(2, check_outliers)


def trained(model: nn.Module, method: str, layout: Layout, steps: int) -> list[float]:
    """Return the mean losses of some steps."""
    options = dict(METHODS[method][1])
    named = list(model.named_parameters())
    if options.pop("mini", False):
        optimizer = dither.optim.AdamMini(named, dither.optim.roles(model), lr=3e-3)
    else:
        optimizer = dither.optim.AdamW(named, lr=3e-3, **options)
    size, losses = ROWS // layout.batch_parts, []
    text = tokens()[batch_rank(layout) * size :][:size]
    for step in range(steps):
        with dither.step_context(model, step=step, row=batch_rank(layout) * size * LENGTH):
            loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        if layout.ranks > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / layout.ranks)
    return losses


def check_training(layout: Layout, method: str, steps: int) -> None:
    known = from_first(lambda: trained(converted(method), method, Layout(), steps))
    every = []
    for gather in ("weights", "codes") if layout.batch_parts > 1 else ("weights",):
        model = dither.parallelize(converted(method), layout.mesh("cpu"), gather=gather)
        found = trained(model, method, layout, steps)
        assert found[-1] < found[0] - 0.1, found  # it learns
        # Sums in another order let single roundings fall on the other side, and steps amplify that.
        for step, (one, other) in enumerate(zip(found, known, strict=True)):
            assert abs(one - other) < (5e-3 if step < 3 else 0.05), (gather, step, found, known)
        every.append(found)
    assert every[0] == every[-1]  # what is gathered changes no bit


@pytest.mark.parametrize(
    ("layout", "method", "steps"),
    [
        only((layout, method, steps), kept)
        for layout in (Layout(dp_shard=2), Layout(tp=2), Layout(dp_shard=3), Layout(dp_shard=2, tp=2))
        for method in METHODS
        for kept in ((layout, method) == (Layout(dp_shard=2), "adam-mini"),)
        for steps in (3 if kept else 8,)
    ],
    ids=str,
)
def test_training_is_that_of_one_rank(layout: Layout, method: str, steps: int) -> None:
    ranks(layout.ranks, check_training, layout, method, steps)


# Bytes on the wire ----------------------------------------------------------------------------------------------------


class Wire(TorchDispatchMode):
    """Count the bytes that this rank sends by collectives, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("c10d.").split(".")[0]
        if str(func).startswith("c10d."):
            sent = args[0] if name in ("allreduce_",) else args[1]
            tensors = [x for x in (sent if isinstance(sent, list | tuple) else [sent]) if isinstance(x, torch.Tensor)]
            self.bytes[name] = self.bytes.get(name, 0) + sum(x.numel() * x.element_size() for x in tensors)
        return func(*args, **(kwargs or {}))


def sent_bytes(plan: Plan | None, **options: Any) -> dict[str, int]:
    model = Llama(config(), generator=torch.Generator().manual_seed(0))
    if plan is None:
        model.to(torch.bfloat16)
    else:
        dither.convert(model, plan)
    dither.parallelize(model, Layout(dp_shard=2).mesh("cpu"), **options)
    text = tokens()[:2]
    with Wire() as wire, dither.step_context(model, step=0):
        model(text[:, :-1], text[:, 1:]).backward()
    return wire.bytes


def _gathered_bytes(found: dict[str, int]) -> int:
    return sum(count for name, count in found.items() if "allgather" in name)


@on_ranks(2)
def test_bytes() -> None:
    """The embedding, the output layer and the norms are gathered as they are: they are subtracted."""
    model = Llama(config())
    layers = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    others = sum(p.numel() for p in model.parameters()) - layers
    passes = 2  # a block is gathered in forward and again in backward; the root stays gathered
    outside = sum(p.numel() for name, p in model.named_parameters() if "layers" not in name)
    fixed = (passes * (others - outside) + outside) // 2
    bf16 = _gathered_bytes(sent_bytes(None)) - 2 * fixed
    assert bf16 == 2 * passes * layers // 2
    block = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)")
    model = Llama(config())
    dither.convert(model, Plan(default=block))
    dither.parallelize(model, Layout(dp_shard=2).mesh("cpu"), gather="codes")
    assert set(gathered(model).values()) == {"codes"}
    fp8 = _gathered_bytes(sent_bytes(Plan(default=block), gather="codes")) - 4 * fixed
    assert fp8 <= 0.55 * bf16, (fp8, bf16)
    block = LayerPrecision.of("e2m1 tile(128)", "e2m1 block(128)", "e2m1 tile(128)")
    fp4 = _gathered_bytes(sent_bytes(Plan(default=block), gather="codes")) - 4 * fixed
    assert fp4 <= 0.3 * bf16, (fp4, bf16)
    plain, narrow = (sent_bytes(Plan(default=block), reduce=kind) for kind in ("fp32", "bf16"))
    reduced = next(count for name, count in plain.items() if "reduce_scatter" in name)
    assert narrow["alltoall_base_"] * 2 == reduced


@on_ranks(2)
def test_evaluation() -> None:
    """In evaluation, outside of a step_context, gathered codes and unsampled weights are those of whole weights."""
    text = tokens()[:2]
    for method in ("gaussws", "gaussws-fp8"):
        losses = []
        for gather in ("weights", "codes"):
            model = dither.parallelize(converted(method), Layout(dp_shard=2).mesh("cpu"), gather=gather)
            step_of(model, Layout(dp_shard=2))
            with torch.no_grad():
                losses.append(model.eval()(text[:, :-1], text[:, 1:]))
        assert torch.equal(*losses), (method, losses)
        assert set(gathered(model).values()) == {"samples" if method == "gaussws" else "codes"}
    model.train()
    with pytest.raises(UserError, match="gathers sampled weights: run forward and backward inside"):
        model(text[:, :-1], text[:, 1:])


@on_ranks(2)
def test_exchange() -> None:
    """Numbers are rounded once, sums are exact, and stochastic rounding is unbiased and repeats by its step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(world * 4096, generator=torch.Generator().manual_seed(rank))
    every = [torch.randn(world * 4096, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    out = torch.empty(4096)
    BFloat16ReduceScatter()(out, x, dist.group.WORLD, dist.ReduceOp.SUM)
    known = sum(one.bfloat16().float() for one in every)[rank * 4096 :][:4096]
    assert torch.equal(out, known)
    stream = dither.Stream(0, "gradient exchange", "block")
    third = torch.full((world * 4096,), 1 + 2**-9)  # a quarter of the way between two numbers of bfloat16
    results = []
    for step in (1, 1, 2):
        BFloat16ReduceScatter(stream, lambda step=step: step)(out, third, dist.group.WORLD, dist.ReduceOp.AVG)
        results.append(out.clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert abs(float(results[0].mean()) - (1 + 2**-9)) < 5 * 2**-7 * 0.5 / (4096 * world) ** 0.5


# One rank of FSDP2, and compiled blocks -------------------------------------------------------------------------------


def losses_of(model: nn.Module, layout: Layout, steps: int = 2) -> list[float]:
    """Return the losses of some steps with two micro-batches each, and of an evaluation after each step."""
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-3)
    size, found = 8 // layout.batch_parts, []
    text = tokens()[:8][batch_rank(layout) * size :][:size]
    for step in range(steps):
        with dither.step_context(model, step=step):
            for part in text.chunk(2):
                loss = model(part[:, :-1], part[:, 1:])
                loss.backward()
                found.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(float(model.eval()(text[:, :-1], text[:, 1:])))
        model.train()
    return found


def small(method: str) -> nn.Module:
    sizes = config(hidden_size=32, intermediate_size=32, num_attention_heads=2)
    return converted(method, lambda: Llama(sizes, generator=torch.Generator().manual_seed(0)))


@on_ranks(1)
def test_fsdp_over_one_rank() -> None:
    """FSDP2 over one rank, with codes that layers hold for the step, gives the bits of no FSDP2, also in another dtype."""
    mesh = Layout().mesh("cpu")["dp_shard"]
    model = small("gaussws-fp8")
    gather_codes(model, mesh, None)
    shard_weights(model, mesh, reshard_after_forward=True)
    assert set(gathered(model).values()) == {"codes"}
    assert losses_of(model, Layout()) == losses_of(small("gaussws-fp8"), Layout())
    narrow, every = MixedPrecisionPolicy(param_dtype=torch.bfloat16), []
    for coded in (False, True):
        model = small("fp8-block")
        if coded:
            gather_codes(model, mesh, torch.bfloat16)
        shard_weights(model, mesh, reshard_after_forward=True, mp_policy=narrow)
        every.append(losses_of(model, Layout(), 1))
    assert every[0] == every[1]


def check_compiled(layout: Layout, gather: str, method: str) -> None:
    """Compiled blocks of a sharded model compute what uncompiled ones do."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = dither.parallelize(small(method), layout.mesh("cpu"), gather=gather)
        if compiled:
            dither.compile(model, backend="aot_eager")
        found.append(losses_of(model, layout, 1))
    assert found[0] == found[1], found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "gather", "method"),
    [(Layout(dp_shard=2), "codes", "fp8-block"), (Layout(tp=2), "weights", "fp8-block"), (Layout(tp=2), "weights", "fp8-row")],
    ids=str,
)
def test_compiled_blocks_of_a_sharded_model(layout: Layout, gather: str, method: str) -> None:
    ranks(layout.ranks, check_compiled, layout, gather, method)


# Other models, options and errors -------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    sizes = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64)
    return GPT2(sizes, generator=torch.Generator().manual_seed(0))


def gpt_neo() -> nn.Module:
    sizes = GPTNeoConfig(hidden_size=64, num_layers=2, num_heads=4, window_size=4, vocab_size=64, tie_word_embeddings=False)
    return GPTNeo(sizes, generator=torch.Generator().manual_seed(0))


def hugging_face() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    return dither.models.hf({"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 4, **sizes})


@on_ranks(2)
def test_models() -> None:
    plan = Plan(default=LayerPrecision())  # no casts: sums in another order are the only difference
    for made in (gpt2, gpt_neo, hugging_face):
        for options in ({}, {"sequence_parallel": False, "loss_parallel": False})[: 2 if made is gpt2 else 1]:
            single, model = made(), made()
            dither.convert(model, plan)
            dither.parallelize(model, Layout(tp=2).mesh("cpu"), **options)
            text = tokens()[:4]
            losses = []
            for each in (single, model):
                loss = each(text[:, :-1], text[:, 1:])
                loss.backward()
                losses.append(loss.detach())
            assert (losses[0] - losses[1]).abs() < 1e-5, (made, options)
            for (name, p), q in zip(single.named_parameters(), model.parameters(), strict=True):
                assert (whole(q.grad) - p.grad).norm() <= 1e-5 * p.grad.norm() + 1e-8, (made, options, name)
            text = text[:, :-1]
            assert (model(text) - single(text)).abs().max() < 1e-4


@on_ranks(2)
def test_errors() -> None:
    mesh = Layout(tp=2).mesh("cpu")
    with pytest.raises(UserError, match="has 3 ranks, and the run has 2"):
        Layout(dp_shard=3).mesh("cpu")
    with pytest.raises(UserError, match="3 attention heads cannot be divided by tp=2"):
        dither.parallelize(Llama(config(num_attention_heads=3, hidden_size=96)), mesh)
    with pytest.raises(UserError, match=r"'model\.layers\.0\.mlp\.gate_proj' has 33 outputs, which tp=2 cannot divide"):
        dither.parallelize(Llama(config(intermediate_size=33)), mesh)
    inputs = LayerPrecision.of(overrides={"weight_grad.input": "e4m3 block(128)"})
    for plan in ("fp8-block", "fp8-block-2d", Plan(default=inputs)):
        model = Llama(config())
        dither.convert(model, plan)
        with pytest.raises(UserError, match="shards must be multiples of 128, so that none splits a scale group"):
            dither.parallelize(model, mesh)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(UserError, match="Tensor parallelism knows the models of dither"):
        dither.parallelize(nn.Sequential(nn.Linear(4, 4)), mesh)
    model = dither.parallelize(Llama(config()), mesh)
    with pytest.raises(UserError, match="Sequences of 7 tokens cannot be divided by tp=2"):
        model(torch.zeros(1, 7, dtype=torch.int64))


# One process ----------------------------------------------------------------------------------------------------------


def test_more_stages_than_layers_and_bad_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="2 layers cannot be divided into pp=3 stages"):
        Layout(pp=3).check(Llama(config()))
    with pytest.raises(UserError, match=r"parallel\.tp is an integer of at least 1, not 0"):
        Layout(tp=0)
    with pytest.raises(UserError, match="gather is one of 'weights', 'codes', not 'fp8'"):
        dither.parallelize(Llama(config()), None, gather="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 48])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("height", [1, 4, 16, 48])
def test_shards_in_whole_groups_have_the_amax_of_the_whole_matrix(rows: int, ranks: int, height: int) -> None:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    groups = Groups(height, 4 if height > 1 else 1)
    shards = [RowShard(rows, ranks, rank) for rank in range(ranks)]
    amax = torch.stack([split_amax(x[slice(*s.span(s.rank))], s, groups) for s in shards]).amax(0)
    for shard in shards:
        first, last = shard.span(shard.rank)
        padded, skip = in_whole_groups(x[first:last], shard, groups, amax)
        if first == last:
            continue
        assert torch.equal(padded[skip : skip + last - first], x[first:last])
        start = first - skip
        for row in range(0, len(padded), height):
            for column in range(0, 8, groups.width):
                known = x[start + row : start + row + height, column : column + groups.width].abs().max()
                assert padded[row : row + height, column : column + groups.width].abs().max() == known or height == 1
