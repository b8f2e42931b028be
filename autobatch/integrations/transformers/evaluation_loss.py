"""Finds how the losses of an evaluation batch's parts make the loss of the whole batch, and puts them together.

Covers means over labels, over shifted labels and over samples, and sums: which it is, is found by comparing a few
samples whole and in two parts. Does not cover losses that are none of these, such as those with class weights: what
comes out for them is near the whole's, and a warning says so. What was found is remembered for each kind of batch: each
of several evaluation datasets may have a loss of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autobatch.integrations.transformers.cuts import IGNORED
from autobatch.integrations.transformers.known_rules import DATASET, entries_of, name_kind
from autobatch.integrations.transformers.trainer_logs import TOLERANCES, Key, Way, is_near, is_number

__all__ = ["EvaluationKind", "EvaluationKinds", "EvaluationLoss", "Part", "find_contrast", "weigh"]

_log = logging.getLogger("autobatch")

Part = tuple[Any, Mapping[str, float]]
"""The loss of some samples, and what they count for in each kind of mean, the likeliest first."""
_SUM = "sum"
_COARSE = 2e-2
"""Of a loss in bfloat16 or float16, whose last bit is 0.4 %."""
_MOST_LEARNT = 4
"""Times that a few samples are compared: each costs four passes of them."""


class EvaluationLoss:
    """How the losses of one kind of batch are put together.

    Attributes:
        ways: Those that agree with all that was compared, or the nearest; ``None`` before anything was.
    """

    def __init__(self, trainer: Any) -> None:
        self.ways: list[str] | None = None
        self._trainer, self._learnt = trainer, 0

    def join(self, parts: Sequence[Part]) -> Any:
        """The loss of the whole batch."""
        if any(loss is None for loss, _ in parts):
            return None
        possible = [*parts[0][1], _SUM]
        known = [way for way in self.ways or () if way in possible]
        return _combine((known or possible)[0], parts)

    def is_open(self, parts: Sequence[Part]) -> bool:
        """Whether ways that agree with all that was compared up to now do not agree here."""
        if self._learnt == _MOST_LEARNT or not all(is_number(loss) for loss, _ in parts):
            return False
        joined = [*self._join_each_way(parts).values()]
        return not all(is_near(one, joined[0], TOLERANCES[0]) for one in joined)

    def learn(self, whole: Any, again: Any, parts: Sequence[Part], size: int) -> None:
        """Keep the ways that make of two parts what the same samples have as a whole, if they have it each time.

        Args:
            whole: The loss of a few samples.
            again: The same, once more.
            parts: Both parts of them.
            size: Samples that fit, for the warning.
        """
        self._learnt += 1
        if not all(is_number(loss) for loss, _ in (*parts, (whole, {}))):
            return
        joined = self._join_each_way(parts)

        def nearest(ways: Collection[str]) -> list[str]:
            return sorted(ways, key=lambda way: abs(joined[way] - float(whole)))[:1]

        if not is_near(whole, again):  # numbers are drawn: they hide which mean it is, not that it is a sum
            self.ways = nearest([way for way in (*[*joined][:1], _SUM) if way in joined])
            return
        for near in (*TOLERANCES, *([_COARSE] if self._is_coarse(whole) else [])):
            if found := [way for way, loss in joined.items() if is_near(loss, whole, near)]:
                self.ways = found
                return
        self.ways = nearest(joined)
        _log.warning(
            "the loss of %s is not a mean or sum over samples or labels, so it is approximate for evaluation batches "
            "that run in parts: with per_device_eval_batch_size=%d they run whole",
            type(self._trainer).__name__,
            size,
        )

    def _join_each_way(self, parts: Sequence[Part]) -> dict[str, float]:
        """The loss of the whole batch, by the ways that agree up to now."""
        ways, losses = [*parts[0][1], _SUM], [(float(loss), weights) for loss, weights in parts]
        return {way: _combine(way, losses) for way in ways if self.ways is None or way in self.ways}

    def _is_coarse(self, loss: Any) -> bool:
        arguments = self._trainer.args
        parameters = [*self._trainer.model.parameters()][:1]
        tensors = [value for value in (loss, *parameters) if isinstance(value, torch.Tensor)]
        is_mixed = arguments.bf16 or arguments.fp16 or arguments.bf16_full_eval or arguments.fp16_full_eval
        return bool(is_mixed) or any(tensor.element_size() < 4 for tensor in tensors)


def weigh(trainer: Any, part: Any, samples: int) -> dict[str, float]:
    """What some samples count for, before the Trainer's code may take entries out of them."""
    labels = part.get("labels") if isinstance(part, Mapping) else None
    found: dict[str, float] = {}
    if isinstance(labels, torch.Tensor) and labels.ndim and not labels.is_floating_point():
        if labels.ndim > 1:
            counted = trainer._get_num_items_in_batch([part], labels.device)  # noqa: SLF001 - nothing public counts as it does
            found |= {} if counted is None else {"mean over what the Trainer counts": float(counted)}
        found["mean over labels"] = float((labels != IGNORED).sum())
        if labels.ndim > 1:
            found["mean over shifted labels"] = float((labels[:, 1:] != IGNORED).sum())
    return {**found, "mean over samples": float(samples)}


