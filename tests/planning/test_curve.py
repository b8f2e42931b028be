"""The memory curve: through what was measured, never below it, convex beyond it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autobatch.errors import InvalidArgument
from autobatch.planning.curve import UNLIMITED, MemoryCurve, fit_curve
from autobatch.records import Trial

pytestmark = pytest.mark.quick

MIB = 2**20


def measured(size: int, peak: int, resident: int = 0) -> Trial:
    """A trial in which everything that was held was tensors."""
    return Trial(
        micro_batch_size=size,
        outcome="fits",
        peak_allocated=peak,
        peak_reserved=peak,
        resident_bytes=min(resident, peak),
    )


sizes = st.integers(1, 10_000)
lines = st.lists(st.tuples(st.integers(0, 10**11), st.integers(0, 10**8)), min_size=1, max_size=5)
points = st.dictionaries(sizes, st.integers(0, 10**11), min_size=1, max_size=8)


@st.composite
def curves(draw: st.DrawFn) -> MemoryCurve:
    """A curve fitted to arbitrary measurements, reserved above allocated, some under the optimizer's plateau."""
    plateau = draw(st.integers(0, 10**11))
    trials = [
        Trial(
            micro_batch_size=size,
            outcome=draw(st.sampled_from(["fits", "thrash"])),
            peak_allocated=max(peak, plateau),
            peak_reserved=max(peak, plateau) + draw(st.integers(0, 10**10)),
            optimizer_peak=plateau,
            backward_allocated=peak,
            backward_reserved=peak,
            resident_bytes=min(peak, draw(st.integers(0, 10**10))),
        )
        for size, peak in draw(points).items()
    ]
    return fit_curve(trials)


@given(lines, st.sets(sizes, min_size=2, max_size=8))
def test_convex_measurements_are_met_exactly(formula, where):
    """On the maximum of a few lines the curve passes through every measured point."""
    peaks = {size: max(base + slope * size for base, slope in formula) for size in where}
    curve = fit_curve([measured(size, peak) for size, peak in peaks.items()])
    assert {size: curve.peak_reserved(size) for size in peaks} == peaks
    assert {size: curve.peak_allocated(size) for size in peaks} == peaks


