"""Makes one entry of a step's metrics from those of its micro-batches, as a whole batch would have logged.

Covers TRL's Trainers, whose ``compute_loss`` appends to lists in ``trainer._metrics`` (in ``trainer._stored_metrics``:
CPO, ORPO and older ones) and whose ``log`` takes the mean of each: means over tokens (of SFT and DPO), over samples,
over the desirable ones (of KTO), smallest and largest values, sums and counts. Does not cover means over padding, such
as the logits of CPO: which padding the whole batch has is not known to its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from autobatch.integrations.transformers.cuts import IGNORED

__all__ = ["MetricLengths", "StepMetrics"]

_TABLES = "_metrics", "_stored_metrics"
"""Where TRL's Trainers have their lists, by ``"train"`` or ``"eval"``."""
_CHOSEN, _REJECTED, _MARGINS = "rewards/chosen", "rewards/rejected", "rewards/margins"
_TOTAL = "_total_train_tokens"
"""Where TRL adds up the tokens of all ranks."""


Exchange = Callable[[Any], list[Any]]
"""Sends something to all ranks; returns what each has sent."""


class MetricLengths:
    """How many entries each list of metrics had at one moment: one for each step since the last log, of any number."""

    def __init__(self, trainer: Any) -> None:
        held = [getattr(trainer, name, None) for name in _TABLES]
        self._taken = [(modes, _lengths_of(modes)) for modes in held if isinstance(modes, dict)]

    def shorten(self) -> None:
        """Take out the entries, lists and tables that have come since."""
        for modes, taken in self._taken:
            for mode, lengths in _lengths_of(modes).items():
                if mode not in taken:
                    del modes[mode]
                    continue
                for name in lengths:
                    if name in taken[mode]:
                        del modes[mode][name][taken[mode][name] :]
                    else:
                        del modes[mode][name]


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
        return any(isinstance(getattr(self._trainer, name, None), dict) for name in _TABLES)

    def begin(self) -> None:
        """Remember what is there before the step."""
        self.tokens.clear()
        self._before = {name: len(entries) for name, entries in self._lists().items()}
        self._total_before = getattr(self._trainer, _TOTAL, 0)

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a micro-batch, if metrics need them."""
        if self.are_there():
            self.tokens.append(_count_tokens(inputs, full_texts=hasattr(self._trainer, "odds_ratio_loss")))  # ORPO's

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
        self._set_margins()
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
            key = name.removeprefix("eval_")
            is_counted = len(self.tokens) == len(samples) and all(key in tokens for tokens in self.tokens)
            weights = [tokens[key] for tokens in self.tokens] if is_counted else samples
            if len(values) < len(weights):
                weights = [weight for weight in weights if weight]  # KTO has no entry for what is not there
            if values and len(values) == len(weights) and name != "num_tokens":
                found[name] = values, weights
        return found

    def _set_margins(self) -> None:
        """KTO's are a difference of two means, each over other samples: a mean of differences is another number."""
        lists = self._lists()
        if not all(_CHOSEN in tokens for tokens in self.tokens) or not self.tokens:
            return
        means = [lists.get(name, [])[self._before.get(name, 0) :] for name in (_CHOSEN, _REJECTED)]
        if all(means):
            margins = self._tables()[0].setdefault(_MARGINS, [])
            margins[self._before.get(_MARGINS, 0) :] = [means[0][0] - means[1][0]]

    def _tables(self) -> list[dict[str, Any]]:
        held = [getattr(self._trainer, name, None) for name in _TABLES]
        modes = [table.get(self._mode) for table in held if isinstance(table, dict)]
        return [table for table in modes if isinstance(table, dict)]

    def _lists(self) -> dict[str, list[Any]]:
        named = [item for table in self._tables() for item in table.items()]
        return {name: entries for name, entries in named if isinstance(entries, list)}


def _lengths_of(modes: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """By mode and name."""
    tables = {mode: table for mode, table in modes.items() if isinstance(table, dict)}
    return {
        mode: {name: len(entries) for name, entries in table.items() if isinstance(entries, list)}
        for mode, table in tables.items()
    }


def _count_tokens(inputs: Mapping[str, Any], *, full_texts: bool) -> dict[str, float]:
    """What metrics are means over: tokens with a loss, by labels or masks, and desirable samples.

    Args:
        inputs: Of a micro-batch.
        full_texts: Whether the likelihood of preferred texts is that of their prompts too.
    """
    labels, completions = inputs.get("labels"), inputs.get("completion_mask")
    preferred, desirable = inputs.get("chosen_labels"), inputs.get("label")
    if isinstance(preferred, torch.Tensor):
        counted = inputs["chosen_attention_mask"] if full_texts else preferred != IGNORED
        return {"nll_loss": float(counted[:, 1:].sum())}
    if isinstance(desirable, torch.Tensor) and isinstance(completions, torch.Tensor):
        return _count_desirable(desirable.bool(), completions[:, 1:].sum(1))
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


def _count_desirable(is_desirable: torch.Tensor, tokens: torch.Tensor) -> dict[str, float]:
    """Samples of both kinds, and the tokens of their completions."""
    found = {"entropy": float(tokens.sum())}
    for name, mask in (("chosen", is_desirable), ("rejected", ~is_desirable)):
        samples = float(mask.sum())
        found |= {f"rewards/{name}": samples, f"logps/{name}": samples, f"logits/{name}": float(tokens[mask].sum())}
    return found


def _merge(name: str, values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """One value for several, and what it is a mean over."""
    total = sum(weights)
    plain = name.removeprefix("eval_")
    if plain.startswith("count/") or plain.endswith("_sum"):
        return sum(values), total
    if plain.startswith(("min_", "max_")):
        return (min(values) if plain.startswith("min_") else max(values)), total
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return (sum(products) / total if total else sum(values) / len(values)), total
