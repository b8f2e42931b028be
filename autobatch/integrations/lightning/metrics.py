"""Gives metrics of torchmetrics one value for a whole step, where micro-batches give them one each.

Covers a metric that is logged with ``on_step=True``: its value of a step is that of all the step's samples. Its
value over an epoch needs nothing, since micro-batches add up states as batches do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autobatch.errors import InvalidArgument
from autobatch.integrations.lightning.logs import LogCall

__all__ = ["StepMetrics", "UnknownMetric", "metrics_in", "states_of"]

_ADDED_UP = frozenset(("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat", "NoneType"))


class UnknownMetric(Exception):
    """A metric's value is logged for the first time: the step has to begin again, with its state set aside."""


@dataclass
class StepMetrics:
    """Metrics of which the value over a step is logged.

    Attributes:
        known: They, by the name under which they were logged first.
    """

    known: dict[str, Any] = field(default_factory=dict)
    _earlier: list[tuple[Any, dict[str, Any], int]] = field(default_factory=list)

    def learn(self, calls: Iterable[LogCall]) -> bool:
        """Note those in these calls; whether any was unknown.

        Raises:
            InvalidArgument: One has no value over several micro-batches.
        """
        found = {call.name: call.value for call in calls if _has_step_value(call)}
        new = {name: one for name, one in found.items() if not any(one is other for other in self.known.values())}
        for name, metric in new.items():
            _refuse_inexact(name, metric)
        self.known.update(new)
        return bool(new)

    def begin(self) -> None:
        """Set states aside, so that those of the step are its own."""
        self._earlier = []  # what is below may run out of memory
        self._earlier = [(one, one._copy_state_dict(), one._update_count) for one in self.known.values()]  # noqa: SLF001 - as its own forward() does
        for metric in self.known.values():
            metric.reset()

    def end(self) -> None:
        """Compute the step's values, and add its states to those before."""
        for metric, states, count in self._earlier:
            if not metric._update_count:  # noqa: SLF001 - the step has not used it
                _put(metric, states, count)
                continue
            metric._to_sync = False  # noqa: SLF001 - a step's value is this rank's own, as in forward()
            value = metric.compute()
            with torch.no_grad():
                metric._reduce_states(states)  # noqa: SLF001 - the same
            metric._to_sync, metric._computed = metric.sync_on_compute, None  # noqa: SLF001 - the same
            metric._update_count, metric._forward_cache = metric._update_count + count, value  # noqa: SLF001 - the same

    def undo(self) -> None:
        """Put the states back that were there before ``begin``."""
        for metric, states, count in self._earlier:
            _put(metric, states, count)


def _put(metric: Any, states: dict[str, Any], count: int) -> None:
    for name, value in states.items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = count, None  # noqa: SLF001 - the same


def metrics_in(module: torch.nn.Module) -> dict[str, Any]:
    """The metrics of a module, by their names; none where torchmetrics was never imported."""
    base = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    return {} if base is None else {name: one for name, one in module.named_modules() if isinstance(one, base)}


def states_of(metric: Any) -> dict[str, torch.Tensor]:
    """Its states, as one tensor each; those that are neither a tensor nor a list of tensors are left out."""
    found: dict[str, torch.Tensor] = {}
    for name, value in metric._copy_state_dict().items():  # noqa: SLF001 - the same
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif value and all(isinstance(one, torch.Tensor) for one in value):
            found[name] = torch.cat([one.reshape(-1) for one in value])
    return found


def _has_step_value(call: LogCall) -> bool:
    is_metric = hasattr(call.value, "_forward_cache") and hasattr(call.value, "_reduce_states")
    return is_metric and call.options.get("on_step") is not False and call.value._forward_cache is not None  # noqa: SLF001 - what Lightning logs of it


def _refuse_inexact(name: str, metric: Any) -> None:
    reductions: Sequence[Any] = [*metric._reductions.values()]  # noqa: SLF001 - the same
    kinds = {getattr(one, "__name__", type(one).__name__) for one in reductions}
    is_simple = metric.full_state_update is False and not metric.dist_sync_on_step and len([*metric.modules()]) == 1
    if not (is_simple and kinds <= _ADDED_UP):
        raise InvalidArgument(
            f"self.log({name!r}) logs a {type(metric).__name__} at each step, which has no value over several "
            f"micro-batches: pass on_step=False, on_epoch=True"
        )
