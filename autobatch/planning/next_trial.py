"""Chooses which micro-batch size to try next, and at the end which of those that ran a plan may promise.

Covers the policy alone: sizes and outcomes in, one size out; the same trials always lead to the same size. Does not
cover running a trial (``fitting.probe``), nor the curve of a plan (``curve``).

Where a forecast agrees with what was measured, the search goes where it leads. Else it rests on memory that grows
convexly with the size, so that a straight line through two measured sizes never lies above what a larger size takes:
measure two small sizes, jump to where the line meets the limit, confirm. It depends on neither: ``_affords`` limits
the number of trials to three more than a bisection's, whatever happens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from autobatch.planning.curve import Line
from autobatch.planning.evidence import Evidence, Question, draw_line
from autobatch.planning.forecast import Expected
from autobatch.planning.planner import Objective
from autobatch.records import Trial

__all__ = ["choose_size", "most_trials", "next_size", "next_smaller_size"]

_AS_FAST = 0.98  # the share of the best rate that still counts as no slower; timings of one size differ by as much
_STRAIGHT = 200  # points lie on a line within 1/200 of the limit: one 20 MiB segment of the CUDA allocator on 4 GiB
_SPARE = 50  # a trial that takes 1/50 more than the limit seldom runs out: the headroom is 1/20 by default
_ENOUGH = 3  # trials, where a prediction is right and the next candidate may or may not fit
_SEGMENT = 20 * 2**20  # bytes that the CUDA allocator takes at once for what is smaller than half of that


def choose_size(question: Question, trials: Sequence[Trial], objective: Objective = "throughput") -> int | None:
    """The micro-batch size that a plan may promise: a candidate that has run and fits; ``None`` where none does.

    ``"throughput"`` takes the largest: the rates of single trials are too noisy to overrule fewer, fuller steps, and
    what crawls near the limit has the outcome ``"thrash"``. ``"memory"`` takes the smallest within 2 % of the best
    rate in samples per second; without rates the largest, since nothing says that a smaller one is as fast.
    """
    rates = dict.fromkeys(Evidence(question, trials).answers, 0.0)
    for trial in trials:
        if trial.micro_batch_size in rates:
            rates[trial.micro_batch_size] = max(rates[trial.micro_batch_size], trial.samples_per_second)
    best = max(rates.values(), default=0.0)
    if objective == "throughput" or best == 0:
        return max(rates, default=None)
    return min(size for size, rate in rates.items() if rate >= _AS_FAST * best)


def next_size(question: Question, trials: Sequence[Trial]) -> int | None:
    """The next size to try, ``None`` when the largest that fits is found.

    It is found where it is the largest candidate, or the next candidate has failed, or is predicted over the limit by a
    forecast that agrees with all trials, or a straight line puts it there: one through at least three sizes (or all
    that exist below), or through two where a prediction agrees. So it is exact on memory that grows convexly. Each
    size is asked for at most once, and at most ``most_trials`` of them; on memory that grows linearly at most four,
    none of which runs out of memory, as long as two samples fit.
    """
    seen = Evidence(question, trials)
    if not seen.open or _is_proven(seen):
        return None
    left = most_trials(question) - len(trials) - 1
    wish = seen.open[len(seen.open) // 2]
    for wish, reserve in _wishes(seen):
        if wish not in seen.fitting | seen.failing and _affords(left - reserve, seen.open, wish):
            return wish
    return _nearest_affordable(left, seen.open, wish)


def next_smaller_size(question: Question, trials: Sequence[Trial]) -> int | None:
    """After ``next_size`` is done: the next size to time for the objective ``"memory"``, ``None`` when it has one.

    Halves the smallest size that is as fast as the best, until half of it has been timed and is slower.
    """
    smallest = choose_size(question, trials, "memory")
    if smallest is None or not any(trial.seconds for trial in trials):
        return None
    index = bisect_right(question.sizes, smallest // 2)
    half = question.sizes[index - 1] if index else 0
    is_tried = any(trial.micro_batch_size == half for trial in trials)
    return None if half < question.smallest_probe or is_tried else half


def most_trials(question: Question) -> int:
    """A bisection of ``1..bound`` takes ``floor(log2(bound)) + 1`` trials at most; where bytes are measured, 3 more."""
    return question.bound.bit_length() + (3 if question.measures else 0)


def _affords(left: int, open_sizes: Sequence[int], size: int) -> bool:
    """Whether the trials left after this one suffice whichever way it ends.

    Bisecting ``k`` open candidates takes at most ``k.bit_length()`` trials, since the larger part of the other
    ``k - 1`` is ``k // 2``. Invariant: ``len(open).bit_length() <= left``. It holds at the start, and a trial is only
    granted if it holds afterwards, as it does for the midpoint. So no search takes more than ``most_trials``, whatever
    memory does.
    """
    below = bisect_left(open_sizes, size)
    worst = max(below, len(open_sizes) - below - 1) if size in open_sizes else len(open_sizes)
    return worst.bit_length() <= left


def _nearest_affordable(left: int, open_sizes: Sequence[int], wish: int) -> int:
    """The open candidate nearest to the wish after which the trials left still suffice (``_affords``)."""
    last = (1 << max(left, 0)) - 1
    first = len(open_sizes) - 1 - last
    if first > last:  # the caller has already used more trials than a search takes
        return open_sizes[len(open_sizes) // 2]
    return open_sizes[min(max(bisect_left(open_sizes, wish), first, 0), last, len(open_sizes) - 1)]


def _is_proven(seen: Evidence) -> bool:
    """Whether the next candidate is known to be too large without its trial: what was measured leads over the limit.

    On convex memory two points would do, as the line beyond them is never above the truth. That it is convex here is
    said by a prediction that agrees, or else by a third point. A forecast of trials near it says both.
    """
    question, peaks = seen.question, seen.peaks
    if not seen.lowest:
        return False
    if (foreseen := seen.forecast.expect(seen.open[0], seen.held)) is not None:
        return foreseen.likely > question.limit_bytes or _is_doubtful(seen, foreseen)
    if len(peaks) < 2:
        return False
    line, following = draw_line(peaks, seen.trials), seen.open[0]
    if line.reach(question.limit_bytes) >= following:
        return False
    if question.expects_no_more and 0 < question.expected < following:
        return True
    enough = len(peaks) >= 3 or all(size in peaks for size in range(question.smallest_probe, seen.lowest + 1))
    return enough and _is_straight(seen, line, following)


def _is_doubtful(seen: Evidence, foreseen: Expected) -> bool:
    """Whether the next candidate may be too large, and a third trial has been spent: it is worth no more than that."""
    return len(seen.trials) >= _ENOUGH and foreseen.at_most > seen.question.limit_bytes


def _is_straight(seen: Evidence, line: Line, following: int) -> bool:
    """Whether no measured size lies so far off the line that it might be wrong of the next candidate."""
    question, peaks = seen.question, seen.peaks
    counted = [size for size in peaks if size > 1 or len(peaks) < 4]  # a single sample is another program
    tolerance = question.limit_bytes // _STRAIGHT
    if question.expected:  # on a card: its allocator takes segments, and fragments by a tenth and more
        turned = line.height(following) - question.limit_bytes
        tilt = turned * (line.size - min(counted)) // (following - line.size)
        tolerance = max(tolerance, 2 * _SEGMENT, tilt)
    return all(line.passes(size, peaks[size], tolerance) for size in counted)


def _wishes(seen: Evidence) -> Iterator[tuple[int, int]]:
    """The sizes worth trying, best first, each with how many more trials must be left for what it prepares.

    Where none can be afforded, the middle of the open sizes is next.
    """
    question = seen.question
    if (surest := seen.forecast.largest(seen.open, seen.held, question.limit_bytes)) is not None:
        yield surest, 0
    elif seen.lowest and seen.forecast.expect(seen.open[0], seen.held) is not None:
        yield seen.open[0], 0  # within the limit, though not surely: else the search would have ended
    if len(seen.peaks) > 1:
        yield from _wishes_on_line(seen, draw_line(seen.peaks, seen.trials))
    elif seen.peaks:
        yield from _wishes_from_one(seen)
    elif question.measures and question.expected > 1:
        # A quarter of what is predicted, so that even a prediction that is twice too high does not run out.
        quarter = max(min(question.expected, seen.open[-1]) // 4, question.smallest_probe, 2)
        yield seen.snap(quarter, above=0), 1
    elif question.measures and (few := [size for size in seen.open[:2] if size > 1]):
        yield few[0], 0  # not 1, which is another program; the less memory, the less it costs to be wrong


def _wishes_from_one(seen: Evidence) -> Iterator[tuple[int, int]]:
    """A second size, so far above the first as is sure to fit on a line; below it, where nothing above is sure."""
    [(size, peak)] = seen.peaks.items()
    safe, last = seen.safe_reach(size, peak), seen.open[-1]
    if safe >= last and seen.limiting is None:
        yield last, 0
    second = min(4 * size, safe, last)
    if second > size:
        yield seen.snap(second, above=size), 1
    if size // 2 >= seen.question.smallest_probe:
        yield size // 2, 1
    yield _next_open(seen), 0


def _wishes_on_line(seen: Evidence, line: Line) -> Iterator[tuple[int, int]]:
    """Where the line meets the limit, by way of half of it if that is far; the next candidate if it meets it here."""
    limit, expected, following = seen.question.limit_bytes, seen.question.expected, seen.open[0]
    reach = line.reach(limit)
    if reach < following:
        # A prediction may say that the next size fits where the line is over the limit by less than a card can spare.
        if expected < following or line.height(following) > limit + limit // _SPARE:
            # Sizes below the largest show, with two others, whether memory is straight, and cannot run out.
            sizes = [size for size in seen.peaks if size > 1]
            if len(sizes) == 2:
                yield sum(sizes) // 2, 0
            if len(sizes) < 3:
                yield seen.question.smallest_probe, 0
        yield _next_open(seen), 0
    elif seen.limiting is not None and reach >= seen.limiting:
        yield seen.open[len(seen.open) * 3 // 4], 0  # the line was too hopeful, but seldom by much
    else:
        if expected > seen.lowest and line.rise <= 2 * _SEGMENT:
            reach = min(reach, expected)  # a line that rises by no more than that is a segment's, not a step's
        aim, reached = seen.open[bisect_right(seen.open, reach) - 1], max(seen.fitting, default=0)
        # Within the limit even if memory turns twice as steep, as it does where ResNet-18 bends.
        cautious = min(line.reach(limit, steepness=2), seen.safe_reach(line.size, line.peak))
        if aim > 4 * reached and aim > cautious:
            yield seen.snap(aim // 2, above=reached), 1
        yield aim, 0


def _next_open(seen: Evidence) -> int:
    """The smallest open candidate, but not one sample before the smallest probe has failed."""
    return max(seen.open[0], min(seen.question.smallest_probe, seen.open[-1]))
