"""The examples, shortened: they run, print what their headers promise, draw, and show what their pages say."""

import contextlib
import importlib
import importlib.util
import math
import re
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from runs import SHORT, write_words
from worlds import set_up, start_ranks

from dither import Stream, checkpoint
from dither.commands.train import resolve
from dither.train.loop import train

ROOT = Path(__file__).parent.parent
FIGURES = {"int8": "int8.svg", "fp16_underflow": "fp16-underflow.svg", "fp8_scaling": "fp8-scaling.svg"}


@pytest.fixture(autouse=True)
def _beside_the_examples(monkeypatch):
    """The examples share a module, which lies beside them."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.filterwarnings("error::dither.errors.PerformanceWarning")
@pytest.mark.parametrize("name", FIGURES)
def test_an_example_runs_and_draws(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", "8", "--plot", str(tmp_path / "figure.svg")])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    ElementTree.parse(tmp_path / "figure.svg")
    assert "figure: " in capsys.readouterr().out


@pytest.mark.parametrize("name", FIGURES)
def test_a_page_has_its_example_and_its_figure(name):
    """The figure in docs/ is a whole SVG that the page shows, by the command that the page gives."""
    figure = ROOT / "docs" / FIGURES[name]
    ElementTree.parse(figure)
    assert figure.stat().st_size < 100_000
    (page,) = [path for path in (ROOT / "docs").glob("*.md") if f"]({figure.name})" in path.read_text()]
    assert f"python examples/{name}.py --plot docs/{figure.name}\n" in page.read_text()
    assert f"--plot docs/{figure.name}" in (ROOT / "examples" / f"{name}.py").read_text()
    assert re.search(rf"docs/{page.name}", (ROOT / "examples" / f"{name}.py").read_text())


def test_one_outlier_empties_a_tensor_and_a_row():
    int8 = importlib.import_module("int8")
    x = torch.ones(4, 64)
    x[0, 0] = 300.0
    assert int8.flushed(x, "int8 tensor") == 255 / 256
    assert int8.flushed(x, "int8 row") == 63 / 256
    assert int8.flushed(x, "e4m3 tensor") == 0.0


def test_what_fp16_loses_and_which_scales_do():
    fp16 = importlib.import_module("fp16_underflow")
    x = torch.tensor([[2.0**-25, 2.0**-24, 3 * 2.0**-26, 1.0]])  # half the smallest value goes to zero, three quarters do not
    assert fp16.flushed(x, 1.0) == 0.25
    assert fp16.lost(x, 1.0) == pytest.approx(2.0**-25, rel=1e-6)
    assert (fp16.sufficient(x), fp16.largest(x)) == (0, 15)
    assert fp16.sufficient(torch.full((1, 1), 2.0**-30)) == 6  # 2^-24
    assert fp16.overflowed(x, 2.0**15) == 0
    assert fp16.overflowed(x, 2.0**16) == 0.25
    largest = torch.tensor([[65519.0, 65520.0]])
    assert largest.half().isinf().tolist() == [[False, True]]
    assert fp16.overflowed(largest, 1.0) == 0.5


def test_delayed_scaling_clips_what_grows_and_nothing_else():
    fp8 = importlib.import_module("fp8_scaling")
    series = fp8.tensors(fp8.JUMP + 3)
    relative, clipped = fp8.errors("e4m3 tensor delayed(16)", series)
    assert clipped[fp8.JUMP] > 0.5
    assert relative[fp8.JUMP] > 0.5
    assert max(relative[: fp8.JUMP] + relative[fp8.JUMP + 1 :]) < 0.04
    assert fp8.errors("e4m3 tensor", series)[1] == [0.0] * len(series)


TRAINING = {"huggingface": ["--steps", "3"], "own_loop_snip": ["--steps", "6"], "gaussws": ["--steps", "4"]}
"""Examples that train a model, and arguments that make them short."""


def _losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\d+\.\d+) nats per token", text, flags=re.MULTILINE)]


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_example_learns(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *TRAINING[name]])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    losses = _losses(out)
    assert losses[-1] < losses[0] < 6
    expected = {
        "huggingface": "loaded back without dither: weights equal",
        "own_loop_snip": "step 4: a plan from the statistics of step 2",
        "gaussws": "FP4 everywhere: 4.0 bits per weight, held-out loss ",
    }
    assert expected[name] in out


def test_a_rollout_has_the_log_probabilities_of_the_step(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--steps", "2"])
    runpy.run_path(str(ROOT / "examples" / "rollout.py"), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(rows) == 2
    assert all(float(apart) < 1e-5 for *_, apart in rows)  # of log-probabilities around -4


def _fsdp2(rank: int, size: int, port: int, folder: Path) -> None:
    """Run the example as torchrun would start it, with the folder of the examples in front of the path."""
    set_up(rank, size, port)
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = ["fsdp2.py", "--steps", "2"]
    with (folder / f"{rank}.txt").open("w") as said, contextlib.redirect_stdout(said):
        runpy.run_path(str(ROOT / "examples" / "fsdp2.py"), run_name="__main__")


def test_fsdp2_on_two_ranks(tmp_path):
    processes = start_ranks(_fsdp2, 2, tmp_path)
    while not processes.join():
        pass
    out = (tmp_path / "0.txt").read_text()
    losses = _losses(out)
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    assert "2 ranks" in out
    assert (tmp_path / "1.txt").read_text() == ""


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_how_to_run_it(path):
    header = path.read_text().split('"""')[1]
    if path.stem not in ("text", "theory", "toy"):  # these are imported by the others
        assert re.search(rf"^    (python|torchrun .*) ?examples/{path.name}", header, flags=re.MULTILINE)


