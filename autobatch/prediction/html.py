"""Renders a prediction as HTML for a notebook.

Covers the same sections as its text. Nothing in it runs or is fetched, and all text is escaped (``report.html``).
Does not cover any estimate: every number shown stands in the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autobatch._formatting import plural
from autobatch.prediction.record import CardFit, Change, PredictionRecord
from autobatch.prediction.text import explain_trust, summarise_prediction
from autobatch.report.html import render_template
from autobatch.report.tables import Bytes, Cell, Section, Table

__all__ = ["render_prediction"]

_NONE = "none"


def render_prediction(prediction: PredictionRecord) -> str:
    """One element for a page that is there already; its styles reach nothing else, and it has no ids."""
    return render_template(
        "fragment.html",
        summary=summarise_prediction(prediction).removeprefix("autobatch: "),
        warnings=prediction.warnings,
        sections=list(_sections(prediction)),
    )


def _sections(prediction: PredictionRecord) -> Iterator[Section]:
    size = plural(prediction.judged_size, "sample")
    chosen = prediction.plan.micro_batch_size if prediction.plan else None
    for title, table, planned in (
        (f"Where the memory goes at {size}", _part_table(prediction), None),
        (f"Its tensors at {size}, by module", _module_table(prediction), None),
        ("Memory by size", _point_table(prediction), chosen),
        ("What would help", _change_table(prediction.changes), None),
        ("On every card that is known", _card_table(prediction), None),
    ):
        if table.rows:
            yield Section(title, table=table, planned=planned)
    yield Section("How sure this is", items=list(explain_trust(prediction)))


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
