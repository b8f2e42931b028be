"""The text twin: the HTML's numbers in 80 columns."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from report_cases import CASES, Page, card_plan, make_rank_run, make_run, plans

from autobatch._formatting import format_bytes
from autobatch.report import html
from autobatch.report.html import render_report
from autobatch.report.text import explain_plan, show_plan

pytestmark = pytest.mark.quick

RUNS = (
    make_run([43, 43, 20, 43], retries=[2], outcome="failed", reason="CannotRetry: memory ended"),
    make_run([7] * 60, id="0c0c0c0c0c0c"),
    make_rank_run([(256, 1, 31.0), (64, 0, 155.0)], id="0d0d0d0d0d0d"),
)


def words(text):
    """Text without its line breaks and runs of spaces."""
    return re.sub(r"\s+", " ", text)


@pytest.fixture(autouse=True)
def without_matplotlib(monkeypatch):
    monkeypatch.setattr(html, "has_matplotlib", lambda: False)


def check_same_numbers(plan, runs):
    """Every cell and every note of the HTML stands in the text, row by row and in order."""
    shown, page = show_plan(plan, runs), Page(render_report(plan, runs)).root
    lines = [line.split() for line in shown.splitlines()]
    for table in page.iter("table"):
        for row in table.find("tbody"):
            cells = [cell.text or "" for cell in row if cell.get("class") != "long"]
            wanted = [word for cell in cells for word in cell.split()]
            assert any(is_within(wanted, line) for line in lines), (table.get("aria-label"), wanted)
    notes = [note.text for note in page.iter("p") if note.text and "matplotlib" not in note.text]
    assert all(words(note) in words(shown) for note in notes)


def is_within(wanted, line):
    """Whether the words come in this order, with others between them at most."""
    rest = iter(line)
    return all(word in rest for word in wanted)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans())
def test_any_plan_has_the_same_numbers_in_both(plan):
    """In at most 80 columns, without trailing spaces."""
    check_same_numbers(plan, ())
    for line in show_plan(plan).splitlines():
        assert len(line) <= 80
        assert line == line.rstrip()


@pytest.mark.parametrize("name", CASES)
def test_a_plan_with_runs_has_the_same_numbers_in_both(name):
    """Runs, their steps and setbacks too, whatever the plan lacks."""
    check_same_numbers(CASES[name], RUNS)
    assert max(map(len, show_plan(CASES[name], RUNS).splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_has_whole_cells(width):
    """Columns that do not fit follow below, with the first column again; no row is folded."""
    lines = show_plan(card_plan(), RUNS[:1], width).splitlines()
    assert max(map(len, lines)) <= width
    table = [line.split() for line in lines[lines.index("Trials") + 1 : lines.index("Where the memory goes")]]
    for trial in card_plan().trials:
        size = str(trial.micro_batch_size)
        cells = [word for row in table if row and row[0] == size for word in row[1:]]
        reserved = format_bytes(trial.peak_reserved).split()
        assert is_within([trial.outcome, *format_bytes(trial.peak_allocated).split(), *reserved], cells)
        assert cells[-1] == (f"{trial.samples_per_second:.1f}" if trial.samples_per_second else "-")


def test_long_words_are_broken():
    """Names without end, in any place, stay within 80 columns and whole."""
    plan = card_plan(model="Q" * 300, fingerprint="f" * 200, warnings=("w" * 500,))
    shown = show_plan(plan, (make_run([4], id="r" * 100, reason="e" * 300),))
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("Q") == 300
    assert shown.count("w") >= 500


def test_show_tells_what_explain_tells():
    """Every sentence of the whole story is in it, and the plan's facts besides."""
    shown = words(show_plan(card_plan()))
    assert words(explain_plan(card_plan()).split("\n", 1)[1]) in shown
    assert "model ResNet" in shown


def test_what_is_predicted_is_not_called_unused():
    """A plan that never ran has no gap between tensors and allocator to advise on."""
    assert "held but not used" not in explain_plan(CASES["predicted"])
