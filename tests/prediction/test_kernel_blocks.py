"""The buffers of CUDA's sums, by the numbers that torch's own code took on a card."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.prediction.cards import find_gpu
from autobatch.prediction.workspaces import buffer_bytes

pytestmark = pytest.mark.quick

MIB = 2**20
A100 = find_gpu("A100-40GB").resident_threads


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1024, 2048, 16 * MIB),
        (8192, 2048, 113_246_208),
        (100, 2048, 0),
        (1024, 10**6, 0),
        (1, 4, 0),
    ],
    ids=["a layer's bias", "as much as the card can share", "too few to share", "more results than blocks", "nothing"],
)
def test_a_bias_gradient_takes_what_the_card_took(rows, columns, expected):
    """The sum over the rows of a matrix of float32, on an A100."""
    assert buffer_bytes(rows, 4 * columns, A100) == expected


@given(st.integers(0, 10**7), st.integers(0, 10**6), st.sampled_from([0, 40_960, A100, 303_104]))
def test_a_buffer_is_made_of_whole_results(addends, results, threads):
    """Some parts of all results, in a row for each thread of a block, or none."""
    taken = buffer_bytes(addends, 4 * results, threads)
    assert taken % max(4 * results, 1) == 0
    assert taken >= 0


def test_without_a_card_sums_take_nothing():
    """As an estimate without one has it."""
    assert buffer_bytes(8192, 4 * 2048, 0) == 0
