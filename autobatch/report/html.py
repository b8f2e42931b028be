"""Renders a plan and its runs as HTML: charts, and the same numbers in tables beneath them.

Covers a whole page and the fragment that a notebook shows. Neither runs or fetches anything, and all text is escaped
(``templating``). Does not cover the numbers (``tables``) nor the charts (``charts``, ``run_chart``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from autobatch._formatting import plural
from autobatch.events.run_history import Run
from autobatch.planning.plan_record import PlanRecord
from autobatch.report.advice import advise, tenant_lines
from autobatch.report.breakdown import memory_parts
from autobatch.report.charts import memory_bar, peak_chart, speed_chart
from autobatch.report.run_chart import run_chart
from autobatch.report.svg import cross, dot, element, polyline, triangle
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
from autobatch.report.templating import Figure, Key, Section, render_template
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
    title = f"autobatch: {plan.model or 'a plan'} on {plan.device.name}"
    return render_template("page.html", title=title, **_content(plan, runs)) + "\n"


def render_fragment(plan: PlanRecord, runs: Sequence[Run] = ()) -> str:
    """The same as one element for a page that is there already; its styles reach nothing else, and it has no ids."""
    return render_template("fragment.html", **_content(plan, runs))


def _content(plan: PlanRecord, runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "summary": summarise_plan(plan).removeprefix("autobatch: "),
        "lines": [f"{plan.verdict} ({plan.verdict.seconds:.1f} s)"] if plan.verdict else [],
        "warnings": plan.warnings,
        "figures": [figure for figure in _figures(plan, runs) if figure.chart],
        "sections": [*_plan_sections(plan), *_run_sections(runs)],
        "json": plan.model_dump_json(indent=2),
    }


def _figures(plan: PlanRecord, runs: Sequence[Run]) -> Iterator[Figure]:
    lines = ("curve", "budget", "limit")
    yield Figure("Peak memory by micro-batch size", _markup(peak_chart(plan)), _trial_keys(plan, lines))
    yield Figure("Speed by micro-batch size", _markup(speed_chart(plan)), _trial_keys(plan, ()))
    yield Figure(
        f"Where the memory goes at {plural(plan.micro_batch_size, 'sample')}",
        _markup(memory_bar(plan)),
        table=breakdown_table(plan),
        name="where the memory goes",
        swatches=[_swatch(part.key) for part in memory_parts(plan)],
    )
    for run in newest(runs):
        yield Figure(f"Run {run.id}: size and retries by step", _markup(run_chart(run)), _run_keys(run))


def _markup(drawn: str) -> Markup:
    """A chart: ``svg`` has escaped every text in it."""
    return Markup(drawn)  # noqa: S704 - see above


def _swatch(part: str) -> Markup:
    box = element("rect", width=14, height=14, class_=f"part {part}")
    return _markup(
        element("svg", box, viewBox="0 0 14 14", width="14", height="14", aria_hidden="true", class_="swatch")
    )


_KEYS = {
    "fits": Key(_markup(dot(11, 8, "fits", "")), "a trial that fits"),
    "thrash": Key(_markup(triangle(11, 8, "thrash", "")), "fits only by giving memory back"),
    "oom": Key(_markup(cross(11, 8, "oom", "")), "out of memory"),
    "chosen": Key(_markup(dot(11, 8, "chosen", "", radius=7)), "the plan's size"),
    "curve": Key(_markup(polyline([(0, 8), (22, 8)], "curve")), "the curve; dashed where nothing ran"),
    "budget": Key(_markup(polyline([(0, 8), (22, 8)], "budget")), "the budget"),
    "limit": Key(_markup(polyline([(0, 8), (22, 8)], "limit")), "the limit: the budget less the headroom"),
}


def _trial_keys(plan: PlanRecord, others: tuple[str, ...]) -> list[Key]:
    """What the marks mean, of those that are there."""
    there = {trial.outcome for trial in plan.trials} | {"chosen"}
    there |= {"curve"} if plan.curve else set()
    there |= {"budget"} if plan.budget_bytes else set()
    there |= {"limit"} if plan.headroom_bytes else set()
    return [_KEYS[name] for name in ("fits", "thrash", "oom", "chosen", *others) if name in there]


def _run_keys(run: Run) -> list[Key]:
    keys = [Key(_markup(polyline([(0, 8), (22, 8)], "sizes")), "the most samples in a micro-batch")]
    kinds = {back.kind for back in run.setbacks}
    if run.retries:
        bar = _markup(element("rect", x=8, y=2, width=6, height=12, class_="retries"))
        keys.append(Key(bar, f"retries; the highest bar is {max(part.retries for part in run.ranges)}"))
    if "retry" in kinds:
        keys.append(Key(_KEYS["oom"].mark, "a step that was undone and done again"))
    if "size" in kinds:
        keys.append(Key(_markup(triangle(11, 8, "changed", "")), "the size changed between two steps"))
    return keys


def _plan_sections(plan: PlanRecord) -> Iterator[Section]:
    size = plan.micro_batch_size
    yield Section("The plan", facts_table(plan), "the plan")
    yield Section("Budget", budget_table(plan), "budget", lines=list(tenant_lines(plan.device)))
    if plan.trials:
        yield Section("Trials", trial_table(plan), "trials", size)
    if plan.curve is not None:
        yield Section("Memory curve", curve_table(plan), "memory curve", size)
    if advice := list(advise(plan)):
        yield Section("What would help", items=advice)


def _run_sections(runs: Sequence[Run]) -> Iterator[Section]:
    if runs:
        yield Section("Runs", run_table(runs), "runs")
    for run in newest(runs):
        if run.ranges:
            yield Section(f"Run {run.id}: steps", range_table(run), f"steps of run {run.id}")
        if run.setbacks:
            yield Section(f"Run {run.id}: setbacks", setback_table(run), f"setbacks of run {run.id}")
