"""Which precision for which GPU and model, `dither memory`, and the advice at the end of `dither doctor`."""

import json
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from runs import error_line

from dither import UserError, cli
from dither.models import PRESETS, build, save_pretrained
from dither.spec.gpus import GPUS, Gpu, gpu_named
from dither.tools import doctor
from dither.tools.doctor import print_advice
from dither.tools.memory import (
    GIB,
    LLAMAS,
    PrecisionChoice,
    ScheduledLayout,
    Setting,
    Shape,
    StepPasses,
    estimate,
    layouts,
    llama3_of,
    llama_of,
    model_shape,
    shape_of,
)
from dither.tools.recommend import Advice, advice_for, advice_here, cpu_here, recommend
from dither.tools.scaling import CHOICES, Clock, Job, TrainingStep, gathering, rank
from dither.train import Config
from dither.train import config as configs

SMALL = {name: shape_of(PRESETS[name]) for name in ("tiny", "llama-134m")}
SIZES = {"134M": 134e6, "1B": 1.2e9, "3B": 3e9, "8B": 8e9, "13B": 13e9, "70B": 70e9}


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("risk", ["none", "low", "high"])
def test_what_is_recommended_fits_and_runs(gpu, risk):
    for count in SIZES.values():
        shape = llama_of(count)
        found = recommend(shape, gpu, risk=risk)
        assert found.reasons
        assert found.estimate.peak <= gpu.usable or not found.batch
        if not found.batch:
            assert found.reasons[0].startswith("It does not fit: one sequence of 2048 tokens needs")
        if risk == "none":
            assert (found.choice.recipe, found.choice.states) == (None, None)
            assert found.choice.mode in ("o1", "fp16")
        if found.choice.recipe is not None:
            assert gpu.capability >= (8, 9)
        assert ("fp16" in found.choice.mode) == (gpu.capability < (8, 0))
        configs.override(Config(), list(found.settings))  # the trainer takes them


def test_less_memory_means_a_leaner_setting_and_says_why():
    shape = llama_of(3e9)
    found = [recommend(shape, Gpu("GPU", (8, 0), gib * GIB)) for gib in (160, 60, 40, 34, 30, 12)]
    assert list(map(str, found)) == [
        "o1",
        "bf16-sr",
        "bf16-sr",
        "bf16-sr + companded8 states",
        "bf16-sr + companded8 states",
        "bf16-sr + companded8 states + checkpointing",
    ]
    assert found[-1].batch == 0
    assert found[4].reasons[-1] == "Only 4096 tokens fit into a pass: accumulate gradients."
    needs = estimate(shape, Setting(mode="o1"), StepPasses(batch=4, sequence=2048)).peak / GIB
    assert f"o1 needs {needs:.0f} GiB for 4 x 2048 tokens, and 57 GiB can be used." in found[1].reasons


def test_machines_without_units():
    assert recommend(llama_of(134e6), Gpu("GTX", (6, 1), 80 * GIB)).choice.mode == "fp32"
    found = advice_for([Gpu("cpu", None, 8 * GIB)], SMALL, slowdown=250.0)
    assert [row[:3] for row in found.rows] == [("cpu", "tiny", "fp32"), ("cpu", "llama-134m", "fp32")]
    assert "BF16 products take 250 times as long" in found.notes[-1]
    assert advice_for([Gpu("cpu", None, 8 * GIB)], SMALL, slowdown=1.0).notes == found.notes[:-1]


def test_the_table_in_the_docs_is_that_of_the_function():
    page = (Path(__file__).parent.parent / "docs" / "memory.md").read_text()
    for gpu in GPUS.values():
        found = [recommend(llama_of(count), gpu) for name, count in SIZES.items() if name != "70B"]
        cells = [str(each).replace(" states", "") if each.batch else "" for each in found]
        assert f"| {gpu.name} | {' | '.join(cells)} |" in page


def test_sizes_of_models_from_anywhere(tmp_path):
    save_pretrained(build("tiny"), tmp_path / "hf")
    assert model_shape(str(tmp_path / "hf")).parameters == model_shape("tiny").parameters
    neo = {"model_type": "gpt_neo", "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps({**neo, "max_position_embeddings": 2048}))
    assert model_shape(str(tmp_path)).parameters == pytest.approx(1.3e9, rel=0.02)
    for broken, said in (({"num_local_experts": 8}, "has experts"), ({"vocab_size": None}, "does not say its vocab")):
        (tmp_path / "config.json").write_text(json.dumps({**neo, **broken}))
        with pytest.raises(UserError, match=said):
            model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="does not hold a model's config"):
        model_shape(str(tmp_path))


