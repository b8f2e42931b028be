"""Steps and setbacks add up to a run's ranges; an error's text becomes a line without paths."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import finished, make_run, resized, retried

from autobatch.events import StepFinished
from autobatch.events.run_history import Setback
from autobatch.ledger import run_summary
from autobatch.ledger.run_summary import Tally, shorten_reason


def add_step(tally, event):
    """As the recorder does: without an event."""
    tally.add_step(event.step, event.micro_batch_sizes, event.retries, event.peak_bytes, event.seconds)


def take(tally, *events):
    """Count all of these."""
    for event in events:
        add_step(tally, event) if isinstance(event, StepFinished) else tally.add_setback(event)


def ranges_of(*events):
    """First and last step of each range that these make, with its largest micro-batch and its retries."""
    tally = Tally(8)
    take(tally, *events)
    parts = tally.unwritten(make_run(), 0.0, "running", "").ranges
    return [(part.first_step, part.last_step, part.micro_batch_size, part.retries) for part in parts]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], []),
        ([finished(0), finished(1), finished(2)], [(0, 2, 8, 0)]),
        ([finished(0, (8, 3)), finished(1, (7, 7)), finished(2, (2,))], [(0, 2, 8, 0)]),
        (
            [finished(0), retried(1), finished(1, (4, 4), 1), finished(2, (4,))],
            [(0, 0, 8, 0), (1, 1, 4, 1), (2, 2, 4, 0)],
        ),
        ([finished(0, retries=1), finished(1, retries=2)], [(0, 1, 8, 3)]),
        ([finished(0), resized(1, 8, 4), finished(1, (4,)), finished(2, (4,))], [(0, 0, 8, 0), (1, 2, 4, 0)]),
        ([finished(0), finished(5), finished(2)], [(0, 0, 8, 0), (5, 5, 8, 0), (2, 2, 8, 0)]),
        ([finished(0, ())], [(0, 0, 0, 0)]),
    ],
)
def test_a_range_ends_where_steps_go_otherwise(events, expected):
    """At another pace, at retries and at a gap; not at batches that are smaller than others."""
    assert ranges_of(*events) == expected


def test_a_range_has_the_sums_of_its_steps_and_their_highest_peak():
    """Wherever in it that was."""
    for peaks in ([300, 100, 200], [100, 300, 200], [100, 200, 300]):
        tally = Tally(8)
        take(tally, *(finished(step, (8, 8, 7), 0, peak, 0.25) for step, peak in enumerate(peaks)))
        [part] = tally.unwritten(make_run(), 0.0, "running", "").ranges
        assert (part.first_step, part.last_step, part.micro_batch_size) == (0, 2, 8)
        assert (part.peak_bytes, part.seconds, part.samples) == (300, 0.75, 69)


def test_setbacks_say_what_happened():
    """Sizes, bytes and reason of either kind, without the user's paths."""
    tally = Tally(8)
    take(tally, retried(3, 8, 4, "no memory for /home/bob/a"), resized(9, 4, 8))
    assert tally.unwritten(make_run(), 0.0, "running", "").setbacks == (
        Setback(step=3, kind="retry", old_size=8, new_size=4, used_bytes=300, reason="no memory for <path>"),
        Setback(step=9, kind="size", old_size=4, new_size=8, reason="grown back"),
    )


@given(cuts=st.sets(st.integers(0, 30)), changes=st.sets(st.integers(0, 30)))
def test_what_was_written_is_replaced_or_left_never_lost(cuts, changes):
    """Written at any moments, the pieces laid over each other by position are what one update in the end would be."""
    events = [part for step in range(30) for part in ([resized(step)] if step in changes else []) + [finished(step)]]
    whole, piecewise = Tally(8), Tally(8)
    take(whole, *events)
    ranges, setbacks = {}, {}
    for number, event in enumerate([*events, None]):
        if number in cuts or event is None:
            update = piecewise.unwritten(make_run(), 0.0, "running", "")
            ranges.update(enumerate(update.ranges, update.first_range))
            setbacks.update(enumerate(update.setbacks, update.first_setback))
            piecewise.drop_written()
        if event is not None:
            take(piecewise, event)
    expected = whole.unwritten(make_run(), 0.0, "running", "")
    assert tuple(ranges[position] for position in sorted(ranges)) == expected.ranges
    assert tuple(setbacks[position] for position in sorted(setbacks)) == expected.setbacks


@pytest.mark.parametrize("written", [True, False])
def test_endless_trouble_is_bounded(monkeypatch, written):
    """Beyond the most rows steps add up in the last range, whether or not the ledger could be written."""
    monkeypatch.setattr(run_summary, "_MOST_ROWS", 10)
    tally, rows = Tally(8), 0
    for step in range(100):
        take(tally, retried(step), finished(step, retries=step % 2))
        update = tally.unwritten(make_run(), 0.0, "running", "")
        rows = max(rows, update.first_range + len(update.ranges), update.first_setback + len(update.setbacks))
        if written:
            tally.drop_written()
    assert rows == 10
    assert update.ranges[-1].last_step == 99
    assert update.ranges[-1].retries == 46  # 4 of the 50 are in ranges of their own


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("\n  \n", ""),
        ("CUDA out of memory.\nTried to allocate 2.00 GiB", "CUDA out of memory."),
        ("\n  first\nsecond", "first"),
        ("No such file: '/home/bob/my data.csv' here", "No such file: <path> here"),
        ('cannot open "C:\\Users\\bob\\a.pt"', "cannot open <path>"),
        ("cannot open /home/bob/a.pt: denied", "cannot open <path>: denied"),
        ("cannot open C:\\Users\\bob\\a.pt", "cannot open <path>"),
        ("cannot open ~/a.pt, ~bob/b, ./c/d and ../e", "cannot open <path>, <path>, <path> and <path>"),
        ("(/scratch/x) file:///scratch/x \\\\box\\share\\x", "(<path>) <path> <path>"),
        ("cannot open data/private/patients and data/a.csv", "cannot open <path> and <path>"),
        ("512 samples/s and/or 3 GiB/s at 4 / 5", "512 samples/s and/or 3 GiB/s at 4 / 5"),
        ("lone \udc80 surrogate", "lone ? surrogate"),
    ],
)
def test_a_reason_is_the_first_line_without_paths(text, line):
    """One line, in which no file of the user's is named, and which can be written."""
    assert shorten_reason(text) == line


@given(st.text(st.characters()))
def test_any_text_becomes_a_line_that_can_be_stored(text):
    """At most 300 characters that are UTF-8, whatever was raised."""
    line = shorten_reason(text)
    assert len(line) <= 300
    assert len(line.splitlines()) <= 1
    line.encode()


def test_a_long_line_is_cut_visibly():
    """Three dots say that there was more."""
    assert shorten_reason("x" * 301) == "x" * 297 + "..."
    assert shorten_reason("x" * 300) == "x" * 300


def test_an_endless_line_takes_no_time():
    """What is hardest to search is searched in a moment."""
    began = time.perf_counter()
    for text in ("'" + "/" * 10**6, "a." * 10**6, "'/" * 10**6):
        assert len(shorten_reason(text)) <= 300
    assert time.perf_counter() - began < 20  # where each position begins a new search it takes hours
