"""``autobatch.prediction.timeline``: two traced steps become one that holds at any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.prediction.cudnn import Convolution
from autobatch.prediction.timeline import Block, TracedStep, align, combine

pytestmark = pytest.mark.quick

_ACTIVATION = Block(phase="forward", kind="activation", module="body")
_WEIGHT = Block(phase="before", kind="parameter", module="body")
_WORKSPACE = Block(phase="forward", kind="cuDNN workspace", module="body")


def _traced(samples, fixed, per_sample, blocks=None, order=None):
    sizes = tuple(f + s * samples for f, s in zip(fixed, per_sample, strict=True))
    order = order or tuple(range(1, len(sizes) + 1))
    return TracedStep(samples=samples, order=order, sizes=sizes, blocks=blocks or (_ACTIVATION,) * len(sizes))


_affine = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=20)


@given(_affine, st.integers(1, 50), st.integers(1, 50), st.integers(1, 10**4))
def test_two_traces_determine_every_size(coefficients, first, distance, n):
    """Sizes that are affine in the samples are found from any two of them."""
    fixed, per_sample = zip(*coefficients, strict=True)
    timeline = align(_traced(first, fixed, per_sample), _traced(first + distance, fixed, per_sample))
    assert timeline is not None
    assert (timeline.fixed, timeline.per_sample) == (fixed, per_sample)
    assert timeline.at(n).sizes == _traced(n, fixed, per_sample).sizes


def test_a_step_at_any_size_is_a_valid_record():
    """It is made without a check, which its timeline has had; convolutions are those of each block at that size."""
    runs = [_convolution(samples, channels) for channels in (3, 3, 5) for samples in (2, 4)]
    first, second = (
        TracedStep(
            samples=n,
            order=(1, 2, 3, -3, -2, -1),
            sizes=(8, 0, 5 * n),
            blocks=(_WEIGHT, _WORKSPACE, _WORKSPACE),
            convolutions={1: runs[index], 2: runs[index + 4]},
        )
        for index, n in enumerate((2, 4))
    )
    timeline = align(first, second)
    assert timeline is not None
    found = timeline.at(7)
    assert TracedStep.model_validate(found.model_dump()) == found
    assert found.convolutions == {1: _convolution(7, 3), 2: _convolution(7, 5)}
    assert (found.kernel_blocks, found.tensor_sizes()) == ([1, 2], [8, 0, 0])


def _convolution(samples, channels):
    return Convolution("forward", (samples, channels, 8, 8), (4, channels, 3, 3), (1, 1), (1, 1), (1, 1))


def test_other_orders_do_not_align():
    """Two traces whose blocks are freed in another order are no two sizes of one program."""
    first = _traced(2, (0, 0), (4, 4), order=(1, 2, -1))
    assert align(first, _traced(3, (0, 0), (4, 4), order=(1, 2, -2))) is None


def test_other_blocks_do_not_align():
    """The same order with another kind of block is another program."""
    assert align(_traced(2, (0,), (4,)), _traced(3, (0,), (4,), blocks=(_WEIGHT,))) is None


def test_sizes_that_grow_by_a_fraction_do_not_align():
    """A block that grows by 3 bytes over 2 samples is not affine in whole bytes."""
    assert align(_traced(2, (8,), (0,)), _traced(4, (11,), (0,))) is None


def test_the_same_size_twice_determines_nothing():
    """Two traces at one size have no slope."""
    assert align(_traced(2, (8,), (1,)), _traced(2, (8,), (1,))) is None


@given(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=30))
def test_the_peak_is_the_most_alive_at_once(blocks):
    """A running sum over the order gives the same peak as summing the living at each moment."""
    order, alive, most = [], [], 0
    sizes = tuple(size for size, _ in blocks)
    for index, (_, frees) in enumerate(blocks):
        order.append(index + 1)
        alive.append(index)
        most = max(most, sum(sizes[block] for block in alive))
        if frees:
            order.append(-(alive.pop(0) + 1))
    traced = TracedStep(samples=2, order=tuple(order), sizes=sizes, blocks=(_ACTIVATION,) * len(sizes))
    assert combine([traced]).at(2).peak() == most


@given(st.integers(1, 40))
def test_where_traces_do_not_align_peaks_lie_on_lines_between_them(n):
    """At traced sizes the peak is the trace's own, elsewhere on the line through the nearest two."""
    steps = [_traced(n, (100, 0), (0, 10), blocks=(_WEIGHT, _ACTIVATION)) for n in (2, 3, 8)]
    timeline = combine(steps[::-1])
    assert timeline.interpolated
    assert timeline.measure(n, TracedStep.peak) == 100 + 10 * n
    assert timeline.at(8).sizes == timeline.at(5).sizes == timeline.at(20).sizes == (100, 80)


def test_a_line_through_two_sizes_rounds_up():
    """Half a byte is one more: what is predicted must suffice."""
    timeline = combine([_traced(2, (0,), (1,)), _traced(4, (1,), (1,))])
    assert [timeline.measure(n, TracedStep.peak) for n in (2, 3, 4)] == [2, 4, 5]
