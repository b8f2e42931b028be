"""Keeps the samples of a loader's batch beside its tensors, so that a micro-batch can be collated by itself.

Covers the collate function that keeps them, a batch type of samples that are collated when their turn comes, and the
largest samples of a dataset. Does not cover how a batch is divided (``cuts``).
"""

from __future__ import annotations

import copy
import heapq
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autobatch import batches
from autobatch.batch.tree import map_tensors

__all__ = ["Collated", "SampleKeeper", "collate_largest", "take_samples"]

_log = logging.getLogger("autobatch")

_KEY = "autobatch_samples"
_MOST_LOOKED_AT = 2048
_MOST_WRAPPERS = 8
"""Of batch samplers in each other, as accelerate's own around the user's; one may be its own."""
_MOST_COLLATED = 64
"""Samples of the largest batch: more in a micro-batch are these again."""


class _Kept:
    """Samples in a batch. No container that anybody would move, pad or divide."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples


class SampleKeeper:
    """A collate function that leaves its samples in the batch, for ``take_samples``.

    Attributes:
        collate: The Trainer's own, whose attributes are found here too.
    """

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate; collate functions may take entries out of their samples, so copies are kept."""
        kept = copy_samples(samples)
        batch = self.collate(samples)
        if isinstance(batch, MutableMapping):
            batch[_KEY] = _Kept(kept)
        return batch

    def __getattr__(self, name: str) -> Any:
        """Other attributes, such as ``tokenizer`` or ``valid_label_columns``."""
        if name == "collate":  # in a copy that is being made
            raise AttributeError(name)
        return getattr(self.collate, name)


def copy_samples(samples: Sequence[Any]) -> list[Any]:
    """Samples of their own, with the same entries."""
    return [copy.copy(sample) for sample in samples]


def take_samples(inputs: Any) -> Sequence[Any] | None:
    """Take the samples out of a batch, which is then what the Trainer's own collate function made."""
    kept = inputs.pop(_KEY, None) if isinstance(inputs, MutableMapping) else None
    return kept.samples if isinstance(kept, _Kept) else None


class Collated:
    """Samples of a batch, collated when a micro-batch of them is moved to the device.

    Attributes:
        samples: As the dataset gave them.
        collate: The Trainer's own collate function.
        inputs: What it made of them; ``None`` before they were collated.
    """

    def __init__(
        self, samples: Sequence[Any], collate: Callable[[Sequence[Any]], Any], inputs: Mapping[str, Any] | None = None
    ) -> None:
        self.samples, self.collate, self.inputs = samples, collate, inputs

    def collated(self) -> Mapping[str, Any]:
        """What the collate function makes of the samples, made once."""
        if self.inputs is None:
            self.inputs = self.collate(copy_samples(self.samples))
        return self.inputs


def _count(batch: Collated) -> int:
    return len(batch.samples)


def _take(batch: Collated, indices: list[int]) -> Collated:
    return Collated([batch.samples[index] for index in indices], batch.collate)


def _map(batch: Collated, function: Callable[[torch.Tensor], torch.Tensor]) -> Collated:
    return Collated(batch.samples, batch.collate, map_tensors(batch.collated(), function))


batches.register(Collated, count=_count, take=_take, map=_map)


def collate_largest(loader: Any) -> Any:
    """The largest of a loader's samples, the largest first, collated together as the loader does.

    ``None`` where they cannot be chosen: a stream, a loader that makes no batches of samples, or samples that cannot be
    read or collated in another order than the loader's own.
    """
    try:
        indices = _find_indices(loader)
        if not indices:
            return None
        stride = max(1, len(indices) // _MOST_LOOKED_AT)
        looked_at = (loader.dataset[indices[at]] for at in range(0, len(indices), stride))
        return loader.collate_fn(_pick_largest(looked_at))
    except Exception as error:  # noqa: BLE001 - of the user's own code, which need not be able to do this
        reason = f"{type(error).__name__}: {error}"
    _log.info("the largest samples cannot be collated (%s): the size is found on the first batch", reason)
    return None


def _find_indices(loader: Any) -> Sequence[Any]:
    """What the loader can ask its dataset for, as far as that is known without drawing; nothing of a stream."""
    sampler = getattr(loader, "batch_sampler", None)
    dataset: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or sampler is None or isinstance(dataset, IterableDataset):
        return ()
    for _ in range(_MOST_WRAPPERS):
        if (within := getattr(sampler, "batch_sampler", None)) is None:
            break
        sampler = within
    inner = getattr(sampler, "sampler", None)
    for known in (inner, getattr(inner, "indices", None)):
        if isinstance(known, Sequence):
            return known
        if isinstance(known, torch.Tensor):
            listed: list[Any] = known.tolist()
            return listed
    return range(len(dataset)) if hasattr(dataset, "__len__") else ()


def _pick_largest(samples: Iterable[Any]) -> list[Any]:
    """The largest sample and the largest of its kind, in order: samples of different kinds are in no batch together."""
    kinds: dict[Any, list[tuple[int, int, Any]]] = {}
    for order, sample in enumerate(samples):
        heap = kinds.setdefault(_kind_of(sample), [])
        push = heapq.heappush if len(heap) < _MOST_COLLATED else heapq.heappushpop
        push(heap, (_size_of(sample), -order, sample))
    largest = max(kinds.values(), key=lambda heap: max(heap)[:2])
    return [sample for _, _, sample in sorted(largest, reverse=True)]


def _kind_of(sample: Any) -> Any:
    """Its entries' names, and of which of several datasets it is."""
    if isinstance(sample, Mapping):
        return frozenset(sample), str(sample.get("dataset_name"))
    return type(sample), len(sample) if isinstance(sample, tuple) else None


def _size_of(sample: Any) -> int:
    """Elements of its tensors, arrays and lists, and characters of its strings."""
    if isinstance(sample, Mapping):
        return sum(map(_size_of, sample.values()))
    numpy = sys.modules.get("numpy")
    if isinstance(sample, torch.Tensor) or (numpy is not None and isinstance(sample, numpy.ndarray)):
        return int(sample.nelement() if isinstance(sample, torch.Tensor) else sample.size)
    if isinstance(sample, (list, tuple)) and sample and not isinstance(sample[0], (int, float)):
        return sum(map(_size_of, sample))
    return len(sample) if hasattr(sample, "__len__") else 0
