"""The pictures show the plan's numbers: each mark is read back from where it was drawn, by its own axes."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_cases import CASES, GIB, Page, card_plan, centre, make_run, plans, read_axis, with_class

from autobatch._formatting import format_bytes
from autobatch.events.run_history import Run, Setback
from autobatch.report.breakdown import held_bytes, memory_parts
from autobatch.report.charts import memory_bar, peak_chart, run_chart, speed_chart, thin_out
from autobatch.report.svg import Scale

NEAR = 0.15  # labels and marks are rounded to a hundredth


def read(svg):
    """The picture as a tree."""
    (found,) = Page(svg).charts().values()
    return found


def check_marks(svg, plan, height_of):
    """Every trial's mark is of its outcome's shape, where its numbers say."""
    across, upward = read_axis(svg, "across"), read_axis(svg, "upward")
    marks = with_class(svg, "trial")
    shown = [trial for trial in plan.trials if height_of(trial) is not None]
    assert len(marks) == len(shown)
    for mark, trial in zip(marks, shown, strict=True):
        assert trial.outcome in mark.get("class")
        x, y = centre(mark)
        assert x == pytest.approx(across(trial.micro_batch_size), abs=NEAR)
        bottom = 246 if not height_of(trial) else upward(height_of(trial))
        assert y == pytest.approx(min(bottom, 246), abs=NEAR)


@given(plans())
def test_trials_and_bands_lie_where_their_bytes_are(plan):
    """Dots, crosses and triangles; the budget's edge, the headroom's, and the ring around the planned size."""
    svg = read(peak_chart(plan))
    check_marks(svg, plan, held_bytes)
    across, upward = read_axis(svg, "across"), read_axis(svg, "upward")
    (ring,) = [mark for mark in with_class(svg, "chosen") if mark.tag == "circle"]
    assert centre(ring) == pytest.approx((across(plan.micro_batch_size), upward(plan.peak_bytes)), abs=NEAR)
    edges = {kind: with_class(svg, kind) for kind in ("beyond", "headroom", "budget", "limit")}
    if not plan.budget_bytes:
        assert edges == {"beyond": [], "headroom": [], "budget": [], "limit": []}
        return
    budget, limit = upward(plan.budget_bytes), upward(plan.limit_bytes)
    (beyond,) = edges["beyond"]
    assert float(beyond.get("y")) + float(beyond.get("height")) == pytest.approx(budget, abs=NEAR)
    assert float(edges["budget"][0].get("d").split()[1]) == pytest.approx(budget, abs=NEAR)
    for rect in edges["headroom"]:
        assert float(rect.get("y")) == pytest.approx(budget, abs=NEAR)
        assert float(rect.get("height")) == pytest.approx(limit - budget, abs=NEAR)
    assert bool(edges["limit"]) == (plan.headroom_bytes > 0)


@given(plans())
def test_rates_lie_where_they_are(plan):
    """Samples a second of each trial that took a time; one that ran out has none and lies on the ground."""
    chart = speed_chart(plan)
    if not chart:
        assert not any(trial.samples_per_second for trial in plan.trials if trial.outcome != "oom")
        return
    check_marks(read(chart), plan, lambda trial: 0 if trial.outcome == "oom" else trial.samples_per_second or None)


@given(plans())
def test_the_curve_is_drawn_where_it_says(plan):
    """The line goes up, starts dashed only beyond the largest size that ran, and is at the curve's own heights."""
    svg = read(peak_chart(plan))
    across, upward = read_axis(svg, "across"), read_axis(svg, "upward")
    for line in with_class(svg, "curve"):
        points = [tuple(map(float, place.split())) for place in line.get("d")[1:].split(" L")]
        assert all(before[0] <= after[0] and before[1] >= after[1] for before, after in pairwise(points))
        ran = max(trial.micro_batch_size for trial in plan.trials if trial.outcome != "oom")
        edge = points[0] if "expected" in line.get("class") else points[-1]
        if not ("expected" in line.get("class") and len(with_class(svg, "curve")) == 1):
            assert edge == pytest.approx((across(ran), upward(plan.curve.peak_reserved(ran))), abs=NEAR)


def test_the_chosen_size_is_labelled():
    """With its samples and its peak, in both pictures."""
    assert [text.text for text in with_class(read(peak_chart(card_plan())), "plan")] == ["43 samples: 18.7 GiB"]
    assert [text.text for text in with_class(read(speed_chart(card_plan())), "plan")] == ["43 samples: 811.3/s"]


def test_far_apart_values_have_a_log_scale_that_says_so():
    """From 10 KB to 200 GiB all dots are distinct, and the axis is labelled."""
    svg = read(peak_chart(CASES["from 10 KB to 200 GiB"]))
    places = [centre(mark) for mark in with_class(svg, "trial")]
    assert all(right[0] - left[0] > 9 and left[1] - right[1] > 9 for left, right in pairwise(places))
    assert {"peak (log scale)", "samples in a micro-batch (log scale)"} <= {text.text for text in svg.iter("text")}
    assert "log scale" not in peak_chart(card_plan())


