"""The size over time: down by what is needed, back as soon as memory is, and seldom where a size fails for good."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from autobatch.errors import InvalidArgument
from autobatch.planning.curve import MemoryCurve
from autobatch.planning.division import COMPILED_SIZES, balance, compiled_ladder, eager_ladder
from autobatch.planning.pacing import CLEAN_STEPS, LONGEST_WAIT, Ceiling, Pace

LINE = MemoryCurve(allocated=((0, 100), (10, 200)), reserved=((0, 100), (10, 200)))  # 100 bytes and 10 a sample
POWERS = (1, 2, 4, 8, 16, 32, 64)


def at(size: int, curve: MemoryCurve | None = LINE, smallest: int = 1, ladder: tuple[int, ...] = POWERS) -> Pace:
    return Pace(ladder=ladder, size=size, curve=curve, smallest=smallest)


def finish(pace: Pace, steps: int, free: int | None = None, *, thrashed: bool = False) -> Pace:
    for _ in range(steps):
        pace = pace.before_step(free, free)
        pace = pace.after_step(pace.size, thrashed=thrashed)
    return pace


def train(
    pace: Pace, most: int, *, crawls: int | None = None, free: int | None = None, samples: int | None = None
) -> tuple[Pace, int]:
    """One step where ``most`` samples fit and sizes above ``crawls`` thrash; the new pace, and how many OOMs."""
    shortages = 0
    pace = pace.before_step(free, free)
    while (largest := pace.size if samples is None else max(balance(samples, pace.size))) > most:
        pace = pace.after_shortage(largest, free)
        shortages += 1
    thrashed = shortages > 0 or (crawls is not None and largest > crawls)
    return pace.after_step(largest, thrashed=thrashed), shortages


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    """Either kind of ladder, with or without a curve, at any of its sizes."""
    target = draw(st.integers(1, 500))
    size = draw(st.integers(1, target))
    ladder, patience = draw(st.sampled_from([(eager_ladder(target, size), 0), (compiled_ladder(size), CLEAN_STEPS)]))
    base, slope, more = (draw(st.integers(0, 10**6)) for _ in range(3))
    knots = ((0, base), (size, base + slope * size), (2 * size, base + (2 * slope + more) * size))
    curve = draw(st.sampled_from([None, MemoryCurve(allocated=knots, reserved=knots)]))
    return Pace(ladder, size, curve, draw(st.sampled_from([1, 2])), patience)


free_bytes = st.none() | st.integers(-(10**6), 10**10)


@pytest.mark.parametrize(
    ("target", "size", "ladder"),
    [
        (16, 8, (1, 2, 3, 4, 6, 8)),
        (16, 16, (1, 2, 3, 4, 6, 8, 16)),
        (16, 7, (1, 2, 3, 4, 6, 7)),
        (4, 9, (1, 2, 4, 9)),
        (1, 1, (1,)),
    ],
)
def test_the_eager_ladder_by_example(target, size, ladder):
    """The useful sizes up to the plan's, and the plan's."""
    assert eager_ladder(target, size) == ladder


@pytest.mark.parametrize(
    ("size", "ladder"), [(64, (16, 32, 64)), (86, (21, 43, 86)), (5, (2, 5)), (3, (3,)), (2, (2,)), (1, (1,))]
)
def test_the_compiled_ladder_by_example(size, ladder):
    """The size, its half and its quarter, without one sample unless that is the size."""
    assert compiled_ladder(size) == ladder


@given(st.integers(1, 10**5), st.integers(1, 10**5))
def test_a_compiled_step_sees_few_sizes(target, size):
    """All rungs together cut a batch into at most two sizes each."""
    pieces = {piece for rung in compiled_ladder(size) for piece in balance(target, rung)}
    assert len(pieces) <= 2 * COMPILED_SIZES


@pytest.mark.parametrize(
    ("ladder", "smallest", "rungs"),
    [
        ((16, 32, 64), 1, (1, 2, 4, 8, 16, 32, 64)),
        ((21, 43, 86), 1, (1, 2, 5, 10, 21, 43, 86)),
        ((21, 43, 86), 2, (2, 3, 5, 10, 21, 43, 86)),
        ((3,), 2, (2, 3)),
        ((1, 4), 2, (2, 3, 4)),
        ((1,), 2, (1,)),
    ],
)
def test_below_the_ladder_the_size_is_halved(ladder, smallest, rungs):
    """The way down goes on to the fewest samples that can run, by way of the fewest into which any batch divides."""
    assert at(ladder[-1], smallest=smallest, ladder=ladder).rungs == rungs


@pytest.mark.parametrize(
    ("failed", "curve", "free", "limits", "size"),
    [
        (64, LINE, 500, (1, 1), 32),  # the curve says 40
        (64, LINE, 419, (1, 1), 16),  # and 31 here
        (64, LINE, 5_000, (1, 1), 32),  # it says that 64 fit; three quarters, down to a rung
        (64, None, 5_000, (1, 1), 32),
        (43, LINE, 5_000, (1, 1), 32),  # a part of a balanced batch
        (3, LINE, 0, (1, 1), 1),
        (3, LINE, 0, (2, 2), 2),
        (4, LINE, 0, (2, 3), 3),  # an odd rest cannot be divided into twos
    ],
)
def test_the_size_after_an_oom_by_example(failed, curve, free, limits, size):
    """What the curve and the free memory allow, down to the next rung, but no size that the model cannot run."""
    smallest, least = limits
    pace = at(64, curve, smallest).after_shortage(failed, free, least)
    assert (pace.size, pace.reason) == (size, "out of memory")


@pytest.mark.parametrize(("failed", "smallest", "least"), [(1, 1, 1), (2, 2, 1), (3, 2, 3)])
def test_what_cannot_be_divided_further_is_refused(failed, smallest, least):
    """The caller's to report: the pace has no size for it."""
    with pytest.raises(InvalidArgument, match=f"a micro-batch of {failed} cannot be made smaller"):
        at(64, smallest=smallest).after_shortage(failed, None, least)


