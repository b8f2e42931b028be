"""Finds on a few samples how what a module logs is put together from micro-batches.

Covers values that are no mean, such as a number of samples, and warns of those that no rule makes exact, metrics
included. Does not cover gradients, which ``fit`` compares.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autobatch.batch.layout import Layout, describe
from autobatch.integrations.lightning.logs import (
    WAYS,
    Key,
    LogCall,
    Logged,
    Rule,
    combine,
    default_rule,
    group_calls,
    values_of,
)
from autobatch.integrations.lightning.metrics import metrics_in, states_of
from autobatch.integrations.lightning.module_step import ModuleStep
from autobatch.memory.oom import is_oom
from autobatch.state.rewind_point import RewindPoint

__all__ = ["find_rules"]

_log = logging.getLogger("autobatch")
_PARTS = (3, 2)
"""Samples that are compared with their whole: unequal, so that a mean by samples is not one by micro-batches."""
_TOLERANCE = 1e-4
"""Relative; float32 sums of a few samples differ by less, and what is a sum in place of a mean by far more."""

Run = tuple[list[Logged], dict[str, torch.Tensor]]
"""What micro-batches have logged, and what metrics hold after them."""


def find_rules(step: ModuleStep, batch: Any, objects: Sequence[Any]) -> dict[Key, Rule]:
    """The rule of each name that is logged, where it is not the usual one.

    Args:
        step: The module's.
        batch: Of which a few samples are run, three times.
        objects: What a step changes outside the module; put back, as the module is.
    """
    layout, few = describe(batch), sum(_PARTS)
    if layout.count < few:
        return {}
    device = next(step.module.parameters()).device
    before = RewindPoint([*step.module.modules()], device, objects=objects)
    try:
        whole, again, parts = (_run(step, layout, sizes, before, device) for sizes in ((few,), (few,), _PARTS))
    except Exception as error:
        if not is_oom(error):
            raise
        return {}
    finally:
        before.restore()
    _warn_of_metrics(step, whole[1], again[1], parts[1])
    return _compare(step, whole[0], again[0], parts[0])


def _run(step: ModuleStep, layout: Layout, sizes: Sequence[int], before: RewindPoint, device: torch.device) -> Run:
    start = 0
    for size in sizes:
        with before.record(layout.tensors()):  # a metric may add to its tensors in place
            step.run(step.module, layout.take(start, start + size))
        start += size
    logged: list[Logged] = [(output.weight, output.logged) for output in step.outputs]
    metrics = {
        f"{name}.{state}": value for name, one in metrics_in(step.module).items() for state, value in _states(one)
    }
    before.restore()
    torch.rand(len(logged), device=device)  # so that what is random differs from one run to the next
    return logged, metrics


def _states(metric: Any) -> Sequence[tuple[str, torch.Tensor]]:
    return [*states_of(metric).items()]


def _compare(
    step: ModuleStep, whole: Sequence[Logged], again: Sequence[Logged], parts: Sequence[Logged]
) -> dict[Key, Rule]:
    rules: dict[Key, Rule] = {}
    expected, repeated = group_calls(whole), group_calls(again)
    for key, calls in group_calls(parts).items():
        usual = default_rule(calls[-1][1])
        if usual is None or key not in expected or key not in repeated:
            continue
        value, call = expected[key][0][1].value, expected[key][0][1]
        if not _is_near(repeated[key][0][1].value, value):
            continue  # random: no rule can be seen
        sizes = [one.options.get("batch_size") for _, one in calls]
        adds_up = None in sizes or call.options["batch_size"] == sum(map(int, filter(None, sizes)))
        found = [way for way in (usual.way, *WAYS) if _is_near(combine(way, *values_of(calls, adds_up=adds_up)), value)]
        if not found:
            _warn_of_value(step, call)
        rules[key] = Rule(found[0] if found else usual.way, adds_up)
    return rules


def _is_near(one: Any, other: Any) -> bool:
    a, b = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return a.shape == b.shape and torch.allclose(a, b.to(a.device), rtol=_TOLERANCE, atol=1e-7, equal_nan=True)


def _warn_of_value(step: ModuleStep, call: LogCall) -> None:
    _log.warning(
        "autobatch: %s logs %r, which is no mean, sum, largest or smallest value of its samples: what is logged is the "
        "mean over micro-batches; log a metric of torchmetrics to have the whole batch's",
        type(step.module).__name__,
        call.name,
    )


def _warn_of_metrics(
    step: ModuleStep,
    whole: Mapping[str, torch.Tensor],
    again: Mapping[str, torch.Tensor],
    parts: Mapping[str, torch.Tensor],
) -> None:
    """A metric that takes one number of each micro-batch counts these, and not samples."""
    wrong = [
        name
        for name, value in whole.items()
        if name in again and name in parts and _is_near(again[name], value) and not _is_near(parts[name], value)
    ]
    for name in sorted({name.rpartition(".")[0] for name in wrong}):
        kind = type(step.module.get_submodule(name)).__name__
        _log.warning(
            "autobatch: %s.%s (%s) does not add up over micro-batches: give it samples, or their number as a weight",
            type(step.module).__name__,
            name,
            kind,
        )
