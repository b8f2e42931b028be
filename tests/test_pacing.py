"""The size over time: down by what is needed, up one notch at a time, and quiet where nothing changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from autobatch.errors import InvalidArgument
from autobatch.planning.curve import MemoryCurve
from autobatch.planning.pacing import CLEAN_STEPS, COMPILED_SIZES, LONGEST_WAIT, Pace, compiled_ladder, eager_ladder
from autobatch.planning.planner import balance

LINE = MemoryCurve(allocated=((0, 100), (10, 200)), reserved=((0, 100), (10, 200)))  # 100 bytes and 10 a sample
POWERS = (1, 2, 4, 8, 16, 32, 64)


def at(size: int, curve: MemoryCurve | None = LINE, smallest: int = 1, ladder: tuple[int, ...] = POWERS) -> Pace:
    """A pace before its first step."""
    return Pace(ladder=ladder, size=size, curve=curve, smallest=smallest)


def finish(pace: Pace, steps: int, room: int | None = None, *, thrashed: bool = False) -> Pace:
    """So many steps, all alike."""
    for _ in range(steps):
        pace = pace.after_step(pace.size, room, thrashed=thrashed)
    return pace


def train(
    pace: Pace, most: int, *, crawls: int | None = None, room: int | None = None, samples: int | None = None
) -> tuple[Pace, int]:
    """One step where ``most`` samples fit and sizes above ``crawls`` thrash; the new pace, and how many OOMs."""
    shortages = 0
    pace = pace.before_step(room, room)
    while (largest := pace.size if samples is None else max(balance(samples, pace.size))) > most:
        pace = pace.after_shortage(largest, room)
        shortages += 1
    thrashed = shortages > 0 or (crawls is not None and largest > crawls)
    return pace.after_step(largest, room, thrashed=thrashed), shortages


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    """Either kind of ladder, with or without a curve, at any of its sizes."""
    target = draw(st.integers(1, 500))
    size = draw(st.integers(1, target))
    ladder = draw(st.sampled_from([eager_ladder(target, size), compiled_ladder(size)]))
    base, slope, more = (draw(st.integers(0, 10**6)) for _ in range(3))
    knots = ((0, base), (size, base + slope * size), (2 * size, base + (2 * slope + more) * size))
    curve = draw(st.sampled_from([None, MemoryCurve(allocated=knots, reserved=knots)]))
    pace = Pace(ladder=ladder, size=size, curve=curve, smallest=draw(st.sampled_from([1, 2])))
    return replace(pace, size=draw(st.sampled_from(pace.rungs)))


rooms = st.none() | st.integers(-(10**6), 10**10)


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


@pytest.mark.parametrize("make", [compiled_ladder, lambda size: eager_ladder(8, size)])
@pytest.mark.parametrize("size", [0, -1])
def test_no_ladder_leads_to_nothing(make, size):
    """A plan's size of no samples is refused."""
    with pytest.raises(InvalidArgument, match="at least one sample"):
        make(size)


@given(st.integers(1, 10**5), st.integers(1, 10**5))
def test_a_compiled_step_sees_few_sizes(target, size):
    """All rungs together cut a batch into at most two sizes each."""
    pieces = {piece for rung in compiled_ladder(size) for piece in balance(target, rung)}
    assert len(pieces) <= 2 * COMPILED_SIZES


@pytest.mark.parametrize(
    ("ladder", "size", "message"),
    [
        ((), 1, "a ladder must go up"),
        ((2, 2), 2, "a ladder must go up"),
        ((4, 2), 2, "a ladder must go up"),
        ((0, 2), 2, "a ladder must go up"),
        ((1, 2), 0, "from 1 to the plan's 2, not 0"),
        ((1, 2), 3, "from 1 to the plan's 2, not 3"),
    ],
)
def test_what_is_no_pace_is_refused(ladder, size, message):
    """A ladder ascends from at least one sample, and the size is not above it."""
    with pytest.raises(InvalidArgument, match=message):
        Pace(ladder=ladder, size=size)


@pytest.mark.parametrize(
    ("ladder", "smallest", "rungs"),
    [
        ((16, 32, 64), 1, (1, 2, 4, 8, 16, 32, 64)),
        ((21, 43, 86), 1, (1, 2, 5, 10, 21, 43, 86)),
        ((3,), 2, (1, 2, 3)),
        ((1, 4), 2, (1, 2, 4)),
        ((1,), 2, (1,)),
    ],
)
def test_below_the_ladder_the_size_is_halved(ladder, smallest, rungs):
    """The way down goes on to one sample, and by way of the smallest size that is sure to be taken."""
    assert at(ladder[-1], smallest=smallest, ladder=ladder).rungs == rungs


