"""Makes one ``Trainer.log`` call of those of a step's micro-batches, with the numbers that the whole batch would have.

Covers numbers that a ``compute_loss`` or ``training_step`` of the user's own logs. What each is (a mean over labels or
samples, a sum, a largest or smallest value) is found on a few samples; trials log nothing. Does not cover TRL's metrics
(``metrics``), nor what goes to a tracker without the Trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from autobatch.integrations.attributes import replaced
from autobatch.integrations.transformers.cuts import IGNORED

__all__ = ["TOLERANCES", "TrainerLogs", "is_near", "is_number"]

_log = logging.getLogger("autobatch")

Way = Literal["mean over shifted labels", "mean over labels", "mean over samples", "sum", "max", "min"]
_WAYS: tuple[Way, ...] = ("mean over shifted labels", "mean over labels", "mean over samples", "sum", "max", "min")
"""A number that is 0 in all parts is any of them; a sum is rarely 0."""
_SHIFTED, _LABELS, _SAMPLES = _WAYS[:3]
TOLERANCES = 1e-6, 1e-4
"""Relative: the first way within one, then within the other. Float32 sums of a few samples differ by less than the
second, and means over labels from means over shifted labels by more than the first."""

Key = tuple[tuple[str, ...], int]
"""The names of one call, and the how manieth with these names in a micro-batch."""


@dataclass(frozen=True)
class LogCall:
    """One call of ``log``.

    Attributes:
        values: By name.
        rest: Further arguments.
        named: Those that were given by name.
    """

    values: Mapping[str, Any]
    rest: tuple[Any, ...]
    named: Mapping[str, Any]


@dataclass(frozen=True)
class LoggedMicroBatch:
    """What one micro-batch has logged.

    Attributes:
        calls: In order.
        labels: What means over labels are over, by the way; empty where there is no label for each token.
    """

    calls: tuple[LogCall, ...]
    labels: Mapping[str, float]


@dataclass
class TrainerLogs:
    """What the micro-batches of one step log, as an object that a Runner keeps.

    Attributes:
        trainer: Whose ``log`` it is.
        micro_batches: Of the step, up to now.
        ways: How numbers are put together, by call and name.
    """

    trainer: Any
    micro_batches: list[LoggedMicroBatch] = field(default_factory=list)
    ways: dict[tuple[Key, str], Way] = field(default_factory=dict)

    def take(self) -> list[LoggedMicroBatch]:
        """References: none of them changes."""
        return [*self.micro_batches]

    def put(self, taken: list[LoggedMicroBatch]) -> None:
        """Put them back."""
        self.micro_batches[:] = taken

    @contextmanager
    def catch(self, inputs: Any) -> Iterator[None]:
        """While this lasts, ``log`` writes nothing; at the end what it was given is a micro-batch of the step."""
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        calls: list[LogCall] = []

        def log(logs: Mapping[str, Any], *rest: Any, **named: Any) -> None:
            calls.append(LogCall({name: _copy(value) for name, value in logs.items()}, rest, named))

        with replaced(self.trainer, "log", log):
            yield
        self.micro_batches.append(LoggedMicroBatch(tuple(calls), _count_labels(labels) if calls else {}))

    def write(self, samples: Sequence[int]) -> None:
        """Log what the step's micro-batches have, once.

        Args:
            samples: Of each of them.
        """
        found = self._group(samples)
        self.micro_batches.clear()
        for key, calls in found.items():
            last = calls[-1][1]
            values = {name: self._merge(key, name, calls) for name in last.values}
            self.trainer.log(values, *last.rest, **last.named)

    def learn(self, run: Callable[[Sequence[int]], None], parts: Sequence[int]) -> None:
        """Find how numbers are put together, where the same samples log the same numbers again.

        Args:
            run: Runs as many samples as these, one micro-batch after another.
            parts: Sizes of micro-batches that are unlike.
        """
        whole = self._logged_by(run, [sum(parts)])
        if not whole:
            return
        again, divided = self._logged_by(run, [sum(parts)]), self._logged_by(run, parts)
        for key, calls in divided.items():
            for name in calls[-1][1].values:
                if key not in whole or key not in again:
                    continue
                value, repeated = (logged[key][0][1].values.get(name) for logged in (whole, again))
                if is_number(value) and is_near(value, repeated):
                    self._learn_way((key, name), value, calls)

    def _learn_way(self, name: tuple[Key, str], value: Any, calls: Sequence[_Weighed]) -> None:
        without_labels = {_SHIFTED, _LABELS} - set(calls[-1][0])
        possible = [way for way in _WAYS if way not in without_labels]
        combined = {way: _combine(way, *_values_of(way, name[1], calls)) for way in possible}
        found = [way for near in TOLERANCES for way in possible if is_near(combined[way], value, near)]
        self.ways[name] = found[0] if found else _SAMPLES
        if not found:
            _log.warning(
                "%s logs %r, which is not a mean, sum, largest or smallest value of its samples, so the mean over "
                "micro-batches is logged",
                type(self.trainer).__name__,
                name[1],
            )

    def _logged_by(self, run: Callable[[Sequence[int]], None], sizes: Sequence[int]) -> dict[Key, list[_Weighed]]:
        self.micro_batches.clear()
        run(sizes)
        found = self._group(sizes)
        self.micro_batches.clear()
        return found

    def _group(self, samples: Sequence[int]) -> dict[Key, list[_Weighed]]:
        """The calls with the same names, each with what its micro-batch counts for."""
        found: dict[Key, list[_Weighed]] = {}
        for micro_batch, count in zip(self.micro_batches, samples, strict=False):
            weights, seen = {**micro_batch.labels, _SAMPLES: float(count)}, dict[tuple[str, ...], int]()
            for call in micro_batch.calls:
                names = tuple(call.values)
                seen[names] = order = seen.get(names, 0) + 1
                found.setdefault((names, order), []).append((weights, call))
        return found

    def _merge(self, key: Key, name: str, calls: Sequence[_Weighed]) -> Any:
        last = calls[-1][1].values[name]
        if len(calls) == 1 or not all(is_number(call.values[name]) for _, call in calls):
            return last
        way = self.ways.get((key, name), _SAMPLES)
        return _combine(way, *_values_of(way, name, calls))


_Weighed = tuple[Mapping[str, float], LogCall]
"""A call, and what its micro-batch counts for in each kind of mean."""


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _count_labels(labels: Any) -> dict[str, float]:
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return {}
    counted = labels != IGNORED
    return {_SHIFTED: float(counted[:, 1:].sum()), _LABELS: float(counted.sum())}


def _values_of(way: Way, name: str, calls: Sequence[_Weighed]) -> tuple[list[Any], list[float]]:
    """The numbers, and what each counts for."""
    return [call.values[name] for _, call in calls], [weights.get(way, 0.0) for weights, _ in calls]


def _combine(way: Way, values: Sequence[Any], weights: Sequence[float]) -> Any:
    if way == "sum":
        return sum(values)
    if way in ("max", "min"):
        return max(values) if way == "max" else min(values)
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))


def is_number(value: Any) -> bool:
    """Whether it is one number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_near(one: Any, other: Any, tolerance: float = TOLERANCES[-1]) -> bool:
    """Whether both are numbers, and the same up to this part of the larger one."""
    if not is_number(one) or not is_number(other):
        return False
    a, b = float(one), float(other)
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b)) + 1e-9
