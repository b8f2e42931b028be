"""Evaluates a Trainer's batches whole if they fit, otherwise in parts; loss, outputs and logs are the whole batch's.

The size that fits is found when memory runs out, and holds from then on. On several ranks the Trainer's own code runs:
it counts labels over all ranks in each call, so that no rank may call it alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from transformers.trainer_pt_utils import nested_concat

from autobatch.batch.samples import describe
from autobatch.fitting.options import Options
from autobatch.integrations.attributes import is_number, replaced, weighted_mean
from autobatch.integrations.transformers.cuts import Collate, copy_samples, count_rows, count_samples, take_samples
from autobatch.integrations.transformers.logs import StepMetrics, TrainerLogs
from autobatch.integrations.transformers.loss_rule import (
    DIVIDED,
    SAMPLES,
    WEIGHED,
    KnownRules,
    Reading,
    choose_telling,
    read_loss,
)
from autobatch.integrations.transformers.trainer_step import TrainerAttributes, undone
from autobatch.integrations.transformers.training import TrainingStep
from autobatch.memory.oom import describe_error, is_oom
from autobatch.undo.undo import Undo

_log = logging.getLogger("autobatch")

Outputs = tuple[Any, Any, Any]  # loss, logits and labels, as prediction_step returns them; each may be None
_FEW = 5  # samples whose losses are read, in unequal parts
_NEAR = 1e-4  # relative error with which a reading explains a loss
_COARSE = 2e-2  # the same in bfloat16 or float16, whose last bit is 0.4 %


@dataclass(frozen=True)
class _Part:
    samples: int
    weight: float  # what its loss counts for in a mean
    outputs: Outputs


class _Batch:
    """One batch, of which parts can be run."""

    def __init__(self, inputs: Any, collate: Collate, run: Callable[[Any], Outputs]) -> None:
        self.samples = take_samples(inputs)
        self.inputs, self.count, self.run = inputs, count_samples(inputs, self.samples), run
        self._collate = collate

    def take(self, rows: Sequence[int]) -> Any:
        """Take some samples; all of them are the loader's batch."""
        if rows == range(self.count):  # in a dict of its own: the Trainer's code may take entries out
            return type(self.inputs)(self.inputs) if isinstance(self.inputs, dict) else self.inputs
        if self.samples is None or count_rows(self.inputs) == self.count:
            return describe(self.inputs).take(rows)
        return self._collate(copy_samples([self.samples[row] for row in rows]))


