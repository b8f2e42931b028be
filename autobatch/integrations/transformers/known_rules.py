"""Remembers what was found for each kind of batch: batches of one kind have one loss, and show equally much of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from autobatch.integrations.transformers.cuts import count_labels, has_unequal_lengths

_log = logging.getLogger("autobatch")
_T = TypeVar("_T")

Kind = frozenset[tuple[str, str | int]]

_DATASET = "dataset_name"  # where sentence-transformers names the dataset, by which it chooses the loss
_MOST_TEXTS = 8  # values of another text; after these it is taken for the name of a file or the like


class KnownRules(Generic[_T]):
    """Rules by kind of batch. Two rules with the same ``str`` treat batches alike."""

    def __init__(self, name: str) -> None:
        """Remember nothing; ``name`` is for warnings."""
        self._name = name
        self.clear()

    def clear(self) -> None:
        self._rules: dict[Kind, _T] = {}
        self._batches = Counter[Kind]()
        self._ignored: set[str] = set()

    def find(self, inputs: Any, samples: int) -> tuple[Kind, _T | None]:
        """Count a batch; return its kind, and the rule of that kind if there is one."""
        kind = kind_of(inputs, samples, self._ignored)
        self._batches[kind] += 1
        return kind, self._rules.get(kind)

    def is_due(self, kind: Kind) -> bool:
        """Return whether the last batch of this kind, by its number, is compared with its parts: 1, 2, 4, 8, ..."""
        number = self._batches[kind]
        return number & (number - 1) == 0

    def add(self, kind: Kind, rule: _T) -> None:
        """Remember a rule; ignore from now on what a text adds to kinds, if it has many values that change no rule."""
        self._rules[kind] = rule
        for name in sorted({name for name, value in kind if isinstance(value, str)} - {_DATASET}):
            values = {value for known in self._rules for other, value in known if other == name}
            alike: dict[Kind, list[Kind]] = {}
            for known in self._rules:
                alike.setdefault(frozenset(entry for entry in known if entry[0] != name), []).append(known)
            is_needed = any(len({str(self._rules[kind]) for kind in kinds}) > 1 for kinds in alike.values())
            if len(values) >= _MOST_TEXTS and not is_needed:
                self._ignored.add(name)
                self._batches = Counter({one: sum(self._batches[kind] for kind in alike[one]) for one in alike})
                self._rules = {one: self._rules[kinds[0]] for one, kinds in alike.items()}
                _log.warning(
                    "%s: the text %r of a batch has had %d values, and none changed how the loss is divided, so it is "
                    "ignored from now on: if the loss depends on it, name it %r",
                    self._name,
                    name,
                    len(values),
                    _DATASET,
                )


def kind_of(inputs: Any, samples: int, ignored: set[str]) -> Kind:
    """Return names, dimensions and texts of a batch, and whether its samples differ in length or number of labels."""
    entries = inputs.items() if isinstance(inputs, Mapping) else ()
    shown: list[tuple[str, str | int]] = [
        (str(name), value if isinstance(value, str) else getattr(value, "ndim", -1))
        for name, value in entries
        if name not in ignored
    ]
    shown.append(("unequal lengths", has_unequal_lengths(inputs)))
    shown.append(("unequal labels", len(set(count_labels(inputs, samples))) > 1))
    return frozenset(shown)
