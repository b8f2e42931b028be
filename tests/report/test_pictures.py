"""The pictures show the plan's numbers: on Axes of the user, and as SVG that is at home in any page."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import CASES, GIB, card_plan, make_run, plans

from autobatch import InvalidArgument
from autobatch._formatting import format_bytes
from autobatch.events.run_history import Run, Setback
from autobatch.report.breakdown import held_bytes, memory_parts
from autobatch.report.html import render_fragment
from autobatch.report.pictures import draw_peaks, draw_run, draw_speeds, part_chart, plan_peaks, rank_chart
from autobatch.report.sections import Chart

figures = pytest.importorskip("matplotlib.figure")
ROOT = Path(__file__).resolve().parents[2]
few = settings(max_examples=20, deadline=None)


def draw(chart):
    ax = figures.Figure().add_subplot()
    (chart.draw if isinstance(chart, Chart) else chart)(ax)
    return ax


def tooltips(ax):
    """What is pointed at, with the place of its mark: ``{text: (x, y)}``."""
    named = [line for line in ax.lines if (line.get_gid() or "").startswith("title: ")]
    return {line.get_gid().removeprefix("title: "): (line.get_xdata()[0], line.get_ydata()[0]) for line in named}


@pytest.mark.parametrize("kind", ["peak", "memory"])
@pytest.mark.parametrize("name", CASES)
def test_any_plan_can_be_drawn(name, kind):
    """Whatever is missing in it."""
    ax = figures.Figure().add_subplot()
    assert CASES[name].plot(kind, ax) is ax
    ax.figure.canvas.draw_idle()


def test_the_picture_shows_trials_curve_limit_and_plan():
    """Each outcome has a mark of its own."""
    ax = card_plan().plot(ax=figures.Figure().add_subplot())
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    outcomes = {"fits", "fits, but slowly", "out of memory"}
    assert set(names) == {"curve", "curve, not tried", "the plan", *outcomes}
    assert {"budget 21.6 GiB", "limit 20.6 GiB"} <= {text.get_text() for text in ax.texts}
    assert ax.get_title("right") == "43 samples: 18.7 GiB"
    assert draw(partial(draw_speeds, card_plan())).get_title("right") == "43 samples: 811.3/s"


@pytest.mark.parametrize("kind", ["speed", [], None])
def test_an_unknown_picture_is_refused(kind):
    """With those that there are."""
    with pytest.raises(InvalidArgument, match="'peak' or 'memory'"):
        card_plan().plot(kind)


@pytest.mark.parametrize("kind", ["peak", "memory"])
def test_all_of_a_picture_lies_within_the_users_figure(kind):
    """In a subplot too: legend, labels and the edges of the bar."""
    figure = figures.Figure(figsize=(8, 4))
    ax = card_plan().plot(kind, figure.add_subplot(1, 2, 2))
    figure.draw_without_rendering()
    box, drawn = figure.bbox, ax.get_tightbbox()
    assert box.x0 <= drawn.x0 < drawn.x1 <= box.x1
    assert box.y0 <= drawn.y0 < drawn.y1 <= box.y1
    assert ax.bbox.height > 50
    assert not any(bar.get_clip_on() for bar in ax.patches if kind == "memory")


@pytest.mark.parametrize("ax", [5, figures.Figure()])
def test_what_is_no_axes_is_refused(ax):
    """A figure has many Axes, or none."""
    with pytest.raises(InvalidArgument, match="pass Axes of matplotlib"):
        card_plan().plot(ax=ax)


@few
@given(plans())
def test_marks_and_bands_lie_where_their_bytes_are(plan):
    """Trials, the plan's ring, the curve, the budget's edge and the headroom's."""
    ax = draw(partial(draw_peaks, plan_peaks(plan)))
    marks = tooltips(ax)
    for trial in plan.trials:
        [place] = {place for about, place in marks.items() if re.match(rf"{trial.micro_batch_size} samples?:", about)}
        assert place == (trial.micro_batch_size, max(held_bytes(trial), ax.get_ylim()[0]))
    [ring] = [place for about, place in marks.items() if about.startswith("the plan")]
    assert ring == (plan.micro_batch_size, plan.peak_bytes)
    for line in ax.lines:
        if "curve" in line.get_label():
            assert min(line.get_ydata()) >= ax.get_ylim()[0] or not plan.curve.peak_reserved(1)
            assert list(line.get_xdata()) == sorted(line.get_xdata())
            assert list(line.get_ydata()) == [max(plan.curve.peak_reserved(size), 1) for size in line.get_xdata()]
    edges = {line.get_ydata()[0] for line in ax.lines if list(line.get_xdata()) == [0, 1] and not line.get_gid()}
    if plan.budget_bytes:
        assert {plan.budget_bytes, plan.limit_bytes} <= edges


