"""Passes as CUDA graphs in the trainer: the same bits as without them, and zero new graphs of Dynamo when plans change."""

import os

import pytest
import torch

from dither.train import checkpoint, config, loop

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
    "sr": ['precision.mode="bf16-sr"', 'precision.recipe="fp8-block"', 'precision.states="dynamic8"'],
    "gaussws": ['precision.mode="o1"', 'precision.sampling={parts="od", b_init=7, b_target=5}'],
    "recompute": ['precision.mode="o1"', "precision.sampling={recompute=true}"],
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


@pytest.mark.filterwarnings("ignore:The layer:UserWarning")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_graphs_change_no_bit(name, parts, tmp_path):
    found = []
    for graphs in ("false", "true"):
        out = tmp_path / graphs
        settings = [f'run.out="{out}"', "run.steps=14", "run.sample_every=0", "run.eval_every=0", f"run.cuda_graphs={graphs}"]
        settings += ["data.batch=8", f"data.micro_batch={8 // parts}", "data.sequence=128", "optim.lr=1e-3"]
        outcome = loop.train(config.override(config.Config(), [*settings, *SETTINGS[name]]))
        assert outcome.code == 0, outcome.why
        newest, _ = checkpoint.newest(out / "checkpoints")
        found.append(checkpoint.load(newest)[0])
    eager, graphed = found
    assert eager.keys() == graphed.keys()
    different = [
        key
        for key in eager
        if not torch.equal(eager[key].reshape(-1).view(torch.uint8), graphed[key].reshape(-1).view(torch.uint8))
    ]
    assert different == []
