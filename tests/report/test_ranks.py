"""Ranks in reports: a row each, the slowest named, and what would help only where it would."""

from __future__ import annotations

import re

import pytest
from plans import GIB, make_plan, make_trial, make_whole_plans
from report_cases import CASES, make_rank_run

from autobatch.records import IN_EACH, SUMMINGS
from autobatch.report.advice import advise_ranks
from autobatch.report.html import render_fragment
from autobatch.report.text import explain_plan, show_plan

pytestmark = pytest.mark.quick

ONCE = SUMMINGS[1]
SHARES = (64, 64, 96, 32)
SECONDS = (0.155, 0.161, 0.231, 0.52)


def section(text, title):
    found = re.search(rf"^{re.escape(title)}\n((?:  .*\n?)+)", text, flags=re.MULTILINE)
    return [] if found is None else found[1].splitlines()


def test_a_plan_shows_a_row_for_each_rank():
    """Share, micro-batches, peak of the budget, milliseconds; then the slowest, in words."""
    for plan in make_whole_plans(SHARES, SECONDS):
        assert section(explain_plan(plan), "Ranks") == [
            "  rank  samples  micro-batches      peak    budget  ms/step  device",
            "     0       64  2 x 32         18.7 GiB  21.6 GiB    155.0  NVIDIA L4",
            "     1       64  2 x 32         18.7 GiB  21.6 GiB    161.0  NVIDIA L4",
            "     2       96  3 x 32         18.7 GiB  21.6 GiB    231.0  NVIDIA L4",
            "     3       32  1 x 32         18.7 GiB  21.6 GiB    520.0  NVIDIA L4",
            "  The slowest is rank 3: 520 ms a step by itself, the others 182 ms on average.",
        ]


@pytest.mark.parametrize(
    ("summing", "outcome", "sentence"),
    [
        (
            ONCE,
            "fits",
            "Ranks sum them once a step: two micro-batches took 30% less time, and 2.0 GiB more memory.",
        ),
        (IN_EACH, "oom", "Ranks sum them in each micro-batch: sums once a step do not fit."),
        (IN_EACH, "fits", "Ranks sum them in each micro-batch: others are no faster."),
    ],
)
def test_a_plan_says_how_often_sharded_gradients_are_summed(summing, outcome, sentence):
    """And why, in one sentence."""
    trials = {IN_EACH: make_trial(4, 8 * GIB), ONCE: make_trial(4, 10 * GIB, outcome)}
    trials[ONCE] = trials[ONCE].model_copy(update={"seconds": 0.7 * trials[IN_EACH].seconds})
    plan = make_plan(summing=summing, summing_trials=trials)
    assert section(explain_plan(plan), "Sums of sharded gradients") == [f"  {sentence}"]
    assert section(explain_plan(make_plan()), "Sums of sharded gradients") == []


def test_several_computers_are_named():
    """Beside the device; of one its name is left out."""
    plan = make_whole_plans((64, 64), (0.1, 0.2), hosts=("gpu-a", "gpu-b"))[0]
    rows = section(explain_plan(plan), "Ranks")
    assert [row.rpartition("  ")[2] for row in rows[1:3]] == ["NVIDIA L4 on gpu-a", "NVIDIA L4 on gpu-b"]
    assert rows[3] == "  The slowest is rank 1: 200 ms a step by itself, rank 0 100 ms."


@pytest.mark.parametrize(
    ("samples", "seconds", "advice"),
    [
        ((48, 48), (0.052, 0.155), "each would end after about 78 ms instead of 155 ms"),
        ((256, 64, 64), (1.2, 4.0, 1.1), "each would end after about 1.34 s instead of 4.00 s"),
        ((64, 64), (0.100, 0.170), "each would end after about 127 ms instead of 170 ms"),
        ((64, 64), (0.100, 0.150), ""),  # two equal devices with much else to do differ by as much
        ((64, 64), (0.1, 0.1), ""),
        ((1, 1), (0.1, 0.9), ""),  # one sample each is the least
        ((72, 24), (0.072, 0.072), ""),
        ((64, 64), (0.0, 0.1), ""),
    ],
)
def test_shares_by_speed_are_advised_where_they_help(samples, seconds, advice):
    """By how much, from the rates that were measured."""
    said = list(advise_ranks(samples, seconds))
    assert len(said) == bool(advice)
    assert all(line.endswith(advice) for line in said)


def test_a_plan_advises_shares_by_speed():
    """Among what would help, in text and in a notebook."""
    plan = make_whole_plans((48, 48), (0.052, 0.155))[0]
    for shown in (explain_plan(plan), render_fragment(plan).replace("&#39;", "'")):
        assert "all ranks wait for the slowest: fit(..., share='speed') divides the target so that each" in shown


def test_a_run_shows_a_row_for_each_rank():
    """What each did in all steps, and the most that any rank held in the line of the run."""
    run = make_rank_run([(256, 1, 31.0), (64, 0, 155.0), (64, 2, 30.0)])
    text = show_plan(CASES["card"], [run])
    assert section(text, "Run 1, 2026-09-21 14:13: ranks") == [
        "  rank  samples  micro-batch  retries     peak  ms/step",
        "     0     2560           43        1  1.0 GiB     31.0",
        "     1      640           43        0  2.0 GiB    155.0",
        "     2      640           43        2  3.0 GiB     30.0",
        "  The slowest was rank 1: 155 ms a step by itself, the others 30.5 ms on",
        "    average.",
        "  All ranks wait for the slowest: fit(..., share='speed') divides the target so",
        "    that each would end after about 36.3 ms instead of 155 ms.",
    ]
    assert "1  2026-09-21 14:13     10        3  3.0 GiB  running" in text
