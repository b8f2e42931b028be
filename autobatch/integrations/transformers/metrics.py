"""Makes one entry of a step's metrics from those of its micro-batches, as a whole batch would have logged.

Covers TRL's Trainers, whose ``compute_loss`` appends to lists in ``trainer._metrics`` and whose ``log`` takes the mean of
each: means over tokens (of SFT and DPO), means over samples, smallest and largest values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from autobatch.integrations.transformers.cuts import IGNORED

__all__ = ["StepMetrics"]


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

    def begin(self) -> None:
        """Remember what is there before the step."""
        self.tokens.clear()
        self._before = {name: len(entries) for name, entries in self._lists().items()}

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a micro-batch, if metrics need them."""
        if hasattr(self._trainer, "_metrics"):
            self.tokens.append(_count_tokens(inputs))

    def merge(self, samples: Sequence[int]) -> None:
        """Put one entry in the place of those of the step's micro-batches.

        Args:
            samples: Of each micro-batch.
        """
        for name, entries in self._lists().items():
            start = self._before.get(name, 0)
            added = entries[start:]
            if len(added) == len(samples) > 1:
                is_counted = len(self.tokens) == len(added) and all(name in tokens for tokens in self.tokens)
                weights = [tokens[name] for tokens in self.tokens] if is_counted else samples
                entries[start:] = [_merge(name, added, weights)]

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


def _merge(name: str, values: Sequence[float], weights: Sequence[float]) -> float:
    if name.startswith(("min_", "max_")):
        return min(values) if name.startswith("min_") else max(values)
    total = sum(weights)
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return sum(products) / total if total else sum(values) / len(values)
