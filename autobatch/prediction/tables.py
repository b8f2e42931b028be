"""Makes the tables of a prediction, for a notebook and for text: rows whose numbers stand in the record.

Does not cover how they are written out (``text``). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from autobatch._formatting import plural
from autobatch.prediction.card_table import GPUS
from autobatch.prediction.record import CardFit, Change, PredictionRecord
from autobatch.report.sections import Bytes, Cell, Section, Table

__all__ = [
    "NOMINAL",
    "by_memory",
    "card_cells",
    "module_rows",
    "name_change",
    "part_rows",
    "point_rows",
    "table_sections",
    "title_cards",
]

NOMINAL = "* its memory is a nominal figure"


def table_sections(prediction: PredictionRecord) -> Iterator[Section]:
    """All of them, each with its title; some may have no rows."""
    size = plural(prediction.judged_size, "sample")
    chosen = prediction.plan.micro_batch_size if prediction.plan else None
    changes = tuple(map(_change_cells, prediction.changes))
    cards = tuple(map(card_cells, by_memory(prediction)))
    points = Table(("size", "allocated", "reserved", "process"), tuple(point_rows(prediction)))
    yield Section(f"Where the memory goes at {size}", table=Table(("bytes", "part"), tuple(part_rows(prediction))))
    yield Section(f"Its tensors at {size}, by module", table=Table(("bytes", "module"), tuple(module_rows(prediction))))
    yield Section("Memory by size", table=points, planned=chosen)
    yield Section("What would help", table=Table(("saves", "micro-batch", "change"), changes))
    headings = ("card", "memory", "micro-batch", "steps", "peak")
    yield Section(title_cards(prediction), table=Table(headings, cards, (NOMINAL,)))


def _change_cells(change: Change) -> tuple[Cell, ...]:
    if change.failed:
        return ("?", "?", f"{change.name}: {change.failed}")
    return (Bytes(change.saved_bytes), change.micro_batch_size or "none", name_change(change))


def part_rows(prediction: PredictionRecord) -> Iterator[tuple[Bytes, str]]:
    """What the peak is made of, and the sum."""
    yield from ((Bytes(part.byte_count), part.name) for part in prediction.breakdown)
    yield Bytes(prediction.context_bytes), "CUDA's own, outside the allocator"
    yield Bytes(prediction.peak_bytes), "in all: the peak of the process, without the margin"


def module_rows(prediction: PredictionRecord) -> Iterator[tuple[Bytes, str]]:
    """Tensors at the peak, by module."""
    for part in prediction.modules:
        yield Bytes(part.byte_count), part.name or "the model itself, outside its submodules"


def point_rows(prediction: PredictionRecord) -> Iterator[tuple[int, Bytes, Bytes, Bytes]]:
    """Samples, and bytes allocated, reserved and of the whole process."""
    for point in prediction.points:
        held = Bytes(point.reserved)
        yield point.size, Bytes(point.allocated), held, Bytes(held + prediction.context_bytes)


def name_change(change: Change) -> str:
    """What would be done, with its effect."""
    return f"{change.name} ({change.effect})" if change.effect else change.name


def title_cards(prediction: PredictionRecord) -> str:
    """Those that are left out can be asked for."""
    every = len(prediction.cards) >= len(GPUS)
    return (
        "On every card that is known" if every else f"On common cards (all_cards=True: all {len(GPUS)} that are known)"
    )


def by_memory(prediction: PredictionRecord) -> list[CardFit]:
    """The cards that were judged, the smallest first."""
    return sorted(prediction.cards, key=lambda card: (card.total_bytes, card.gpu))


def card_cells(card: CardFit) -> tuple[Cell, ...]:
    """Name, memory, size, steps and peak."""
    name = card.gpu if card.measured else f"{card.gpu} *"
    peak = Bytes(card.peak_bytes) if card.micro_batch_size else "-"
    return (name, Bytes(card.total_bytes), card.micro_batch_size or "none", card.accumulation_steps or "-", peak)
