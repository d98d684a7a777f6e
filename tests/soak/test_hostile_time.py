"""Hostile input below 1 MB is answered within five seconds of CPU time, and nothing is printed past the error."""

import hostile
import pytest


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return hostile.good(tmp_path_factory.mktemp("hostile") / "good")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", list(hostile.slow_cases()), ids=lambda case: ascii(case.name))
def test_slow_input(case, known, tmp_path, capfd):
    assert hostile.attempt(case, tmp_path / "case", known) == ""
    assert "panicked" not in capfd.readouterr().err