def test_a_curve_that_was_wrong_twice_is_not_asked_again():
    """Three quarters of what failed, then half each time: few attempts, however wrong the curve is."""
    sizes, pace = [], at(64, ladder=tuple(range(1, 65)))
    while pace.size > 1:
        pace = pace.after_shortage(pace.size, 10**6)
        sizes.append(pace.size)
    assert sizes == [48, 24, 12, 6, 3, 1]


@pytest.mark.parametrize(
    ("there", "free", "curve", "size", "reason"),
    [
        (740, 0, LINE, 64, None),  # 64 samples take 740: no headroom is left, and it stays
        (739, 740, LINE, 32, "less is free"),
        (739, 420, LINE, 32, "less is free"),
        (739, 419, LINE, 16, "less is free"),
        (739, None, LINE, 32, "less is free"),
        (0, 0, LINE, 1, "less is free"),
        (None, 0, LINE, 64, None),
        (0, 0, None, 64, None),
    ],
)
def test_the_size_before_a_step_by_example(there, free, curve, size, reason):
    """It is left only where it cannot fit, for the largest that fits with the headroom."""
    pace = at(64, curve).before_step(there, free)
    assert (pace.size, pace.reason) == (size, reason)


def test_an_oom_that_the_reading_explains_ends_with_its_cause():
    """Another process came in the middle of a step: once it has ended the planned size is back, without any wait."""
    short = at(64).before_step(740, 740).after_shortage(64, 500).after_step(32, thrashed=False)
    assert short.before_step(500, 500).size == 32
    assert short.before_step(740, 740).size == 64


def test_after_an_unexplained_oom_the_size_is_back_after_one_clean_step():
    """Not in the next step, and in the one after it."""
    short = at(64).after_shortage(64, 5_000).after_step(32, thrashed=False)
    assert short.before_step(5_000, 5_000).size == 32
    assert finish(short, 1, 5_000).size == 64


@pytest.mark.parametrize("curve", [LINE, None])
def test_a_size_that_fails_as_soon_as_it_is_back_waits_twice_as_long(curve):
    """1, 2, 4, ... clean steps, up to the longest wait."""
    pace, waits = at(64, curve), []
    for _ in range(13):
        pace, shortages = train(pace, 40, free=5_000)
        assert shortages > 0
        waits.append(0)
        while pace.size < 64:
            pace, shortages = train(pace, 40, free=5_000)
            assert shortages == 0
            waits[-1] += 1
    assert waits == [*(2**n for n in range(11)), LONGEST_WAIT, LONGEST_WAIT]


@pytest.mark.parametrize(
    ("steps", "size", "reason"), [("T", 64, None), ("T.T", 64, None), ("TT", 32, "thrash"), ("TTT", 32, "thrash"),
                                  ("TTTT", 16, "thrash"), ("TT.T", 32, "thrash")]
)  # fmt: skip
def test_thrash_in_two_steps_running_is_one_notch(steps, size, reason):
    """One step that thrashed may be chance, two running are not."""
    pace = at(64)
    for step in steps:
        pace = pace.after_step(pace.size, thrashed=step == "T")
    assert (pace.size, pace.reason) == (size, reason)


def test_after_thrash_the_size_is_back_after_clean_steps():
    """It costs no retry and does not end by itself: 20 steps at first, twice as many each time it thrashes again."""
    pace, waits = at(64, None), []
    for _ in range(8):
        pace = finish(pace, 2, thrashed=True)
        assert pace.size == 32
        waits.append(0)
        while pace.size < 64 and waits[-1] < 2_000:
            pace = finish(pace, 1)
            waits[-1] += 1
    assert waits == [CLEAN_STEPS * 2**n for n in range(7)] + [LONGEST_WAIT]


def test_the_step_in_which_memory_ended_does_not_count_as_thrash():
    """The allocator asks again before each OOM."""
    short = at(64, None).after_shortage(64, None).after_step(32, thrashed=True)
    assert short.thrashed_steps == 0
    assert finish(short, 1).size == 64


