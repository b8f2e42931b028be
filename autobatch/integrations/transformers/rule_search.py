"""Finds out how a Trainer's batches are divided and what its loss is a mean over, by comparing a batch with its parts.

Covers the candidates and their order. A ``Trainer`` may divide by ``num_items_in_batch`` or ignore it, a model may take
its own mean, a subclass may do anything: nothing is assumed where it can be tried. Does not cover the rule itself
(``loss_rule``) nor the comparison (``autobatch.verify``).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from autobatch.batch.layout import describe
from autobatch.errors import InexactSplit, InvalidBatch
from autobatch.exactness.diagnosis import rank_causes
from autobatch.exactness.verification import verify
from autobatch.integrations.transformers.cuts import CollatedSamples, Cut, Rows, TrimmedRows
from autobatch.integrations.transformers.loss_rule import (
    READINGS,
    LossRule,
    Reading,
    are_proportional,
    class_labels,
    count_by_sample,
    count_samples,
)
from autobatch.integrations.transformers.trainer_step import TrainerStep
from autobatch.records import Verdict

__all__ = ["OTHERWISE", "cuts_for", "find_rule", "refutes"]

_log = logging.getLogger("autobatch")

_DIVIDED, _SHIFTED, _LABELS, _SAMPLES = READINGS
_MEANS = READINGS[1:]
OTHERWISE = "; check='warn' trains all the same"
"""What only an error says, not a warning."""
_NOT_COMPARED = (
    "autobatch: %s: a batch could not be compared with its parts (%s): it is divided as the last was (%s), and the "
    "next of its kind is compared"
)
_OF_THE_BATCH = ("has one sample", "are all alike", "count for nothing", "is not finite")
"""What ``verify`` says where nothing can be compared in this batch, and another may tell: not that memory ended."""
_NO_TERM = (
    " (in a Trainer's loss: multiply the term by the micro-batch's share of the labels, "
    "(labels[:, 1:] != -100).sum() / num_items_in_batch for a language model)"
)
_NO_WEIGH = " (a Trainer takes no count: for that write the loop with autobatch.Runner)"


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
    known: LossRule | None = None,
) -> LossRule:
    """The first rule by which parts of the batch have the whole's gradient.

    Of one sample, and of a later batch in which nothing can be compared, the rule is a guess: the one that is known.

    Args:
        step: The Trainer's.
        cuts: The ways to divide, in the order in which they are tried.
        model: Of which gradients are compared.
        inputs: The loader's batch.
        samples: What it was made of, where that is known.
        device: As in ``verify``.
        check: What to do where none is exact: ``"raise"``; ``"warn"`` in the log, and take the likeliest, as with
            ``None``, which compares nothing.
        known: The rule of the batches before; ``None`` for the first.

    Raises:
        InexactSplit: With the causes that ``verify`` names.
        InvalidBatch: There is no way to divide the batch.
    """
    possible = _find_possible(step, cuts, inputs, samples)
    readings = _order(step, inputs, has_count=check is None or step.divides(model, possible[0], inputs, samples))
    likeliest = LossRule(possible[0], readings[0], step)
    if check is None:
        return likeliest
    guess = _choose_guess(known, possible, readings) or likeliest
    if count_samples(inputs, samples) == 1:
        return replace(guess, is_guess=True)
    verdicts: list[Verdict] = []
    reason = ""
    for cut, reading in itertools.product(possible, readings):
        rule = LossRule(cut, reading, step)
        verdict, compared = _try_rule(rule, model, inputs, samples, device)
        if verdict.exact:
            return replace(rule, open=_find_open(reading, compared), is_tried=cut.is_tried_by(inputs), is_exact=True)
        verdicts.append(verdict)
        reason = verdict.unchecked if rule.is_like(guess) else reason
    if known is not None and reason:
        if not known.is_guess:
            _log.warning(_NOT_COMPARED, type(step.trainer).__name__, reason, guess)
        return replace(guess, is_guess=True)
    # A wrong reading of the loss adds a cause of its own, or hides the one that is there.
    nearest = min(verdicts, key=lambda one: (bool(one.unchecked), *rank_causes(one.causes), one.relative_error))
    refusal = _refuse(type(step.trainer).__name__, nearest)
    if check == "raise":
        raise refusal
    _log.warning("autobatch: %s", f"{refusal}".removesuffix(OTHERWISE))
    return replace(likeliest, is_guess=any(one in nearest.unchecked for one in _OF_THE_BATCH))


def _find_possible(
    step: TrainerStep, cuts: Sequence[Cut], inputs: Mapping[str, Any], samples: Sequence[Any] | None
) -> list[Cut]:
    """The ways to divide this batch, as far as its tensors show."""
    by_rows: list[Cut] = [cut for cut in cuts if isinstance(cut, Rows) and cut.can_divide(inputs, samples)]
    # Where each row is a sample, samples that are collated anew are the same rows.
    possible = by_rows or [cut for cut in cuts if not isinstance(cut, Rows) and cut.can_divide(inputs, samples)]
    if not possible:
        raise InvalidBatch(
            f"{type(step.trainer).__name__}: the batch cannot be divided into samples: its tensors have different "
            f"numbers of rows, and its data_collator does not make the same batch again of the same samples"
        )
    return possible


def _choose_guess(known: LossRule | None, possible: Sequence[Cut], readings: Sequence[Reading]) -> LossRule | None:
    """The rule of the batches before, where this one can be divided by it."""
    cuts = {cut.name for cut in possible}
    return known if known is not None and known.cut.name in cuts and known.reading in readings else None


def refutes(rule: LossRule, model: nn.Module, inputs: Any, samples: Sequence[Any] | None, device: Any) -> bool:
    """Whether a comparison of this batch with its parts shows that the rule is not exact, which held before.

    A step may change as it trains: with what it counts, or with samples of another kind. Where nothing can be compared,
    as with too little memory, nothing is shown.
    """
    verdict = verify(model, rule.cut.batch_of(inputs, samples), rule.run, rule.weigh, device=device)
    return not verdict.exact and not verdict.unchecked


def _refuse(name: str, nearest: Verdict) -> InexactSplit:
    """Why no rule was found, and that a Trainer has none of the ways to say a count that ``verify`` advises."""
    if nearest.unchecked:
        return InexactSplit(
            f"{name}: it could not be checked whether this loss can be split: {nearest.unchecked}; check='warn' trains "
            f"all the same"
        )
    advises = any(word in cause for cause in nearest.causes for word in ("weigh=", "as its count"))
    adds = any("autobatch.PerStep" in cause for cause in nearest.causes)
    shown = f"{nearest}{_NO_WEIGH if advises else _NO_TERM if adds else ''}"
    return InexactSplit(
        f"{name}: no way was found to split this loss exactly: {shown}; check='warn' trains all the same"
    )


def _try_rule(
    rule: LossRule, model: nn.Module, inputs: Mapping[str, Any], samples: Sequence[Any] | None, device: Any
) -> tuple[Verdict, Any]:
    """The verdict on a rule, and what was compared for it: first the samples that tell most, then the batch.

    Of samples that tell most and cannot be compared, as with a gradient of 0, the batch is asked.
    """
    batch = rule.cut.batch_of(inputs, samples)
    contrast = _pick_contrast(rule.cut, batch) if rule.reading in _MEANS else None
    compared = batch
    if contrast is not None:
        verdict = verify(model, contrast, rule.run, rule.weigh, device=device)
        if not verdict.exact and not verdict.unchecked:
            return verdict, rule.cut.inputs_of(contrast)
        compared = contrast if verdict.exact else batch
    return verify(model, batch, rule.run, rule.weigh, device=device), rule.cut.inputs_of(compared)


def _pick_contrast(cut: Cut, batch: Any) -> Any:
    """The samples by which means over labels and over samples differ most; ``None`` where labels are not by sample."""
    counts = count_by_sample(cut.inputs_of(batch))
    if not counts or len(counts[_LABELS]) != describe(batch).count:
        return None
    labels = counts[_LABELS]
    shifted = counts.get(_SHIFTED, labels)
    lost = [own / max(1, whole) for own, whole in zip(shifted, labels, strict=True)]
    numbers = range(len(labels))
    ends = [end(numbers, key=values.__getitem__) for values in (shifted, lost) for end in (max, min)]
    return cut.pick(batch, [*dict.fromkeys(ends)]) if len(set(ends)) > 1 else None


def _find_open(reading: Reading, inputs: Any) -> tuple[Reading, ...]:
    counts = count_by_sample(inputs) if reading in _MEANS else {}
    others = [other for other in counts if other != reading]
    return tuple(other for other in others if are_proportional(counts[other], counts[reading]))


def _order(step: TrainerStep, inputs: Any, *, has_count: bool) -> list[Reading]:
    """Readings from the likeliest to the least likely."""
    labels = class_labels(inputs)
    means: list[Reading] = [_SAMPLES]
    if labels is not None:
        means = [_SAMPLES, _LABELS] if labels.ndim == 1 else [_SHIFTED, _LABELS, _SAMPLES]
    return [_DIVIDED, *means] if has_count and step.num_items is not None else [*means, _DIVIDED]  # it may be a sum