# examples/stagnation ---------------------------------------------------------------------------------------------------


SPEC = importlib.util.spec_from_file_location("stagnation", Path(__file__).parent.parent / "examples" / "stagnation.py")
stagnation = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = stagnation
SPEC.loader.exec_module(stagnation)

STREAM = Stream(1, "test", "walk")


def test_one_rounding_of_all_steps_is_one_rounding_a_step():
    added = stagnation.updates("exponential", 1e-5, 200)
    slow = stagnation.walk(added, "stochastic(16)", STREAM, 20)
    fast = stagnation.walk_at_once(added, "stochastic(16)", STREAM, 20)
    assert torch.equal(slow, fast)
    assert slow[-1].unique().numel() > 3  # they walk, and not together
    rest = stagnation.walk_at_once(added[150:], "stochastic(16)", STREAM, 20, fast[149], 150)
    assert torch.equal(rest, fast[150:])


@pytest.mark.parametrize("minimum", [1e-5, 5e-5])
def test_stochastic_rounding_arrives_when_theory_says(minimum):
    runs = 200
    steps = stagnation.arrivals("exponential", minimum, "stochastic(16)", STREAM, runs).double()
    assert bool((steps > 0).all())
    mean, deviation = stagnation.exact_arrival("exponential", minimum)
    assert abs(steps.mean().item() - mean) < 4 * deviation / math.sqrt(runs)
    # Later than float32 by more than the noise of these runs, but only with the lower minimum: the paper's point.
    late = mean - stagnation.arrival_in_fp32("exponential", minimum)
    assert (late > 4 * deviation / math.sqrt(runs)) == (minimum == 1e-5)


def test_theory_of_a_constant_rate_is_the_negative_binomial(monkeypatch):
    monkeypatch.setitem(stagnation.SCHEDULES, "constant", lambda t, minimum: minimum)
    chance = 1 / 32
    mean, deviation = stagnation.exact_arrival("constant", stagnation.SPACING * chance)
    # eps = 1e-8 beside a second moment of 1 makes the updates smaller by as much.
    assert mean == pytest.approx(64 / chance, rel=1e-6)
    assert deviation == pytest.approx(math.sqrt(64 * (1 - chance)) / chance, rel=1e-6)


def test_nearest_never_arrives_and_every_update_is_below_half_the_spacing():
    assert stagnation.arrivals("exponential", 1e-5, "nearest", STREAM, 1).item() == 0
    assert stagnation.updates("exponential", 1e-5, 1000).max().item() < stagnation.SPACING / 2
    moved = stagnation.walk_at_once(torch.full((64,), stagnation.SPACING * 0.51), "nearest", STREAM, 1)
    assert moved[-1].item() == stagnation.GOAL  # larger ones do arrive


