"""AdamW and Adam-mini on the GPU: kernel = reference = CPU, bit for bit; CUDA graphs, synchronisation, memory, loss scaling."""

import math
from collections.abc import Callable, Iterator

import pairs
import pytest
import torch
from torch import Tensor, nn

import dither
from dither.optim import AdamMini, AdamW, Role
from dither.spec.optimizer import Update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
triton = pytest.importorskip("triton", reason="the kernels need Triton")
tl = pytest.importorskip("triton.language", reason="the kernels need Triton")

from dither.ops.triton import adamw_kernels, state_maps  # noqa: E402

SPECIAL = [0.0, -0.0, 1e-45, -1e-38, 1e30, -1e30, 1e19, torch.inf, torch.nan, -torch.inf, 3e38]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]

LARGE = [
    pairs.Size(2048, 4096),
    pairs.Size(1000, 3001, row=5, column=64),
    pairs.Size(1, 200_000),
    pairs.Size(4096, 512, row=7, column=32),
    pairs.Size(3, 7),
    pairs.Size(129, 1024, shift=1),
]
"""More than 10^7 elements: whole rows of blocks, ragged ones, one row, shards, a tiny tensor, an odd address."""

SMALL = [
    pairs.Size(40, 256),
    pairs.Size(17, 131, row=5, column=64),
    pairs.Size(1, 1000),
    pairs.Size(30, 96, row=7, column=32),
    pairs.Size(5, 3),
]
ANYWHERE = [pairs.Size(17, 131, row=5, column=3), pairs.Size(9, 64, row=1, column=13)]
"""Shards that begin within a Philox block, which 8-bit states do not allow."""