# The commands ----------------------------------------------------------------------------------------------------------


def cells(text: str) -> dict[str, list[str]]:
    return {line[2:].split("  ")[0]: line.split("  ")[2:] for line in text.splitlines() if line.startswith("  ")}


def test_memory_by_part_and_mode(capsys):
    assert cli.main(["memory", "llama-1b", "--mode", "o1", "bf16-sr", "--gpu", "h200"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split("  ")[1]: line.split() for line in shown.splitlines() if line.startswith("  ")}
    assert rows["peak"][1:] == ["42.42", "31.70"]
    assert rows["weights"][1:] == ["4.70", "2.35"]
    assert "On H200 (133 GiB usable): o1 + fp8-current" in shown
    assert "dither train --set model.preset=llama-1b precision.mode=o1 precision.recipe=fp8-current" in shown
    assert cli.main(["memory", "--params", "7e9", "--batch", "1", "--recipe", "fp8-block", "--states", "int8"]) == 0
    assert "o1 + fp8-block + int8" in capsys.readouterr().out


def test_memory_of_states_in_host_memory(capsys, monkeypatch):
    words = ["memory", "llama-1b", "--mode", "bf16-sr", "--states", "companded8", "bf16"]
    assert cli.main(words) == 0
    assert "host memory" not in capsys.readouterr().out
    monkeypatch.setattr("dither.tools.recommend.cpu_here", lambda: Gpu("cpu", None, 4 * GIB))
    assert cli.main([*words, "--states-on", "host"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split("  ")[1]: line.split() for line in shown.splitlines() if line.startswith("  ")}
    assert rows["states"][1:] == ["1.03", "2.00"]
    assert rows["in host memory"][3:] == ["3.09", "6.00"]  # matrices of 2048 x 5632 are rounded up by 45 %
    assert shown.splitlines()[-1] == "States in host memory need 6.0 GiB of it, and this machine has 4.0 GiB."
    assert cli.main([*words, "--states-on", "host", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["estimates"]["bf16-sr + bf16"]
    assert (found["streamed_bytes"], round(found["host_bytes"] / GIB, 2)) == (4 * 1261529088, 6.0)


def test_memory_as_json(capsys):
    words = ["memory", "llama-1b", "--mode", "o1", "bf16-sr", "--json"]
    assert cli.main([*words, "--gpu", "h200"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = estimate(shape_of(PRESETS["llama-1b"]), Setting(), StepPasses(batch=8, sequence=2048))
    assert found["estimates"]["o1"] == {"memory_bytes": expected.parts, "peak_bytes": expected.peak, "peak_moment": "loss"}
    assert (found["parameters"], found["passes"]["batch"]) == (1261529088, 8)
    assert found["recommended"]["choice"] == {"mode": "o1", "recipe": "fp8-current", "states": None}
    assert found["largest_batch"] == {"o1": 32, "bf16-sr": 32}


def test_memory_of_a_run(tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    more = ["model.preset=llama-134m", "model.vocab=32000", "precision.mode=bf16-sr", "data.batch=8", "data.micro_batch=2"]
    more += ["optim.states_on=host"]
    (out / "config.toml").write_text(configs.dumps(configs.override(Config(), [*more, "data.sequence=512"])))
    assert cli.main(["memory", str(out), "--gpu", "h200"]) == 0
    shown, _, advice = capsys.readouterr().out.partition("\n\n")
    assert f"GiB: dither train {out / 'config.toml'} --set precision.mode=" in advice
    assert shown.splitlines()[0].startswith("134,105,856 parameters, 2 x 512 tokens per pass")
    passes = StepPasses(batch=2, sequence=512, number=4)
    peak = estimate(shape_of(PRESETS["llama-134m"]), Setting(mode="bf16-sr", states_on="host"), passes).peak / GIB
    assert f"{peak:.2f}" in shown.splitlines()[-4]


def test_memory_of_a_run_says_what_is_not_estimated(tmp_path, capsys):
    def of(*more: str) -> int:
        common = ("model.preset=llama-134m", "model.vocab=32000", "precision.mode=bf16-sr")
        (tmp_path / "config.toml").write_text(configs.dumps(configs.override(Config(), [*common, *more])))
        return cli.main(["memory", str(tmp_path), "--json"])

    qat = ("model.weights=a", "qat.format=mxfp4", "qat.teacher=a")
    assert of("parallel.checkpointing=full", "precision.gradients=fp32", *qat) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passes"]["checkpointing"] == "full"
    assert found["left_out"] == ["qat.format", "qat.teacher"]
    setting, passes = Setting(mode="bf16-sr", gradients="fp32"), StepPasses(**found["passes"])
    assert found["estimates"]["this run"]["peak_bytes"] == estimate(shape_of(PRESETS["llama-134m"]), setting, passes).peak
    assert of("precision.gradients=bf16-sr") == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == []
    assert of("lora.rank=4", "model.weights=a") == 2
    assert "trains adapters (lora.rank=4)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["llama-1bb"], "There is no model 'llama-1bb'"),
        (["--batch", "1"], "Give a model"),
        (["tiny", "--params", "1e9"], "and not both"),
        (["tiny", "--mode", "o3"], "There is no memory.mode='o3'"),
        (["tiny", "--recipe", "fp9"], "There is no recipe 'fp9'"),
        (["tiny", "--gpu", "H300"], "There is no GPU 'H300'"),
        (["tiny", "--mode", "bf16-sr", "--weights", "fp8"], "--weights fp8 goes with bf16-sr + fp8-current, not bf16-sr: add"),
        (["tiny", "--recipe", "fp8-current", "--weights", "fp8"], "not o1 + fp8-current: add --mode bf16-sr"),
        (["tiny", "--batch", "0"], "The batch is a positive integer, not 0"),
    ],
)
def test_mistakes_are_one_line(given, said, capsys):
    assert cli.main(["memory", *given]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1


def test_doctor_ends_with_advice(capsys):
    found = advice_here()
    test = doctor.SelfTest((), "here", "there", 0)
    doctor.print_report(doctor.MachineReport((), (cpu_here(),), "cpu", (), test, advice=found))
    shown = capsys.readouterr().out
    assert shown.index("Advice") > shown.index("Self-test")
    assert found.notes[0] in shown
    print_advice(Advice(rows=(("H200", "1B", "o1", "8192", "40.0"),), notes=("because",)))
    assert "because" in capsys.readouterr().out


def test_a_gpu_by_name():
    assert gpu_named("h200") is GPUS["h200"]
    assert gpu_named("A100") is gpu_named("a100-80gb", rated=True) is GPUS["a100-80gb"]
    with pytest.raises(UserError, match=r"There is no GPU 'RTX' in the list: V100-32GB, T4"):
        gpu_named("RTX")
    with pytest.raises(UserError, match="There is no GPU 'T4' in the list: a100, h100, h200, b200"):
        gpu_named("T4", rated=True)


# `dither advise` -------------------------------------------------------------------------------------------------------


DOCS = Path(__file__).parents[1] / "docs"
PAGE = "".join((DOCS / page).read_text() for page in ("many-gpus.md", "results/many-gpus.md"))

H200, H100, A100 = GPUS["h200"], GPUS["h100-80gb"], GPUS["a100-80gb"]
TORCHAO_CASTS = 1.75
"""Passes of torchao's casts over their bytes, fitted on its own steps: see docs/results/many-gpus.md."""
SHAPES = {
    "134M": (shape_of(PRESETS["llama-134m"]), 24, 2048),
    "134M, trainer": (replace(shape_of(PRESETS["llama-134m"]), vocab=8192), 48, 1024),
    "360M": (shape_of(PRESETS["llama-360m"]), 16, 2048),
    "1B": (shape_of(PRESETS["llama-1b"]), 8, 2048),
    "3B": (shape_of(PRESETS["llama-3b"]), 3, 2048),
    "8B, 4 blocks": (shape_of(replace(PRESETS["llama-8b"], num_hidden_layers=4)), 4, 2048),
}
"""(model, sequences per step, tokens per sequence)."""

STEPS = [
    # (size, precision, thousand tokens per second on an H200, peak GiB or None): docs/benchmarks.md and runs of the same kind
    ("134M", PrecisionChoice("o1"), 523.58, 22.36),
    ("134M", PrecisionChoice("bf16-sr", "fp8-current"), 583.06, None),
    ("360M", PrecisionChoice("o1"), 187.71, 34.38),
    ("1B", PrecisionChoice("o1"), 65.90, 42.42),
    ("1B", PrecisionChoice("o1", "fp8-current"), 85.00, 39.97),
    ("1B", PrecisionChoice("o1", "fp8-block"), 79.69, 40.10),
    ("1B", PrecisionChoice("bf16-sr"), 68.97, 31.71),
    ("1B", PrecisionChoice("bf16-sr", "fp8-current"), 90.85, 31.28),
    ("3B", PrecisionChoice("o1"), 24.29, 61.46),
    ("3B", PrecisionChoice("o1", "fp8-current"), 32.02, 59.66),
    ("3B", PrecisionChoice("o1", "fp8-block"), 30.09, 59.76),
    ("3B", PrecisionChoice("bf16-sr"), 26.98, 35.53),
    ("3B", PrecisionChoice("bf16-sr", "fp8-current"), 36.15, 39.63),
    ("8B, 4 blocks", PrecisionChoice("o1"), 87.77, 20.41),
    ("8B, 4 blocks", PrecisionChoice("o1", "fp8-current"), 117.74, 19.85),
    ("8B, 4 blocks", PrecisionChoice("o1", "fp8-block"), 107.74, 19.87),
    ("8B, 4 blocks", PrecisionChoice("bf16-sr"), 95.39, 11.89),
    ("8B, 4 blocks", PrecisionChoice("bf16-sr", "fp8-current"), 130.47, 12.95),
]
TRAINER = [
    ("134M, trainer", PrecisionChoice("o1"), 642.0, None),
    ("134M, trainer", PrecisionChoice("bf16-sr"), 673.0, None),
    ("134M, trainer", PrecisionChoice("bf16-sr", None, "dynamic8"), 674.0, None),
]
"""Runs of the trainer, which no constant was fitted on."""


@pytest.mark.parametrize("row", [*STEPS, *TRAINER], ids=lambda row: f"{row[0]} {row[1]}")
def test_predicted_steps_are_within_4_percent_of_measured_ones(row):
    size, choice, speed, peak = row
    shape, batch, sequence = SHAPES[size]
    passes = StepPasses(batch=batch, sequence=sequence)
    step = TrainingStep(shape=shape, setting=choice.setting, layout=ScheduledLayout(), passes=passes, gpu=H200)
    assert abs(step.seconds / (batch * sequence / speed / 1e3) - 1) < 0.04
    assert peak is None or abs(step.memory.peak / GIB / peak - 1) < 0.01


@pytest.mark.parametrize(("states", "measured"), [(None, 4.34), ("companded8", 4.19), ("dynamic8", 6.74), ("e4m3", 4.24)])
def test_predicted_optimizer_steps_are_those_of_the_benchmarks(states, measured):
    """Milliseconds of the 1B Llama in BF16 on an H200."""
    shape = SHAPES["1B"][0]
    found = 1e3 * Clock(shape, Setting(mode="bf16-sr", states=states), H200).update(shape.parameters, 0)
    assert found == pytest.approx(measured, rel=0.1)


# Published runs -------------------------------------------------------------------------------------------------------

EIGHT, SEVENTY, LARGEST = LLAMAS[2:]
POWER = 0.9
"""Sustained rates of torchtitan's H100 of 500 W relative to one of 700 W: fitted on the first row."""
H100_500W = replace(
    H100,
    name="H100-96GB",
    memory=96 * 10**9,
    bandwidth=2.4e12,
    bf16=POWER * 989e12,
    fp8=POWER * 1979e12,
    cast_passes=TORCHAO_CASTS,
)
PLAIN = Setting(residual="bf16")
FP8 = replace(PrecisionChoice("o1", "fp8-current").setting, residual="bf16")
HALF = StepPasses(batch=2, checkpointing="half")
FULL = StepPasses(checkpointing="full")
PUBLISHED = [
    # (title, step, tokens per second and GPU, GiB): torchtitan's benchmarks of December 2024 (H100) and June 2025 (H200)
    ("8B, 8 H100: dp_shard 8", EIGHT, PLAIN, ScheduledLayout(dp_shard=8), HALF, 6667, 77.0),
    ("8B, 8 H100: dp_shard 8, FP8", EIGHT, FP8, ScheduledLayout(dp_shard=8), HALF, 8532, 76.8),
    ("8B, 128 H100: dp_shard 128", EIGHT, PLAIN, ScheduledLayout(dp_shard=128), HALF, 6514, 62.0),
    ("8B, 128 H100: dp_shard 128, FP8", EIGHT, FP8, ScheduledLayout(dp_shard=128), HALF, 8380, 61.8),
    (
        "8B, 8 H100: dp_shard 8, FP8, 32,768 tokens",
        EIGHT,
        FP8,
        ScheduledLayout(dp_shard=8),
        replace(FULL, sequence=32768),
        3890,
        83.9,
    ),
    (
        "70B, 256 H100: dp_shard 32, tp 8, FP8",
        SEVENTY,
        FP8,
        ScheduledLayout(dp_shard=32, tp=8),
        replace(FULL, batch=16),
        829,
        71.9,
    ),
    ("the same, async TP", SEVENTY, FP8, ScheduledLayout(dp_shard=32, tp=8), replace(FULL, batch=16), 876, 67.6),
    (
        "405B, 512 H100: dp_shard 8, tp 8, pp 8, FP8, async TP",
        LARGEST,
        FP8,
        ScheduledLayout(dp_shard=8, tp=8, pp=8),
        replace(FULL, batch=4, number=8),
        100,
        82.5,
    ),
    (
        "the same, interleaved, async TP",
        LARGEST,
        FP8,
        ScheduledLayout(dp_shard=8, tp=8, pp=8, schedule="interleaved-1f1b"),
        replace(FULL, batch=2, number=16),
        128,
        72.7,
    ),
    ("8B, 32 H200: dp_shard 32, FP8", EIGHT, FP8, ScheduledLayout(dp_shard=32), HALF, 10938, 47.96),
    ("8B, 64 H200: dp_shard 64, FP8", EIGHT, FP8, ScheduledLayout(dp_shard=64), HALF, 10753, 46.97),
]
FITTED = ("8B, 8 H100: dp_shard 8", "8B, 32 H200: dp_shard 32, FP8")


def published_row(title, shape, setting, layout, passes, speed, gib) -> tuple[float, str]:
    """Return the deviation of the speed, and the row of the docs page."""
    gpu = replace(H200, cast_passes=TORCHAO_CASTS) if "H200" in title else H100_500W
    gather = 1.0 if "H200" in title else 2.0  # only those runs gather FP8
    step = TrainingStep(
        shape=shape,
        setting=setting,
        layout=layout,
        passes=passes,
        gpu=gpu,
        async_tp="async" in title,
        gather_bytes=gather,
    )
    predicted = step.tokens_per_second / layout.ranks
    wide = replace(step, setting=replace(setting, float_logits=True)).memory.peak / GIB
    deviation = predicted / speed - 1
    kind = "fitted" if title in FITTED else "predicted"
    lean = step.memory.peak / GIB
    cells = (title, kind, f"{speed:,}", f"{predicted:,.0f}", f"{100 * deviation:+.0f} %", f"{gib:.1f}")
    memory = (f"{lean:.1f} ({100 * (lean / gib - 1):+.0f} %)", f"{wide:.1f} ({100 * (wide / gib - 1):+.0f} %)")
    return deviation, f"| {' | '.join((*cells, *memory))} |"


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_published_runs_deviate_as_the_docs_say(row):
    deviation, text = published_row(*row)
    assert abs(deviation) < (0.01 if row[0] in FITTED else 0.23)
    assert text in PAGE


# Memory and communication ---------------------------------------------------------------------------------------------


def test_shards_hold_their_part_and_gather_two_blocks():
    alone, four = (
        estimate(EIGHT, Setting(), StepPasses(), layout).moments for layout in (ScheduledLayout(), ScheduledLayout(dp_shard=4))
    )
    for part in ("weights", "gradients", "states"):
        assert four["update"][part] == pytest.approx(alone["update"][part] / 4, rel=1e-6)
    block = EIGHT.block_weights / EIGHT.layers
    gathered = 2 * block * 2 + EIGHT.output_weights * 2 + block * (2 + 4)
    assert four["loss"]["temporaries"] == pytest.approx(alone["loss"]["temporaries"] + gathered, rel=1e-6)
    assert four["loss"]["weight_codes"] == 0  # gathered in 16 bits, and freed


def test_a_pipeline_holds_as_many_micro_batches_as_stages_and_keeps_its_stage_gathered():
    def parts(layout: ScheduledLayout, number: int):
        return estimate(EIGHT, PrecisionChoice("bf16-sr").setting, StepPasses(number=number), layout).moments["loss"]

    one, four = parts(ScheduledLayout(), 8), parts(ScheduledLayout(pp=4), 8)
    assert four["activations"] == one["activations"]  # a quarter of the blocks, for four micro-batches
    assert parts(ScheduledLayout(pp=4), 4)["activations"] == one["activations"]
    assert parts(ScheduledLayout(pp=4, schedule="interleaved-1f1b"), 8)["activations"] == pytest.approx(
        one["activations"] * (4 + 1 + 6) / 8
    )
    sharded = parts(ScheduledLayout(pp=4, dp_shard=2), 8)
    stage = (EIGHT.parameters - 2 * EIGHT.output_weights) / 4 + EIGHT.output_weights
    assert sharded["gradients"] == pytest.approx(2 * stage, rel=1e-6)


def test_traffic_counts_every_byte_once_per_link():
    assert gathering(1e9, 1, 1).nvlink == 0
    assert gathering(1e9, 4, 1).network == pytest.approx(0.75e9)  # one GPU per node: everything over its own network card
    step = TrainingStep(
        shape=EIGHT,
        setting=PrecisionChoice("bf16-sr").setting,
        layout=ScheduledLayout(dp_shard=16),
        passes=StepPasses(),
        gpu=H200,
    )
    weights = step.traffic["weights"]
    assert weights.nvlink == pytest.approx(2 * 2 * EIGHT.parameters * 15 / 16)  # twice, 2 bytes each
    assert weights.network == pytest.approx(2 * 2 * EIGHT.parameters / 2 / 8)  # from one of two nodes, over eight cards
    coded = replace(step, setting=PrecisionChoice("bf16-sr", "fp8-current").setting).traffic["weights"]
    assert coded.nvlink < 0.6 * weights.nvlink
    replicas = replace(step, layout=ScheduledLayout(dp_replicate=2, dp_shard=8)).traffic["gradients"]
    assert replicas.network == pytest.approx(2 * EIGHT.parameters / 8)  # an all-reduce of a shard: twice a half
    pair = replace(step, layout=ScheduledLayout(tp=2)).traffic["tensor parallel"]
    assert pair.nvlink == pytest.approx(32 * 8 * 8192 * 4096 * 2 / 2)


def test_a_pipeline_idles_for_its_bubble():
    step = TrainingStep(
        shape=EIGHT,
        setting=PrecisionChoice("o1").setting,
        layout=ScheduledLayout(pp=4),
        passes=StepPasses(number=8),
        gpu=H200,
    )
    parts = step.seconds_by_part
    assert parts["bubbles"] == pytest.approx(3 / 8 * (parts["compute"] + parts["waiting"]), rel=0.01)
    again = replace(step, layout=ScheduledLayout(pp=4, schedule="interleaved-1f1b"))
    assert again.seconds_by_part["bubbles"] == pytest.approx(parts["bubbles"] / 2, rel=0.01)
    with pytest.raises(UserError, match="needs as many passes"):
        replace(step, passes=StepPasses(number=3))


# The search -----------------------------------------------------------------------------------------------------------


def test_layouts_multiply_to_the_gpus_and_never_split_heads_or_blocks():
    narrow = Shape(width=1024, layers=6, heads=8, feed_forward=2816, vocab=32000, key_value_heads=2)
    found = list(layouts(narrow, 16))
    assert found
    assert all(layout.ranks == 16 and layout.tp <= 2 and layout.pp <= 6 for layout in found)
    assert {layout.tp for layout in layouts(SEVENTY, 64)} == {1, 2, 4, 8}
    assert {layout.tp for layout in layouts(SEVENTY, 64, node=4)} == {1, 2, 4}


def test_options_fit_and_are_ranked_by_speed():
    found = rank(Job(shape=EIGHT, gpu=H100, gpus=8))
    speeds = [option.step.tokens_per_second for option in found.options]
    assert speeds == sorted(speeds, reverse=True)
    assert {option.choice for option in (*found.options, *found.refused)} == set(CHOICES)
    for option in found.options:
        assert option.step.memory.peak <= found.job.usable
        assert option.step.layout.ranks == 8
        assert option.step.tokens == pytest.approx(2**22, rel=0.25)
    assert found.best.step.tokens_per_second >= 0.98 * speeds[0]


def test_a_gpu_without_fp8_units_gets_no_casts_and_too_little_memory_is_refused():
    found = rank(Job(shape=llama3_of(13e9), gpu=A100, gpus=2))
    assert all(option.choice.recipe is None for option in (*found.options, *found.refused))
    assert found.refused
    assert "does not fit: needs" in found.refused[0].shortfall(found.job.usable)
    with pytest.raises(UserError, match=r"No layout fits on 8 H100-80GB: the leanest, .* lacks \d+\.\d GiB per GPU"):
        _ = rank(Job(shape=LARGEST, gpu=H100, gpus=8)).best


@pytest.mark.parametrize("billions", [1.5, 13, 200])
def test_interpolated_llamas_have_about_the_parameters_asked_for(billions):
    shape = llama3_of(billions * 1e9)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.06)
    assert shape.heads % 8 == 0


# The command ----------------------------------------------------------------------------------------------------------


def test_the_output_in_the_docs_is_that_of_the_command(capsys):
    """The page shows some of the lines, in their order."""
    begins = "$ dither advise --params 70e9 --gpus 64 --gpu h200 --tokens 1.4e12 --price 2.5"
    shown = PAGE.partition(f"{begins}\n")[2].partition("```")[0].splitlines()
    assert cli.main(begins.split()[2:]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    assert len(shown) > 10
    assert [line for line in lines if line in set(shown) - {""}] == [line for line in shown if line]


def test_json_and_toml(capsys, tmp_path):
    path = tmp_path / "run.toml"
    words = ["--model", "llama-8b", "--gpus", "8", "--gpu", "h200", "--tokens", "1e11", "--price", "2", "--toml", str(path)]
    assert cli.main(["advise", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best, text = found["recommended"], path.read_text()
    assert found["toml"] == text
    assert best["peak_bytes"] == sum(best["memory_bytes"].values())
    assert best["step_seconds"] == pytest.approx(sum(best["seconds"].values()))
    assert best["cost"] == pytest.approx(best["days"] * 24 * 8 * 2)
    written = tomllib.loads(text)
    parallel = written["parallel"]
    assert parallel["dp_replicate"] * parallel["dp_shard"] * parallel["tp"] * parallel["pp"] == 8
    assert written["model"] == {"preset": "llama-8b"}
    assert written["data"]["batch"] * written["data"]["sequence"] == best["tokens_per_step"]
    if "parallel" not in {field.name for field in fields(Config)}:
        del written["parallel"]
        path.write_text("\n\n".join(_section(name, values) for name, values in written.items()))
    config = configs.load(path)
    assert config.precision.recipe == best["precision"]["recipe"]
    assert config.run.steps * best["tokens_per_step"] >= 1e11


def _section(name: str, values: dict[str, object]) -> str:
    return "\n".join((f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--params 7e9 --gpus 8 --gpu h300", "There is no GPU 'h300' (did you mean 'h200'?) in the list: a100, h100, h200"),
        ("--params 7e9 --gpus 12 --gpu h100", "12 GPUs do not fill nodes of 8: choose a multiple, or change --node."),
        ("--params 7e9 --gpus 0 --gpu h100", "--gpus is a positive integer, not 0."),
        ("--gpus 8 --gpu h100", "Give either --model (a preset or a Hugging Face folder) or --params."),
        ("--params 5 --gpus 8 --gpu h100", "A number of parameters is from 1e6 to 1e13, such as 7e9, not 5."),
        ("--params 7e9 --gpus 8 --gpu h100 --price 2", "--price gives a cost together with --tokens: give both."),
        ("--params 7e9 --gpus 8 --gpu h100 --network 0", "A network has a positive number of Gbit/s per GPU"),
        ("--params 7e9 --gpus 8 --gpu h100 --batch-tokens 9", "A step has at least one sequence of 8192 tokens, not 9 tokens."),
        ("--params 7e9 --gpus 512 --gpu h100 --batch-tokens 8192", "No layout of 512 GPUs divides a step of 8192 tokens"),
        ("--model EMPTY --gpus 8 --gpu h100", "has no config.json: give the folder of a Hugging Face model, or a preset."),
        ("--params 7e9 --gpus 8 --gpu h100 --toml EMPTY", "exists already: choose another name for --toml."),
        ("--params 405e9 --gpus 8 --gpu h100", "No layout fits on 8 H100-80GB"),
    ],
)
def test_bad_input_is_one_sentence(words, said, capsys, tmp_path):
    assert cli.main(["advise", *words.replace("EMPTY", str(tmp_path)).split()]) == 2
    assert said in error_line(capsys.readouterr().err)
