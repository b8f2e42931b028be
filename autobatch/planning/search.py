"""Which micro-batch size to try next.

Covers the policy alone: sizes and outcomes in, one size out. Does not cover running a trial (``probe``), nor the curve
that a plan keeps (``curve``). Deterministic: the same trials always lead to the same next size.

The search rests on memory that grows convexly with the size, so that a straight line through two measured sizes never
lies above what a larger size takes: measure two small sizes, jump to where the line meets the limit, confirm. It does
not depend on that: ``_affords`` keeps the number of trials within three more than a bisection's, whatever happens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autobatch.planning.evidence import (
    Bracket,
    Line,
    Question,
    draw_line,
    find_bracket,
    fits,
    fitting_sizes,
    largest_fitting,
    measured_peaks,
    safe_reach,
    smallest_as_fast,
)
from autobatch.records import Trial

__all__ = ["Question", "fits", "largest_fitting", "most_trials", "next_size", "next_smaller_size", "smallest_as_fast"]

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
    bracket = find_bracket(question, trials)
    peaks = measured_peaks(question, trials)
    if not bracket.open or _is_proven(question, trials, peaks, bracket):
        return None
    tried = {trial.micro_batch_size for trial in trials}
    left = most_trials(question) - len(trials)
    wish = _Wish(bracket.open[len(bracket.open) // 2])
    for wish in _wishes(question, trials, peaks, bracket):
        if wish.size not in tried and _affords(left, bracket, wish):
            return wish.size
    return _nearest_affordable(left, bracket, wish)


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
    keep: int = 0


def _affords(left: int, bracket: Bracket, wish: _Wish) -> bool:
    """Whether the trials left suffice whichever way this one ends.

    Bisecting ``k`` open candidates takes at most ``k.bit_length()`` trials, since the larger part of the other
    ``k - 1`` is ``k // 2``. Invariant: ``len(open).bit_length() <= left``. It holds at the start, where at most
    ``1..bound`` is open and ``most_trials`` are left. A trial is granted only if the invariant holds after it; the
    midpoint always is, as it takes one from the right side and at least one from the left. A search ends at the latest
    when nothing is open, so it never takes more than ``most_trials``. None of this asks what memory does.
    """
    below = bisect_left(bracket.open, wish.size)
    is_open = below < len(bracket.open) and bracket.open[below] == wish.size
    worst = max(below, len(bracket.open) - below - 1) if is_open else len(bracket.open)
    return worst.bit_length() <= left - 1 - wish.keep


def _nearest_affordable(left: int, bracket: Bracket, wish: _Wish) -> int:
    """The open candidate nearest to the wish after which the trials left still suffice (``_affords``)."""
    most_open = (1 << max(left - 1, 0)) - 1
    first, last = len(bracket.open) - 1 - most_open, most_open
    if first > last:  # the caller has already used more trials than a search takes
        return bracket.open[len(bracket.open) // 2]
    return bracket.open[min(max(bisect_left(bracket.open, wish.size), first, 0), last, len(bracket.open) - 1)]


def _is_proven(question: Question, trials: Sequence[Trial], peaks: dict[int, int], bracket: Bracket) -> bool:
    """Whether the next candidate is known to be too large without its trial: what was measured leads over the limit.

    On convex memory two points would do, as the line beyond them is never above the truth. That it is convex here is
    said by a prediction that agrees, or else by a third point.
    """
    if not bracket.lowest or len(peaks) < 2:
        return False
    line, following = draw_line(peaks, trials), bracket.open[0]
    if line.reach(question.limit_bytes) >= following:
        return False
    if question.expects_no_more and 0 < question.expected < following:
        return True
    enough = len(peaks) >= 3 or all(size in peaks for size in range(question.smallest_probe, bracket.lowest + 1))
    return enough and _is_straight(question, peaks, line, following)


def _is_straight(question: Question, peaks: dict[int, int], line: Line, following: int) -> bool:
    """Whether no measured size lies so far off the line that it might be wrong of the next candidate.

    A single sample is another program: it is left out where there are three others.
    """
    counted = [size for size in peaks if size > 1 or len(peaks) < 4]
    tolerance = question.limit_bytes // _STRAIGHT
    if question.expected:  # on a card: its allocator takes segments, and fragments by a tenth and more
        turned = line.height(following) - question.limit_bytes
        tilt = turned * (line.size - min(counted)) // (following - line.size)
        tolerance = max(tolerance, 2 * _SEGMENT, tilt)
    return all(line.passes(size, peaks[size], tolerance) for size in counted)


def _wishes(question: Question, trials: Sequence[Trial], peaks: dict[int, int], bracket: Bracket) -> Iterator[_Wish]:
    """The sizes worth trying, best first; where none can be afforded, the middle of the bracket is next."""
    if len(peaks) > 1:
        yield from _wishes_on_line(question, trials, peaks, bracket)
    elif peaks:
        yield from _wishes_from_one(question, trials, peaks, bracket)
    elif question.measures and question.expected > 1:
        yield from _wishes_of_prediction(question, bracket)
    elif question.measures and (few := [size for size in bracket.open[:2] if size > 1]):
        yield _Wish(few[0])  # not 1, which is another program; the less memory, the less it costs to be wrong


def _wishes_of_prediction(question: Question, bracket: Bracket) -> Iterator[_Wish]:
    """A quarter of what is predicted, so that even one that is twice too high does not run out."""
    last = bracket.open[-1]
    yield _Wish(_snap(bracket, max(min(question.expected, last) // 4, question.smallest_probe, 2), above=0), keep=1)


def _wishes_from_one(
    question: Question, trials: Sequence[Trial], peaks: dict[int, int], bracket: Bracket
) -> Iterator[_Wish]:
    """A second size, so far above the first as is sure to fit on a line; below it, where nothing above is sure."""
    [(size, peak)] = peaks.items()
    safe = safe_reach(question, trials, size, peak)
    last = bracket.open[-1]
    if safe >= last and bracket.failing is None:
        yield _Wish(last)
    second = min(4 * size, safe, last)
    if second > size:
        yield _Wish(_snap(bracket, second, above=size), keep=1)
    if size // 2 >= question.smallest_probe:
        yield _Wish(size // 2, keep=1)
    yield _Wish(_next_open(question, bracket))


def _wishes_on_line(
    question: Question, trials: Sequence[Trial], peaks: dict[int, int], bracket: Bracket
) -> Iterator[_Wish]:
    """Where the line meets the limit, by way of half of it if that is far; the next candidate if it meets it here."""
    line = draw_line(peaks, trials)
    reach = line.reach(question.limit_bytes)
    if reach < bracket.open[0]:
        if not _is_near_the_limit(question, line, bracket.open[0]):
            yield from map(_Wish, _thirds(question, peaks))
        yield _Wish(_next_open(question, bracket))
    elif bracket.failing is not None and reach >= bracket.failing:
        yield _Wish(bracket.open[len(bracket.open) * 3 // 4])  # the line was too hopeful, but seldom by much
    else:
        if question.expected > bracket.lowest and line.rise <= 2 * _SEGMENT:
            reach = min(reach, question.expected)  # a line that rises by no more than that is a segment's, not a step's
        yield from _wishes_within(question, trials, line, bracket, reach)


def _wishes_within(
    question: Question, trials: Sequence[Trial], line: Line, bracket: Bracket, reach: int
) -> Iterator[_Wish]:
    """The largest candidate within reach, by way of half of it if that is far."""
    aim = bracket.open[bisect_right(bracket.open, reach) - 1]
    reached = max(fitting_sizes(question, trials), default=0)
    if aim > 4 * reached and aim > _cautious_reach(question, trials, line):
        yield _Wish(_snap(bracket, aim // 2, above=reached), keep=1)
    yield _Wish(aim)


def _is_near_the_limit(question: Question, line: Line, size: int) -> bool:
    """Whether a prediction says that a size fits which the line puts over the limit by less than a card has spare."""
    return question.expected >= size and line.height(size) <= question.limit_bytes + question.limit_bytes // _SPARE


def _thirds(question: Question, peaks: dict[int, int]) -> Iterator[int]:
    """Sizes below the largest that tell, with two others, whether memory is straight: trials that cannot run out."""
    sizes = [size for size in peaks if size > 1]
    if len(sizes) == 2:
        yield sum(sizes) // 2
    if len(sizes) < 3:
        yield question.smallest_probe


def _next_open(question: Question, bracket: Bracket) -> int:
    """The smallest open candidate, but not one sample before the smallest probe has failed."""
    return max(bracket.open[0], min(question.smallest_probe, bracket.open[-1]))


def _snap(bracket: Bracket, size: int, above: int) -> int:
    """The largest open candidate up to ``size``, so that the trial can be the answer; if none is left, ``size``."""
    index = bisect_right(bracket.open, size)
    return bracket.open[index - 1] if index and bracket.open[index - 1] > above else size


def _cautious_reach(question: Question, trials: Sequence[Trial], line: Line) -> int:
    """The largest size within the limit even if memory turns twice as steep, as it does where ResNet-18 bends."""
    twice = line.reach(question.limit_bytes, steepness=2)
    return min(twice, safe_reach(question, trials, line.size, line.peak))
