"""Puts together what the micro-batches of a step log, so that it is logged once, with the whole batch's values.

Numbers are averaged: a micro-batch weighs what ``weigh=`` returns, else what the Trainer counts, else its samples.
TRL's ``compute_loss`` appends means, extremes, sums and counts to lists, of which the Trainer's ``log`` takes the mean.
Means over padding, such as the logits of CPO, cannot be restored: parts do not know the padding of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autobatch.integrations.attributes import is_number, replaced, weighted_mean
from autobatch.integrations.transformers.cuts import IGNORED

TABLES = "_metrics", "_stored_metrics"  # TRL's lists, by "train" or "eval"
_TOTAL = "_total_train_tokens"  # where TRL adds up the tokens of all ranks
_CHOSEN, _REJECTED, _MARGINS = "rewards/chosen", "rewards/rejected", "rewards/margins"

Exchange = Callable[[Any], Sequence[Any]]  # sends something to all ranks; returns what each has sent


@dataclass(frozen=True)
class _LogCall:
    values: Mapping[str, Any]
    rest: tuple[Any, ...]  # further arguments
    named: Mapping[str, Any]


class TrainerLogs:
    """Calls of ``log`` by the micro-batches of one step, as an object that a Runner keeps."""

    def __init__(self, trainer: Any, weigh: Callable[[Any], Any] | None) -> None:
        self._trainer, self._weigh = trainer, weigh
        self._count_items = trainer._get_num_items_in_batch  # noqa: SLF001 - nothing public counts as the Trainer does
        # The calls of each micro-batch, and its weight; ``None`` for its number of samples.
        self.micro_batches: list[tuple[Sequence[_LogCall], float | None]] = []

    def take(self) -> Any:
        return [*self.micro_batches]

    def put(self, taken: Any) -> None:
        self.micro_batches[:] = taken

    @contextmanager
    def catch(self, inputs: Any) -> Iterator[None]:
        """Hold back what ``log`` gets inside the block: it becomes one micro-batch of the step."""
        calls: list[_LogCall] = []
        whole = dict(inputs) if isinstance(inputs, Mapping) else inputs  # the Trainer's code may take entries out

        def log(logs: Mapping[str, Any], *rest: Any, **named: Any) -> None:
            values = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in logs.items()}
            calls.append(_LogCall(values, rest, named))

        with replaced(self._trainer, "log", log):
            yield
        weight = None
        if calls and self._weigh is not None:
            weight = self._weigh(whole)
        elif calls and isinstance(whole, Mapping):
            weight = self._count_items([whole], self._trainer.args.device)
        self.micro_batches.append((calls, None if weight is None else float(weight)))

    def write(self, samples: Sequence[int]) -> None:
        """Log what the step's micro-batches have logged, once; ``samples`` has their sizes."""
        groups: dict[tuple[tuple[str, ...], int], list[tuple[_LogCall, float]]] = {}
        for (calls, weight), count in zip(self.micro_batches, samples, strict=False):
            seen: list[tuple[str, ...]] = []
            for call in calls:
                names = tuple(call.values)
                # The second call with the same names belongs to the second one of the other micro-batches.
                groups.setdefault((names, seen.count(names)), []).append((call, count if weight is None else weight))
                seen.append(names)
        self.micro_batches.clear()
        for group in groups.values():
            last = group[-1][0]
            values = {name: _average([(call.values[name], weight) for call, weight in group]) for name in last.values}
            self._trainer.log(values, *last.rest, **last.named)


def _average(values: Sequence[tuple[Any, float]]) -> Any:
    """Return the mean; the last value if they are not all numbers."""
    if len(values) == 1 or not all(is_number(value) for value, _ in values):
        return values[-1][0]
    return weighted_mean([value for value, _ in values], [weight for _, weight in values])


# ------------------------------------------------------------------------------------------------- TRL's metrics


