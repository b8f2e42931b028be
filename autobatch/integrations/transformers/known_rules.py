"""Remembers the rule of each kind of batch, and makes one of several that is exact for all.

Covers batches that may have losses of their own, such as those of several datasets, also where ranks are at different
ones; which of them are compared again, and what a checkpoint saves. Does not cover how a rule is found:
``rule_search``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autobatch.integrations.transformers.cuts import Cut
from autobatch.integrations.transformers.loss_rule import READINGS, LossRule, Reading
from autobatch.integrations.transformers.trainer_step import TrainerStep

__all__ = ["DATASET", "KnownRules", "agree", "choose_likeliest", "entries_of", "join", "name_kind"]

_log = logging.getLogger("autobatch")

_MOST_TEXTS = 8
"""Values of an entry that is a text, after which it is taken for a file's name or the like; not the next:"""
_LEFT_OUT = (
    "%s: the text %r of a batch has had %d values, and none changed how the loss is divided, so it is ignored from now "
    "on: if the loss depends on it, name it 'dataset_name'"
)
DATASET = "dataset_name"
"""Where sentence-transformers names the dataset of a batch, by which it takes the loss."""


class KnownRules:
    """The rules of one ``train()``, by kind of batch.

    Args:
        name: The Trainer's, for warnings.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._rules: dict[str, LossRule] = {}
        self._entries: dict[str, Mapping[str, str | int]] = {}
        self._left_out: set[str] = set()
        self._batches = 0
        self._asked = Counter[str]()
        self._gathered: Sequence[Mapping[str, str | int]] = ()
        self._kinds: list[str] = []

    def begin(self) -> None:
        """Forget the rules of an earlier ``train()``."""
        self._rules, self._entries, self._left_out, self._batches = {}, {}, set(), 0
        self._asked.clear()

    def find(self, gathered: Sequence[Mapping[str, str | int]]) -> LossRule | None:
        """The rule for the next batch; ``None`` where none of its kind has come before.

        Args:
            gathered: Entries of each rank's batch. Batches of different kinds have one rule if it is exact for
                each.
        """
        self._batches, self._gathered = self._batches + 1, gathered
        self._kinds = [name_kind(entries, self._left_out) for entries in gathered]
        self._entries.update(zip(self._kinds, gathered, strict=True))
        if self._together in self._rules:
            return self._rules[self._together]
        rules = [self._rules[kind] for kind in dict.fromkeys(self._kinds) if kind in self._rules]
        return join(rules) if len(rules) == len(set(self._kinds)) else None

    def add(self, found: Sequence[LossRule]) -> LossRule | None:
        """The rule for the batches that ``find`` was asked for, of those that each rank has found.

        ``None`` where none is exact for all.
        """
        rules = {}
        for kind in dict.fromkeys(self._kinds):
            its = [rule for own, rule in zip(self._kinds, found, strict=True) if own == kind]
            if (rule := agree(its)) is None:
                return None
            rules[kind] = rule
        if (joined := join([*rules.values()])) is not None:
            self._rules.update(rules)
            self._leave_out_texts()
        return joined

    def insist(self, rule: LossRule) -> LossRule:
        """A rule for these batches that is not exact for all."""
        self._rules[self._together] = rule
        return rule

    def is_compared(self, rule: LossRule) -> bool:
        """Whether this batch, by its number, is compared again: 2, 4, 8, ...; not where the rule is no exact one."""
        return rule.is_exact and self._batches > 1 and _is_power_of_two(self._batches)

    def is_asked_again(self) -> bool:
        """Whether this batch is asked, of a kind of which none could be compared yet: the 1st, 2nd, 4th, ... of them.

        Training on one sample repeated would else look for a comparison in each step.
        """
        self._asked[self._together] += 1
        return _is_power_of_two(self._asked[self._together])

    def state(self, rule: LossRule) -> dict[str, Any]:
        """What a checkpoint has of the rule of the last batch."""
        flags = {"is_tried": rule.is_tried, "is_exact": rule.is_exact, "is_guess": rule.is_guess}
        kind = self._together
        kinds = {"kind": kind, "left_out": sorted(self._left_out)}
        return {**kinds, "cut": rule.cut.name, "reading": rule.reading, "open": rule.open, **flags}

    def load(self, saved: Mapping[str, Any], cuts: Sequence[Cut], step: TrainerStep) -> LossRule | None:
        """The rule of a checkpoint, known from now on; ``None`` where its cut is none of these."""
        cut = next((cut for cut in cuts if cut.name == saved["cut"]), None)
        if cut is None:
            return None
        flags = {name: saved.get(name, False) for name in ("is_tried", "is_exact", "is_guess")}
        rule = LossRule(cut, saved["reading"], step, tuple(saved["open"]), **flags)
        self._left_out = {*saved.get("left_out", ())}
        self._rules[saved.get("kind", "")] = rule
        return rule

    @property
    def _together(self) -> str:
        """The kinds of all ranks' batches, in one text."""
        return " and ".join(sorted(set(self._kinds)))

    def _leave_out_texts(self) -> None:
        """Leave texts out of kinds that differ in each batch and change nothing, such as names of files."""
        texts = {name for entries in self._gathered for name, value in entries.items() if isinstance(value, str)}
        for name in sorted(texts - self._left_out - {DATASET}):
            values = {entries[name] for entries in self._entries.values() if name in entries}
            if len(values) >= _MOST_TEXTS and (rules := self._join_without(name)) is not None:
                _log.warning(_LEFT_OUT, self._name, name, len(values))
                self._left_out.add(name)
                self._rules = rules
                self._entries = {name_kind(its, self._left_out): its for its in self._entries.values()}
                self._kinds = [name_kind(its, self._left_out) for its in self._gathered]

    def _join_without(self, name: str) -> dict[str, LossRule] | None:
        """The rules by kinds without this text; ``None`` where rules differ by it."""
        groups: dict[str, list[LossRule]] = {}
        for kind, entries in self._entries.items():
            if kind in self._rules:
                groups.setdefault(name_kind(entries, {*self._left_out, name}), []).append(self._rules[kind])
        joined = {kind: join(rules) for kind, rules in groups.items()}
        known = {kind: rule for kind, rule in joined.items() if rule is not None}
        return known if len(known) == len(groups) else None


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def entries_of(inputs: Any) -> dict[str, str | int]:
    """The names of a batch's entries, with the dimensions of tensors and the value of texts; -1 for all others."""
    entries = inputs.items() if isinstance(inputs, Mapping) else ()
    return {str(name): v if isinstance(v, str) else getattr(v, "ndim", -1) for name, v in entries}


