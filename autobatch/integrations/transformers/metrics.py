"""Makes one entry of a step's metrics from those of its micro-batches, as a whole batch would have logged.

Covers TRL's Trainers, whose ``compute_loss`` appends to lists in ``trainer._metrics`` and whose ``log`` takes the mean
of each: means over tokens (of SFT and DPO), means over samples, smallest and largest values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from autobatch.integrations.transformers.cuts import IGNORED

__all__ = ["StepMetrics"]

_TOTAL = "_total_train_tokens"
"""Where TRL adds up the tokens of all ranks."""


Exchange = Callable[[Any], list[Any]]
"""Sends something to all ranks; returns what each has sent."""


class StepMetrics:
    """The entries that one step adds.

    Attributes:
        tokens: For each micro-batch that was run the tokens that a metric is a mean over, by its name; a list that the
            Runner puts back when a micro-batch is undone.
    """

    def __init__(self, trainer: Any, mode: Literal["train", "eval"]) -> None:
        self.tokens: list[dict[str, float]] = []
        self._trainer, self._mode = trainer, mode
        self._before: dict[str, int] = {}
        self._total_before = 0

    def are_there(self) -> bool:
        """Whether the Trainer has any."""
        return isinstance(getattr(self._trainer, "_metrics", None), dict)

    def begin(self) -> None:
        """Remember what is there before the step."""
        self.tokens.clear()
        self._before = {name: len(entries) for name, entries in self._lists().items()}
        self._total_before = getattr(self._trainer, _TOTAL, 0)

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a micro-batch, if metrics need them."""
        if self.are_there():
            self.tokens.append(_count_tokens(inputs))

    def merge(self, samples: Sequence[int], exchange: Exchange | None = None) -> None:
        """Put one entry in the place of those of the step's micro-batches.

        Args:
            samples: Of each micro-batch.
            exchange: Where there are several ranks, each of which has its own.
        """
        if not self.are_there() or (exchange is None and len(samples) < 2):
            return
        found = {name: _merge(name, *added) for name, added in self._added(samples).items()}
        total = getattr(self._trainer, _TOTAL, 0) - self._total_before
        all_of_them = [(found, total)] if exchange is None else exchange((found, total))
        for name, entries in self._lists().items():
            parts = [its[name] for its, _ in all_of_them if name in its]
            if parts:
                entries[self._before.get(name, 0) :] = [_merge(name, *zip(*parts, strict=True))[0]]
        if exchange is not None and hasattr(self._trainer, _TOTAL):
            total = self._total_before + sum(its for _, its in all_of_them)
            setattr(self._trainer, _TOTAL, total)
            if "num_tokens" in self._lists():
                self._lists()["num_tokens"][:] = [total]

    def _added(self, samples: Sequence[int]) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        """Each metric's values of this step, and what they are means over."""
        found: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for name, entries in self._lists().items():
            values = entries[self._before.get(name, 0) :]
            if len(values) == len(samples) and name != "num_tokens":
                is_counted = len(self.tokens) == len(values) and all(name in tokens for tokens in self.tokens)
                found[name] = values, [tokens[name] for tokens in self.tokens] if is_counted else samples
        return found

    def _lists(self) -> dict[str, list[Any]]:
        metrics = getattr(self._trainer, "_metrics", None)
        lists = metrics.get(self._mode, {}) if isinstance(metrics, dict) else {}
        return {name: entries for name, entries in lists.items() if isinstance(entries, list)}


def _count_tokens(inputs: Mapping[str, Any]) -> dict[str, float]:
    """Tokens that have a loss: by labels, or by the mask of completions, where the preferred ones come first."""
    labels, completions = inputs.get("labels"), inputs.get("completion_mask")
    if isinstance(labels, torch.Tensor) and labels.ndim == 2:
        return dict.fromkeys(("entropy", "mean_token_accuracy"), float((labels[:, 1:] != IGNORED).sum()))
    if not isinstance(completions, torch.Tensor):
        return {}
    chosen, rejected = (float(half[:, 1:].sum()) for half in completions.chunk(2))
    return {
        "entropy": chosen + rejected,
        "mean_token_accuracy": chosen,
        "logits/chosen": chosen,
        "logits/rejected": rejected,
    }


def _merge(name: str, values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """One value for several, and what it is a mean over."""
    total = sum(weights)
    if name.startswith(("min_", "max_")):
        return (min(values) if name.startswith("min_") else max(values)), total
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return (sum(products) / total if total else sum(values) / len(values)), total
