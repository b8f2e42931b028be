"""Judges what was measured: exact or not, whether BatchNorm is why, whether only rounding differs, which modules do.

Does not cover measuring (``measurement``), on what scale a parameter is judged (``rounding``), nor other causes
(``diagnosis``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from autobatch.errors import AutobatchError
from autobatch.exactness.diagnosis import fixed_statistics
from autobatch.exactness.divisions import Sizes, partitions_of
from autobatch.exactness.gradients import total
from autobatch.exactness.measurement import Measurement
from autobatch.exactness.rounding import TOLERANCE
from autobatch.memory.oom import is_oom
from autobatch.records import ModuleError, Verdict
from autobatch.step.batch_norm import blame_batch_norms

__all__ = ["Doubt", "absolve", "blame_batch_norm", "conclude", "divide", "find_modules", "find_obstacle"]


@dataclass(frozen=True)
class Doubt:
    """A verdict of float32 that a split is not exact, and what is to be looked at again."""

    verdict: Verdict
    sizes: Sequence[float]
    apart: dict[Sizes, list[float]]


def find_obstacle(measured: Measurement) -> str | None:
    """Why there is nothing to compare with."""
    samples = measured.layout.count
    if all(tensor is None for tensor in measured.whole().tensors) or measured.size() == 0:
        return f"{samples} samples of the batch count for nothing: no gradient to compare"
    if not math.isfinite(measured.size()):
        return f"the gradient of {samples} samples of the batch at once is not finite"
    return None


def divide(measured: Measurement) -> list[Sizes]:
    """Divisions that run: BatchNorm refuses a single sample, and so does what squeezes its batch."""
    partitions = partitions_of(measured.layout.count, 1)
    handled = sys.exc_info()[1]
    try:
        measured.apart(partitions[0])
    except Exception as error:
        if isinstance(error, AutobatchError) or is_oom(error, handled=handled):
            raise
        return partitions_of(measured.layout.count, 2)
    return partitions


def blame_batch_norm(measured: Measurement, sizes: Sizes) -> Verdict | None:
    """An inexact verdict, where BatchNorm in train mode alone explains this division; ``None`` where not."""
    error = measured.error(sizes)
    if error <= TOLERANCE:
        return None
    with fixed_statistics(measured) as (names, fixed):
        if not names or fixed.error(sizes) > TOLERANCE:
            return None
    modules = find_modules(measured, (sizes,))
    return Verdict(
        exact=False,
        relative_error=modules[0].relative_error if modules else error,
        causes=(blame_batch_norms(names),),
        samples=measured.layout.count,
        partitions=(sizes,),
        modules=modules,
    )


def conclude(measured: Measurement, partitions: Sequence[Sizes]) -> Verdict:
    """The verdict on these divisions, without causes."""
    error, samples = _find_error(measured, partitions), measured.layout.count
    return Verdict(exact=error <= TOLERANCE, relative_error=error, samples=samples, partitions=tuple(partitions))


def _find_error(measured: Measurement, partitions: Sequence[Sizes]) -> float:
    """The worst division's, where draws of several rows a sample are read in the way in which that is smaller."""
    error = max(measured.errors(partitions))
    if error > TOLERANCE and measured.draws.flattened:
        measured.draws.samples_last = True
        measured.forget_parts()
        if (turned := max(measured.errors(partitions))) <= TOLERANCE:
            return turned
        measured.draws.samples_last = False
        measured.forget_parts()
    return error


def absolve(doubt: Doubt, measured: Measurement) -> Verdict | None:
    """Exact, where nothing is left of the difference.

    Relative to what was there in float32: where a whole gradient is next to nothing, so is its rounding.
    """
    verdict, errors = doubt.verdict, []
    for sizes in sorted(verdict.partitions, key=lambda sizes: total(doubt.apart[sizes]), reverse=True):
        pairs = zip(doubt.sizes, doubt.apart[sizes], strict=True)
        measured.judge_against([max((size for size in pair if math.isfinite(size)), default=0.0) for pair in pairs])
        errors.append(_find_error(measured, [sizes]))
        if errors[-1] > TOLERANCE:
            measured.judge_against(())
            return None
    return verdict.model_copy(update={"exact": True, "relative_error": max(errors)})


def find_modules(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[ModuleError, ...]:
    """Modules with parameters that differ, and by how much in the worst division, the worst first."""
    measured.errors(partitions)
    names = {id(parameter): name for name, parameter in measured.workload.model.named_parameters()}
    parameters, worst = measured.workload.parameters(), dict[str, float]()
    for sizes in partitions:
        for index, error in measured.scales().report(measured.apart(sizes)).items():
            module = _module_of(names.get(id(parameters[index])), measured.workload.model)
            worst[module] = max(worst.get(module, 0.0), error)
    ordered = sorted(worst.items(), key=lambda found: -found[1])
    return tuple(ModuleError(module=module, relative_error=error) for module, error in ordered)


def _module_of(name: str | None, model: nn.Module) -> str:
    if name is None:
        return "a parameter of the optimizer alone"
    return name.rpartition(".")[0] or type(model).__name__
