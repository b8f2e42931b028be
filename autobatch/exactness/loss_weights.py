"""Finds what a loss is a mean over: weights with which the gradients of the parts add up to that of the whole.

Covers samples, counts that the batch shows, of which the best one is advised and never what was passed, and whether any
weights would do. Does not cover other causes (``diagnosis``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch

from autobatch.exactness.gradients import relate
from autobatch.exactness.measurement import Measurement, Sizes, ranges_of
from autobatch.exactness.units import Unit, units_of

__all__ = ["NO_MEAN", "explain_weighing", "is_explained_by", "is_near"]

NO_MEAN = (
    "the loss is not a mean over samples: what each counts for depends on the losses themselves (a maximum, logsumexp, "
    "a root or another function of a mean), which no weighing makes exact: return the mean of each sample's own loss, "
    "or choose the target so that a micro-batch is the unit you want"
)

_EXPLAINS = 1e-3
"""A cause explains a gradient where what it predicts is this near."""

_BETTER = 10.0
"""Advice must make the error smaller by this at least. What was passed, or something equal to it, never does."""

_NO_ERROR = 1e-6
"""Candidates that are nearer than this are equally good, and the commonest of them is named."""

_Weigh = Callable[[int, int], float]
"""What samples ``start`` to ``stop`` count for."""


def explain_weighing(measured: Measurement, partitions: Sequence[Sizes]) -> str | None:
    """One sentence where the loss is a mean over something else than is counted, with what to pass or return."""
    whole = measured.whole_values()
    passed = max(_relative(measured.values(sizes), whole) for sizes in partitions)
    most = min(_EXPLAINS, passed / _BETTER)
    if _error_of(measured, partitions, lambda start, stop: float(stop - start)) <= most:
        return (
            "the loss is a mean over samples, and is counted otherwise: leave weigh= out and return the loss itself, "
            "or state the number of samples as its count"
        )
    best = _find_best_unit(measured, partitions)
    if best is not None and best[1] <= most:
        return _advise(measured, best[0], passed, best[1])
    return _explain_weights(measured, partitions)


def _advise(measured: Measurement, unit: Unit, passed: float, reached: float) -> str:
    counted = "what it states as its count" if measured.states_counts else _counted(measured)
    state = f"state {unit.code} as its count" if measured.states_counts else f"pass weigh=lambda batch: {unit.code}"
    left = f"below {_NO_ERROR:.0e}" if reached < _NO_ERROR else f"of {reached:.1e}"
    return (
        f"the loss is a mean over {unit.code}, not over {counted}: {state} (that leaves a relative error "
        f"{left} instead of {passed:.1e})"
    )


def _counted(measured: Measurement) -> str:
    return "what weigh() counts" if measured.workload.weigh is not None else "samples"


def _find_best_unit(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[Unit, float] | None:
    """The candidate that leaves the least error, and that error; the first of those that leave almost none."""
    best: tuple[Unit, float] | None = None
    for unit in units_of(measured.layout):
        error = _error_of(measured, partitions, _weigh_by(unit, measured))
        if best is None or error < min(best[1], max(best[1] / _BETTER, _NO_ERROR)):
            best = unit, error
    return best


def _weigh_by(unit: Unit, measured: Measurement) -> _Weigh:
    return lambda start, stop: unit.count(measured.part(start, stop).batch)


def is_explained_by(
    measured: Measurement, partitions: Iterable[Sizes], weigh: _Weigh, *, normalise: bool = True
) -> bool:
    """Whether the whole is the sum of its parts' own gradients with these weights, in every partition."""
    return _error_of(measured, partitions, weigh, normalise=normalise) <= _EXPLAINS


