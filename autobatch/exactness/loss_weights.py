"""Finds what a loss is a mean over: weights of the parts with which their own gradients add up to the whole one.

Covers samples, counts that the batch shows (``units``), of which the best one is advised and never what was passed, and
whether any weights would do. Does not cover other causes (``diagnosis``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch

from autobatch.exactness.divisions import Sizes, ranges_of
from autobatch.exactness.measurement import Measurement
from autobatch.exactness.rounding import relate
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


def explain_weighing(measured: Measurement, partitions: Sequence[Sizes]) -> str | None:
    """One sentence where the loss is a mean over something else than is counted, with what to pass or return."""
    passed = _error_as_passed(measured, partitions)
    if _error_of(measured, partitions, lambda start, stop: float(stop - start)) <= _most(passed):
        return (
            "the loss is a mean over samples, and is counted otherwise: leave weigh= out and return the loss itself, "
            "or state the number of samples as its count"
        )
    best = _find_best_unit(measured, partitions)
    if best is not None and best[1] <= _most(passed):
        return _advise(measured, best[0], passed, best[1])
    return _explain_weights(measured, partitions)


def _advise(measured: Measurement, unit: Unit, passed: float, reached: float) -> str:
    counted = "what it states as its count" if measured.states_counts else _counted(measured)
    state = f"state {unit.code} as its count" if measured.states_counts else f"pass weigh=lambda batch: {unit.code}"
    return (
        f"the loss is a mean over {unit.code}, not over {counted}: {state} (that leaves a relative error "
        f"{_bound(reached)} instead of {passed:.1e})"
    )


def _bound(error: float) -> str:
    return f"below {_NO_ERROR:.0e}" if error < _NO_ERROR else f"of {error:.1e}"


def _counted(measured: Measurement) -> str:
    return "what weigh() counts" if measured.workload.weigh is not None else "samples"


def _find_best_unit(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[Unit, float] | None:
    """The candidate that leaves the least error, and that error; the first of those that leave as good as none."""
    best: tuple[Unit, float] | None = None
    for unit in units_of(measured.layout):
        error = _error_of(measured, partitions, _counter(unit, measured))
        if best is None or error < min(best[1], max(best[1] / _BETTER, _NO_ERROR)):
            best = unit, error
    return best


def _most(passed: float) -> float:
    """The most that an explanation may leave of what there was."""
    return min(_EXPLAINS, passed / _BETTER)


def _error_as_passed(measured: Measurement, partitions: Sequence[Sizes]) -> float:
    whole = measured.whole_numbers()
    return max(_relative(measured.numbers(sizes), whole) for sizes in partitions)


def _counter(unit: Unit, measured: Measurement) -> Callable[[int, int], float]:
    return lambda start, stop: unit.count(measured.part(start, stop).batch)


def is_explained_by(
    measured: Measurement, partitions: Iterable[Sizes], weigh: Callable[[int, int], float], *, normalise: bool = True
) -> bool:
    """Whether the whole is the sum of its parts' own gradients with these weights, in every division."""
    return _error_of(measured, partitions, weigh, normalise=normalise) <= _EXPLAINS


def _error_of(
    measured: Measurement, partitions: Iterable[Sizes], weigh: Callable[[int, int], float], *, normalise: bool = True
) -> float:
    """How far the sum of the parts' own gradients with these weights is from the whole, in the worst division."""
    whole, worst = measured.whole_numbers(), 0.0
    for sizes in partitions:
        weights = [weigh(start, stop) for start, stop in ranges_of(sizes)]
        divisor = sum(weights) if normalise else 1.0
        parts = [measured.alone(start, stop) for start, stop in ranges_of(sizes)]
        # 0 x nan is nan: a part without anything to count has no gradient to go by
        shares = [p * (w / divisor) for p, w in zip(parts, weights, strict=True) if p is not None and w > 0]
        worst = max(worst, _relative(torch.stack(shares).sum(0), whole) if shares else math.inf)
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


def _find_weights(measured: Measurement, sizes: Sizes) -> list[float] | None:
    """Those whose sum of parts is nearest to the whole; ``None`` where it is not near, or they are not unique."""
    return _solve([measured.alone(start, stop) for start, stop in ranges_of(sizes)], measured.whole_numbers())


def _are_of_samples(partitions: Sequence[Sizes], weights: Sequence[Sequence[float]]) -> bool:
    """Whether weights are positive, sum to 1, and give a range of samples the same in every division."""
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
    """Give each parameter its own numbers in the reverse order: other ones of the same scale, and undone by itself."""
    for parameter in parameters:
        parameter.data.copy_(parameter.data.reshape(-1).flip(0).view(parameter.shape))


def _solve(parts: Sequence[torch.Tensor | None], whole: torch.Tensor) -> list[float] | None:
    usable = [index for index, part in enumerate(parts) if part is not None and bool(part.isfinite().all())]
    columns = [part for index in usable if (part := parts[index]) is not None]
    if not columns:
        return None
    matrix = torch.stack(columns, 1)
    found = torch.linalg.lstsq(matrix, whole.unsqueeze(1), driver="gelsd")
    if int(found.rank) < len(columns) or not is_near((matrix @ found.solution).squeeze(1), whole, scale=whole):
        return None
    weights = [0.0] * len(parts)
    for index, weight in zip(usable, found.solution.squeeze(1).tolist(), strict=True):
        weights[index] = weight
    return weights


def is_near(found: torch.Tensor, expected: torch.Tensor, *, scale: torch.Tensor, tolerance: float = _EXPLAINS) -> bool:
    """Whether the difference is that small a part of ``scale``."""
    return bool((found - expected).norm() <= tolerance * scale.norm())
