"""Scales that are measured in a few steps and constants in between: delayed(history, margin, algo, every) and fp8-static."""

import copy
import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F  # noqa: N812

import dither
from dither.errors import UserError
from dither.nn import fused
from dither.nn.step import untouched
from dither.ops.reference import scales
from dither.spec import Scale

SEED = 5
ROWS, WIDTH, INNER = 48, 32, 64
SHORT = dither.Plan(
    default=dither.LayerPrecision.of(
        "e4m3 tensor delayed(2,1,max,4)", "e4m3 tensor delayed(2,1,max,4)", "e5m2 tensor delayed(2,4,max,4)"
    )
)
"""Measured in the steps 0, 1, 4, 8, ..."""


class Block(nn.Module):
    """A norm and a SwiGLU, whose first two layers read the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def model_of(plan: dither.Plan | str = SHORT, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(SEED)
    model = nn.Sequential(*(Block() for _ in range(blocks))).bfloat16()
    dither.convert(model, plan)
    return model


def train(model: nn.Module, steps: range, grow: int = 1, at: int = -1) -> Iterator[Tensor]:
    """Yield the loss and the gradients of each step. The input of step `at` is `grow` times as large."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16() * (grow if step == at else 1)
        with dither.step_context(model, step=step):
            loss = model(x.requires_grad_()).float().square().mean()
            loss.backward()
        yield loss.detach()
        assert x.grad is not None
        yield x.grad
        for parameter in model.parameters():
            assert parameter.grad is not None
            yield parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()


def same(one: Iterator[Tensor], other: Iterator[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("delayed(4,2,max,32)", "delayed(4,2,max,32)"),
        ("delayed(4,0,max,1)", "delayed(4)"),
        ("delayed(4,3,max)", "delayed(4,3)"),
    ],
)
def test_names(text: str, shown: str) -> None:
    assert str(Scale.parse(text)) == shown
    assert Scale.parse(shown) == Scale.parse(text)


@pytest.mark.parametrize("text", ["delayed(4,1,max,0)", "delayed(4,1,32)", "delayed(4,1,max,-2)", "delayed(4,1,max,2,3)"])
def test_wrong_names(text: str) -> None:
    with pytest.raises(UserError, match=r"max\|most_recent,every"):
        Scale.parse(text)


# The cast in torch's operations ----------------------------------------------------------------------------------------


def numbers(dtype: torch.dtype) -> Tensor:
    """All bfloat16 numbers, and float32 numbers between them: zeros of both signs, subnormals, Inf, and NaN of both signs."""
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    if dtype == torch.float32:
        bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.int32)
    return bits.view(torch.float32).to(dtype).view(256, 256)


