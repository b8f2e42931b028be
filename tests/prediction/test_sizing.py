"""What fits which card, from timelines that nobody had to trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.planning.division import balance, useful_sizes
from autobatch.prediction.cards import COMMON, GPUS, find_gpu, make_gpu
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.sizing import Sizing, find_limit
from autobatch.prediction.timeline import Block, Timeline, TracedStep, combine

MIB = 2**20
BLOCK = Block(phase="forward", kind="activation")


def make_card(total):
    """A card on which CUDA takes what it takes on one of which nothing is known."""
    return make_gpu("a card", total, source="here", measured=False)


@st.composite
def timelines(draw):
    """Some blocks that live for a while, each fixed, growing, or both."""
    count = draw(st.integers(1, 10))
    fixed = draw(st.lists(st.sampled_from([0, 5000, 3 * MIB, 90 * MIB]), min_size=count, max_size=count))
    growing = draw(st.lists(st.sampled_from([0, 700, MIB // 2, 9 * MIB, 40 * MIB]), min_size=count, max_size=count))
    order, alive = [], []
    for block in range(1, count + 1):
        order.append(block)
        alive.append(block)
        while len(alive) > 1 and draw(st.booleans()):
            order.append(-alive.pop(draw(st.integers(0, len(alive) - 1))))
    return Timeline(order=order, fixed=fixed, per_sample=growing, blocks=(BLOCK,) * count)


@st.composite
def sizings(draw):
    """One step, one card, one target and one margin."""
    card = make_card(draw(st.integers(500, 40_000)) * MIB)
    estimate = Estimate(draw(timelines()), card.cublas_workspace_bytes, draw(st.booleans()))
    return Sizing(estimate, card, draw(st.integers(1, 3000)), draw(st.sampled_from([0.0, 1e-9, 0.1, 0.5])))


@given(sizing=sizings())
def test_the_largest_fits_with_the_margin_on_the_whole_process_and_the_next_does_not(sizing):
    """What CUDA takes for itself is as uncertain as the rest, so the margin is on it too."""
    sizes = useful_sizes(sizing.target, sizing.target)

    def fits(size):
        process = sizing.estimate.reserved(size) + sizing.gpu.context_bytes
        return process * (1 + sizing.margin) <= sizing.gpu.total_bytes

    assert sizing.largest in (0, *sizes)
    assert sizing.largest == 0 or fits(sizing.largest)
    above = [size for size in sizes if size > sizing.largest]
    assert not above or not fits(above[0])


@given(sizing=sizings(), more=st.integers(0, 40_000))
def test_more_memory_never_takes_less(sizing, more):
    """Even where the allocator holds less for a larger size, as it does now and then."""
    larger = replace(sizing, gpu=make_card(sizing.gpu.total_bytes + more * MIB))
    assert larger.largest >= sizing.largest
    assert larger.reach.comfortable >= sizing.reach.comfortable


@given(sizing=sizings())
def test_points_are_few_and_have_every_size_that_is_told(sizing):
    """In order, from one sample to the whole target, each with its own peaks."""
    points = {point.size: point for point in sizing.points()}
    assert [*points] == sorted(points)
    assert {1, sizing.target} <= points.keys() <= {*useful_sizes(sizing.target, sizing.target)}
    assert {sizing.largest, sizing.reach.comfortable, sizing.reach.tight} - {0} <= points.keys()
    assert len(points) <= 27
    for size, point in points.items():
        assert (point.allocated, point.reserved) == (sizing.estimate.allocated(size), sizing.estimate.reserved(size))


@given(timeline=timelines(), target=st.integers(1, 3000), margin=st.sampled_from([0.0, 0.1]))
def test_each_card_is_judged_as_if_it_had_been_asked_for(timeline, target, margin):
    """With its own workspaces, context and total."""
    asked = make_card(2**34)
    fits = Sizing(Estimate(timeline, asked.cublas_workspace_bytes), asked, target, margin).cards(every=True)
    assert [fit.gpu for fit in fits] == [gpu.name for gpu in GPUS]
    estimates = {w: Estimate(timeline, w) for w in {gpu.cublas_workspace_bytes for gpu in GPUS}}
    for gpu, fit in zip(GPUS, fits, strict=True):
        own = Sizing(estimates[gpu.cublas_workspace_bytes], gpu, target, margin)
        size = own.largest
        peak = own.estimate.reserved(size) + gpu.context_bytes if size else 0
        steps = len(balance(target, size)) if size else 0
        assert (fit.micro_batch_size, fit.peak_bytes, fit.accumulation_steps) == (size, peak, steps)


def test_unasked_the_common_cards_and_the_asked_one_are_judged():
    """Each as it is among all; a card that has just a size is none of them."""
    estimate = Estimate(Timeline(order=(1,), fixed=(0,), per_sample=(MIB,), blocks=(BLOCK,)), 8 * MIB)
    rare = find_gpu("RTX 2060 SUPER")
    assert rare.name not in COMMON
    for asked in (find_gpu("L4"), rare, make_card(2**34)):
        sizing = Sizing(estimate, asked, 100_000, 0.1)
        listed = [fit for fit in sizing.cards(every=True) if fit.gpu in {*COMMON, asked.name}]
        assert [*sizing.cards()] == listed
        assert len(listed) == len(COMMON | {asked.name} & {gpu.name for gpu in GPUS})


@pytest.mark.parametrize(("target", "bound"), [(5000, 1024), (1024, 1024), (100, 100)])
def test_beyond_the_largest_trace_nothing_is_judged(target, bound):
    """A step that compares all samples with all grows with the square, and two small sizes do not show it."""
    steps = [TracedStep(samples=n, order=(1,), sizes=(n * n,), blocks=(BLOCK,)) for n in (2, 3, 64, 1024)]
    sizing = Sizing(Estimate(combine(steps), 8 * MIB), make_card(2**36), target, 0.1)
    sizes = useful_sizes(target, bound)
    assert sizing.bound == bound
    assert sizing.largest == sizing.reach.tight == sizing.points()[-1].size == sizes[-1]
    assert {fit.micro_batch_size for fit in sizing.cards()} == {sizes[-1]}


@pytest.mark.slow
@pytest.mark.parametrize("target", [10**8, 99_999_989])
def test_the_largest_target_takes_no_time(target):
    """20 000 useful sizes, of which a few dozen are simulated: on all cards, in seconds of a child that is killed."""
    estimate = Estimate(Timeline(order=(1,), fixed=(0,), per_sample=(MIB,), blocks=(BLOCK,)), 8 * MIB)
    sizing = Sizing(estimate, make_card(2**34), target, 0.1)
    sizes = run_apart(lambda: [fit.micro_batch_size for fit in sizing.cards(every=True)] + [len(sizing.points())], 20.0)
    assert len(sizes) == len(GPUS) + 1
    assert all(size > 2500 for size in sizes[:-1])  # on the smallest card, of 4 GB


def test_a_limit_is_what_is_left_of_the_card():
    """The card less the margin, less CUDA's own; nothing where that is all."""
    card = make_card(11 * 2**30)
    assert find_limit(card, 0.1) == 10 * 2**30 - card.context_bytes
    assert find_limit(card, 0) == 11 * 2**30 - card.context_bytes
    assert find_limit(make_card(2**29), 0.1) < 0
