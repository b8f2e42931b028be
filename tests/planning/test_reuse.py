"""Which remembered plan may stand in for a search, and when its one trial confirms it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.planning.curve import fit_curve
from autobatch.planning.division import balance, useful_sizes
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.reuse import Wanted, choose_remembered, why_not_confirmed
from autobatch.records import DeviceInfo, Trial

MIB = 2**20
UNSEEN = "530.0 MiB then: something that the fingerprint cannot see has changed"


def needs(size):
    return (100 + 10 * size) * MIB


def try_size(size):
    return Trial(micro_batch_size=size, outcome="fits", peak_allocated=needs(size), peak_reserved=needs(size))


LIMIT = needs(50)


def make_plan(size=43, limit=LIMIT, **changes):
    """A plan for 256 samples with this size."""
    sizes = balance(256, size)
    fields = {
        "target_batch": 256,
        "world_size": 1,
        "micro_batch_size": sizes[0],
        "micro_batch_sizes": sizes,
        "accumulation_steps": len(sizes),
        "budget_bytes": limit,
        "headroom_bytes": 0,
        "peak_bytes": needs(sizes[0]),
        "curve": fit_curve([try_size(2), try_size(8), try_size(sizes[0])]),
        "trials": (),
        "device": DeviceInfo(kind="cpu", name="CPU", total_bytes=2**34),
        "version": "0",
        "id": "a",
        "max_micro_batch": 256,
        "searched_bytes": limit,
    }
    return PlanRecord(**{**fields, **changes})


def want(**changes):
    """The same question as the plan's, within the same limit."""
    fields = {
        "target_batch": 256,
        "max_micro_batch": 256,
        "objective": "throughput",
        "accumulate_in_float32": True,
        "limit_bytes": needs(50),
    }
    return Wanted(**{**fields, **changes})


def test_the_newest_plan_for_the_same_question_is_taken():
    """The first of them, as they come newest first."""
    newest, older = make_plan(id="new"), make_plan(id="old")
    assert choose_remembered([newest, older], want())[0] is newest


def test_a_plan_for_another_question_is_told():
    """It is the same step, so whoever waits for a whole search should know why."""
    found = choose_remembered([make_plan(id="a")], want(target_batch=512, objective="memory"))
    assert found[0].id == "a"
    assert found[1] == ("it was made for target_batch=256, not 512, and objective='throughput', not 'memory'")


def test_a_start_under_a_lower_limit_does_not_hide_the_better_plan():
    """The size that ran within today's limit is taken, though a smaller one was needed since."""
    better, newer = make_plan(id="better"), make_plan(32, limit=needs(49), id="newer", failing_size=37)
    found = choose_remembered([newer, better], want())
    assert found[0] == better
    assert choose_remembered([newer, better], want(limit_bytes=needs(40)))[0] == newer
    alike = [plan.model_copy(update={"objective": "memory"}) for plan in (newer, better)]
    assert choose_remembered(alike, want(objective="memory"))[0] == alike[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"target_batch": 512},
        {"max_micro_batch": 64},
        {"objective": "memory"},
        {"accumulate_in_float32": False},
    ],
    ids=str,
)
def test_a_plan_for_another_question_is_no_candidate(changes):
    """Nothing about it has failed, but whoever waits for a search should know why."""
    plan, reason = choose_remembered([make_plan()], want(**changes))
    [(name, value)] = changes.items()
    assert plan.id == "a"
    assert reason.startswith(f"it was made for {name}=")
    assert reason.endswith(f", not {value!r}")


def test_a_predicted_plan_is_no_candidate():
    """Its size has never run."""
    assert choose_remembered([make_plan(predicted=True)], want())[0] is None


def test_a_plan_that_needs_more_than_there_is_today_is_refused():
    """With both numbers; an older and smaller one that fits is taken, if nothing larger is possible."""
    found = choose_remembered([make_plan()], want(limit_bytes=needs(42)))
    assert found[1] == "it needs 530.0 MiB, and the limit is 520.0 MiB today"
    smaller = make_plan(size=37, limit=needs(40), id="small")
    assert choose_remembered([make_plan(), smaller], want(limit_bytes=needs(42)))[0] is smaller


def test_more_memory_than_then_asks_for_a_search_only_where_it_would_help():
    """52 is the next size that saves a step: up to there the plan is still the best."""
    assert choose_remembered([make_plan()], want(limit_bytes=needs(51)))[1] == ""
    found = choose_remembered([make_plan()], want(limit_bytes=needs(52)))
    assert found[1] == "the limit is 620.0 MiB today and was 600.0 MiB then: more than its 43 samples may fit"


