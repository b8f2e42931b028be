"""The choice of blocks: what is predicted, in which order choices come, and what exhaustive search finds."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.strategies.choice import BlockRun, again_seconds, choices, cost_of, predict_peak, useful_blocks

pytestmark = pytest.mark.quick


def make_run(number: int, saved: int = 100, flops: int = 10, **changes) -> BlockRun:
    given = {
        "block": f"blocks.{number}",
        "kind": "Block",
        "saved_bytes": saved,
        "input_bytes": 10,
        "keeps_input": True,
        "again_bytes": saved + 20,
        "flops": flops,
        "seconds": 0.1,
    }
    return BlockRun(**{**given, **changes})


def test_equal_blocks_are_counted_and_early_ones_are_recomputed_first():
    """The recomputation of a late block falls on the peak, so it saves less."""
    runs = [make_run(number) for number in range(24)]
    assert [*choices(runs)] == [tuple(f"blocks.{i}" for i in range(count)) for count in range(1, 25)]
    early, late = (predict_peak(runs, [runs[place].block], 0) for place in (0, 23))
    assert early < late


def test_one_slow_call_of_equal_blocks_does_not_decide_what_they_take():
    """Such as the first one, or one beside another process."""
    runs = [make_run(number, seconds=2.0 if number == 1 else 0.1) for number in range(5)]
    runs.append(make_run(5, flops=20, seconds=0.4))
    assert again_seconds(runs, ["blocks.0", "blocks.1", "blocks.5"]) == pytest.approx(0.6)


@given(st.lists(st.tuples(st.integers(20, 1000), st.integers(0, 50)), min_size=1, max_size=8))
def test_choices_come_in_the_order_of_their_recomputation(sizes):
    """Each set of kinds and counts once, the last one all useful blocks."""
    runs = [make_run(number, saved, flops) for number, (saved, flops) in enumerate(sizes)]
    found = [*choices(runs)]
    costs = [cost_of(runs, chosen) for chosen in found]
    assert costs == sorted(costs)
    assert len({*found}) == len(found)
    assert found[-1] == tuple(useful_blocks(runs))


def test_many_unlike_blocks_do_not_make_endless_choices():
    """Alike blocks then count as one kind, so that the choices stay few."""
    runs = [make_run(number, 1000 + 13 * number, 7 + number) for number in range(200)]
    found = [*choices(runs)]
    assert len(found) <= 20_000
    assert len(found[-1]) == 200


def test_a_block_that_saves_no_more_than_its_input_is_never_recomputed():
    """A checkpoint keeps the input, which plain training may not need."""
    runs = [make_run(0), make_run(1, saved=10, keeps_input=False)]
    assert useful_blocks(runs) == ["blocks.0"]
    assert [*choices(runs)] == [("blocks.0",)]


def test_an_input_that_the_block_before_keeps_is_counted_once():
    """Recomputing that block makes the input the next one's own."""
    runs = [make_run(0), make_run(1, fed_by="blocks.0")]
    held = {chosen: predict_peak(runs, chosen, 0) for chosen in [(), ("blocks.1",), ("blocks.0", "blocks.1")]}
    assert held == {(): 230, ("blocks.1",): 230, ("blocks.0", "blocks.1"): 140}


@pytest.mark.parametrize("head", [0, 500])
def test_a_prediction_is_the_largest_of_its_moments(head):
    """Recomputing more never makes the part after the last block hold more."""
    runs = [make_run(number, 100 + number) for number in range(5)]
    for taken in product((False, True), repeat=5):
        chosen = [run.block for run, is_chosen in zip(runs, taken, strict=True) if is_chosen]
        held = sum(10 + (0 if run.block in chosen else run.saved_bytes) for run in runs)
        assert predict_peak(runs, chosen, head) >= held + head
