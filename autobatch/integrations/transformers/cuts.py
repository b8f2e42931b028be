"""Divides a Trainer's batch along its samples: by rows, by rows without padding, or by collating samples again.

Two rows may be one sample (a preference pair), and all samples may be one row (packing). So ``loss_rule`` tries which
way is exact. The loader's batches bring the samples along that they were made of.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autobatch import batches
from autobatch.batch.example import choose_samples
from autobatch.batch.samples import describe
from autobatch.batch.tree import map_tensors
from autobatch.errors import InvalidArgument
from autobatch.integrations.attributes import are_equal

Collate = Callable[[Sequence[Any]], Any]

_log = logging.getLogger("autobatch")

IGNORED = -100  # the label of a position that has no loss, as everywhere in Hugging Face's libraries
_MASK = "attention_mask"
_KEY = "autobatch_samples"
_MOST_COLLATED = 64  # samples of the largest batch: a larger micro-batch repeats them


class _Kept:
    """Samples in a batch, in an object that no library moves, pads or divides; a worker process can send it."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples


class SampleKeeper:
    """A collate function that leaves its samples in the batch, for ``take_samples``."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate, and keep copies: collate functions may take entries out of their samples."""
        kept = copy_samples(samples)
        batch = self.collate(samples)
        if isinstance(batch, MutableMapping):
            batch[_KEY] = _Kept(kept)
        return batch

    def __getattr__(self, name: str) -> Any:
        """Return other attributes, such as ``tokenizer`` or ``valid_label_columns``."""
        if name == "collate":  # in a copy that is being made
            raise AttributeError(name)
        return getattr(self.collate, name)


def copy_samples(samples: Sequence[Any]) -> list[Any]:
    return [copy.copy(sample) for sample in samples]


def take_samples(inputs: Any) -> Sequence[Any] | None:
    """Take the samples out of a batch; what is left is what the Trainer's own collate function made."""
    kept = inputs.pop(_KEY, None) if isinstance(inputs, MutableMapping) else None
    return kept.samples if isinstance(kept, _Kept) else None


def count_rows(inputs: Any) -> int | None:
    try:
        return describe(inputs).count
    except InvalidArgument:
        return None


def count_samples(inputs: Any, samples: Sequence[Any] | None) -> int:
    """Return the number of samples of a batch; 1 if it cannot be divided."""
    return len(samples) if samples is not None else count_rows(inputs) or 1


class Collated:
    """Samples of a batch, collated when a micro-batch of them moves to the device."""

    def __init__(self, samples: Sequence[Any], collate: Collate, inputs: Mapping[str, Any] | None = None) -> None:
        self.samples, self.collate, self.inputs = samples, collate, inputs

    def collated(self) -> Mapping[str, Any]:
        """Return what the collate function makes of the samples; it runs once."""
        if self.inputs is None:
            self.inputs = self.collate(copy_samples(self.samples))
        return self.inputs


def _take(batch: Collated, indices: list[int]) -> Collated:
    return Collated([batch.samples[index] for index in indices], batch.collate)


def _map(batch: Collated, function: Callable[[torch.Tensor], torch.Tensor]) -> Collated:
    return Collated(batch.samples, batch.collate, map_tensors(batch.collated(), function))


batches.register(Collated, count=lambda batch: len(batch.samples), take=_take, map=_map)


def collate_largest(loader: Any) -> Any:
    """Return the largest samples of a loader's dataset in one batch; ``None`` for a stream, or if that fails."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return choose_samples(loader, _MOST_COLLATED).layout.batch
    except Exception as error:  # noqa: BLE001 - the user's own code, which may ask for an order or for other keys
        reason = f"{type(error).__name__}: {error}"
    _log.info("could not collate the largest samples (%s): the first batch is used to find the size", reason)
    return None


# ------------------------------------------------------------------------------------------------- ways to divide


class Rows:
    """Rows of all tensors, if each sample has one."""

    name = "rows"

    def can_divide(self, inputs: Any, samples: Sequence[Any] | None) -> bool:
        """Return whether this batch can be divided in this way, as far as its tensors show."""
        rows = count_rows(inputs)
        return rows is not None and (samples is None or rows == len(samples))

    def batch_of(self, inputs: Any, samples: Sequence[Any] | None, largest: int = 1) -> Any:
        """Return what the Runner divides; the loader's batch unchanged if ``largest`` samples are all of it."""
        return inputs

    def inputs_of(self, micro_batch: Any) -> Any:
        """Return what the Trainer's step gets of a micro-batch."""
        return micro_batch


