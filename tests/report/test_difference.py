"""What differs between two plans: all of it, nothing else, as data and in words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_cases import CASES, GIB, card_plan, make_plan, make_trial, plans

from autobatch.records import DeviceInfo
from autobatch.report.difference import diff_plans, diff_plans_data

pytestmark = pytest.mark.quick


@given(plans())
def test_a_plan_does_not_differ_from_itself(plan):
    """Nothing is listed."""
    data = diff_plans_data(plan, plan)
    assert (data["fields"], data["trials"], data["curve"]) == ([], [], [])
    assert diff_plans(plan, plan).endswith("nothing else differs")


@given(plans(), plans())
def test_differences_are_the_fields_that_differ(a, b):
    """From the plans' own JSON, the other way round with the sides changed, and as JSON."""
    data, back = diff_plans_data(a, b), diff_plans_data(b, a)
    assert json.loads(json.dumps(data)) == data
    ours, theirs = (json.loads(plan.model_dump_json(exclude={"trials", "curve"})) for plan in (a, b))
    wanted = {name for name in ours if ours[name] != theirs[name]}
    assert {entry["field"].split(".")[0] for entry in data["fields"]} == wanted
    for here in ("fields", "trials", "curve"):
        turned = [{**entry, "a": entry["b"], "b": entry["a"]} for entry in back[here]]
        assert sorted(turned, key=str) == sorted(data[here], key=str)
    for point in data["curve"]:
        assert point["a"] == a.curve.peak_reserved(point["samples"]) != b.curve.peak_reserved(point["samples"])
        assert point["b"] == b.curve.peak_reserved(point["samples"])


@given(plans(), plans())
def test_words_fit_the_screen_and_name_each_difference(a, b):
    """A line each, in 80 columns."""
    data, text = diff_plans_data(a, b), diff_plans(a, b)
    assert max(map(len, text.splitlines())) <= 80
    starts = [line for line in text.splitlines() if not line.startswith(" ")]
    assert len(starts) == 1 + max(sum(len(data[name]) for name in ("fields", "trials", "curve")), 1)


def test_two_cards_in_words():
    """Sizes, bytes with their change, the device, the trials and the curve."""
    other = make_plan(
        [make_trial(2, 4 * GIB), make_trial(86, 30 * GIB), make_trial(87, 0, outcome="oom")],
        86,
        256,
        40 * GIB,
        GIB,
        device=DeviceInfo(kind="cuda", name="NVIDIA A100", total_bytes=80 * GIB),
        fingerprint="aa",
        model="ResNet",
        id="b",
        made_at=0.0,
    )
    text = diff_plans(card_plan(), other)
    for line in (
        "not the same workload, software or device: their fingerprints differ",
        "micro-batch size: 43 -> 86",
        "micro-batches: 4 x 43, 2 x 42 -> 1 x 86, 2 x 85",
        "budget: 21.6 GiB -> 40.0 GiB (+85.2%)",
        "peak: 18.7 GiB -> 30.0 GiB (+60.4%)",
        "device: NVIDIA L4 -> NVIDIA A100",
        "device tenants: process 4711 with 2.0 GiB -> none",
        "trial of 2 samples: fits with 3.5 GiB -> fits with 4.0 GiB",
        "trial of 48 samples: thrash with 20.6 GiB after 3 allocator retries -> none",
        "trial of 87 samples: none -> oom",
        "curve at 86 samples: 35.1 GiB -> 30.0 GiB (-14.6%)",
    ):
        assert line in text.splitlines(), line
    assert "headroom" not in text
    assert "model" not in text


@given(st.sampled_from(["", "aa"]), st.sampled_from(["", "aa", "bb"]))
def test_the_same_workload_is_the_same_fingerprint(first, second):
    """Known only where both have one."""
    data = diff_plans_data(card_plan(fingerprint=first), card_plan(fingerprint=second))
    assert data["same_workload"] == ((first == second) if first and second else None)
    line = diff_plans(card_plan(fingerprint=first), card_plan(fingerprint=second)).splitlines()[0]
    assert line.startswith(
        {True: "the same workload", False: "not the same workload", None: "not known"}[data["same_workload"]]
    )


def test_what_one_plan_lacks_is_none():
    """A prediction against the plan that ran: its trials and its check are missing, and its curve is the same."""
    data = diff_plans_data(CASES["predicted"], card_plan())
    assert [entry["field"] for entry in data["fields"]] == ["warnings", "predicted", "verdict"]
    assert [entry["a"] for entry in data["trials"]] == [None] * 5
    assert data["curve"] == []
    assert "check: none -> not exact: " in diff_plans(CASES["predicted"], card_plan())
