"""The choice of blocks: what is predicted, in which order choices come, and what exhaustive search finds."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.strategies.choice import (
    BlockRun,
    WayRun,
    again_seconds,
    choices,
    cost_of,
    even_out,
    predict_peak,
    useful_ways,
    whole,
)

pytestmark = pytest.mark.quick


WHOLE = ["checkpoint"]
BOTH = ["checkpoint", "selective"]


def make_run(number: int, saved: int = 100, flops: int = 10, **changes) -> BlockRun:
    given = {
        "block": f"blocks.{number}",
        "kind": "Block",
        "saved_bytes": saved,
        "input_bytes": 10,
        "keeps_input": True,
        "again_bytes": saved + 20,
        "again_seconds": 0.1,
        "flops": flops,
        "ways": {"checkpoint": WayRun(kept_bytes=0, again_bytes=saved + 20, seconds=0.1)},
    }
    return BlockRun(**{**given, **changes})


def test_equal_blocks_are_counted_and_early_ones_are_recomputed_first():
    """The recomputation of a late block falls on the peak, so it saves less."""
    runs = [make_run(number) for number in range(24)]
    assert [*choices(runs, WHOLE)] == [whole(f"blocks.{i}" for i in range(count)) for count in range(1, 25)]
    early, late = (predict_peak(runs, whole([runs[place].block]), 0) for place in (0, 23))
    assert early < late


@given(st.lists(st.tuples(st.integers(20, 1000), st.integers(0, 50)), min_size=1, max_size=8))
def test_choices_come_in_the_order_of_their_recomputation(sizes):
    """Each set of kinds and counts once, the last one all useful blocks."""
    runs = [make_run(number, saved, flops) for number, (saved, flops) in enumerate(sizes)]
    found = [*choices(runs, WHOLE)]
    costs = [cost_of(runs, chosen) for chosen in found]
    assert costs == sorted(costs)
    assert len({tuple(chosen) for chosen in found}) == len(found)
    assert found[-1] == whole(useful_ways(runs, WHOLE))


def test_many_unlike_blocks_do_not_make_endless_choices():
    """Alike blocks then count as one kind, so that the choices stay few."""
    runs = [make_run(number, 1000 + 13 * number, 7 + number) for number in range(200)]
    found = [*choices(runs, WHOLE)]
    assert len(found) <= 20_000
    assert len(found[-1]) == 200


def test_a_block_that_saves_no_more_than_its_input_is_never_recomputed():
    """A checkpoint keeps the input, which plain training may not need."""
    runs = [make_run(0), make_run(1, saved=10, keeps_input=False)]
    assert useful_ways(runs, WHOLE) == {"blocks.0": WHOLE}
    assert [*choices(runs, WHOLE)] == [whole(["blocks.0"])]


def test_an_input_that_the_block_before_keeps_is_counted_once():
    """Recomputing that block makes the input the next one's own."""
    runs = [make_run(0), make_run(1, fed_by="blocks.0")]
    held = {chosen: predict_peak(runs, whole(chosen), 0) for chosen in [(), ("blocks.1",), ("blocks.0", "blocks.1")]}
    assert held == {(): 230, ("blocks.1",): 230, ("blocks.0", "blocks.1"): 140}


@pytest.mark.parametrize("head", [0, 500])
def test_a_prediction_is_the_largest_of_its_moments(head):
    """Recomputing more never makes the part after the last block hold more."""
    runs = [make_run(number, 100 + number) for number in range(5)]
    for taken in product((False, True), repeat=5):
        chosen = [run.block for run, is_chosen in zip(runs, taken, strict=True) if is_chosen]
        held = sum(10 + (0 if run.block in chosen else run.saved_bytes) for run in runs)
        assert predict_peak(runs, whole(chosen), head) >= held + head


def make_both(number: int, whole_seconds: float, selective_seconds: float, **changes) -> BlockRun:
    again = 20 + changes.get("saved", 100)
    ways = {
        "checkpoint": WayRun(kept_bytes=0, again_bytes=again, seconds=whole_seconds),
        "selective": WayRun(kept_bytes=40, again_bytes=again, seconds=selective_seconds),
    }
    return make_run(number, ways=ways, again_seconds=whole_seconds, **changes)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), min_size=1, max_size=4))
def test_every_way_of_each_block_is_among_the_choices_the_cheapest_first(times):
    """As the product of all ways of unlike blocks; a way that saves less and costs no less is left out."""
    runs = [make_both(i, whole, part, flops=10 + i, saved=100 + i) for i, (whole, part) in enumerate(times)]
    found = [*choices(runs, BOTH)]
    costs = [cost_of(runs, chosen) for chosen in found]
    assert costs == pytest.approx(sorted(costs))
    each = [(None, "checkpoint", "selective") if part < whole else (None, "checkpoint") for whole, part in times]
    every = {tuple((f"blocks.{i}", way) for i, way in enumerate(ways) if way) for ways in product(*each)}
    assert {tuple(chosen.items()) for chosen in found} == every - {()}


def test_the_first_blocks_of_a_kind_are_recomputed_whole_and_the_next_selectively():
    """The later a block, the less its recomputation saves."""
    runs = [make_both(number, 4.0, 1.0) for number in range(4)]
    found = [tuple(chosen.values()) for chosen in choices(runs, BOTH)]
    assert len(found) == 14
    assert ("checkpoint", "selective", "selective") in found
    assert all([*ways] == sorted(ways) for ways in found)
    peaks = [predict_peak(runs, chosen, 0) for chosen in ({}, {"blocks.0": "selective"}, whole(["blocks.0"]))]
    assert peaks == [460, 400, 360]


def test_times_of_blocks_that_are_alike_are_evened_out():
    """A busy machine makes single ones look slow; the choice among equals does not depend on it."""
    runs = [make_both(number, seconds, seconds / 4) for number, seconds in enumerate([1.0, 9.0, 1.2])]
    assert [again_seconds(even_out(runs), {block: way}) for way in BOTH for block in ("blocks.0", "blocks.1")] == [
        1.2,
        1.2,
        0.3,
        0.3,
    ]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("blocks", "count"), [(100, 3), (250, 2)])
def test_many_blocks_with_several_ways_do_not_make_endless_choices(blocks, count):
    """All of one kind: they then change their way in steps of several blocks, up to all of them."""
    ways = {
        way: WayRun(kept_bytes=10 * number, again_bytes=120, seconds=1.0 / (1 + number))
        for number, way in enumerate(("checkpoint", "offload", "selective")[:count])
    }
    runs = [make_run(number, ways=ways, again_seconds=1.0) for number in range(blocks)]
    found = [*choices(runs, [*ways])]
    assert 1000 < len(found) <= 20_000
    assert dict.fromkeys((run.block for run in runs), "offload") in found
    assert found[-1] == whole(run.block for run in runs)
