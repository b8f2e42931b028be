"""How often gradients of sharded parameters are summed: chosen by trials, and taken back where memory is short."""

import pytest
from builders.plans import make_plan

from autobatch.planning.pacing import CLEAN_STEPS, LONGEST_WAIT
from autobatch.planning.summing import SummingPace, choose_summing
from autobatch.records import IN_EACH, SUMMINGS, Trial

pytestmark = pytest.mark.quick

_, ONCE, GATHERED = SUMMINGS


def make_trials(*seconds, peaks=(100, 130, 150), outcomes=("fits",) * 3):
    measured = zip(SUMMINGS, seconds, peaks, outcomes, strict=False)
    return {
        summing: Trial(micro_batch_size=4, outcome=outcome, seconds=one, peak_reserved=peak)
        for summing, one, peak, outcome in measured
    }


@pytest.mark.parametrize(
    ("seconds", "outcomes", "chosen"),
    [
        ((), (), IN_EACH),
        ((1.0,), ("fits",), IN_EACH),
        ((1.0, 0.7, 0.6), ("fits", "fits", "fits"), GATHERED),
        ((1.0, 0.7, 0.69), ("fits", "fits", "fits"), ONCE),
        ((1.0, 1.09, 1.3), ("fits", "fits", "fits"), ONCE),
        ((1.0, 1.2, 1.2), ("fits", "fits", "fits"), IN_EACH),
        ((1.0, 1.2, 0.8), ("fits", "fits", "fits"), GATHERED),
        ((1.0, 0.7, 0.6), ("fits", "fits", "oom"), ONCE),
        ((1.0, 0.7), ("fits", "thrash"), IN_EACH),
    ],
)
def test_the_rarest_sums_that_fit_and_are_no_slower_are_chosen(seconds, outcomes, chosen):
    """A larger need of memory has to pay; a difference that the clock cannot see is none."""
    assert choose_summing(make_trials(*seconds, outcomes=outcomes)) == chosen


def test_a_step_takes_the_rarest_sums_for_which_there_is_memory():
    """By the trials, beside what its micro-batches need; and never rarer ones than planned."""
    pace = SummingPace.of(make_plan(summing=GATHERED, summing_trials=make_trials(1.0, 0.7, 0.6)))
    assert [pace.choose(1000, most) for most in (None, 1050, 1049, 1030, 1029, 900)] == [
        *(GATHERED, GATHERED, ONCE, ONCE, IN_EACH, IN_EACH)
    ]
    once = SummingPace.of(make_plan(summing=ONCE, summing_trials=make_trials(1.0, 0.7, 0.6)))
    assert once.choose(1000, None) == ONCE
    assert SummingPace.of(make_plan()).choose(1000, None) == IN_EACH


def test_a_shortage_is_followed_by_a_wait():
    """Twice as long after each, up to a limit; then the plan's sums are back."""
    pace = SummingPace.of(make_plan(summing=ONCE, summing_trials=make_trials(1.0, 0.7)))
    for wait in (CLEAN_STEPS, 2 * CLEAN_STEPS, 4 * CLEAN_STEPS):
        pace = pace.after_shortage()
        for _ in range(wait):
            assert pace.choose(0, None) == IN_EACH
            pace = pace.after_step()
        assert pace.choose(0, None) == ONCE
    for _ in range(20):
        pace = pace.after_shortage()
    assert pace.left == LONGEST_WAIT
