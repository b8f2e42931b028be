"""Renders the HTML templates of reports.

Covers the two templates, a fragment and a page around it, and the records that they are filled with. Everything that is
inserted is escaped unless it is ``Markup``, which only the package's own charts are. Does not cover what is shown
(``html``, ``prediction.text``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autobatch.report.style import PAGE_STYLE, SCOPE, STYLE
from autobatch.report.svg import replace_unprintable
from autobatch.report.tables import Table, format_cell, number_columns

__all__ = ["Figure", "Key", "Section", "render_template"]


class Key(NamedTuple):
    """What a mark in a chart means."""

    mark: Markup
    meaning: str


class Figure(NamedTuple):
    """A chart, and beneath it either its keys or a table of its parts, each row led by a swatch of its colour."""

    caption: str
    chart: Markup
    keys: Sequence[Key] = ()
    table: Table | None = None
    name: str = ""
    swatches: Sequence[Markup] = ()


class Section(NamedTuple):
    """A heading, a table, sentences and a list, each of which may be missing.

    Attributes:
        title: The heading.
        table: Its rows.
        name: Of the table, for screen readers.
        planned: Rows that begin with this number are the plan's own.
        lines: Sentences beneath the table.
        items: Of the list.
    """

    title: str
    table: Table | None = None
    name: str = ""
    planned: int | None = None
    lines: Sequence[str] = ()
    items: Sequence[str] = ()


def render_template(
    template: str,
    *,
    summary: str,
    sections: Sequence[Section],
    lines: Sequence[str] = (),
    warnings: Sequence[str] = (),
    figures: Sequence[Figure] | None = None,
    json: str = "",
    title: str = "",
) -> str:
    """Fill ``"fragment.html"``, or ``"page.html"``, which has a title too.

    Args:
        template: A file in ``report/templates``.
        summary: The first line.
        sections: In order.
        lines: Sentences below the summary.
        warnings: As a list that stands out.
        figures: Charts; an empty sequence says that there are none, ``None`` says nothing.
        json: The record itself, folded away.
        title: Of the page.
    """
    return (
        _environment()
        .get_template(template)
        .render(
            summary=summary,
            sections=sections,
            lines=lines,
            warnings=warnings,
            figures=figures,
            json=json,
            title=title,
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
    environment.globals |= {
        "number_columns": number_columns,
        "scope": SCOPE,
        "style": Markup(STYLE),  # noqa: S704 - a constant of this package
        "page_style": Markup(PAGE_STYLE),  # noqa: S704 - the same
    }
    return environment


def _finalize(value: object) -> object:
    """What neither HTML nor SVG may hold is replaced; escaping comes after this."""
    return replace_unprintable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
