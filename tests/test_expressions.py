"""Regular expressions in bounded time: they mean what `re` means, and no expression takes long."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dither import UserError
from dither.spec.expressions import LONGEST, parse
from dither.spec.patterns import matches
from dither.spec.sampling import PARTS

NAMES = (
    *("model.layers.0.self_attn.q_proj", "model.layers.12.mlp.down_proj", "lm_head", "h.3.attn.c_proj", "h.11.mlp.c_fc", ""),
    *("gpt_neox.layers.2.attention.dense", "transformer.h.0.mlp.dense_4h_to_h", "encoder.layer.1.output.dense", "A.b-c:d\n"),
)

ORDINARY = (
    *(pattern[3:] for pattern in PARTS.values() if pattern.startswith("re:")),
    *(
        "",
        "lm_head",
        r"layers\.[0-3]\..*",
        r".*layers\.(\d|1[0-5])\..*",
        r"(?!lm_head).*",
        r"(?i).*Q_PROJ",
        r".*(?<!down)_proj",
    ),
    *(r".*\.mlp\.(up|down|gate)_proj", r".*\bmlp\b.*", r"model\..*$", r"^.*?_proj$", r"\w+(\.\w+)*", r"[^.]*(\.[^.]+){3,5}"),
    *(r"(?P<a>h)\.\d{1,2}\..*", r".*[\]\[].*", r"[]a]+", r"[^]]*", r"\x68\..*", r"(?:(?i:LM)_head|x)", r"(a|b*)*", r"a{,2}.*"),
    *(r".*(?=proj)proj", r"(?s).*", r".*\n", r".*$", r"\Alm_head\Z", r"(?#all).*", r"x{}.*|.*", r".{3,}", r"(?:.{0})*h.*"),
)


@pytest.mark.parametrize("expression", ORDINARY)
def test_ordinary_expressions_mean_what_re_means(expression):
    for name in NAMES:
        assert parse(expression).matches(name) == (re.fullmatch(expression, name) is not None), name


ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\w", r"\.", r"\b", "^", "$", r"\B", "[a-]"]
GROUPS = ["(", "(?:", "(?=", "(?!", "(?i:"]
COUNTS = ["", "", "*", "+", "?", "*?", "{2}", "{1,2}", "{,2}", "{2,}"]


def combined(inner):
    group = st.tuples(st.sampled_from(GROUPS), inner).map(lambda pair: f"{pair[0]}{pair[1]})")
    repeated = st.tuples(st.one_of(group, st.sampled_from(ATOMS)), st.sampled_from(COUNTS)).map("".join)
    return st.one_of(st.lists(repeated, max_size=3).map("".join), st.lists(inner, min_size=2, max_size=3).map("|".join))


@given(st.recursive(st.sampled_from(ATOMS), combined, max_leaves=6), st.text("abAB.\n", max_size=6))
def test_random_expressions_mean_what_re_means(expression, text):
    try:
        expected = re.fullmatch(expression, text) is not None
    except re.error:  # such as a repeated anchor in some versions of Python
        with pytest.raises(UserError, match="is not a regular expression"):
            parse(expression)
        return
    assert parse(expression).matches(text) == expected


@pytest.mark.parametrize(
    "expression",
    [
        *("(a+)+$", "(a|a)*b", "(a*)*b", "(.*)*x", "a*" * 300 + "b", "(a?){300}a{300}", "((((((a*)*)*)*)*)*)*b", "(.*a){20}"),
        *(
            "(?=(a+)+b)|" * 9 + "c",
            "(?:(?:a{1,9}){1,9}){1,9}b",
            "(?!(a*)*b)" * 40 + "c",
            "(a+b?)+" * 100 + "c",
            "a{0,99999}" * 90,
        ),
    ],
)
def test_no_expression_takes_long(expression):
    parse.cache_clear()
    began = time.process_time()
    for _ in range(2):
        parse(expression).matches("a" * 60)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("(", "is not a regular expression"),
        (r"(a)\1", "patterns do not support"),
        ("(?P<x>a)(?P=x)", "patterns do not support"),
        ("(?>a*)a", "patterns do not support"),
        ("a*+", "patterns do not support"),
        ("(a)(?(1)b|c)", "patterns do not support"),
        ("(?x) a", "patterns do not support"),
        ("a" * (LONGEST + 1), "are the most"),
        ("(" * 60 + ")" * 60, "inside each other"),
        ("a{99999999999999999999}", "is not a regular expression"),
    ],
)
def test_what_is_refused(expression, said):
    with pytest.raises(UserError, match=said):
        parse(expression)


def test_a_pattern_is_a_name_a_glob_or_an_expression():
    assert matches("a.b", "a.b")
    assert not matches("a.b", "a.bc")
    assert matches("a.[[]0]", "a.[0]")
    assert not matches("A*", "abc")
    with pytest.raises(UserError, match="are the most"):
        matches("*" + "a" * 1000, "a")
