"""Renders a plan and its runs, or another record's sections, as HTML: pictures with the same numbers in tables."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any
from xml.etree import ElementTree as ET

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autobatch._formatting import plural
from autobatch.events.run_history import Run
from autobatch.planning.plan_record import PlanRecord
from autobatch.report.pictures import COLORS, PALETTE, TOOLTIP, WIDTH
from autobatch.report.sections import Chart, Section, format_cell, number_columns
from autobatch.report.tables import plan_sections, run_sections
from autobatch.report.text import describe_division, share_of

_STYLE: Any = {  # matplotlib 3.11 types each name, 3.10 does not
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "autobatch",  # the same picture has the same bytes
    "font.size": 12,
    "text.color": COLORS["text"],
    "axes.labelcolor": COLORS["soft"],
    "axes.edgecolor": COLORS["axis"],
    "axes.linewidth": 1,
    "xtick.labelcolor": COLORS["soft"],
    "ytick.labelcolor": COLORS["soft"],
    "xtick.color": COLORS["axis"],
    "ytick.color": COLORS["axis"],
    "path.simplify_threshold": 0.5,  # ten thousand steps become the pixels that differ
}

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def render_report(plan: PlanRecord, runs: Sequence[Run] = ()) -> str:
    """Return one HTML document, to be written as UTF-8, that needs nothing else, light and dark, on any width.

    ``runs`` are the plan's, oldest first. The table has all, within bounds; the last few are drawn.
    """
    sections = [*plan_sections(plan), *run_sections(runs)]
    return _render(plan, "page.html", sections, plan.model_dump_json(indent=2))


def render_fragment(plan: PlanRecord, runs: Sequence[Run] = ()) -> str:
    """Return the same for a notebook: one element whose styles reach nothing else, folded below the first picture."""
    sections = [*plan_sections(plan), *run_sections(runs)]
    return _render(plan, "notebook.html", sections)


def render(
    template: str,
    *,
    title: str,
    headlines: Sequence[tuple[str, str]],
    warnings: Sequence[str],
    sections: Iterable[Section],
    json: str = "",
) -> str:
    """Fill ``"page.html"`` or ``"notebook.html"``; sections with pictures come first."""
    shown = [section for section in sections if not section.only_text]
    can_draw, has_charts = has_matplotlib(), any(section.chart for section in shown)
    values = {
        "title": title,
        "headlines": headlines,
        "warnings": warnings,
        "drawn": [section for section in shown if section.chart and can_draw],
        "plain": [section for section in shown if not (section.chart and can_draw)],
        "json": json,
        "without_pictures": has_charts and not can_draw,
    }
    return _environment().get_template(template).render(values)


def replace_unprintable(text: str) -> str:
    """Return the text with U+FFFD for each character that HTML may not hold; not escaped."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def make_environment(package: str) -> Environment:
    """Make the environment of a package's templates: they escape all that they insert but markup."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            replace_unprintable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )


@cache
def _environment() -> Environment:
    environment = make_environment("autobatch.report")
    environment.filters |= {"format_cell": format_cell, "picture": render_svg}
    environment.globals |= {"number_columns": number_columns, "palette": PALETTE}
    return environment


def has_matplotlib() -> bool:
    """Return whether pictures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an extra, and slow to import
    except ImportError:  # also where NumPy is missing, which matplotlib needs
        return False
    return True


def render_svg(chart: Chart, name: str) -> Markup:
    """Return the chart as an ``<svg>`` for an HTML page: without ids, with colors by name and with tooltips."""
    from matplotlib import style  # noqa: PLC0415 - an extra, and slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415 - no pyplot: it would choose a backend

    file = io.StringIO()
    with style.context(["default", _STYLE]):  # not the user's: LaTeX, or sketches
        figure = Figure(figsize=(WIDTH / 72, chart.height / 72), layout="constrained")
        chart.draw(figure.add_subplot())
        unknown = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=unknown)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"|xlink:', "", file.getvalue())
    svg = ET.fromstring(text[text.index("<svg") :])  # noqa: S314 - matplotlib wrote it
    _make_portable(svg)
    svg.attrib = {"viewBox": svg.attrib["viewBox"], "role": "img", "aria-label": name}
    text = re.sub("font-family: [^;]*; ", "", ET.tostring(svg, encoding="unicode"))
    names = {color: f"var(--{name})" for name, color in COLORS.items()}
    text = re.sub("#[0-9a-f]{6}", lambda found: names.get(found[0], found[0]), text)
    return Markup(text)  # noqa: S704 - matplotlib has escaped its texts


def _make_portable(svg: ET.Element) -> None:
    """Replace ids, and references to them: another picture on the page, or a folded one, may have the same."""
    shapes = {shape.get("id"): shape for shape in svg.iter("path") if "id" in shape.attrib}
    for element in list(svg.iter()):
        for child in list(element):
            if child.tag in ("defs", "metadata"):
                element.remove(child)
        given = element.attrib
        given.pop("clip-path", None)  # all that is drawn lies inside of the axes
        if element.tag == "use":
            shape = shapes[given.pop("href")[1:]]
            element.tag = "path"
            given["transform"] = f"translate({given.pop('x', '0')} {given.pop('y', '0')})"
            given |= {"d": shape.get("d", ""), "style": f"{shape.get('style', '')}; {given.get('style', '')}"}
        name = given.pop("id", "")
        if name.startswith(TOOLTIP):
            title = ET.Element("title")
            title.text = name.removeprefix(TOOLTIP)
            element.insert(0, title)


def _render(plan: PlanRecord, template: str, sections: Iterable[Section], json: str = "") -> str:
    title = f"autobatch: {plan.model or 'a plan'} on {plan.device.name}"
    headlines, warnings = _headlines(plan), plan.warnings
    return render(template, title=title, headlines=headlines, warnings=warnings, sections=sections, json=json)


def _headlines(plan: PlanRecord) -> list[tuple[str, str]]:
    """Return the four numbers that a reader looks for, each with what it is."""
    verdict = plan.verdict
    exact = "not checked" if verdict is None or verdict.unchecked else "exact" if verdict.exact else "not exact"
    peak = share_of(plan.peak_bytes, plan.budget_bytes) if plan.peak_bytes else "unknown"
    return [
        (str(plan.micro_batch_size), "samples in a micro-batch"),
        (plural(plan.accumulation_steps, "step"), describe_division(plan)),
        (peak, "predicted peak" if plan.predicted else "peak"),
        (exact, "splitting the batch"),
    ]
