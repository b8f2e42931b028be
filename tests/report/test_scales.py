"""Scales and ticks: monotone, invertible, round, neither too few nor too many."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.report.svg import Scale, byte_ticks, choose_scale, count_ticks

positive = st.floats(1, 2**63)  # the most bytes that a plan may name
scales = st.builds(
    lambda values, turned: choose_scale(values, *((246, 30) if turned else (78, 424))),
    st.lists(positive, min_size=1, max_size=6),
    st.booleans(),
)


@given(scale=scales, values=st.lists(positive, min_size=2, max_size=9))
def test_positions_follow_values(scale, values):
    """A larger value is never nearer to the low end, and none leaves the scale."""
    ways = [abs(scale.position(value) - scale.start) for value in sorted(values)]
    assert ways == sorted(ways)
    assert ways[-1] <= abs(scale.end - scale.start) + 1e-9


@given(scale=scales, part=st.floats(0, 1))
def test_a_position_tells_its_value(scale, part):
    """What lies at a position lies there."""
    position = scale.start + part * (scale.end - scale.start)
    assert scale.position(scale.value(position)) == pytest.approx(position, abs=1e-6)


@given(scale=scales, ticks=st.sampled_from([count_ticks, byte_ticks]))
def test_ticks_are_three_to_eight_inside_in_order(scale, ticks):
    """Whatever the range: sorted, within it, three to eight of them, each labelled differently."""
    found = ticks(scale)
    values = [tick.value for tick in found]
    assert 3 <= len(found) <= 8
    assert all(low < high for low, high in pairwise(values))
    assert scale.low <= values[0]
    assert values[-1] <= scale.high
    assert len({tick.label for tick in found}) == len(found)


@given(scale=scales)
def test_labels_of_bytes_are_round_and_say_the_value(scale):
    """A label is a multiple of 1, 2 or 5 in binary units, 0 without one, and exactly the tick's value."""
    for value, label in byte_ticks(scale):
        number, _, unit = label.partition(" ")
        units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}
        assert float(number) * units.get(unit, 0) == value
        assert re.fullmatch(r"\d+", number), label


@pytest.mark.parametrize(
    ("high", "labels"),
    [
        (22 * 2**30, ["0", "10 GiB", "20 GiB"]),
        (1.6 * 2**20, ["0", "500 KiB", "1000 KiB", "1500 KiB"]),
        (64 * 2**20, ["0", "20 MiB", "40 MiB", "60 MiB"]),
        (10_000, ["0", "2 KiB", "4 KiB", "6 KiB", "8 KiB"]),
        (3, ["0", "1 bytes", "2 bytes", "3 bytes"]),
    ],
)
def test_ticks_of_bytes(high, labels):
    """Known ranges have the labels that a person would choose."""
    assert [tick.label for tick in byte_ticks(Scale(0, high, 0, 100))] == labels


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(0.8, 130_000, ["1", "10", "100", "1000", "10000", "100000"]), (2, 500, ["3", "10", "30", "100", "300"])],
)
def test_ticks_of_a_log_scale(low, high, labels):
    """Powers of ten, and thrice them where those are few."""
    assert [tick.label for tick in count_ticks(Scale(low, high, 0, 100, is_log=True))] == labels


@given(st.lists(positive, min_size=1, max_size=6))
def test_all_values_are_on_the_scale_that_was_chosen_for_them(values):
    """No value is at an end by being cut off, and only values 200 times apart make a scale logarithmic."""
    scale = choose_scale(values, 0, 100)
    assert scale.low < min(values)
    assert max(values) < scale.high
    assert scale.is_log == (max(values) >= 200 * min(values))


def test_small_rates_have_ticks_between_whole_numbers():
    """A slow step's samples a second are less than one."""
    assert [tick.label for tick in count_ticks(Scale(0, 0.05, 0, 1))] == ["0", "0.02", "0.04"]
