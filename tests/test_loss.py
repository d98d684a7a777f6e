"""Cross entropy: beside torch's own and float64, with targets and logits that are not as they should be, and compiled.

`tests/test_pairs.py` holds kernel and reference against the bounds that `dither.ops.reference.loss` states.
"""

import math

import pairs
import pytest
import torch
from sweeps import only
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import dither
from dither.models.causal import cross_entropy, output_loss
from dither.ops.reference import loss as reference
from dither.ops.reference.loss import IGNORE

pytestmark = pytest.mark.usefixtures("quiet_numpy")

NAN, INF = torch.nan, torch.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["reference", "kernel"])
def code(request: pytest.FixtureRequest):
    """What computes losses and gradients: one body tests both."""
    if request.param == "kernel":
        from dither.ops.triton import loss

        return loss
    return reference


@pytest.fixture
def backend(code) -> str:
    return "reference" if code is reference else "kernel"


def test_a_row_by_hand(code, device):
    """The example of the reference's first lines."""
    logits = torch.tensor([[0.0, math.log(3.0)]], device=device)
    targets = torch.tensor([0], device=device)
    losses, parts = code.forward(logits, targets)
    assert losses.tolist() == pytest.approx([math.log(4.0)], abs=1e-6)
    assert parts.flatten().tolist() == pytest.approx([math.log(3.0), math.log(4.0 / 3.0)], abs=1e-6)
    grads = code.backward(logits, targets, parts, torch.tensor([2.0], device=device))
    assert grads.flatten().tolist() == pytest.approx([-1.5, 1.5], abs=1e-6)


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_is_that_of_torch(backend, dtype, device):
    """Within the bound of the worst row and 2^-24 log2(N) for the sum over rows, on either side."""
    N, V = 37, 501
    logits, targets, _ = pairs.logits_of(N, V, dtype, device)
    logits.requires_grad_()
    expected = functional.cross_entropy(logits.float(), targets)
    (slope,) = torch.autograd.grad(3 * expected, logits)
    loss = cross_entropy(logits, targets, backend=backend)
    (mine,) = torch.autograd.grad(3 * loss, logits)
    worst = functional.cross_entropy(logits.double(), targets, reduction="none").max().item()
    each = 2.0**-24 * (2 * worst + 3 * math.log(V) + 46)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert abs(loss.item() - expected.item()) <= 2 * (each + 2.0**-24 * math.log2(N) * expected.item())
    counted = (targets != IGNORE).sum().item()
    bound = 2 * 3 / counted * 2.0**-24 * (3 * math.log(V) + 50) + slope.abs().double() * torch.finfo(dtype).eps
    bound += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert mine.dtype == dtype
    assert bool(((mine.double() - slope.double()).abs() <= bound).all())
    assert bool((mine[targets == IGNORE] == 0).all())


@pytest.mark.parametrize("far", [1e4, -1e4, 3e38, -3e38])
def test_logits_far_from_zero_lose_nothing(code, far, device):
    """A logsumexp in one float32 would be off by 5e-4 at 1e4; here only the logits themselves are as coarse as they are."""
    near = torch.tensor([[0.0, 1.0, 2.0, 5.0]], device=device)
    logits = near + far if abs(far) < 1e5 else torch.full_like(near, far)
    same = near if abs(far) < 1e5 else torch.zeros_like(near)
    targets, weights = torch.tensor([1], device=device), torch.ones(1, device=device)
    losses, parts = code.forward(logits, targets)
    exact = functional.cross_entropy(same.double(), targets).item()
    assert losses.item() == pytest.approx(exact, abs=2.0**-24 * (2 * exact + 3 * math.log(4) + 46))
    grads = code.backward(logits, targets, parts, weights)
    slopes = same.double().softmax(-1) - functional.one_hot(targets, 4)
    assert (grads - slopes).abs().max().item() <= 2.0**-24 * (3 * math.log(4) + 50)


