"""Remembers, for each kind of evaluation batch, how the losses and the logged values of its parts are put together.

Covers several evaluation datasets, each of which may have a loss of its own. Does not cover how it is found:
``evaluation_loss``, ``trainer_logs``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from autobatch.integrations.transformers.evaluation_loss import EvaluationLoss
from autobatch.integrations.transformers.known_rules import _kind_of
from autobatch.integrations.transformers.trainer_logs import Key, Way

__all__ = ["EvaluationKind", "EvaluationKinds"]

_log = logging.getLogger("autobatch")

_MOST_KINDS = 32
"""More are no datasets but texts that differ in each batch, such as names of files; each costs passes of its own."""
_DATASET = "dataset_name"
"""Where sentence-transformers names the dataset, by which it takes the loss: never one of those texts."""


@dataclass
class EvaluationKind:
    """What is known of the batches of one kind.

    Attributes:
        loss: How losses are put together.
        log_ways: How logged values are, by call and name.
        knows_logs: Whether that was looked for.
    """

    loss: EvaluationLoss
    log_ways: dict[tuple[Key, str], Way] = field(default_factory=dict)
    knows_logs: bool = False


class EvaluationKinds:
    """The kinds of batches that ran in parts."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._known = trainer, dict[str, EvaluationKind]()
        self._has_warned = False

    def find(self, inputs: Any) -> EvaluationKind:
        """What is known of the kind of a batch: nothing, where none of it has come before."""
        kind = _kind_of(inputs)
        if kind not in self._known and len(self._known) >= _MOST_KINDS and isinstance(inputs, Mapping):
            texts = {name: "" for name, value in inputs.items() if isinstance(value, str) and name != _DATASET}
            self._warn(texts)
            kind = _kind_of({**inputs, **texts})
        return self._known.setdefault(kind, EvaluationKind(EvaluationLoss(self._trainer)))

    def _warn(self, texts: Collection[str]) -> None:
        if texts and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "autobatch: evaluation batches of %s have come in %d kinds: those that differ by a new text in %s only "
                "are one kind from now on, whose parts' losses are put together in one way",
                type(self._trainer).__name__,
                len(self._known),
                ", ".join(texts),
            )
