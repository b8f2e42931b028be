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

from autobatch.errors import InexactSplit, InvalidArgument
from autobatch.exactness.verification import compare_with_parts, verify
from autobatch.integrations.transformers.cuts import CollatedSamples, Cut, Rows, TrimmedRows
from autobatch.integrations.transformers.loss_rule import (
    READINGS,
    LossRule,
    Reading,
    are_proportional,
    count_by_sample,
    count_samples,
)
from autobatch.integrations.transformers.loss_values import LossValues, find_contrast, read_loss_values
from autobatch.integrations.transformers.trainer_step import TrainerStep
from autobatch.records import Verdict

__all__ = ["OTHERWISE", "cuts_for", "find_rule", "refutes"]

_log = logging.getLogger("autobatch")

_MEANS = READINGS[1:]
OTHERWISE = "; check='warn' trains anyway"
"""What only an error says, not a warning."""
_NOT_COMPARED = (
    "%s: a batch could not be compared with its parts (%s): it is divided like the last one (%s), and later batches "
    "are compared instead, less and less often"
)
_AS_IF = "; training divides it as if it could be split: {}"
_ALIKE = "are all alike"
_OF_THE_BATCH = ("has one sample", _ALIKE, "count for nothing", "is not finite")
"""What ``verify`` says where nothing can be compared in this batch, and another may tell: not that memory ended."""
_NO_PER_STEP = (
    " (in a Trainer: multiply the term by the micro-batch's share of the labels, the number of its labels / "
    "num_items_in_batch, in compute_loss)"
)
_NO_WEIGH = " (a Trainer cannot pass a count: write the loop with autobatch.Runner instead)"


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
        InvalidArgument: There is no way to divide the batch.
    """
    possible = _find_possible(step, cuts, inputs, samples)
    candidates, values = _order_candidates(step, possible, model, inputs, samples)
    guess = _guess(known, candidates, values)
    if check is None or count_samples(inputs, samples) == 1:
        return _take_values(candidates[0], values) if check is None and values.is_known else guess
    name, verdicts = type(step.trainer).__name__, list[tuple[Verdict, LossRule]]()
    for place, rule in enumerate(candidates):
        batch = rule.cut.batch_of(inputs, samples)
        verdict, compared = _compare(rule, model, batch, device, values if place < values.explained else None)
        if verdict.exact:
            its_open, is_tried = _find_open(rule.reading, compared), rule.cut.is_tried_by(inputs)
            return replace(rule, open=its_open, is_tried=is_tried, is_exact=True)
        verdicts.append((verdict, rule))
        if _ALIKE in verdict.unchecked:
            break  # whatever is asked of them
    reasons = [
        one.unchecked for one, rule in verdicts if one.unchecked and (rule.is_like(guess) or _ALIKE in one.unchecked)
    ]
    if known is not None and reasons:
        if not known.is_guess:
            _log.warning(_NOT_COMPARED, name, reasons[0], guess)
        return guess
    nearest = _find_nearest(verdicts, candidates[0] if values.is_known else None)
    if not nearest[0].unchecked:
        # Of the batch: two samples have one division, by which causes cannot be distinguished.
        rule = nearest[1]
        explained = verify(model, rule.cut.batch_of(inputs, samples), rule.run, rule.weigh, device=device)
        nearest = nearest if explained.exact or explained.unchecked else (explained, rule)
    refusal = _refuse(name, nearest[0])
    if check == "raise":
        raise refusal
    _log.warning("%s%s", f"{refusal}".removesuffix(OTHERWISE), _AS_IF.format(candidates[0]))
    return guess if any(one in nearest[0].unchecked for one in _OF_THE_BATCH) else candidates[0]


def _order_candidates(
    step: TrainerStep, possible: Sequence[Cut], model: nn.Module, inputs: Any, samples: Sequence[Any] | None
) -> tuple[list[LossRule], LossValues]:
    """All ways to divide and to read, those first that explain the values of losses; and what the values show."""
    for cut in possible:
        values = read_loss_values(step, cut, model, cut.batch_of(inputs, samples))
        if values.explained:
            break
    explained = itertools.product([cut], values.readings[: values.explained])
    ordered = dict.fromkeys([*explained, *itertools.product(possible, values.readings)])
    return [LossRule(cut, reading, step) for cut, reading in ordered], values


def _take_values(rule: LossRule, values: LossValues) -> LossRule:
    """A rule that only the values of losses have shown."""
    if not values.explained:
        _log.warning(
            "%s: the loss is neither a mean nor a sum%s", type(rule.step.trainer).__name__, _AS_IF.format(rule)
        )
    return replace(rule, open=_find_open(rule.reading, values.compared), is_tried=values.is_tried)


def _guess(known: LossRule | None, candidates: Sequence[LossRule], values: LossValues) -> LossRule:
    """The rule of a batch in which nothing can be compared: that of the batches before, unless values refute it."""
    possible = candidates[: values.explained] or candidates
    likeliest = possible[0]
    if known is not None and any(known.is_like(one) for one in possible):
        likeliest = known
    elif values.is_known:
        likeliest = replace(likeliest, open=_find_open(likeliest.reading, values.compared), is_tried=values.is_tried)
    return replace(likeliest, is_guess=True)


def _find_nearest(verdicts: Sequence[tuple[Verdict, LossRule]], likeliest: LossRule | None) -> tuple[Verdict, LossRule]:
    """The verdict to explain: on the reading that values show, divided in the way that was tried last."""
    nearest = min(verdicts, key=lambda one: (bool(one[0].unchecked), one[0].relative_error))
    for verdict, rule in verdicts:
        if likeliest is not None and rule.reading == likeliest.reading and not verdict.unchecked:
            nearest = verdict, rule
    return nearest


def _find_possible(
    step: TrainerStep, cuts: Sequence[Cut], inputs: Mapping[str, Any], samples: Sequence[Any] | None
) -> list[Cut]:
    """The ways to divide this batch, as far as its tensors show."""
    by_rows: list[Cut] = [cut for cut in cuts if isinstance(cut, Rows) and cut.can_divide(inputs, samples)]
    # Where each row is a sample, samples that are collated anew are the same rows.
    possible = by_rows or [cut for cut in cuts if not isinstance(cut, Rows) and cut.can_divide(inputs, samples)]
    if not possible:
        raise InvalidArgument(
            f"{type(step.trainer).__name__}: the batch cannot be divided into samples: its tensors have different "
            f"numbers of rows, and its data_collator makes another batch of the same samples"
        )
    return possible


def refutes(rule: LossRule, model: nn.Module, inputs: Any, samples: Sequence[Any] | None, device: Any) -> bool:
    """Whether a comparison of this batch with its parts shows that the rule is not exact, which held before.

    A step may change as it trains: with what it counts, or with samples of another kind. Where nothing can be compared,
    as with too little memory, nothing is shown.
    """
    verdict = compare_with_parts(model, rule.cut.batch_of(inputs, samples), rule.run, rule.weigh, device=device)
    return not verdict.exact and not verdict.unchecked


def _refuse(name: str, nearest: Verdict) -> InexactSplit:
    """Why no rule was found, and that a Trainer has none of the ways to say a count that ``verify`` advises."""
    if nearest.unchecked:
        return InexactSplit(
            f"{name}: it could not be checked whether this loss can be split: {nearest.unchecked}; check='warn' trains "
            f"anyway"
        )
    advises = any(word in cause for cause in nearest.causes for word in ("weigh=", "as its count"))
    shown = f"{nearest}{_NO_WEIGH if advises else ''}{_NO_PER_STEP if 'PerStep' in str(nearest) else ''}"
    return InexactSplit(f"{name}: no way was found to split this loss exactly: {shown}; check='warn' trains anyway")


def _compare(
    rule: LossRule, model: nn.Module, batch: Any, device: Any, values: LossValues | None
) -> tuple[Verdict, Any]:
    """The verdict on a rule, and what was compared: where no values explain it, the samples first that tell most.

    Of samples that tell most and cannot be compared, as with a gradient of 0, the batch is asked.
    """
    ends = find_contrast(rule.cut, batch) if values is None and rule.reading in _MEANS else []
    compared = rule.cut.inputs_of(batch) if values is None else values.compared
    if ends:
        contrast = rule.cut.pick(batch, ends)
        verdict = compare_with_parts(model, contrast, rule.run, rule.weigh, device=device)
        compared = compared if verdict.unchecked else rule.cut.inputs_of(contrast)
        if not verdict.exact and not verdict.unchecked:
            return verdict, compared
    return compare_with_parts(model, batch, rule.run, rule.weigh, device=device), compared


def _find_open(reading: Reading, inputs: Any) -> tuple[Reading, ...]:
    counts = count_by_sample(inputs) if reading in _MEANS else {}
    others = [other for other in counts if other != reading]
    return tuple(other for other in others if are_proportional(counts[other], counts[reading]))
