"""Judges what was measured: exact or not, because of BatchNorm or not, only rounding or not, and in which modules.

Covers the partitions that are tried too. Does not cover measuring (``measurement``), the scale on which a parameter is
judged (``gradients``), nor causes other than BatchNorm (``diagnosis``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from torch import nn

from autobatch.errors import AutobatchError
from autobatch.exactness.diagnosis import fixed_statistics
from autobatch.exactness.gradients import TOLERANCE, total
from autobatch.exactness.measurement import Measurement, Sizes
from autobatch.memory.oom import is_oom
from autobatch.planning.planner import balance
from autobatch.records import ModuleError, Verdict
from autobatch.step.model_info import blame_batch_norms

__all__ = [
    "blame_batch_norm",
    "confirm_exact",
    "find_modules",
    "find_obstacle",
    "find_partitions",
    "judge",
    "partitions_of",
    "reference_norms",
]


def partitions_of(samples: int, smallest: int) -> list[Sizes]:
    """The partitions that are tried: a small part first, a small part last, halves, quarters.

    All are needed: a mean that is stated with a wrong count looks right in two halves, and fails only in uneven parts.
    """
    if samples < 2 * smallest:
        return []
    uneven = (smallest, samples - smallest)
    even = [balance(samples, -(-samples // min(parts, samples // smallest))) for parts in (2, 4)]
    return [*dict.fromkeys([uneven, *even, uneven[::-1]])]


def find_partitions(measured: Measurement) -> list[Sizes]:
    """Partitions that run: BatchNorm refuses a single sample, and so does a model that squeezes its batch."""
    partitions = partitions_of(measured.layout.count, 1)
    handled = sys.exc_info()[1]
    try:
        measured.differences(partitions[0])
    except Exception as error:
        if isinstance(error, AutobatchError) or is_oom(error, handled=handled):
            raise
        return partitions_of(measured.layout.count, 2)
    return partitions


def find_obstacle(measured: Measurement) -> str | None:
    """Why nothing can be compared with the whole gradient."""
    samples, norm = measured.layout.count, total(measured.scales().sizes)
    if norm == 0:
        return f"{samples} samples of the batch count for nothing: no gradient to compare"
    if not math.isfinite(norm):
        return f"the gradient of {samples} samples of the batch at once is not finite"
    return None


def blame_batch_norm(measured: Measurement, sizes: Sizes) -> Verdict | None:
    """An inexact verdict, where BatchNorm in train mode alone explains this partition; ``None`` where not."""
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


def judge(measured: Measurement, partitions: Sequence[Sizes]) -> Verdict:
    """The verdict on these partitions, without causes."""
    error, samples = _find_error(measured, partitions), measured.layout.count
    return Verdict(exact=error <= TOLERANCE, relative_error=error, samples=samples, partitions=tuple(partitions))


def _find_error(measured: Measurement, partitions: Sequence[Sizes]) -> float:
    """The error of the worst partition; if several rows a sample are drawn, with the order of rows that fits better."""
    error = max(measured.errors(partitions))
    if error > TOLERANCE and measured.random.flattened:
        measured.random.samples_last = True
        measured.forget_parts()
        if (turned := max(measured.errors(partitions))) <= TOLERANCE:
            return turned
        measured.random.samples_last = False
        measured.forget_parts()
    return error


def reference_norms(measured: Measurement, partitions: Sequence[Sizes]) -> dict[Sizes, list[float]]:
    """By partition, the worst first: the norm of each parameter's gradient, or its difference where that is larger."""
    apart = {sizes: measured.differences(sizes) for sizes in partitions}
    return {
        sizes: [
            max((size for size in pair if math.isfinite(size)), default=0.0)
            for pair in zip(measured.scales().sizes, apart[sizes], strict=True)
        ]
        for sizes in sorted(apart, key=lambda sizes: total(apart[sizes]), reverse=True)
    }


def confirm_exact(verdict: Verdict, before: Mapping[Sizes, Sequence[float]], measured: Measurement) -> Verdict | None:
    """An exact verdict, where with less rounding no difference is left of those that float32 showed.

    Differences are judged relative to the ``reference_norms`` of float32 too: a gradient of nearly 0 is nearly all
    rounding.
    """
    errors = []
    for sizes, scale in before.items():
        measured.judge_against(scale)
        errors.append(_find_error(measured, [sizes]))
        if errors[-1] > TOLERANCE:
            measured.judge_against(())
            return None
    return verdict.model_copy(update={"exact": True, "relative_error": max(errors)})


def find_modules(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[ModuleError, ...]:
    """Modules with parameters that differ, and by how much in the worst partition, the worst first."""
    measured.errors(partitions)
    model, parameters = measured.workload.model, measured.workload.parameters()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    worst = dict[str, float]()
    for sizes in partitions:
        for index, error in measured.scales().report(measured.differences(sizes)).items():
            module = _module_of(names.get(id(parameters[index])), model)
            worst[module] = max(worst.get(module, 0.0), error)
    ordered = sorted(worst.items(), key=lambda found: -found[1])
    return tuple(ModuleError(module=module, relative_error=error) for module, error in ordered)


def _module_of(name: str | None, model: nn.Module) -> str:
    if name is None:
        return "a parameter of the optimizer alone"
    return name.rpartition(".")[0] or type(model).__name__