def name_kind(entries: Mapping[str, str | int], left_out: Collection[str] = ()) -> str:
    """What tells kinds of batches apart, in one text."""
    return ", ".join(sorted(f"{name} {'' if name in left_out else value}" for name, value in entries.items()))


def agree(rules: Sequence[LossRule]) -> LossRule | None:
    """The rule of one loss, of which each rank has compared another batch; ``None`` where none is exact on all.

    What one rank has found out holds for the others.
    """
    compared = [rule for rule in rules if not rule.is_guess] or [*rules]
    common = _make_common(rules, lambda reading: all(reading in rule.readings for rule in compared))
    if common is None:
        return None
    is_tried, is_exact = any(rule.is_tried for rule in compared), all(rule.is_exact for rule in compared)
    return replace(common, is_tried=is_tried, is_exact=is_exact)


def join(rules: Sequence[LossRule]) -> LossRule | None:
    """A rule that is exact for losses of several kinds in one step; ``None`` where there is none.

    What is open for one of them stays open.
    """
    common = _make_common(rules, lambda reading: any(reading in rule.readings for rule in rules))
    if common is None:
        return None
    is_tried, is_exact = all(rule.is_tried for rule in rules), all(rule.is_exact for rule in rules)
    return replace(common, is_tried=is_tried, is_exact=is_exact, is_guess=any(rule.is_guess for rule in rules))


def choose_likeliest(rules: Sequence[LossRule]) -> LossRule:
    """The one to take where none is exact for all."""
    reading = max(rules, key=lambda rule: READINGS.index(rule.reading))
    return replace(reading, cut=_find_last_cut(rules), is_exact=False)


def _make_common(rules: Sequence[LossRule], stays_open: Callable[[Reading], bool]) -> LossRule | None:
    """The first rule with a reading that none that was compared has refuted, and the other readings that stay open."""
    compared = [rule for rule in rules if not rule.is_guess] or rules
    common = [one for one in compared[0].readings if all(one in rule.readings for rule in compared)]
    if not common:
        return None
    still_open = tuple(one for one in READINGS if one != common[0] and stays_open(one))
    return replace(compared[0], reading=common[0], cut=_find_last_cut(rules), open=still_open)


def _find_last_cut(rules: Sequence[LossRule]) -> Cut:
    """Others were tried before it, in vain."""
    return max((rule.cut for rule in rules), key=lambda cut: cut.place)
