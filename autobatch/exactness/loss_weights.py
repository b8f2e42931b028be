"""Finds the count that a loss is divided by, such as tokens: weighed by it, gradients of the parts give the whole's.

Counts are those that the batch shows: samples, tokens, valid labels, masks, boxes of each image. If no weights explain
the whole, ``find_coupling`` shows whether samples depend on each other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from autobatch.batch.samples import Layout
from autobatch.batch.tree import fields_of, map_tensors
from autobatch.errors import DoesNotFit
from autobatch.exactness.gradients import TOLERANCE, is_near, relate
from autobatch.exactness.measurement import Measurement, Parts
from autobatch.memory.oom import is_oom

NO_MEAN = (
    "the loss is not a mean over samples: what each counts for depends on the losses themselves (a maximum, logsumexp, "
    "a root or another function of a mean) or on how many samples its micro-batch has (a power of their number, a "
    "branch on it), which no weighing makes exact: return the mean of each sample's own loss, or choose the target so "
    "that a micro-batch is the unit you want"
)

EXPLAINS = 1e-3  # a cause explains a gradient if its prediction is this near
_BETTER = 10.0  # advice must make the error smaller by this at least. A count that equals the passed one never does
_NO_ERROR = 1e-6  # candidates that are nearer than this are equally good, and the commonest of them is named
# Values that mean "no label" or "padding": torch's ignore_index, and the usual padding tokens.
_FILLERS = (-100, 0, -1, 1)
_SMALL = 1e-4  # the part of a change that is a small one: in float64 it is far above rounding


@dataclass(frozen=True)
class Unit:
    """Something that a batch can be weighed by.

    Attributes:
        template: Python code that counts in one tensor, with ``{}`` for it.
        path: The tensor in ``batch``, or in each ``item`` of a list of samples.
        samples: Path of that list; empty: there is none.
    """

    template: str
    path: str
    samples: str = ""

    @property
    def code(self) -> str:
        """Python code that counts in ``batch``, as a user can pass it to ``weigh=``."""
        code = self.template.format(self.path)
        return f"sum({code} for item in {self.samples})" if self.samples else code

    def count(self, batch: Any) -> float:
        root, nodes = ("item", _find("batch", batch, self.samples)) if self.samples else ("batch", [batch])
        # By name: a path need not be code, as with keys that are enums.
        tensors = [_tensors(root, node)[self.path] for node in nodes]
        return sum(float(eval(self.template.format("tensor"), {"tensor": one})) for one in tensors)  # noqa: S307 - the template is ours


class _Source(NamedTuple):
    """A tensor of a batch, or that of each ``item`` of a list of samples."""

    path: str
    samples: str  # path of the list
    values: torch.Tensor
    ndim: int


def units_of(layout: Layout) -> Iterator[Unit]:
    """Yield everything in this batch that a mean may be over, the most common first."""

    def units(template: str, source: _Source) -> Iterator[Unit]:
        yield Unit(template, source.path, source.samples)
        if source.ndim >= 2 and not source.samples:
            # A language model's labels are its inputs, shifted by one: the first of each row is no label.
            yield Unit(template.replace("{}", "{}[:, 1:]"), source.path)

    found = [*_sources(layout)]
    masks = [s.values.dtype == torch.bool or bool(((s.values == 0) | (s.values == 1)).all()) for s in found]
    yield from (Unit("len({})", source.path, source.samples) for source in found if source.samples)
    for filler in _FILLERS:
        for source, is_mask in zip(found, masks, strict=True):
            if not is_mask and not source.values.is_floating_point():
                yield from units(f"({{}} != {filler}).sum()", source)
    for source, is_mask in zip(found, masks, strict=True):
        if is_mask or (source.ndim == 1 and bool((source.values >= 0).all())):
            yield from units("{}.sum()", source)


def _sources(layout: Layout) -> Iterator[_Source]:
    lists = [path for path, reading in layout.lists.items() if reading == "samples"]
    for path, tensor in _tensors("batch", layout.batch).items():
        if not any(path.startswith(f"{of_samples}[") for of_samples in lists):
            yield _Source(path, "", tensor, tensor.ndim)
    for path in lists:
        items = [_tensors("item", item) for item in _find("batch", layout.batch, path)]
        for name in items[0] if items else ():
            if all(name in item for item in items):
                values = torch.cat([item[name].reshape(-1) for item in items])
                yield _Source(name, path, values, items[0][name].ndim)


def _tensors(path: str, node: Any) -> dict[str, torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return {path: node} if node.ndim and not node.is_complex() else {}
    parts = [_tensors(path + suffix, child) for suffix, child in fields_of(node) or ()]
    return {reached: tensor for part in parts for reached, tensor in part.items()}


def _find(path: str, node: Any, wanted: str) -> Any:
    """Return the part of a container that has this path; ``None`` if there is none."""
    if path == wanted:
        return node
    below = [(path + suffix, child) for suffix, child in fields_of(node) or () if wanted.startswith(path + suffix)]
    return next((part for name, child in below if (part := _find(name, child, wanted)) is not None), None)


def run_every(measured: Measurement, partitions: Sequence[Parts]) -> Measurement:
    """Return a measurement that also runs parts that count for nothing, if the step can run them."""
    rows = [rows for parts in partitions for rows in parts]
    if not measured.states_counts and all(measured.alone(part) is not None for part in rows):
        return measured
    every, handled = measured.uncounted(), sys.exc_info()[1]
    try:
        for part in rows:
            every.alone(part)
    except Exception as error:
        if isinstance(error, DoesNotFit) or is_oom(error, handled=handled):
            raise
        return measured
    return every


def explain_weighing(measured: Measurement, every: Measurement, partitions: Sequence[Parts]) -> str | None:
    """Say in one sentence that the loss is a mean over something else than is counted, and what to pass or return.

    ``every`` also runs parts that count for nothing. ``None`` if no weights give the whole gradient; "" if some do, and
    they depend on something unknown.
    """
    whole, weigh, states = measured.whole_values(), measured.workload.weigh, measured.states_counts
    passed = max(_relative(measured.values(parts), whole) for parts in partitions)
    most, measured = min(EXPLAINS, passed / _BETTER), every
    # 1. Samples.
    if (weigh is not None or states) and error_of(measured, partitions) <= most:
        mend = "return the loss itself, or state the number of samples as its count" if states else "leave weigh= out"
        return f"the loss is a mean over samples, and is counted otherwise: {mend}"
    # 2. A count that the batch shows.
    counted = "what weigh() counts" if weigh is not None else "samples"
    code, error = _find_best_unit(measured, partitions)
    if error <= most:
        pass_ = f"pass weigh=lambda batch: {code}"
        if states:
            counted, pass_ = "what it states as its count", f"state {code} as its count"
        left = f"below {_NO_ERROR:.0e}" if error < _NO_ERROR else f"of {error:.1e}"
        return (
            f"the loss is a mean over {code}, not over {counted}: {pass_} (that leaves a relative error "
            f"{left} instead of {passed:.1e})"
        )
    # 3. Any weights.
    return _explain_weights(measured, partitions, counted)


def _explain_weights(measured: Measurement, partitions: Sequence[Parts], counted: str) -> str | None:
    weighed = [(parts, _find_weights(measured, parts)) for parts in partitions]
    # Of samples that are alike, each in a part of its own, no weights are unique: the other partitions tell.
    partitions = [parts for parts, found in weighed if found != []]
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
    return NO_MEAN if _are_of_sizes(partitions, weights) else ""


def _find_best_unit(measured: Measurement, partitions: Sequence[Parts]) -> tuple[str, float]:
    """Return the code with the least error, and that error; the first of those with almost none."""
    best = "", math.inf
    for unit in units_of(measured.layout):
        counts = {str(rows): unit.count(measured.part(rows).batch) for parts in partitions for rows in parts}
        error = error_of(measured, partitions, counts)
        if error < min(best[1], max(best[1] / _BETTER, _NO_ERROR)):
            best = unit.code, error
    return best


def error_of(
    measured: Measurement, partitions: Iterable[Parts], counts: Mapping[str, float] | None = None, *, sums: bool = False
) -> float:
    """Return how far the parts' gradients, added up or weighed by counts or samples, are from the whole."""
    whole, worst = measured.whole_values(), 0.0
    for parts in partitions:
        weights = [1.0 if sums else float(len(rows)) if counts is None else counts[str(rows)] for rows in parts]
        divisor = 1.0 if sums else sum(weights)
        alone = zip((measured.alone(rows) for rows in parts), weights, strict=True)
        # 0 x nan is nan: a part without anything to count has no gradient
        terms = [part * (weight / divisor) for part, weight in alone if part is not None and weight > 0]
        worst = max(worst, _relative(torch.stack(terms).sum(0), whole) if terms else math.inf)
    return worst


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return relate(float((found - expected).norm()), float(expected.norm()))


