"""Compares predictions with measured peaks, and decides by the team's own errors whether a predicted step fits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from autobatch._formatting import format_bytes, plural
from autobatch.service.answers import Comparison, ErrorPage
from autobatch.service.records import ErrorFigures, GateAnswer, GateQuestion, PredictionIn

_ENOUGH = 5  # comparisons that a margin may rest on
_LEAST_MARGIN = 0.02
_DEFAULT_MARGIN = 0.1  # of a prediction that has none
_MOST_SHOWN = 200


def predicted_bytes(prediction: PredictionIn, size: int) -> int | None:
    """Return what the allocator was predicted to hold at a size, on a line between two points; none beyond them."""
    points = prediction.points
    for point in points:
        if point.size == size:
            return point.reserved_bytes
    for low, high in pairwise(points):
        if low.size < size < high.size:
            rise, run = high.reserved_bytes - low.reserved_bytes, high.size - low.size
            return low.reserved_bytes + rise * (size - low.size) // run
    return None


def summarise(comparisons: Sequence[Comparison], model: str = "", card: str = "") -> ErrorFigures:
    """Return the figures of some comparisons."""
    errors = [one.error for one in comparisons]
    if not errors:
        return ErrorFigures(model=model, card=card)
    return ErrorFigures(
        model=model,
        card=card,
        compared=len(errors),
        under=sum(error < 0 for error in errors),
        median_error=statistics.median(map(abs, errors)),
        worst_error=max(errors, key=abs),
        worst_under=max(0.0, *(one.measured_bytes / max(one.predicted_bytes, 1) - 1 for one in comparisons)),
    )


def summarise_groups(comparisons: Iterable[Comparison]) -> ErrorPage:
    """Return the figures of all, and of each model on each card; the worst first."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    every = sorted(comparisons, key=lambda one: abs(one.error), reverse=True)
    for one in every:
        groups.setdefault((one.model, one.card), []).append(one)
    figures = [summarise(group, model, card) for (model, card), group in groups.items()]
    return ErrorPage(total=summarise(every), groups=tuple(figures), comparisons=tuple(every[:_MOST_SHOWN]))


def decide(question: GateQuestion, comparisons: Sequence[Comparison]) -> GateAnswer:
    """Answer whether the step fits with the margin that the errors of such predictions call for."""
    prediction = question.prediction
    errors, margin, reason = _choose_margin(prediction, comparisons)
    limit = prediction.total_bytes if question.limit_bytes is None else question.limit_bytes
    share = -(-prediction.target_batch // prediction.world_size)
    size = _largest_size(prediction, limit, margin, share)
    smallest = prediction.points[0]
    held = predicted_bytes(prediction, size) if size else smallest.reserved_bytes
    peak = (held or 0) + prediction.context_bytes
    advice: list[str] = []
    if not size:
        short = round(peak * (1 + margin)) - limit
        advice.append(
            f"{plural(smallest.size, 'sample')} would take {format_bytes(peak)}, and with a margin of {margin:.1%} "
            f"{format_bytes(short)} more than the limit of {format_bytes(limit)}"
        )
        advice += [
            f"{remedy.name} saves {format_bytes(remedy.saved_bytes)}"
            + (f" and fits {plural(remedy.micro_batch_size, 'sample')}" if remedy.micro_batch_size else "")
            + (f" (costs {remedy.effect})" if remedy.effect else "")
            for remedy in sorted(prediction.remedies, key=lambda one: one.saved_bytes, reverse=True)
            if remedy.saved_bytes > 0
        ] or [f"take a card with at least {format_bytes(round(peak * (1 + margin)))}, or a smaller model or sample"]
    return GateAnswer(
        fits=bool(size),
        micro_batch_size=size,
        accumulation_steps=-(-share // size) if size else 0,
        peak_bytes=peak,
        limit_bytes=limit,
        margin=margin,
        margin_reason=reason,
        errors=errors,
        advice=tuple(advice),
    )


def _choose_margin(prediction: PredictionIn, comparisons: Sequence[Comparison]) -> tuple[ErrorFigures, float, str]:
    """Return the errors of similar predictions, and the margin that they call for."""
    of_model = [one for one in comparisons if one.model == prediction.model]
    groups = (
        (f"{prediction.model} on {prediction.card}", [one for one in of_model if one.card == prediction.card]),
        (prediction.model, of_model),
        (f"all models on {prediction.card}", [one for one in comparisons if one.card == prediction.card]),
        ("all models and cards", list(comparisons)),
    )
    for name, group in groups:
        if len(group) >= _ENOUGH:
            errors = summarise(group)
            margin = max(_LEAST_MARGIN, errors.worst_under + 0.01)
            beyond = f"at most {errors.worst_under:.1%} more was measured than predicted"
            return errors, margin, f"of {plural(len(group), 'comparison')} for {name}, {beyond}"
    margin = prediction.margin or _DEFAULT_MARGIN
    known = f"the team has fewer than {_ENOUGH} comparisons"
    return summarise(comparisons), margin, f"{known}; this is the prediction's own margin"


def _largest_size(prediction: PredictionIn, limit: int, margin: float, share: int) -> int:
    """Return the most samples that fit between the first and the last point, at most ``share``; 0 if none do."""

    def fits(size: int) -> bool:
        held = predicted_bytes(prediction, size)
        return held is not None and (held + prediction.context_bytes) * (1 + margin) <= limit

    sizes = [point.size for point in prediction.points if point.size <= share]
    if sizes and sizes[-1] < share <= prediction.points[-1].size:
        sizes.append(share)
    best = max(filter(fits, sizes), default=0)
    low, high = best, next((size for size in sizes if size > best), best)
    while best and high - low > 1:  # between a point that fits and the next one, which does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
