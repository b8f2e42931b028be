"""The rule by which steps run uncounted: what was counted must cover them, again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.planning.counted_growth import COUNT_EVERY, CountedGrowth

LIMIT = 1000
sizes = st.tuples(st.integers(0, 2), st.integers(0, 2))
kinds = st.sampled_from(["train", "eval"])
counted = st.tuples(st.just("count"), kinds, sizes, st.integers(0, 50), st.integers(0, 500), st.sampled_from([0, 400]))
asked = st.tuples(st.just("ask"), kinds, sizes, st.integers(0, 900))
shortages = st.tuples(st.just("shortage"), kinds, sizes)


def is_within(smaller, larger):
    """Whether no size is larger."""
    return all(one <= other for one, other in zip(smaller, larger, strict=True))


@dataclass
class History:
    """All that was counted, and the rule beside it."""

    rule: CountedGrowth = field(default_factory=CountedGrowth)
    rows: list = field(default_factory=list)

    def count(self, kind, size, held, growth, left):
        """A step that is counted; where it left much behind it says nothing."""
        self.rule.add(kind, size, held_bytes=held, peak_bytes=held + growth, left_bytes=left)
        if left <= growth / 100:
            self.rows.append((kind, size, growth))

    def agree(self, kind, size, growth=100, times=1):
        """So many steps took this."""
        for _ in range(times):
            self.count(kind, size, 0, growth, 0)

    def covers(self, kind="train", size=(1, 1), held=0, limit=LIMIT):
        """Whether such a step runs uncounted; one asked for alone is never the one in so many."""
        return any(self.rule.covers(kind, size, held, limit) for _ in range(2))


@given(st.lists(st.one_of(counted, asked, shortages), max_size=60))
def test_what_runs_uncounted_was_counted_and_fits(actions):
    """Four steps of its kind were counted, one no smaller; the most that any up to its sizes took fits."""
    history = History()
    for action, kind, size, *rest in actions:
        if action == "count":
            history.count(kind, size, *rest)
        elif action == "shortage":
            history.rule.add_shortage(kind, size)
        elif history.rule.covers(kind, size, rest[0], LIMIT):
            alike = [(counted, growth) for of_kind, counted, growth in history.rows if of_kind == kind]
            assert len(alike) >= 4
            assert any(is_within(size, counted) for counted, _ in alike)
            assert rest[0] + max(growth for counted, growth in alike if is_within(counted, size)) <= LIMIT


@given(st.integers(0, 3 * COUNT_EVERY), st.integers(1, 5))
def test_one_in_so_many_is_counted_of_each_kind(steps, other_every):
    """However steps of two kinds alternate, none of either goes uncounted longer."""
    history, in_a_row = History(), {"train": 0, "eval": 0}
    for kind in in_a_row:
        history.agree(kind, (1, 1), times=4)
    for step in range(steps):
        kind = "train" if step % other_every else "eval"
        in_a_row[kind] = in_a_row[kind] + 1 if history.rule.covers(kind, (1, 1), 0, LIMIT) else 0
        assert in_a_row[kind] < COUNT_EVERY


@pytest.mark.parametrize("period", [2, 8, 10, 16, 30, 32, 64, 100])
def test_what_is_done_every_so_many_steps_is_met(period):
    """A period that people choose does not hide for ever between the counted steps."""
    history = History()
    history.agree("train", (1, 1), times=4)
    met = [step for step in range(period * COUNT_EVERY) if not history.rule.covers("train", (1, 1), 0, LIMIT)]
    assert {step % period for step in met} == set(range(period))


def test_three_that_agree_with_the_largest_are_needed():
    """Not before, and a larger one begins anew."""
    history = History()
    for _ in range(4):
        assert not history.covers()
        history.agree("train", (1, 1))
    assert history.covers()
    assert history.covers(size=(0, 1))
    assert not history.covers(size=(1, 2))
    assert not history.covers(kind="eval")


def test_each_surprise_doubles_how_many_must_agree():
    """A counted step that took more, and a shortage, show that sizes do not decide alone."""
    history = History()
    history.agree("train", (1, 1), times=4)
    for needed, surprise in ((6, 102), (12, None), (24, 150)):
        if surprise is None:
            history.rule.add_shortage("train", (1, 1))
        else:
            history.agree("train", (1, 1), growth=surprise)
        history.agree("train", (1, 1), times=needed - 1)
        assert not history.covers()
        history.agree("train", (1, 1))
        assert history.covers()
    assert history.covers(held=850)
    assert not history.covers(held=851)


def test_a_larger_step_that_took_less_is_a_surprise_too():
    """The most that was taken stays, and more must agree."""
    history = History()
    history.agree("train", (1, 1), growth=300)
    history.agree("train", (2, 2), growth=200, times=6)
    assert not history.covers(size=(2, 2))
    history.agree("train", (2, 2), growth=200)
    assert history.covers(size=(2, 2), held=700)
    assert not history.covers(size=(2, 2), held=701)


def test_a_rounding_of_the_allocator_is_no_surprise():
    """One percent more agrees, and is the most from then on."""
    history = History()
    history.agree("train", (1, 1), growth=100)
    history.agree("train", (1, 1), growth=101, times=3)
    assert history.covers(held=899)
    assert not history.covers(held=900)


def test_a_step_that_leaves_memory_behind_says_nothing():
    """It is no example of those that follow, and from then on steps are counted until they leave nothing."""
    history = History()
    history.count("train", (1, 1), 0, 500, 400)
    history.agree("train", (1, 1), times=4)
    assert history.covers(held=900)
    history.count("train", (1, 1), 0, 100, 50)
    assert not history.covers()
    history.agree("train", (1, 1), times=3)
    assert history.covers(held=900)


def test_what_was_held_before_the_last_counted_step_is_held_now():
    """What uncounted steps make is not seen until then."""
    history = History()
    for _ in range(4):
        history.count("train", (1, 1), 500, 100, 0)
    assert history.covers(held=0, limit=600)
    assert not history.covers(held=0, limit=599)


def test_no_more_is_remembered_than_is_needed():
    """Kinds and sizes that never come back do not add up."""
    history = History()
    for number in range(1000):
        history.agree(number, (1, 1))
        history.agree("one", (number, -number))
    assert len(history.rule._kinds) <= 64
    assert all(len(rows) <= 8 for rows in history.rule._kinds.values())