class EvaluationStep:
    """Takes the place of a Trainer's ``prediction_step``."""

    def __init__(self, trainer: Any, collate: Collate, training: TrainingStep, options: Options) -> None:
        """Bind a Trainer whose ``prediction_step`` is still its own."""
        self.size: int | None = None  # the most samples that run at once, after memory has run out
        self._trainer, self._collate, self._training = trainer, collate, training
        self._prediction_step = trainer.prediction_step
        self._weigh: Callable[[Any], Any] | None = options.weigh
        self._logs = TrainerLogs(trainer, options.weigh)
        self._keep = [self._logs, *options.keep]
        self._readings = KnownRules[Reading](type(trainer).__name__)
        self._has_warned = False

    def __call__(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001 - the Trainer's own signature
        ignore_keys: list[str] | None = None,
    ) -> Outputs:
        """Return loss, logits and labels of a whole batch."""

        def run(part: Any) -> Outputs:
            outputs: Outputs = self._prediction_step(model, part, prediction_loss_only, ignore_keys)
            return outputs

        batch = _Batch(inputs, self._collate, run)
        if self._trainer.args.world_size > 1:
            return run(inputs)
        metrics = StepMetrics(self._trainer, "eval")
        metrics.begin()
        self._logs.micro_batches.clear()
        # A part's loss is divided by the count of the whole batch, as a micro-batch's is in training.
        count = self._trainer._get_num_items_in_batch  # noqa: SLF001 - nothing public is asked for it
        items = None
        if isinstance(inputs, Mapping):
            items = self._training.try_twice(lambda: count([inputs], self._trainer.args.device))
        with replaced(self._trainer, "_get_num_items_in_batch", lambda *_, **__: items):
            parts = self._run_parts(model, batch, metrics)
            reading = self._read(model, batch) if len(parts) > 1 else SAMPLES
        sizes = [part.samples for part in parts]
        metrics.merge(sizes)
        self._logs.write(sizes)
        first, *others = [part.outputs for part in parts]
        if not others:
            return first
        _, logits, labels = first
        for _, more, its in others:  # one part after another
            logits = None if logits is None else nested_concat(logits, more, padding_index=-100)
            labels = None if labels is None else nested_concat(labels, its, padding_index=-100)
        return _join_losses(parts, reading), logits, labels

    def _run_parts(self, model: Any, batch: _Batch, metrics: StepMetrics) -> list[_Part]:
        """Run the whole batch, in as many parts as memory asks for; what failed parts changed is undone."""
        parts: list[_Part] = []
        start = 0
        while start < batch.count:
            stop = min(batch.count, start + (self.size or batch.count))
            inputs = batch.take(range(start, stop))
            part, reason = self._attempt(model, batch.run, inputs, stop - start)
            if part is None:
                self._training.device().reclaim()  # only now are the failed frames gone
                self.size = (stop - start + 1) // 2
                _log.warning(
                    "evaluation ran out of memory at %d samples; continuing with at most %d; %s",
                    stop - start,
                    self.size,
                    reason,
                )
                continue
            parts.append(part)
            metrics.add(inputs)
            start = stop
        return parts

    def _attempt(
        self, model: Any, run: Callable[[Any], Outputs], inputs: Any, samples: int
    ) -> tuple[_Part | None, str]:
        """Return what the Trainer's own step returns; or why memory ran out, with no reference to the error."""
        device, plan = self._training.device(), self._training.plan
        before: Undo | None = None
        try:
            before = Undo(model, device.torch_device, keep=[TrainerAttributes(self._trainer), *self._keep])
            limit = nullcontext() if plan is None else device.limit(plan.budget_bytes)
            # Before the Trainer's code may take entries out of it.
            weight = samples if self._weigh is None else float(self._weigh(inputs))
            with limit, device.micro_batch(samples) or nullcontext(), self._logs.catch(inputs):
                part = _Part(samples, weight, run(inputs))
        except Exception as error:
            if samples == 1 or not is_oom(error):
                raise
            reason = describe_error(error)
        else:
            before.release()
            return part, ""
        if before is not None:
            before.restore()
        return None, reason

    # ---------------------------------------------------------------------------------------- how losses are joined

    def _read(self, model: Any, batch: _Batch) -> Reading:
        """Return the reading of this kind of batch; where it is new, a few samples run whole and in two parts."""
        if self._weigh is not None:
            return WEIGHED
        try_twice = self._training.try_twice
        kind, known = try_twice(lambda: self._readings.find(batch.inputs, batch.count))
        if known is not None:
            return known
        training, size = self._training.rule, self.size or 1
        reading: Reading | None = None if training is None else training.reading
        rows = try_twice(lambda: choose_telling(batch.inputs, batch.count, min(_FEW, size)))

        def loss_of(start: int, stop: int) -> float:
            part = batch.take(rows[start:stop])
            with self._logs.catch(part):
                loss = batch.run(part)[0]
            return float(loss) if is_number(loss) else float("nan")

        if size > 1:
            try:
                with undone(self._trainer, model, self._training.device().torch_device, self._keep):
                    found, error = read_loss(loss_of, len(rows))
            except Exception as raised:
                if not is_oom(raised):
                    raise
            else:
                reading = found or reading
                self._warn(error if found else 0.0)
                self._readings.add(kind, reading or SAMPLES)
        if reading is None:
            self._warn(math.inf)
        return reading or SAMPLES

    def _warn(self, error: float) -> None:
        arguments = self._trainer.args
        tensors = [*self._trainer.model.parameters()][:1]
        is_mixed = arguments.bf16 or arguments.fp16 or arguments.bf16_full_eval or arguments.fp16_full_eval
        is_coarse = is_mixed or any(tensor.element_size() < 4 for tensor in tensors)
        if error > (_COARSE if is_coarse else _NEAR) and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the loss of %s is neither a mean over samples nor divided by num_items_in_batch, so it is approximate "
                "for evaluation batches that run in parts: pass weigh= to attach(), or "
                "per_device_eval_batch_size=%d, with which they run whole",
                type(self._trainer).__name__,
                self.size,
            )


def _join_losses(parts: Sequence[_Part], reading: Reading) -> Any:
    """Return the loss of the whole batch."""
    losses = [part.outputs[0] for part in parts]
    if any(loss is None for loss in losses):
        return None
    if reading == DIVIDED:
        return sum(losses)
    return weighted_mean(losses, [part.weight for part in parts])
