"""The modes of benchmarks/train.py: every mode that its docstring lists is parsed, and a wrong one is a sentence."""

import ast
import itertools
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def modes(monkeypatch):
    """The module, which is beside the script."""
    monkeypatch.syspath_prepend(FOLDER)
    import train_modes

    return train_modes


def listed():
    """The modes of the docstring, with examples for its capital words."""
    about = ast.get_docstring(ast.parse((FOLDER / "train.py").read_text()), clean=False)
    words = [line.split()[0] for line in about.partition("Modes:\n")[2].splitlines() if re.match(r"    \S+  ", line)]
    examples = {
        "NAME": ["fp8-block"], "PARTS": ["all", "od", "down"], "SR": ["bf16-sr", "recipe:fp8-block+output+sr"],
        "RECIPE": ["recipe:mxfp8", "recipe:mxfp8+sr+dynamic8+release"], "MODE": ["o1", "diffq:up", "gaussws:all+recompute"],
    }  # fmt: skip
    for word in words:
        capitals = re.findall("[A-Z]+", word)
        for chosen in itertools.product(*(examples[capital] for capital in capitals)):
            found = word
            for capital, example in zip(capitals, chosen, strict=True):
                found = found.replace(capital, example)
            yield found


def test_every_mode_of_the_docstring_is_parsed(modes):
    texts = list(listed())
    assert len(texts) > 20
    found = [modes.parse_mode(text) for text in texts]
    assert len(set(found)) == len(set(texts))
    assert {mode.method for mode in found} == set(modes.FIELDS)


def test_parts_are_fields(modes):
    assert modes.parse_mode("recipe:fp8-block+output+sr+companded8+release+input+one+fsdp-codes") == modes.Mode(
        "recipe", "fp8-block", output=True, sr=True, states="companded8", release=True, save="input", hold="one",
        fsdp="fsdp-codes",
    )  # fmt: skip
    assert modes.parse_mode("gaussws:od+recompute+adam-mini") == modes.Mode(
        "gaussws", "od", recompute=True, optimizer="adam-mini"
    )
    narrow = {text: modes.parse_mode(text).narrow for text in ("o1", "bf16-nearest", "bf16-sr", "recipe:a", "recipe:a+sr")}
    assert [text for text, is_narrow in narrow.items() if is_narrow] == ["bf16-nearest", "bf16-sr", "recipe:a+sr"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("o2", "There is no mode 'o2'"),
        ("recipe:", "There is no mode 'recipe:'"),
        ("gaussws:some", "There is no mode 'gaussws:some'"),
        ("o1:x", "There is no mode 'o1:x'"),
        ("o1+sr", r"\+sr is unknown: o1 takes \+adamw, \+adam-mini, \+fsdp, \+fsdp-codes, in this order"),
        ("bf16-sr+", r"\+ is unknown"),
        ("bf16-sr+fsdp+fsdp", r"\+fsdp is given twice or contradicts"),
        ("recipe:a+input+one+none", r"\+none is given twice or contradicts"),
        ("recipe:a+input+sr", r"\+sr is too late"),
        ("recipe:a+release", r"8-bit states and \+release need \+sr"),
    ],
)
def test_a_wrong_mode_is_one_sentence(text, sentence, modes):
    with pytest.raises(ValueError, match=sentence) as raised:
        modes.parse_mode(text)
    assert str(raised.value).count(". ") == 0
    assert str(raised.value).endswith(".")
