"""Compares predictions with measured peaks, and decides by the team's own errors whether a predicted step fits."""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from autobatch._formatting import format_bytes, plural
from autobatch.service.answers import Comparison, ErrorPage
from autobatch.service.records import ErrorFigures, GateAnswer, GateQuestion, PredictionIn

_ENOUGH = 5  # comparisons that a margin may rest on
_MANY = 20  # so many that one in twenty may be left out
_LEAST_MARGIN, _MOST_MARGIN = 0.02, 1.0
_DEFAULT_MARGIN = 0.1  # of a prediction that has none
_MOST_SHOWN = 200
_LONGEST_NAME = 200


def card_key(name: str) -> str:
    """Return a card's name without what names of one card differ in: case, spaces and the maker."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", ""))[:_LONGEST_NAME]


def card_keys(prediction: PredictionIn) -> set[str]:
    return {card_key(name) for name in (prediction.card, *prediction.card_names)}


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
        worst_under=max(0.0, *map(_excess, comparisons)),
    )


def _excess(comparison: Comparison) -> float:
    return comparison.measured_bytes / max(comparison.predicted_bytes, 1) - 1


def summarise_groups(comparisons: Iterable[Comparison]) -> ErrorPage:
    """Return the figures of all, and of each model on each card; the worst first."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    every = sorted(comparisons, key=lambda one: abs(one.error), reverse=True)
    for one in every:
        groups.setdefault((one.model, one.card_key), []).append(one)
    figures = [summarise(group, group[0].model, group[0].card) for group in groups.values()]
    return ErrorPage(total=summarise(every), groups=tuple(figures), comparisons=tuple(every[:_MOST_SHOWN]))


def decide(question: GateQuestion, comparisons: Sequence[Comparison]) -> GateAnswer:
    """Answer whether the step fits with the margin that the errors of such predictions call for."""
    prediction = question.prediction
    errors, margin, reason = _choose_margin(prediction, comparisons)
    limit = prediction.total_bytes if question.limit_bytes is None else question.limit_bytes
    limit = min(limit, prediction.total_bytes or limit)  # no limit is more than the card has
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
    """Return the errors of the newest predictions of this model, and the margin that they call for.

    One wrong prediction of another model must not close the gate for all.
    """
    cards = card_keys(prediction)
    of_model = [one for one in comparisons if one.model == prediction.model and one.is_newest]
    on_card = [one for one in of_model if one.card_key in cards]
    for name, group in ((f"{prediction.model} on {prediction.card}", on_card), (prediction.model, of_model)):
        if len(group) >= _ENOUGH:
            excesses = sorted(map(_excess, group))
            kept = math.ceil(0.95 * len(group)) if len(group) >= _MANY else len(group)
            beyond = max(0.0, excesses[kept - 1])
            margin = min(max(_LEAST_MARGIN, beyond + 0.01), _MOST_MARGIN)
            found = f"of {plural(len(group), 'comparison')} for {name}, {beyond:.1%} more than predicted was measured"
            reason = f"{found} at most" if kept == len(group) else f"{found} at most in {kept}"
            capped = f"; a margin is at most {_MOST_MARGIN:.0%}" if margin == _MOST_MARGIN else ""
            return summarise(group), margin, reason + capped
    margin = prediction.margin or _DEFAULT_MARGIN
    known = f"the team has fewer than {_ENOUGH} comparisons of this model"
    return summarise(of_model), margin, f"{known}; this is the prediction's own margin"


def _largest_size(prediction: PredictionIn, limit: int, margin: float, share: int) -> int:
    """Return the most samples that fit between the first and the last point, at most ``share``; 0 if none do."""

    def fits(size: int) -> bool:
        held = predicted_bytes(prediction, size)
        return held is not None and (held + prediction.context_bytes) * (1 + margin) <= limit

    sizes = [point.size for point in prediction.points if point.size <= share]
    if sizes and sizes[-1] < share <= prediction.points[-1].size:
        sizes.append(share)
    best = max(filter(fits, sizes), default=0)
    following = next((size for size in sizes if size > best), best) if best else 0
    between = range(best + 1, following)  # a point that fits, and the next one, which does not
    return best + bisect_left(between, True, key=lambda size: not fits(size))