def find_contrast(inputs: Any, count: int, few: int, first: int) -> int:
    """Where those neighbours begin by whose parts one can best tell a mean over labels from one over samples."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor) or not labels.ndim or len(labels) != count or labels.is_floating_point():
        return 0
    counted = (labels != IGNORED).reshape(count, -1)
    kinds = [counted.sum(1).tolist(), counted[:, 1:].sum(1).tolist()][: labels.ndim]
    classes = labels.tolist() if labels.ndim == 1 else [0] * count

    def tell(start: int) -> tuple[float, float]:
        """How far apart the first part's shares are, and both parts' classes; one without a label tells nothing."""
        ends = slice(start, start + first), slice(start + first, start + few)
        sums = [[sum(own[end]) for end in ends] for own in kinds]
        if not all(map(all, sums)):
            return -1.0, 0.0
        one, other = (sum(classes[end]) / (end.stop - end.start) for end in ends)
        return sum(abs(own[0] / sum(own) - first / few) for own in sums), abs(one - other)

    return max(range(count - few + 1), key=tell)


def _combine(way: str, parts: Sequence[Part]) -> Any:
    """A part that counts for nothing may have no loss that is a number."""
    if way == _SUM:
        return sum(loss for loss, _ in parts)
    total = sum(weights[way] for _, weights in parts)
    counting = [loss * (weights[way] / total) for loss, weights in parts if weights[way]]
    return sum(counting) if counting else parts[0][0]


_MOST_KINDS = 32
"""More are no datasets but texts that differ in each batch, such as names of files; each costs passes of its own."""


@dataclass
class EvaluationKind:
    """What is known of the batches of one kind.

    Attributes:
        loss: How losses are put together.
        log_ways: How logged values are, by call and name.
        knows_logs: Whether that was looked for.
    """

    loss: EvaluationLoss
    log_ways: dict[tuple[Key, str], Way] = field(default_factory=dict)
    knows_logs: bool = False


class EvaluationKinds:
    """The kinds of batches that ran in parts."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._known = trainer, dict[str, EvaluationKind]()
        self._has_warned = False

    def find(self, inputs: Any) -> EvaluationKind:
        """What is known of the kind of a batch: nothing, where none of it has come before."""
        kind = _kind_of(inputs)
        if kind not in self._known and len(self._known) >= _MOST_KINDS and isinstance(inputs, Mapping):
            texts = {name: "" for name, value in inputs.items() if isinstance(value, str) and name != DATASET}
            self._warn(texts)
            kind = _kind_of({**inputs, **texts})
        return self._known.setdefault(kind, EvaluationKind(EvaluationLoss(self._trainer)))

    def _warn(self, texts: Collection[str]) -> None:
        if texts and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "evaluation batches of %s have %d kinds, so batches that differ only by a new text in %s count as one "
                "kind from now on, and their losses are combined in one way",
                type(self._trainer).__name__,
                len(self._known),
                ", ".join(texts),
            )


def _kind_of(inputs: Any) -> str:
    """Of one batch by itself, with all of its texts."""
    return name_kind(entries_of(inputs))
