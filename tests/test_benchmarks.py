"""The scripts in benchmarks/ run as they say, on a CPU."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import trained_run, write_words

from dither.models.sizes import Model

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def precision_of_products():
    """Undo what a benchmark sets for its process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


# The script that compares sampled with plain training runs as its page says, on a CPU in seconds -----------------------


PATH = Path(__file__).parent.parent / "benchmarks" / "sampling_quality.py"


@pytest.fixture
def quality(monkeypatch):
    """The script as a function of its arguments."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("sampling_quality", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(PATH), *map(str, arguments)])
        module.main()

    run.module = module
    return run


@pytest.mark.exhaustive
def test_runs_are_paired_written_down_and_not_repeated(quality, tmp_path, capsys):
    path = tmp_path / "quality.json"
    arms = "bf16,gaussws:all,diffq:od/3@fp8-block,auto:all,inputs:all,both:od"
    quality("--device", "cpu", "--tiny", "--json", path, "--seeds", "0")
    first = json.loads(path.read_text())
    assert [run["arm"] for run in first] == arms.split(",")
    quality("--device", "cpu", "--tiny", "--json", path)
    both = json.loads(path.read_text())
    assert both[:6] == first
    assert [(run["arm"], run["seed"]) for run in both[6:]] == [(arm, 1) for arm in arms.split(",")]
    for run in both:
        assert all(np.isfinite([run["loss"], run["operator_loss"], run["train_loss"], *run["cast"].values()]))
        assert len(run["cast"]) == 12
    by_arm = {run["arm"]: run for run in first}
    assert "b_t" not in by_arm["bf16"]
    # 1 % of the way from 6 to 4, and from 5 to 3, is left, give or take what six steps of the optimizer do.
    assert by_arm["gaussws:all"]["b_t"]["mean"] == pytest.approx(4.02, abs=2 * 6e-3)
    assert by_arm["diffq:od/3@fp8-block"]["b_t"]["mean"] == pytest.approx(3.02, abs=2 * 6e-3)
    assert by_arm["auto:all"]["b_t"]["mean"] == pytest.approx(4.02, abs=2 * 6e-3)
    assert by_arm["inputs:all"]["b_t"]["mean"] == pytest.approx(4.02, abs=2 * 6e-3)
    assert len(by_arm["diffq:od/3@fp8-block"]["b_t_layers"]) == 2
    text = capsys.readouterr().out
    assert "loss - bf16" in text
    assert "+0.0000 +- 0.0000" in text


def test_no_run_begins_that_would_end_too_late(quality, tmp_path, capsys):
    path = tmp_path / "quality.json"
    quality("--device", "cpu", "--tiny", "--json", path, "--minutes", "0", "--arms", "bf16")
    assert "stopped before bf16 of seed 0" in capsys.readouterr().out
    assert not path.exists()


def test_texts_become_tokens(quality, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(f"the {i} cats and the {i % 7} dogs of number {i}" for i in range(300)))
    train, held_out = tmp_path / "train.npy", tmp_path / "held_out.npy"
    quality("--prepare", text, "--train", train, "--held-out", held_out, "--words", "300")
    ids, kept = np.load(train), np.load(held_out)
    assert ids.dtype == kept.dtype == np.uint16
    assert (ids == 0).sum() == 297  # an end for each document, of which every hundredth is held out
    assert (kept == 0).sum() == 3
    quality("--prepare", text, "--train", train, "--held-out", held_out, "--words", "300", "--tokens", "500")
    assert np.array_equal(np.load(train), ids[:500])


@pytest.mark.parametrize("arm", ["gauss:all", "gaussws", "bf16:all", "gaussws:all/x", "bf16/3"])
def test_unknown_arms(quality, arm):
    with pytest.raises(SystemExit, match="there is no arm"):
        quality("--device", "cpu", "--tiny", "--arms", arm)


# The scripts that hold SNIP against its rivals and against the truth run as they say, on a CPU -------------------------


FEW = ("--device", "cpu", "--tiny", "--layers", "1", "--before", "2", "--steps", "4", "--held-out-windows", "4")


@pytest.fixture
def script(monkeypatch):
    """A script as a function of its name and its arguments."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(FOLDER.parent / "reproduce" / "snip")
    known = set(sys.modules)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        importlib.import_module(name).main()

    yield run
    for name in {"sampling_quality", "snip_quality", "truth"} - known:
        sys.modules.pop(name, None)