@pytest.mark.sampled(cover=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [5, 40, 4200])
def test_non_finite_logits_are_those_of_torch(code, V, dtype, device):
    logits = torch.linspace(-2, 2, 7 * V, device=device).view(7, V).to(dtype)
    targets = torch.full((7,), V - 1, device=device)
    logits[0, 1] = NAN
    logits[1, 2] = INF
    logits[2] = -INF
    logits[3, : V - 1] = -INF
    logits[4, V - 1] = -INF
    logits[5, :3] = torch.tensor([INF, -INF, NAN])
    leaf = logits.float().requires_grad_()
    expected = functional.cross_entropy(leaf, targets, reduction="none")
    (slopes,) = torch.autograd.grad(expected.sum(), leaf)
    losses, parts = code.forward(logits, targets)
    lost = torch.tensor([True, True, True, False, False, True, False], device=device)
    assert expected.isnan().equal(lost)
    assert losses.isnan().equal(lost)
    assert parts.isnan().equal(lost.expand(2, 7))
    assert losses[3].item() == 0.0  # one word is left
    assert losses[4].item() == INF  # and here it has no probability
    torch.testing.assert_close(losses[6], expected[6])
    grads = code.backward(logits, targets, parts, torch.ones(7, device=device))
    assert grads.isnan().all(-1).equal(lost)
    assert not grads[~lost].isnan().any()
    torch.testing.assert_close(grads[~lost], slopes[~lost].to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("V", [5, 40])
def test_a_target_that_is_no_word_makes_its_row_nan(code, V, device):
    """Also where an address made from it would lie far outside, and where 32 bits of it are a word."""
    wrong = [V, -1, -99, -101, 2**40, -(2**62), 2**32 + 1, V + 1]
    targets = torch.tensor([*wrong, 3, IGNORE], device=device)
    logits = torch.zeros(len(targets), V, device=device)
    losses, parts = code.forward(logits, targets)
    assert losses[: len(wrong)].isnan().all()
    assert parts[:, : len(wrong)].isnan().all()
    assert losses[-2:].tolist() == pytest.approx([math.log(V), 0.0])
    grads = code.backward(logits, targets, parts, torch.ones(len(targets), device=device).where(targets != IGNORE, 0.0))
    assert grads.isnan().all(-1).tolist() == [True] * len(wrong) + [False, False]
    assert cross_entropy(logits, targets).isnan()
    # With parts of its own such a target is simply not there to be subtracted.
    parts = torch.tensor([[0.0], [math.log(V)]], device=device).expand(2, len(targets))
    grads = code.backward(logits, targets, parts, torch.ones(len(targets), device=device))
    assert (grads > 0).all(-1).tolist() == [True] * len(wrong) + [False, True]


def test_rows_that_do_not_count_are_zeros_whatever_they_hold(code, device):
    """By their target, or by a weight of 0 although loss and parts are NaN."""
    logits = torch.full((3, 21), NAN, device=device)
    logits[1] = 0.0
    targets = torch.tensor([IGNORE, 3, IGNORE], device=device)
    losses, parts = code.forward(logits, targets)
    assert losses[::2].tolist() == [0.0, 0.0]
    assert parts[:, ::2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    grads = code.backward(logits, targets, parts, torch.tensor([0.0, 1.0, -0.0], device=device))
    assert grads[::2].eq(0).all()
    assert grads[1].isfinite().all()
    logits[::2], logits[::2, 4] = 0.0, NAN
    targets = torch.tensor([2, 3, 21], device=device)
    _, parts = code.forward(logits, targets)
    assert parts[0].isnan().tolist() == [True, False, True]
    grads = code.backward(logits, targets, parts, torch.tensor([0.0, 1.0, -0.0], device=device))
    assert grads[::2].eq(0).all()


def test_without_a_target_that_counts_the_mean_is_nan_and_the_gradients_are_zeros(backend, device):
    """As with torch."""
    for N in (0, 3):
        logits = torch.zeros(N, 9, device=device, requires_grad=True)
        targets = torch.full((N,), IGNORE, device=device)
        loss = cross_entropy(logits, targets, backend=backend)
        assert loss.isnan()
        assert functional.cross_entropy(logits, targets).isnan()
        (mine,) = torch.autograd.grad(loss, logits)
        assert mine.equal(torch.zeros(N, 9, device=device))


# The kernel takes ten seconds for each; what matters to it is how many elements of a type are aligned.
PLACED = [(code, dtype) for code in ("reference", "kernel") for dtype in DTYPES]


@pytest.mark.sampled(without=["kernel-dtype4"])
@pytest.mark.parametrize(
    ("code", "dtype"), [only(case, case[0] == "reference" or case[1] == torch.bfloat16) for case in PLACED], indirect=["code"]
)
def test_any_strides(code, dtype, device):
    """Rows in wider ones, aligned alike and not, at odd addresses, side by side, and one row for all."""
    rows = 8  # as many as a 16-byte vector has elements: odd widths put rows at each of its places
    logits, targets, weights = pairs.logits_of(rows, 83, dtype, device)

    def placed(width: int, first: int) -> torch.Tensor:
        wide = torch.full((rows + 1, width), NAN, dtype=dtype, device=device).view(-1)[first:]
        view = wide[: rows * width].view(rows, width)[:, :83]
        return view.copy_(logits)

    views = [placed(83, 0), placed(88, 0), placed(91, 0), placed(99, 8), placed(90, 1), placed(83, 5), logits.T.contiguous().T]
    for view in views:
        assert torch.equal(view, logits)
        assert pairs.check_cross_entropy(view, targets, weights, code) <= 1
        grads = code.backward(view, targets, code.forward(view, targets)[1], weights)
        assert grads.stride() == (view.stride() if view.stride(1) == 1 else (83, 1))  # rows lie as those of the logits
    for view in (placed(400, 0), logits[::2], logits[:1].expand(rows, -1)):  # but not as those of something larger
        given = targets[: len(view)], weights[: len(view)]
        assert code.backward(view, given[0], code.forward(view, given[0])[1], given[1]).is_contiguous()
    assert pairs.check_cross_entropy(logits[:1].expand(rows, -1), targets, weights, code) <= 1
    spread = torch.stack([targets, targets], 1)[:, 0]
    assert pairs.check_cross_entropy(logits, spread, torch.stack([weights, weights], 1)[:, 1], code) <= 1


@pytest.mark.parametrize("chunk", [1, 100, 1 << 30])
def test_the_reference_in_chunks(chunk, monkeypatch):
    given = pairs.logits_of(20, 50, torch.bfloat16, "cpu")
    _, parts = reference.forward(*given[:2])
    whole = reference.backward(given[0], given[1], parts, given[2])
    monkeypatch.setattr(reference, "CHUNK", chunk)
    assert pairs.check_cross_entropy(*given, reference) <= 1
    assert pairs.differing(reference.backward(given[0], given[1], parts, given[2]), whole) == 0


def test_the_reference_has_few_float32_logits_at_once(monkeypatch):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                self.numel = max(self.numel, result.numel())
            return result

    monkeypatch.setattr(reference, "CHUNK", 100)
    logits, targets, weights = pairs.logits_of(64, 50, torch.bfloat16, "cpu")
    with Largest() as largest:
        _, parts = reference.forward(logits, targets)
        reference.backward(logits, targets, parts, weights)
    assert largest.numel == 2 * 64  # the parts; logits come 100 at a time


def test_operators(device):
    logits, targets, weights = pairs.logits_of(5, 30, torch.bfloat16, device)
    for backend in ("reference", "auto"):
        _, parts = torch.ops.dither.cross_entropy_forward(logits, targets, backend)
        torch.library.opcheck(torch.ops.dither.cross_entropy_forward, (logits, targets, backend))
        for given in (logits, torch.zeros(5, 32, dtype=torch.bfloat16, device=device)[:, :30]):  # rows with room between them
            torch.library.opcheck(torch.ops.dither.cross_entropy_backward, (given, targets, parts, weights, backend))
    on_meta = [x.to("meta") for x in (logits, targets, parts, weights)]
    assert torch.ops.dither.cross_entropy_forward(*on_meta[:2], "auto")[1].shape == (2, 5)
    assert torch.ops.dither.cross_entropy_backward(*on_meta, "auto").dtype == torch.bfloat16


def test_compiled_bits_are_eager_bits_in_one_graph(backend, device):
    torch._dynamo.reset()

    def run(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 3 * cross_entropy(x, targets, backend=backend)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seed, shape in enumerate([(6, 40), (6, 40), (9, 17)]):  # the last of them with sizes that are not known beforehand
        logits, targets, _ = pairs.logits_of(*shape, torch.bfloat16, device, seed=seed)
        results = []
        for function in (run, compiled):
            leaf = logits.clone().requires_grad_()
            loss = function(leaf, targets)
            loss.backward()
            results.append([loss.detach(), leaf.grad])
        assert sum(map(pairs.differing, *results)) == 0


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64), r"logits of shape \[tokens, vocabulary\], .* \[2, 3, 4\]"),
        (torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64), r"not torch.float32 of shape \[2, 0\]"),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), "not torch.int32"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), r"int64 targets of shape \[2\].*, not torch.int32"),
        (
            torch.zeros(2, 3),
            torch.zeros(3, dtype=torch.int64),
            r"int64 targets of shape \[2\].* not torch.int64 of shape \[3\]",
        ),
    ],
)
def test_errors(logits, targets, message):
    with pytest.raises(dither.UserError, match=message):
        cross_entropy(logits, targets)


