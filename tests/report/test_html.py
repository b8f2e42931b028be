"""The HTML report: whole, closed, escaped, harmless to the page around it, and with the plan's own numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markupsafe import escape
from report_cases import CASES, GIB, HOSTILE, Page, card_plan, make_run, plans

import autobatch.report
from autobatch._formatting import format_bytes
from autobatch.events.run_history import Setback
from autobatch.records import DeviceInfo, Tenant, Verdict
from autobatch.report import html
from autobatch.report.html import render_fragment, render_report, replace_unprintable

ROOT = Path(__file__).resolve().parents[2]
RUNS = (make_run([43, 43, 20, 43], retries=[2], outcome="failed", reason="CannotRetry: memory ended"),)
SCOPE = "autobatch-report"
TAGS = {"all", "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "div", "p", "ul", "li", "figure"}
TAGS |= {"svg", "g", "text", "tspan", "path", "table", "thead", "tbody", "tr", "th", "td"}
TAGS |= {"section", "b", "details", "summary", "pre"}


def styles(text):
    """The style sheets of a page or a fragment, without the templates' own comments."""
    return [element.text for element in Page(text).root.iter("style")]


def numbers(rows):
    """What the cells of a table hold, exactly; text where they hold none."""
    return [[float(cell.get("data-value")) if cell.get("data-value") else cell.text for cell in row] for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_a_report_is_one_closed_document(name):
    """Balanced, in English, titled, fit for a telephone; nothing runs and nothing is fetched, whatever is missing."""
    text = render_report(CASES[name], RUNS)
    page = Page(text).root.find("html")
    assert text.startswith("<!DOCTYPE html>\n")
    assert page.get("lang") == "en"
    assert page.find("head/title").text == f"autobatch: {CASES[name].model or 'a plan'} on {CASES[name].device.name}"
    assert [meta.get("name") or meta.get("charset") for meta in page.iter("meta")] == ["utf-8", "viewport"]
    assert {element.tag for element in page.iter()} <= TAGS
    assert not re.search(r"http|<script|javascript:|url\(|@import|\b(src|href|on\w+)=", text)


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setattr(html, "has_matplotlib", lambda: False)


@settings(max_examples=10, deadline=None)
@given(plans())
def test_any_plan_makes_a_closed_document(plan):
    """Whatever its numbers: balanced, no infinity, no nan."""
    text = render_report(plan)
    assert {element.tag for element in Page(text).root.iter()} <= TAGS
    assert not re.search(r'="[^"]*\b(nan|inf)\b', text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans())
def test_the_tables_hold_the_plans_numbers(without_matplotlib, plan):
    """Budget and trials, to the byte, from the plan's own JSON."""
    page, data = Page(render_report(plan)), json.loads(plan.model_dump_json())
    rows = numbers(page.table("Trials"))
    for row, trial in zip(rows, data["trials"], strict=True):
        rate = 2 * trial["micro_batch_size"] / trial["seconds"] if trial["seconds"] else "-"
        peaks = [trial[name] or "-" for name in ("peak_allocated", "peak_reserved", "optimizer_peak")]
        assert row == [trial["micro_batch_size"], trial["outcome"], *peaks, trial["alloc_retries"], rate]
    if data["budget_bytes"]:
        budget = {row[0]: row[1] for row in numbers(page.table("Budget"))}
        assert budget["budget"] == data["budget_bytes"]
        assert budget["headroom"] == data["headroom_bytes"]
        assert budget["limit"] == data["budget_bytes"] - data["headroom_bytes"]
    for size, peak, *_ in numbers(page.table("Memory curve")):
        assert peak == plan.curve.peak_reserved(int(size))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans())
def test_bytes_are_shown_as_people_read_them(without_matplotlib, plan):
    """Each cell with bytes shows what it holds; the planned row stands out."""
    page = Page(render_report(plan))
    for row in page.table("Where the memory goes"):
        assert row[0].text == format_bytes(int(row[0].get("data-value")))
    planned = [int(row.find("th").text) for row in page.root.iter("tr") if row.get("class") == "planned"]
    assert set(planned) == {plan.micro_batch_size}


