"""Dividing a target: everything is done once, in the fewest and most equal parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.planning.division import balance, divide_evenly, spread, useful_sizes

pytestmark = pytest.mark.quick

totals = st.integers(1, 20_000)
largests = st.integers(1, 20_000)


@pytest.mark.parametrize(
    ("total", "largest", "parts"),
    [
        (256, 100, (86, 85, 85)),
        (256, 256, (256,)),
        (256, 1000, (256,)),
        (256, 43, (43, 43, 43, 43, 42, 42)),
        (5, 2, (2, 2, 1)),
        (3, 1, (1, 1, 1)),
        (1, 1, (1,)),
        (0, 7, ()),
    ],
)
def test_balance_by_example(total, largest, parts):
    """Known divisions come out as written."""
    assert balance(total, largest) == parts


@given(totals, largests)
def test_balance_is_complete_fewest_and_level(total, largest):
    """The parts sum to the total, stay within the largest, are as few as possible and differ by at most one."""
    parts = balance(total, largest)
    assert sum(parts) == total
    assert max(parts) <= largest
    assert (len(parts) - 1) * largest < total
    assert max(parts) - min(parts) <= 1
    assert list(parts) == sorted(parts, reverse=True)


@given(totals, largests)
def test_balance_has_the_smallest_possible_maximum(total, largest):
    """No division into as many parts has a smaller largest part."""
    parts = balance(total, largest)
    assert len(parts) * (max(parts) - 1) < total


@given(st.integers(1, 20_000), st.integers(1, 500))
def test_any_number_of_steps_is_a_division(total, parts):
    """Asked for the least size of so many steps, a division has at most these, level, larger first."""
    level = balance(total, -(-total // parts))
    assert len(level) <= parts
    assert sum(level) == total
    assert level[0] - level[-1] <= 1
    assert list(level) == sorted(level, reverse=True)


@given(st.integers(0, 20_000), st.integers(1, 500))
def test_spread_has_exactly_so_many_level_parts(total, parts):
    """Unlike ``balance``, which takes fewer where that gives no larger part: ``spread(5, 4)`` has four."""
    level = spread(total, parts)
    assert len(level) == parts
    assert sum(level) == total
    assert level[0] - level[-1] <= 1
    assert list(level) == sorted(level, reverse=True)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_divide_evenly_is_the_largest_divisor(total, largest):
    """Size times steps is the total exactly, and no larger divisor is allowed."""
    size, steps = divide_evenly(total, largest)
    assert size * steps == total
    assert size == max(part for part in range(1, min(total, largest) + 1) if total % part == 0)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_useful_sizes_are_what_balance_makes(total, bound):
    """The useful sizes are exactly the largest parts of balanced divisions, ascending from 1."""
    sizes = useful_sizes(total, bound)
    assert list(sizes) == sorted({max(balance(total, largest)) for largest in range(1, bound + 1)})
    assert sizes[0] == 1


@given(totals)
def test_useful_sizes_are_few(total):
    """There are at most twice the root of the total, the total itself is one, and 2 is where it fits."""
    sizes = useful_sizes(total, total)
    assert len(sizes) ** 2 <= 4 * total
    assert sizes[-1] == total
    assert total == 1 or 2 in sizes