# In parts of the rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_in_parts_is_the_loss(dtype):
    """That of torch, with ignored targets, a part that is shorter, a part without targets, and a gradient that is not 1."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(3, 7, 16, generator=generator, dtype=dtype)
    targets = torch.randint(0, 40, (3, 7), generator=generator)
    targets.view(-1)[torch.tensor([0, 8, 9, 10, 11, 12, 13, 14, 15, 20])] = -100
    results = []
    for rows in (0, 8, 21, None):
        layer = torch.nn.Linear(16, 40, bias=False, dtype=dtype)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(40, 16, generator=torch.Generator().manual_seed(5), dtype=dtype))
        x = hidden.clone().requires_grad_()
        if rows is None:
            loss = torch.nn.functional.cross_entropy(layer(x).flatten(0, 1), targets.flatten())
        else:
            loss = output_loss(layer, x, targets, rows=rows)
        (3 * loss).backward()
        results.append([loss.detach().double(), x.grad, layer.weight.grad])
    for found in results[:3]:
        for a, b in zip(found, results[3], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    assert torch.equal(results[0][0], results[1][0])  # rows do not depend on each other
    with torch.no_grad():
        assert torch.equal(output_loss(layer, hidden, targets, rows=5).double(), results[0][0])


def test_a_loss_in_parts_under_autocast_has_the_gradients_of_the_weights_dtype():
    layer, x = torch.nn.Linear(16, 40, bias=False), torch.randn(9, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output_loss(layer, x, torch.arange(9), rows=4).backward()
    assert (layer.weight.grad.dtype, x.grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("make", "rows", "words"),
    [
        (lambda: torch.nn.Linear(16, 8), 4, "a linear layer without bias, casts, shards and hooks"),
        (lambda: dither.Linear(16, 8, bias=False, precision=dither.recipe("fp8-block").default), 4, "without bias, casts"),
        (lambda: torch.nn.Linear(16, 8, bias=False), -1, "rows is a number of rows from 1 on, or 0 for all, not -1"),
    ],
)
def test_layers_that_a_loss_in_parts_does_not_take(make, rows, words):
    with pytest.raises(dither.UserError, match=words):
        output_loss(make(), torch.zeros(4, 16), torch.zeros(4, dtype=torch.int64), rows=rows)
