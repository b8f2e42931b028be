"""``fit(check=)``: what the check of a split costs, says and stops."""

from __future__ import annotations

import pytest
import torch
from test_verification import RIGHT, WRONG
from workloads import Everything, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import InexactSplit
from autobatch.testing import FakeDevice


def fit_case(case, **options):
    """A plan that splits the case's step."""
    make_model, step, weigh, batch, *_ = case
    torch.manual_seed(0)
    return autobatch.fit(make_model(), 64, batch=batch, step=step, weigh=weigh, max_micro_batch=16, **options)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_split_is_warned_of_with_its_cause(name):
    """By default the plan is made, and warns; what was found is in it."""
    plan = fit_case(WRONG[name])
    [warning] = [warning for warning in plan.warnings if "not exact" in warning]
    assert WRONG[name][-1] in warning
    assert warning == str(plan.verdict)
    assert warning in plan.explain()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_split_is_not_warned_of(name):
    """No false alarm, under ``check="raise"`` either; the story tells that it was looked at."""
    plan = fit_case(RIGHT[name], check="raise")
    assert plan.verdict.exact
    assert not [warning for warning in plan.warnings if "exact" in warning]
    assert f"{plan.verdict} ({plan.verdict.seconds:.1f} s)" in plan.explain()


def test_a_wrong_split_is_refused_where_that_is_asked_for():
    """``check="raise"`` ends with the verdict's own words, and leaves no trace."""
    model = Everything()
    before = bits_of(model)
    with pytest.raises(InexactSplit, match=r"BatchNorm in train mode \(norm\)"):
        autobatch.fit(model, 64, batch=make_batch(8), step=mean_step, max_micro_batch=16, check="raise")
    assert differences(bits_of(model), before) == []


@pytest.mark.parametrize("options", [{"check": None}, {"max_micro_batch": None}], ids=["not asked", "not split"])
def test_what_needs_no_check_is_not_checked(options):
    """Nothing is run for it where nobody asks, or where the whole batch is one micro-batch."""
    model = Everything()
    plan = autobatch.fit(model, 64, **{"batch": make_batch(8), "step": mean_step, "max_micro_batch": 16, **options})
    assert plan.verdict is None
    assert not [warning for warning in plan.warnings if "exact" in warning]


def test_the_check_is_part_of_the_plans_seconds():
    """Its cost is told: within the whole, and not nothing."""
    plan = fit_case(RIGHT["plain"])
    assert 0 < plan.verdict.seconds < plan.seconds
    assert autobatch.Plan.model_validate_json(plan.model_dump_json()) == plan


def test_batch_norm_is_named_even_where_nothing_could_be_compared():
    """Samples that are all alike give no verdict, and the layers are known without one."""
    plan = autobatch.fit(Everything(), 64, batch=make_batch(1), step=mean_step, max_micro_batch=16)
    assert "one cannot be split" in plan.verdict.unchecked
    [warning] = [warning for warning in plan.warnings if "exact" in warning]
    assert "BatchNorm in train mode (norm)" in warning


def test_the_check_stays_within_the_limit():
    """Where 16 samples do not fit, fewer are compared."""
    model = RIGHT["plain"][0]()
    device = FakeDevice(lambda n: 100 + 10 * n, total_bytes=150)
    plan = autobatch.fit(model, 64, batch=make_batch(16), step=mean_step, device=device, headroom=0)
    assert plan.micro_batch_size == 5
    assert plan.verdict.exact
    assert plan.verdict.samples == 4
