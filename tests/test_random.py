"""Shared randomness: the generator is Philox4x32-10, and an element's bits depend on its coordinates alone."""

import dataclasses
import math
import pickle
import subprocess
import sys

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import examples

from dither import Stream, UserError
from dither.ops.reference.philox import philox4x32

# Fixed examples: the suite says the same thing every time.
quick = settings(max_examples=examples(100), deadline=None, derandomize=True, database=None)


def unsigned(words: torch.Tensor) -> np.ndarray:
    """int32 tensors hold raw bits: read them as unsigned."""
    return words.numpy().view(np.uint32)


# Known answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # Random123, kat_vectors: philox4x32 10
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
@pytest.mark.parametrize("signed", [False, True])
def test_random123_known_answers(counter, key, answer, signed):
    words = tuple(torch.tensor(int(word, 16)) for word in counter.split())
    low, high = (int(word, 16) for word in key.split())
    number = low | high << 32
    number -= (number >> 63 << 64) if signed else 0  # a stream's key is a signed 64-bit integer with the same bits
    assert [f"{int(word):08x}" for word in philox4x32(words, number)] == answer.split()


def test_the_first_thing_a_process_does_may_be_to_draw():
    draw = "import dither; print(dither.Stream(1, 'round', 'w').bits(3, (2,)).tolist())"
    words = subprocess.run([sys.executable, "-c", draw], capture_output=True, text=True, check=True).stdout
    assert words == f"{Stream(1, 'round', 'w').bits(3, (2,)).tolist()}\n"


def test_a_million_words_are_those_of_randomgen():
    # One row of a stream at a step is the words of the blocks with counters (0, row, step, 0), (1, row, step, 0), ...
    stream, step, rows, columns = Stream(2024, "round", "model.embed.weight"), 123456, 10, 100_000
    first_row = 987
    words = unsigned(stream.bits(step, (rows, columns), offset=(first_row, 0)))
    wrong = 0
    for i in range(rows):
        expected = oracles.philox_words(stream.key, (0, first_row + i, step, 0), columns)
        wrong += int((words[i] != expected).sum())
    assert words.size == 10**6
    assert wrong == 0


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize(("row", "step"), [(0, 0), (5, 1), (2**32 - 1, 2**32 - 1), (2**31, 2**31 + 7)])
def test_an_element_takes_its_bits_of_the_rows_string(width, row, step):
    stream = Stream(1, "sample", "w")
    drawn = unsigned(stream.bits(step, (1, 301), offset=(row, 0), width=width))[0]
    assert (drawn == oracles.row_bits(stream.key, row, step, 301, width)).all()
    assert drawn.max() < 2**width


def test_columns_beyond_two_to_the_31():
    stream, column = Stream(1, "sample", "w"), 2**32 - 6
    drawn = unsigned(stream.bits(3, (1, 6), offset=(9, column)))[0]
    expected = oracles.philox_words(stream.key, (column // 4, 9, 3, 0), 8)[column % 4 :]
    assert (drawn == expected[:6]).all()


# The same bits wherever they are drawn --------------------------------------------------------------------------------


@quick
@given(st.sampled_from([8, 16, 32]), st.integers(0, 12), st.integers(0, 12), st.integers(0, 70), st.integers(0, 70))
def test_a_shard_cut_anywhere_draws_the_bits_of_the_whole(width, top, height, left, breadth):
    stream = Stream(3, "round", "w")
    whole = stream.bits(11, (24, 140), offset=(100, 33), width=width)
    shard = stream.bits(11, (height, breadth), offset=(100 + top, 33 + left), width=width)
    assert torch.equal(shard, whole[top : top + height, left : left + breadth])


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (3, 0), (0, 3), (2, 3, 5), (2, 1, 3, 4)])
def test_any_shape_is_viewed_as_leading_dimensions_times_the_last(shape):
    stream = Stream(5, "round", "w")
    columns = shape[-1] if shape else 1
    bits = stream.bits(1, shape, offset=(2, 3), width=16)
    assert bits.shape == torch.Size(shape)
    assert bits.dtype == torch.int32
    assert torch.equal(bits.reshape(-1), stream.bits(1, (math.prod(shape[:-1]), columns), offset=(2, 3), width=16).reshape(-1))


@pytest.mark.parametrize("step", [0, 5, 2**31, 2**32 - 1])
def test_a_step_as_a_tensor_is_the_same_step(step):
    stream = Stream(6, "round", "w")
    assert torch.equal(stream.bits(torch.tensor(step), (4, 9)), stream.bits(step, (4, 9)))


# Independent streams --------------------------------------------------------------------------------------------------


def test_every_part_of_a_stream_changes_its_key():
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1]
    texts = ["", "a", "b", "ab", "layers.1", "layers.11", "é", "\n", "1 a"]
    keys = [Stream(seed, purpose, name).key for seed in seeds for purpose in texts for name in texts]
    assert len(set(keys)) == len(seeds) * len(texts) ** 2
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_keys_stay_what_they_are():
    # Checkpoints resume with these: a change of the hash is a change of every stochastic run.
    assert Stream(0, "round", "w").key == -8483644445740546217
    assert Stream(2**64 - 1, "sample", "model.layers.0.mlp.up_proj.weight").key == 7621849693911841776


@pytest.mark.parametrize("change", [{"seed": 1}, {"purpose": "sample"}, {"name": "v"}, {"step": 1}, {"row": 1}, {"column": 4}])
def test_another_seed_purpose_name_step_or_place_draws_other_bits(change):
    def draw(seed=0, purpose="round", name="w", step=0, row=0, column=0):
        return unsigned(Stream(seed, purpose, name).bits(step, (64, 256), offset=(row, column)))

    differing = int(np.bitwise_count(draw() ^ draw(**change)).sum())
    # Independent bits differ half the time: 524,288 bits, standard deviation 362; six of them is one chance in 10^9.
    bits = 64 * 256 * 32
    assert abs(differing - bits / 2) < 6 * math.sqrt(bits) / 2


def test_a_stream_is_frozen_comparable_and_picklable():
    stream = Stream(1, "round", "w")
    with pytest.raises(dataclasses.FrozenInstanceError):
        stream.seed = 2
    assert stream == Stream(1, "round", "w") != Stream(2, "round", "w")
    assert pickle.loads(pickle.dumps(stream)).key == stream.key
    assert dataclasses.replace(stream, name="v").key == Stream(1, "round", "v").key


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "given", "said"),
    [
        *(((seed, "round", "w"), {}, r"from 0 to 2\^64 - 1") for seed in (-1, 2**64, 1.0, None, True)),
        *(((0, purpose, name), {}, "is a string, not") for purpose, name in ((None, "w"), ("round", b"w"))),
        *(((0, "round", "w"), {"width": width}, "8, 16 or 32 bits, not") for width in (0, 12, 64, "8", None)),
        *(
            ((0, "round", "w"), {"step": step}, "A step is an integer")
            for step in (-1, 2**32, 0.5, True, torch.tensor(1.0), torch.tensor([1]), torch.tensor(1, dtype=torch.int32))
        ),
        *(((0, "round", "w"), {"offset": offset}, "2 x 3 elements at offset") for offset in ((-1, 0), (0, 2**32 - 2))),
    ],
)
def test_bad_input_is_an_error(stream, given, said):
    with pytest.raises(UserError, match=said):
        Stream(*stream).bits(**{"step": 0, "shape": (2, 3), **given})
    assert Stream(0, "round", "w").bits(0, (2, 3), offset=(2**32 - 2, 2**32 - 3)).shape == (2, 3)  # the last row and column
