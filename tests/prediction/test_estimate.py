"""``prediction.estimate``: peaks of timelines whose bytes are known by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.prediction.cards import find_gpu
from autobatch.prediction.cudnn import Convolution
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.timeline import Block, Timeline, TracedStep, combine

pytestmark = pytest.mark.quick

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


def test_the_peak_is_everything_at_once_and_the_workspaces():
    """100 MiB, 50 a sample, and two workspaces of 8 that lie in a segment of 20."""
    estimate = Estimate(make_timeline(), 8 * MIB)
    assert estimate.allocated(4) == (100 + 4 * 50 + 2 * 8) * MIB
    assert estimate.reserved(4) == (100 + 4 * 50 + 20) * MIB


def test_the_peak_is_divided_by_kind_and_by_module():
    """What no module made is under the empty name."""
    estimate = Estimate(make_timeline(), 8 * MIB)
    kinds, held_bytes = estimate.by_kind(4)
    assert kinds == {
        "activation": 120 * MIB,
        "parameter": 100 * MIB,
        "temporary": 80 * MIB,
        "cuBLAS workspace": 16 * MIB,
    }
    assert estimate.by_module(4) == {"layer": 220 * MIB, "": 80 * MIB}
    assert held_bytes == 4 * MIB  # two workspaces of 8 lie in one segment of 20


def test_an_interpolated_timeline_is_read_between_its_traces():
    """Half way between two traced sizes it is half way between their peaks."""
    steps = [TracedStep(samples=n, order=(1, -1), sizes=(n * 100 * MIB,), blocks=(ACTIVATION,)) for n in (2, 4)]
    estimate = Estimate(combine(steps), 8 * MIB)
    assert estimate.reserved(3) == (300 + 20) * MIB


KINDS = ("parameter", "activation", "temporary", "aux")


@st.composite
def traced_steps(draw, samples):
    """A step of some blocks that live for a while; of other operators at each size."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
    sizes = [draw(st.integers(1, 3_000_000)) * (samples if kind != "parameter" else 1) for kind in kinds]
    order, alive = [], []
    for block in range(1, len(kinds) + 1):
        order.append(block)
        alive.append(block)
        while len(alive) > 1 and draw(st.booleans()):
            order.append(-alive.pop(draw(st.integers(0, len(alive) - 1))))
    blocks = [Block(phase="forward", kind=kind, module=f"layer {index % 3}") for index, kind in enumerate(kinds)]
    return TracedStep(samples=samples, order=order, sizes=sizes, blocks=blocks)


@given(first=traced_steps(2), second=traced_steps(64), n=st.integers(1, 200), expandable=st.booleans())
def test_parts_sum_to_the_peak_wherever_it_is_read(first, second, n, expandable):
    """To the byte: at a traced size, between two, and beyond them."""
    estimate = Estimate(combine([first, second]), 8 * MIB, expandable)
    kinds, held_bytes = estimate.by_kind(n)
    assert kinds.total() + held_bytes == estimate.reserved(n)
    assert all(count > 0 for count in kinds.values())
    assert held_bytes >= 0
    assert estimate.reserved(n) >= estimate.allocated(n)


def test_parts_of_an_interpolated_timeline_are_of_the_size_that_is_asked_for():
    """Half way between two traced sizes each part is half way, and so is what must be there at least."""
    steps = [
        TracedStep(samples=n, order=(1, 2, -2, -1), sizes=(50 * MIB, n * 100 * MIB), blocks=(WEIGHT, ACTIVATION))
        for n in (2, 4)
    ]
    estimate = Estimate(combine(steps), 8 * MIB)
    assert estimate.by_kind(3)[0]["activation"] == 300 * MIB
    assert estimate.by_kind(3)[0]["parameter"] == 50 * MIB
    assert estimate.runs_within(3, estimate.reserved(3))
    assert not estimate.runs_within(3, estimate.reserved(3) - 1)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("n", [1, 4, 33])
def test_what_runs_is_what_the_threshold_says(n, expandable):
    """In what is reserved a size runs, and in less than its tensors and workspaces it does not."""
    timeline = Timeline(
        order=(1, 2, 3, -3, -2, 3, -3),
        fixed=(7 * MIB, 0, 0),
        per_sample=(0, 3 * MIB, 2 * MIB),
        blocks=(WEIGHT, ACTIVATION, SCRATCH),
    )
    estimate = Estimate(timeline, 8 * MIB, expandable)
    assert estimate.runs_within(n, estimate.reserved(n))
    assert not estimate.runs_within(n, estimate.allocated(n) - 1)


AUX = Block(phase="forward", kind="aux", module="layer")


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("each", [700, 3 * MIB, 11 * MIB + 1])
def test_what_stands_beside_losses_is_counted_of_every_micro_batch(each, expandable):
    """Two of them were traced, and further ones leave as much each, rounded up as the allocator does."""
    timeline = Timeline(
        order=(1, 2, 3, -3, -2, -1), fixed=(50 * MIB, 0, 0), per_sample=(0, each, each), blocks=(WEIGHT, AUX, AUX)
    )
    two, ten = (Estimate(timeline, 8 * MIB, expandable, target) for target in (8, 40))
    assert two.aux_bytes(4) == 0
    assert ten.aux_bytes(4) == 8 * -(-4 * each // 512) * 512
    assert ten.allocated(4) == two.allocated(4) + ten.aux_bytes(4)
    segments = 8 * 46 * MIB if each > 10 * MIB else 8 * 12 * MIB if each > MIB else ten.aux_bytes(4)
    assert ten.reserved(4) == two.reserved(4) + segments
    assert ten.runs_within(4, ten.reserved(4))
    assert not ten.runs_within(4, two.reserved(4))
    kinds, held_bytes = ten.by_kind(4)
    assert kinds.total() + held_bytes == ten.reserved(4)
    assert kinds["aux"] == 2 * 4 * each + ten.aux_bytes(4)


def _numbers(estimate, n):
    kinds, held_bytes = estimate.by_kind(n)
    return estimate.reserved(n), estimate.allocated(n), estimate.tensor_bytes(n), kinds, held_bytes


def test_what_is_shared_by_cards_is_what_each_has_alone():
    """Sums' buffers, convolutions' and cuBLAS's workspaces are those of the card, whichever was asked before."""
    numbers, sums = (Block(phase="forward", kind=kind) for kind in ("addends", "partial sums"))
    workspace = Block(phase="forward", kind="cuDNN workspace")
    run = Convolution("weight gradient", (0, 64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1))
    timeline = Timeline(
        order=(1, 2, 3, 4, -4, -3, -2, 5, -5, -1),
        fixed=(100 * MIB, 50_000, 40_000, 0, 0),
        per_sample=(0, 0, 4, 3 * MIB, 0),
        blocks=(WEIGHT, numbers, sums, ACTIVATION, workspace),
        convolutions={4: (run, (1, 0, 0, 0))},
    )
    shared = Estimate(timeline, target=400)
    cards = [find_gpu(name) for name in ("L4", "T4", "A100-80GB", "H100-80GB", "V100-16GB")]
    together = [_numbers(shared.on_card(card), n) for n in (3, 40, 100) for card in cards]
    alone = [_numbers(Estimate(timeline, target=400).on_card(card), n) for n in (3, 40, 100) for card in cards]
    assert together == alone
    assert len({reserved for reserved, *_ in together[-len(cards) :]}) > 2
