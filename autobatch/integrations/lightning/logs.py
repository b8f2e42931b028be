"""Logs once a step what each of its micro-batches logs.

Calls of ``self.log`` are combined as ``reduce_fx`` says, and means are weighed. A metric of torchmetrics that is logged
with ``on_step=True`` gets one value for the whole step; for an epoch, micro-batches add up its states.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from autobatch._formatting import plural
from autobatch.batch.tree import is_array
from autobatch.errors import InvalidArgument
from autobatch.integrations.attributes import are_equal, is_number, weighted_mean

_log = logging.getLogger("autobatch")
_ADDED_UP = frozenset(("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat", "NoneType"))
_WAYS: Mapping[str, Way] = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}

Key = tuple[str, int]  # a call's name, and which call of that name it is


@dataclass(frozen=True)
class LogCall:
    """One call of ``self.log``."""

    name: str
    value: Any  # a tensor, a number or a metric
    options: Mapping[str, Any]  # all other arguments, by name
    updates: int | None = None  # number of updates of the metric whose ``compute()`` returned the value


def read_call(log: Any, metrics: Iterable[Any], *arguments: Any, **named: Any) -> LogCall:
    """Return the arguments of a call of a module's ``log``; tensors are copied, as the step may write into them."""
    given = inspect.signature(log).bind(*arguments, **named).arguments
    name, value = given.pop("name"), given.pop("value")
    extra = given.pop("kwargs", {})
    updates = next((one._update_count for one in metrics if _has_computed(one, value)), None)  # noqa: SLF001 - nothing public has it
    value = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return LogCall(name, value, {**given, **extra}, updates)


def _has_computed(metric: Any, value: Any) -> bool:
    computed = metric._computed  # noqa: SLF001 - what compute() returned, until the next update
    if isinstance(value, float) and isinstance(computed, torch.Tensor) and computed.numel() == 1:
        return float(computed) == value
    return computed is not None and computed is value


def _with_keys(calls: Iterable[LogCall]) -> Iterator[tuple[Key, LogCall]]:
    seen: Counter[str] = Counter()
    for call in calls:
        seen[call.name] += 1  # a name that is logged twice is two values
        yield (call.name, seen[call.name]), call


class BatchSizes:
    """Tells a ``batch_size=`` of the whole batch, or a constant, from one that counts what is in the micro-batch.

    A number that stays the same while parts of one batch differ in size is the whole batch's. A number that changes
    between parts is the micro-batch's own. The trials and comparisons before the first step show it too.
    """

    def __init__(self) -> None:
        self.is_whole: dict[Key, bool] = {}  # which of the two each call passes, as far as parts have shown it
        self._seen: dict[Key, tuple[set[int], set[int]]] = {}  # the numbers, and the sizes of the parts
        self._guessed: set[Key] = set()

    def begin(self) -> None:
        self._seen = {}

    def note(self, calls: Iterable[LogCall], samples: int) -> None:
        """Note the calls of a part of so many samples."""
        for key, call in _with_keys(calls):
            given = call.options.get("batch_size")
            if given is None or self.is_whole.get(key) is False:
                continue
            numbers, sizes = self._seen.setdefault(key, (set(), set()))
            numbers.add(int(given))
            sizes.add(samples)
            if len(numbers) > 1:
                self.is_whole[key] = False
            elif len(sizes) > 1:
                self.is_whole[key] = True

    def guess(self, key: Key, number: int, size: int, wholes: Container[int | None]) -> bool:
        """Guess whether a call passes the whole batch's number, where all parts have one size and pass one number."""
        is_known = number == size or number in wholes
        if not is_known and key not in self._guessed:
            self._guessed.add(key)
            _log.warning(
                "self.log(%r, batch_size=%d) is neither the %s of a micro-batch nor those of the batch, and is taken "
                "for the micro-batch's own count: leave batch_size= out, or do not pass check=None",
                key[0],
                number,
                plural(size, "sample"),
            )
        return number in wholes


