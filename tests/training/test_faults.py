"""The proof: a step may run out of memory at any operation, and its result is never wrong."""

import random

import pytest
import torch
from faults import (
    CASES,
    OUTCOMES,
    InterruptAt,
    Judge,
    Tally,
    Training,
    count_before_update,
    places_of,
    prove,
    spread_positions,
)
from sampling import IN_PROOF, sample

from autobatch.testing import oom_at

pytestmark = [
    pytest.mark.usefixtures("quiet_log"),
    # torch says so once a process, at the first sparse tensor that an optimizer makes.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

STRIDE = 1 if IN_PROOF else 12
"""Every how many operations of each place memory ends in the large proof."""

SMALL = CASES[0]
BY_NAME = pytest.mark.parametrize("case", sample(CASES, 3), ids=lambda case: case.name)
STEPS = [(case, second) for case in CASES for second in (False, True)]


@pytest.fixture(scope="module")
def total(request):
    """The sum over all cases, printed at the end."""
    tally = Tally()
    yield tally
    if sum(tally.places.values()):
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nall {sum(tally.places.values())} faults: {tally}")  # noqa: T201 - the numbers are the proof


def tell(capsys, name, tally, total):
    """Print a line and add to the total; nothing may be wrong."""
    total.merge(tally)
    with capsys.disabled():
        print(f"\n{name}: {tally}")  # noqa: T201 - the numbers are the proof
    assert not tally.wrong, tally.wrong[:5]


def test_an_oom_at_any_operation_of_a_step(capsys, total):
    """One model of the proof below, small enough for every run: forward, backward, clipping, optimizer."""
    tally = prove(SMALL)
    tell(capsys, SMALL.name, tally, total)
    assert min(tally.places[place] for place in ("forward", "backward", "clip", "optimizer")) >= 4
    assert min(tally.outcomes[outcome] for outcome in ("restarted", "undone", "reported")) >= 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "second"), sample(STEPS, 3), ids=lambda value: getattr(value, "name", f"second step: {value}")
)
def test_the_proof(case, second, capsys, total):
    """Out of memory anywhere: bitwise the committed micro-batches' step, or bitwise nothing, or CannotRetry says so."""
    tally = prove(case, STRIDE, earlier_steps=int(second), earlier_gradients=second)
    tell(capsys, f"{case.name}, {'second' if second else 'first'} step", tally, total)
    assert tally.outcomes["restarted"] >= 20 // STRIDE


def test_a_sample_of_the_operations_has_some_in_each_place():
    """In places that are shorter than the stride, too; beginning anywhere, all of them together are every operation."""
    places = ["forward"] * 9 + ["backward"] * 6 + ["clip"] * 4 + ["optimizer"]
    parts = [spread_positions(places, 4, first) for first in range(4)]
    assert parts[1] == [2, 6, 11, 15, 17, 20]
    assert all({places[position - 1] for position in part} == set(places) for part in parts)
    assert {position for part in parts for position in part} == set(range(1, 21))
    assert spread_positions(places, 1, 3) == [*range(1, 21)]


@BY_NAME
def test_memory_that_ends_twice(case, capsys, total):
    """A second shortage, anywhere after the first or in its retry, changes the sizes and nothing else."""
    places = places_of(case, earlier_gradients=True)
    before_update = [number for number, place in enumerate(places, 1) if place in ("forward", "backward")]
    draw, judge, tally = random.Random(3), Judge(case, earlier_gradients=True), Tally()
    for _ in range(8):
        first = draw.choice(before_update)
        second = first + draw.randint(1, len(before_update) // 2)
        outcome = judge.outcome(oom_at(first, second))
        tally.add(places[first - 1], outcome)
    tell(capsys, f"{case.name}, twice", tally, total)


@BY_NAME
def test_memory_that_never_comes_back(case, capsys, total):
    """From some operation on every attempt fails, down to one sample: DoesNotFit, and everything is as before."""
    places = places_of(case, earlier_steps=1, earlier_gradients=True)
    fitting = [number for number, place in enumerate(places, 1) if place in ("forward", "backward", "clip")]
    judge, tally = Judge(case, earlier_steps=1, earlier_gradients=True), Tally()
    for first in fitting[:: len(fitting) // 5]:
        outcome = judge.outcome(oom_at(*range(first, first + 5000)))
        right = outcome == "undone" or outcome not in OUTCOMES
        tally.add(places[first - 1], outcome if right else f"{outcome} at {first}")
    tell(capsys, f"{case.name}, for good", tally, total)


@BY_NAME
def test_an_interrupt_undoes_the_step(case, capsys, total):
    """Ctrl-C at an operation before the optimizer's own: it comes out, and the step has not happened."""
    count = count_before_update(case, earlier_steps=1, earlier_gradients=True)
    judge, tally = Judge(case, earlier_steps=1, earlier_gradients=True), Tally()
    for position in range(1, count, max(count // 10, 1)):
        outcome = judge.outcome(InterruptAt(position))
        tally.add("forward", outcome if outcome == "raised" or outcome not in OUTCOMES else f"{outcome} at {position}")
    tell(capsys, f"{case.name}, interrupted", tally, total)


def test_the_proof_sees_what_is_wrong():
    """The judge itself: one bit in a parameter, a buffer or a generator is found."""
    judge = Judge(SMALL)
    for change in (
        lambda training: training.model.head.weight.data.view(-1)[0].mul_(1 + 1e-6),
        lambda training: training.model.norm.running_mean.add_(1e-6),
        lambda training: torch.rand(1),
    ):
        training = Training(SMALL)
        result = training.runner.step(training.batch)
        assert judge._judge_committed(training, result) == "committed"
        change(training)
        assert "differ at" in judge._judge_committed(training, result)
