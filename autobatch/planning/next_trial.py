"""Chooses the micro-batch size to try next, and finally the size that a plan may promise.

The policy takes sizes and outcomes and returns one size. The same trials always lead to the same size.

1. If a forecast agrees with the measurements, the search follows it.
2. Otherwise memory grows convexly with the size, so a line through two measured sizes never lies above a larger one.
   The search measures two small sizes, jumps to the size at which the line meets the limit, and confirms it.
3. The search depends on neither. ``_affords`` limits the number of trials to three more than a bisection takes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import Field

from autobatch._bounds import Bytes
from autobatch.planning.curve import Line, growing_allocated, growing_reserved
from autobatch.planning.division import Objective
from autobatch.records import Record, Trial

FIRST_SIZE = 2
"""Samples in the one micro-batch of the first step, which makes the optimizer's state."""
_RESERVE = 50
"""A trial may take 1/50 more than predicted. Near the limit, those of benchmarks/card_models.py took 1.7 % at most."""
_AGREES = 10
"""A prediction with an error of more than a tenth belongs to another step."""
_AS_FAST = 0.98  # share of the best rate that counts as equally fast; timings of one size differ by as much
_STRAIGHT = 200  # points lie on a line within 1/200 of the limit: one 20 MiB segment of the CUDA allocator on 4 GiB
_SPARE = 50  # a trial that takes 1/50 more than the limit seldom runs out: the headroom is 1/20 by default
_ENOUGH = 3  # trials, where a prediction is right and the next candidate may or may not fit
_SEGMENT = 20 * 2**20  # bytes that the CUDA allocator takes at once for what is smaller than half of that


class Expected(NamedTuple):
    """Bytes that a trial will reserve; ``at_most`` includes the reserve."""

    likely: int
    at_most: int


