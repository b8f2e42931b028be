"""Sizes of pieces: what they may never be, and how few it takes to get through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.planning.piece_size import FIRST_SAMPLES, Piece, PieceSizes

lengths = st.integers(1, 10**6)
growths = st.integers(0, 10**12)
pieces = st.builds(Piece, st.integers(1, 10**6), lengths, growths)
events = st.lists(st.tuples(pieces, st.sampled_from(["ran", "thrashed", "short"])), max_size=12)


def follow(story, **options) -> PieceSizes:
    sizes = PieceSizes(**options)
    for piece, outcome in story:
        if outcome == "short":
            sizes = sizes.after_shortage(piece.samples, piece.length) if piece.samples > 1 else sizes
        else:
            sizes = sizes.after_piece(piece, thrashed=outcome == "thrashed")
    return sizes


def run_through(samples, peak, limit, budget=None, lengths=None, **options):
    """Sizes that ran and those that did not fit, where a piece of n samples of length L takes ``peak(n, L)``."""
    sizes, ran, failed = PieceSizes(**options), [], []
    waiting = sorted(lengths or [1] * samples, reverse=True)
    while waiting:
        size = min(sizes.next_samples(waiting[0], limit, None if lengths else len(waiting)), len(waiting))
        took = peak(size, waiting[0])
        if took > (budget or limit):
            failed.append(size)
            assert size > 1, "one sample does not fit"
            sizes = sizes.after_shortage(size, waiting[0])
            continue
        ran.append(size)
        sizes = sizes.after_piece(Piece(size, waiting[0], took))
        waiting = waiting[size:]
    return ran, failed


@given(
    story=events,
    length=lengths,
    room=st.integers(-(10**12), 10**12),
    left=st.none() | st.integers(1, 10**7),
    most=st.none() | st.integers(1, 10**4),
    measures=st.booleans(),
)
def test_a_size_is_always_possible(*, story, length, room, left, most, measures):
    """At least one sample, never more than are left or allowed, whatever was measured."""
    size = follow(story, most_samples=most, measures=measures).next_samples(length, room, left)
    assert 1 <= size <= min(left or size, most or size)


@given(story=events, piece=pieces.filter(lambda piece: piece.samples > 1), measures=st.booleans())
def test_after_a_shortage_fewer_samples_of_that_length_run(story, piece, measures):
    """So a piece that fails is followed by a smaller one, down to one sample."""
    sizes = follow(story, measures=measures).after_shortage(piece.samples, piece.length)
    assert sizes.next_samples(piece.length, 10**15) < piece.samples


@given(
    fixed=st.integers(0, 10**6),
    slope=st.integers(1, 10**5),
    bend=st.floats(0, 0.04),
    samples=st.integers(1, 5000),
    fitting=st.integers(8, 2000),
)
def test_memory_that_grows_in_a_line_never_runs_out(fixed, slope, bend, samples, fitting):
    """Nor where it bends up by less than the headroom, as long as eight samples fit."""
    limit = fixed + slope * fitting

    def peak(n, _):
        return int(fixed + slope * n * (1 + bend * n / fitting))

    ran, failed = run_through(samples, peak, limit, budget=limit * 20 // 19)
    assert (sum(ran), failed) == (samples, [])


@given(
    slope=st.integers(1, 10**5),
    samples=st.integers(1, 5000),
    fitting=st.integers(8, 2000),
    segment=st.integers(1, 10**7),
    cached=st.integers(0, 10**7),
)
def test_segments_that_the_allocator_takes_do_not_hide_what_a_sample_takes(slope, samples, fitting, segment, cached):
    """A small piece may make it take a whole one, which a later piece then finds there."""
    sizes, waiting, reserved, ran = PieceSizes(), samples, cached, []
    while waiting:
        size = sizes.next_samples(1, slope * fitting, waiting)
        tensors = slope * size
        assert tensors <= slope * fitting * 20 // 19, (size, ran)
        took = tensors
        if tensors > reserved:
            took = reserved = -(-tensors // segment) * segment
        ran.append(size)
        sizes = sizes.after_piece(Piece(size, 1, took, tensors))
        waiting -= size


@pytest.mark.parametrize("fitting", [16, 100, 320, 900, 10_000])
def test_few_pieces_are_spent_on_growing(fitting):
    """Beside those that the memory makes necessary, at most five."""
    ran, failed = run_through(3000, lambda n, _: 1000 + 100 * n, 1000 + 100 * fitting)
    assert not failed
    assert len(ran) <= -(-3000 // fitting) + 5


@given(
    lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=600),
    linear=st.integers(0, 100),
    square=st.integers(0, 10),
    flat=st.integers(1, 10_000),
)
def test_lengths_never_run_out_whatever_memory_follows(lengths, linear, square, flat):
    """Memory of a sample may follow its length, the square of it, or not at all, where padding is not trimmed."""

    def peak(n, length):
        return n * (flat + linear * length + square * length * length)

    limit = peak(8, max(lengths))
    ran, failed = run_through(0, peak, limit, budget=limit * 20 // 19, lengths=lengths)
    assert (sum(ran), failed) == (len(lengths), [])


def test_short_samples_run_in_larger_pieces():
    """Of samples a tenth as long about ten times as many run at once."""
    ran, failed = run_through(0, lambda n, length: n * length * 100, 64_000, lengths=[64] * 100 + [6] * 1000)
    assert not failed
    assert max(ran) >= 90


def test_a_size_that_failed_is_tried_again_and_waits_longer_each_time():
    """A shortage may have been another process's: after twenty pieces once more, then after forty."""
    sizes = PieceSizes().after_piece(Piece(2, 1, 200)).after_piece(Piece(64, 1, 6400))
    waits = []
    for _ in range(3):
        assert sizes.next_samples(1, 6400) == 64
        sizes, waited = sizes.after_shortage(64, 1), 0
        while (size := sizes.next_samples(1, 6400)) < 64:
            assert size == 48
            sizes, waited = sizes.after_piece(Piece(size, 1, 4800)), waited + 1
        waits.append(waited)
    assert waits == [20, 40, 80]


def test_without_measurements_sizes_double_until_memory_ends():
    """And then lie between the largest that ran and the smallest that did not."""
    ran, failed = run_through(500, lambda n, _: n, 50, measures=False)
    assert ran[:5] == [FIRST_SAMPLES, 4, 8, 16, 32]
    assert failed[0] > 50
    assert len(failed) <= 3