def wide_range(rows: int, columns: int, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """Numbers from the subnormal ones to 10^30, zeros among them; made on the GPU."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device=device)
    size = torch.randint(-140, 100, (rows, columns), generator=generator, device=device)
    # Most in the usual range, some anywhere: a block whose second moments overflow is lost, and most should not be.
    usual = torch.randint(-30, 6, (rows, columns), generator=generator, device=device)
    anywhere = torch.rand(rows, columns, generator=generator, device=device) < 1 / 64
    x = torch.ldexp(torch.ldexp(x, torch.where(anywhere, size, usual) // 2), torch.where(anywhere, size + 1, usual + 1) // 2)
    x[:, ::97] = 0.0
    return x.to(dtype)


MODES = [
    (update, dtype)
    for number, update in enumerate(pairs.updates())
    for dtype in DTYPES
    if dtype == torch.bfloat16 or (number % 3 == DTYPES.index(dtype) - 1 and not update.master.startswith("split"))
]


@pytest.mark.parametrize(("update", "dtype"), MODES, ids=[f"{pairs.name_of(u)}-{str(d)[6:]}" for u, d in MODES])
def test_every_mode(update: Update, dtype: torch.dtype) -> None:
    """Over 10^7 elements by kernel and reference on the GPU; over fewer on the CPU as well."""
    assert pairs.check_adamw(LARGE, dtype, update, "cuda", special=SPECIAL, numbers=wide_range) == 0
    more = [] if update.in_blocks else ANYWHERE
    assert pairs.check_adamw([*SMALL, *more], dtype, update, "cuda", special=SPECIAL[:6], steps=3, also_on_cpu=True) == 0


@pytest.mark.parametrize("states", ["dynamic8", "companded8", "e4m3", "int8"])
def test_blocks_of_2048(states: str) -> None:
    """A block is a tile of its own size, of more warps: whole rows of blocks, rows that end within one, rows below one."""
    sizes = [
        pairs.Size(512, 8192),
        pairs.Size(100, 3001, row=5, column=2048),
        pairs.Size(64, 40),
        pairs.Size(129, 4096, shift=1),
    ]
    update = Update("stochastic", states, block=2048)
    assert pairs.check_adamw(sizes, torch.bfloat16, update, "cuda", special=SPECIAL, also_on_cpu=True) == 0


def test_gradients_of_another_dtype() -> None:
    update = Update("stochastic", "bf16")
    assert pairs.check_adamw(SMALL, torch.bfloat16, update, "cuda", grad_dtype=torch.float32, also_on_cpu=True) == 0


@pytest.mark.parametrize("update", [Update("stochastic", "bf16"), Update("nearest", "companded8")], ids=pairs.name_of)
@pytest.mark.parametrize("block", [0, 128])
def test_weights_in_codes(block: int, update: Update) -> None:
    """By AdamW and by both passes of Muon, whose momentum leaves the weights alone: tiles that groups span, and ragged rows."""
    sizes = [pairs.Size(rows, columns, block=block) for rows, columns in ((1024, 2048), (300, 1001), (129, 256), (3, 40))]
    assert pairs.check_adamw(sizes, torch.bfloat16, update, "cuda") == 0
    for nesterov in (True, False):
        assert pairs.check_muon(sizes, update, "cuda", nesterov=nesterov) == 0


@pytest.mark.parametrize(
    "update",
    [
        update
        for update in pairs.updates()
        # Refused: its last bit is in the sign of each weight's own second moment; and rounding errors of AdamW's moments.
        if not (update.master == "split" or update.error_feedback)
        and (update.states == "fp32" or (update.states, update.state_rounding) == ("bf16", "stochastic"))
    ],
    ids=pairs.name_of,
)
def test_adam_mini(update: Update) -> None:
    """Gradients whose squares add up exactly: the order of a sum is no part of what is promised."""
    sizes = [
        pairs.Size(512, 1024, run=128),
        pairs.Size(1000, 515, row=3, column=5, run=1),
        pairs.Size(77, 4096, row=50, run=64, lead=50),
        pairs.Size(1, 4096, run=1),
        pairs.Size(64, 96, run=64, shift=1),
    ]
    assert pairs.check_adamw(sizes, torch.bfloat16, update, "cuda", also_on_cpu=True) == 0


# Square roots and quotients -------------------------------------------------------------------------------------------


@triton.jit
def _roots(v_ptr, out_ptr):
    place = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    tl.store(out_ptr + place, adamw_kernels.square_root(tl.load(v_ptr + place), True))


@triton.jit
def _eight_roots(v_ptr, out_ptr):
    place = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    tl.store(out_ptr + place, adamw_kernels.square_roots(tl.load(v_ptr + place), True))


@triton.jit
def _quotients(m_ptr, d_ptr, out_ptr):
    place = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    tl.store(out_ptr + place, adamw_kernels.quotient(tl.load(m_ptr + place), tl.load(d_ptr + place), True))


def test_square_roots_of_every_float32() -> None:
    """All 2^31 numbers from zero to NaN. A root of float64, rounded, is the float32 one rounded once: 53 >= 2 * 24 + 2 bits."""
    length = 1 << 26
    out = torch.empty(length, device="cuda")
    for chunk in range(1 << 5):
        v = (torch.arange(length, device="cuda") + chunk * length).int().view(torch.float32)
        expected = v.double().sqrt().float()
        expected = torch.where(v < torch.inf, expected, torch.nan)
        for kernel in (_roots, _eight_roots):
            kernel[(length // 1024,)](v, out, enable_fp_fusion=False)
            assert pairs.differing(expected, out) == 0, (kernel, chunk)


@triton.jit
def _reciprocals(d_ptr, out_ptr):
    place = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    tl.store(out_ptr + place, state_maps.reciprocal(tl.load(d_ptr + place), True))


def test_reciprocals_of_every_mantissa() -> None:
    """All 2^23 of them, with the exponents that sums of a block's largest magnitude and another one have, and their ends."""
    mantissas = torch.arange(1 << 23, device="cuda", dtype=torch.int32)
    out = torch.empty(1 << 23, device="cuda")
    for exponent in (-100, -60, -31, -30, -1, 0, 1, 2, 3, 7, 60):
        d = (mantissas + (127 + exponent << 23)).view(torch.float32)
        _reciprocals[(d.numel() // 1024,)](d, out, enable_fp_fusion=False)
        assert pairs.differing((1 / d.double()).float(), out) == 0, exponent


def quotients(m: Tensor, d: Tensor) -> int:
    """How many of the kernel's quotients differ from those of float64, rounded."""
    out = torch.empty_like(m)
    _quotients[(m.numel() // 1024,)](m, d, out, enable_fp_fusion=False)
    expected = ((m * 2.0**48).double() / d.double()).float()
    expected = torch.where(expected.abs() < torch.inf, expected, torch.nan)
    return pairs.differing(torch.where(expected.abs() < 2.0**-100, 0.0, expected), out)


def test_quotients_of_every_exponent() -> None:
    """Each of float32's exponents over each of 10^-30 to 10^30, 512 mantissas a pair."""
    generator = torch.Generator("cuda").manual_seed(1)
    above = torch.arange(28, 227, device="cuda", dtype=torch.int32) << 23  # 2^-99 to 2^99
    for exponent in range(256):
        bits = torch.randint(0, 1 << 23, (2, above.numel(), 1024), generator=generator, device="cuda", dtype=torch.int32)
        bits[0, :, :4] = torch.tensor([0, 1, (1 << 23) - 1, 1 << 22], device="cuda")
        bits[1, :, 1:5] = torch.tensor([0, 1, (1 << 23) - 1, 1 << 22], device="cuda")
        m = (bits[0] | exponent << 23).view(torch.float32).reshape(-1)
        d = (bits[1] | above[:, None]).view(torch.float32).reshape(-1)
        assert quotients(m, d) + quotients(-m, d) == 0, exponent


# Whole optimizers -----------------------------------------------------------------------------------------------------


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384), nn.LayerNorm(384), nn.Linear(384, 100, bias=False)).to("cuda", dtype)


EACH_ROW = {"0.weight": Role.rows_each(64), "2.weight": Role.rows_each(1)} | {
    name: Role.whole() for name in ("0.bias", "1.weight", "1.bias")
}

MAKERS: dict[str, Callable[..., AdamW]] = {
    "bf16": lambda net, **options: AdamW(net.named_parameters(), **options),
    "dynamic8": lambda net, **options: AdamW(net.named_parameters(), states="dynamic8", weights="kahan", **options),
    "e4m3": lambda net, **options: AdamW(net.named_parameters(), states="e4m3", state_rounding="stochastic", **options),
    "master": lambda net, **options: AdamW(net.named_parameters(), states="fp32", master="fp32", **options),
    "mini": lambda net, **options: AdamMini(net.named_parameters(), EACH_ROW, **options),
}


def gradient(parameter: Tensor, step: int) -> Tensor:
    """Multiples of 2^-4: sums of their squares are exact. Step 5 has a NaN."""
    generator = torch.Generator().manual_seed(100 * step + parameter.numel())
    grad = torch.randint(-127, 128, parameter.shape, generator=generator) / 16
    if step == 5:
        grad.view(-1)[3] = torch.nan
    return grad.to(parameter.device, parameter.dtype)


def numbers(net: nn.Module, optimizer: AdamW) -> list[Tensor]:
    states = [t for p in net.parameters() for t in optimizer.state[p].values()]
    found = [*net.parameters(), *states, optimizer.steps, optimizer.skipped]
    return [t.detach().cpu().int() if t.dtype == torch.int64 else t.detach().cpu() for t in found]


def assert_same(a: tuple[nn.Module, AdamW], b: tuple[nn.Module, AdamW]) -> None:
    for x, y in zip(numbers(*a), numbers(*b), strict=True):
        assert pairs.differing(x, y) == 0


@pytest.mark.parametrize("kind", MAKERS)
def test_a_captured_step_replays_as_eager_ones(kind: str) -> None:
    """Ten replays, with a learning rate that changes on the device and a step that is skipped, are ten eager steps."""
    runs = []
    for captured in (False, True):
        net = network()
        rate = torch.tensor(1e-2, device="cuda")
        optimizer = MAKERS[kind](net, lr=rate, nonfinite="skip", max_norm=1.0)
        for p in net.parameters():
            p.grad = gradient(p, 0)
        optimizer.step()  # makes the state and compiles
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        for step in range(1, 11):
            rate.fill_(1e-2 / step)
            for p in net.parameters():
                p.grad.copy_(gradient(p, step))
            if captured:
                graph.replay()
            else:
                optimizer.step()
        assert (int(optimizer.steps), int(optimizer.skipped)) == (10, 1)
        runs.append((net, optimizer))
    assert_same(*runs)


def test_a_captured_step_cannot_wait() -> None:
    net = network()
    optimizer = AdamW(net.named_parameters(), lr=1e-2)
    for p in net.parameters():
        p.grad = gradient(p, 0)
    optimizer.step()
    with (
        pytest.raises(dither.UserError, match=r"captured in a CUDA graph .* nonfinite='skip'"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
@pytest.mark.parametrize("captured", [False, True])
def test_a_rate_on_the_device_that_cannot_be(value: float, captured: bool) -> None:
    """Checked where it lies: the step is skipped and counted, under every policy; `raise` says why."""
    net = network()
    rate = torch.tensor(1e-2, device="cuda")
    optimizer = AdamW(net.named_parameters(), lr=rate, capturable=True)
    for p in net.parameters():
        p.grad = gradient(p, 0)
    optimizer.step()
    step = optimizer.step
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        step = graph.replay
    before = [p.detach().clone() for p in net.parameters()]
    rate.fill_(value)
    step()
    assert (int(optimizer.steps), int(optimizer.skipped)) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    optimizer.nonfinite = "unchecked"
    optimizer.step()
    assert int(optimizer.skipped) == 2
    optimizer.nonfinite = "raise"
    with pytest.raises(dither.UserError, match="learning rate is a number from 0 on"):
        optimizer.step()
    rate.fill_(1e-2)
    step()
    assert int(optimizer.steps) == 2
    with pytest.raises(dither.UserError, match="learning rate is a number from 0 on"):
        AdamW(net.named_parameters(), lr=torch.tensor(value, device="cuda"))


def cleared(net: nn.Module, optimizer: AdamW) -> None:
    optimizer.state.clear()


def moment_swapped(net: nn.Module, optimizer: AdamW) -> None:
    moment = optimizer.state[net[0].bias]["exp_avg"]
    moment.data = torch.zeros_like(moment)


def count_replaced(net: nn.Module, optimizer: AdamW) -> None:
    optimizer.state[net[0].bias]["step"] = 9


def format_changed(net: nn.Module, optimizer: AdamW) -> None:
    optimizer.param_groups[0].update(states="fp32", seed=3, maximize=True)


def weight_swapped(net: nn.Module, optimizer: AdamW) -> None:
    net[2].weight.data = net[2].weight.detach() * 2


@pytest.mark.parametrize("edit", [cleared, moment_swapped, count_replaced, format_changed, weight_swapped])
@pytest.mark.parametrize("kind", ["bf16", "dynamic8", "mini"])
def test_edits_between_steps(kind: str, edit: Callable[[nn.Module, AdamW], None]) -> None:
    """Kernels that are launched through addresses see them as the reference on a CPU does."""
    runs = []
    for device in ("cpu", "cuda"):
        net = network().to(device)
        optimizer = MAKERS[kind](net, lr=1e-2, nonfinite="skip")
        for step in range(4):
            for p in net.parameters():
                p.grad = gradient(p, step)
            if step == 2:
                edit(net, optimizer)
            optimizer.step()
        runs.append((net, optimizer))
    assert_same(*runs)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_that_moves_takes_its_states_along(kind: str) -> None:
    runs = []
    for moves in (False, True):
        net = network().cpu()
        optimizer = MAKERS[kind](net, lr=1e-2)
        for step in range(4):
            if moves and step in (1, 3):
                net.to("cuda" if step == 1 else "cpu")
            for p in net.parameters():
                p.grad = gradient(p, step)
            optimizer.step()
        runs.append((net, optimizer))
    assert_same(*runs)


def test_a_compiled_training_function() -> None:
    """The graph breaks at the step; with Inductor too, weights are what eager steps make of the same gradients."""
    net = network()
    optimizer = AdamW(net.parameters(), lr=1e-2, nonfinite="skip")
    kept: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: kept.append([p.grad.clone() for p in net.parameters()]))
    start = [p.detach().clone() for p in net.parameters()]

    @torch.compile
    def train(x: Tensor) -> None:
        net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        train(torch.full((4, 256), 1.0 + step, device="cuda", dtype=torch.bfloat16))
    again = network()
    for p, value in zip(again.parameters(), start, strict=True):
        p.data.copy_(value)
    eager = AdamW(again.parameters(), lr=1e-2, nonfinite="skip")
    for grads in kept:
        for p, grad in zip(again.parameters(), grads, strict=True):
            p.grad = grad
        eager.step()
    assert len(kept) == 3
    assert_same((net, optimizer), (again, eager))


@pytest.fixture
def no_synchronisation() -> Iterator[Callable[[], None]]:
    """A function from whose call on a wait for the device is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", MAKERS)
def test_a_step_waits_for_nothing(kind: str, no_synchronisation: Callable[[], None]) -> None:
    """New gradients, at new addresses, and a new learning rate in each step."""
    net = network()
    optimizer = MAKERS[kind](net, lr=1e-2, nonfinite="skip", max_norm=1.0)
    kept = [[gradient(p, step) for p in net.parameters()] for step in range(4)]
    for step, grads in enumerate(kept):
        for p, grad in zip(net.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        no_synchronisation()


@pytest.mark.parametrize("nonfinite", ["skip", "unchecked"])
@pytest.mark.parametrize("kind", ["bf16", "dynamic8", "e4m3", "mini"])
def test_a_step_needs_no_memory_to_speak_of(kind: str, nonfinite: str) -> None:
    """8 bytes for each program's (or run's) sum of squares, a row of constants a tensor, and some scalars."""
    net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3))).to("cuda", torch.bfloat16)
    each = {name: Role.rows_each(1) for name, _ in net.named_parameters()}
    make = MAKERS[kind] if kind != "mini" else lambda net, **options: AdamMini(net.named_parameters(), each, **options)
    optimizer = make(net, lr=1e-2, nonfinite=nonfinite)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    rows = 3 * 4096 if kind == "mini" else 3 * 4096 * 4096 // 8192
    squares = 0 if nonfinite == "unchecked" else 8 * rows
    scalars = 32 * 512  # the allocator's smallest block for each
    bound = 2 * squares + 4 * 64 + scalars
    assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() <= bound
    assert bound < 0.004 * sum(p.numel() * p.itemsize for p in net.parameters())


@pytest.mark.parametrize("kind", MAKERS)
def test_cpu_equals_gpu(kind: str) -> None:
    """The same run on both devices, clipping and a skipped step included."""
    runs = []
    for device in ("cpu", "cuda"):
        net = network().to(device)
        optimizer = MAKERS[kind](net, lr=1e-2, nonfinite="skip", max_norm=1.0)
        for step in range(7):
            for p in net.parameters():
                p.grad = gradient(p, step)
            optimizer.step()
        runs.append((net, optimizer))
    assert_same(*runs)


def test_a_state_moves_between_devices() -> None:
    nets = [network().to(device) for device in ("cpu", "cuda")]
    optimizers = [MAKERS["dynamic8"](net, lr=1e-2) for net in nets]
    for step in range(2):
        for p in nets[0].parameters():
            p.grad = gradient(p, step)
        optimizers[0].step()
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for net, optimizer in zip(nets, optimizers, strict=True):
        for p in net.parameters():
            p.grad = gradient(p, 2)
        optimizer.step()
    assert_same((nets[0], optimizers[0]), (nets[1], optimizers[1]))


def test_loss_scaling_of_float16() -> None:
    """An overflow skips the step and halves the scale; without one the run goes on, and its loss falls."""
    run = dither.optim.training(network(torch.float32), "fp16", lr=1e-3)
    x = torch.randn(32, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def loss(size: float) -> Tensor:
        with run.forward():
            return run.model(x).float().square().mean() * size

    losses = []
    for _ in range(10):
        losses.append(loss(1.0).item())
        run.backward(loss(1.0))
        run.step()
    assert losses[-1] < losses[0]
    scale, before = run.scaler.get_scale(), [p.detach().clone() for p in run.model.parameters()]
    skipped = int(run.optimizer.skipped)
    run.backward(loss(1e6))  # float16 gradients overflow
    run.step()
    assert run.scaler.get_scale() == scale / 2
    assert int(run.optimizer.skipped) == skipped + 1
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert math.log2(scale).is_integer()
