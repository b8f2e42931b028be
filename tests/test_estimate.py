"""Estimates and sizes from a timeline that is known by heart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.prediction.estimate import Estimate
from autobatch.prediction.gpu_table import GPUS, make_gpu
from autobatch.prediction.sizing import Sizing
from autobatch.prediction.timeline import Block, Timeline, TracedStep, combine

MIB = 2**20
WEIGHT = Block(phase="before", kind="parameter", module="layer")
ACTIVATION = Block(phase="forward", kind="activation", module="layer")
SCRATCH = Block(phase="backward", kind="temporary", module="")


def make_timeline(weight=100 * MIB, activation=30 * MIB, scratch=20 * MIB):
    """A weight, an activation of each sample, and scratch of each sample beside it."""
    return Timeline(
        order=(1, 2, 3, -3, -2),
        fixed=(weight, 0, 0),
        per_sample=(0, activation, scratch),
        blocks=(WEIGHT, ACTIVATION, SCRATCH),
    )


def make_card(total):
    """A card on which CUDA takes what it takes on one of which nothing is known."""
    return make_gpu("a card", total, source="here", measured=False)


def test_the_peak_is_everything_at_once_and_the_workspaces():
    """100 MiB, 50 a sample, and two workspaces of 8 that lie in a segment of 20."""
    estimate = Estimate(make_timeline(), 8 * MIB)
    assert estimate.allocated(4) == (100 + 4 * 50 + 2 * 8) * MIB
    assert estimate.reserved(4) == (100 + 4 * 50 + 20) * MIB


def test_the_peak_is_told_by_kind_and_by_module():
    """The largest first; what no module made is under the empty name."""
    share = Estimate(make_timeline(), 8 * MIB).share(4)
    assert share.by_kind == (
        ("activation", 120 * MIB),
        ("parameter", 100 * MIB),
        ("temporary", 80 * MIB),
        ("cuBLAS workspace", 16 * MIB),
    )
    assert share.by_module == (("layer", 220 * MIB), ("", 80 * MIB))


def test_thresholds_are_in_order():
    """Undisturbed, at all, at least."""
    thresholds = Estimate(make_timeline(), 8 * MIB).thresholds(4)
    assert thresholds.comfortable >= thresholds.tight >= thresholds.floor


def test_an_interpolated_timeline_is_read_between_its_traces():
    """Half way between two traced sizes it is half way between their peaks."""
    steps = [TracedStep(samples=n, order=(1, -1), sizes=(n * 100 * MIB,), blocks=(ACTIVATION,)) for n in (2, 4)]
    estimate = Estimate(combine(steps), 8 * MIB)
    assert estimate.reserved(3) == (300 + 20) * MIB


@given(total=st.integers(1, 40), target=st.integers(1, 3000), margin=st.sampled_from([0.0, 0.1, 0.3]))
@settings(max_examples=30)
def test_the_chosen_size_fits_with_its_margin_and_the_next_does_not(total, target, margin):
    """Of the sizes that were simulated it is the largest; all cards are judged alike."""
    card = make_card(total * 1024 * MIB)
    sizing = Sizing(Estimate(make_timeline(), card.cublas_workspace_bytes), card, target, margin)
    points = sizing.points()
    size, limit = sizing.largest(points), card.total_bytes - card.context_bytes
    assert all((point.reserved * (1 + margin) <= limit) == (point.size <= size) for point in points)
    reach = sizing.reach(points)
    assert size <= reach.comfortable <= reach.tight
    assert len(points) <= 26
    assert points[-1].size == target
    fits = sizing.cards(points)
    assert [fit.gpu for fit in fits] == [gpu.name for gpu in GPUS]
    assert all((fit.accumulation_steps > 0) == (fit.micro_batch_size > 0) for fit in fits)


def test_a_card_with_more_memory_never_takes_less():
    """Among cards that lose the same to CUDA."""
    sizing = Sizing(Estimate(make_timeline(), 8 * MIB), make_card(2**34), 256, 0.1)
    fits = {fit.gpu: fit for fit in sizing.cards(sizing.points())}
    assert fits["A100-80GB-SXM"].micro_batch_size >= fits["A100-40GB-SXM"].micro_batch_size > 0


@pytest.mark.parametrize("expandable", [False, True])
def test_a_changed_estimate_remembers_nothing(expandable):
    """What one allocator made of it is not what another does."""
    estimate = Estimate(make_timeline(activation=3 * MIB), 8 * MIB)
    first = estimate.reserved(7)
    changed = estimate.changed(expandable_segments=expandable)
    assert (changed.reserved(7) == first) == (not expandable)