class TrimmedRows(Rows):
    """Rows, the longest first, each micro-batch without the columns that are padding in all of its rows."""

    name = "rows without padding"

    def can_divide(self, inputs: Any, samples: Sequence[Any] | None) -> bool:
        return bool(_padded_groups(inputs)) and super().can_divide(inputs, samples)

    def batch_of(self, inputs: Any, samples: Sequence[Any] | None, largest: int = 1) -> Any:
        lengths = [_last_used(group) for group in _padded_groups(inputs)]
        are_rows = all(isinstance(value, torch.Tensor) and value.ndim for value in inputs.values())
        if not lengths or not are_rows or len(lengths[0]) <= largest:
            return inputs
        order = torch.stack(lengths).amax(0).argsort(descending=True, stable=True)
        return {name: value[order.to(value.device)] for name, value in inputs.items()}

    def inputs_of(self, micro_batch: Any) -> Any:
        trimmed = dict(micro_batch)
        for group in _padded_groups(micro_batch):
            longest = int(_last_used(group).amax())
            trimmed |= {name: value[:, :longest].contiguous() for name, value in group.items()}  # models call view()
        return trimmed


class CollatedSamples(Rows):
    """Samples that are collated again, one micro-batch at a time."""

    name = "samples collated again"

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def can_divide(self, inputs: Any, samples: Sequence[Any] | None) -> bool:
        # Not if the collate function draws: the same samples have to give the same batch.
        return samples is not None and are_equal(self._collate(copy_samples(samples)), inputs)

    def batch_of(self, inputs: Any, samples: Sequence[Any] | None, largest: int = 1) -> Any:
        return Collated(samples or (), self._collate, inputs)

    def inputs_of(self, micro_batch: Any) -> Any:
        return type(inputs := micro_batch.collated())(inputs)  # the Trainer's code may write into it


def cuts_for(trainer: Any, collate: Collate, inputs: Any, samples: Sequence[Any] | None) -> list[Rows]:
    """Return the ways to divide this batch, the one that takes least memory first; refuse a batch without any."""
    # An encoder and a decoder may have equally many positions, and NEFTune's noise depends on the number of columns.
    has_two_lengths = getattr(getattr(trainer.model, "config", None), "is_encoder_decoder", False)
    trims = not has_two_lengths and getattr(trainer, "neftune_noise_alpha", None) is None
    by_rows = [cut for cut in (*([TrimmedRows()] if trims else []), Rows()) if cut.can_divide(inputs, samples)]
    collated = CollatedSamples(collate)
    possible = by_rows or ([collated] if collated.can_divide(inputs, samples) else [])
    if not possible:
        raise InvalidArgument(
            f"{type(trainer).__name__}: the batch cannot be divided into samples: its tensors have different numbers "
            f"of rows, and its data_collator makes another batch of the same samples"
        )
    return possible


def count_labels(inputs: Any, samples: int) -> list[int]:
    """Return the number of labels of each sample; nothing unless the labels are classes, a row a sample."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.shape[:1] != (samples,):
        return []
    counts: list[int] = (labels != IGNORED).reshape(samples, -1).sum(1).tolist()
    return counts


def has_unequal_lengths(inputs: Any) -> bool:
    return any(len(set(_last_used(group).tolist())) > 1 for group in _padded_groups(inputs))


def _padded_groups(inputs: Any) -> list[dict[str, torch.Tensor]]:
    """For each mask of padding, the tensors of its positions: those under the same prefix and as wide.

    A tensor of floats that is as wide rules the group out: nothing shows whether its columns are positions.
    """
    if not isinstance(inputs, Mapping):
        return []
    masks = [name for name, value in inputs.items() if name.endswith(_MASK) and _has_width(value) and value.ndim == 2]
    prefixes = [mask.removesuffix(_MASK) for mask in masks]
    groups = []
    for mask, prefix in zip(masks, prefixes, strict=True):
        longer = tuple(other for other in prefixes if other.startswith(prefix) and other != prefix)
        names = [name for name in inputs if name.startswith(prefix) and not (longer and name.startswith(longer))]
        width = inputs[mask].shape[1]
        group = {name: inputs[name] for name in names if _has_width(inputs[name]) and inputs[name].shape[1] == width}
        if not any(value.is_floating_point() and name != mask for name, value in group.items()):
            groups.append(group)
    return groups


def _has_width(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] > 0


def _last_used(group: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """For each row, the number of columns up to the last one that its mask or a label uses."""
    used = [value != 0 for name, value in group.items() if name.endswith(_MASK)]
    used += [value != IGNORED for name, value in group.items() if name.endswith("labels") and value.ndim == 2]
    any_used = torch.stack(used).any(0)
    columns = torch.arange(1, any_used.shape[1] + 1, device=any_used.device)
    return (any_used * columns).amax(1).clamp_min(1)
