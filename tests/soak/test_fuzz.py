"""The fuzzer itself: it finds nothing in a few thousand inputs, and it does find what is there."""

import random

import fuzz

from dither import UserError


def test_a_few_thousand_inputs():
    rows = fuzz.fuzz(executions=6000, seed=1, light=True)
    assert [row.faults for row in rows if not row.passed] == []
    assert len(rows) >= 17


def test_it_finds_what_only_a_path_of_branches_leads_to(monkeypatch):
    def read(data: bytes) -> None:
        if data[:1] != b"d":
            raise UserError("no")
        if data[1:2] != b"i":
            raise UserError("no")
        if data[2:3] == b"t":
            raise KeyError("found")

    monkeypatch.setattr(fuzz, "TRACED", (__file__,))
    reader = fuzz.Reader(read, [b"xxxx"], 1.0, words=[b"d", b"i", b"t"])
    row = fuzz._one("this", reader, 20_000, 1e18, random.Random(0))
    assert not row.passed
    assert "KeyError: 'found'" in row.faults[0]


def test_it_sees_slow_input_and_messages_of_two_lines(monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", -1.0)
    assert "took" in fuzz.attempt(fuzz.Reader(lambda data: sum(range(9999)), [], 1.0), b"", None)[1]
    monkeypatch.undo()

    def two(data: bytes) -> None:
        raise UserError("one\ntwo")

    assert "two lines" in fuzz.attempt(fuzz.Reader(two, [], 1.0), b"", None)[1]