@pytest.mark.parametrize(
    ("failed", "curve", "room", "smallest", "size"),
    [
        (64, LINE, 500, 1, 32),  # the curve says 40
        (64, LINE, 419, 1, 16),  # and 31 here
        (64, LINE, 5_000, 1, 32),  # it says that 64 fit; three quarters, down to a rung
        (64, None, 5_000, 1, 32),
        (43, LINE, 5_000, 1, 32),  # a part of a balanced batch
        (3, LINE, 0, 1, 1),
        (3, LINE, 0, 2, 2),
        (2, LINE, 0, 2, 1),
    ],
)
def test_the_size_after_an_oom_by_example(failed, curve, room, smallest, size):
    """What the curve and the room allow, down to the next rung."""
    pace = at(64, curve, smallest).after_shortage(failed, room)
    assert (pace.size, pace.reason) == (size, "out of memory")


@pytest.mark.parametrize(
    ("there", "room", "curve", "size", "reason"),
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
def test_the_size_before_a_step_by_example(there, room, curve, size, reason):
    """It is left only where it cannot fit, for the largest that fits with the headroom."""
    pace = at(64, curve).before_step(there, room)
    assert (pace.size, pace.reason) == (size, reason)


def test_only_an_oom_leads_below_the_smallest_size():
    """A model that may refuse one sample is given two until two have failed, and gets two back."""
    nothing_there = at(64, smallest=2).before_step(0, 0)
    assert nothing_there.size == 2
    assert nothing_there.before_step(0, 0) is nothing_there
    assert finish(nothing_there, 10, thrashed=True).size == 2
    short = nothing_there.after_shortage(2, 0)
    assert short.size == 1
    assert short.before_step(0, 0) is short
    assert finish(short, 1 + CLEAN_STEPS).size == 2


@pytest.mark.parametrize(
    ("steps", "size", "reason"), [("T", 64, None), ("T.T", 64, None), ("TT", 32, "thrash"), ("TTT", 32, "thrash"),
                                  ("TTTT", 16, "thrash"), ("TT.T", 32, "thrash")]
)  # fmt: skip
def test_thrash_in_two_steps_running_is_one_notch(steps, size, reason):
    """One step that thrashed may be chance, two running are not."""
    pace = at(64)
    for step in steps:
        pace = pace.after_step(pace.size, None, thrashed=step == "T")
    assert (pace.size, pace.reason) == (size, reason)


def test_the_step_in_which_memory_ended_counts_for_nothing():
    """The allocator asks again before each OOM, so that step is neither one that thrashed nor a clean one."""
    short = at(64).after_shortage(64, 500)
    assert finish(short, 2, thrashed=True).size == short.size == 32
    assert finish(short, 3, thrashed=True).size == 16
    assert finish(short, CLEAN_STEPS).size == 32
    assert finish(short, CLEAN_STEPS + 1).size == 64


def test_it_grows_one_notch_after_clean_steps_with_room():
    """Not a step earlier, not where the curve says no, and not above the plan's size."""
    pace = at(16)
    assert finish(pace, CLEAN_STEPS - 1, 420).size == 16
    grown = finish(pace, CLEAN_STEPS, 420)
    assert (grown.size, grown.reason) == (32, "grown back")
    assert finish(pace, 1_000, 419).size == 16
    assert finish(pace, 1_000, 420).size == 32
    assert finish(pace, 1_000, None).size == 64
    assert finish(at(16, None), 2 * CLEAN_STEPS, 0).size == 64


def test_a_step_that_thrashed_starts_the_wait_again():
    """Clean steps count from the last one that was not."""
    pace = finish(finish(at(16), CLEAN_STEPS - 1), 1, thrashed=True)
    assert finish(pace, CLEAN_STEPS - 1).size == 16
    assert finish(pace, CLEAN_STEPS).size == 32


@pytest.mark.parametrize("trouble", ["out of memory", "thrash"])
def test_a_regained_size_that_fails_is_waited_for_twice_as_long(trouble):
    """Each failure on probation doubles the wait up to a bound; coming through it once makes it short again."""
    pace, waits = at(32, None), []
    for _ in range(9):
        grown = pace
        while grown.size != 64:
            grown = finish(grown, 1)
        waits.append(pace.wait)
        failed = finish(grown, 2, thrashed=True) if trouble == "thrash" else grown.after_shortage(64, None)
        assert (failed.size, failed.refused) == (32, 64)
        pace = replace(failed, is_short=False)
        assert finish(pace, pace.wait - 1).size == 32
        assert finish(pace, pace.wait).size == 64
    assert waits == [CLEAN_STEPS * 2**n for n in range(7)] + [LONGEST_WAIT] * 2
    through = finish(pace, pace.wait + CLEAN_STEPS)
    assert (through.size, through.refused, through.wait) == (64, None, CLEAN_STEPS)
    assert finish(pace, pace.wait + CLEAN_STEPS - 1).wait == LONGEST_WAIT


def test_smaller_sizes_do_not_shorten_the_wait_for_one_that_failed():
    """On the way up again each notch takes the usual wait, the one that was refused its own."""
    pace = finish(at(32, None), CLEAN_STEPS).after_shortage(64, None).after_shortage(32, None)
    assert (pace.size, pace.refused) == (16, 64)
    pace = finish(pace, 1 + CLEAN_STEPS)
    assert pace.size == 32
    assert finish(pace, 2 * CLEAN_STEPS - 1).size == 32
    assert finish(pace, 2 * CLEAN_STEPS).size == 64


@given(paces(), st.data(), rooms)
def test_an_oom_always_shrinks_and_never_to_nothing(pace, data, room):
    """Whatever part of the size failed, the next one is a rung below it."""
    if pace.size > 1:
        failed = data.draw(st.integers(2, pace.size))
        size = pace.after_shortage(failed, room).size
        assert 1 <= size < failed
        assert size in pace.rungs


@given(paces(), rooms)
def test_failing_again_and_again_ends_at_one_sample(pace, room):
    """A step that no size can save comes to one sample within a few attempts."""
    attempts = 0
    while pace.size > 1:
        pace = pace.after_shortage(pace.size, room)
        attempts += 1
    assert attempts <= 16  # 500 by halves or quarters, each down to a rung


@given(paces(), rooms, rooms)
def test_before_a_step_it_never_grows_and_settles_at_once(pace, there, room):
    """Asked twice with the same answer, the second time nothing changes; a size that fits is left alone."""
    after = pace.before_step(there, room)
    assert after.size <= pace.size
    assert after.before_step(there, room).size == after.size
    if pace.curve is None or there is None or pace.curve.peak_reserved(pace.size) <= max(there, 0):
        assert after is pace


@settings(max_examples=15)
@given(paces(), st.data())
def test_constant_memory_costs_few_ooms(pace, data):
    """Over 3,000 steps memory ends a few times at first, then ever more seldom, and most steps are full."""
    pace = replace(pace, curve=None, smallest=1)
    most = data.draw(st.integers(1, pace.ladder[-1]))
    crawls = data.draw(st.none() | st.integers(1, most))
    best = max(rung for rung in pace.rungs if rung <= (crawls or most))
    notches = sum(rung <= best for rung in pace.rungs)
    shortages, changes, full = 0, 0, 0
    for _ in range(3_000):
        before = pace.size
        pace, short = train(pace, most, crawls=crawls)
        shortages, changes, full = shortages + short, changes + (pace.size != before), full + (before == best)
    assert shortages <= 12 + 12  # the way down, then a doubled wait each time: 20, 40, ... 1280, 1280
    assert changes <= notches * 24
    if best == pace.ladder[-1]:
        assert pace.size == best
    assert full >= 3_000 - 24 * (1 + notches) * (CLEAN_STEPS + 2) or best == 1


def test_small_batches_between_large_ones_prove_nothing():
    """Most batches are small: the large one still meets memory's end seldom, as the wait doubles each time."""
    pace, shortages = at(64, curve=None), 0
    for step in range(10_000):
        pace, short = train(pace, 40, samples=64 if step % 60 == 0 else 8)
        shortages += short
    assert shortages <= 14


def test_a_size_on_probation_falls_back_to_the_one_that_ran():
    """Not to its half: 48 failed, and 32 ran just before."""
    pace = finish(at(32, curve=None, ladder=(1, 8, 16, 32, 48, 64)), CLEAN_STEPS)
    assert pace.size == 48
    assert pace.after_shortage(48, None).size == 32
    assert pace.after_shortage(30, None).size == 8  # a smaller micro-batch failed: the growth was not at fault


def test_before_a_step_the_optimizers_floor_is_not_answered_with_small_sizes():
    """What one sample needs as much as many is no reason to go down."""
    flat = MemoryCurve(allocated=((0, 100), (32, 100), (64, 200)), reserved=((0, 100), (32, 100), (64, 200)))
    assert at(64, curve=flat).before_step(90, 90).size == 32


@settings(max_examples=15)
@given(paces(), st.integers(1, 50), st.integers(0, 2_000))
def test_memory_that_comes_back_is_used_again(pace, most, hard_steps):
    """After any hard time the plan's size is there again within the longest wait and one wait a notch."""
    for _ in range(hard_steps):
        pace, _ = train(pace, most)
    for _ in range(LONGEST_WAIT + (len(pace.rungs) + 1) * CLEAN_STEPS + 1):
        pace, shortages = train(pace, pace.ladder[-1])
        assert shortages == 0
    assert pace.size == pace.ladder[-1]


@given(paces(), st.integers(0, 10**9), st.integers(0, 10**6))
def test_a_neighbour_within_the_headroom_changes_nothing(pace, room, headroom):
    """Where what is there moves between the two thresholds, the size only ever grows, and then stays."""
    if pace.curve is None:
        return
    pace = pace.before_step(room, room)
    sizes = [pace.size]
    for step in range(100):
        pace = pace.before_step(room + headroom * (step % 2), room)
        pace = pace.after_step(pace.size, room, thrashed=False)
        sizes.append(pace.size)
    assert sizes == sorted(sizes)


class Training(RuleBasedStateMachine):
    """Any order of shortages, thrash, clean steps and neighbours, on any pace."""

    @initialize(pace=paces())
    def begin(self, pace):
        """A pace, and the steps since it last changed its size."""
        self.pace, self.before, self.still = pace, pace, 0

    def change(self, pace):
        """Take the new pace, and check what holds for every change."""
        self.before, self.pace = self.pace, pace
        assert (pace.ladder, pace.curve, pace.smallest) == (self.before.ladder, self.before.curve, self.before.smallest)
        if pace.size > self.before.size:
            rungs = pace.rungs
            assert pace.reason == "grown back"
            assert rungs.index(pace.size) == rungs.index(self.before.size) + 1
            assert self.still >= CLEAN_STEPS
            assert pace.refused is None or pace.size < pace.refused or self.still >= pace.wait
        elif pace.size < self.before.size:
            assert pace.reason in ("out of memory", "thrash", "less is free")
        else:
            assert pace.reason == self.before.reason

    @precondition(lambda self: self.pace.size > 1)
    @rule(data=st.data(), room=rooms)
    def run_out(self, data, room):
        """Memory ends at some part of a batch."""
        failed = data.draw(st.integers(2, self.pace.size))
        self.still = 0
        self.change(self.pace.after_shortage(failed, room))
        assert self.pace.size < failed

    @rule(there=rooms, room=rooms)
    def look(self, there, room):
        """What is free is read before a step."""
        self.change(self.pace.before_step(there, room))
        self.still = self.still if self.pace.size == self.before.size else 0
        assert self.pace.size <= self.before.size

    @rule(room=rooms)
    def thrash(self, room):
        """A step thrashes."""
        self.still = 0
        self.change(self.pace.after_step(self.pace.size, room, thrashed=True))
        lower = [rung for rung in self.pace.rungs if rung < self.before.size]
        assert self.pace.size in (self.before.size, *lower[-1:])

    @rule(count=st.sampled_from([1, 5, 20, 40]), room=rooms)
    def finish_steps(self, count, room):
        """Some steps go well."""
        for _ in range(count):
            self.still += not self.pace.is_short
            self.change(self.pace.after_step(self.pace.size, room, thrashed=False))
            assert self.pace.size >= self.before.size
            self.still = self.still if self.pace.size == self.before.size else 0

    @invariant()
    def is_within_bounds(self):
        """The size is a rung, and the wait is within its bounds."""
        assert self.pace.size in self.pace.rungs
        assert 1 <= self.pace.size <= self.pace.ladder[-1]
        assert CLEAN_STEPS <= self.pace.wait <= LONGEST_WAIT
        assert self.pace.refused is not None or self.pace.wait == CLEAN_STEPS


Training.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
test_any_order_of_events = Training.TestCase