@pytest.mark.exhaustive
def test_arms_part_at_one_place_whichever_process_trains_them(script, tmp_path, capsys):
    arms = ("--arms", "bf16,fp8,fp4,random@50")
    script("snip_quality", *FEW, *arms, "--json", tmp_path / "alone.json")
    script("snip_quality", *FEW, *arms, "--state", tmp_path / "state", "--prepare")
    for number in (1, 2):
        shared = ("--state", tmp_path / "state", "--share", f"{number}/2")
        script("snip_quality", *FEW, *arms, *shared, "--json", tmp_path / f"share-{number}.json")
    files = [tmp_path / name for name in ("alone.json", "share-1.json", "share-2.json")]
    alone, *shares = (json.loads(path.read_text()) for path in files)
    assert len(alone) == 8
    for runs in (alone, [*shares[0], *shares[1]]):
        for run in runs:
            assert run.pop("seconds") > 0
    order = lambda run: (run["arm"], run["seed"])  # noqa: E731
    assert sorted(alone, key=order) == sorted([*shares[0], *shares[1]], key=order)
    assert {len({run["parted"] for run in alone if run["seed"] == seed}) for seed in (0, 1)} == {1}
    layers = {run["seed"]: run["layers"] for run in alone if run["arm"] == "random@50"}
    assert layers[0] != layers[1]
    assert all(np.isfinite([run["loss"], run["uncast"]]).all() for run in alone)
    capsys.readouterr()
    script("snip_quality", "--table", *files[1:], "--plot", tmp_path / "plans.svg")
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if "0." in line] == list(dict.fromkeys(r["arm"] for r in runs))
    assert ">random<" in (tmp_path / "plans.svg").read_text()
    part = [run | {"seconds": 1.0} for run in alone if run["arm"] != "fp4"]
    files[0].write_text(json.dumps(part))
    with pytest.raises(SystemExit, match="there is no run of fp4"):
        script("snip_quality", "--table", files[0], "--plot", tmp_path / "plans.svg")


def test_a_state_of_other_settings_is_refused(script, tmp_path):
    script("snip_quality", *FEW, "--arms", "bf16", "--seeds", "0", "--state", tmp_path)
    with pytest.raises(SystemExit, match="of other settings"):
        script("snip_quality", *FEW, "--arms", "bf16", "--seeds", "0", "--state", tmp_path, "--lr", "1e-3")


def test_without_text_it_says_which_files_are_missing(script, capsys):
    with pytest.raises(SystemExit):
        script("snip_quality", "--device", "cpu")
    assert "--train and --held-out name the files of token ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (("--share", "3"), "--share is i/n"),
        (("--share", "0/2"), "--share is i/n"),
        (("--seeds", "a"), "--seeds are integers separated by commas"),
    ],
)
def test_a_mistake_is_a_sentence(script, mistake, sentence, capsys):
    with pytest.raises(SystemExit):
        script("snip_quality", "--device", "cpu", "--tiny", *mistake)
    assert sentence in capsys.readouterr().err


def test_estimates_are_compared_with_what_is_measured(script, tmp_path):
    """The probe `measure` tries each option, so that it ranks the changes of weights better than a formula does."""
    trained_run(write_words(tmp_path / "text", 60), tmp_path / "run", steps=4, save_every=0, model=Model(layers=1), mode="fp32")
    found = tmp_path / "truth.json"
    script("truth", tmp_path / "run", "--rows", "1", "--batches", "1", "--more", "1", "--device", "cpu", "--out", found)
    told = json.loads(found.read_text())
    assert np.shape(told["rises of each batch"]) == (2, len(told["layers"]), len(told["options"])) == (2, 7, 8)
    weights = {probe: each["weights"] for probe, each in told["correlations"].items()}
    assert weights["measure"] > max(weights["direct"], weights["last"])


class Sum(torch.nn.Module):
    """Two linear layers side by side, the second of which counts 64 times: a loss that is quadratic in all weights."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a, self.b = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 32, bias=False)
        for layer in (self.a, self.b):
            torch.nn.init.uniform_(layer.weight, -1, 1, generator=generator)
        self.x = torch.randn(256, 64, generator=generator)

    def loss(self, _):
        return self.a(self.x).square().mean() + 64 * self.b(self.x).square().mean()


def test_a_sensitive_layer_gets_the_bits(monkeypatch):
    """In closed form: the rise of mean((x (w + d)^T)^2) is the sum of d^2 by the mean of x^2 over the outputs."""
    monkeypatch.syspath_prepend(FOLDER)
    from targets import choose_targets

    model = Sum()
    found = choose_targets(model, Sum.loss, [0], tolerance=1e-3, draws=8)
    power = model.x.square().mean(0)
    for layer, name, counts in zip(found.layers, ("a", "b"), (1, 64), strict=True):
        weight = getattr(model, name).weight.detach()
        amax = torch.stack([torch.stack([part.abs().max() for part in rows.split(32, 1)]) for rows in weight.split(32, 0)])
        spread = amax.repeat_interleave(32, 0).repeat_interleave(32, 1)
        variance = 2 * (4 * 3 / 2048 + 9 / 64)  # of R: P(2) = 3/2048 and P(1) = 9/64, the same for -2 and -1
        exact = counts * variance * 4 * (spread.square() * power).sum().item() / weight.shape[0]
        assert abs(layer.sensitivity - exact) <= 5 * layer.deviation
        assert layer.deviation < 0.02 * exact
    a, b = found.layers
    assert 3 < b.b_target - a.b_target < 4  # 64 = 4^3, over half as many outputs
    assert found.rise == pytest.approx(1e-3 * found.loss)
    assert found.plan().for_layer("b").sampling.b_target == b.b_target
