"""Which precision for which GPU and model, `dither memory`, and the advice at the end of `dither doctor`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dither import UserError, cli
from dither.models import PRESETS, build, save_pretrained
from dither.tools import doctor
from dither.tools.doctor import print_advice
from dither.tools.gpus import LARGE, SMALL, advice_here
from dither.tools.memory import GIB, Setting, estimate, llama_of, model_shape, shape_of
from dither.tools.recommend import GPUS, Advice, Gpu, advise, gpu_named, recommend, selection
from dither.train import Config
from dither.train import config as configs

SIZES = {"134M": 134e6, "1B": 1.2e9, "3B": 3e9, "8B": 8e9, "13B": 13e9, "70B": 70e9}


def guide(gpu: str, billions: float, risk: str, experience: str) -> str:
    """The guide's recommend_training_precision, as it stands there."""
    if gpu in ("V100", "T4"):
        return "FP16 mixed"
    if gpu == "A100":
        return "BF16 mixed"
    if gpu in ("H100", "H200"):
        if risk == "zero":
            return "BF16 mixed"
        return "FP8 (TE)" if billions >= 13 and experience == "advanced" else "BF16 mixed"
    if gpu in ("B200", "B100"):
        if experience == "advanced" and billions >= 70:
            return "FP4 experimental"
        return "FP8 (TE)" if billions >= 13 else "BF16 mixed"
    return "BF16 mixed"


def kind(found) -> str:
    """A recommendation in the guide's words."""
    if found.recipe is not None:
        return "FP4 experimental" if "fp4" in found.recipe else "FP8 (TE)"
    return {"fp16": "FP16 mixed", "fp32": "FP32"}.get(found.mode, "BF16 mixed")


def roomy(name: str) -> Gpu:
    """A GPU of a kind with memory for everything, so that only its units decide."""
    return Gpu(name, GPUS[name.lower()].capability, 10_000 * GIB)


def test_where_recommendations_differ_from_the_guides_and_nowhere_else():
    """docs/memory.md says why: FP8 from 1B on, whoever trains, and FP4 only for those who ask for it."""
    names = {"V100": "V100-32GB", "T4": "T4", "A100": "A100-80GB", "H100": "H100-80GB", "H200": "H200", "B200": "B200"}
    for gpu, ours in names.items():
        for size, count in SIZES.items():
            shape = llama_of(count)
            assert kind(recommend(shape, roomy(ours), risk="none")) == guide(gpu, count / 1e9, "zero", "new") or gpu == "B200"
            mine = kind(recommend(shape, roomy(ours)))
            for experience in ("new", "advanced"):
                theirs = guide(gpu, count / 1e9, "some", experience)
                if gpu in ("H100", "H200", "B200") and size != "134M":
                    assert mine == "FP8 (TE)", (gpu, size)
                else:
                    assert mine == theirs, (gpu, size, experience)
    assert kind(recommend(llama_of(70e9), roomy("B200"), risk="high")) == guide("B200", 70, "some", "advanced")
    assert kind(recommend(llama_of(70e9), roomy("H100-80GB"), risk="high")) == "FP8 (TE)"  # no units for FP4


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
            assert (found.recipe, found.states) == (None, None)
            assert found.mode in ("o1", "fp16")
        if found.recipe is not None:
            assert gpu.capability >= (8, 9)
        assert ("fp16" in found.mode) == (gpu.capability < (8, 0))
        configs.override(Config(), list(found.settings))  # the trainer takes them


def test_less_memory_means_a_leaner_setting_and_says_why():
    shape = llama_of(3e9)
    found = [recommend(shape, Gpu("GPU", (8, 0), gib * GIB)) for gib in (160, 60, 40, 34, 30, 12)]
    assert [each.summary for each in found] == [
        "o1",
        "bf16-sr",
        "bf16-sr",
        "bf16-sr + companded8 states",
        "bf16-sr + companded8 states",
        "bf16-sr + companded8 states + checkpointing",
    ]
    assert found[-1].batch == 0
    assert found[4].reasons[-1] == "Only 4096 tokens fit into a pass: accumulate gradients."
    needs = estimate(shape, Setting(mode="o1"), batch=4, sequence=2048).peak / GIB
    assert f"o1 needs {needs:.0f} GiB for 4 x 2048 tokens, and 57 GiB can be used." in found[1].reasons


def test_machines_without_units():
    assert recommend(llama_of(134e6), Gpu("GTX", (6, 1), 80 * GIB)).mode == "fp32"
    found = advise([Gpu("cpu", None, 8 * GIB)], SMALL, bf16_slowdown=250.0)
    assert [row[:3] for row in found.rows] == [("cpu", "tiny", "fp32"), ("cpu", "llama-134m", "fp32")]
    assert "BF16 products take 250 times as long" in found.notes[-1]
    assert advise([Gpu("cpu", None, 8 * GIB)], SMALL, bf16_slowdown=1.0).notes == found.notes[:-1]


def test_gpus_that_are_alike_count_once():
    assert advise([GPUS["h200"]] * 8, LARGE) == advise([GPUS["h200"]], LARGE)


def test_shapes_of_the_doctor_are_those_of_presets():
    for name, shape in {**SMALL, **LARGE}.items():
        assert shape == shape_of(PRESETS[name]), name


def test_the_table_in_the_docs_is_that_of_the_function():
    page = (Path(__file__).parent.parent / "docs" / "memory.md").read_text()
    for row in selection(list(GPUS.values()), {size: llama_of(count) for size, count in SIZES.items()}):
        assert f"| {' | '.join(row)} |" in page


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
    assert "dither train --set precision.mode=o1 precision.recipe=fp8-current" in shown
    assert cli.main(["memory", "--params", "7e9", "--batch", "1", "--recipe", "fp8-block", "--states", "int8"]) == 0
    assert "o1 + fp8-block + int8" in capsys.readouterr().out


def test_memory_of_a_run(tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    more = ["model.preset=llama-134m", "model.vocab=32000", "precision.mode=bf16-sr", "data.batch=8", "data.micro_batch=2"]
    (out / "config.toml").write_text(configs.dumps(configs.override(Config(), [*more, "data.sequence=512"])))
    assert cli.main(["memory", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith("134,105,856 parameters, 2 x 512 tokens per pass")
    setting = Setting(mode="bf16-sr", accumulate=True)
    peak = estimate(shape_of(PRESETS["llama-134m"]), setting, batch=2, sequence=512).peak / GIB
    assert f"{peak:.2f}" in shown.splitlines()[-2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["llama-1bb"], "There is no model 'llama-1bb'"),
        (["--batch", "1"], "Give a model"),
        (["tiny", "--params", "1e9"], "and not both"),
        (["tiny", "--mode", "o3"], "There is no mode 'o3'"),
        (["tiny", "--recipe", "fp9"], "There is no recipe 'fp9'"),
        (["tiny", "--gpu", "H300"], "There is no GPU 'H300'"),
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
    doctor.print_report(doctor.Report((), doctor.devices(), "cpu", (), test, advice=found))
    shown = capsys.readouterr().out
    assert shown.index("Advice") > shown.index("Self-test")
    assert found.notes[0] in shown
    print_advice(Advice(rows=(("H200", "1B", "o1", "8192", "40.0"),), notes=("because",)))
    assert "because" in capsys.readouterr().out


def test_doctor_needs_no_safetensors():
    code = "import sys; sys.modules['safetensors'] = sys.modules['tyro'] = None; import dither.tools.doctor"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_gpu_by_name():
    assert gpu_named("h200") is GPUS["h200"]