def _are_of_samples(partitions: Sequence[Parts], weights: Sequence[Sequence[float]]) -> bool:
    """Return whether weights are positive, sum to 1, and are the same for a range of samples in every partition."""
    reached = {-1: 0.0}
    for parts, found in zip(partitions, weights, strict=True):
        if abs(sum(found) - 1) > EXPLAINS or min(found) < -EXPLAINS:
            return False
        for rows, so_far in zip(parts, accumulate(found), strict=True):
            if abs(reached.setdefault(rows[-1], so_far) - so_far) > 2 * EXPLAINS:
                return False
    ordered = [reached[stop] for stop in sorted(reached)]
    return all(later >= earlier - EXPLAINS for earlier, later in pairwise(ordered))


def _are_of_sizes(partitions: Sequence[Parts], weights: Sequence[Sequence[float]]) -> bool:
    """Return whether parts of one size have one weight, and not all sizes the weights of a mean over samples."""
    of_size: dict[int, float] = {}
    for parts, found in zip(partitions, weights, strict=True):
        for size, weight in zip(map(len, parts), found, strict=True):
            if abs(of_size.setdefault(size, weight) - weight) > EXPLAINS * max(abs(weight), EXPLAINS):
                return False
    samples = sum(map(len, partitions[0]))
    return any(abs(weight - size / samples) > EXPLAINS for size, weight in of_size.items())


