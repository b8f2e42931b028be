"""How bytes and counts read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch._formatting import format_bytes, plural

pytestmark = pytest.mark.quick

UNITS = {"byte": 1, "bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
# The upper end is 16 PiB: more than any one device holds.
BYTES = st.integers(min_value=-(2**54), max_value=2**54)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**2, "1.0 MiB"),
        (1024**3 - 1, "1.0 GiB"),
        (1024**3, "1.0 GiB"),
        (8 * 1024**3, "8.0 GiB"),
        (2048 * 1024**3, "2048.0 GiB"),
    ],
)
def test_bytes_as_a_person_reads_them(count: int, text: str) -> None:
    """Powers of 1024, one decimal from KiB on, never ``1024.0`` of a unit that has a larger one."""
    assert format_bytes(count) == text


def _read_back(text: str) -> tuple[float, int]:
    """The value in bytes and the bytes in one unit."""
    number, unit = text.split(" ")
    return float(number) * UNITS[unit], UNITS[unit]


@given(BYTES)
def test_the_text_is_true_to_one_decimal(count: int) -> None:
    """What is read back differs by at most half of the last decimal shown (and floats' own rounding)."""
    value, unit = _read_back(format_bytes(count))
    assert abs(value - count) <= 0.0501 * unit if unit > 1 else value == count


@given(BYTES)
def test_the_number_stays_short(count: int) -> None:
    """Below the largest unit no number reaches 1024."""
    number, unit = format_bytes(count).split(" ")
    assert unit == "GiB" or abs(float(number)) < 1024


@given(BYTES, BYTES)
def test_more_bytes_never_read_as_fewer(one: int, other: int) -> None:
    """Ordering survives the rounding."""
    low, high = sorted((one, other))
    assert _read_back(format_bytes(low))[0] <= _read_back(format_bytes(high))[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, "trial"), "0 trials"),
        ((1, "trial"), "1 trial"),
        ((2, "trial"), "2 trials"),
        ((1, "micro-batch", "micro-batches"), "1 micro-batch"),
        ((6, "micro-batch", "micro-batches"), "6 micro-batches"),
        ((0, "retry", "retries"), "0 retries"),
    ],
)
def test_one_is_singular_and_nothing_else_is(arguments: tuple[int, str], text: str) -> None:
    """The plural is the singular with an s, unless it is given."""
    assert plural(*arguments) == text
