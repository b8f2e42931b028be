"""Writes a prediction as text (one line, or all of it), as pictures, and as tables in HTML for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING

from autobatch._formatting import format_bytes, plural
from autobatch.prediction.cards import GPUS
from autobatch.report import breakdown
from autobatch.report.pictures import Peaks, draw_peaks, part_chart
from autobatch.report.sections import Bytes, Cell, Chart, Section, Table, format_cell
from autobatch.report.text import describe_division, share_of

if TYPE_CHECKING:
    from autobatch.prediction.prediction import CardFit, Change, Prediction

_NOMINAL = "* its memory is a nominal figure"
_COLORS = ("blue", "violet", "orange", "green", "pink", "teal", "amber", "sky", "brown", "lime", "soft")
"""Colors of the parts of the peak, the largest first; the last one is that of all smaller parts together."""
CARD_HEADINGS = ("card", "memory", "micro-batch", "steps", "peak")
_WIDTH = 98  # and two of indentation
FAMILIES_REASON = "in 3 of 22 families of networks a quarter to a third of the peaks were more than 10 % above"
"""``make accuracy``, in benchmarks/RESULTS.md."""


def summarise_prediction(prediction: Prediction) -> str:
    """Write ``autobatch: predicted on L4: 256 = 6 x 43 (two of 42); peak 18.1 GiB of 22.0 GiB; ...``."""
    gpu = prediction.gpu
    peak = f"{format_bytes(prediction.peak_bytes)} of {format_bytes(gpu.total_bytes)}"
    needed = f"{describe_division(prediction.plan)}; peak {peak}" if prediction.plan else _refuse(prediction, peak)
    return f"autobatch: predicted on {gpu.name}: {needed}; nothing was run, {prediction.seconds:.1f} s"


def explain_prediction(prediction: Prediction) -> str:
    size = plural(prediction.judged_size, "sample")
    return "\n".join(
        [
            summarise_prediction(prediction),
            *_section("The ranks", _wrapped(_rank_lines(prediction))),
            *_section(f"What fits: {prediction.gpu.name}", _reach_lines(prediction)),
            *_section(f"Where the memory goes at {size}", _part_lines(_part_rows(prediction))),
            *_section(f"Its tensors at {size}, by module", _part_lines(_module_rows(prediction))),
            *_section("Memory by size", _point_lines(prediction)),
            *_section("What would help", _change_lines(prediction)),
            *_section(_title_cards(prediction), _few_card_lines(prediction)),
            *_section("How sure this is", _wrapped(_trust_lines(prediction))),
            *_section("Warnings", _wrapped(f"! {warning}" for warning in prediction.warnings)),
        ]
    )


def explain_cards(prediction: Prediction) -> str:
    """Write every judged card, a line each."""
    header, *notes = explain_table(prediction)
    return "\n".join([header, *_card_table(prediction, mark=""), *notes])


def explain_table(prediction: Prediction) -> list[str]:
    """Return the line above the table of cards, and the lines below it."""
    ranks = prediction.world_size
    on_ranks = "" if ranks == 1 else f" on the first of {ranks} ranks, {prediction.target_batch} in all"
    header = f"{plural(prediction.share, 'sample')} a step{on_ranks}"
    doubts = _wrapped((*_interpolation_lines(prediction), *(f"! {warning}" for warning in prediction.warnings)))
    return [header, *_card_notes(prediction), *doubts]


def card_rows(prediction: Prediction) -> list[list[str]]:
    """Return the cells of every judged card, the one with the least memory first."""
    return [[*map(format_cell, _card_cells(card))] for card in _by_memory(prediction)]


def explain_changes(prediction: Prediction) -> str:
    """Write what other ways to do the step would save, a line each; empty if nobody asked."""
    if not prediction.changes:
        return ""
    return "\n".join(_section(f"What would help on {prediction.gpu.name}", _change_lines(prediction))[1:])


def _refuse(prediction: Prediction, peak: str) -> str:
    least = prediction.judged_size  # more than one where the model cannot run one sample
    if prediction.peaks_in_loss:
        return f"the loss over the whole batch does not fit at any micro-batch size: {peak}"
    if prediction.peak_bytes > prediction.gpu.total_bytes:
        return f"not even {'one sample fits' if least == 1 else f'{least} samples fit'}: {peak}"
    samples = "one sample leaves" if least == 1 else f"{least} samples leave"
    return f"{samples} less free than the margin of {_percent(prediction.margin)}: {peak}"


def _section(title: str, lines: Iterator[str]) -> list[str]:
    body = [f"  {line}".rstrip() for line in lines]
    return ["", title, *body] if body else []


def _wrapped(sentences: Iterable[str]) -> Iterator[str]:
    for sentence in sentences:
        yield from wrap(sentence, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def _rank_lines(prediction: Prediction) -> Iterator[str]:
    if prediction.data_parallel is None:
        return
    ranks, share = plural(prediction.world_size, "rank"), plural(prediction.share, "sample")
    how = "each with the whole model (ddp)" if prediction.data_parallel == "ddp" else "each with a shard of it (fsdp2)"
    yield f"{prediction.target_batch} samples a step on {ranks}, {how}"
    yield f"all that follows is of the first rank, which has {share}: no other one has more, or larger shards"
    if prediction.data_parallel == "fsdp2" and not (units := prediction.units):
        yield "sharded as if fully_shard() had been called with the model alone: it has no blocks that repeat"
    elif prediction.data_parallel == "fsdp2":
        named = units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}"
        blocks = f"{plural(len(units), 'module')} ({named})"
        yield f"sharded as if fully_shard() had been called with {blocks}, then the model"


def _reach_lines(prediction: Prediction) -> Iterator[str]:
    target, reach = prediction.share, prediction.reach
    chosen = prediction.micro_batch_size
    if chosen == target:
        what = "target" if prediction.world_size == 1 else "share"
        yield f"all {target} of the {what} at once, with the margin" if target > 1 else f"the {what}, with the margin"
        return
    yield f"{chosen or 'none':>12}   with the margin: {'the plan' if chosen else 'no plan'}"
    yield f"{_of_target(reach.comfortable, target):>12}   without it, if the allocator never has to give memory back"
    yield f"{_of_target(reach.tight, target):>12}   if it has to, which costs time"
    more = "any larger size that saves a step is" if reach.tight else "even one sample is"
    if _is_bound(prediction, reach.tight):
        yield f"{'':>12}   nothing is said of larger ones: no size above {prediction.largest_judged} was judged"
    elif reach.tight < target:
        yield f"{'':>12}   {more} predicted to be impossible"


def _is_bound(prediction: Prediction, size: int) -> bool:
    """Whether a size is the largest that could be judged, so the card may take more."""
    steps = -(-prediction.share // size) if size else 0
    return steps > 1 and -(-prediction.share // (steps - 1)) > prediction.largest_judged


def _of_target(size: int, target: int) -> str:
    return f"all {size}" if size == target else str(size or "none")


def _part_lines(parts: Iterable[tuple[Bytes, str]]) -> Iterator[str]:
    return (f"{format_bytes(count):>12}   {name}" for count, name in parts)


def _point_lines(prediction: Prediction) -> Iterator[str]:
    chosen = prediction.micro_batch_size
    yield f"{'size':>8}{'allocated':>14}{'reserved':>14}{'process':>14}"
    rows, before = [*_point_rows(prediction)], ""
    for size, *peaks in rows:
        held = format_bytes(peaks[1])
        if held == before and size not in {chosen, rows[-1][0]}:  # says nothing more
            continue
        before = held
        mark = "   <- the plan" if size == chosen else ""
        yield f"{size:>8}{''.join(f'{format_bytes(peak):>14}' for peak in peaks)}{mark}"
    more = prediction.per_sample_bytes
    yield f"one sample more than {prediction.judged_size} takes {format_bytes(more) if more else 'nothing'} in tensors"


def _change_lines(prediction: Prediction) -> Iterator[str]:
    if not prediction.changes:
        yield "ask with what_if=True: each change is traced, which takes about as long as this prediction did"
        return
    yield f"{'saves':>12}{'micro-batch':>14}   change"
    for change in prediction.changes:
        if change.failed:
            failed = f"{'?':>12}{'?':>14}   {change.name}: {change.failed}"
            yield from wrap(failed, _WIDTH, subsequent_indent=" " * 29)
        else:
            saved = format_bytes(change.saved_bytes) if change.saved_bytes else "no change"
            yield f"{saved:>12}{change.micro_batch_size or 'none':>14}   {_name_change(change)}"
    now = prediction.micro_batch_size
    if now == prediction.share:
        yield "all of the target fits as it is: this would only save memory"
    elif _is_bound(prediction, now):
        yield "the plan has the largest size that was judged: this would only save memory"
    elif not any(change.failed or change.micro_batch_size > now for change in prediction.changes):
        yield f"none of it lets more than {plural(now, 'sample')} into a micro-batch" if now else "still nothing fits"


def _few_card_lines(prediction: Prediction) -> Iterator[str]:
    """A row for each interesting card; cards that take nothing and cards that take all have names only."""
    cards = _by_memory(prediction)
    none = [card.gpu for card in cards if not card.micro_batch_size][:-1]
    whole = [card.gpu for card in cards if card.micro_batch_size == prediction.share][1:]
    kept = [card for card in cards if card.gpu == prediction.gpu.name or card.gpu not in {*none, *whole}]
    shown = prediction.model_copy(update={"cards": tuple(kept)})
    yield from _card_table(shown, mark="   <- this one")
    yield from _card_notes(shown)
    left = {card.gpu for card in cards} - {card.gpu for card in kept}
    for names, what in ((none, "not even one sample fits"), (whole, f"all {prediction.share} at once, too")):
        if found := [name for name in names if name in left]:
            unbroken = ", ".join(name.replace(" ", "\0") for name in found)
            lines = wrap(f"{what}: {unbroken}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
            yield from (line.replace("\0", " ") for line in lines)


def _card_table(prediction: Prediction, mark: str) -> Iterator[str]:
    for name, total, size, steps, peak in (CARD_HEADINGS, *card_rows(prediction)):
        line = f"{name:<32}{total:>11}{size:>13}{steps:>9}{peak:>12}"
        yield line + (mark if name == prediction.gpu.name else "")


def _card_notes(prediction: Prediction) -> Iterator[str]:
    if not all(card.measured for card in prediction.cards):
        yield _NOMINAL
    if len({card.micro_batch_size for card in prediction.cards}) > 1:
        yield f"{prediction.judged_size} was traced, if nothing else is said; other sizes follow from fewer samples"


def _trust_lines(prediction: Prediction) -> Iterator[str]:
    gpu, margin = prediction.gpu, _percent(prediction.margin)
    yield f"{margin} of the peak, CUDA's own part included, is left free on top of it: {prediction.margin_reason}"
    if not gpu.measured and any(card.gpu == gpu.name for card in prediction.cards):
        yield f"the card's memory is {gpu.source}"
    if not gpu.context_measured:
        yield "what CUDA takes for itself is a guess on this card: nobody has read it on one of its kind and size"
    if prediction.data_parallel is not None:
        yield "what NCCL takes outside the allocator is not counted: leave some of the card free for it, by margin="
    if version := prediction.cudnn_version:
        yield f"cuDNN {version // 10000}.{version // 100 % 100} was asked what its convolutions take on such a card"
    elif prediction.has_convolutions:
        yield (
            f"what cuDNN takes for convolutions follows a rule, as none is installed that could be asked "
            f"(in a checkout: pip install '.[cudnn]'): {FAMILIES_REASON}"
        )
    at = f"at {plural(prediction.judged_size, 'sample')}"
    if prediction.proven_at:
        yield f"the step was traced {at}: its tensors there are as they are said to be, byte for byte"
    else:
        yield f"the step was not traced {at}, and what is said of it follows from other sizes: {prediction.doubt}"
    yield from _interpolation_lines(prediction)


def _interpolation_lines(prediction: Prediction) -> Iterator[str]:
    if prediction.interpolated:
        yield (
            "the step ran different operators at different sizes: all numbers for sizes that were not traced are on "
            f"lines through the nearest two that were, and no size above {prediction.largest_judged} was judged"
        )


def render_prediction(prediction: Prediction) -> str:
    """Render one HTML element whose styles reach nothing else."""
    from autobatch.report.html import render  # noqa: PLC0415 - only notebooks need it

    peak = share_of(prediction.peak_bytes, prediction.gpu.total_bytes)
    plan = prediction.plan
    margin = f"left free, as a margin; nothing was run, {prediction.seconds:.1f} s"
    return render(
        "notebook.html",
        title=f"autobatch: predicted on {prediction.gpu.name}",
        headlines=[
            (str(prediction.micro_batch_size or "none"), "samples in a micro-batch"),
            (plural(plan.accumulation_steps, "step"), describe_division(plan))
            if plan
            else ("no plan", _refuse(prediction, peak)),
            (peak, "predicted peak"),
            (_percent(prediction.margin), margin),
        ],
        warnings=prediction.warnings,
        sections=[
            *([Section("The ranks", items=list(_rank_lines(prediction)))] if prediction.data_parallel else []),
            *(section for section in _table_sections(prediction) if section.table and section.table.rows),
            Section("How sure this is", items=list(_trust_lines(prediction))),
        ],
    )


def _table_sections(prediction: Prediction) -> Iterator[Section]:
    size = plural(prediction.judged_size, "sample")
    chosen = prediction.plan.micro_batch_size if prediction.plan else None
    changes = tuple(
        ("?", "?", f"{change.name}: {change.failed}")
        if change.failed
        else (Bytes(change.saved_bytes), change.micro_batch_size or "none", _name_change(change))
        for change in prediction.changes
    )
    cards = tuple(map(_card_cells, _by_memory(prediction)))
    points = Table(("size", "allocated", "reserved", "process"), tuple(_point_rows(prediction)))
    drawn, parts = charts(prediction), Table(("bytes", "part"), tuple(_part_rows(prediction)))
    yield Section(f"Where the memory goes at {size}", chart=drawn["memory"], table=parts)
    yield Section(
        f"Its tensors at {size}, by module", table=Table(("bytes", "module"), tuple(_module_rows(prediction)))
    )
    yield Section("Memory by size", chart=drawn["peak"], table=points, planned=chosen)
    yield Section("What would help", table=Table(("saves", "micro-batch", "change"), changes))
    yield Section(_title_cards(prediction), table=Table(CARD_HEADINGS, cards, (_NOMINAL,)))


def charts(prediction: Prediction) -> dict[str, Chart]:
    """Return the pictures: peaks by size beside the card's memory, and what that memory is made of."""
    total, size = prediction.gpu.total_bytes, prediction.judged_size
    limit, name = round(total / (1 + prediction.margin)), "the plan" if prediction.plan else "does not fit"
    points = [(row[0], row[3]) for row in _point_rows(prediction)]  # of the process, as in the text
    peaks = Peaks(None, (), total, limit, size, prediction.peak_bytes, prediction.share, name, points, "card")
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


