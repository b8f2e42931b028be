"""The proof for steps in two passes: memory may end at any operation of either, or of the loss between them."""

import random

import pytest
from faults import OUTCOMES, WHOLE_BATCH_CASES, InterruptAt, Judge, Tally, count_before_update, places_of, prove
from sampling import IN_PROOF

from autobatch.testing import oom_at

pytestmark = pytest.mark.usefixtures("quiet_log")

STRIDE = 1 if IN_PROOF else 30

BY_NAME = pytest.mark.parametrize("case", WHOLE_BATCH_CASES, ids=lambda case: case.name)


@BY_NAME
@pytest.mark.parametrize("second", [False, True], ids=["first step", "second step"])
@pytest.mark.timeout(1800)
def test_an_oom_at_any_operation(case, second):
    """Every fault ends bit for bit as a step in its final micro-batches, or as nothing."""
    tally = prove(case, STRIDE, earlier_steps=int(second), earlier_gradients=second)
    print(f"\n{case.name}: {tally}")  # noqa: T201 - the numbers are the proof
    assert not tally.wrong, tally.wrong[:5]
    assert min(tally.places[place] for place in ("forward", "loss", "backward")) > 0


@BY_NAME
def test_memory_that_ends_twice(case):
    """A second shortage, anywhere after the first, may end the step; whatever is committed is right."""
    places = places_of(case, earlier_gradients=True)
    before_update = [number for number, place in enumerate(places, 1) if place in ("forward", "loss", "backward")]
    draw, judge, tally = random.Random(3), Judge(case, earlier_gradients=True), Tally()
    for _ in range(8):
        first = draw.choice(before_update)
        second = first + draw.randint(1, len(before_update) // 2)
        tally.add(places[first - 1], judge.outcome(oom_at(first, second)))
    assert not tally.wrong, tally.wrong


@BY_NAME
def test_an_interrupt_undoes_the_step(case):
    """Ctrl-C anywhere in the two passes comes out, and the step has not happened."""
    count = count_before_update(case, earlier_steps=1, earlier_gradients=True)
    judge = Judge(case, earlier_steps=1, earlier_gradients=True)
    for position in range(1, count, max(count // 10, 1)):
        outcome = judge.outcome(InterruptAt(position))
        assert outcome == "raised" or outcome not in OUTCOMES, position
        assert outcome in OUTCOMES, outcome