class Forecast(Record):
    """Predicted bytes of a trial at some sizes, with straight lines in between and nothing beyond."""

    points: tuple[tuple[int, Bytes], ...] = Field(default=(), max_length=10_000)  # (size, bytes), ascending in size
    # Training in a new process: the allocator divides its segments differently there. 0 if unknown.
    largest_to_train: int = Field(default=0, ge=0)
    is_confirmed: bool = False  # whether the first step, of two samples, held the predicted bytes

    def predict(self, size: int) -> int | None:
        index = bisect_left(self.points, size, key=lambda point: point[0])
        if index == len(self.points):
            return None
        end, high = self.points[index]
        if end == size:
            return high
        if index == 0:
            return None
        start, low = self.points[index - 1]
        return low + (high - low) * (size - start) // (end - start)

    def agrees(self, peaks: Mapping[int, int]) -> bool:
        """Return whether the measured bytes, by size, are near the prediction; ``is_confirmed`` before any."""
        predicted = {size: bytes_then for size in peaks if (bytes_then := self.predict(size)) is not None}
        if not predicted:
            return self.is_confirmed and not peaks
        return all(abs(peaks[size] - held) * _AGREES <= held for size, held in predicted.items())

    def expect(self, size: int, peaks: Mapping[int, int]) -> Expected | None:
        """Return the bytes of the largest smaller trial, plus the predicted difference."""
        if (then := self.predict(size)) is None:
            return None
        known = max((at for at in peaks if at < size and self.predict(at) is not None), default=0)
        measured, predicted = (peaks[known], self.predict(known) or 0) if known else (0, 0)
        more = max(then - predicted, 0)
        if predicted:  # the relative error stays the same
            more = more * measured // predicted
        likely = measured + more
        return Expected(likely, max(likely, then) + more // _RESERVE)

    def largest(self, sizes: Sequence[int], peaks: Mapping[int, int], limit_bytes: int) -> int | None:
        """Return the largest of these ascending sizes that surely stays within the limit; ``None`` if none does."""
        for size in reversed(sizes):
            expected = self.expect(size, peaks)
            if expected is not None and expected.at_most <= limit_bytes:
                return size
        return None


class Question(Record):
    """The question of a search: the largest useful size within a limit."""

    bound: int = Field(ge=1)  # no size above this is tried: a rank's share of the target, or what the user allows
    limit_bytes: int = Field(ge=0)
    measures: bool = True  # whether trials carry bytes; if not, running out of memory is the only signal
    smallest_probe: int = Field(default=1, ge=1, le=2)  # if 2, one sample is tried only after 2 has failed
    candidates: tuple[int, ...] = ()  # possible answers, ascending from the fewest samples; empty: all up to the bound
    expected: int = Field(default=0, ge=0)  # answer of a prediction, where the search begins and may end
    expects_no_more: bool = True  # whether the prediction says that the next candidate does not fit
    forecast: Forecast = Forecast()  # predicted bytes of trials near that answer

    @property
    def sizes(self) -> Sequence[int]:
        return self.candidates or range(1, self.bound + 1)


def fits(question: Question, trial: Trial) -> bool:
    within = max(trial.peak_reserved, trial.peak_allocated) <= question.limit_bytes
    return trial.outcome == "fits" and (within or not question.measures)


class Evidence:
    """Settled and open sizes. A failure below a size that fits settles nothing: memory may not be monotone."""

    def __init__(self, question: Question, trials: Sequence[Trial]) -> None:
        self.question, self.trials = question, trials
        self.failing = {trial.micro_batch_size for trial in trials if not fits(question, trial)}
        self.fitting = {trial.micro_batch_size for trial in trials} - self.failing
        sizes = question.sizes
        self.answers = [size for size in self.fitting if size in sizes]  # candidates that fit
        self.lowest = max(self.answers, default=0)
        self.limiting = min((size for size in self.failing if size > self.lowest), default=None)
        self.measured = [trial for trial in trials if trial.outcome == "fits" and question.measures]
        # By size: bytes that grow with it, and all bytes.
        self.peaks = {trial.micro_batch_size: growing_reserved(trial) for trial in self.measured}
        self.held = {trial.micro_batch_size: max(trial.peak_reserved, trial.peak_allocated) for trial in self.measured}
        is_refuted = self.failing or not question.forecast.agrees(self.held)
        self.forecast = Forecast() if is_refuted else question.forecast
        end = len(sizes) if self.limiting is None else bisect_left(sizes, self.limiting)
        if self.forecast.largest_to_train:
            end = min(end, bisect_right(sizes, self.forecast.largest_to_train))
        self.open = sizes[bisect_right(sizes, self.lowest) : end]

    def safe_reach(self, size: int, peak: int) -> int:
        resident = min(trial.resident_bytes for trial in self.measured)
        return Line(size, peak, size, peak - resident).reach(self.question.limit_bytes)

    def snap(self, size: int, above: int) -> int:
        """Return the largest open candidate up to ``size``, so that the trial can be the answer, or else ``size``."""
        index = bisect_right(self.open, size)
        return self.open[index - 1] if index and self.open[index - 1] > above else size


def draw_line(peaks: dict[int, int], trials: Sequence[Trial]) -> Line:
    """Draw a line through the largest of at least two measured sizes and the largest of at most 7/8 of it.

    Reserved bytes are a staircase: the line avoids close sizes, and is at least as steep as the bytes in tensors. One
    sample is another program: the line takes it only if there is just one other size.
    """
    largest = max(peaks)
    others = [size for size in peaks if size != largest and (size > 1 or len(peaks) == 2)]
    other = max((size for size in others if size <= largest * 7 // 8), default=min(others))
    tensors = {trial.micro_batch_size: growing_allocated(trial) for trial in trials}
    rise = max(peaks[largest] - peaks[other], tensors[largest] - tensors[other])
    return Line(largest, peaks[largest], largest - other, rise)


def choose_size(question: Question, trials: Sequence[Trial], objective: Objective = "throughput") -> int | None:
    """Return the micro-batch size that a plan may promise: a candidate that has run and fits; ``None`` without one.

    ``"throughput"`` takes the largest: the rates of single trials are too noisy to overrule fewer, fuller steps.
    ``"memory"`` takes the smallest within 2 % of the best rate in samples per second, or the largest without rates.
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
    """Return the next size to try; ``None`` once the largest that fits is found.

    A size is the largest if it is the last candidate, or the next one failed or is known to be over the limit: by a
    forecast that agrees with all trials, or by a line through at least three sizes (two if a prediction agrees). So the
    answer is exact on convex memory. No size is tried twice. On linear memory it takes at most four trials, and none
    runs out of memory if two samples fit.
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
    """Return the next size to time for the objective ``"memory"``, after ``next_size``; ``None`` once it is found.

    It halves the smallest size that is as fast as the best, until a trial of that half is slower.
    """
    smallest = choose_size(question, trials, "memory")
    if smallest is None or not any(trial.seconds for trial in trials):
        return None
    index = bisect_right(question.sizes, smallest // 2)
    half = question.sizes[index - 1] if index else 0
    is_tried = any(trial.micro_batch_size == half for trial in trials)
    return None if half < question.smallest_probe or is_tried else half


def most_trials(question: Question) -> int:
    return question.bound.bit_length() + (3 if question.measures else 0)


def _affords(left: int, open_sizes: Sequence[int], size: int) -> bool:
    """Return whether the trials left after this one suffice, whatever its outcome.

    Bisecting ``k`` open candidates takes at most ``k.bit_length()`` trials. Invariant: ``len(open).bit_length() <=
    left``. It holds at the start, and a trial may only run if it holds afterwards, as it does for the midpoint. So no
    search takes more than ``most_trials``.
    """
    below = bisect_left(open_sizes, size)
    worst = max(below, len(open_sizes) - below - 1) if size in open_sizes else len(open_sizes)
    return worst.bit_length() <= left


def _nearest_affordable(left: int, open_sizes: Sequence[int], wish: int) -> int:
    """Return the open candidate nearest to the wish after which the trials left still suffice (``_affords``)."""
    last = (1 << max(left, 0)) - 1
    first = len(open_sizes) - 1 - last
    if first > last:  # the caller has used more trials than a search takes
        return open_sizes[len(open_sizes) // 2]
    return open_sizes[min(max(bisect_left(open_sizes, wish), first, 0), last, len(open_sizes) - 1)]


def _is_proven(seen: Evidence) -> bool:
    """Return whether the measurements show that the next candidate is too large, without its trial.

    The line beyond two points of convex memory is never above the truth. A prediction that agrees, or a third point,
    shows that memory is convex. A forecast of trials near it shows both.
    """
    question, peaks = seen.question, seen.peaks
    if not seen.lowest:
        return False
    if (foreseen := seen.forecast.expect(seen.open[0], seen.held)) is not None:
        # After three trials a candidate that may be too large is not worth a fourth.
        is_doubtful = len(seen.trials) >= _ENOUGH and foreseen.at_most > question.limit_bytes
        return foreseen.likely > question.limit_bytes or is_doubtful
    if len(peaks) < 2:
        return False
    line, following = draw_line(peaks, seen.trials), seen.open[0]
    if line.reach(question.limit_bytes) >= following:
        return False
    if question.expects_no_more and 0 < question.expected < following:
        return True
    enough = len(peaks) >= 3 or all(size in peaks for size in range(question.smallest_probe, seen.lowest + 1))
    return enough and _is_straight(seen, line, following)


def _is_straight(seen: Evidence, line: Line, following: int) -> bool:
    """Return whether all measured sizes lie near the line, so that it can be right about the next candidate."""
    question, peaks = seen.question, seen.peaks
    counted = [size for size in peaks if size > 1 or len(peaks) < 4]  # one sample is another program
    tolerance = question.limit_bytes // _STRAIGHT
    if question.expected:  # on a card: its allocator takes segments, and fragments by a tenth and more
        turned = line.height(following) - question.limit_bytes
        tilt = turned * (line.size - min(counted)) // (following - line.size)
        tolerance = max(tolerance, 2 * _SEGMENT, tilt)
    return all(line.passes(size, peaks[size], tolerance) for size in counted)


def _wishes(seen: Evidence) -> Iterator[tuple[int, int]]:
    """Yield the sizes worth trying, best first, each with the number of trials that must be left after it."""
    question = seen.question
    if (surest := seen.forecast.largest(seen.open, seen.held, question.limit_bytes)) is not None:
        yield surest, 0
    elif seen.lowest and seen.forecast.expect(seen.open[0], seen.held) is not None:
        yield seen.open[0], 0  # within the limit, but not surely: otherwise the search would be over
    if len(seen.peaks) > 1:
        yield from _wishes_on_line(seen, draw_line(seen.peaks, seen.trials))
    elif seen.peaks:
        yield from _wishes_from_one(seen)
    elif question.measures and question.expected > 1:
        # A quarter of the prediction, so that even one that is twice too high does not run out.
        quarter = max(min(question.expected, seen.open[-1]) // 4, question.smallest_probe, 2)
        yield seen.snap(quarter, above=0), 1
    elif question.measures and (few := [size for size in seen.open[:2] if size > 1]):
        yield few[0], 0  # not 1, which is another program; a small trial that fails costs little


def _wishes_from_one(seen: Evidence) -> Iterator[tuple[int, int]]:
    """Yield a second size: as far above the first as surely fits on a line, or below it if nothing above is sure."""
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
    """Yield the size at which the line meets the limit, half of it first if that is far, or else the next candidate."""
    limit, expected, following = seen.question.limit_bytes, seen.question.expected, seen.open[0]
    reach = line.reach(limit)
    if reach < following:
        # A prediction may say that the next size fits where the line is over the limit by less than a card can spare.
        if expected < following or line.height(following) > limit + limit // _SPARE:
            # A size below the largest shows, with two others, whether memory is straight, and cannot run out.
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
            reach = min(reach, expected)  # such a small rise is a segment of the allocator
        aim, reached = seen.open[bisect_right(seen.open, reach) - 1], max(seen.fitting, default=0)
        # Within the limit even if memory becomes twice as steep, as that of ResNet-18 does.
        cautious = min(line.reach(limit, steepness=2), seen.safe_reach(line.size, line.peak))
        if aim > 4 * reached and aim > cautious:
            yield seen.snap(aim // 2, above=reached), 1
        yield aim, 0


def _next_open(seen: Evidence) -> int:
    return max(seen.open[0], min(seen.question.smallest_probe, seen.open[-1]))
