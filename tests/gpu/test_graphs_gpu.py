"""Passes as CUDA graphs in the trainer: the same bits as without them, and zero new graphs of Dynamo when plans change."""

import os

import pytest
import torch

import dither
from dither import checkpoint
from dither.models import build
from dither.optim import AdamW, release_gradients
from dither.train import config, loop

pytestmark = pytest.mark.gpu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts


@pytest.fixture(autouse=True)
def _deterministic():
    """Attention's backward pass adds in any order otherwise, with graphs and without them."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SETTINGS = {
    "o1": ['precision.mode="o1"'],
    "fp8": ['precision.mode="o1"', 'precision.recipe="fp8-current"'],
    "delayed": ['precision.mode="o1"', 'precision.recipe="fp8-delayed"'],
    "static": ['precision.mode="o1"', 'precision.recipe="fp8-static"'],
    "sr": ['precision.mode="bf16-sr"', 'precision.recipe="fp8-block"', 'precision.states="dynamic8"'],
    "gaussws": ['precision.mode="o1"', 'precision.sampling={parts="od", b_init=7, b_target=5}'],
    "recompute": ['precision.mode="o1"', "precision.sampling={recompute=true}"],
    "outliers": ['precision.mode="o1"', 'precision.recipe="tetrajet2"', "outliers.start=0.2", "outliers.steps=5"],
    "snip": [
        'precision.mode="bf16-sr"',
        'precision.recipe="fp8-block"',
        "snip.target=0.5",
        "snip.start=6",
        "snip.every=4",
        "snip.delay=1",
        'snip.probe="last"',
    ],
}
SETTINGS["all"] = [*SETTINGS["snip"], SETTINGS["gaussws"][1]]


@pytest.mark.filterwarnings("ignore:Bitwidths of the layer:UserWarning")
@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_graphs_change_no_bit(name, parts, tmp_path):
    assert different(SETTINGS[name], parts, tmp_path) == []


RELEASED = {
    "fp8": [*SETTINGS["fp8"][1:], 'precision.states="companded8"', 'precision.save="input"', 'precision.hold="none"'],
    "cached": ['precision.recipe="fp8-block"', 'precision.states="dynamic4"'],
    "stored": ['precision.recipe="fp8-current"', 'precision.weights="fp8"'],
    "mini": ['optim.optimizer="adam-mini"'],
    "muon": ['optim.optimizer="muon"'],
    "muon stored": ['optim.optimizer="muon"', 'precision.recipe="fp8-block"', 'precision.weights="fp8"'],
}


@pytest.mark.sampled(only=["fp8", "stored"])
@pytest.mark.parametrize("name", RELEASED)
def test_graphs_of_released_gradients_change_no_bit(name, tmp_path, capsys):
    settings = ['precision.mode="bf16-sr"', "optim.release_gradients=true", 'optim.clip_norm="previous"', *RELEASED[name]]
    assert different(settings, 1, tmp_path) == []
    printed = capsys.readouterr()
    assert "without CUDA graphs" not in printed.out + printed.err


def different(options, parts, tmp_path):
    """Train with graphs and without them; return the names of the tensors of the checkpoints that differ."""
    found = []
    for graphs in ("false", "true"):
        out = tmp_path / graphs
        settings = [f'run.out="{out}"', "run.steps=14", "run.sample_every=0", "run.eval_every=0", f"run.cuda_graphs={graphs}"]
        settings += ["data.batch=8", f"data.micro_batch={8 // parts}", "data.sequence=128", "optim.lr=1e-3"]
        outcome = loop.train(config.override(config.Config(), [*settings, *options]))
        assert outcome.code == 0, outcome.why
        newest, _ = checkpoint.newest(out / "checkpoints")
        found.append(checkpoint.load(newest)[0])
    eager, graphed = found
    assert eager.keys() == graphed.keys()
    return [
        key
        for key in eager
        if not torch.equal(eager[key].reshape(-1).view(torch.uint8), graphed[key].reshape(-1).view(torch.uint8))
    ]


# Own loops -------------------------------------------------------------------------------------------------------------


def loop_of(
    recipe: str,
    sampling: dither.Sampling | None,
    captured: bool,
    parts: int,
    steps: int = 8,
    words: int = 256,
    memory: dither.MemoryOptions | None = None,
    release: bool = False,
):
    """Train a small model in a loop of its own; return losses, weights and histories."""
    model = build("tiny", vocab_size=words, device="cuda")
    plan = dither.recipe(recipe)
    plan = plan.with_output() if sampling is None else plan.with_sampling(sampling)
    dither.convert(model, plan, memory=memory or dither.MemoryOptions())
    dither.compile(model)
    optimizer = AdamW(model.named_parameters(), 1e-3, max_norm=0.5 if release else None)
    released = release_gradients(model, optimizer, clip_norm="previous") if release else None

    def run(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, targets)
        (loss / parts).backward()
        return loss

    passes = dither.capture_passes(model, run, released) if captured else run
    weight, versions = next(model.parameters()), []
    losses = []
    random = torch.Generator("cuda").manual_seed(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / steps
        with dither.step_context(model, step=step):
            for _ in range(parts):
                text = torch.randint(words, (2, 65), device="cuda", generator=random)
                losses.append(passes(text[:, :-1], text[:, 1:]).detach())
        optimizer.step()
        optimizer.zero_grad()
        losses += [] if optimizer.grad_norm is None else [optimizer.grad_norm]
        versions.append(weight._version)
        if step == steps // 2:
            model.eval()
            with torch.no_grad():
                losses.append(model(text[:, :-1], text[:, 1:]))
            model.train()
    if captured:
        assert passes.graphs.keys() == ({True} if parts == 1 else {True, False})
        assert len(set(versions)) == steps  # caches that are keyed by a weight's version expire
    return [torch.stack(losses), *model.state_dict().values()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("recipe", "sampling"),
    [("fp8-current", None), ("fp4-block", None), ("fp8-delayed", None), ("bf16", dither.Sampling(b_init=7, b_target=5))],
    ids=["fp8-current", "fp4-block", "fp8-delayed", "gaussws"],
)
def test_captured_passes_of_a_loop_change_no_bit(recipe, sampling, parts):
    """Random bits advance from step to step and from micro-batch to micro-batch, as without graphs."""
    eager, captured = (loop_of(recipe, sampling, graphs, parts) for graphs in (False, True))
    assert [index for index, (a, b) in enumerate(zip(eager, captured, strict=True)) if not torch.equal(a, b)] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("memory", [dither.MemoryOptions(), dither.MemoryOptions("input", "none")], ids=["held", "least"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp4-block", "fp8-delayed"])
def test_captured_passes_that_update_weights_change_no_bit(recipe, memory):
    """Rates, norms to clip by, and random bits of a replay are those of its step."""
    eager, captured = (loop_of(recipe, None, graphs, 1, memory=memory, release=True) for graphs in (False, True))
    assert [index for index, (a, b) in enumerate(zip(eager, captured, strict=True)) if not torch.equal(a, b)] == []


def test_released_gradients_are_captured_only_if_it_is_said():
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = AdamW(model.named_parameters(), states_on="host")
    released = release_gradients(model, optimizer)

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    def train(given: object) -> None:
        passes = dither.capture_passes(model, run, given)
        for _ in range(6):
            passes(torch.ones(4, 64, device="cuda"))
            optimizer.step()

    with pytest.raises(dither.UserError, match=r"released=optimizer\.released"):
        train(None)
    with pytest.raises(dither.UserError, match="copies states on other streams"):
        train(released)


@pytest.mark.filterwarnings("ignore")
def test_passes_that_cannot_be_captured():
    model = build("tiny", device="cuda")
    dither.convert(model, "fp4-block")
    tokens = torch.zeros(2, 64, dtype=torch.int64, device="cuda")

    def run(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()
        assert loss.item() > 0
        return loss

    passes = dither.capture_passes(model, run)
    with pytest.raises(dither.UserError, match="draws random bits, which a captured pass takes from the step"):
        passes(tokens)
    for step in range(3):
        with dither.step_context(model, step=step):
            passes(tokens)
        model.zero_grad()
    with dither.step_context(model, step=3):
        with pytest.raises(dither.UserError, match="same shapes in every call"):
            passes(tokens[:1])
        with pytest.raises(dither.UserError, match="cannot be captured as a CUDA graph"):
            passes(tokens)
    # A failed capture does not keep torch's generator in capture mode, nor does it change what that draws next.
    torch.cuda.manual_seed(7)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(7)
    failing = dither.capture_passes(model, lambda tokens: torch.rand(3, device="cuda").sum() + run(tokens))
    for step in range(3):
        with dither.step_context(model, step=step):
            failing(tokens)
        model.zero_grad()
    torch.cuda.manual_seed(7)
    with dither.step_context(model, step=3), pytest.raises(dither.UserError, match="cannot be captured as a CUDA graph"):
        failing(tokens)
    assert torch.equal(torch.rand(4, device="cuda"), expected)
