"""Renders a prediction as HTML for a notebook.

Covers the same sections as its text. Nothing in it runs or is fetched, and whatever comes from a prediction is escaped.
Does not cover any estimate: every number shown stands in the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autobatch._formatting import plural
from autobatch.prediction.record import CardFit, Change, PredictionRecord
from autobatch.prediction.text import explain_trust, summarise_prediction
from autobatch.report.html_table import render_table
from autobatch.report.style import SCOPE, STYLE
from autobatch.report.svg import element, escape
from autobatch.report.tables import Bytes, Cell, Table

__all__ = ["render_prediction"]

_NONE = "none"


def render_prediction(prediction: PredictionRecord) -> str:
    """One element for a page that is there already; its styles reach nothing else, and it has no ids."""
    return element(
        "div",
        f"<style>{STYLE}</style>",
        element("p", escape(summarise_prediction(prediction).removeprefix("autobatch: ")), class_="summary"),
        *_list(prediction.warnings, "warnings"),
        *_sections(prediction),
        element("h2", "How sure this is"),
        *_list(explain_trust(prediction), ""),
        class_=SCOPE,
    )


def _sections(prediction: PredictionRecord) -> Iterator[str]:
    size = plural(prediction.judged_size, "sample")
    chosen = prediction.plan.micro_batch_size if prediction.plan else None
    yield from _section(f"Where the memory goes at {size}", _part_table(prediction))
    yield from _section(f"Its tensors at {size}, by module", _module_table(prediction))
    yield from _section("Memory by size", _point_table(prediction), chosen)
    yield from _section("What would help", _change_table(prediction.changes))
    yield from _section("On every card that is known", _card_table(prediction))


def _section(title: str, table: Table, planned: int | None = None) -> Iterator[str]:
    if table.rows:
        yield element("h2", escape(title))
        yield render_table(table, title, planned=planned)


def _list(sentences: Iterable[str], kind: str) -> Iterator[str]:
    items = [element("li", escape(sentence)) for sentence in sentences]
    if items:
        yield element("ul", *items, class_=kind, aria_label=kind)


def _part_table(prediction: PredictionRecord) -> Table:
    rows = [(Bytes(part.byte_count), part.name) for part in prediction.breakdown]
    rows += [
        (Bytes(prediction.context_bytes), "CUDA's own, outside the allocator"),
        (Bytes(prediction.peak_bytes), "in all: the peak of the process, without the margin"),
    ]
    return Table(("bytes", "part"), tuple(rows))


def _module_table(prediction: PredictionRecord) -> Table:
    rows = ((Bytes(part.byte_count), part.name or "the model itself") for part in prediction.modules)
    return Table(("bytes", "module"), tuple(rows))


def _point_table(prediction: PredictionRecord) -> Table:
    rows = (
        (
            point.size,
            Bytes(point.allocated),
            Bytes(point.reserved),
            Bytes(point.reserved + prediction.context_bytes),
        )
        for point in prediction.points
    )
    return Table(("size", "allocated", "reserved", "process"), tuple(rows))


def _change_table(changes: Iterable[Change]) -> Table:
    return Table(("saves", "micro-batch", "change"), tuple(map(_change_row, changes)))


def _change_row(change: Change) -> tuple[Cell, ...]:
    if change.failed:
        return ("?", "?", f"{change.name}: {change.failed}")
    effect = f" ({change.effect})" if change.effect else ""
    return (Bytes(change.saved_bytes), change.micro_batch_size or _NONE, f"{change.name}{effect}")


def _card_table(prediction: PredictionRecord) -> Table:
    cards = sorted(prediction.cards, key=lambda card: (card.total_bytes, card.gpu))
    return Table(("card", "memory", "micro-batch", "steps", "peak"), tuple(map(_card_row, cards)))


def _card_row(card: CardFit) -> tuple[Cell, ...]:
    name = card.gpu if card.measured else f"{card.gpu} (its memory is a nominal figure)"
    fits = card.micro_batch_size > 0
    peak = Bytes(card.peak_bytes) if fits else "-"
    return (name, Bytes(card.total_bytes), card.micro_batch_size or _NONE, card.accumulation_steps or "-", peak)
