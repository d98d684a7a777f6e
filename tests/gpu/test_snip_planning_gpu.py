"""Times of layers on a GPU: measured once, kept in a file, and what plans are chosen by."""

import json

import pytest
import torch

import dither
from dither import convert
from dither.snip import LayerStatistics, Snip, SnipSettings, efficiency, measure_times, options, savings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(2048, 1024, 512), (2048, 512, 1024)]


def layers():
    return [LayerStatistics(f"h.{place}.up", *shape, {}, {}, {}, 0.0) for place, shape in enumerate(SHAPES)]


def test_times_are_measured_once_and_kept(tmp_path, monkeypatch):
    both, path = options("bf16,fp8-block"), tmp_path / "times.json"
    times = measure_times(SHAPES, both, path=path)
    assert times.device == torch.cuda.get_device_name()
    # At 989 TFLOP/s for BF16 and twice that for FP8, no layer of three products takes less; nor does one take 10 ms.
    for shape in SHAPES:
        least = 3 * 2 * shape[0] * shape[1] * shape[2] / 2e15
        assert all(least < seconds < 1e-2 for seconds in times.seconds[shape].values()), shape
    kept = json.loads(path.read_text())["times"]
    assert list(kept) == [f"{times.device}, torch {torch.__version__}"]

    def fail(*arguments):
        raise AssertionError("it was measured before")

    monkeypatch.setattr(savings, "_measure", fail)
    assert measure_times(SHAPES, both, path=path) == times
    with pytest.raises(AssertionError, match="it was measured before"):
        measure_times([(1024, 512, 512)], both, path=path)


def test_the_fastest_options_save_all_that_can_be_saved():
    both = options("bf16,fp8-block")
    rows = efficiency(layers(), both, measure_times(SHAPES, both))
    assert sum(max(row) for row in rows) == pytest.approx(1)
    assert all(min(row) == 0 for row in rows)


def test_more_tokens_take_longer_in_proportion():
    (few,) = measure_times([(8192, 1024, 1024)], options("bf16,fp8-block")).seconds.values()
    (many,) = measure_times([(4 * 8192, 1024, 1024)], options("bf16,fp8-block")).seconds.values()
    for cast, seconds in few.items():
        assert 3 < many[cast] / seconds < 5  # clocks differ between two measurements


def test_sizes_that_fp8_units_do_not_take_are_measured_on_others():
    (found,) = measure_times([(64, 24, 40)], options("bf16,fp8-block")).seconds.values()
    assert all(seconds > 0 for seconds in found.values())


def test_plans_by_time_while_a_model_trains():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)).cuda()
    convert(model, "fp8-block")
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-3)

    def loss(model, x):
        with torch.autocast("cuda", torch.bfloat16):
            return (model(x) - x).float().square().mean()

    settings = SnipSettings(target=0.3, cost="time", start=2, delay=2, every=10, probe="direct", options="bf16,fp8-block")
    snip = Snip(dither.Conversion.of(model), optimizer, settings, forward=loss)
    decisions = {}
    for step in range(6):
        x = torch.randn(2048, 512, device="cuda")
        if decision := snip.before_step(step, [x]):
            decisions[step] = decision
        with dither.step_context(model, step=step):
            loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(decisions) == [4]
    assert decisions[4].changed, decisions[4].reason
    assert decisions[4].plan.provenance["efficiency"] >= 0.3