@given(points, st.integers(1, 20 * MIB), st.integers(0, 10**9))
def test_no_measured_point_is_under_predicted(peaks, step, resident):
    """Whatever was measured, staircases and dips included, the curve is nowhere below it."""
    stairs = {size: -(-peak // step) * step for size, peak in peaks.items()}
    trials = [
        measured(size, stairs[size], resident).model_copy(update={"peak_allocated": peak})
        for size, peak in peaks.items()
    ]
    curve = fit_curve(trials)
    for trial in trials:
        assert curve.peak_reserved(trial.micro_batch_size) >= trial.peak_reserved
        assert curve.peak_allocated(trial.micro_batch_size) >= trial.peak_allocated


@given(curves(), st.integers(1, 20_000))
def test_a_curve_rises_and_bends_up(curve, size):
    """The curve never falls, and its steps never shrink by more than the rounding to whole bytes."""
    for peak in (curve.peak_allocated, curve.peak_reserved):
        assert peak(size - 1) <= peak(size) <= peak(size + 1)
        assert 2 * peak(size) <= peak(size - 1) + peak(size + 1) + 1


@given(curves(), st.integers(0, 2 * 10**11))
def test_largest_is_the_last_size_within_the_limit(curve, limit):
    """The largest size is within the limit and the next is not; 0 means that not even one sample is."""
    largest = curve.largest(limit)
    assert largest >= 0
    if largest:
        assert curve.peak_reserved(largest) <= limit
    if largest < UNLIMITED:
        assert curve.peak_reserved(largest + 1) > limit


def test_fractions_of_a_byte_are_rounded_up():
    """Between and beyond knots the curve never says less than the line does."""
    curve = fit_curve([measured(3, 10), measured(6, 20)])
    assert [curve.peak_reserved(size) for size in range(8)] == [0, 4, 7, 10, 14, 17, 20, 24]
    assert [curve.largest(limit) for limit in (3, 4, 13, 14, 23, 24)] == [0, 1, 3, 4, 6, 7]


def test_without_reserved_bytes_tensors_are_what_is_held():
    """A device that reports only tensors has them as its reserved bytes."""
    curve = fit_curve([Trial(micro_batch_size=n, outcome="fits", peak_allocated=100 * n) for n in (2, 4)])
    assert curve.peak_reserved(6) == 600


def resnet18_adamw(size: int, backward: float, optimizer: float = 223.6) -> Trial:
    """ResNet-18 with AdamW as traced, in MiB: the optimizer's step holds more than the backward of small sizes."""
    peak, reserved = int(max(backward, optimizer) * MIB), int(max(backward, optimizer) * 1.25 * MIB)
    return Trial(
        micro_batch_size=size,
        outcome="fits",
        peak_allocated=peak,
        peak_reserved=reserved,
        optimizer_peak=int(optimizer * MIB),
        backward_allocated=int(backward * MIB),
        backward_reserved=int(backward * 1.25 * MIB),
        resident_bytes=134 * MIB,
    )


def test_the_optimizers_plateau_is_a_floor():
    """Under a plateau the backward's own bytes make the line, and the plateau holds for the sizes below its end."""
    curve = fit_curve([resnet18_adamw(2, 216.0), resnet18_adamw(4, 254.7), resnet18_adamw(8, 334.8)])
    assert curve.peak_allocated(1) == curve.peak_allocated(2) == int(223.6 * MIB)
    assert curve.peak_reserved(1) == curve.peak_reserved(2) == int(223.6 * 1.25 * MIB)
    assert curve.peak_allocated(3) == pytest.approx((216.0 + 254.7) / 2 * MIB, abs=2)
    assert curve.peak_allocated(16) == pytest.approx((334.8 + 8 * (334.8 - 254.7) / 4) * MIB, abs=8)


def test_fragmentation_after_the_backward_is_no_plateau():
    """Where the backward leads in tensors, what was reserved later grows with the size and puts no floor under it."""
    trials = [
        measured(size, 100 * size).model_copy(
            update={"backward_allocated": 100 * size, "backward_reserved": 90 * size, "optimizer_peak": 50}
        )
        for size in (2, 8)
    ]
    curve = fit_curve(trials)
    assert [curve.peak_reserved(size) for size in (1, 2, 8, 10)] == [100, 200, 800, 1000]


@pytest.mark.parametrize("peak_of_one", [0, 50, 199])
def test_a_single_sample_below_the_line_does_not_tilt_it(peak_of_one):
    """With two other sizes measured, a single sample that takes less than the line says is left out."""
    curve = fit_curve([measured(1, peak_of_one), measured(2, 300), measured(4, 500), measured(8, 900)])
    assert [curve.peak_reserved(size) for size in (1, 2, 3, 4, 8, 9)] == [200, 300, 400, 500, 900, 1000]


def test_a_single_sample_above_the_line_counts_for_itself():
    """A single sample that takes more than the line says is met, without moving the sizes above."""
    curve = fit_curve([measured(1, 280), measured(2, 300), measured(4, 500)])
    assert [curve.peak_reserved(size) for size in (1, 2, 4, 6)] == [280, 300, 500, 700]


def test_one_other_size_needs_the_single_sample():
    """With only one other size measured, a single sample makes the line."""
    curve = fit_curve([measured(1, 100), measured(2, 150)])
    assert curve.peak_reserved(10) == 550


def test_one_trial_gives_the_line_from_what_is_resident():
    """One trial alone is extended from the resident bytes: more than linear memory takes beyond it."""
    curve = fit_curve([measured(4, 500, resident=100)])
    assert [curve.peak_reserved(size) for size in (0, 2, 4, 8)] == [100, 300, 500, 900]


def test_trials_that_ran_out_do_not_count():
    """What an OOM reached is no measurement; what thrashed is one."""
    ran_out = Trial(micro_batch_size=16, outcome="oom", peak_allocated=900, peak_reserved=900)
    thrashed = measured(8, 900).model_copy(update={"outcome": "thrash"})
    curve = fit_curve([measured(2, 300), thrashed, ran_out])
    assert curve.peak_reserved(16) == 1700


@pytest.mark.parametrize("trials", [[], [Trial(micro_batch_size=2, outcome="oom", peak_allocated=5)]])
def test_a_curve_needs_a_trial_that_ran(trials):
    """Without a measurement there is no curve."""
    with pytest.raises(InvalidArgument, match=f"not {len(trials)} that ran out of memory"):
        fit_curve(trials)


@pytest.mark.parametrize("knots", [[(1, 5)], [(1, 5), (1, 6)], [(2, 5), (1, 6)], [(1, 5), (2, 4)]])
def test_a_curve_that_is_no_function_is_refused(knots):
    """Knots that are too few, out of order or falling are refused, also when read from JSON."""
    with pytest.raises(ValidationError):
        MemoryCurve(allocated=tuple(knots), reserved=((0, 0), (1, 1)))
