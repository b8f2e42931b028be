"""Finds which count a loss is divided by, such as tokens: weighed by it, gradients of the parts give the whole's.

Covers samples, counts that the batch shows (tokens, valid labels, masks, boxes of each image), of which the best one is
advised and never what was passed, and whether any weights would do. Does not cover other causes (``diagnosis``), nor
counts that only the loss knows, such as class weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from autobatch.batch.layout import Layout
from autobatch.batch.tree import fields_of
from autobatch.exactness.gradients import relate
from autobatch.exactness.measurement import Measurement
from autobatch.exactness.moved_parameters import reversed_values
from autobatch.exactness.partitions import Sizes, ranges_of

__all__ = ["BY_SIZE", "EXPLAINS", "FILLERS", "NO_MEAN", "Unit", "error_of", "explain_weighing", "is_near", "units_of"]

NO_MEAN = (
    "the loss is not a mean over samples: what each counts for depends on the losses themselves (a maximum, logsumexp, "
    "a root or another function of a mean), which no weighing makes exact: return the mean of each sample's own loss, "
    "or choose the target so that a micro-batch is the unit you want"
)

BY_SIZE = (
    "the loss is not a mean over samples: what each counts for depends on how many samples its micro-batch has (a "
    "power of their number, a branch on it), which no weighing makes exact: divide by the number of samples, or choose "
    "the target so that a micro-batch is the unit you want"
)

EXPLAINS = 1e-3
"""A cause explains a gradient where what it predicts is this near."""

_BETTER = 10.0
"""Advice must make the error smaller by this at least. What was passed, or something equal to it, never does."""

_NO_ERROR = 1e-6
"""Candidates that are nearer than this are equally good, and the commonest of them is named."""

FILLERS = (-100, 0, -1, 1)
"""What stands for "no label" or "padding": torch's ignore_index, and the usual padding tokens."""

_Weigh = Callable[[int, int], float]
"""What samples ``start`` to ``stop`` count for."""

_Count = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Unit:
    """Something a batch has a number of: how it is counted, as Python with ``batch`` in it, and the counting itself."""

    code: str
    count: Callable[[Any], float]


class _Source(NamedTuple):
    """A tensor of a batch; or all that the samples of a list have under one path, which ``within`` is then."""

    path: str
    within: str
    values: torch.Tensor
    ndim: int

    def unit(self, code: str, count: _Count) -> Unit:
        path, within = self.path, self.within
        if not within:
            return Unit(code.format(path), lambda batch: float(count(_tensors("batch", batch)[path])))
        return Unit(
            f"sum({code.format(within)} for item in {path})",
            lambda batch: float(sum(float(count(_tensors("item", item)[within])) for item in _at(batch, path))),
        )

    def units(self, code: str, count: _Count) -> Iterator[Unit]:
        yield self.unit(code, count)
        if self.ndim >= 2 and not self.within:
            # A language model's labels are its inputs, shifted by one: the first of each row is no label.
            yield self.unit(code.format("{}[:, 1:]"), lambda tensor: count(tensor[:, 1:]))


def units_of(layout: Layout) -> Iterator[Unit]:
    """Everything in this batch that a mean may be over, the most common first."""
    found = [*_sources(layout)]
    masks = [s.values.dtype == torch.bool or bool(((s.values == 0) | (s.values == 1)).all()) for s in found]
    for source in found:
        if source.within:
            yield source.unit("len({})", len)
    for filler in FILLERS:
        for source, is_mask in zip(found, masks, strict=True):
            if not is_mask and not source.values.is_floating_point():
                yield from source.units(f"({{}} != {filler}).sum()", _count_unequal(filler))
    for source, is_mask in zip(found, masks, strict=True):
        if is_mask or (source.ndim == 1 and bool((source.values >= 0).all())):
            yield from source.units("{}.sum()", lambda tensor: tensor.double().sum())


def _count_unequal(filler: int) -> _Count:
    return lambda tensor: (tensor != filler).sum()


def _sources(layout: Layout) -> Iterator[_Source]:
    lists = [path for path, reading in layout.lists.items() if reading == "samples"]
    for path, tensor in _tensors("batch", layout.batch).items():
        if not any(path.startswith(f"{of_samples}[") for of_samples in lists):
            yield _Source(path, "", tensor, tensor.ndim)
    for path in lists:
        items = [_tensors("item", item) for item in _at(layout.batch, path)]
        for name in items[0] if items else ():
            if all(name in item for item in items):
                values = torch.cat([item[name].reshape(-1) for item in items])
                yield _Source(path, name, values, items[0][name].ndim)


