"""The simulated allocator: exact bytes of known cases, its invariants, and agreement with a slow one of plain rules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_allocator import PlainAllocator

from autobatch.prediction.allocator import (
    UNIT,
    AllocatorPeak,
    simulate,
)
from autobatch.prediction.timeline import most_alive

pytestmark = pytest.mark.quick

KIB, MIB = 2**10, 2**20


def find_least_capacity(order, sizes, **options):
    """Bytes in which a timeline runs, perhaps with retries, and in 2 MiB less it does not."""
    fails = (most_alive(order, [-(-size // UNIT) * UNIT for size in sizes]) - 1) // (2 * MIB)
    runs = simulate(order, sizes, **options).reserved // (2 * MIB)
    while runs - fails > 1:
        middle = (fails + runs) // 2
        if simulate(order, sizes, capacity=middle * 2 * MIB, **options).out_of_memory:
            fails = middle
        else:
            runs = middle
    return runs * 2 * MIB


# Sizes around every border of the rules, and some of each order of magnitude.
borders = [0, 1, 511, 512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 9 * MIB, 10 * MIB - 1, 10 * MIB, 11 * MIB + 1]
borders += [19 * MIB, 20 * MIB, 20 * MIB + 1, 21 * MIB, 30 * MIB, 45 * MIB]
requests = st.one_of(
    st.sampled_from(borders), st.integers(0, 4 * KIB), st.integers(0, 2 * MIB), st.integers(0, 50 * MIB)
)
capacities = st.one_of(st.none(), st.integers(0, 150).map(lambda count: count * 2 * MIB))


@st.composite
def timelines(draw, longest=60):
    """Blocks that come and go in any order, not all of them freed."""
    order, sizes, alive = [], [], []
    for size, frees in draw(st.lists(st.tuples(requests, st.lists(st.integers(0, 99), max_size=2)), max_size=longest)):
        sizes.append(size)
        order.append(len(sizes))
        alive.append(len(sizes))
        for which in frees:
            order += [-alive.pop(which % len(alive))] if alive else []
    return order, sizes


def long_timeline(events, live=800, seed=0, smallest=8):
    """So many events, about ``live`` blocks at once, sizes from ``2**smallest`` bytes to 64 MiB."""
    draws = random.Random(seed)
    order, sizes, alive = [], [], []
    while len(order) < events:
        if not alive or (len(alive) < live and draws.random() < 0.55):
            sizes.append(int(2 ** draws.uniform(smallest, 26)))
            order.append(len(sizes))
            alive.append(len(sizes))
        else:
            order.append(-alive.pop(draws.randrange(len(alive))))
    return order, sizes


# -------------------------------------------------------------------------------------------------------- known cases

CASES = {
    # name: (order, sizes, allocated, reserved)
    "nothing": ([], [], 0, 0),
    "a block of no bytes is none": ([1, -1], [0], 0, 0),
    "one byte": ([1], [1], 512, 2 * MIB),
    "512 bytes and one": ([1], [513], 1024, 2 * MIB),
    "two small segments: 512 bytes and 1 MiB leave no 1 MiB": ([1, 2, 3], [1, MIB, MIB], 2 * MIB + 512, 4 * MIB),
    "the largest small block": ([1, 2], [MIB, MIB], 2 * MIB, 2 * MIB),
    "the smallest large block": ([1], [MIB + 1], MIB + 512, 20 * MIB),
    "large blocks share 20 MiB": ([1, 2], [MIB + 1, 9 * MIB], 10 * MIB + 512, 20 * MIB),
    "10 MiB get their own segment": ([1, 2], [MIB + 1, 20 * MIB], 21 * MIB + 512, 40 * MIB),
    "a byte less than 10 MiB gets 20": ([1], [10 * MIB - 512], 10 * MIB - 512, 20 * MIB),
    "exactly 10 MiB": ([1], [10 * MIB], 10 * MIB, 10 * MIB),
    "a byte more is rounded to 2 MiB, and split": ([1], [10 * MIB + 1], 10 * MIB + 512, 12 * MIB),
    "a rest of 1 MiB is not split off": ([1], [11 * MIB], 12 * MIB, 12 * MIB),
    "a rest of 512 bytes is not split off": ([1], [12 * MIB - 512], 12 * MIB, 12 * MIB),
    "a rest of more than 1 MiB is split off": ([1], [11 * MIB - 512], 11 * MIB - 512, 12 * MIB),
    "a freed block is used again": ([1, -1, 2], [30 * MIB, 30 * MIB], 30 * MIB, 30 * MIB),
    "a freed block is too small": ([1, -1, 2], [30 * MIB, 32 * MIB], 32 * MIB, 62 * MIB),
    "best fit, not first": ([1, 2, -1, -2, 3, 4], [40 * MIB, 30 * MIB, 30 * MIB, 40 * MIB], 70 * MIB, 70 * MIB),
    "small blocks do not use large segments": ([1, -1, 2], [30 * MIB, 512], 30 * MIB, 32 * MIB),
    "neighbours merge": ([1, 2, -1, -2, 3], [8 * MIB, 8 * MIB, 20 * MIB], 20 * MIB, 20 * MIB),
    "a hole between them does not": ([1, 2, 3, -1, -3, 4], [6 * MIB] * 3 + [9 * MIB], 18 * MIB, 40 * MIB),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_known_cases_have_known_bytes(case):
    """With fixed segments these bytes follow from the rules by hand."""
    order, sizes, allocated, reserved = case
    peak = simulate(order, sizes)
    assert (peak.allocated, peak.reserved) == (allocated, reserved)
    assert not peak.out_of_memory


EXPANDABLE_CASES = {
    "one byte": ([1], [1], 512, 2 * MIB),
    "the largest small block": ([1, 2], [MIB, MIB], 2 * MIB, 2 * MIB),
    "small blocks may lie across pages": ([1, 2, 3], [1, MIB, MIB], 2 * MIB + 512, 4 * MIB),
    "the smallest large block": ([1], [MIB + 1], MIB + 512, 20 * MIB),
    "10 MiB use what the page has": ([1, 2], [MIB + 1, 10 * MIB], 11 * MIB + 512, 20 * MIB),
    "a rest of 512 bytes is split off": ([1], [20 * MIB - 512], 20 * MIB - 512, 20 * MIB),
    "a freed block grows": ([1, -1, 2], [30 * MIB, 50 * MIB], 50 * MIB, 60 * MIB),
    "a freed block that is shut in does not": ([1, 2, -1, 3], [40 * MIB, 40 * MIB, 60 * MIB], 100 * MIB, 140 * MIB),
}


@pytest.mark.parametrize("case", EXPANDABLE_CASES.values(), ids=EXPANDABLE_CASES.keys())
def test_known_cases_of_expandable_segments(case):
    """With expandable segments these bytes follow from the rules by hand."""
    order, sizes, allocated, reserved = case
    peak = simulate(order, sizes, expandable_segments=True)
    assert (peak.allocated, peak.reserved) == (allocated, reserved)


def test_the_position_of_the_peak_is_reported():
    """The first event at which the most is allocated, not a later one with as much."""
    peak = simulate([1, 2, -2, 3, -3, -1], [MIB, 2 * MIB, 2 * MIB])
    assert (peak.peak_position, peak.oom_position) == (1, None)


# ------------------------------------------------------------------------------------------------ when memory runs out


def test_caches_go_back_before_memory_has_run_out():
    """A refused request frees the unused segments and asks again: one retry, and it runs."""
    order, sizes = [1, -1, 2], [30 * MIB, 40 * MIB]
    assert simulate(order, sizes).reserved == 70 * MIB
    size = 40 * MIB
    peak = simulate(order, sizes, capacity=size)
    assert peak == AllocatorPeak(allocated=size, reserved=size, alloc_retries=1, peak_position=2, allocated_at_end=size)


@given(timelines(), st.booleans())
def test_in_less_than_the_requests_need_nothing_runs(timeline, expandable):
    """With a byte less than all blocks take at once the order does not run; with what it reserves freely it does."""
    order, sizes = timeline
    least = most_alive(order, [-(-size // UNIT) * UNIT for size in sizes])
    free = simulate(order, sizes, expandable_segments=expandable)
    assert least <= find_least_capacity(order, sizes, expandable_segments=expandable) <= free.reserved
    if least:
        assert simulate(order, sizes, capacity=least - 1, expandable_segments=expandable).out_of_memory
    undisturbed = simulate(order, sizes, capacity=free.reserved, expandable_segments=expandable)
    assert undisturbed == free
    assert undisturbed.alloc_retries == 0


@given(timelines(), st.booleans())
def test_the_least_capacity_is_an_edge(timeline, expandable):
    """At the least capacity the order runs within it, and in 2 MiB less it does not."""
    order, sizes = timeline
    tight = find_least_capacity(order, sizes, expandable_segments=expandable)
    at = simulate(order, sizes, capacity=tight, expandable_segments=expandable)
    assert not at.out_of_memory
    assert at.reserved <= tight
    if tight:
        less = simulate(order, sizes, capacity=tight - 2 * MIB, expandable_segments=expandable)
        assert less.out_of_memory


@given(timelines(), st.booleans(), st.integers(0, 200))
def test_more_than_enough_changes_nothing(timeline, expandable, pages):
    """Every capacity from the comfortable one on gives the same result."""
    order, sizes = timeline
    free = simulate(order, sizes, expandable_segments=expandable)
    capacity = free.reserved + pages * MIB
    assert simulate(order, sizes, capacity=capacity, expandable_segments=expandable) == free


@pytest.mark.parametrize(
    ("order", "sizes", "expandable", "reserved", "least"),
    [
        ([], [], False, 0, 0),
        ([1], [1], False, 2, 2),
        ([1, -1, 2], [30 * MIB, 40 * MIB], False, 70, 40),
        ([1, -1, 2], [30 * MIB, 40 * MIB], True, 40, 40),
        ([1, 2, -1, 3], [9 * MIB, 2 * MIB, 30 * MIB], False, 50, 50),
    ],
)
def test_known_least_capacities(order, sizes, expandable, reserved, least):
    """MiB reserved without a limit and MiB that suffice, of cases that can be done by hand."""
    assert simulate(order, sizes, expandable_segments=expandable).reserved == reserved * MIB
    assert find_least_capacity(order, sizes, expandable_segments=expandable) == least * MIB


@pytest.mark.parametrize(
    ("order", "sizes", "expandable", "failing", "least"),
    [
        ([1, -1, 2, -2, 3, 4, 5], [14, 22, 31, 18, 15], False, [68], 66),
        ([1, 2, -1, 3, 4, 5], [25, 18, 37, 1.5, 0.3], True, [80], 62),
    ],
)
def test_more_memory_can_be_worse(order, sizes, expandable, failing, least):
    """There are orders that run in one capacity and not in a larger one, so nothing here may rely on the opposite."""
    sizes = [int(size * MIB) for size in sizes]
    capacities = range(least, simulate(order, sizes, expandable_segments=expandable).reserved // MIB + 1, 2)
    assert find_least_capacity(order, sizes, expandable_segments=expandable) == least * MIB
    assert failing == [
        capacity
        for capacity in capacities
        if simulate(order, sizes, capacity=capacity * MIB, expandable_segments=expandable).out_of_memory
    ]


# --------------------------------------------------------------------------------------------------------- invariants


@given(timelines(), capacities, st.booleans())
def test_it_does_what_the_plain_rules_do(timeline, capacity, expandable):
    """On any order it finds what the slow allocator finds: peaks, their position, retries, and where memory ran out."""
    order, sizes = timeline
    for released_at in (0, len(order) // 2):  # before which caches go back
        expected = PlainAllocator(capacity, expandable).run(order, sizes, released_at)
        found = simulate(order, sizes, capacity=capacity, expandable_segments=expandable, released_at=released_at)
        assert found == expected


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("smallest", [17, 21])
def test_it_does_what_the_plain_rules_do_where_memory_is_short(expandable, smallest):
    """The same on longer orders with less than they would like, where caches go back again and again."""
    retries = 0
    for seed in range(15):
        order, sizes = long_timeline(120, live=12, seed=seed, smallest=smallest)
        least = find_least_capacity(order, sizes, expandable_segments=expandable)
        reserved = simulate(order, sizes, expandable_segments=expandable).reserved
        for capacity in {least, (least + reserved) // 2}:
            expected = PlainAllocator(capacity, expandable).run(order, sizes)
            found = simulate(order, sizes, capacity=capacity, expandable_segments=expandable)
            assert found == expected
            retries += found.alloc_retries
    assert retries >= 10


@pytest.mark.parametrize("expandable", [False, True])
def test_what_one_stream_frees_no_other_takes(expandable):
    """A block is used again by its own stream alone; caches of all streams go back where memory ends."""
    order, sizes = [1, -1, 2, -2, 3], [30 * MIB, 30 * MIB, 30 * MIB]
    options = {"expandable_segments": expandable}
    page = 10 * MIB if expandable else 0  # pages of 20 MiB
    assert simulate(order, sizes, **options).reserved == 30 * MIB + page
    assert simulate(order, sizes, streams=[0, 0, 0], **options) == simulate(order, sizes, **options)
    assert simulate(order, sizes, streams=[0, 1, 0], **options).reserved == 2 * (30 * MIB + page)
    assert simulate(order, sizes, streams=[0, 1, 2], **options).reserved == 3 * (30 * MIB + page)
    tight = simulate(order, sizes, streams=[0, 1, 2], capacity=40 * MIB, **options)
    assert (tight.out_of_memory, tight.alloc_retries) == (False, 2)
    assert find_least_capacity(order, sizes, streams=[0, 1, 2], **options) == 30 * MIB + page
