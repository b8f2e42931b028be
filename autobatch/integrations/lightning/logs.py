"""Makes one ``self.log`` call of those of a step's micro-batches, as the whole batch would have made it.

Covers tensors and numbers (means by weight, sums, largest and smallest values) and metrics of torchmetrics, whose
states the micro-batches have added up by themselves. Does not cover what ``training_step`` sends to a logger directly.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch

__all__ = [
    "WAYS",
    "Key",
    "LogCall",
    "Logged",
    "ResultsKeeper",
    "Rule",
    "Way",
    "Weighed",
    "combine",
    "default_rule",
    "group_calls",
    "is_running",
    "merge_calls",
    "read_call",
    "values_of",
]

Way = Literal["mean", "sum", "max", "min", "last"]
WAYS: tuple[Way, ...] = ("mean", "sum", "max", "min", "last")
"""The last is that of a running value, which has seen all samples when the last micro-batch logs it."""
_BY_REDUCTION: dict[Any, Way] = {
    torch.mean: "mean", "mean": "mean", "avg": "mean",
    torch.sum: "sum", sum: "sum", "sum": "sum",
    torch.max: "max", max: "max", "max": "max",
    torch.min: "min", min: "min", "min": "min",
}  # fmt: skip

Key = tuple[str, int]
"""A name that is logged, and the how manieth of that name in ``training_step``."""


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log``.

    Attributes:
        name: Under which it is logged.
        value: A tensor of its own, a number, or a metric.
        options: All other arguments, by name.
        updates: Where it is what a metric's ``compute()`` has returned, how many updates that metric has seen.
    """

    name: str
    value: Any
    options: Mapping[str, Any]
    updates: int | None = None


@dataclass(frozen=True)
class Rule:
    """How the values of micro-batches are put together.

    Attributes:
        ways: Ways that gave the whole's value; several, where the compared values do not distinguish them.
        adds_up: Whether ``batch_size=``, where it is given, is the micro-batch's own, and not the whole batch's.
    """

    ways: tuple[Way, ...]
    adds_up: bool = True

    @property
    def way(self) -> Way:
        """The first of the ways."""
        return self.ways[0]

    def narrowed(self, other: Rule | None) -> Rule:
        """Return this rule with the ways that the other one has too; unchanged where they share none."""
        ways = self.ways if other is None else tuple(way for way in self.ways if way in other.ways)
        return replace(self, ways=ways or self.ways)


Logged = tuple[float, Sequence[LogCall]]
"""What a micro-batch counts for, and what it has logged."""
Weighed = Sequence[tuple[float, LogCall]]
"""The calls of one key, each with what its micro-batch counts for."""


def read_call(log: Any, metrics: Iterable[Any], *arguments: Any, **named: Any) -> LogCall:
    """The arguments of a call of a module's ``log``; tensors are copied, as what comes later may write into them.

    Args:
        log: The module's own.
        metrics: Those of the module, one of which may have computed the value.
        arguments: Of the call.
        named: Those that were given by name.
    """
    given = inspect.signature(log).bind(*arguments, **named).arguments
    name, value = given.pop("name"), given.pop("value")
    extra = given.pop("kwargs", {})
    updates = next((one._update_count for one in metrics if _has_computed(one, value)), None)  # noqa: SLF001 - nothing public has it
    value = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return LogCall(name, value, {**given, **extra}, updates)


def _has_computed(metric: Any, value: Any) -> bool:
    computed = metric._computed  # noqa: SLF001 - what compute() returned, until the next update
    if computed is value or not isinstance(value, float):
        return computed is value and value is not None
    return isinstance(computed, torch.Tensor) and computed.numel() == 1 and float(computed) == value


def group_calls(micro_batches: Iterable[Logged]) -> dict[Key, Weighed]:
    """The calls of all micro-batches by what they log."""
    found: dict[Key, list[tuple[float, LogCall]]] = {}
    for weight, calls in micro_batches:
        seen: dict[str, int] = {}
        for call in calls:
            seen[call.name] = index = seen.get(call.name, 0) + 1
            found.setdefault((call.name, index), []).append((weight, call))
    return dict(found)


def merge_calls(micro_batches: Iterable[Logged], rules: Mapping[Key, Rule]) -> list[LogCall]:
    """One call for each name, or several where a micro-batch has logged a name several times."""
    return [_merge(calls, rules.get(key)) for key, calls in group_calls(micro_batches).items()]


