"""Divisions, distances, and the units a mean may be over."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.exactness.gradients import Gradients, distance
from autobatch.exactness.measurement import partitions_of
from autobatch.exactness.units import units_of


@given(st.integers(1, 64), st.integers(1, 2))
def test_every_division_has_all_samples_in_parts_that_are_not_too_small(samples, smallest):
    """Parts sum to the samples, none is below the smallest, and no division is the whole."""
    partitions = partitions_of(samples, smallest)
    assert bool(partitions) == (samples >= 2 * smallest)
    assert all(sum(sizes) == samples and min(sizes) >= smallest and len(sizes) > 1 for sizes in partitions)
    assert len(set(partitions)) == len(partitions)


def test_a_distance_counts_a_missing_gradient_as_zero():
    """None and zeros are the same gradient; nan is never near."""
    ones, nothing = torch.ones(3), torch.zeros(3)
    assert distance(Gradients((None,)), Gradients((nothing,))) == 0
    assert distance(Gradients((None,)), Gradients((ones,))) == 1
    assert distance(Gradients((ones,)), Gradients((nothing,))) == math.inf
    assert distance(Gradients((ones * math.nan,)), Gradients((ones,))) == math.inf


def test_units_are_counted_as_their_code_says():
    """What is suggested to the user is what was counted."""
    batch = {
        "ids": torch.tensor([[5, 6, 0], [7, 0, 0]]),
        "labels": torch.tensor([[5, -100, -100], [7, 3, -100]]),
        "mask": torch.tensor([[True, True, False], [True, False, False]]),
    }
    units = list(units_of(batch))
    assert any(unit.code == 'batch["mask"].sum()' for unit in units)
    for unit in units:
        assert unit.count(batch) == float(eval(unit.code, {"batch": batch}))
