"""Makes one ``self.log`` call of those of a step's micro-batches, as the whole batch would have made it.

Covers tensors and numbers (means by weight, sums, largest and smallest values) and metrics of torchmetrics, whose
states the micro-batches have added up by themselves. Does not cover what ``training_step`` sends to a logger directly.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = ["LogCall", "Logged", "ResultsKeeper", "combine", "merge_calls", "read_call"]

Way = Literal["mean", "sum", "max", "min"]
_WAYS: dict[Any, Way] = {
    torch.mean: "mean", "mean": "mean", "avg": "mean",
    torch.sum: "sum", sum: "sum", "sum": "sum",
    torch.max: "max", max: "max", "max": "max",
    torch.min: "min", min: "min", "min": "min",
}  # fmt: skip


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log``.

    Attributes:
        name: Under which it is logged.
        value: A tensor of its own, a number, or a metric.
        options: All other arguments, by name.
    """

    name: str
    value: Any
    options: Mapping[str, Any]


Logged = tuple[float, Sequence[LogCall]]
"""What a micro-batch counts for, and what it has logged."""


def read_call(log: Any, *arguments: Any, **named: Any) -> LogCall:
    """The arguments of a call of a module's ``log``; tensors are copied, as what comes later may write into them."""
    given = inspect.signature(log).bind(*arguments, **named).arguments
    name, value = given.pop("name"), given.pop("value")
    extra = given.pop("kwargs", {})
    value = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return LogCall(name, value, {**given, **extra})


def merge_calls(micro_batches: Iterable[Logged]) -> list[LogCall]:
    """One call for each name, or several where a micro-batch has logged a name several times."""
    found: dict[tuple[str, int], list[tuple[float, LogCall]]] = {}
    for weight, calls in micro_batches:
        seen: dict[str, int] = {}
        for call in calls:
            seen[call.name] = index = seen.get(call.name, 0) + 1
            found.setdefault((call.name, index), []).append((weight, call))
    return [_merge(calls) for calls in found.values()]


def _merge(calls: Sequence[tuple[float, LogCall]]) -> LogCall:
    last = calls[-1][1]
    way = _way_of(last)
    if way is None or len(calls) == 1:
        return last
    sizes = [call.options.get("batch_size") for _, call in calls]
    weights, options = [weight for weight, _ in calls], dict(last.options)
    if None not in sizes:
        weights, options["batch_size"] = [float(size) for size in sizes if size is not None], sum(map(int, sizes))
    return LogCall(last.name, combine(way, [call.value for _, call in calls], weights), options)


def _way_of(call: LogCall) -> Way | None:
    """How its values are put together; ``None`` for what has no parts, or what Lightning refuses by itself."""
    if isinstance(call.value, bool) or not isinstance(call.value, torch.Tensor | float | int):
        return None
    reduction = call.options.get("reduce_fx", "mean")
    return _WAYS.get(reduction.lower() if isinstance(reduction, str) else reduction)


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
        total = sum(weights)
        return sum(value * (weight / total) for value, weight in zip(wide, weights, strict=True))
    if way == "sum":
        return sum(wide)
    stacked = torch.stack([value.reshape(()) for value in wide])
    return stacked.max() if way == "max" else stacked.min()


def _combine_numbers(way: Way, values: Sequence[Any], weights: Sequence[float]) -> float:
    if way == "mean":
        products = [value * weight for value, weight in zip(values, weights, strict=True)]
        return float(sum(products) / sum(weights))
    reduced: float = {"sum": sum, "max": max, "min": min}[way](values)
    return reduced


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
