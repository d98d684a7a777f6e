"""Checkpoints of what lies on a GPU: copies that the next update cannot overtake, and runs that resume to the same bits."""

from pathlib import Path

import pytest
import torch

import dither
from dither import checkpoint
from dither.checkpoint import Saver, pack, unpack
from dither.models import Llama, LlamaConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)


def test_what_is_saved_is_what_was_there(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 26, device="cuda")  # 256 MiB: an update enqueued at once would overtake a copy beside it
    with Saver(tmp_path, last=10) as saver:
        for step in range(3):
            saver.save(step, tensors={"weight": weight}, plain={})
            weight += 1
    for step in range(3):
        found = checkpoint.load(tmp_path / f"step-{step:08d}")[0]["weight"]
        assert found.device.type == "cpu"
        assert bool((found == step).all())


def test_the_host_waits_for_nothing(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 20, device="cuda")
    with Saver(tmp_path) as saver:
        saver.prepare({"weight": weight})
        assert saver.wait() is None
        (prepared,) = saver._host.values()
        assert prepared.is_pinned()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            saver.save(1, tensors={"weight": weight}, plain={})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert saver._host["weight"] is prepared


def build(recipe: str, seed: int) -> tuple[Llama, dither.optim.AdamW]:
    torch.manual_seed(seed)
    model = Llama(CONFIG).cuda()
    dither.convert(model, recipe)
    model.to(torch.bfloat16)
    return model, dither.optim.AdamW(model.named_parameters(), lr=1e-3, states="dynamic8", max_norm=1.0)


def train(model: Llama, optimizer: dither.optim.AdamW, steps: range) -> None:
    for step in steps:
        tokens = dither.Stream(1, "data", "tokens").bits(step, (2, 129), width=16, device="cuda") % 512
        with dither.step_context(model, step=step):
            model(tokens[:, :-1].long(), tokens[:, 1:].long()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", ["bf16-pure", "fp8-delayed", "mxfp4"])
def test_a_resumed_run_is_the_straight_run(recipe: str, tmp_path: Path) -> None:
    model, optimizer = build(recipe, 1)
    train(model, optimizer, range(3))
    with Saver(tmp_path) as saver:
        tensors, plain = pack(model, optimizer, step=3)
        saver.save(3, tensors=tensors, plain=plain)
        train(model, optimizer, range(3, 6))
    again, another = build(recipe, 2)
    path, _ = checkpoint.newest(tmp_path)
    assert path is not None
    assert unpack(again, another, *checkpoint.load(path)).step == 3
    train(again, another, range(3, 6))
    straight, resumed = (pack(*each, step=6)[0] for each in ((model, optimizer), (again, another)))
    assert set(straight) == set(resumed)
    for name, tensor in straight.items():
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8), resumed[name].contiguous().view(-1).view(torch.uint8)
        ), name
