"""Goals that no plan can reach are refused before the model is built, and in a loop of one's own when Snip is made."""

import pytest
from torch import nn

import dither
from dither import UserError, cli
from dither.snip import Goal, Snip
from dither.train import corpora
from dither.train import trainer as trainers

IMPOSSIBLE = {
    "snip.pinned=['*.nothing=fp8']": "matches no layer",
    "snip.pinned=['*.up_proj=fp3']": "is pinned to 'fp3'",
    "snip.stages=[1,2]": "The stages 1,2 hold 3 blocks, and the model has",
    "snip.pinned=['*=fp8']": "the largest feasible one is 0",
    "snip.options='bf16,fp8' snip.target=0.9 snip.pinned=['*.down_proj=bf16']": "the largest feasible one is",
}


@pytest.mark.parametrize("settings", IMPOSSIBLE)
def test_an_impossible_goal_is_an_error_before_the_model_is_built(settings, tmp_path, monkeypatch, capsys):
    for module, name in ((trainers, "_model"), (corpora, "prepare"), (corpora, "open_tokens")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("too late"))
    words = ["snip.target=0.5", "precision.recipe=fp8-block", *settings.split()]
    assert cli.main(["train", "--out", str(tmp_path / "run"), "--set", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("dither: error: In [snip]: ")
    assert IMPOSSIBLE[settings] in said
    assert not (tmp_path / "run").exists()


def test_an_impossible_goal_in_a_loop_of_ones_own():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    dither.convert(model, "fp8-block")
    optimizer = dither.optim.AdamW(model.named_parameters())
    for goal, said in (
        (Goal(target=0.5, pinned={"up": "fp8"}), "matches no layer"),
        (Goal(target=0.9, pinned={"0": "fp8"}), "the largest feasible one is 0.5"),
        (Goal(target=0.5, stages=(1, 1, 1, 1)), "they must cover it exactly"),
    ):
        with pytest.raises(UserError, match=said):
            Snip(dither.Conversion.of(model), optimizer, goal=goal)
    Snip(dither.Conversion.of(model), optimizer, goal=Goal(target=0.5, pinned={"0": "fp8"}))