def test_a_plan_that_runs_all_at_once_or_least_memory_needs_no_more():
    """However much there is today."""
    assert choose_remembered([make_plan(size=256, limit=needs(300))], want(limit_bytes=needs(9999)))[1] == ""
    frugal = make_plan(objective="memory")
    assert choose_remembered([frugal], want(objective="memory", limit_bytes=needs(9999)))[0] is frugal
    bounded = make_plan(max_micro_batch=43)
    assert choose_remembered([bounded], want(max_micro_batch=43, limit_bytes=needs(9999)))[0] is bounded


@given(st.integers(1, 300), st.integers(1, 600))
def test_what_is_taken_is_what_a_search_would_find(then, today):
    """On memory that is a line: never a plan that does not fit, never one that a search would better."""

    def best(samples):
        return max(size for size in useful_sizes(256, 256) if size <= samples)

    plan = make_plan(size=best(then), limit=needs(then))
    found = choose_remembered([plan], want(limit_bytes=needs(today)))
    if not found[1]:
        assert best(then) == best(today)
    else:
        assert best(then) != best(today)
        assert found[1]


@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        (try_size(43), ""),
        (try_size(43).model_copy(update={"peak_reserved": needs(43) + 20 * MIB}), ""),
        (
            try_size(43).model_copy(update={"peak_reserved": needs(43) + 40 * MIB}),
            f"43 samples took 570.0 MiB this time and {UNSEEN}",
        ),
        (
            try_size(43).model_copy(update={"peak_reserved": needs(43) - 40 * MIB}),
            f"43 samples took 490.0 MiB this time and {UNSEEN}",
        ),
        (try_size(43).model_copy(update={"outcome": "oom"}), "43 samples ran out of memory this time"),
        (
            try_size(43).model_copy(update={"outcome": "thrash"}),
            "43 samples fit this time only because the allocator gave memory back",
        ),
    ],
)
def test_one_trial_confirms_a_plan_or_says_why_not(trial, reason):
    """The same peak within 5 %, without running out; less than then is a change as well."""
    assert why_not_confirmed(make_plan(), trial, needs(99)) == reason


def test_a_trial_beyond_todays_limit_confirms_nothing():
    """Though it ran, and took what it took then."""
    assert why_not_confirmed(make_plan(), try_size(43), needs(43)) == ""
    reason = why_not_confirmed(make_plan(), try_size(43), needs(43) - 1)
    assert reason == "43 samples took 530.0 MiB, and the limit is 530.0 MiB"


def test_many_small_changes_are_one_large_one():
    """Each confirmation is held against the search, not against the one before it."""
    plan, starts = make_plan(), 0
    while not why_not_confirmed(plan, trial := grown(plan, 1.02), needs(99)):
        plan = plan.model_copy(update={"peak_bytes": trial.peak_reserved, "confirms": "a"})
        starts += 1
    assert starts == 2  # 1.02 ** 3 is more than 1.05


def grown(plan, factor):
    """A trial of the plan's size that takes more than the plan's last one."""
    peak = round(plan.peak_bytes * factor)
    return try_size(43).model_copy(update={"peak_allocated": peak, "peak_reserved": peak})


def test_what_the_update_hides_is_compared_too():
    """The optimizer's step leads, so the peak is the same while the passes take three times as much."""

    def try_hidden(size, backward):
        return Trial(
            micro_batch_size=size,
            outcome="fits",
            peak_allocated=1000 * MIB,
            peak_reserved=1000 * MIB,
            optimizer_peak=1000 * MIB,
            backward_allocated=backward * MIB,
            backward_reserved=backward * MIB,
        )

    curve = fit_curve([try_hidden(2, 120), try_hidden(43, 260)])
    plan = make_plan(curve=curve, peak_bytes=1000 * MIB)
    assert why_not_confirmed(plan, try_hidden(43, 260), needs(999)) == ""
    assert "took 900.0 MiB this time and 260.0 MiB then" in why_not_confirmed(plan, try_hidden(43, 900), needs(999))


@pytest.mark.parametrize(("more", "serves"), [(1, True), (4096, True), (30 * MIB, True), (32 * MIB, False)])
def test_a_size_that_has_failed_is_not_tried_again_for_a_few_bytes(more, serves):
    """Beyond what ran the curve is a lower bound: 52 samples are said to fit, and did not."""
    bent = fit_curve([try_size(2), try_size(8), try_size(43)])
    assert bent.peak_reserved(52) <= needs(52)
    plan = make_plan(limit=needs(50), curve=bent, failing_size=52, searched_bytes=needs(52))
    found = choose_remembered([plan], want(limit_bytes=needs(52) + more))
    assert (found[1] == "") == serves