def _error_of(measured: Measurement, partitions: Iterable[Sizes], weigh: _Weigh, *, normalise: bool = True) -> float:
    """How far the sum of the parts' own gradients with these weights is from the whole, in the worst partition."""
    whole, worst = measured.whole_values(), 0.0
    for sizes in partitions:
        weights = [weigh(start, stop) for start, stop in ranges_of(sizes)]
        divisor = sum(weights) if normalise else 1.0
        parts = [measured.alone(start, stop) for start, stop in ranges_of(sizes)]
        # 0 x nan is nan: a part without anything to count has no gradient
        terms = [
            part * (weight / divisor)
            for part, weight in zip(parts, weights, strict=True)
            if part is not None and weight > 0
        ]
        worst = max(worst, _relative(torch.stack(terms).sum(0), whole) if terms else math.inf)
    return worst


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return relate(float((found - expected).norm()), float(expected.norm()))


def _explain_weights(measured: Measurement, partitions: Sequence[Sizes]) -> str | None:
    """One sentence where the whole is a sum of its parts' gradients with weights that no count gives."""
    weights = [_find_weights(measured, sizes) for sizes in partitions]
    found = [one for one in weights if one is not None]
    if len(found) < len(weights):
        return None
    if _are_of_samples(partitions, found) and not _depend_on_losses(measured, partitions, found):
        return (
            f"the loss is a mean over something else than {_counted(measured)}, such as class weights: pass weigh= "
            f"that sums what the loss is divided by"
        )
    return NO_MEAN


def _are_of_samples(partitions: Sequence[Sizes], weights: Sequence[Sequence[float]]) -> bool:
    """Whether weights are positive, sum to 1, and give a range of samples the same in every partition."""
    reached = {0: 0.0}
    for sizes, found in zip(partitions, weights, strict=True):
        if abs(sum(found) - 1) > _EXPLAINS or min(found) < -_EXPLAINS:
            return False
        so_far = 0.0
        for (_, stop), weight in zip(ranges_of(sizes), found, strict=True):
            so_far += weight
            if abs(reached.setdefault(stop, so_far) - so_far) > 2 * _EXPLAINS:
                return False
    ordered = [reached[stop] for stop in sorted(reached)]
    return all(later >= earlier - _EXPLAINS for earlier, later in pairwise(ordered))


def _depend_on_losses(measured: Measurement, partitions: Sequence[Sizes], weights: Sequence[Sequence[float]]) -> bool:
    """Whether one part counts alone, or other parameters give other weights: those of classes or tokens stay."""
    if all(max(found) > 1 - _EXPLAINS for found in weights):
        return True  # a maximum, which may be the same sample's for other parameters too
    parameters = measured.workload.parameters()
    _flip(parameters)
    try:
        changed = measured.anew()
        others = [_find_weights(changed, sizes) for sizes in partitions]
    finally:
        _flip(parameters)
    return any(
        other is not None and max(abs(one - two) for one, two in zip(found, other, strict=True)) > 2 * _EXPLAINS
        for found, other in zip(weights, others, strict=True)
    )


@torch.no_grad()
def _flip(parameters: Iterable[torch.Tensor]) -> None:
    """Reverse each parameter's values: other values of the same scale, restored by reversing them again."""
    for parameter in parameters:
        parameter.data.copy_(parameter.data.reshape(-1).flip(0).view(parameter.shape))


def _find_weights(measured: Measurement, sizes: Sizes) -> list[float] | None:
    """Weights whose sum of parts is nearest to the whole; ``None`` where it is not near, or they are not unique."""
    parts, whole = [measured.alone(start, stop) for start, stop in ranges_of(sizes)], measured.whole_values()
    columns = {index: part for index, part in enumerate(parts) if part is not None and bool(part.isfinite().all())}
    if not columns:
        return None
    matrix = torch.stack([*columns.values()], 1)
    found = torch.linalg.lstsq(matrix, whole.unsqueeze(1), driver="gelsd")
    if int(found.rank) < len(columns) or not is_near((matrix @ found.solution).squeeze(1), whole, scale=whole):
        return None
    solved = dict(zip(columns, found.solution.squeeze(1).tolist(), strict=True))
    return [solved.get(index, 0.0) for index in range(len(parts))]


def is_near(found: torch.Tensor, expected: torch.Tensor, *, scale: torch.Tensor, tolerance: float = _EXPLAINS) -> bool:
    """Whether the difference is that small a part of ``scale``."""
    return bool((found - expected).norm() <= tolerance * scale.norm())