def _depend_on_losses(measured: Measurement, partitions: Sequence[Parts], weights: Sequence[Sequence[float]]) -> bool:
    """Return whether other parameters give other weights: those of classes or tokens stay."""

    def reverse() -> None:  # values of the same scale, without a copy
        for parameter in measured.workload.parameters():
            parameter.data.copy_(parameter.data.reshape(-1).flip(0).view(parameter.shape))

    reverse()
    try:
        changed = measured.again()
        others = [_find_weights(changed, parts) or found for parts, found in zip(partitions, weights, strict=True)]
    finally:
        reverse()
    pairs = [pair for found, other in zip(weights, others, strict=True) for pair in zip(found, other, strict=True)]
    return any(abs(one - other) > 2 * EXPLAINS for one, other in pairs)


def _find_weights(measured: Measurement, parts: Parts) -> list[float] | None:
    """Find the weights with which the sum of the parts is nearest to the whole.

    ``None`` if even that is not near it; an empty list if other weights are as near, or some always are.
    """
    alone, whole = [measured.alone(rows) for rows in parts], measured.whole_values()
    columns = {index: part for index, part in enumerate(alone) if part is not None and bool(part.isfinite().all())}
    if not columns:
        return None
    matrix = torch.stack(list(columns.values()), 1)
    if int((matrix.abs().amax(1) > 0).sum()) <= len(columns):
        return []  # so few equations have a solution whatever the loss is
    found = torch.linalg.lstsq(matrix, whole.unsqueeze(1), driver="gelsd")
    if not is_near((matrix @ found.solution).squeeze(1), whole, EXPLAINS):
        return None
    if int(found.rank) < len(columns):
        return []
    solved = dict(zip(columns, found.solution.squeeze(1).tolist(), strict=True))
    return [solved.get(index, 0.0) for index in range(len(parts))]


