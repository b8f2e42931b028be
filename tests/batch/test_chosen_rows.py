"""Which rows of a batch stand for all of it: every number of rows and of samples up to a few dozen is tried."""

from __future__ import annotations

from autobatch.planning.division import choose_rows

_NUMBERS = [(n, count) for count in range(1, 72) for n in range(1, 36)]


def test_rows_are_in_order_and_each_is_taken_equally_often() -> None:
    """As many as were asked for, all of them in the batch."""
    for n, count in _NUMBERS:
        rows = choose_rows(n, count)
        repeats = [rows.count(row) for row in {*rows}]
        assert len(rows) == n, (n, count)
        assert rows == sorted(rows), (n, count)
        assert {*rows} <= {*range(count)}, (n, count)
        assert max(repeats) - min(repeats) <= (n > count), (n, count)


def test_rows_that_belong_together_are_chosen_together() -> None:
    """Rows 2i and 2i + 1, the first two of them always, and a row half a batch further on."""
    for n, count in _NUMBERS:
        if not 4 <= n < count:
            continue
        rows = choose_rows(n, count)
        assert rows[:2] == [0, 1], (n, count)
        pairs = [*zip(rows[::2], rows[1::2], strict=False)]
        assert all(first % 2 == 0 and second == first + 1 for first, second in pairs), (n, count)
        if n != 5:  # of five the fifth is the only one of its pair
            assert count // 2 in rows, (n, count)


def test_rows_come_from_every_quarter_of_the_batch() -> None:
    """Give or take two rows; with an odd number of pairs, one quarter may have none."""
    for n, count in _NUMBERS:
        if n < 8 or n > count or n % 4 in (1, 2):
            continue
        rows = choose_rows(n, count)
        for quarter in range(4):
            low, high = quarter * count // 4 - 2, (quarter + 1) * count // 4 + 2
            assert any(low <= row < high for row in rows), (n, count, quarter)
