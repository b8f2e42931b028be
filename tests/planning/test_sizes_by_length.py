"""Samples of mixed lengths: which lengths are tried, how many samples at each, and the division of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.errors import InvalidArgument
from autobatch.planning.sizes_by_length import (
    divide_by_length,
    edge_above,
    halve_lengths,
    scale_of,
)
from autobatch.records import SizeAtLength

pytestmark = pytest.mark.quick


@st.composite
def plans(draw):
    """Edges as a plan has them: lengths go up, sizes go down."""
    count = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 2000), min_size=count, max_size=count, unique=True))
    sizes = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count, unique=True))
    pairs = zip(sorted(lengths), sorted(sizes, reverse=True), strict=True)
    return tuple(SizeAtLength(length=length, micro_batch_size=size) for length, size in pairs)


@st.composite
def divisions(draw):
    """Edges, lengths of samples in order, and a scale."""
    sizes = draw(plans())
    values = draw(st.lists(st.integers(0, sizes[-1].length), min_size=1, max_size=80))
    return sizes, sorted(values, reverse=True), draw(st.integers(1, sizes[0].micro_batch_size))


def limit_at(length, sizes, scale):
    """What a micro-batch whose longest sample is so long may have, by the definition."""
    edge = next(size for size in sizes if size.length >= length)
    return max(edge.micro_batch_size * scale // sizes[0].micro_batch_size, 1)


@given(divisions())
def test_each_sample_runs_once_and_no_more_together_than_were_tried(case):
    """The parts add up, and each has at most what ran at the edge above its longest sample."""
    sizes, values, scale = case
    parts = divide_by_length(values, sizes, scale)
    assert sum(parts) == len(values)
    start = 0
    for part in parts:
        assert 1 <= part <= limit_at(values[start], sizes, scale)
        assert part <= edge_above(sizes, values[start]).micro_batch_size
        start += part


@given(divisions())
def test_no_division_into_fewer_parts_is_within_the_limits(case):
    """Greedy from the longest is the fewest, as shorter samples never have a lower limit; checked part by part."""
    sizes, values, scale = case
    fewest = [0] + [10**9] * len(values)
    for stop in range(1, len(values) + 1):
        for start in range(stop):
            if stop - start <= limit_at(values[start], sizes, scale):
                fewest[stop] = min(fewest[stop], fewest[start] + 1)
    assert len(divide_by_length(values, sizes, scale)) == fewest[-1]


@given(divisions(), st.data())
def test_a_smaller_scale_cuts_what_failed_smaller(case, data):
    """Below the scale of a part with more than one sample, the samples that begin there are cut into smaller ones."""
    sizes, values, scale = case
    parts = divide_by_length(values, sizes, scale)
    index = data.draw(st.integers(0, len(parts) - 1))
    start = sum(parts[:index])
    failed = scale_of(parts[index], values[start], sizes)
    assert failed <= scale
    if parts[index] > 1:
        assert failed > 1
        assert limit_at(values[start], sizes, failed - 1) < parts[index]


def test_a_part_too_small_to_run_joins_the_one_before():
    """A model that needs two samples gets no single one."""
    sizes = (SizeAtLength(length=8, micro_batch_size=4), SizeAtLength(length=16, micro_batch_size=2))
    assert divide_by_length([16, 16, 16], sizes, 4) == (2, 1)
    assert divide_by_length([16, 16, 16], sizes, 4, smallest=2) == (3,)


def test_a_longer_sample_than_any_that_was_tried_is_refused():
    """There is no edge above it."""
    with pytest.raises(InvalidArgument, match="a length of 17 is beyond the longest that was tried, 16"):
        edge_above((SizeAtLength(length=16, micro_batch_size=2),), 17)


@pytest.mark.parametrize(
    ("longest", "size", "bound", "expected"),
    [
        (1024, 64, 64, (1024,)),
        (1024, 16, 64, (1024, 512, 256)),
        (1024, 1, 64, (1024, 512, 256, 128, 64, 32, 16)),
        (100, 20, 64, (100, 50, 25)),
        (3, 1, 64, (3, 2, 1)),
        (1, 1, 64, (1,)),
        (1 << 20, 1, 10**6, tuple((1 << 20) >> times for times in range(7))),
    ],
)
def test_lengths_are_halved_until_the_whole_fits(longest, size, bound, expected):
    """Half as long, at least twice as many fit."""
    assert halve_lengths(longest, size, bound) == expected