class StepMetrics:
    """The entries that one step adds; the Runner restores ``weights``."""

    def __init__(self, trainer: Any, mode: Literal["train", "eval"]) -> None:
        self.weights: list[dict[str, float]] = []  # of each micro-batch, by name of metrics that are means over tokens
        self._trainer, self._mode = trainer, mode
        self._before: dict[str, int] = {}
        self._total_before = 0

    def are_there(self) -> bool:
        return any(isinstance(getattr(self._trainer, name, None), dict) for name in TABLES)

    def begin(self) -> None:
        """Remember the number of entries before the step."""
        self.weights.clear()
        self._before = {name: len(entries) for name, entries in self._lists().items()}
        self._total_before = getattr(self._trainer, _TOTAL, 0)

    def add(self, inputs: Mapping[str, Any]) -> None:
        if self.are_there():
            # In ORPO, the likelihood of preferred texts includes their prompts.
            self.weights.append(_weigh(inputs, full_texts=hasattr(self._trainer, "odds_ratio_loss")))

    def merge(self, samples: Sequence[int], exchange: Exchange | None = None) -> None:
        """Replace the entries of the step's micro-batches, which have so many ``samples``, by one for all ranks."""
        if not self.are_there() or (exchange is None and len(samples) < 2):
            return
        found = {name: _merge(name, *added) for name, added in self._added(samples).items()}
        total = getattr(self._trainer, _TOTAL, 0) - self._total_before
        all_of_them = [(found, total)] if exchange is None else exchange((found, total))
        lists = self._lists()
        for name, entries in lists.items():
            parts = [its[name] for its, _ in all_of_them if name in its]
            if parts:
                entries[self._before.get(name, 0) :] = [_merge(name, *zip(*parts, strict=True))[0]]
        if self.weights and all(_CHOSEN in weights for weights in self.weights):
            # KTO's margin is the difference of two means over different samples.
            means = [lists.get(kind, [])[self._before.get(kind, 0) :] for kind in (_CHOSEN, _REJECTED)]
            if all(means):
                margins = self._tables()[0].setdefault(_MARGINS, [])
                margins[self._before.get(_MARGINS, 0) :] = [means[0][0] - means[1][0]]
        if exchange is not None and hasattr(self._trainer, _TOTAL):
            total = self._total_before + sum(its for _, its in all_of_them)
            setattr(self._trainer, _TOTAL, total)
            if "num_tokens" in lists:
                lists["num_tokens"][:] = [total]

    def _added(self, samples: Sequence[int]) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        """Return each metric's values of this step, with their weights."""
        found: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for name, entries in self._lists().items():
            values = entries[self._before.get(name, 0) :]
            key = name.removeprefix("eval_")
            is_weighed = len(self.weights) == len(samples) and all(key in weights for weights in self.weights)
            own: Sequence[float] = [weights[key] for weights in self.weights] if is_weighed else samples
            if len(values) < len(own):
                own = [weight for weight in own if weight]  # KTO adds no entry if a micro-batch has no such sample
            if values and len(values) == len(own) and name != "num_tokens":
                found[name] = values, own
        return found

    def _tables(self) -> list[dict[str, Any]]:
        held = [getattr(self._trainer, name, None) for name in TABLES]
        modes = [table.get(self._mode) for table in held if isinstance(table, dict)]
        return [table for table in modes if isinstance(table, dict)]

    def _lists(self) -> dict[str, list[Any]]:
        named = [item for table in self._tables() for item in table.items()]
        return {name: entries for name, entries in named if isinstance(entries, list)}


def _weigh(inputs: Mapping[str, Any], *, full_texts: bool) -> dict[str, float]:
    """Return the weights of a micro-batch by metric: tokens with a loss, by labels or masks, or desirable samples."""
    labels, completions = inputs.get("labels"), inputs.get("completion_mask")
    preferred, desirable = inputs.get("chosen_labels"), inputs.get("label")
    if isinstance(preferred, torch.Tensor):
        counted = inputs["chosen_attention_mask"] if full_texts else preferred != IGNORED
        return {"nll_loss": float(counted[:, 1:].sum())}
    if isinstance(desirable, torch.Tensor) and isinstance(completions, torch.Tensor):
        tokens = completions[:, 1:].sum(1)
        found = {"entropy": float(tokens.sum())}
        for name, mask in (("chosen", desirable.bool()), ("rejected", ~desirable.bool())):
            kinds = float(mask.sum())
            found |= {f"rewards/{name}": kinds, f"logps/{name}": kinds, f"logits/{name}": float(tokens[mask].sum())}
        return found
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
    """Return one value for several, and its weight."""
    total = sum(weights)
    plain = name.removeprefix("eval_")
    if plain.startswith("count/") or plain.endswith("_sum"):
        return sum(values), total
    if plain.startswith(("min_", "max_")):
        return (min(values) if plain.startswith("min_") else max(values)), total
    return weighted_mean(values, weights), total