def _merge(calls: Weighed, rule: Rule | None) -> LogCall:
    last = calls[-1][1]
    rule = rule or default_rule(last)
    if rule is None or len(calls) == 1:
        return last
    if is_running(calls):
        rule = replace(rule, ways=("last",))
    values, weights = values_of(calls, adds_up=rule.adds_up)
    options = dict(last.options)
    if rule.adds_up and all(call.options.get("batch_size") is not None for _, call in calls):
        options["batch_size"] = sum(int(call.options["batch_size"]) for _, call in calls)
    return LogCall(last.name, combine(rule.way, values, weights), options)


def is_running(calls: Weighed) -> bool:
    """Whether each value is of all samples up to it: a metric that each micro-batch resets sees no more updates."""
    counts = [call.updates for _, call in calls if call.updates is not None]
    return len(counts) == len(calls) and all(one < other for one, other in pairwise(counts))


def values_of(calls: Weighed, *, adds_up: bool) -> tuple[list[Any], list[float]]:
    """The values, and what each counts for: its own ``batch_size=`` where that was given."""
    sizes = [call.options.get("batch_size") for _, call in calls]
    is_given = adds_up and None not in sizes
    weights = [float(size) for size in sizes if size is not None] if is_given else [weight for weight, _ in calls]
    return [call.value for _, call in calls], weights


def default_rule(call: LogCall) -> Rule | None:
    """As its ``reduce_fx`` says; ``None`` for what has no parts, or what Lightning refuses by itself."""
    if isinstance(call.value, bool) or not isinstance(call.value, torch.Tensor | float | int):
        return None
    if isinstance(call.value, torch.Tensor) and call.value.numel() != 1:
        return None
    reduction = call.options.get("reduce_fx", "mean")
    way = _BY_REDUCTION.get(reduction.lower() if isinstance(reduction, str) else reduction)
    return None if way is None else Rule((way,))


def combine(way: Way, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """One value for those of several micro-batches.

    Args:
        way: How.
        values: Tensors of one element, or numbers.
        weights: What each counts for in a mean.
    """
    if not any(isinstance(value, torch.Tensor) for value in values):
        return _combine_numbers(way, values, weights)
    tensors = [value if isinstance(value, torch.Tensor) else torch.as_tensor(value) for value in values]
    # Lightning stores what is narrower in torch's default dtype.
    wide = [one if one.dtype == torch.float64 else one.to(torch.get_default_dtype()) for one in tensors]
    if way == "mean":
        return sum(value * share for value, share in zip(wide, _shares(weights), strict=True))
    if way == "sum":
        return sum(wide)
    if way == "last":
        return wide[-1]
    stacked = torch.stack([value.reshape(()) for value in wide])
    return stacked.max() if way == "max" else stacked.min()


def _shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total if total else 1 / len(weights) for weight in weights]


def _combine_numbers(way: Way, values: Sequence[Any], weights: Sequence[float]) -> float:
    if way == "mean":
        return math.fsum(value * share for value, share in zip(values, _shares(weights), strict=True))
    if way == "sum":
        return float(sum(values))
    if way == "last":
        return float(values[-1])
    return float(max(values) if way == "max" else min(values))


class ResultsKeeper:
    """What the Trainer has logged so far, as an object that a Runner keeps: a step that is undone logs nothing."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def take(self) -> dict[str, Any]:
        """References: Lightning replaces what these hold, and writes into none of it."""
        results, connector = self._trainer._results, self._trainer._logger_connector  # noqa: SLF001 - nothing public has it
        return {
            "metrics": {key: (metric, dict(vars(metric))) for key, metric in results.items()},
            "batch_size": results.batch_size,
            "fx": connector._current_fx,  # noqa: SLF001 - the same
        }

    def put(self, taken: dict[str, Any]) -> None:
        """Put them back; entries that have come since are removed."""
        results = self._trainer._results  # noqa: SLF001 - the same
        results.clear()
        for key, (metric, attributes) in taken["metrics"].items():
            vars(metric).clear()
            vars(metric).update(attributes)
            results[key] = metric
        results.batch_size = taken["batch_size"]
        self._trainer._logger_connector._current_fx = taken["fx"]  # noqa: SLF001 - the same
