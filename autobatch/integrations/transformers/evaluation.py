"""Evaluates a Trainer's batches whole where they fit, in smaller parts where not; the result is the whole's.

Covers ``prediction_step``: the size that fits is found when memory ends, and holds from then on; what the parts log is
logged once a batch. Does not cover metrics over the dataset, which the Trainer computes from what comes out here, nor
several ranks: the Trainer's own code counts labels over all of them in each call, so that none may call it alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers.trainer_pt_utils import nested_concat

from autobatch.batch.layout import describe
from autobatch.errors import InvalidBatch
from autobatch.integrations.transformers.loss_rule import count_labels
from autobatch.integrations.transformers.metrics import StepMetrics
from autobatch.integrations.transformers.samples import copy_samples, take_samples
from autobatch.integrations.transformers.trainer_logs import TrainerLogs
from autobatch.integrations.transformers.trainer_state import TrainerAttributes
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.state.random_state import RandomState

__all__ = ["EvaluationStep"]

_log = logging.getLogger("autobatch")

Outputs = tuple[Any, Any, Any]
"""Loss, logits and labels, as ``prediction_step`` returns them; each may be ``None``."""
_FEW = 5
"""Samples, in unequal parts, on which it is found how logged values are combined."""


class EvaluationStep:
    """Stands in place of a Trainer's ``prediction_step``.

    Attributes:
        size: The most samples that are run at once; ``None`` before memory has ended for the first time.
    """

    def __init__(
        self,
        trainer: Any,
        collate: Callable[[Sequence[Any]], Any],
        device: Callable[[], Device],
        budget: Callable[[], int | None],
    ) -> None:
        self.size: int | None = None
        self._trainer, self._collate, self._device, self._budget = trainer, collate, device, budget
        self._prediction_step, self._attributes = trainer.prediction_step, TrainerAttributes(trainer)
        self._logs, self._knows_logs = TrainerLogs(trainer), False

    def __call__(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001 - the Trainer's own signature
        ignore_keys: list[str] | None = None,
    ) -> Outputs:
        """Loss, logits and labels of a whole batch."""
        samples = take_samples(inputs)
        if self._trainer.args.world_size > 1:
            whole: Outputs = self._prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return whole
        options = prediction_loss_only, ignore_keys
        count, metrics = _count(inputs, samples), StepMetrics(self._trainer, "eval")
        metrics.begin()
        self._logs.micro_batches.clear()
        sizes: list[int] = []
        parts: list[tuple[float, Outputs]] = []
        start = 0
        while start < count:
            stop = min(count, start + (self.size or count))
            part = self._part(inputs, samples, start, stop, count)
            taken = self._attributes.take()
            found, reason = self._try(stop - start, model, part, *options)
            if found is None:
                self._attributes.put(taken)
                self._shrink(stop - start, reason)
                continue
            parts.append((self._weight(part, stop - start), found))
            metrics.add(part)
            sizes.append(stop - start)
            start = stop
        metrics.merge(sizes)
        if len(sizes) > 1:
            self._learn_logs(lambda start, stop: self._part(inputs, samples, start, stop, count), model, *options)
        self._logs.write(sizes)
        return parts[0][1] if len(parts) == 1 else _join(parts)

    def _learn_logs(self, part_of: Callable[[int, int], Any], model: Any, *options: Any) -> None:
        """Find how logged values are combined, once, on a few samples; without it they are means over samples.

        Only where a batch was divided and something was logged: no other evaluation runs more than its own samples.
        """
        few = min(_FEW, self.size or 1)
        if self._knows_logs or few < 2 or not any(one.calls for one in self._logs.micro_batches):
            return
        self._knows_logs = True
        logged, taken, random = self._logs.take(), self._attributes.take(), RandomState(self._device().torch_device)

        def run(sizes: Sequence[int]) -> None:
            for start, stop in pairwise([0, *accumulate(sizes)]):
                part = part_of(start, stop)
                with self._logs.catch(part):
                    self._prediction_step(model, part, *options)

        try:
            self._logs.learn(run, (first := min(few - 1, few // 2 + 1), few - first))
        except Exception as error:
            if not is_oom(error):
                raise
        finally:
            self._attributes.put(taken)
            random.restore()
            self._logs.put(logged)

    def _try(self, samples: int, *arguments: Any) -> tuple[Outputs | None, str]:
        """What the Trainer's own returns, or why memory ended, with no reference to the error."""
        device, budget = self._device(), self._budget()
        try:
            with (
                device.limit(budget) if budget else nullcontext(),
                device.micro_batch(samples) or nullcontext(),
                self._logs.catch(arguments[1]),
            ):
                return self._prediction_step(*arguments), ""
        except Exception as error:
            if samples == 1 or not is_oom(error):
                raise
            return None, describe_error(error)

    def _shrink(self, failed: int, reason: str) -> None:
        self._device().reclaim()  # only now, after the ``except`` block, are the failed frames gone
        self.size = (failed + 1) // 2
        _log.warning(
            "autobatch: evaluation ran out of memory at %d samples; goes on with at most %d; %s",
            failed,
            self.size,
            reason,
        )

    def _part(self, inputs: Any, samples: Sequence[Any] | None, start: int, stop: int, count: int) -> Any:
        if stop - start == count:
            return (
                type(inputs)(inputs) if isinstance(inputs, dict) else inputs
            )  # the Trainer's code may take entries out
        if samples is None or _count_rows(inputs) == count:
            return describe(inputs).take(start, stop)
        return self._collate(copy_samples(samples[start:stop]))

    def _weight(self, part: Mapping[str, Any], samples: int) -> float:
        """What the part's loss is a mean over: labels, as the Trainer counts them, or samples."""
        labels = part.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.ndim < 2 or labels.is_floating_point():
            return float(samples)
        counted = self._trainer._get_num_items_in_batch([part], labels.device)  # noqa: SLF001 - nothing public counts as it does
        return float(count_labels(labels).sum() if counted is None else counted)


def _count(inputs: Any, samples: Sequence[Any] | None) -> int:
    """Samples of a batch; 1 where it cannot be divided."""
    rows = _count_rows(inputs)
    return len(samples) if samples is not None else rows or 1


def _count_rows(inputs: Any) -> int | None:
    try:
        return describe(inputs).count
    except InvalidBatch:
        return None


def _join(parts: Sequence[tuple[float, Outputs]]) -> Outputs:
    """The whole's loss as a mean over the weights, its logits and labels one after another."""
    total = sum(weight for weight, _ in parts)
    counting = [(weight, loss) for weight, (loss, _, _) in parts if weight and loss is not None]
    loss = sum(loss * (weight / total) for weight, loss in counting) if counting else parts[0][1][0]
    joined = []
    for index in (1, 2):
        whole = parts[0][1][index]
        for _, outputs in parts[1:]:
            whole = None if whole is None else nested_concat(whole, outputs[index], padding_index=-100)
        joined.append(whole)
    return (loss, *joined)
