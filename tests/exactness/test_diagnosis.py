"""Partitions, distances between gradients, and the units a mean may be over."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.batch.samples import describe
from autobatch.exactness.gradients import TOLERANCE, Scales
from autobatch.exactness.loss_weights import units_of


@given(
    st.lists(st.tuples(st.floats(1e-9, 1e9), st.floats(1e-12, 10)), min_size=1, max_size=8),
    st.integers(0, 7),
)
def test_a_parameter_is_judged_on_its_own_scale(parameters, wrong):
    """However large the others are, one that is off by more than the tolerance is found, and it alone."""
    wrong %= len(parameters)
    sizes = [size for size, _ in parameters]
    apart = [size * 1e-7 for size in sizes]
    apart[wrong] = sizes[wrong] * (0.001 + parameters[wrong][1])
    scales = Scales(sizes, noise=[size * 1e-8 for size in sizes])
    assert [error > TOLERANCE for error in scales.judge(apart)] == [index == wrong for index in range(len(sizes))]
    assert [*scales.report(apart)] == [wrong]


def test_a_difference_of_a_few_roundings_is_none():
    """Where a parameter has no gradient but its rounding, any two gradients differ by all there is."""
    scales = Scales([1.0, 3e-9], noise=[1e-8, 2e-9])
    assert max(scales.judge([1e-7, 8e-9])) <= TOLERANCE
    assert max(scales.judge([1e-7, 1e-5])) > TOLERANCE
    assert scales.report([1e-7, 1e-5]) == {1: 1.0}
    assert max(Scales([1.0, 3e-9]).judge([1e-7, 8e-9])) > 1


def test_units_are_counted_as_their_code_says():
    """What is suggested to the user is what was counted."""
    batch = {
        "ids": torch.tensor([[5, 6, 0], [7, 0, 0]]),
        "labels": torch.tensor([[5, -100, -100], [7, 3, -100]]),
        "mask": torch.tensor([[True, True, False], [True, False, False]]),
    }
    units = list(units_of(describe(batch)))
    assert any(unit.code == 'batch["mask"].sum()' for unit in units)
    for unit in units:
        assert unit.count(batch) == float(eval(unit.code, {"batch": batch}))


def test_units_of_samples_in_lists_are_counted_in_any_part():
    """Boxes of each image: the code names no sample, and counts a part as it counts the whole."""
    targets = [{"boxes": torch.rand(count, 4), "labels": torch.ones(count, dtype=torch.long)} for count in (2, 0, 3, 1)]
    batch = {"images": torch.rand(4, 3), "targets": targets}
    layout = describe(batch)
    units = list(units_of(layout))
    assert any(unit.code == 'sum(len(item["boxes"]) for item in batch["targets"])' for unit in units)
    for unit in units:
        for part in (batch, layout.take(range(1, 2)), layout.take(range(2, 4))):
            assert unit.count(part) == float(eval(unit.code, {"batch": part}))
