"""Divides a Trainer's batch along its samples: by rows, by rows without the padding, or by collating samples anew.

Covers what the Runner is given to divide, and what the Trainer's ``training_step`` is given of a micro-batch. Which of
the ways is exact is found by trying (``rule_search``): two rows may be one sample (a preference pair), and all samples
may be one row (packing).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autobatch.batch.samples import describe
from autobatch.batch.tree import map_tensors
from autobatch.errors import InvalidArgument
from autobatch.integrations.transformers.samples import Collated, copy_samples

__all__ = ["IGNORED", "CollatedSamples", "Cut", "Rows", "TrimmedRows", "count_rows"]

IGNORED = -100
"""The label of a position that has no loss, as everywhere in Hugging Face's libraries."""
_MASK = "attention_mask"


class Cut(ABC):
    """One way to divide a batch.

    Attributes:
        name: As logs and checkpoints have it.
        place: In the order in which they are tried.
    """

    name: str
    place: int

    @abstractmethod
    def can_divide(self, inputs: Mapping[str, Any], samples: Sequence[Any] | None) -> bool:
        """Whether this batch can be divided in this way, as far as its tensors show."""

    def batch_of(self, inputs: Mapping[str, Any], samples: Sequence[Any] | None, largest: int = 1) -> Any:
        """What the Runner divides.

        Args:
            inputs: The loader's batch.
            samples: What it was made of, where that is known.
            largest: The most samples of a micro-batch: a batch that is run whole stays as it is.
        """
        return inputs

    def inputs_of(self, micro_batch: Any) -> Any:
        """What the Trainer is given of a micro-batch."""
        return micro_batch

    def is_tried_by(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a comparison of these rows with their parts shows that this way is exact for others."""
        return True

    def pick(self, batch: Any, indices: Sequence[int]) -> Any:
        """These samples of what ``batch_of`` has returned."""
        rows, picked = describe(batch).count, torch.tensor(indices)
        if not isinstance(batch, Mapping):
            return map_tensors(batch, lambda value: value[picked.to(value.device)])
        are_rows = {
            name for name, value in batch.items() if isinstance(value, torch.Tensor) and value.shape[:1] == (rows,)
        }
        return {name: value[picked.to(value.device)] if name in are_rows else value for name, value in batch.items()}


class Rows(Cut):
    """Rows of all tensors, where each sample has one."""

    name, place = "rows", 1

    def can_divide(self, inputs: Mapping[str, Any], samples: Sequence[Any] | None) -> bool:
        """Whether it has as many rows as samples."""
        rows = count_rows(inputs)
        return rows is not None and (samples is None or rows == len(samples))


class TrimmedRows(Rows):
    """Rows, the longest first, each micro-batch without the columns that are padding in all of its rows."""

    name, place = "rows without padding", 0

    def can_divide(self, inputs: Mapping[str, Any], samples: Sequence[Any] | None) -> bool:
        """Whether, besides, masks show what is padding."""
        return bool(_groups_of(inputs)) and super().can_divide(inputs, samples)

    def batch_of(self, inputs: Mapping[str, Any], samples: Sequence[Any] | None, largest: int = 1) -> Any:
        """The rows in order of their length, so that neighbours have about the same."""
        lengths = [_last_used(group) for group in _groups_of(inputs)]
        are_rows = all(isinstance(value, torch.Tensor) and value.ndim for value in inputs.values())
        if not lengths or not are_rows or len(lengths[0]) <= largest:
            return inputs
        order = torch.stack(lengths).amax(0).argsort(descending=True, stable=True)
        return {name: value[order.to(value.device)] for name, value in inputs.items()}

    def is_tried_by(self, inputs: Mapping[str, Any]) -> bool:
        """Whether some of its rows are shorter than others: without that nothing was cut off."""
        return any(len(set(_last_used(group).tolist())) > 1 for group in _groups_of(inputs))

    def inputs_of(self, micro_batch: Any) -> Any:
        """The micro-batch, without columns that no row uses."""
        trimmed = dict(micro_batch)
        for group in _groups_of(micro_batch):
            longest = int(_last_used(group).amax())
            trimmed |= {name: value[:, :longest].contiguous() for name, value in group.items()}  # models call view()
        return trimmed


class CollatedSamples(Cut):
    """Samples that are collated anew, a micro-batch at a time."""

    name, place = "samples collated anew", 2

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self._collate = collate

    def can_divide(self, inputs: Mapping[str, Any], samples: Sequence[Any] | None) -> bool:
        """Whether the same samples give the same batch again: a collate function that draws must be asked once."""
        return samples is not None and _are_equal(self._collate(copy_samples(samples)), inputs)

    def batch_of(self, inputs: Mapping[str, Any], samples: Sequence[Any] | None, largest: int = 1) -> Any:
        """The samples, with what the loader has made of them."""
        return Collated(samples or (), self._collate, inputs)

    def pick(self, batch: Any, indices: Sequence[int]) -> Any:
        """These samples, not collated yet."""
        return Collated([batch.samples[index] for index in indices], self._collate)

    def inputs_of(self, micro_batch: Any) -> Any:
        """What the collate function made, in a dict of its own: the Trainer's code may write into it."""
        return type(inputs := micro_batch.collated())(inputs)


def count_rows(inputs: Any) -> int | None:
    """Rows of all its tensors; ``None`` where they differ."""
    try:
        return describe(inputs).count
    except InvalidArgument:
        return None


def _groups_of(inputs: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """For each mask of padding the tensors with the positions of it, under the same prefix.

    Left out where a tensor of floats has as many columns: whether they are positions cannot be seen.
    """
    if not isinstance(inputs, Mapping):
        return []
    masks = [name for name, value in inputs.items() if name.endswith(_MASK) and _is_table(value)]
    prefixes = [mask.removesuffix(_MASK) for mask in masks]
    groups = []
    for mask, prefix in zip(masks, prefixes, strict=True):
        others = tuple(other for other in prefixes if other.startswith(prefix) and other != prefix)
        names = [name for name in inputs if name.startswith(prefix) and not (others and name.startswith(others))]
        group = {name: inputs[name] for name in names if _has_columns(inputs[name], inputs[mask].shape[1])}
        if not any(value.is_floating_point() and name != mask for name, value in group.items()):
            groups.append(group)
    return groups


def _last_used(group: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """For each row the number of columns up to the last that its mask or a label uses."""
    used = [value != 0 for name, value in group.items() if name.endswith(_MASK)]
    used += [value != IGNORED for name, value in group.items() if name.endswith("labels") and value.ndim == 2]
    any_used = torch.stack(used).any(0)
    columns = torch.arange(1, any_used.shape[1] + 1, device=any_used.device)
    return (any_used * columns).amax(1).clamp_min(1)


def _is_table(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[1] > 0


def _has_columns(value: Any, width: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == width


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.to(other.device), other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return type(one) is type(other) and (isinstance(one, torch.Tensor) or bool(one == other))
