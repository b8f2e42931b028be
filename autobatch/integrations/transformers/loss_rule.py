"""Defines how a Trainer's batches are divided and what its loss is a mean over: the rule with which a step is run.

Covers what each reading counts, and when a batch puts the rule in question. Does not cover how it is found
(``rule_search``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from autobatch.batch.samples import describe
from autobatch.integrations.transformers.cuts import IGNORED, Cut, count_rows
from autobatch.integrations.transformers.trainer_step import TrainerStep
from autobatch.step.losses import Sum

__all__ = [
    "READINGS",
    "LossRule",
    "Reading",
    "are_proportional",
    "class_labels",
    "count_by_sample",
    "count_samples",
]

Reading = Literal[
    "divided by the whole batch's count", "mean over samples", "mean over shifted labels", "mean over labels"
]
READINGS: tuple[Reading, ...] = (
    "divided by the whole batch's count",
    "mean over shifted labels",
    "mean over labels",
    "mean over samples",
)
_DIVIDED, _SHIFTED, _LABELS, _SAMPLES = READINGS


@dataclass(frozen=True)
class LossRule:
    """How batches are divided, and what the loss of a micro-batch is.

    Attributes:
        cut: How batches are divided.
        reading: What the Trainer's loss was divided by.
        step: The Trainer's step.
        open: Other readings that the samples that were compared could not distinguish from this one: where all have
            equally many labels, a mean over labels is a mean over samples.
        is_tried: Whether those samples were divided as others will be: of equally long rows no padding is cut off.
        is_exact: Whether a comparison has shown that it is exact; not where ``check`` let an inexact one pass.
        is_guess: Whether it was taken because its batch had nothing to compare, as one sample has: the next is asked.
    """

    cut: Cut
    reading: Reading
    step: TrainerStep
    open: tuple[Reading, ...] = ()
    is_tried: bool = True
    is_exact: bool = False
    is_guess: bool = False

    @property
    def readings(self) -> tuple[Reading, ...]:
        """This reading and the open ones."""
        return (self.reading, *self.open)

    def is_like(self, other: LossRule | None) -> bool:
        """Whether both divide and weigh alike, so that a Runner of one serves for the other."""
        return other is not None and (self.cut.name, self.reading) == (other.cut.name, other.reading)

    @property
    def is_certain(self) -> bool:
        """Whether no batch of the same kind can put it in question."""
        return self.is_tried and not self.open and not self.is_guess

    def is_put_in_question(self, inputs: Any) -> bool:
        """Whether an open reading would weigh the samples of this batch otherwise, or it is the first with padding."""
        if not self.is_tried and self.cut.is_tried_by(inputs):
            return True
        counts = count_by_sample(inputs) if self.open else {}
        own = counts.get(self.reading)
        return own is not None and any(one in counts and not are_proportional(own, counts[one]) for one in self.open)

    def run(self, model: nn.Module, micro_batch: Any) -> Any:
        """The step, as ``fit`` and ``Runner`` take it."""
        loss = self.step.loss_of(model, self.cut.inputs_of(micro_batch))
        # Counts add up to 1, so what was divided by the whole batch's count is not divided twice.
        return Sum(loss * self.step.scale, self._share_of(micro_batch)) if self.reading == _DIVIDED else loss

    @property
    def weigh(self) -> Callable[[Any], Any] | None:
        """What a mean is over; ``None`` for samples."""
        if self.reading == _DIVIDED and self.step.ranks > 1:
            return self._share_of
        return self._count_labels if self.reading in (_SHIFTED, _LABELS) else None

    def _share_of(self, micro_batch: Any) -> float:
        """The micro-batch's part of the samples of all ranks."""
        return describe(micro_batch).count / self.step.samples / self.step.ranks

    def _count_labels(self, micro_batch: Any) -> torch.Tensor:
        labels = self.cut.inputs_of(micro_batch)["labels"]
        return _have_loss(labels if self.reading == _LABELS else labels[:, 1:]).sum()

    def __str__(self) -> str:
        """For a line of the log."""
        return f"micro-batches are {self.cut.name}; the loss is a {self.reading}".replace("a divided", "divided")


def count_by_sample(inputs: Any) -> dict[Reading, list[int]]:
    """What each row of a batch counts for by each reading; nothing without labels that are classes."""
    labels = class_labels(inputs)
    if labels is None:
        return {}
    counted = _have_loss(labels)
    if labels.ndim == 1:
        return {_LABELS: counted.int().tolist(), _SAMPLES: [1] * len(counted)}
    shifted, all_of_them = torch.stack([counted[:, 1:].sum(1), counted.sum(1)]).tolist()
    return {_SHIFTED: shifted, _LABELS: all_of_them, _SAMPLES: [1] * len(shifted)}


def are_proportional(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two readings weigh these samples alike."""
    totals = sum(one), sum(other)
    return all(a * totals[1] == b * totals[0] for a, b in zip(one, other, strict=True))


def _have_loss(labels: torch.Tensor) -> torch.Tensor:
    """Which labels have a loss."""
    return labels != IGNORED


def class_labels(inputs: Any) -> torch.Tensor | None:
    """Of each sample one, or one of each token; ``None`` where labels are something else."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    is_classes = isinstance(labels, torch.Tensor) and labels.ndim in (1, 2) and not labels.is_floating_point()
    return labels if is_classes else None


def count_samples(inputs: Mapping[str, Any], samples: Sequence[Any] | None) -> int:
    """Samples of a batch, 1 where it cannot be divided; ``samples``: what it was made of, where that is known."""
    return len(samples) if samples is not None else count_rows(inputs) or 1