def reference(x: Tensor, cast: str, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of both layouts and the scale."""
    codes, scale, codes_t, *_ = torch.ops.dither.quantize_both(x, cast, amax, "", 0, None, 0, 0, "reference", None)
    return codes, codes_t.T, scale


def bits(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


@pytest.mark.parametrize("amax", [448.0, 3.7, 1e-30, 1e30])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_those_of_the_reference(dtype: torch.dtype, format: str, amax: float) -> None:
    """Every bit, also of what is clipped, of Inf and of NaN."""
    cast, x = f"{format} tensor delayed(4,2,max,32) nearest", numbers(dtype)
    expected, expected_t, expected_scale = reference(x, cast, torch.tensor(amax))
    multiply, scale = torch.ops.dither.tensor_factors(torch.tensor(amax), cast)
    codes, codes_t = fused.both_codes(x, multiply, cast)
    assert codes.dtype == codes_t.dtype == expected.dtype
    assert torch.equal(bits(codes), bits(expected))
    assert torch.equal(bits(codes_t), bits(expected_t))
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_compiled_codes_are_those_of_the_reference(format: str) -> None:
    """Inductor does not round the product to bfloat16 before the cast, nor store it."""
    torch._dynamo.reset()
    cast, x, amax = f"{format} tensor delayed(4,1,max,8) nearest", numbers(torch.bfloat16), torch.tensor(3.7)
    multiply, _ = torch.ops.dither.tensor_factors(amax, cast)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return fused.both_codes(x * 1.7, multiply, cast)

    found, source = run_and_get_code(torch.compile(run, fullgraph=True), x)
    for codes, wanted in zip(found, reference(x * 1.7, cast, amax)[:2], strict=True):
        assert torch.equal(bits(codes), bits(wanted))
    assert "torch.bfloat16)" not in "".join(re.findall("= empty_strided.*", source[0]))


# Steps -----------------------------------------------------------------------------------------------------------------


def test_steps_that_measure() -> None:
    """Until the history is full, and in steps with a multiple as number. The others change no history."""
    model = model_of()
    layer, recorded = model[0].gate, []
    for step in range(10):
        before = layer.input_history.clone()
        list(train(model, range(step, step + 1)))
        recorded.append(not torch.equal(before, layer.input_history))
    assert recorded == [step in (0, 1, 4, 8) for step in range(10)]
    factors = scales.tensor_factors(layer.input_history.amax(), layer.precision.input)
    list(train(model, range(10, 11)))
    assert torch.equal(layer._input_factors[:, 0], torch.stack(factors))


def test_compiled_blocks_have_the_bits_of_eager_ones() -> None:
    """With three graphs: one measures because nothing is known, one records, and one does neither."""
    torch._dynamo.reset()
    counters.clear()
    expected, model = list(train(model_of(), range(6))), model_of()
    dither.compile(model, backend="aot_eager_decomp_partition")
    assert same(iter(expected), train(model, range(6)))
    assert counters["stats"]["unique_graphs"] == 3
    list(train(model, range(6, 9)))
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("memory", [dither.MemoryOptions("input", "one"), dither.MemoryOptions("codes", "none")])
def test_memory_options_have_the_same_bits(memory: dither.MemoryOptions) -> None:
    torch._dynamo.reset()
    usual = model_of(blocks=1)
    list(train(usual, range(2)))
    eager = copy.deepcopy(usual)
    for layer in (eager[0].gate, eager[0].up, eager[0].down):
        layer.set_memory(memory)
    models = [eager]
    if memory.save == "input":
        models.append(copy.deepcopy(eager))
        dither.compile(models[1], backend="aot_eager_decomp_partition")
    expected = list(train(usual, range(2, 5)))
    for model in models:
        assert same(iter(expected), train(model, range(2, 5)))
        assert all(map(torch.equal, usual.state_dict().values(), model.state_dict().values()))  # step 4 has recorded


def test_layers_that_read_one_input_share_their_factors() -> None:
    model = model_of()
    list(train(model, range(3)))
    first, second = model
    assert first.gate._input_factors is first.up._input_factors
    assert first.gate._input_factors is not first.down._input_factors
    assert first.gate._input_factors is not second.gate._input_factors
    assert first.gate._grad_factors is not first.up._grad_factors
    first.up.input_history.mul_(2)  # as if it read another input from now on
    first.up.delayed.refresh(first.up)
    list(train(model, range(3, 4)))
    assert first.gate._input_factors is not first.up._input_factors
    assert not torch.equal(first.gate._input_factors, first.up._input_factors)


def test_producers_write_codes() -> None:
    """In a step that does not measure, norm, SwiGLU and gradients are written as codes, once, and never in bfloat16."""
    torch._dynamo.reset()
    model = model_of(blocks=1)
    list(train(model, range(2)))
    dither.compile(model)
    _, source = run_and_get_code(lambda: list(train(model, range(2, 3))))
    forward, backward = (re.findall(r"= empty_strided\w*\((\(.*?\)), \(.*?\), torch\.(\w+)\)", each) for each in source)
    narrow, wide = f"({ROWS}, {WIDTH})", f"({ROWS}, {INNER})"
    assert forward == [(f"({ROWS}, 1)", "float32"), (narrow, "float8_e4m3fn"), (wide, "float8_e4m3fn")]
    assert [each for each in backward if each[0] in (narrow, wide)] == [(narrow, "uint8"), (wide, "uint8"), (wide, "uint8")]
    assert [each.count("torch.ops.dither.transposed.default(") for each in source] == [2, 3]
    assert not any("dither.quantize" in each for each in source)


def test_what_outgrows_its_scale_is_measured_anew() -> None:
    """At the next measurement, with a warning, until the history is full again."""
    model = model_of()
    list(train(model, range(4)))
    with pytest.warns(UserWarning, match=r"outgrown their scales .* the grad of .* is 6\d.* times as large"):
        list(train(model, range(4, 5), grow=64, at=4))
    down = model[0].down
    assert down.grad_history[1] == 0
    assert down.grad_history[0] == down._grad_amax
    grown, full = down.grad_history[0].clone(), model[1].gate.input_history.clone()
    assert (full > 0).all()  # a norm's output has not grown
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(train(model, range(5, 8)))
    assert down.grad_history[1] == grown
    assert not torch.equal(model[1].gate.input_history, full)  # layers are measured together


def test_a_resumed_run_is_the_straight_run() -> None:
    """From the middle of a calibration, and from a step between two measurements."""
    for half in (1, 3):
        straight = model_of()
        list(train(straight, range(half)))
        resumed = model_of(blocks=2)
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        assert same(train(straight, range(half, 9)), train(resumed, range(half, 9)))
        assert all(map(torch.equal, straight.state_dict().values(), resumed.state_dict().values()))


def test_without_steps_every_pass_measures() -> None:
    layer = dither.Linear(WIDTH, WIDTH, precision=SHORT.default, name="up")
    for size in (1.0, 2.0, 4.0):
        layer(torch.full((16, WIDTH), size)).sum().backward()
        with torch.no_grad():
            layer.weight.add_(0.1)
    assert layer.input_history.tolist() == [2.0, 1.0]


def test_layers_that_are_never_used_do_not_hold_up_the_others() -> None:
    model = model_of()
    model[1] = nn.Identity()
    model.unused = dither.Linear(WIDTH, WIDTH, precision=SHORT.default, name="unused")  # type: ignore[assignment]
    for step in range(3):
        with dither.step_context(model, step=step):
            assert model.unused.delayed.records
            assert model[0].up.delayed.records == (step < 2)
            model[0](torch.randn(ROWS, WIDTH).bfloat16()).float().sum().backward()


def test_evaluation_and_dry_passes_change_nothing() -> None:
    model = model_of()
    list(train(model, range(4)))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with untouched(model), dither.step_context(model, step=4):
        model(torch.ones(ROWS, WIDTH).bfloat16()).float().square().mean().backward()
    with torch.no_grad():
        model.eval()(torch.ones(ROWS, WIDTH).bfloat16())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert model[0].gate._input_factors is model[0].up._input_factors
