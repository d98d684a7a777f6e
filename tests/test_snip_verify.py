"""Verification: a perfect estimate has a correlation of 1, and ranks are those of scipy."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from lazily import Lazy
from test_snip_estimates import batches, everything, same, trained

from dither import Stream, UserError
from dither.snip import Verification, score, verify
from dither.snip.verification import spearman

stats = Lazy("scipy.stats")

STREAM = Stream(0, "snip", "truth")


def test_estimates_beside_the_truth():
    model, optimizer = trained("fp8-delayed")
    given = score(model, batches(), optimizer, "fp8,fp4", probe="direct", stream=STREAM)
    before = everything(model, optimizer)
    found = verify(model, batches(2, seed=3), optimizer, given, "fp8,fp4", stream=STREAM)
    after = everything(model, optimizer)
    assert [key for key in before if not same(before[key], after[key])] == []
    assert found.passes == 2 * (1 + 3 * 8)
    # A gradient's cast changes no loss, whatever else is cast.
    cost = dict(zip(found.options, found.loss[0], strict=True))
    assert cost["fp4/fp8/fp8"] == cost["fp4/fp8/fp4"] != cost["fp8/fp8/fp8"]
    (estimate,) = found.estimates
    each = [verify(model, [batch], optimizer, given, "fp8,fp4", stream=STREAM) for batch in batches(2, seed=3)]
    assert found.agreement[0] == pytest.approx(spearman(each[0].loss, each[1].loss))
    assert found.agreement[2] == pytest.approx(spearman(each[0].weights, each[1].weights))
    for name in ("loss", "mean_loss"):  # means over the batches, of magnitudes or with signs, in units of the mean loss
        means = sum(torch.tensor(getattr(one, name)) * one.base for one in each) / (2 * found.base)
        torch.testing.assert_close(means, torch.tensor(getattr(found, name)))
    assert [[abs(number) for number in row] for row in each[0].mean_loss] == [list(row) for row in each[0].loss]
    assert each[0].agreement is None
    assert Verification.from_json(each[0].to_json()) == each[0]
    magnitudes = [[abs(number) for number in row] for row in found.mean_loss]
    assert estimate.loss == pytest.approx(stats.spearmanr([*chain(*found.loss)], [*chain(*given.loss)])[0])
    assert estimate.mean_loss == pytest.approx(stats.spearmanr([*chain(*magnitudes)], [*chain(*given.loss)])[0])
    assert estimate.weights == pytest.approx(stats.spearmanr([*chain(*found.weights)], [*chain(*given.weights)])[0])
    # The truth itself as an estimate, in any units.
    perfect = replace(given, probe="truth", loss=found.loss, weights=tuple(
        tuple(3 * number for number in row) for row in found.weights
    ))  # fmt: skip
    again = verify(model, batches(2, seed=3), optimizer, [given, perfect], "fp8,fp4", stream=STREAM)
    assert (again.loss, again.weights) == (found.loss, found.weights)
    assert again.estimates[1].loss == pytest.approx(1.0)
    assert again.estimates[1].weights == pytest.approx(1.0)
    assert Verification.from_json(again.to_json()) == again
    lines = str(again).splitlines()
    assert lines[0].split()[:2] == ["Spearman's", "correlation"]
    assert lines[3].split() == ["truth", "1.000", f"{again.estimates[1].mean_loss:.3f}", "1.000", "1", f"{given.seconds:.1f}"]


def test_more_batches_for_the_loss():
    """The loss alone is that of whole passes, and weights are left to those that were."""
    model, optimizer = trained()
    given = score(model, batches(), optimizer, "fp8,fp4", probe="direct", stream=STREAM)
    four = batches(4, seed=3)
    before = everything(model, optimizer)
    whole = verify(model, four, optimizer, given, "fp8,fp4", stream=STREAM)
    found = verify(model, four[:2], optimizer, given, "fp8,fp4", stream=STREAM, more_for_loss=four[2:])
    after = everything(model, optimizer)
    assert [key for key in before if not same(before[key], after[key])] == []
    for name in ("loss", "mean_loss"):
        torch.testing.assert_close(torch.tensor(getattr(found, name)), torch.tensor(getattr(whole, name)), rtol=1e-4, atol=1e-8)
    assert found.base == pytest.approx(whole.base)
    assert found.passes == whole.passes / 2
    two = verify(model, four[:2], optimizer, given, "fp8,fp4", stream=STREAM)
    assert (found.weights, found.agreement[2]) == (two.weights, two.agreement[2])
    assert "on 2 batches and 2 more for the loss" in " ".join(str(found).split())
    assert Verification.from_json(found.to_json()) == found


def test_ranks_are_scipys():
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(5, (40,), generator=generator).double().tolist()  # with ties
    b = torch.randn(40, generator=generator).tolist()
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b)[0])
    assert spearman([1.0, 1.0], [1.0, 2.0]) == 0.0


def test_scores_of_something_else_are_refused():
    model, optimizer = trained()
    given = score(model, batches(), optimizer, "fp8,fp4", probe="direct", stream=STREAM)
    with pytest.raises(UserError, match=r"3 layers and 8 options .*score again"):
        verify(model, batches(), optimizer, given, "bf16,fp4", stream=STREAM)
    with pytest.raises(UserError, match="no scores"):
        verify(model, batches(), optimizer, [], "fp8,fp4", stream=STREAM)
    with pytest.raises(UserError, match="no batches"):
        verify(model, [], optimizer, given, "fp8,fp4", stream=STREAM)
    with pytest.raises(UserError, match="version"):
        Verification.from_json("{}")