def test_a_compiled_model_grows_only_after_clean_steps():
    """After another process has ended the size grows 20 steps later; an unexplained OOM changes nothing before."""
    pace = Pace((16, 32, 64), 64, LINE, patience=CLEAN_STEPS)
    short = finish(pace.before_step(500, 500), CLEAN_STEPS, 500)
    assert finish(pace.before_step(500, 500), CLEAN_STEPS - 1, 5_000).before_step(5_000, 5_000).size == 32
    assert short.before_step(5_000, 5_000).size == 64
    assert pace.after_shortage(64, 5_000).after_step(32, thrashed=False).size == 64


@given(paces(), st.data(), free_bytes)
def test_an_oom_always_shrinks_and_never_below_what_runs(pace, data, free):
    """Whatever part of the size failed, the next one is a rung below it."""
    if pace.size > pace.rungs[0]:
        failed = data.draw(st.integers(pace.rungs[0] + 1, pace.size))
        size = pace.after_shortage(failed, free).size
        assert pace.rungs[0] <= size < failed
        assert size in pace.rungs


@given(paces(), free_bytes, free_bytes)
def test_before_a_step_it_settles_at_once(pace, there, free):
    """Asked twice with the same answer, the second time nothing changes; a size that fits is left alone."""
    after = pace.before_step(there, free)
    assert after.size <= pace.size
    assert after.before_step(there, free) is after
    if pace.curve is None or there is None or pace.curve.peak_reserved(pace.size) <= max(there, 0):
        assert after is pace


@settings(max_examples=15)
@given(paces(), st.integers(1, 50), st.integers(0, 2_000))
def test_memory_that_comes_back_is_used_again(pace, most, hard_steps):
    """After any hard time the plan's size is there again within the longest wait and a few steps."""
    most = max(most, pace.rungs[0])
    for _ in range(hard_steps):
        pace, _ = train(pace, most)
    for _ in range(LONGEST_WAIT + 2 * CLEAN_STEPS):
        pace, shortages = train(pace, pace.ladder[-1])
        assert shortages == 0
    assert pace.size == pace.ladder[-1]


class Training(RuleBasedStateMachine):
    """Any order of shortages, thrash, clean steps and neighbours, on any pace."""

    @initialize(pace=paces())
    def begin(self, pace):
        self.pace = self.before = pace

    def change(self, pace):
        """Take the new pace, and check what holds for every change."""
        self.before, self.pace = self.pace, pace
        assert (pace.ladder, pace.curve, pace.smallest) == (self.before.ladder, self.before.curve, self.before.smallest)
        if pace.size > self.before.size:
            assert pace.reason == "grown back"
        elif pace.size < self.before.size:
            assert pace.reason in ("out of memory", "thrash", "less is free")
        else:
            assert pace.reason == self.before.reason

    @precondition(lambda self: self.pace.size > self.pace.rungs[0])
    @rule(data=st.data(), free=free_bytes, times=st.integers(1, 4))
    def run_out(self, data, free, times):
        """Memory ends at some parts of a batch, and the step goes on: no later step begins below what it needed."""
        for _ in range(times):
            if self.pace.size > self.pace.rungs[0]:
                failed = data.draw(st.integers(self.pace.rungs[0] + 1, self.pace.size))
                self.change(self.pace.after_shortage(failed, free))
                assert self.pace.size < failed
        needed = self.pace.size
        self.change(self.pace.after_step(needed, thrashed=False))
        assert self.pace.size >= needed
        assert self.pace.goal >= needed

    @rule(there=free_bytes, free=free_bytes)
    def look(self, there, free):
        """What is free is read before a step: never more than the goal."""
        self.change(self.pace.before_step(there, free))
        assert self.pace.size <= self.pace.goal

    @rule()
    def thrash(self):
        self.change(self.pace.after_step(self.pace.size, thrashed=True))
        assert self.pace.size <= self.before.size

    @rule(count=st.sampled_from([1, 5, 20, 40]))
    def finish_steps(self, count):
        for _ in range(count):
            self.change(self.pace.before_step(None, None))
            self.change(self.pace.after_step(self.pace.size, thrashed=False))
            assert self.pace.size >= self.before.size

    @invariant()
    def is_within_bounds(self):
        """The size is a rung, and a wait is within its bounds."""
        assert self.pace.size in self.pace.rungs
        assert self.pace.goal in self.pace.rungs
        assert self.pace.shortage is None
        if ceiling := self.pace.ceiling:
            assert ceiling.ran < ceiling.failed <= self.pace.ladder[-1]
            assert 0 <= ceiling.left <= ceiling.wait <= LONGEST_WAIT
            assert Ceiling.model_validate_json(ceiling.model_dump_json()) == ceiling


Training.TestCase.settings = settings(stateful_step_count=20)
test_any_order_of_events = Training.TestCase
