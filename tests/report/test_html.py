"""The HTML report: whole, closed, escaped, harmless to the page around it, and with the plan's own numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_cases import CASES, GIB, HOSTILE, Page, card_plan, make_plan, make_run, make_trial, plans

import autobatch.report
from autobatch._formatting import format_bytes, plural
from autobatch.events.run_history import Setback
from autobatch.records import DeviceInfo, Tenant, Verdict
from autobatch.report.html import render_fragment, render_report, render_template
from autobatch.report.svg import escape

ROOT = Path(__file__).resolve().parents[2]
RUNS = (make_run([43, 43, 20, 43], retries=[2], outcome="failed", reason="CannotRetry: memory ended"),)
SCOPE = "autobatch-report"
TAGS = {"all", "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "div", "p", "ul", "li", "figure"}
TAGS |= {"figcaption", "svg", "desc", "text", "path", "circle", "rect", "table", "thead", "tbody", "tr", "th", "td"}
TAGS |= {"details", "summary", "pre"}


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


@given(plans())
def test_any_plan_makes_a_closed_document(plan):
    """Whatever its numbers: balanced, no infinity, no nan."""
    text = render_report(plan)
    assert {element.tag for element in Page(text).root.iter()} <= TAGS
    assert not re.search(r'="-?(nan|inf)', text)


@given(plans())
def test_the_tables_hold_the_plans_numbers(plan):
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


@given(plans())
def test_bytes_are_shown_as_people_read_them(plan):
    """Each cell with bytes shows what it holds; the planned row stands out."""
    page = Page(render_report(plan))
    for row in page.table(f"Where the memory goes at {plural(plan.micro_batch_size, 'sample')}"):
        assert row[1].text == format_bytes(int(row[1].get("data-value")))
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
        "made": "2026-09-21 14:13 UTC",
        "fit took": "4.2 s",
        "autobatch": "0.1.0",
        "fingerprint": "3f" * 16,
    }


def test_the_plans_json_is_there_and_whole():
    """What the page shows can be loaded again."""
    plan = card_plan(model=HOSTILE.replace("\x00", "").replace("\x1b", ""))
    written = Page(render_report(plan)).root.find(".//details/pre").text
    assert type(plan).model_validate_json(written) == plan


@given(st.text(max_size=30).map(lambda text: HOSTILE + text))
def test_whatever_comes_from_a_plan_is_text(hostile):
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
    assert text.count(escape(hostile)) > 15
    text.encode()


def test_hostile_text_is_read_back_as_it_was():
    """Escaped once, not twice."""
    page = Page(render_report(card_plan(warnings=("a < b && c > 'd'",)))).root
    assert "a < b && c > 'd'" in [element.text for element in page.iter("li")]


def test_every_picture_and_table_says_what_it_is():
    """Pictures have a role, a title and a description; decorations are hidden; headers say what they head."""
    page = Page(render_report(card_plan(), RUNS)).root
    drawn = list(page.iter("svg"))
    assert len([svg for svg in drawn if svg.get("role") == "img"]) == 4
    for svg in drawn:
        assert svg.get("aria-hidden") == "true" or (svg.find("title").text and svg.find("desc").text)
    assert {head.get("scope") for head in page.iter("th")} == {"col", "row"}
    assert all(table.get("aria-label") for table in page.iter("table"))


def test_a_runs_tables_are_the_runs():
    """Its line, its steps, its setbacks, and how it ended."""
    page = Page(render_report(card_plan(), RUNS))
    assert numbers(page.table("Runs")) == [
        ["f0f0f0f0f0f0", "2026-09-21 14:13", 8, 1, 43 * GIB // 4, "failed"],
    ]
    assert numbers(page.table("Run f0f0f0f0f0f0: steps"))[2] == ["4-5", 20, 1, 5 * GIB, 1024]
    assert numbers(page.table("Run f0f0f0f0f0f0: setbacks")) == [[4, "retry", 21, 20, "-", "out of memory"]]
    assert "Run f0f0f0f0f0f0 ended: CannotRetry: memory ended" in [p.text for p in page.root.iter("p")]


def test_long_lists_are_bounded_and_say_so():
    """A thousand ranges, and a hundred runs: what is left out is counted."""
    runs = [make_run([1 + index % 9 for index in range(1000)], id=f"run{number}") for number in range(100)]
    text = render_report(card_plan(), runs)
    page = Page(text)
    notes = [p.text for p in page.root.iter("p")]
    assert len(page.table("Run run99: steps")) == 24
    assert notes.count("976 more ranges of steps between the first 12 and the last 12, not shown.") == 4
    assert "76 more runs between the first 12 and the last 12, not shown." in notes
    assert "Steps and setbacks: of the last 4 runs only." in notes
    assert [row[0].text for row in page.table("Runs")][-1] == "run99"
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
    page_style, fragment_style = styles(render_report(card_plan()))
    for style in (page_style, fragment_style):
        assert style.count("{") == style.count("}")
        assert "@media screen and (prefers-color-scheme: dark)" in style
        assert "@media print" in style
        assert "<" not in style
    defined = re.findall(r"(--\w+):", fragment_style)
    assert {name: defined.count(name) for name in defined} == dict.fromkeys(defined, 3)
    assert set(re.findall(r"var\((--\w+)\)", fragment_style)) <= set(defined)


def test_a_damaged_date_is_left_out():
    """A time beyond all calendars does not stop a report."""
    rows = dict(numbers(Page(render_report(card_plan().model_copy(update={"made_at": 1e300}))).table("The plan")))
    assert "made" not in rows


def test_ranks_are_told_where_there_are_several():
    """One rank is no news."""
    plan = make_plan([make_trial(4, GIB)], 4, 8, 2 * GIB, target_batch=16, world_size=2)
    assert dict(numbers(Page(render_report(plan)).table("The plan")))["ranks"] == 2


OUTLINE = [
    "h1: autobatch: ResNet on NVIDIA L4",
    "p summary: 256 = 6 x 43 (two of 42) on NVIDIA L4; p",
    "p : splitting is not exact: 16 samples in 0 ",
    "ul warnings: 1",
    "figcaption: Peak memory by micro-batch size",
    "picture: 42 elements",
    "ul keys: 7",
    "figcaption: Speed by micro-batch size",
    "picture: 38 elements",
    "ul keys: 4",
    "figcaption: Where the memory goes at 43 samples",
    "picture: 19 elements",
    "table Where the memory goes at 43 samples: 5 x 4, 0 planned",
    "p aside: In all 21.6 GiB, the budget.",
    "figcaption: Run f0f0f0f0f0f0: size and retries by step",
    "picture: 28 elements",
    "ul keys: 3",
    "h2: The plan",
    "table The plan: 12 x 2, 0 planned",
    "h2: Budget",
    "table Budget: 4 x 3, 0 planned",
    "p : process 4711 (python) holds 2.0 GiB",
    "h2: Trials",
    "table Trials: 5 x 7, 1 planned",
    "p aside: Each trial: two micro-batches accumulate",
    "p aside: Where memory ended (oom), peaks are what",
    "h2: Memory curve",
    "table Memory curve: 4 x 3, 1 planned",
    "p aside: The curve puts the largest size within t",
    "h2: What would help",
    "ul : 3",
    "h2: Runs",
    "table Runs: 1 x 6, 0 planned",
    "p aside: Run f0f0f0f0f0f0 ended: CannotRetry: mem",
    "h2: Run f0f0f0f0f0f0: steps",
    "table Run f0f0f0f0f0f0: steps: 4 x 5, 0 planned",
    "p aside: On a card these rates are of the time un",
    "h2: Run f0f0f0f0f0f0: setbacks",
    "table Run f0f0f0f0f0f0: setbacks: 1 x 6, 0 planned",
    "summary: The plan as JSON",
]


def outline(text):
    """The page's blocks in order: headings and lists as they are, tables and pictures by what they hold."""
    lines = []
    for element in Page(text).root.iter():
        kind = element.get("class") or ""
        if element.tag in {"h1", "h2", "figcaption", "summary"}:
            lines.append(f"{element.tag}: {element.text}")
        elif element.tag == "table":
            rows = list(element.find("tbody"))
            planned = [row.get("class") for row in rows].count("planned")
            lines.append(f"table {element.get('aria-label')}: {len(rows)} x {len(rows[0])}, {planned} planned")
        elif element.tag == "ul":
            lines.append(f"ul {kind}: {len(element)}")
        elif element.tag == "svg" and element.get("role") == "img":
            lines.append(f"picture: {len(list(element.iter()))} elements")
        elif element.tag == "p":
            lines.append(f"p {kind}: {element.text[:40]}")
    return lines


def test_the_blocks_of_a_page_are_those_that_are_recorded():
    """Headings, charts, tables and lists, in this order and of this size."""
    assert outline(render_report(card_plan(), RUNS)) == OUTLINE


def test_a_template_refuses_what_it_has_no_place_for():
    """A misspelt name would leave out what was given, in silence."""
    with pytest.raises(TypeError, match="warnigns"):
        render_template("fragment.html", summary="", sections=[], warnigns=["lost"])


def test_templates_escape_all_that_they_insert():
    """No template switches escaping off, and only charts, swatches and style sheets come to them as markup."""
    folder = Path(autobatch.report.__file__).parent
    templates = sorted((folder / "templates").iterdir())
    names = ["fragment.html", "macros.html", "page.css", "page.html", "style.css"]
    assert [template.name for template in templates] == names
    for template in templates:
        assert not re.search(r"\|\s*safe|autoescape|set_block", template.read_text(encoding="utf-8")), template
    made = {
        file.name: file.read_text(encoding="utf-8").count(" Markup(")
        for file in (ROOT / "autobatch").rglob("*.py")
        if " Markup(" in file.read_text(encoding="utf-8")
    }
    assert made == {"html.py": 1}
