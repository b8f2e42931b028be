"""A plan and its runs as HTML: pictures, and the same numbers in tables beneath them.

Covers a whole document and the fragment that a notebook shows. Nothing in them runs or is fetched, and whatever comes
from a plan is escaped. Does not cover what is shown (``tables``, ``charts``, ``run_chart``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autobatch._formatting import plural
from autobatch.events.run_history import Run
from autobatch.planning.plan_record import PlanRecord
from autobatch.report.advice import advise, tenant_lines
from autobatch.report.breakdown import memory_parts
from autobatch.report.charts import memory_bar, peak_chart, speed_chart
from autobatch.report.html_table import render_table
from autobatch.report.run_chart import run_chart
from autobatch.report.style import PAGE_STYLE, SCOPE, STYLE
from autobatch.report.svg import cross, dot, element, escape, polyline, triangle
from autobatch.report.tables import (
    breakdown_table,
    budget_table,
    curve_table,
    facts_table,
    newest,
    range_table,
    run_table,
    setback_table,
    trial_table,
)
from autobatch.report.text import summarise_plan

__all__ = ["render_fragment", "render_report"]


def render_report(plan: PlanRecord, runs: Sequence[Run] = ()) -> str:
    """One HTML document that needs nothing else: light and dark, on a telephone, on paper.

    Args:
        plan: What is shown.
        runs: Those of this plan, oldest first. All are in the table, within bounds; the last few are drawn.

    Returns:
        The document; write it as UTF-8.
    """
    title = escape(f"autobatch: {plan.model or 'a plan'} on {plan.device.name}")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{PAGE_STYLE}</style>"
    )
    body = f"<main><h1>{title}</h1>{render_fragment(plan, runs)}</main>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def render_fragment(plan: PlanRecord, runs: Sequence[Run] = ()) -> str:
    """The same as one element for a page that is there already; its styles reach nothing else, and it has no ids."""
    return element(
        "div",
        f"<style>{STYLE}</style>",
        element("p", escape(summarise_plan(plan).removeprefix("autobatch: ")), class_="summary"),
        *_warnings(plan),
        *_pictures(plan, runs),
        *_tables(plan),
        *_run_tables(runs),
        _json(plan),
        class_=SCOPE,
    )


def _json(plan: PlanRecord) -> str:
    written = element("pre", escape(plan.model_dump_json(indent=2)))
    return element("details", element("summary", "The plan as JSON"), written)


def _warnings(plan: PlanRecord) -> Iterator[str]:
    if plan.verdict is not None:
        yield element("p", escape(f"{plan.verdict} ({plan.verdict.seconds:.1f} s)"))
    if plan.warnings:
        items = (element("li", escape(warning)) for warning in plan.warnings)
        yield element("ul", *items, class_="warnings", aria_label="warnings")


def _pictures(plan: PlanRecord, runs: Sequence[Run]) -> Iterator[str]:
    size = plural(plan.micro_batch_size, "sample")
    charts = [
        ("Peak memory by micro-batch size", peak_chart(plan), _trial_keys(plan, ("curve", "budget", "limit"))),
        ("Speed by micro-batch size", speed_chart(plan), _trial_keys(plan, ())),
        (f"Where the memory goes at {size}", memory_bar(plan), _breakdown(plan)),
        *((f"Run {run.id}: size and retries by step", run_chart(run), _setback_keys(run)) for run in newest(runs)),
    ]
    figures = [_figure(caption, chart, keys) for caption, chart, keys in charts if chart]
    if figures:
        yield element("div", *figures, class_="charts")
    else:
        yield element("p", "Nothing was measured that could be drawn.", class_="aside")


def _figure(caption: str, chart: str, keys: str) -> str:
    return element("figure", element("figcaption", escape(caption)), chart, keys)


_KEYS = {
    "fits": (dot(11, 8, "fits", ""), "a trial that fits"),
    "thrash": (triangle(11, 8, "thrash", ""), "fits only by giving memory back"),
    "oom": (cross(11, 8, "oom", ""), "out of memory"),
    "chosen": (dot(11, 8, "chosen", "", radius=7), "the plan's size"),
    "curve": (polyline([(0, 8), (22, 8)], "curve"), "the curve; dashed where nothing ran"),
    "budget": (polyline([(0, 8), (22, 8)], "budget"), "the budget"),
    "limit": (polyline([(0, 8), (22, 8)], "limit"), "the limit: the budget less the headroom"),
}


def _trial_keys(plan: PlanRecord, others: tuple[str, ...]) -> str:
    """What the marks mean, of those that are there."""
    there = {trial.outcome for trial in plan.trials} | {"chosen"}
    there |= {"curve"} if plan.curve else set()
    there |= {"budget"} if plan.budget_bytes else set()
    there |= {"limit"} if plan.headroom_bytes else set()
    shown = ("fits", "thrash", "oom", "chosen", *others)
    keys = (_key(*_KEYS[name]) for name in shown if name in there)
    return element("ul", *keys, class_="keys")


def _key(mark: str, meaning: str, kind: str = "") -> str:
    return element("li", element("svg", mark, viewBox="0 0 22 16", aria_hidden="true", class_=kind), escape(meaning))


def _breakdown(plan: PlanRecord) -> str:
    swatches = [
        element(
            "svg",
            element("rect", width=14, height=14, class_=f"part {part.key}"),
            viewBox="0 0 14 14",
            width="14",
            height="14",
            aria_hidden="true",
            class_="swatch",
        )
        for part in memory_parts(plan)
    ]
    return render_table(breakdown_table(plan), "where the memory goes", leads=swatches)


def _tables(plan: PlanRecord) -> Iterator[str]:
    yield from _section("The plan", render_table(facts_table(plan), "the plan"))
    tenants = (element("p", escape(line)) for line in tenant_lines(plan.device))
    yield from _section("Budget", render_table(budget_table(plan), "budget"), *tenants)
    if plan.trials:
        yield from _section("Trials", render_table(trial_table(plan), "trials", planned=plan.micro_batch_size))
    if plan.curve is not None:
        yield from _section(
            "Memory curve", render_table(curve_table(plan), "memory curve", planned=plan.micro_batch_size)
        )
    advice = [element("li", escape(line)) for line in advise(plan)]
    if advice:
        yield from _section("What would help", element("ul", *advice))


def _run_tables(runs: Sequence[Run]) -> Iterator[str]:
    if runs:
        yield from _section("Runs", render_table(run_table(runs), "runs"))
    for run in newest(runs):
        if run.ranges:
            yield from _section(f"Run {run.id}: steps", render_table(range_table(run), f"steps of run {run.id}"))
        if run.setbacks:
            yield from _section(
                f"Run {run.id}: setbacks", render_table(setback_table(run), f"setbacks of run {run.id}")
            )


def _setback_keys(run: Run) -> str:
    keys = [_key(polyline([(0, 8), (22, 8)], "sizes"), "the most samples in a micro-batch")]
    kinds = {back.kind for back in run.setbacks}
    if run.retries:
        bar = element("rect", x=8, y=2, width=6, height=12, class_="retries")
        keys.append(_key(bar, f"retries; the highest bar is {max(part.retries for part in run.ranges)}"))
    if "retry" in kinds:
        keys.append(_key(cross(11, 8, "oom", ""), "a step that was undone and done again"))
    if "size" in kinds:
        keys.append(_key(triangle(11, 8, "changed", ""), "the size changed between two steps"))
    return element("ul", *keys, class_="keys")


def _section(title: str, *content: str) -> Iterator[str]:
    yield element("h2", escape(title))
    yield from content
