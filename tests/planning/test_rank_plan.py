"""What a plan says of every rank: whole, in order, and the same as it says of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import make_whole_plans
from pydantic import ValidationError

from autobatch.plan import Plan
from autobatch.planning.division import find_slowest, seconds_by_speed

pytestmark = pytest.mark.quick

SECONDS = st.floats(1e-6, 1e6)


@pytest.mark.parametrize("shares", [(64, 64), (11, 5), (6, 5, 5), (1, 2, 3, 94)])
def test_all_ranks_say_the_same_of_all(shares, tmp_path):
    """Each has its own sizes, the rows of all, the name of the whole, and survives a file."""
    plans = make_whole_plans(shares, [0.5] * len(shares))
    for rank, plan in enumerate(plans):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert plan.ranks == plans[0].ranks
        assert plan.whole_id == "a0"
        assert (plan.ranks[rank].plan_id, plan.ranks[rank].share) == (plan.id, shares[rank])


WRONG = {
    "one too few": (lambda rows: rows[:1], "one entry for each of world_size=2 ranks"),
    "out of order": (lambda rows: rows[::-1], "one entry for each of world_size=2 ranks"),
    "another share": (lambda rows: (rows[0], rows[1].model_copy(update={"share": 6})), "other shares"),
    **{
        name: (
            lambda rows, name=name: (rows[0].model_copy(update={name: 1}), rows[1]),
            f"ranks has {name}=1 for rank 0, not the plan's own",
        )
        for name in ("micro_batch_size", "accumulation_steps", "peak_bytes", "budget_bytes")
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_contradict_the_plan_are_refused(name):
    """They would be shown as facts."""
    change, said = WRONG[name]
    plan = make_whole_plans((11, 5), (0.5, 0.5), size=4)[0]
    with pytest.raises(ValidationError, match=said):
        Plan(**{**dict(plan), "ranks": change(plan.ranks)})


@pytest.mark.parametrize(
    ("seconds", "slowest"),
    [((1.0, 2.0, 1.5), 1), ((2.0, 1.0, 2.0), 0), ((1.0, 1.0), None), ((0.0, 1.0), None), ((), None)],
)
def test_the_slowest_is_known_where_all_were_timed(seconds, slowest):
    """Where all take the same there is none."""
    assert find_slowest(seconds) == slowest


@pytest.mark.parametrize(
    ("samples", "seconds", "then"),
    [
        ((48, 48), (0.048, 0.144), 0.072),  # 72 and 24: three times as fast is three times as much
        ((64, 64), (0.5, 0.5), 0.5),
        ((1, 1), (0.1, 0.9), 0.9),  # no rank can be left without a sample
        ((0, 8), (0.1, 0.9), 0.0),
        ((4, 4), (0.0, 0.9), 0.0),
        ((), (), 0.0),
    ],
)
def test_shares_by_speed_end_together(samples, seconds, then):
    """To one sample; 0 where a rank's speed is not known."""
    assert seconds_by_speed(samples, seconds) == pytest.approx(then)


@given(st.lists(st.tuples(st.integers(1, 10**6), SECONDS), min_size=1, max_size=9))
def test_no_share_is_faster_than_all_rates_together(ranks):
    """The bound is what all ranks do in a second."""
    samples, seconds = zip(*ranks, strict=True)
    rate = sum(count / taken for count, taken in ranks)
    assert seconds_by_speed(samples, seconds) >= sum(samples) / rate * (1 - 1e-9)
