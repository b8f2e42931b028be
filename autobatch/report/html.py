"""Renders a plan and its runs as HTML: charts, and the same numbers in tables beneath them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autobatch._formatting import plural
from autobatch.events.run_history import Run
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.shares import find_slowest
from autobatch.report.breakdown import memory_parts
from autobatch.report.charts import memory_bar, peak_chart, run_chart, speed_chart
from autobatch.report.ranks import rank_chart
from autobatch.report.sections import Section, Table, format_cell, number_columns
from autobatch.report.svg import cross, dot, element, polyline, replace_unprintable, triangle
from autobatch.report.tables import breakdown_table, newest, plan_sections, run_sections
from autobatch.report.text import summarise_plan

_Key = tuple[Markup, str]
"""A mark in a chart and its meaning."""


class _Figure(NamedTuple):
    """A chart, and beneath it either its keys or a table of its parts, each row led by a swatch of its colour."""

    caption: str
    chart: Markup
    keys: Sequence[_Key] = ()
    table: Table | None = None
    swatches: Sequence[Markup] = ()


def render_report(plan: PlanRecord, runs: Sequence[Run] = ()) -> str:
    """One HTML document, to be written as UTF-8, that needs nothing else: light and dark, on a telephone, on paper.

    ``runs`` are the plan's, oldest first. All are in the table, within bounds; the last few are drawn.
    """
    return _render(plan, runs, "page.html", f"autobatch: {plan.model or 'a plan'} on {plan.device.name}") + "\n"


def render_fragment(plan: PlanRecord, runs: Sequence[Run] = ()) -> str:
    """Return the same as one element for another page; its styles reach nothing else, and it has no ids."""
    return _render(plan, runs, "fragment.html")


def render_template(
    template: str,
    *,
    summary: str,
    sections: Iterable[Section],
    title: str = "",
    lines: Sequence[str] = (),
    warnings: Sequence[str] = (),
    figures: Sequence[_Figure] | None = None,
    json: str = "",
) -> str:
    """Fill ``"fragment.html"``, or ``"page.html"``, which has a ``title`` too; ``summary`` is the first line.

    ``lines`` stand below the summary, and ``warnings`` as a list that stands out. An empty list of ``figures`` says
    that nothing was measured, ``None`` says nothing. ``json`` is the record itself.
    """
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            summary=summary,
            lines=lines,
            warnings=warnings,
            figures=figures,
            sections=[section for section in sections if not section.only_text],
            json=json,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("autobatch.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters["format_cell"] = format_cell
    environment.globals["number_columns"] = number_columns
    return environment


def _finalize(value: object) -> object:
    """Replace characters that HTML and SVG must not hold, before escaping."""
    return replace_unprintable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _render(plan: PlanRecord, runs: Sequence[Run], template: str, title: str = "") -> str:
    return render_template(
        template,
        title=title,
        summary=summarise_plan(plan).removeprefix("autobatch: "),
        lines=[f"{plan.verdict} ({plan.verdict.seconds:.1f} s)"] if plan.verdict else [],
        warnings=plan.warnings,
        figures=[figure for figure in _figures(plan, runs) if figure.chart],
        sections=[*plan_sections(plan), *run_sections(runs)],
        json=plan.model_dump_json(indent=2),
    )


def _figures(plan: PlanRecord, runs: Sequence[Run]) -> Iterator[_Figure]:
    size = plural(plan.micro_batch_size, "sample")
    swatches = [_swatch(part.key) for part in memory_parts(plan)]
    lines = ("curve", "budget", "limit")
    yield _Figure("Peak memory by micro-batch size", _markup(peak_chart(plan)), _trial_keys(plan, lines))
    yield _Figure("Speed by micro-batch size", _markup(speed_chart(plan)), _trial_keys(plan, ()))
    bar = _markup(memory_bar(plan))
    yield _Figure(f"Where the memory goes at {size}", bar, table=breakdown_table(plan), swatches=swatches)
    yield _Figure("Memory and time of each rank", _markup(rank_chart(plan)), _rank_keys(plan))
    for run in newest(runs):
        yield _Figure(f"Run {run.id}: size and retries by step", _markup(run_chart(run)), _run_keys(run))


def _markup(drawn: str) -> Markup:
    """Return a chart as markup: ``svg`` has escaped its texts."""
    return Markup(drawn)  # noqa: S704 - see above


def _swatch(part: str) -> Markup:
    box = element("rect", width=14, height=14, class_=f"part {part}")
    return _markup(
        element("svg", box, viewBox="0 0 14 14", width="14", height="14", aria_hidden="true", class_="swatch")
    )


_KEYS = {
    "fits": (_markup(dot(11, 8, "fits", "")), "a trial that fits"),
    "thrash": (_markup(triangle(11, 8, "thrash", "")), "fits only by giving memory back"),
    "oom": (_markup(cross(11, 8, "oom", "")), "out of memory"),
    "chosen": (_markup(dot(11, 8, "chosen", "", radius=7)), "the plan's size"),
    "curve": (_markup(polyline([(0, 8), (22, 8)], "curve")), "the curve; dashed where nothing ran"),
    "budget": (_markup(polyline([(0, 8), (22, 8)], "budget")), "the budget"),
    "limit": (_markup(polyline([(0, 8), (22, 8)], "limit")), "the limit: the budget less the headroom"),
}


def _trial_keys(plan: PlanRecord, others: tuple[str, ...]) -> list[_Key]:
    """Return the meanings of the marks in the chart."""
    there = {"curve": plan.curve, "budget": plan.budget_bytes, "limit": plan.headroom_bytes, "chosen": True}
    there |= {trial.outcome: True for trial in plan.trials}
    return [_KEYS[name] for name in ("fits", "thrash", "oom", "chosen", *others) if there.get(name)]


def _rank_keys(plan: PlanRecord) -> list[_Key]:
    keys = [
        (_swatch("peak"), "the peak"),
        (_swatch("free"), "the budget"),
        (_swatch("seconds"), "a step of the rank by itself"),
    ]
    slowest = find_slowest([one.seconds for one in plan.ranks])
    return keys if slowest is None else [*keys, (_swatch("seconds slowest"), f"that of rank {slowest}, the slowest")]


def _run_keys(run: Run) -> list[_Key]:
    keys = [(_markup(polyline([(0, 8), (22, 8)], "sizes")), "the most samples in a micro-batch")]
    kinds = {back.kind for back in run.setbacks}
    if run.retries:
        bar = _markup(element("rect", x=8, y=2, width=6, height=12, class_="retries"))
        keys.append((bar, f"retries; the highest bar is {max(part.retries for part in run.ranges)}"))
    if "retry" in kinds:
        keys.append((_KEYS["oom"][0], "a step that was undone and done again"))
    if "size" in kinds:
        keys.append((_markup(triangle(11, 8, "changed", "")), "the size changed between two steps"))
    return keys