def test_the_facts_of_a_card():
    """What was decided, for what and by whom; nothing that nobody noted."""
    rows = dict(numbers(Page(render_report(card_plan())).table("The plan")))
    assert rows == {
        "target batch": 256,
        "micro-batch size": 43,
        "micro-batches": "4 x 43, 2 x 42",
        "peak": 187 * GIB // 10,
        "optimizer state": GIB,
        "device": "NVIDIA L4",
        "model": "ResNet",
        "plan": "a1b2c3d4e5f6",
        "made (UTC)": "2026-09-21 14:13",
        "fit took": "4.2 s",
        "autobatch": "0.1.0",
        "fingerprint": "3f" * 16,
    }


def test_the_plans_json_is_there_and_whole():
    """What the page shows can be loaded again."""
    plan = card_plan(model=HOSTILE.replace("\x00", "").replace("\x1b", ""))
    written = Page(render_report(plan)).root.find(".//details/pre").text
    assert type(plan).model_validate_json(written) == plan


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30).map(lambda text: HOSTILE + text))
def test_whatever_comes_from_a_plan_is_text(without_matplotlib, hostile):
    """Names, warnings, causes, reasons, processes and ids cannot leave their place."""
    plan = card_plan(
        model=hostile,
        warnings=(hostile,),
        device=DeviceInfo(
            kind=hostile, name=hostile, total_bytes=1, tenants=(Tenant(pid=1, used_bytes=1, name=hostile),)
        ),
        verdict=Verdict(exact=False, relative_error=1.0, causes=(hostile,)),
        fingerprint=hostile,
        id=hostile,
        version=hostile,
        confirms=hostile,
    )
    back = Setback(step=0, kind="retry", old_size=4, new_size=2, reason=hostile)
    text = render_report(plan, (make_run([4], id=hostile, reason=hostile, setbacks=(back,)),))
    hostile = plan.model  # what steers a terminal is spelt out in each record
    page = Page(text).root
    assert {element.tag for element in page.iter()} <= TAGS
    assert {name for element in page.iter() for name in element.attrib if name.startswith("on")} == set()
    assert "<script" not in text
    assert text.count(str(escape(replace_unprintable(hostile)))) > 12
    text.encode()


def test_every_picture_and_table_says_what_it_is():
    """Pictures have a role and a name; headers say what they head."""
    page = Page(render_report(card_plan(), RUNS)).root
    names = {svg.get("aria-label"): svg.get("role") for svg in page.iter("svg")}
    drawn = ("Memory curve", "Trials", "Where the memory goes", "Run 1, 2026-09-21 14:13")
    assert names == dict.fromkeys(drawn, "img")
    assert {head.get("scope") for head in page.iter("th")} == {"col", "row"}
    assert all(table.get("aria-label") for table in page.iter("table"))


@pytest.mark.usefixtures("without_matplotlib")
@pytest.mark.parametrize("draw", [render_report, render_fragment])
def test_without_matplotlib_there_are_tables_and_a_way_to_pictures(draw):
    """In one line; where there is nothing to draw it is left out."""
    text = draw(card_plan(), RUNS)
    assert "<svg" not in text
    assert text.count("pip install") == 1
    assert Page(text).table("Memory curve")
    assert "pip install" not in draw(CASES["nothing known"])


def test_the_four_numbers_of_a_plan_come_first():
    """Micro-batch, steps, peak and budget, and whether splitting is exact."""
    [numbers] = [div for div in Page(render_report(card_plan())).root.iter("div") if div.get("class") == "headlines"]
    assert [(part.find("b").text, part.find("b").tail.strip()) for part in numbers] == [
        ("43", "samples in a micro-batch"),
        ("6 steps", "256 = 6 x 43 (two of 42)"),
        ("18.7 of 21.6 GiB", "peak"),
        ("not exact", "splitting the batch"),
    ]