def merge_calls(
    micro_batches: Sequence[tuple[int, float, Sequence[LogCall]]],
    wholes: Container[int | None],
    batch_sizes: BatchSizes,
) -> list[LogCall]:
    """Return the calls that the whole batch would have made, from samples, weight and calls of each micro-batch.

    ``wholes`` has the number of samples of all of them, and the loader's batch size.
    """
    found: dict[Key, list[tuple[int, float, LogCall]]] = {}
    for size, weight, calls in micro_batches:
        for key, call in _with_keys(calls):
            found.setdefault(key, []).append((size, weight, call))
    return [_merge(key, calls, wholes, batch_sizes) for key, calls in found.items()]


def _merge(
    key: Key, parts: Sequence[tuple[int, float, LogCall]], wholes: Container[int | None], batch_sizes: BatchSizes
) -> LogCall:
    calls = [call for _, _, call in parts]
    last = calls[-1]
    reduction = last.options.get("reduce_fx", "mean")
    way = _WAYS.get(str(getattr(reduction, "__name__", reduction)).lower())
    # Lightning refuses what is no number, and an own ``reduce_fx``. A running value has seen all samples at its end.
    if len(calls) == 1 or way is None or not is_number(last.value) or _is_running(calls):
        return last
    weights, options = [weight for _, weight, _ in parts], dict(last.options)
    numbers = [int(number) for call in calls if (number := call.options.get("batch_size")) is not None]
    if len(numbers) == len(calls):
        is_whole = batch_sizes.is_whole.get(key)
        if is_whole is None:  # no two parts differed in size
            is_whole = batch_sizes.guess(key, numbers[0], parts[0][0], wholes)
        if not is_whole:
            weights, options["batch_size"] = [float(number) for number in numbers], sum(numbers)
    return LogCall(last.name, combine(way, [call.value for call in calls], weights), options)


def _is_running(calls: Sequence[LogCall]) -> bool:
    """Whether a metric that was not reset in between has computed each value, of all samples up to it."""
    counts = [call.updates for call in calls if call.updates is not None]
    return len(counts) == len(calls) and all(one < other for one, other in pairwise(counts))


class UnknownMetric(Exception):
    """A step logs a metric's value for the first time: it has to begin again, with the metric's state set aside."""


class StepMetrics:
    """Metrics that have a value for each step. A step calls ``begin``, then ``end`` or ``undo``."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._earlier: list[tuple[Any, dict[str, Any], int]] = []

    def learn(self, calls: Iterable[LogCall]) -> bool:
        """Note the metrics in these calls; return whether one is new."""
        count = len(self._known)
        for call in calls:
            if _has_step_value(call) and not any(call.value is one for one in self._known):
                _refuse_inexact(call.name, call.value)
                self._known.append(call.value)
        return len(self._known) > count

    def begin(self) -> None:
        self._earlier = []  # the copies may run out of memory
        self._earlier = [(one, one._copy_state_dict(), one._update_count) for one in self._known]  # noqa: SLF001 - as its own forward() does
        for metric in self._known:
            metric.reset()

    def end(self) -> None:
        """Compute the step's values, and add its states to the earlier ones."""
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
        """Restore the states from before ``begin``."""
        for metric, states, count in self._earlier:
            _put(metric, states, count)


def _put(metric: Any, states: dict[str, Any], count: int) -> None:
    for name, value in states.items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = count, None  # noqa: SLF001 - the same


def metrics_in(module: torch.nn.Module) -> list[Any]:
    """Return the metrics of a module; none if torchmetrics was never imported."""
    base = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    return [] if base is None else [one for one in module.modules() if isinstance(one, base)]


def _has_step_value(call: LogCall) -> bool:
    is_metric = hasattr(call.value, "_forward_cache") and hasattr(call.value, "_reduce_states")
    return is_metric and call.options.get("on_step") is not False and call.value._forward_cache is not None  # noqa: SLF001 - what Lightning logs of it


