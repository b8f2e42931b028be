"""Makes one rule of those that were found on several ranks, or of several kinds of batches.

Covers which of them is exact for all. Does not cover how each was found (``loss_rule``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autobatch.integrations.transformers.cuts import Cut
from autobatch.integrations.transformers.loss_rule import READINGS, LossRule

__all__ = ["agree", "choose_likeliest", "join"]


def agree(rules: Sequence[LossRule]) -> LossRule | None:
    """The rule of one loss, of which each rank has compared another batch; ``None`` where none is exact on all.

    What one rank has found out holds for the others.
    """
    compared = [rule for rule in rules if not rule.is_guess] or [*rules]
    common = _find_common(compared)
    if common is None:
        return None
    return replace(
        common,
        cut=_find_last_cut(rules),
        open=tuple(one for one in READINGS if one != common.reading and all(one in rule.readings for rule in compared)),
        is_tried=any(rule.is_tried for rule in compared),
        is_exact=all(rule.is_exact for rule in compared),
    )


def join(rules: Sequence[LossRule]) -> LossRule | None:
    """A rule that is exact for losses of several kinds in one step; ``None`` where there is none.

    What is open for one of them stays open.
    """
    common = _find_common([rule for rule in rules if not rule.is_guess] or rules)
    if common is None:
        return None
    return replace(
        common,
        cut=_find_last_cut(rules),
        open=tuple(one for one in READINGS if one != common.reading and any(one in rule.readings for rule in rules)),
        is_tried=all(rule.is_tried for rule in rules),
        is_exact=all(rule.is_exact for rule in rules),
        is_guess=any(rule.is_guess for rule in rules),
    )


def choose_likeliest(rules: Sequence[LossRule]) -> LossRule:
    """The one to take where none is exact for all."""
    reading = max(rules, key=lambda rule: READINGS.index(rule.reading))
    return replace(reading, cut=_find_last_cut(rules), is_exact=False)


def _find_common(rules: Sequence[LossRule]) -> LossRule | None:
    """The first with a reading that none of them has refuted."""
    common = [one for one in rules[0].readings if all(one in rule.readings for rule in rules)]
    return replace(rules[0], reading=common[0]) if common else None


def _find_last_cut(rules: Sequence[LossRule]) -> Cut:
    """Others were tried before it, in vain."""
    return max((rule.cut for rule in rules), key=lambda cut: cut.place)
