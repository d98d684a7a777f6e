"""The trainer on the GPU: compiled blocks learn, and what was saved is what a resumed run begins with."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dither.errors import UserError
from dither.train.config import Config, Data, Optim, Parallel, Precision, RunSettings
from dither.train.loop import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def config(folder: Path, name: str, steps: int, **precision: str) -> Config:
    text = folder / "text"
    if not text.exists():
        text.mkdir()
        for i in range(60):
            words = " ".join(f"{i} bottles of beer on the wall, {i + n} bottles of beer." for n in range(40))
            (text / f"{i:02d}.txt").write_text(words)
    return Config(
        data=Data(sources=(str(text),), sequence=128, batch=8, micro_batch=4),
        optim=Optim(schedule="constant"),
        precision=Precision(**precision),
        run=RunSettings(steps=steps, save_every=6, eval_every=0, sample_every=6, sample_tokens=5, out=str(folder / name)),
    )


@pytest.mark.parametrize(
    "precision",
    [
        {"mode": "o1"},
        {"mode": "o1", "recipe": "fp8-block"},
        {"mode": "o2"},
        {"mode": "bf16-sr", "states": "dynamic8"},
        {"mode": "bf16-sr", "gradients": "bf16-sr"},
        {"mode": "bf16-kahan", "gradients": "fp32"},
        {"mode": "fp16-o2"},
    ],
    ids=str,
)
def test_a_run_is_saved_and_goes_on(tmp_path, precision):
    """Backward passes of attention and embedding add in no fixed order on a GPU, so what is compared is what was saved.

    Inductor chooses the blocks of its sums by their time, so that losses of equal weights may differ in the last bit.
    """
    first = train(config(tmp_path, "run", 6, **precision))
    assert first.code == 0
    again = train(config(tmp_path, "run", 6, **precision), resume=True)
    assert again.step == 6
    assert again.loss == pytest.approx(first.loss, rel=2 * torch.finfo(torch.float32).eps)
    last = train(config(tmp_path, "run", 12, **precision), resume=True)
    assert last.step == 12
    assert last.loss < min(first.loss, last.unigram)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_all_that_saves_memory(tmp_path, checkpointing):
    """What `--gpu-memory 24GB` chooses, in compiled blocks."""
    how = {"mode": "bf16-sr", "recipe": "fp8-current", "states": "dynamic4", "weights": "fp8"}
    asked = config(tmp_path, "run", 12, **how, logits="chunked", save="input", hold="none")
    asked = replace(
        asked,
        data=replace(asked.data, micro_batch=None),
        optim=replace(asked.optim, release_gradients=True, clip_norm="previous"),
        parallel=Parallel(checkpointing=checkpointing),
    )
    first = train(replace(asked, run=replace(asked.run, steps=6)))
    assert train(asked, resume=True).loss < first.loss


@pytest.mark.parametrize("released", [False, True])
def test_states_in_host_memory(tmp_path, released):
    """With CUDA graphs of passes where gradients are not released; and a resumed run takes the states back."""
    asked = config(tmp_path, "run", 12, mode="bf16-sr", recipe="fp8-current", states="companded8")
    optim = replace(asked.optim, states_on="host")
    if released:
        optim = replace(optim, release_gradients=True, clip_norm="previous")
        asked = replace(asked, data=replace(asked.data, micro_batch=None))
    first = train(replace(asked, optim=optim, run=replace(asked.run, steps=6)))
    assert train(replace(asked, optim=replace(optim, states_on="device")), resume=True).loss < first.loss


def test_a_gpu_that_is_not_there(tmp_path):
    asked = config(tmp_path, "run", 2)
    with pytest.raises(UserError, match="There is no GPU 'cuda:99'"):
        train(replace(asked, run=replace(asked.run, device="cuda:99")))
