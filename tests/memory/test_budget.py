"""Budget and headroom in bytes, samples and choices: what arguments of ``fit`` mean, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch._arguments import check_target, parse_bytes
from autobatch.memory.devices import DEFAULT_HEADROOM, find_allowance, parse_headroom
from autobatch.testing import FakeDevice

GIB, MIB = 2**30, 2**20


def make_device(available, *, measures=True):
    return FakeDevice(lambda n: n, available, measures=measures)


@pytest.mark.parametrize(
    ("value", "byte_count"),
    [
        ("8GiB", 8 * GIB),
        (" 8 gib ", 8 * GIB),
        ("0.5GiB", GIB // 2),
        (".5GiB", GIB // 2),
        ("512MiB", 512 * MIB),
        ("512MB", 512 * 10**6),
        ("8G", 8 * 10**9),
        ("1000", 1000),
        (2**30, GIB),
        (1, 1),
        (np.int64(7), 7),
        (1.5e9, 1_500_000_000),
    ],
)
def test_sizes_are_read(value, byte_count):
    """Ints are bytes; texts have binary units with an i and decimal ones without."""
    assert parse_bytes("budget", value) == byte_count


@pytest.mark.parametrize(
    ("value", "byte_count"),
    [
        (None, int(GIB * DEFAULT_HEADROOM)),
        (0, 0),
        (0.0, 0),
        (0.5, GIB // 2),
        (np.float64(0.25), GIB // 4),
        (np.float32(0.25), GIB // 4),
        (np.float16(0.25), GIB // 4),
        (Fraction(1, 4), GIB // 4),
        (np.int64(5), 5),
        (np.int64(0), 0),
        (1, 1),
        ("512MiB", 512 * MIB),
        (GIB - 1, GIB - 1),
    ],
)
def test_headroom_is_bytes_or_a_fraction(value, byte_count):
    """An int is bytes, a float a fraction of the budget, a text a size."""
    assert parse_headroom(value, GIB) == byte_count


@given(budget=st.integers(1, 2**50), fraction=st.floats(0, 1, exclude_max=True))
def test_a_fraction_leaves_something(budget, fraction):
    """Whatever the fraction and the budget, a byte at least remains."""
    assert 0 <= parse_headroom(fraction, budget) < budget


def test_without_a_budget_all_that_is_available_is_it():
    """Less the default headroom."""
    allowance = find_allowance(make_device(GIB), None, None)
    assert (allowance.budget_bytes, allowance.headroom_bytes) == (GIB, int(GIB * 0.05))
    assert allowance.limit_bytes == GIB - int(GIB * 0.05)
    assert allowance.warnings == ()


@pytest.mark.parametrize(("asked", "budget", "is_warned"), [("1GiB", GIB, False), (2 * GIB, GIB, True), (5, 5, False)])
def test_a_budget_is_never_more_than_what_is_available(asked, budget, is_warned):
    """More is cut to what there is, and said; the headroom is a fraction of what remains."""
    allowance = find_allowance(make_device(GIB), asked, 0.5)
    assert (allowance.budget_bytes, allowance.headroom_bytes) == (budget, budget // 2)
    assert bool(allowance.warnings) == is_warned
    if is_warned:
        [warning] = allowance.warnings
        assert warning == f"budget={asked!r} is more than is available now: 1.0 GiB are the budget"


@pytest.mark.parametrize("headroom", [None, 0, 0.5, "1GiB"])
def test_on_a_device_that_tells_nothing_nothing_is_known(headroom):
    """No budget, no headroom of it, and no limit below zero."""
    allowance = find_allowance(make_device(GIB, measures=False), None, headroom)
    assert (allowance.budget_bytes, allowance.headroom_bytes, allowance.limit_bytes) == (0, 0, 0)


@pytest.mark.parametrize("value", [1, 256, 10**8])
def test_a_count_is_a_positive_int(value):
    """Any of them comes back unchanged."""
    assert check_target(value) == value