@given(plans())
def test_the_bar_is_as_long_as_the_budget(plan):
    """Its pieces lie side by side, in proportion to their bytes, and each says what it is."""
    svg = read(memory_bar(plan))
    pieces, parts = with_class(svg, "part"), memory_parts(plan)
    total = sum(part.size_bytes for part in parts)
    assert [piece.get("class") for piece in pieces] == [f"part {part.key}" for part in parts]
    at = float(pieces[0].get("x"))
    length = float(pieces[-1].get("x")) + float(pieces[-1].get("width")) - at
    for piece, part in zip(pieces, parts, strict=True):
        assert float(piece.get("x")) == pytest.approx(at, abs=NEAR)
        if total > 1:
            assert float(piece.get("width")) == pytest.approx(length * part.size_bytes / total, abs=NEAR)
        assert piece.find("title").text == f"{format_bytes(part.size_bytes)} {part.about}"
        at += float(piece.get("width"))


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("card", (True, True, True)),
        ("predicted", (True, False, True)),
        ("unmeasured", (False, True, False)),
        ("one trial without time", (True, False, True)),
        ("nothing known", (False, False, False)),
    ],
)
def test_what_was_not_measured_is_not_drawn(name, there):
    """No picture is better than one of zeros."""
    assert tuple(bool(draw(CASES[name])) for draw in (peak_chart, speed_chart, memory_bar)) == there


@given(sizes=st.lists(st.integers(0, 10**5), min_size=1, max_size=40), data=st.data())
def test_a_runs_line_has_its_sizes(sizes, data):
    """A step is drawn at its size, from its beginning to its end, and its retry where it was."""
    retried = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, max_size=3).map(sorted))
    svg = read(run_chart(make_run([size + 1 for size in sizes], retried)))
    across, upward = read_axis(svg, "across"), read_axis(svg, "upward")
    (line,) = with_class(svg, "sizes")
    points = [tuple(map(float, place.split())) for place in line.get("d")[1:].split(" L")]
    for index, size in enumerate(sizes):
        assert points[2 * index] == pytest.approx((across(2 * index), upward(size + 1)), abs=NEAR)
        assert points[2 * index + 1] == pytest.approx((across(2 * index + 2), upward(size + 1)), abs=NEAR)
    assert [float(bar.get("x")) for bar in with_class(svg, "retries")] == pytest.approx(
        [across(2 * index) for index in retried], abs=NEAR
    )
    for mark, index in zip(with_class(svg, "setback"), retried, strict=False):
        assert centre(mark) == pytest.approx((across(2 * index), upward(sizes[index] + 2)), abs=NEAR)


@given(sizes=st.lists(st.integers(1, 999), min_size=1, max_size=3000), width=st.integers(2, 30))
def test_thinning_keeps_the_least_and_the_most(sizes, width):
    """At most four ranges a place; the ends, and each place's extremes, are among them, in order."""
    run = make_run(sizes)
    across = Scale(0, 2 * len(sizes), 0, width)
    thinned = thin_out(run.ranges, across)
    assert len(thinned) <= 4 * (width + 1)
    assert (thinned[0], thinned[-1]) == (run.ranges[0], run.ranges[-1])
    assert sorted(thinned, key=lambda part: part.first_step) == thinned
    for place in range(width):
        there, drawn = (
            [part.micro_batch_size for part in parts if int(across.position(part.first_step)) == place]
            for parts in (run.ranges, thinned)
        )
        assert not there or (min(there), max(there)) == (min(drawn), max(drawn))


def test_a_long_run_is_a_small_picture():
    """Ten thousand ranges and thousands of setbacks: still some tens of KB, with the one dip in it."""
    sizes = [40 + index % 3 for index in range(10_000)]
    sizes[7777] = 5
    chart = run_chart(make_run(sizes, retries=range(0, 10_000, 3)))
    assert len(chart) < 100_000
    svg = read(chart)
    lowest = max(float(y) for y in re.findall(r"\d (\d+\.?\d*)", with_class(svg, "sizes")[0].get("d")))
    assert lowest == pytest.approx(read_axis(svg, "upward")(5), abs=NEAR)


def test_a_size_that_grew_back_points_up():
    """And one that went down points down; both are at the new size."""
    changes = [{"step": 1, "old_size": 43, "new_size": 20}, {"step": 3, "old_size": 20, "new_size": 43}]
    run = make_run([43, 20, 43], setbacks=tuple(Setback(kind="size", **change) for change in changes))
    svg = read(run_chart(run))
    down, up = with_class(svg, "setback", "changed")
    assert [float(re.search(r"l-5.5 (\S+) z", mark.get("d"))[1]) for mark in (down, up)] == [9, -9]
    assert centre(down) == pytest.approx((read_axis(svg, "across")(1), read_axis(svg, "upward")(20)), abs=NEAR)


def test_a_run_without_steps_has_no_picture():
    """A process that ended before its first step leaves nothing to draw; one that ended in it leaves its setback."""
    empty = Run(id="r", plan_id="p", pid=1, started_at=0.0, last_seen_at=1.0)
    assert run_chart(empty) == ""
    back = Setback(step=0, kind="retry", old_size=4, new_size=2, used_bytes=GIB)
    assert len(with_class(read(run_chart(empty.model_copy(update={"setbacks": (back,)}))), "setback")) == 1
