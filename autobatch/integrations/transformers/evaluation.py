"""Evaluates a Trainer's batches whole where they fit, in smaller parts where not; the result is the whole's.

Covers ``prediction_step``: the size that fits is found when memory ends, and holds from then on; what the parts log is
logged once a batch. How losses are put together: ``evaluation_loss``. Does not cover metrics over the dataset, which
the Trainer computes from what comes out here, nor several ranks: the Trainer's own code counts labels over all of them
in each call, so that none may call it alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from transformers.trainer_pt_utils import nested_concat

from autobatch.batch.samples import describe
from autobatch.integrations.transformers.cuts import count_rows
from autobatch.integrations.transformers.evaluation_loss import (
    EvaluationKind,
    EvaluationKinds,
    Part,
    find_contrast,
    weigh,
)
from autobatch.integrations.transformers.metrics import StepMetrics
from autobatch.integrations.transformers.samples import copy_samples, take_samples
from autobatch.integrations.transformers.trainer_logs import TrainerLogs
from autobatch.integrations.transformers.trainer_state import EvaluationState
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom

__all__ = ["EvaluationStep"]

_log = logging.getLogger("autobatch")

Outputs = tuple[Any, Any, Any]
"""Loss, logits and labels, as ``prediction_step`` returns them; each may be ``None``."""
_FEW = 5
"""Samples, in unequal parts, on which it is found how losses and logged values are combined."""


class _PartRun(NamedTuple):
    samples: int
    weights: Mapping[str, float]
    outputs: Outputs


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
        keep: Sequence[Any] = (),
    ) -> None:
        """Know the Trainer.

        Args:
            trainer: Whose ``prediction_step`` is still its own.
            collate: Its own collate function.
            device: The memory of the device that the model is on.
            budget: Bytes that this process may have.
            keep: Objects of the user that the step changes.
        """
        self.size: int | None = None
        self._trainer, self._collate, self._device, self._budget = trainer, collate, device, budget
        self._prediction_step = trainer.prediction_step
        self._logs, self._kinds = TrainerLogs(trainer), EvaluationKinds(trainer)
        self._state = EvaluationState(trainer, device, [self._logs, *keep])

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
        part_of = partial(self._part, inputs, samples, count)
        parts = self._run_parts(part_of, count, metrics, model, options)
        sizes = [part.samples for part in parts]
        metrics.merge(sizes)
        if len(parts) == 1:
            self._logs.write(sizes)
            return parts[0].outputs
        losses = [(part.outputs[0], part.weights) for part in parts]
        kind = self._kinds.find(inputs)
        self._logs.ways = kind.log_ways
        run, contrast = partial(self._run, part_of, model, options), partial(find_contrast, inputs, count)
        self._learn(model, run, contrast, kind, losses)
        self._logs.write(sizes)
        return (kind.loss.join(losses), *_join([part.outputs for part in parts]))

    def _run_parts(
        self, part_of: Callable[[int, int], Any], count: int, metrics: StepMetrics, model: Any, options: Any
    ) -> list[_PartRun]:
        """The whole batch, in as many parts as memory asks for; what failed parts have changed is put back."""
        parts: list[_PartRun] = []
        start = 0
        try:
            while start < count:
                stop = min(count, start + (self.size or count))
                part = part_of(start, stop)
                found, reason = self._try(stop - start, model, part, *options)
                if found is None:
                    self._shrink(stop - start, reason)
                    continue
                parts.append(found)
                metrics.add(part)
                start = stop
        finally:
            self._state.end()
        return parts

    def _run(self, part_of: Callable[[int, int], Any], model: Any, options: Any, start: int, stop: int) -> Part:
        """The loss of some samples of the batch once more; what they log is kept for ``learn``."""
        part = part_of(start, stop)
        weights = weigh(self._trainer, part, stop - start)
        with self._logs.catch(part):
            return self._prediction_step(model, part, *options)[0], weights

    def _learn(
        self,
        model: Any,
        run: Callable[[int, int], Part],
        contrast: Callable[[int, int], int],
        kind: EvaluationKind,
        losses: Sequence[Part],
    ) -> None:
        """Find what is not known yet of a kind of batch, on a few samples that are run again; memory may end in it.

        No other evaluation runs more than its own samples. Where no two fit at once, all is what is likeliest.

        Args:
            model: The Trainer's.
            run: Runs samples of the batch, from one to before another.
            contrast: Where the samples begin that tell most, by how many they are and how many are the first part.
            kind: What is known of it.
            losses: Of the batch's own parts.
        """
        few, first = self._divide_few()
        learns_logs = not kind.knows_logs and any(one.calls for one in self._logs.micro_batches)
        learns_loss = kind.loss.is_open(losses)
        if few < 2 or not (learns_logs or learns_loss):
            return
        try:
            with self._state.undone(model):
                if learns_logs:
                    kind.knows_logs = True
                    self._learn_logs(run, (first, few - first))
                if learns_loss:
                    start = contrast(few, first)
                    (whole, _), (again, _) = run(start, start + few), run(start, start + few)
                    parts = [run(start, start + first), run(start + first, start + few)]
                    kind.loss.learn(whole, again, parts, self.size or 1)
        except Exception as error:
            if not is_oom(error):
                raise

    def _learn_logs(self, run: Callable[[int, int], Part], sizes: Sequence[int]) -> None:
        """Find how logged values are combined; without it they are means over samples."""

        def run_all(their_sizes: Sequence[int]) -> None:
            for start, stop in pairwise([0, *accumulate(their_sizes)]):
                run(start, stop)

        self._logs.learn(run_all, sizes)

    def _divide_few(self) -> tuple[int, int]:
        """How many samples are compared, and how many of them are the first part."""
        few = min(_FEW, self.size or 1)
        return few, min(few - 1, few // 2 + 1)

    def _try(self, samples: int, model: Any, part: Any, *options: Any) -> tuple[_PartRun | None, str]:
        """What the Trainer's own returns for a part, or why memory ended, with no reference to the error."""
        device, budget = self._device(), self._budget()
        try:
            self._state.begin(model)
            weights = weigh(self._trainer, part, samples)
            with (
                device.limit(budget) if budget else nullcontext(),
                device.micro_batch(samples) or nullcontext(),
                self._logs.catch(part),
            ):
                return _PartRun(samples, weights, self._prediction_step(model, part, *options)), ""
        except Exception as error:
            if samples == 1 or not is_oom(error):
                raise
            return None, describe_error(error)

    def _shrink(self, failed: int, reason: str) -> None:
        self._state.put_back()
        self._device().reclaim()  # only now, after the ``except`` block, are the failed frames gone
        self.size = (failed + 1) // 2
        _log.warning(
            "evaluation ran out of memory at %d samples; continuing with at most %d; %s",
            failed,
            self.size,
            reason,
        )

    def _part(self, inputs: Any, samples: Sequence[Any] | None, count: int, start: int, stop: int) -> Any:
        if stop - start == count:
            return (
                type(inputs)(inputs) if isinstance(inputs, dict) else inputs
            )  # the Trainer's code may take entries out
        if samples is None or count_rows(inputs) == count:
            return describe(inputs).take(range(start, stop))
        return self._collate(copy_samples(samples[start:stop]))


def _count(inputs: Any, samples: Sequence[Any] | None) -> int:
    """Samples of a batch; 1 where it cannot be divided."""
    rows = count_rows(inputs)
    return len(samples) if samples is not None else rows or 1


def _join(parts: Sequence[Outputs]) -> list[Any]:
    """The whole's logits and labels, one part after another."""
    joined = []
    for index in (1, 2):
        whole = parts[0][index]
        for outputs in parts[1:]:
            whole = None if whole is None else nested_concat(whole, outputs[index], padding_index=-100)
        joined.append(whole)
    return joined
