"""All methods together on a CPU: combinations that cover all pairs, in tiny runs that resume to the same bits."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import e2e
import e2e_matrix as matrix
import e2e_training as runs
import pytest
from e2e_matrix import Combination
from e2e_training import Setup, Trace

STEPS = 4
"""Steps of a run here: a schedule and SNIP change the plan before and after the checkpoint in the middle."""

ROWS = matrix.matrix()
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "everything.py"


THIN = 4
"""Combinations in `make test`."""


def first_values(number: int) -> set[str]:
    row = ROWS[number]
    return {row.model, row.mode, row.accumulation}


def thin() -> list[int]:
    """Choose combinations of eager code: first those with most new models, modes and accumulations, then with most new pairs.

    Compiling takes longer than all of them together.
    """
    chosen: list[int] = []
    while len(chosen) < THIN:
        pairs = set().union(*(ROWS[number].pairs for number in chosen))
        values = set().union(*(first_values(number) for number in chosen))
        eager = [number for number, row in enumerate(ROWS) if row.blocks == "eager" and number not in chosen]
        gain = {number: len(first_values(number) - values) for number in eager}
        chosen.append(max(eager, key=lambda number: (gain[number], len(ROWS[number].pairs - pairs), -number)))
    return chosen


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    return runs.tokens(tmp_path_factory.mktemp("text") / "tokens")


# The matrix -----------------------------------------------------------------------------------------------------------


def test_every_pair_trains_or_is_refused():
    covered = set().union(*(row.pairs for row in ROWS))
    refused = set(matrix.REFUSED_PAIRS)
    assert covered | refused == matrix.all_pairs(matrix.axes())
    assert not covered & refused
    assert all(matrix.refusal(row) == "" for row in ROWS)
    assert refused <= set().union(*(row.pairs for row in matrix.refused()))
    assert matrix.matrix() == ROWS
    assert len(ROWS) <= 40  # at least 8 * 4; the time of a matrix grows with it
    assert {value for row in ROWS for value in row.values} >= set(matrix.AXES["recipe"])


def test_the_thin_part_has_every_model_mode_and_sampling():
    rows = [ROWS[number] for number in thin()]
    for axis in ("model", "mode", "accumulation"):
        assert {getattr(row, axis) for row in rows} == set(matrix.AXES[axis])


def test_a_covering_leaves_out_what_is_forbidden():
    given = {axis: of[:2] for axis, of in matrix.AXES.items()}
    forbidden = {(("mode", "fp32"), ("recipe", "fp8-current"))}
    rows = matrix.cover(given, forbidden)
    assert set().union(*(row.pairs for row in rows)) == matrix.all_pairs(given) - forbidden


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(
    without=[
        "fp16, fp8-block-2d, bf16 states, snip, eager, x3, huggingface",
        "fp32, fp8-block, dynamic8 states, inputs, snip, eager, x3, huggingface",
    ]
)
@pytest.mark.parametrize(
    "number", [pytest.param(n, id=row.name, marks=() if n in thin() else pytest.mark.exhaustive) for n, row in enumerate(ROWS)]
)
def test_a_combination_trains_and_resumes(number, tokens, tmp_path):
    combination, setup = ROWS[number], Setup(tokens=tokens, steps=STEPS, batch=3, sequence=16)
    trace, different = runs.train_and_resume(combination, setup, tmp_path)
    assert different == []
    assert e2e.judge_graphs(combination, trace) == []
    assert trace.losses[STEPS] < trace.losses[1]


def test_what_makes_no_sense_is_refused(tokens):
    found = e2e.refusals(Setup(tokens=tokens, steps=STEPS))
    assert found["wrong"] == {}
    assert found["number"] == len(matrix.refused()) + len(matrix.NONSENSE)


# Bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_bounds_contain_one_more_perturbed_run_and_not_another_recipe(tokens, tmp_path):
    """In float32 without casts, the bound contains a perturbed run, and no run with casts."""
    plain = {"mode": "fp32", "states": "fp32", "sampling": "none", "plans": "off", "blocks": "eager", "accumulation": "1"}
    uncast, mxfp8 = (Combination(**plain, recipe=name, model="gpt2") for name in ("none", "mxfp8"))
    setup = Setup(tokens=tokens, steps=2, batch=2, sequence=16)
    reference, *perturbed, more = [runs.train(uncast, setup, tmp_path / str(seed), seed=seed) for seed in (None, 1, 2, 3, 4)]
    row = e2e.judge_losses(more, reference, perturbed, comparisons=1000)
    assert row["worst"] <= 1
    assert any(run.losses != reference.losses for run in (*perturbed, more))  # perturbations have an effect
    other = runs.train(mxfp8, setup, tmp_path / "mxfp8")
    other.plans = reference.plans
    assert e2e.judge_losses(other, reference, perturbed, comparisons=1000)["worst"] > 1


def test_bounds_follow_the_spread_and_never_fall():
    reference = [5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0]
    perturbed = [[loss + sign * 1e-3 * min(t, 5) for t, loss in enumerate(reference, 1)] for sign in (1, -1, 1)]
    found = runs.bounds(reference, perturbed, comparisons=100)
    factor = runs.student(runs.FALSE_ALARMS / 100, 15)
    assert found[0] == pytest.approx(factor * 1e-3 * (55 / 5) ** 0.5 + 2**-22 * 5)
    assert all(after >= before - 2**-20 for before, after in itertools.pairwise(found))
    assert runs.student(0.05, 10) == pytest.approx(2.228, abs=2e-3)


def trace_of(losses, graphs=None, plans=None):
    return Trace(dict(enumerate(losses, 1)), graphs or dict.fromkeys(range(1, len(losses) + 1), 1), plans or {0: {"*": "a"}})


def test_faults_are_found():
    """Every check fails on a run that has its fault, and the table names it."""
    row = next(row for row in ROWS if row.plans == "off" and row.blocks == "compiled" and row.recipe != "fp8-delayed")
    host = {"reference": trace_of([3.0, 2.0]).to_dict(), "perturbed": [trace_of([3.001, 2.001]).to_dict()] * 3}
    good = {"trace": trace_of([3.0, 2.0005]).to_dict(), "different": []}
    assert e2e.judge(row, good, host, 100)["faults"] == []
    cases = {
        "resuming changed a weight": good | {"different": ["a weight"]},
        "the loss of step 2": good | {"trace": trace_of([3.0, 2.1]).to_dict()},
        "the loss did not fall": good | {"trace": trace_of([3.0, 3.5]).to_dict()},
        "3 graphs were compiled after the first step": good | {"trace": trace_of([3.0, 2.0], {1: 1, 2: 4}).to_dict()},
        "the plan changed 1 times": good | {"trace": trace_of([3.0, 2.0], plans={0: {"*": "a"}, 1: {"*": "b"}}).to_dict()},
        "another plan than on the CPU": good | {"trace": trace_of([3.0, 2.0], plans={0: {"*": "b"}}).to_dict()},
        "device: it took longer": {"error": "it took longer than 1 s"},
    }
    for words, device in cases.items():
        found = e2e.judge(row, device, host, 100)
        assert any(words in fault for fault in found["faults"]), (words, found["faults"])
        assert words in e2e.table([found])
    nan = e2e.judge(row, good | {"trace": trace_of([3.0, float("nan")]).to_dict()}, host, 100)
    assert any("the loss of step 2 is nan" in fault for fault in nan["faults"])


# Everything at once, against O1 -----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_everything_against_o1(tmp_path):
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(BENCHMARK), "--tiny", "--results", str(tmp_path), "--seeds", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows] == ["arm", "---", "o1", "everything"]
    assert int(rows[3][7]) >= 2  # changes of plan
    assert float(rows[3][9].strip("| ")) < 6.9  # bitwidths move from 7 toward 5
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(again.stdout)  # only the table: no run is repeated