@pytest.mark.exhaustive
def test_float32_is_torchs_adam():
    """The whole loop as one would write it: the loss function, backward, torch.optim.Adam, a scheduler."""
    x = torch.nn.Parameter(torch.tensor(stagnation.START))
    optimizer = torch.optim.Adam([x], lr=1.0, betas=(0.9, 0.95), fused=False, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: stagnation.SCHEDULES["exponential"](t, 5e-5))
    steps = 0
    while (loss := (3 - x).clamp(min=0)) > 0:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        steps += 1
    # An update that differs in its last bit can move a sum to the next multiple of 2^-22, which is 1/200 of the last updates
    # (5e-5): to be off by a second step, 200 of them would have to do so in the same direction.
    assert abs(steps - stagnation.arrival_in_fp32("exponential", 5e-5)) <= 1


def test_our_reading_meets_the_papers_numbers():
    """Within one percent without noise, and within one error of the paper's 100 runs with it."""
    assert stagnation.arrival_in_fp32("exponential", 1e-5) == pytest.approx(4600, rel=0.01)
    for minimum, steps in ((1e-5, 7700), (5e-5, 4600)):
        mean, deviation = stagnation.exact_arrival("exponential", minimum)
        assert abs(mean - steps) < deviation / math.sqrt(100)


@pytest.mark.parametrize("epsilon", [0.5, 2.0**-5])
def test_two_halves(epsilon):
    runs = 4000
    steps = stagnation.two_halves(epsilon, runs, STREAM)
    for n, chance in ((1, 1 / 2), (2, 1 / 4), (3, epsilon / 4), (5, epsilon * (1 - epsilon) ** 2 / 4)):
        share = (steps == n).double().mean().item()
        assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / runs), n
    mean = 1.5 + 1 / (4 * epsilon)
    square = 1 / 2 + 4 / 4 + (4 + 4 / epsilon + (2 - epsilon) / epsilon**2) / 4  # T = 1, T = 2, T = 2 + a geometric number
    assert abs(steps.double().mean().item() - mean) < 4 * math.sqrt((square - mean**2) / runs)


@pytest.mark.parametrize(("rho", "delta"), [(0.5, 0.4), (1.0, 1.6)])
@pytest.mark.parametrize("how", ["none", "coin", "rounded"])
def test_correlations(rho, delta, how):
    n = 20_000
    exact, error = stagnation.exact_correlation(rho, delta, how, n)
    measured = torch.corrcoef(torch.stack(stagnation.gradients(rho, delta, how, n, seed=3)))[0, 1].item()
    assert abs(measured - exact) < 4 * error
    if how != "rounded":
        assert exact == pytest.approx(rho**2 / (1 + rho**2 + (delta**2 if how == "coin" else 0)))
    else:  # the variance of a rounding is at most that of the coin, a quarter of the squared spacing
        coin, none = (stagnation.exact_correlation(rho, delta, other, n)[0] for other in ("coin", "none"))
        assert coin < exact < none


def test_the_error_of_a_correlation():
    """The deviation of 150 estimates is itself off by 1 / sqrt(300), 6 %; four of them."""
    estimates = [
        torch.corrcoef(torch.stack(stagnation.gradients(2.0, 0.4, "coin", 500, seed=seed)))[0, 1] for seed in range(150)
    ]
    _, error = stagnation.exact_correlation(2.0, 0.4, "coin", 500)
    assert torch.stack(estimates).std().item() == pytest.approx(error, rel=4 / math.sqrt(300))


def test_the_tables_print(capsys):
    stagnation.print_walks("cosine", 20, 0)
    stagnation.print_two_halves(20, 0)
    stagnation.print_correlations(100, 0)
    table = capsys.readouterr().out
    assert "never                                    not given" in table
    assert "4628" in table
    assert table.count("\n") == 6 + 7 + 12


@pytest.mark.parametrize(("name", "rates"), [("nanochat", (0.02, 0.3, 0.008)), ("modded-nanogpt", (0.015, 0.004, 0.004))])
def test_presets_of_muon_train(name, rates, tmp_path):
    write_words(tmp_path / "text", 60)
    settings = [f'data.sources=["{tmp_path / "text"}"]', *SHORT, "run.steps=1"]
    config = resolve(str(ROOT / "examples" / f"muon-{name}.toml"), settings=settings, out=str(tmp_path / "run"))
    assert (config.muon.matrix_lr, config.muon.embedding_lr, config.muon.output_lr) == rates
    train(config)
    tensors, _ = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000001")
    states = {key.rpartition(":")[2] for key in tensors if "q_proj" in key}
    assert "exp_avg_sq" not in states
    assert any(key.endswith("embed_tokens.weight:exp_avg_sq") for key in tensors)
