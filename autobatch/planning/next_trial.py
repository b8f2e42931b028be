"""Chooses which micro-batch size to try next.

Covers the policy alone: sizes and outcomes in, one size out; the same trials always lead to the same next size. Does
not cover running a trial (``fitting.probe``), nor the curve of a plan (``curve``).

The search rests on memory that grows convexly with the size, so that a straight line through two measured sizes never
lies above what a larger size takes: measure two small sizes, jump to where the line meets the limit, confirm. It does
not depend on that: ``_affords`` limits the number of trials to three more than a bisection's, whatever happens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autobatch.planning.evidence import Evidence, Question, smallest_as_fast
from autobatch.records import Trial

__all__ = ["most_trials", "next_size", "next_smaller_size"]

_STRAIGHT = 200
"""Points lie on a line when they are within 1/200 of the limit: one 20 MiB segment of the CUDA allocator on 4 GiB."""

_SPARE = 50
"""A trial that takes 1/50 more than the limit seldom runs out: the headroom is 1/20 unless the user asks for less."""

_SEGMENT = 20 * 2**20
"""Bytes that the CUDA allocator takes at once for what is smaller than half of that."""


def next_size(question: Question, trials: Sequence[Trial]) -> int | None:
    """The next size to try, ``None`` when ``largest_fitting`` is the answer.

    That answer is the largest candidate, or the next candidate has failed, or a straight line puts it over the limit
    that runs through at least three sizes (or all that exist below), or through two where a prediction agrees. So it
    is exact on memory that grows convexly. Each size is asked for at most once, and at most ``most_trials`` of them;
    on memory that grows linearly at most four, none of which runs out of memory, as long as two samples fit.
    """
    seen = Evidence(question, trials)
    if not seen.open or _is_proven(seen):
        return None
    tried = {trial.micro_batch_size for trial in trials}
    left = most_trials(question) - len(trials)
    wish = _Wish(seen.open[len(seen.open) // 2])
    for wish in _wishes(seen):
        if wish.size not in tried and _affords(left, seen.open, wish):
            return wish.size
    return _nearest_affordable(left, seen.open, wish)


def next_smaller_size(question: Question, trials: Sequence[Trial]) -> int | None:
    """After ``next_size`` is done: the next size to time for ``smallest_as_fast``, ``None`` when that is the answer.

    Halves the smallest size that is as fast as the best, until half of it has been timed and is slower.
    """
    smallest = smallest_as_fast(question, trials)
    if smallest is None or not any(trial.seconds for trial in trials):
        return None
    index = bisect_right(question.sizes, smallest // 2)
    half = question.sizes[index - 1] if index else 0
    tried = {trial.micro_batch_size for trial in trials}
    return None if half < question.smallest_probe or half in tried else half


def most_trials(question: Question) -> int:
    """A bisection of ``1..bound`` takes ``floor(log2(bound)) + 1`` trials at most; where bytes are measured, 3 more."""
    return question.bound.bit_length() + (3 if question.measures else 0)


class _Wish(NamedTuple):
    """A size worth trying, and how many more trials must be left for what it prepares."""

    size: int
    reserve: int = 0


def _affords(left: int, open_sizes: Sequence[int], wish: _Wish) -> bool:
    """Whether the trials left suffice whichever way this one ends.

    Bisecting ``k`` open candidates takes at most ``k.bit_length()`` trials, since the larger part of the other
    ``k - 1`` is ``k // 2``. Invariant: ``len(open).bit_length() <= left``. It holds at the start, where at most
    ``1..bound`` is open and ``most_trials`` are left. A trial is granted only if the invariant holds after it; the
    midpoint always is, as it takes one from the right side and at least one from the left. A search ends at the latest
    when nothing is open, so it never takes more than ``most_trials``. None of this depends on what memory does.
    """
    below = bisect_left(open_sizes, wish.size)
    is_open = below < len(open_sizes) and open_sizes[below] == wish.size
    worst = max(below, len(open_sizes) - below - 1) if is_open else len(open_sizes)
    return worst.bit_length() <= left - 1 - wish.reserve


def _nearest_affordable(left: int, open_sizes: Sequence[int], wish: _Wish) -> int:
    """The open candidate nearest to the wish after which the trials left still suffice (``_affords``)."""
    most_open = (1 << max(left - 1, 0)) - 1
    first, last = len(open_sizes) - 1 - most_open, most_open
    if first > last:  # the caller has already used more trials than a search takes
        return open_sizes[len(open_sizes) // 2]
    return open_sizes[min(max(bisect_left(open_sizes, wish.size), first, 0), last, len(open_sizes) - 1)]


def _is_proven(seen: Evidence) -> bool:
    """Whether the next candidate is known to be too large without its trial: what was measured leads over the limit.

    On convex memory two points would do, as the line beyond them is never above the truth. That it is convex here is
    said by a prediction that agrees, or else by a third point.
    """
    question, peaks = seen.question, seen.peaks
    if not seen.lowest or len(peaks) < 2:
        return False
    line, following = seen.line, seen.open[0]
    if line.reach(question.limit_bytes) >= following:
        return False
    if question.expects_no_more and 0 < question.expected < following:
        return True
    enough = len(peaks) >= 3 or all(size in peaks for size in range(question.smallest_probe, seen.lowest + 1))
    return enough and _is_straight(seen, following)


def _is_straight(seen: Evidence, following: int) -> bool:
    """Whether no measured size lies so far off the line that it might be wrong of the next candidate.

    A single sample is another program: it is left out where there are three others.
    """
    question, line, peaks = seen.question, seen.line, seen.peaks
    counted = [size for size in peaks if size > 1 or len(peaks) < 4]
    tolerance = question.limit_bytes // _STRAIGHT
    if question.expected:  # on a card: its allocator takes segments, and fragments by a tenth and more
        turned = line.height(following) - question.limit_bytes
        tilt = turned * (line.size - min(counted)) // (following - line.size)
        tolerance = max(tolerance, 2 * _SEGMENT, tilt)
    return all(line.passes(size, peaks[size], tolerance) for size in counted)


def _wishes(seen: Evidence) -> Iterator[_Wish]:
    """The sizes worth trying, best first; where none can be afforded, the middle of the open sizes is next."""
    question = seen.question
    if len(seen.peaks) > 1:
        yield from _wishes_on_line(seen)
    elif seen.peaks:
        yield from _wishes_from_one(seen)
    elif question.measures and question.expected > 1:
        # A quarter of what is predicted, so that even a prediction that is twice too high does not run out.
        quarter = max(min(question.expected, seen.open[-1]) // 4, question.smallest_probe, 2)
        yield _Wish(_snap(seen, quarter, above=0), reserve=1)
    elif question.measures and (few := [size for size in seen.open[:2] if size > 1]):
        yield _Wish(few[0])  # not 1, which is another program; the less memory, the less it costs to be wrong


def _wishes_from_one(seen: Evidence) -> Iterator[_Wish]:
    """A second size, so far above the first as is sure to fit on a line; below it, where nothing above is sure."""
    [(size, peak)] = seen.peaks.items()
    safe, last = seen.safe_reach(size, peak), seen.open[-1]
    if safe >= last and seen.limiting is None:
        yield _Wish(last)
    second = min(4 * size, safe, last)
    if second > size:
        yield _Wish(_snap(seen, second, above=size), reserve=1)
    if size // 2 >= seen.question.smallest_probe:
        yield _Wish(size // 2, reserve=1)
    yield _Wish(_next_open(seen))


def _wishes_on_line(seen: Evidence) -> Iterator[_Wish]:
    """Where the line meets the limit, by way of half of it if that is far; the next candidate if it meets it here."""
    question, line = seen.question, seen.line
    reach = line.reach(question.limit_bytes)
    if reach < seen.open[0]:
        # A prediction may say that the next size fits where the line is over the limit by less than a card can spare.
        spare = question.limit_bytes // _SPARE
        if question.expected < seen.open[0] or line.height(seen.open[0]) > question.limit_bytes + spare:
            yield from map(_Wish, _thirds(seen))
        yield _Wish(_next_open(seen))
    elif seen.limiting is not None and reach >= seen.limiting:
        yield _Wish(seen.open[len(seen.open) * 3 // 4])  # the line was too hopeful, but seldom by much
    else:
        if question.expected > seen.lowest and line.rise <= 2 * _SEGMENT:
            reach = min(reach, question.expected)  # a line that rises by no more than that is a segment's, not a step's
        yield from _wishes_within(seen, reach)


def _wishes_within(seen: Evidence, reach: int) -> Iterator[_Wish]:
    """The largest candidate within reach, by way of half of it if that is far."""
    aim = seen.open[bisect_right(seen.open, reach) - 1]
    reached, line = max(seen.fitting, default=0), seen.line
    # Within the limit even if memory turns twice as steep, as it does where ResNet-18 bends.
    cautious = min(line.reach(seen.question.limit_bytes, steepness=2), seen.safe_reach(line.size, line.peak))
    if aim > 4 * reached and aim > cautious:
        yield _Wish(_snap(seen, aim // 2, above=reached), reserve=1)
    yield _Wish(aim)


def _thirds(seen: Evidence) -> Iterator[int]:
    """Sizes below the largest that show, with two others, whether memory is straight: trials that cannot run out."""
    sizes = [size for size in seen.peaks if size > 1]
    if len(sizes) == 2:
        yield sum(sizes) // 2
    if len(sizes) < 3:
        yield seen.question.smallest_probe


def _next_open(seen: Evidence) -> int:
    """The smallest open candidate, but not one sample before the smallest probe has failed."""
    return max(seen.open[0], min(seen.question.smallest_probe, seen.open[-1]))


def _snap(seen: Evidence, size: int, above: int) -> int:
    """The largest open candidate up to ``size``, so that the trial can be the answer; if none is left, ``size``."""
    index = bisect_right(seen.open, size)
    return seen.open[index - 1] if index and seen.open[index - 1] > above else size
