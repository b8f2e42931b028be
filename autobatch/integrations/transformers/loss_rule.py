"""Finds out how a Trainer's batches are divided and what its loss is a mean over, by comparing a batch with its parts.

Covers the candidates, their order, and the rule that was found, with which a step is run. A ``Trainer`` may divide by
``num_items_in_batch`` or ignore it, a model may take its own mean, a subclass may do anything: nothing is assumed where
it can be tried. Does not cover the comparison itself (``autobatch.verify``).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from autobatch.batch.layout import describe
from autobatch.errors import InexactSplit, InvalidBatch
from autobatch.exactness.verification import verify
from autobatch.integrations.transformers.cuts import IGNORED, CollatedSamples, Cut, Rows, TrimmedRows
from autobatch.integrations.transformers.trainer_step import TrainerStep
from autobatch.records import Verdict
from autobatch.step.losses import Part

__all__ = ["READINGS", "LossRule", "Reading", "cuts_for", "find_rule"]

_log = logging.getLogger("autobatch")

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
_MEANS = READINGS[1:]


@dataclass(frozen=True)
class LossRule:
    """How batches are divided, and what the loss of a micro-batch is.

    Attributes:
        cut: How batches are divided.
        reading: What the Trainer's loss was divided by.
        step: The Trainer's step.
        open: Other readings that the samples that were compared could not distinguish from this one: where all have
            equally many labels, a mean over labels is a mean over samples.
    """

    cut: Cut
    reading: Reading
    step: TrainerStep
    open: tuple[Reading, ...] = ()

    def is_put_in_question(self, inputs: Mapping[str, Any]) -> bool:
        """Whether an open reading would weigh the samples of this batch otherwise."""
        counts = _count_by_sample(inputs)
        return counts is not None and not all(_are_proportional(counts[self.reading], counts[one]) for one in self.open)

    def run(self, model: nn.Module, micro_batch: Any) -> Any:
        """The step, as ``fit`` and ``Runner`` take it."""
        loss = self.step.loss_of(model, self.cut.inputs_of(micro_batch))
        return Part(loss * self.step.share) if self.reading == _DIVIDED else loss

    @property
    def weigh(self) -> Callable[[Any], Any] | None:
        """What a mean is over; ``None`` for samples."""
        return self._count_labels if self.reading in (_SHIFTED, _LABELS) else None

    def _count_labels(self, micro_batch: Any) -> torch.Tensor:
        labels = self.cut.inputs_of(micro_batch)["labels"]
        return (count_labels(labels) if self.reading == _LABELS else count_labels(labels[:, 1:])).sum()

    def __str__(self) -> str:
        """For a line of the log."""
        return f"micro-batches are {self.cut.name}; the loss is a {self.reading}".replace("a divided", "divided")


def cuts_for(trainer: Any, collate: Callable[[Sequence[Any]], Any]) -> tuple[Cut, ...]:
    """The ways to divide that may be exact for a Trainer, the cheapest in memory first.

    An encoder's and a decoder's positions cannot be distinguished by their number, and the noise of NEFTune depends on
    it.
    """
    config = getattr(trainer.model, "config", None)
    has_two_lengths = getattr(config, "is_encoder_decoder", False)
    trims = not has_two_lengths and getattr(trainer, "neftune_noise_alpha", None) is None
    return (*([TrimmedRows()] if trims else []), Rows(), CollatedSamples(collate))


def find_rule(
    step: TrainerStep,
    cuts: Sequence[Cut],
    model: nn.Module,
    inputs: Mapping[str, Any],
    samples: Sequence[Any] | None,
    *,
    device: Any,
    check: Literal["warn", "raise"] | None,
) -> LossRule:
    """The first rule by which parts of the batch have the whole's gradient.

    Args:
        step: The Trainer's.
        cuts: The ways to divide, in the order in which they are tried.
        model: Of which gradients are compared.
        inputs: The loader's batch.
        samples: What it was made of, where that is known.
        device: As in ``verify``.
        check: What to do where none is exact: ``"raise"``; ``"warn"`` in the log, and take the likeliest, as with
            ``None``, which compares nothing.

    Raises:
        InexactSplit: With the causes that ``verify`` names.
        InvalidBatch: There is no way to divide the batch.
    """
    by_rows: list[Cut] = [cut for cut in cuts if isinstance(cut, Rows) and cut.can_divide(inputs, samples)]
    # Where each row is a sample, samples that are collated anew are the same rows.
    possible = by_rows or [cut for cut in cuts if not isinstance(cut, Rows) and cut.can_divide(inputs, samples)]
    if not possible:
        raise InvalidBatch(
            f"{type(step.trainer).__name__}: the batch cannot be divided into samples: its tensors have different "
            f"numbers of rows, and its data_collator does not make the same batch again of the same samples"
        )
    readings = _order(step, inputs, has_count=check is None or step.divides(model, possible[0], inputs, samples))
    if check is None or _count_samples(inputs, samples) == 1:
        return LossRule(possible[0], readings[0], step)
    verdicts: list[Verdict] = []
    for cut, reading in itertools.product(possible, readings):
        rule = LossRule(cut, reading, step)
        batch = cut.batch_of(inputs, samples)
        telling = _pick_telling(cut, batch) if reading in _MEANS else None
        verdicts += _compare(rule, model, [batch] if telling is None else [telling, batch], device)
        if verdicts[-1].exact:
            return rule if telling is None else replace(rule, open=_find_open(reading, cut.inputs_of(telling)))
    nearest = min(verdicts, key=lambda verdict: (bool(verdict.unchecked), verdict.relative_error))
    name = type(step.trainer).__name__
    if check == "raise":
        raise InexactSplit(
            f"{name}: no way was found to split this loss exactly: {nearest}; check='warn' trains all the same"
        )
    _log.warning("autobatch: %s: no way was found to split this loss exactly: %s", name, nearest)
    return LossRule(possible[0], readings[0], step)


def _compare(rule: LossRule, model: nn.Module, compared: Iterable[Any], device: Any) -> Iterator[Verdict]:
    """The verdict on each of some batches, up to the first that is not exact."""
    for batch in compared:
        verdict = verify(model, batch, rule.run, rule.weigh, device=device)
        yield verdict
        if not verdict.exact:
            return


def _pick_telling(cut: Cut, batch: Any) -> Any:
    """The samples by which means over labels and over samples differ most; ``None`` where labels are not by sample."""
    counts = _count_by_sample(cut.inputs_of(batch))
    if counts is None or len(counts[_LABELS]) != describe(batch).count:
        return None
    shifted, labels = counts[_SHIFTED], counts[_LABELS]
    lost = [own / max(1, whole) for own, whole in zip(shifted, labels, strict=True)]
    numbers = range(len(labels))
    ends = [end(numbers, key=values.__getitem__) for values in (shifted, lost) for end in (max, min)]
    return cut.pick(batch, [*dict.fromkeys(ends)]) if len(set(ends)) > 1 else None


def _find_open(reading: Reading, inputs: Mapping[str, Any]) -> tuple[Reading, ...]:
    counts = _count_by_sample(inputs) or {}
    others = [other for other in _MEANS if other != reading]
    return tuple(other for other in others if _are_proportional(counts[other], counts[reading]))


def _count_by_sample(inputs: Mapping[str, Any]) -> dict[Reading, list[int]] | None:
    """What each row of a batch counts for by each reading; ``None`` without a label for each token."""
    if not _has_token_labels(inputs):
        return None
    labels = count_labels(inputs["labels"])
    shifted, all_of_them = torch.stack([labels[:, 1:].sum(1), labels.sum(1)]).tolist()
    return {_SHIFTED: shifted, _LABELS: all_of_them, _SAMPLES: [1] * len(shifted)}


def _are_proportional(one: Sequence[int], other: Sequence[int]) -> bool:
    totals = sum(one), sum(other)
    return all(a * totals[1] == b * totals[0] for a, b in zip(one, other, strict=True))


def count_labels(labels: torch.Tensor) -> torch.Tensor:
    """Which labels have a loss."""
    return labels != IGNORED


def _order(step: TrainerStep, inputs: Mapping[str, Any], *, has_count: bool) -> list[Reading]:
    """Readings from the likeliest to the least likely."""
    labels: list[Reading] = [_SHIFTED, _LABELS] if _has_token_labels(inputs) else []
    means: list[Reading] = [*labels, _SAMPLES]
    return [_DIVIDED, *means] if has_count and step.num_items is not None else [*means, _DIVIDED]  # it may be a sum


def _has_token_labels(inputs: Mapping[str, Any]) -> bool:
    labels = inputs.get("labels")
    return isinstance(labels, torch.Tensor) and labels.ndim == 2 and not labels.is_floating_point()


def _count_samples(inputs: Mapping[str, Any], samples: Sequence[Any] | None) -> int:
    return len(samples) if samples is not None else describe(inputs).count