def find_coupling(measured: Measurement) -> bool | None:
    """Return whether samples depend on each other; ``None`` if no values can be changed, or the changes do nothing.

    Two groups of samples are changed, one at a time and both at once. If samples do not depend on each other, the
    changes of the gradient add up. A small change leaves choices of the step as they are (the hardest samples, an
    expert, the labels that count); a large one shows them too.
    """
    if "samples" in measured.layout.lists.values():
        return None  # tensors of a sample in a list have rows of their own
    rows = torch.arange(measured.layout.count)
    # As in the sequence of Thue and Morse: it separates neighbours, and rows that are half a batch apart.
    by_bits = torch.tensor([row.bit_count() % 2 == 0 for row in rows.tolist()])
    tried = [(by_bits, _SMALL), (by_bits, 1.0), (rows % 3 == 0, 1.0), (2 * rows < len(rows), 1.0)]
    found = set[bool | None]()
    for first, size in tried:
        interacts = _do_interact(measured, first, size)
        if interacts:
            return True
        found.add(interacts)
    return False if False in found else None


def _do_interact(measured: Measurement, first: torch.Tensor, size: float) -> bool | None:
    """Return whether changes of the first group and of the others do not add up; ``None`` if one does nothing."""
    whole = measured.whole_values()
    changes: list[torch.Tensor] = []
    for rows in (first, ~first, torch.ones_like(first)):
        values = _measure_changed(measured, rows, size)
        if values is None or values.shape != whole.shape or not bool(values.isfinite().all()):
            return None
        changes.append(values - whole)
    one, other, both = changes
    least = min(float(one.norm()), float(other.norm()))
    if least <= TOLERANCE * size * float(whole.norm()):
        return None
    return float((both - one - other).norm()) > (1e-2 * size if size < 1 else TOLERANCE) * least


def _measure_changed(measured: Measurement, rows: torch.Tensor, size: float) -> torch.Tensor | None:
    """Return values of the whole gradient with these rows changed; ``None`` if the step refuses or counts them."""
    handled, layout = sys.exc_info()[1], measured.layout
    batch = map_tensors(layout.batch, lambda tensor: _change(tensor, rows, size))
    if any(unit.count(batch) != unit.count(layout.batch) for unit in units_of(layout)):
        return None
    try:
        return measured.sample(measured.on(Layout(batch, layout.count, layout.lists)).whole())
    except Exception as error:
        if isinstance(error, DoesNotFit) or is_oom(error, handled=handled):
            raise
        return None  # the step refuses such values


def _change(tensor: torch.Tensor, rows: torch.Tensor, size: float) -> torch.Tensor:
    """Move these rows towards their values in reverse order, except in a possible mask, label or weight."""
    values = tensor.detach()
    if values.ndim == 0 or len(values) != len(rows) or values.is_complex() or values.dtype == torch.bool:
        return tensor
    if bool(((values == 0) | (values == 1)).all()) or (values.ndim == 1 and not bool((values < 0).any())):
        return tensor
    flat = values.reshape(len(values), -1)
    if values.is_floating_point():
        if size < 1 and values.dtype != torch.float64:
            return tensor
        changed = flat + size * (0.75 * flat.flip(1) - flat)
    elif values.ndim == 1 or size < 1:
        return tensor
    else:
        changed = torch.stack([_reverse(row) for row in flat])
    mixed = torch.where(rows.to(values.device)[:, None], changed, flat).view(values.shape)
    return mixed.requires_grad_(tensor.requires_grad)


def _reverse(row: torch.Tensor) -> torch.Tensor:
    """Reverse a row of tokens. Fillers stay, and so does the first value, which may not be a label."""
    is_own = torch.stack([row != filler for filler in _FILLERS]).all(0)
    is_own[:1] = False
    changed = row.clone()
    changed[is_own] = row[is_own].flip(0)
    return changed
