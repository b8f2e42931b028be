"""The size after an OOM: always smaller, never none, and what the curve says where it can be believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.errors import InvalidArgument
from autobatch.planning.curve import MemoryCurve
from autobatch.planning.retry_size import shrink

pytestmark = pytest.mark.quick

LINE = MemoryCurve(allocated=((0, 100), (10, 200)), reserved=((0, 100), (10, 200)), reserved_floor=105)
FLAT = MemoryCurve(allocated=((0, 100), (10, 100)), reserved=((0, 100), (10, 100)))


@pytest.mark.parametrize(
    ("failed", "curve", "limit_bytes", "size"),
    [
        (64, LINE, 500, 40),  # the curve says 40 fit
        (64, LINE, 730, 63),
        (64, LINE, 740, 48),  # it says that 64 fit, and they did not
        (64, FLAT, 100, 48),
        (64, LINE, 0, 1),  # nothing fits: one sample is the last attempt
        (64, LINE, 104, 1),
        (64, None, 500, 32),
        (64, LINE, None, 32),
        (2, LINE, 10_000, 1),
        (3, LINE, 10_000, 2),
        (3, None, None, 1),
        (2, None, None, 1),
    ],
)
def test_the_next_size_by_example(failed, curve, limit_bytes, size):
    """The curve's size, three quarters where the curve is wrong, half where there is no curve."""
    assert shrink(failed, curve, limit_bytes) == size


@st.composite
def curves(draw: st.DrawFn) -> MemoryCurve:
    """Two pieces, the second no flatter than the first."""
    base, rise, more = (draw(st.integers(0, 10**9)) for _ in range(3))
    knots = ((0, base), (7, base + rise), (14, base + 2 * rise + more))
    return MemoryCurve(allocated=knots, reserved=knots, reserved_floor=draw(st.integers(0, 10**9)))


@given(st.integers(2, 10**6), st.none() | curves(), st.none() | st.integers(-(10**9), 10**12))
def test_it_always_shrinks_and_never_to_nothing(failed, curve, limit_bytes):
    """Whatever the curve and the limit, the next size is at least 1 and less than the one that failed."""
    assert 1 <= shrink(failed, curve, limit_bytes) < failed


@given(st.integers(2, 10**6), st.none() | curves(), st.none() | st.integers(0, 10**12))
def test_repeated_shrinking_reaches_one_sample(failed, curve, limit_bytes):
    """Failing again and again ends at one sample within a few dozen attempts."""
    attempts = 0
    while failed > 1:
        failed = shrink(failed, curve, limit_bytes)
        attempts += 1
    assert attempts <= 60


@pytest.mark.parametrize("failed", [1, 0, -3])
def test_one_sample_cannot_be_split(failed):
    """A single sample that fails is the caller's to report, and is refused here."""
    with pytest.raises(InvalidArgument, match=f"a micro-batch of {failed} "):
        shrink(failed, None, None)
