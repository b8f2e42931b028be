"""Makes the tables of a prediction, for a notebook and for text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autobatch._formatting import plural
from autobatch.prediction.cards import GPUS
from autobatch.prediction.record import CardFit, Change, PredictionRecord
from autobatch.report import breakdown
from autobatch.report.pictures import Peaks, draw_peaks, part_chart
from autobatch.report.sections import Bytes, Cell, Chart, Section, Table

NOMINAL = "* its memory is a nominal figure"

_COLORS = ("blue", "violet", "orange", "green", "pink", "teal", "amber", "sky", "brown", "lime", "soft")
"""Colors of the parts of the peak, the largest first; the last one is that of all smaller parts together."""


def table_sections(prediction: PredictionRecord) -> Iterator[Section]:
    """Yield all tables with their titles; some may have no rows."""
    size = plural(prediction.judged_size, "sample")
    chosen = prediction.plan.micro_batch_size if prediction.plan else None
    changes = tuple(map(_change_cells, prediction.changes))
    cards = tuple(map(card_cells, by_memory(prediction)))
    points = Table(("size", "allocated", "reserved", "process"), tuple(point_rows(prediction)))
    drawn, parts = charts(prediction), Table(("bytes", "part"), tuple(part_rows(prediction)))
    yield Section(f"Where the memory goes at {size}", chart=drawn["memory"], table=parts)
    yield Section(f"Its tensors at {size}, by module", table=Table(("bytes", "module"), tuple(module_rows(prediction))))
    yield Section("Memory by size", chart=drawn["peak"], table=points, planned=chosen)
    yield Section("What would help", table=Table(("saves", "micro-batch", "change"), changes))
    headings = ("card", "memory", "micro-batch", "steps", "peak")
    yield Section(title_cards(prediction), table=Table(headings, cards, (NOMINAL,)))


def charts(prediction: PredictionRecord) -> dict[str, Chart]:
    """Return the pictures: peaks by size beside the card's memory, and what that memory is made of."""
    total, size = prediction.gpu.total_bytes, prediction.judged_size
    held, name = prediction.peak_bytes - prediction.context_bytes, "the plan" if prediction.plan else "does not fit"
    limit, budget = (round(part) - prediction.context_bytes for part in (total / (1 + prediction.margin), total))
    points = [(point.size, point.reserved) for point in prediction.points]
    peaks = Peaks(prediction.curve, (), budget, limit, size, held, prediction.share, name, points)
    first, others = prediction.breakdown[: len(_COLORS) - 1], prediction.breakdown[len(_COLORS) - 1 :]
    named = [*((part.byte_count, part.name) for part in first), (sum(part.byte_count for part in others), "others")]
    left = max(total - prediction.peak_bytes, 0)
    margin = min(round(prediction.peak_bytes * prediction.margin), left)
    parts = [
        *(breakdown.Part(color, *one) for color, one in zip(_COLORS, named, strict=False)),
        breakdown.Part("axis", prediction.context_bytes, "CUDA's own, outside the allocator"),
        breakdown.Part("headroom", margin, "the margin: left free on purpose"),
        breakdown.Part("free", left - margin, "free: not needed at this size"),
    ]
    return {
        "peak": Chart(partial(draw_peaks, peaks)),
        "memory": part_chart([part for part in parts if part.size_bytes]),
    }


def _change_cells(change: Change) -> tuple[Cell, ...]:
    if change.failed:
        return ("?", "?", f"{change.name}: {change.failed}")
    return (Bytes(change.saved_bytes), change.micro_batch_size or "none", name_change(change))


def part_rows(prediction: PredictionRecord) -> Iterator[tuple[Bytes, str]]:
    """Yield the parts of the peak, and their sum."""
    yield from ((Bytes(part.byte_count), part.name) for part in prediction.breakdown)
    yield Bytes(prediction.context_bytes), "CUDA's own, outside the allocator"
    yield Bytes(prediction.peak_bytes), "in all: the peak of the process, without the margin"


def module_rows(prediction: PredictionRecord) -> Iterator[tuple[Bytes, str]]:
    """Yield the tensors at the peak, by module."""
    for part in prediction.modules:
        yield Bytes(part.byte_count), part.name or "the model itself, outside its submodules"


def point_rows(prediction: PredictionRecord) -> Iterator[tuple[int, Bytes, Bytes, Bytes]]:
    """Yield samples, and bytes allocated, reserved and of the process."""
    for point in prediction.points:
        held = Bytes(point.reserved)
        yield point.size, Bytes(point.allocated), held, Bytes(held + prediction.context_bytes)


def name_change(change: Change) -> str:
    """Name the change with its effect."""
    return f"{change.name} ({change.effect})" if change.effect else change.name


def title_cards(prediction: PredictionRecord) -> str:
    """Title the table of cards."""
    every = len(prediction.cards) >= len(GPUS)
    return (
        "On every card that is known" if every else f"On common cards (all_cards=True: all {len(GPUS)} that are known)"
    )


def by_memory(prediction: PredictionRecord) -> list[CardFit]:
    """Sort the cards, the smallest first."""
    return sorted(prediction.cards, key=lambda card: (card.total_bytes, card.gpu))


def card_cells(card: CardFit) -> tuple[Cell, ...]:
    """Show name, memory, size, steps and peak."""
    name = card.gpu if card.measured else f"{card.gpu} *"
    peak = Bytes(card.peak_bytes) if card.micro_batch_size else "-"
    return (name, Bytes(card.total_bytes), card.micro_batch_size or "none", card.accumulation_steps or "-", peak)