def _refuse_inexact(name: str, metric: Any) -> None:
    kinds = {getattr(one, "__name__", type(one).__name__) for one in metric._reductions.values()}  # noqa: SLF001 - the same
    is_simple = metric.full_state_update is False and not metric.dist_sync_on_step and len([*metric.modules()]) == 1
    if not (is_simple and kinds <= _ADDED_UP):
        raise InvalidArgument(
            f"self.log({name!r}) logs a {type(metric).__name__} at each step, which has no value over several "
            f"micro-batches: pass on_step=False, on_epoch=True"
        )


class ResultsKeeper:
    """Keeps what the Trainer has logged, as an object that a Runner restores."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def take(self) -> dict[str, Any]:
        results, connector = self._trainer._results, self._trainer._logger_connector  # noqa: SLF001 - nothing public has it
        return {
            "metrics": {key: (metric, dict(vars(metric))) for key, metric in results.items()},
            "batch_size": results.batch_size,
            "fx": connector._current_fx,  # noqa: SLF001 - the same
        }

    def put(self, taken: dict[str, Any]) -> None:
        results = self._trainer._results  # noqa: SLF001 - the same
        results.clear()
        for key, (metric, attributes) in taken["metrics"].items():
            vars(metric).clear()
            vars(metric).update(attributes)
            results[key] = metric
        results.batch_size = taken["batch_size"]
        self._trainer._logger_connector._current_fx = taken["fx"]  # noqa: SLF001 - the same


# ------------------------------------------------------------------------------- one value, or one output, for several

Way = Literal["mean", "sum", "max", "min"]


def combine(way: Way, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return one value for those of several micro-batches: tensors of one element, or numbers."""
    if not any(isinstance(value, torch.Tensor) for value in values):
        return float(combine(way, [torch.tensor(value, dtype=torch.float64) for value in values], weights))
    tensors = [torch.as_tensor(value).reshape(()) for value in values]
    # Lightning stores what is narrower in torch's default dtype.
    wide = [one if one.dtype == torch.float64 else one.to(torch.get_default_dtype()) for one in tensors]
    if way == "sum":
        return sum(wide)
    if way == "mean":
        return weighted_mean(wide, weights)
    return torch.stack(wide).max() if way == "max" else torch.stack(wide).min()


def join_outputs(outputs: Sequence[dict[str, Any]], sizes: Sequence[int], weights: Sequence[float]) -> dict[str, Any]:
    """Join the outputs of micro-batches of these sizes, without their losses, for ``on_train_batch_end``."""
    names = [name for name in outputs[0] if all(name in output for output in outputs)] if outputs else []
    return {name: _join([output[name] for output in outputs], sizes, weights) for name in names}


def _join(values: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    if len(values) == 1:
        return first
    if all(_count_rows(value) == size for value, size in zip(values, sizes, strict=True)):
        if isinstance(first, torch.Tensor):
            return torch.cat([*values])
        return (
            sys.modules["numpy"].concatenate(values) if is_array(first) else [row for value in values for row in value]
        )
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _join([value[key] for value in values], sizes, weights) for key in first}
    if all(type(value) is tuple and len(value) == len(first) for value in values):
        return tuple(_join(parts, sizes, weights) for parts in zip(*values, strict=True))
    return _join_values(values, weights)


def _join_values(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Keep what is equal, and average floats; other values become a list."""
    first = values[0]
    if all(are_equal(first, value) for value in values[1:]):
        return first
    if all(isinstance(value, float) for value in values):
        return combine("mean", values, weights)
    if all(isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point() for value in values):
        return combine("mean", values, weights).to(first.dtype)
    return [*values]


def _count_rows(value: Any) -> int | None:
    if isinstance(value, torch.Tensor) or is_array(value):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, list) else None