def _part_rows(prediction: Prediction) -> Iterator[tuple[Bytes, str]]:
    yield from ((Bytes(part.byte_count), part.name) for part in prediction.breakdown)
    yield Bytes(prediction.context_bytes), "CUDA's own, outside the allocator"
    yield Bytes(prediction.peak_bytes), "in all: the peak of the process, without the margin"


def _module_rows(prediction: Prediction) -> Iterator[tuple[Bytes, str]]:
    for part in prediction.modules:
        yield Bytes(part.byte_count), part.name or "the model itself, outside its submodules"


def _point_rows(prediction: Prediction) -> Iterator[tuple[int, Bytes, Bytes, Bytes]]:
    for point in prediction.points:
        held = Bytes(point.reserved)
        yield point.size, Bytes(point.allocated), held, Bytes(held + prediction.context_bytes)


def _name_change(change: Change) -> str:
    return f"{change.name} ({change.effect})" if change.effect else change.name


def _title_cards(prediction: Prediction) -> str:
    if len(prediction.cards) >= len(GPUS):
        return "On every card that is known"
    return f"On common cards (all_cards=True: all {len(GPUS)} that are known)"


def _by_memory(prediction: Prediction) -> list[CardFit]:
    return sorted(prediction.cards, key=lambda card: (card.total_bytes, card.gpu))


def _card_cells(card: CardFit) -> tuple[Cell, ...]:
    name = card.gpu if card.measured else f"{card.gpu} *"
    peak = Bytes(card.peak_bytes) if card.micro_batch_size else "-"
    return (name, Bytes(card.total_bytes), card.micro_batch_size or "none", card.accumulation_steps or "-", peak)