def _walk(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    yield path, node
    for suffix, child in fields_of(node) or ():
        yield from _walk(path + suffix, child)


def _tensors(path: str, node: Any) -> dict[str, torch.Tensor]:
    tensors = ((reached, leaf) for reached, leaf in _walk(path, node) if isinstance(leaf, torch.Tensor))
    return {reached: tensor for reached, tensor in tensors if tensor.ndim and not tensor.is_complex()}


def _at(batch: Any, path: str) -> Any:
    """What a container holds at this path."""
    return dict(_walk("batch", batch)).get(path, ())


def explain_weighing(measured: Measurement, partitions: Sequence[Sizes]) -> str | None:
    """One sentence where the loss is a mean over something else than is counted, with what to pass or return.

    ``None`` where no weights give the whole gradient, and "" where some do and it is not known on what they depend.
    """
    whole = measured.whole_values()
    passed = max(_relative(measured.values(sizes), whole) for sizes in partitions)
    most = min(EXPLAINS, passed / _BETTER)
    is_weighed = measured.workload.weigh is not None or measured.states_counts
    if is_weighed and error_of(measured, partitions, lambda start, stop: float(stop - start)) <= most:
        mend = (
            "return the loss itself, or state the number of samples as its count"
            if measured.states_counts
            else "leave weigh= out"
        )
        return f"the loss is a mean over samples, and is counted otherwise: {mend}"
    counted = "what weigh() counts" if measured.workload.weigh is not None else "samples"
    code, error = _find_best_unit(measured, partitions)
    if error <= most:
        pass_ = f"pass weigh=lambda batch: {code}"
        if measured.states_counts:
            counted, pass_ = "what it states as its count", f"state {code} as its count"
        left = f"below {_NO_ERROR:.0e}" if error < _NO_ERROR else f"of {error:.1e}"
        return (
            f"the loss is a mean over {code}, not over {counted}: {pass_} (that leaves a relative error "
            f"{left} instead of {passed:.1e})"
        )
    return _explain_weights(measured, partitions, counted)


def _explain_weights(measured: Measurement, partitions: Sequence[Sizes], counted: str) -> str | None:
    weighed = [(sizes, _find_weights(measured, sizes)) for sizes in partitions]
    # Of samples that are alike, each in a part of its own, no weights are unique: the other partitions tell.
    partitions = [sizes for sizes, found in weighed if found != []]
    weights = [found for _, found in weighed if found]
    if not weights or len(weights) < len(partitions):
        return None
    if _depend_on_losses(measured, partitions, weights):
        return NO_MEAN
    if all(max(found) > 1 - EXPLAINS for found in weights):
        return ""  # one part counts alone: a maximum, or the only sample that has a weight
    if _are_of_samples(partitions, weights):
        return (
            f"the loss is a mean over something else than {counted}, such as class weights: pass weigh= "
            f"that sums what the loss is divided by"
        )
    return BY_SIZE if _are_of_sizes(partitions, weights) else ""


def _find_best_unit(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[str, float]:
    """The code that leaves the least error, and that error; the first of those that leave almost none."""
    best = "", math.inf
    for unit in units_of(measured.layout):
        error = error_of(measured, partitions, _weigh_by(unit, measured))
        if error < min(best[1], max(best[1] / _BETTER, _NO_ERROR)):
            best = unit.code, error
    return best


def _weigh_by(unit: Unit, measured: Measurement) -> _Weigh:
    return lambda start, stop: unit.count(measured.part(start, stop).batch)


def error_of(measured: Measurement, partitions: Iterable[Sizes], weigh: _Weigh, *, normalise: bool = True) -> float:
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


def _are_of_samples(partitions: Sequence[Sizes], weights: Sequence[Sequence[float]]) -> bool:
    """Whether weights are positive, sum to 1, and give a range of samples the same in every partition."""
    reached = {0: 0.0}
    for sizes, found in zip(partitions, weights, strict=True):
        if abs(sum(found) - 1) > EXPLAINS or min(found) < -EXPLAINS:
            return False
        for (_, stop), so_far in zip(ranges_of(sizes), accumulate(found), strict=True):
            if abs(reached.setdefault(stop, so_far) - so_far) > 2 * EXPLAINS:
                return False
    ordered = [reached[stop] for stop in sorted(reached)]
    return all(later >= earlier - EXPLAINS for earlier, later in pairwise(ordered))


def _are_of_sizes(partitions: Sequence[Sizes], weights: Sequence[Sequence[float]]) -> bool:
    """Whether parts of one size have one weight, and not all sizes the weights of a mean over samples."""
    of_size: dict[int, float] = {}
    for sizes, found in zip(partitions, weights, strict=True):
        for size, weight in zip(sizes, found, strict=True):
            if abs(of_size.setdefault(size, weight) - weight) > EXPLAINS * max(abs(weight), EXPLAINS):
                return False
    samples = sum(partitions[0])
    return any(abs(weight - size / samples) > EXPLAINS for size, weight in of_size.items())


def _depend_on_losses(measured: Measurement, partitions: Sequence[Sizes], weights: Sequence[Sequence[float]]) -> bool:
    """Whether other parameters give other weights: those of classes or tokens stay."""
    with reversed_values(measured.workload.parameters()):
        changed = measured.anew()
        others = [_find_weights(changed, sizes) for sizes in partitions]
    return any(
        other and max(abs(one - two) for one, two in zip(found, other, strict=True)) > 2 * EXPLAINS
        for found, other in zip(weights, others, strict=True)
    )


def _find_weights(measured: Measurement, sizes: Sizes) -> list[float] | None:
    """Weights whose sum of parts is nearest to the whole.

    ``None`` where even that is not near it; an empty list where other weights are as near, or some always are.
    """
    parts, whole = [measured.alone(start, stop) for start, stop in ranges_of(sizes)], measured.whole_values()
    columns = {index: part for index, part in enumerate(parts) if part is not None and bool(part.isfinite().all())}
    if not columns:
        return None
    matrix = torch.stack([*columns.values()], 1)
    if int((matrix.abs().amax(1) > 0).sum()) <= len(columns):
        return []  # so few equations have a solution whatever the loss is
    found = torch.linalg.lstsq(matrix, whole.unsqueeze(1), driver="gelsd")
    if not is_near((matrix @ found.solution).squeeze(1), whole):
        return None
    if int(found.rank) < len(columns):
        return []
    solved = dict(zip(columns, found.solution.squeeze(1).tolist(), strict=True))
    return [solved.get(index, 0.0) for index in range(len(parts))]


def is_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = EXPLAINS) -> bool:
    """Whether the difference is that small a part of what is expected."""
    return bool((found - expected).norm() <= tolerance * expected.norm())