@few
@given(plans())
def test_the_bar_is_as_long_as_the_budget(plan):
    """Its pieces lie side by side, are as long as their bytes, and each says what it is."""
    parts = memory_parts(plan)
    bars, left = draw(part_chart(parts)).patches, 0
    for bar, part in zip(bars, parts, strict=True):
        assert (bar.get_x(), bar.get_width()) == (left, part.size_bytes)
        assert bar.get_gid() == f"title: {format_bytes(part.size_bytes)} {part.about}"
        left += part.size_bytes


def test_the_chart_of_ranks_has_bars_as_long_as_their_numbers():
    """Peaks within budgets on one scale, seconds on another; of each rank the numbers are written."""
    plan = CASES["ranks"]
    ax = draw(rank_chart(plan))
    lengths = [bar.get_width() for bar in ax.patches if bar.get_gid()]
    most = max(one.seconds for one in plan.ranks)
    wanted = [share for one in plan.ranks for share in (1, one.peak_bytes / one.budget_bytes, one.seconds / most)]
    assert lengths == pytest.approx(wanted)
    assert {format_bytes(one.peak_bytes) for one in plan.ranks} <= {text.get_text() for text in ax.texts}


@few
@given(sizes=st.lists(st.integers(1, 10**5), min_size=1, max_size=40), data=st.data())
def test_a_runs_line_has_its_sizes(sizes, data):
    """A step is drawn at its size, from its beginning to its end, and its retry where it was."""
    retried = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, max_size=3).map(sorted))
    ax = draw(partial(draw_run, make_run(sizes, retried)))
    line = ax.lines[0]
    assert list(line.get_xdata()) == [step for index in range(len(sizes)) for step in (2 * index, 2 * index + 2)]
    assert list(line.get_ydata()) == [size for size in sizes for _ in range(2)]
    assert set(tooltips(ax).values()) <= {(2 * index, sizes[index] + 1) for index in retried}
    assert bool(tooltips(ax)) == bool(retried)


def test_a_run_that_ended_in_its_first_step_shows_its_setback():
    """There is no line to draw."""
    back = Setback(step=0, kind="retry", old_size=4, new_size=2, used_bytes=GIB)
    run = Run(id="r", plan_id="p", pid=1, started_at=0.0, last_seen_at=1.0, setbacks=(back,))
    assert list(tooltips(draw(partial(draw_run, run))).values()) == [(0, 4)]


def read(chart):
    """A chart's SVG, as text and as a tree."""
    from autobatch.report.html import render_svg

    text = render_svg(chart, "a <name>")
    return text, ET.fromstring(text)


@pytest.mark.parametrize("name", CASES)
def test_svg_is_at_home_in_any_page(name):
    """Its colors are the page's, it has no ids, fetches nothing, and says what it is; twice it is the same."""
    chart = Chart(partial(draw_peaks, plan_peaks(CASES[name])))
    text, svg = read(chart)
    assert (svg.get("role"), svg.get("aria-label")) == ("img", "a <name>")
    assert not re.search(r"#[0-9a-f]{3,6}\b|\bid=|href|url\(|http|xmlns|DejaVu", text)
    assert {element.tag for element in svg.iter()} <= {"svg", "g", "path", "text", "title", "tspan"}
    assert read(chart)[0] == text


def test_marks_in_svg_say_what_they_are():
    """When pointed at."""
    titles = [title.text for title in read(Chart(partial(draw_peaks, plan_peaks(card_plan()))))[1].iter("title")]
    assert "43 samples: fits, 18.7 GiB" in titles
    assert "the plan: 43 samples: 18.7 GiB" in titles
    assert len(titles) == 6


def test_a_long_run_is_a_small_picture():
    """Ten thousand ranges and thousands of setbacks, with the one dip in it."""
    sizes = [40 + index % 3 for index in range(10_000)]
    sizes[7777] = 5
    text, _ = read(Chart(partial(draw_run, make_run(sizes, retries=range(0, 10_000, 3)))))
    assert len(text) < 200_000


def test_drawing_changes_no_settings():
    """A user's own pictures look as they did."""
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    read(Chart(partial(draw_peaks, plan_peaks(card_plan()))))
    card_plan().plot(ax=figures.Figure().add_subplot())
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("own", [{"text.usetex": True}, {"path.sketch": (1, 100, 2)}, {"font.size": 40}])
def test_a_page_does_not_follow_the_users_settings(own):
    """LaTeX may not be installed, and a sketch is a large page."""
    from matplotlib import rc_context

    expected = render_fragment(card_plan())
    with rc_context(own):
        assert render_fragment(card_plan()) == expected


def test_matplotlib_is_imported_by_pictures_alone():
    """Neither a plan nor its text needs it."""
    program = "import sys, autobatch.plan, autobatch.report.html; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=200)
