"""Reads from the values of losses what a Trainer's loss was divided by: a sum of 4 parts is 4 times a mean.

A few forward passes tell it, of samples that are all alike and of a single one too. They do not show that a split is
exact, which takes gradients (``rule_search``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.batch.samples import describe
from autobatch.errors import AutobatchError
from autobatch.integrations.attributes import replaced
from autobatch.integrations.transformers.cuts import Cut
from autobatch.integrations.transformers.loss_rule import READINGS, LossRule, Reading, class_labels, count_by_sample
from autobatch.integrations.transformers.trainer_step import TrainerStep
from autobatch.memory.oom import describe_error

__all__ = ["LossValues", "find_contrast", "read_loss_values"]

_log = logging.getLogger("autobatch")

_DIVIDED, _SHIFTED, _LABELS, _SAMPLES = READINGS
_FEW = 6
"""Samples in parts of 4 and 2: unlike sizes, and even ones, since two rows may be a pair."""
_NEAR = (1e-5, 1e-3)
"""A reading explains a value that is this near, at first where several do: counts of labels may differ by little."""


@dataclass(frozen=True)
class LossValues:
    """What the values of a few samples' losses show.

    Attributes:
        readings: All that are possible, the likeliest first.
        explained: How many of them explain the values.
        compared: What the Trainer's step was given of these samples.
        is_tried: Whether they were divided as others will be.
        is_known: Whether the values show anything: not where a loss is 0, or none could be read.
    """

    readings: tuple[Reading, ...]
    explained: int = 0
    compared: Any = None
    is_tried: bool = False
    is_known: bool = False


def read_loss_values(step: TrainerStep, cut: Cut, model: nn.Module, batch: Any) -> LossValues:
    """Compare the loss of a few samples with the losses of two parts of them.

    Args:
        step: The Trainer's.
        cut: How batches are divided.
        model: Its BatchNorm layers use their running statistics here: what a loss was divided by does not depend on it.
        batch: What ``cut.batch_of`` has returned.

    Raises:
        AutobatchError: The Trainer's step is none that can be run in micro-batches.
    """
    likeliest = _order_readings(cut.inputs_of(batch))
    unknown = LossValues(likeliest)
    try:
        rules = [LossRule(cut, reading, step) for reading in likeliest]
        for rows, first in _choose_rows(cut, batch):
            if (found := _read(rules, model, batch, rows, first)) is not None:
                return found
    except AutobatchError:
        raise
    except Exception as error:  # noqa: BLE001 - the step itself is run later, and raises what is the user's
        _log.info("could not compare the losses of a few samples: %s", describe_error(error))
    return unknown


def find_contrast(cut: Cut, batch: Any) -> list[int]:
    """The samples by which means over labels and over samples differ most; none where labels are not by sample."""
    counts = count_by_sample(cut.inputs_of(batch))
    if not counts or len(counts[_LABELS]) != describe(batch).count:
        return []
    labels = counts[_LABELS]
    shifted = counts.get(_SHIFTED, labels)
    lost = [own / max(1, whole) for own, whole in zip(shifted, labels, strict=True)]
    numbers = range(len(labels))
    ends = [end(numbers, key=values.__getitem__) for values in (shifted, lost) for end in (max, min)]
    return [*dict.fromkeys(ends)] if len(set(ends)) > 1 else []


def _spread_over(count: int, few: int) -> list[int]:
    """So many of a batch's samples, from the first to the last."""
    return [index * (count - 1) // max(1, few - 1) for index in range(few)]


def _read(
    rules: Sequence[LossRule], model: nn.Module, batch: Any, rows: Sequence[int], first: int
) -> LossValues | None:
    """What these rows show, of which so many are the first part; ``None`` where a loss is 0 or no number."""
    cut, step, few = rules[0].cut, rules[0].step, len(rows)
    ranges = ((0, first), (first, few))
    with ExitStack() as stack:
        _fix_batch_norm(stack, model)
        loss_of, has_learned = stack.enter_context(step.repeatable(model, cut, batch, rows))
        whole, parts = loss_of(0, few), [loss_of(*range_) for range_ in ranges]
        if has_learned():
            whole, parts = loss_of(0, few), [loss_of(*range_) for range_ in ranges]
        if not all(map(math.isfinite, (whole, *parts))) or not (whole and any(parts)):
            return None
        divided = [cut.pick(batch, rows[start:stop]) for start, stop in ranges]
        errors = {rule.reading: _find_error(rule, whole, parts, divided) for rule in rules}
        explained = next((found for near in _NEAR if (found := [r for r in errors if errors[r] <= near])), [])
        nearest = sorted(errors, key=errors.__getitem__)
        if not explained and _uses_count(step, whole, lambda: loss_of(0, few)):
            nearest.insert(0, _DIVIDED)
    picked = cut.pick(batch, rows)
    readings = tuple(dict.fromkeys([*explained, *nearest]))
    return LossValues(readings, len(explained), cut.inputs_of(picked), cut.is_tried_by(picked), is_known=True)


def _find_error(rule: LossRule, whole: float, parts: Sequence[float], batches: Sequence[Any]) -> float:
    """How far the parts' losses make another loss than that of the whole, by this rule."""
    if rule.reading == _DIVIDED:
        terms = [*parts]
    else:
        weigh = rule.weigh or (lambda part: describe(part).count)
        weights = [float(weigh(part)) for part in batches]
        total = sum(weights)
        if not total:
            return math.inf
        terms = [loss * (weight / total) for loss, weight in zip(parts, weights, strict=True)]
    return abs(sum(terms) - whole) / max(abs(whole), *map(abs, terms))


def _uses_count(step: TrainerStep, whole: float, run: Callable[[], float]) -> bool:
    """Whether the loss depends on what the Trainer has counted, by more than it does each time."""
    if step.num_items is None:
        return False
    again, counted = run(), step.num_items
    step.num_items = counted * 2
    try:
        changed = run()
    finally:
        step.num_items = counted
    return bool(abs(changed - again) > 10 * abs(again - whole) + _NEAR[0] * abs(whole))


def _choose_rows(cut: Cut, batch: Any) -> list[tuple[list[int], int]]:
    """Rows, and how many of them are the first part; then the same row twice, which shows a sum from a mean too."""
    count = describe(batch).count
    counts = count_by_sample(cut.inputs_of(batch)).get(_LABELS, [])
    counts = counts if len(counts) == count else [1] * count
    richest = max(range(count), key=counts.__getitem__)
    twice = ([richest, richest], 1)
    few = min(_FEW, count)
    if few < 2:
        return [twice]
    ends = find_contrast(cut, batch)
    rows = [*dict.fromkeys([richest, *ends, *_spread_over(count, few), *range(count)])][:few]
    rows.sort(key=counts.__getitem__)  # labels are in the last part, and in the first where any other row has one
    first = few - 2 if few >= 4 else few - 1
    if not sum(counts[row] for row in rows[:first]):
        rows[first - 1], rows[first] = rows[first], rows[first - 1]
    return [(rows, first), twice]


def _order_readings(inputs: Any) -> tuple[Reading, ...]:
    """Readings from the likeliest to the least likely, where nothing else tells them apart."""
    labels = class_labels(inputs)
    if labels is None:
        return (_SAMPLES, _DIVIDED)
    return (_SAMPLES, _LABELS, _DIVIDED) if labels.ndim == 1 else (_SHIFTED, _LABELS, _SAMPLES, _DIVIDED)


def _fix_batch_norm(stack: ExitStack, model: nn.Module) -> None:
    """Let BatchNorm layers take their running statistics."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            stack.enter_context(replaced(layer, "training", value=False))