def test_a_runs_tables_are_the_runs():
    """Its line, its steps, its setbacks, and how it ended."""
    page = Page(render_report(card_plan(), RUNS))
    assert numbers(page.table("Runs")) == [
        [1, "2026-09-21 14:13", 8, 1, 43 * GIB // 4, "failed"],
    ]
    assert numbers(page.table("Run 1, 2026-09-21 14:13"))[2] == ["4-5", 20, 1, 5 * GIB, 1024]
    assert numbers(page.table("Run 1, 2026-09-21 14:13: setbacks")) == [[4, "retry", 21, 20, "-", "out of memory"]]
    assert "Run 1 ended: CannotRetry: memory ended" in [p.text for p in page.root.iter("p")]


def test_long_lists_are_bounded_and_say_so(without_matplotlib):
    """A thousand ranges, and a hundred runs: what is left out is counted."""
    runs = [make_run([1 + index % 9 for index in range(1000)], id=f"run{number}") for number in range(100)]
    text = render_report(card_plan(), runs)
    page = Page(text)
    notes = [p.text for p in page.root.iter("p")]
    assert len(page.table("Run 100, 2026-09-21 14:13")) == 24
    assert notes.count("976 more ranges of steps between the first 12 and the last 12, not shown.") == 4
    assert "76 more runs between the first 12 and the last 12, not shown." in notes
    assert "Steps and setbacks: of the last 4 runs only." in notes
    assert [row[0].text for row in page.table("Runs")][-1] == "100"
    assert len(text) < 500_000


def test_a_notebook_keeps_its_looks():
    """Every rule of the fragment is under its class, and nothing has an id, so that two on one page do not meet."""
    text = render_fragment(card_plan(), RUNS)
    root = Page(text + text).root
    assert [child.get("class") for child in root] == [SCOPE, SCOPE]
    assert not [element for element in root.iter() if element.get("id")]
    [style] = styles(text)
    for selectors in re.findall(r"([^{};]+)\{(?!\s*\.)", re.sub(r"@media[^{]*\{", "", style)):
        assert all(f".{SCOPE}" in selector for selector in selectors.split(",")), selectors
    assert "<html" not in text


def test_styles_are_balanced_and_know_dark_and_print():
    """Light and dark colours of the same names; paper is always light."""
    style = styles(render_fragment(card_plan()))[0]
    assert style.count("{") == style.count("}")
    assert "@media screen and (prefers-color-scheme: dark)" in style
    assert "@media print" in style
    assert "<" not in style
    defined = re.findall(r"(--\w+):", style)
    colors = {name: defined.count(name) for name in defined if name != "--font"}
    assert colors == dict.fromkeys(colors, 3)
    assert set(re.findall(r"var\((--\w+)\)", render_report(card_plan(), RUNS))) <= set(defined)


def test_a_notebook_shows_numbers_and_one_picture_and_folds_the_rest():
    """The memory curve is open, all else in one closed part."""
    [element] = Page(render_fragment(card_plan(), RUNS)).root
    shown = [section.find("h2").text for section in element.findall("section")]
    folded = [section.find("h2").text for section in element.find("details") if section.tag == "section"]
    assert shown == ["Memory curve"]
    assert folded[:2] == ["Trials", "Where the memory goes"]
    assert {"The plan", "Budget", "Runs"} <= set(folded)
    assert "open" not in element.find("details").attrib


def test_a_smaller_micro_batch_with_a_higher_peak_is_explained():
    """It was retried, since another process took memory."""
    run = make_run([43, 43, 20, 20], retries=[2])
    ranges = [
        part.model_copy(update={"peak_bytes": 12 * GIB if part.retries else part.peak_bytes}) for part in run.ranges
    ]
    explained = "includes its first attempt"
    assert explained not in render_report(card_plan(), (run,))
    assert explained in render_report(card_plan(), (run.model_copy(update={"ranges": tuple(ranges)}),))


def test_templates_escape_all_that_they_insert():
    """No template switches escaping off, and only charts come to them as markup."""
    folder = Path(autobatch.report.__file__).parent
    templates = sorted((folder / "templates").iterdir())
    names = ["blocks.html", "notebook.html", "page.html", "style.css"]
    assert [template.name for template in templates] == names
    of_service = sorted((ROOT / "autobatch/service/templates").iterdir())
    for template in [*templates, *of_service]:
        assert not re.search(r"\|\s*safe|autoescape|set_block", template.read_text(encoding="utf-8")), template
    made = {
        file.name: file.read_text(encoding="utf-8").count(" Markup(")
        for file in (ROOT / "autobatch").rglob("*.py")
        if " Markup(" in file.read_text(encoding="utf-8")
    }
    assert made == {"html.py": 1, "pages.py": 1}  # charts, and the report in the service's page of a plan
