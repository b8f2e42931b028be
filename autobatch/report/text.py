"""Renders a plan as text: in one line, in full, and with its runs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from autobatch._formatting import divide_columns, format_bytes, plural, spell
from autobatch.events.run_history import Run
from autobatch.planning.plan_record import PlanRecord
from autobatch.report.sections import Section, Table, format_cell, number_columns
from autobatch.report.tables import plan_sections, run_sections

_WIDTH = 80
_WRAPS_FROM = 20  # letters of a last column


def summarise_plan(plan: PlanRecord) -> str:
    """``autobatch: 256 = 6 x 43 (two of 42) on NVIDIA L4; peak 18.7 of 21.6 GiB; 3 trials, 0 out of memory, 1.2 s``."""
    where = f"{describe_division(plan)} on {plan.device.name}"
    if (found := plan.checkpointing) is not None:
        ways = (found.recomputed, "checkpointed"), (found.offloaded, "offloaded")
        counts = (f"{len(blocks)} of {found.candidates} blocks {what}" for blocks, what in ways if blocks)
        where += f"; {' and '.join(counts)}"
    if plan.chunked_loss is not None:
        where += "; loss in chunks"
    trials = f"{plural(len(plan.trials), 'trial')}, {plan.out_of_memory_trials} out of memory"
    peak = f"peak {share_of(plan.peak_bytes, plan.budget_bytes)}" if plan.peak_bytes else "peak not measured"
    if plan.predicted:
        peak = f"predicted {peak} beside CUDA's own"
    return f"autobatch: {where}; {peak}; {'nothing was run' if plan.predicted else trials}, {plan.seconds:.1f} s"


def describe_division(plan: PlanRecord) -> str:
    """Return ``256 = 6 x 43 (two of 42)``, or ``rank 1 of 4: 64 of 256 = 2 x 32``.

    With lengths it is ``64 by length, 2 of length 1024 to 64 of at most 32 together``.
    """
    share: int | str = sum(plan.micro_batch_sizes)
    sizes = Counter(plan.micro_batch_sizes)
    smaller = [f"{spell(count)} of {size}" for size, count in sizes.items() if size != plan.micro_batch_size]
    ragged = f" ({', '.join(smaller)})" if smaller else ""
    ranks = "" if plan.world_size == 1 else f" on each of {plan.world_size} ranks, {plan.target_batch} in all"
    if plan.shares:
        share, ranks = f"rank {plan.rank} of {plan.world_size}: {share} of {plan.target_batch}", ""
    if plan.lengths:
        longest, shortest = plan.lengths[-1], plan.lengths[0]
        together = f"{longest.micro_batch_size} of length {longest.length}"
        if shortest is not longest:
            together += f" to {shortest.micro_batch_size} of at most {shortest.length}"
        return f"{share} by length, {together} together{ranks}"
    return f"{share} = {plan.accumulation_steps} x {plan.micro_batch_size}{ragged}{ranks}"


def explain_plan(plan: PlanRecord) -> str:
    """Return all about a plan in sections, without a last newline."""
    _, *sections = plan_sections(plan)  # the first has what the line above them says
    return "\n".join([summarise_plan(plan), *_show_sections(sections)])


def show_plan(plan: PlanRecord, runs: Sequence[Run] = (), width: int = _WIDTH) -> str:
    """Return the HTML report's content as text of so many columns; ``runs`` are the plan's, oldest first."""
    lines = [summarise_plan(plan), *_show_sections([*plan_sections(plan), *run_sections(runs)], width)]
    return "\n".join(part for line in lines for part in _wrap(line, width))


def share_of(peak_bytes: int, budget_bytes: int) -> str:
    """Return ``18.7 of 21.6 GiB``."""
    peak, budget = format_bytes(peak_bytes), format_bytes(budget_bytes)
    return f"{peak.split()[0] if peak.split()[1] == budget.split()[1] else peak} of {budget}"


def _show_sections(sections: Iterable[Section], width: int = _WIDTH) -> Iterator[str]:
    for section in sections:
        yield from ("", section.title)
        for line in (*_show_table(section.table, width), *section.lines, *section.items):
            yield f"  {line}"


def _show_table(table: Table | None, width: int) -> Iterator[str]:
    """Yield the lines of a table, with numbers to the right; a long last column wraps.

    Columns that do not fit follow below, with the first column again.
    """
    if table is None:
        return
    gap, numbers = 3 if len(table.headings) < 4 else 2, number_columns(table)
    rows = [tuple(map(format_cell, row)) for row in table.rows]
    if rows and any(table.headings):
        rows = [table.headings, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    needed = [*widths[:-1], *(min(wide, _WRAPS_FROM) for wide in widths[-1:])]
    for block in divide_columns(needed, gap, width - 2):
        *before, last = block
        room = width - 2 - sum(widths[index] + gap for index in before)
        for row in rows:
            cells = [row[i].rjust(widths[i]) if i in numbers else row[i].ljust(widths[i]) for i in block]
            start = "".join(cell + " " * gap for cell in cells[:-1])
            first, *others = textwrap.wrap(cells[-1] if last in numbers else row[last], max(room, 1)) or [""]
            yield (start + first).rstrip()
            yield from (" " * len(start) + other for other in others)
    yield from table.notes


def _wrap(line: str, width: int) -> list[str]:
    """Return the lines that a line needs, with the indent of the first."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False) or [""]
