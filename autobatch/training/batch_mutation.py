"""Detects a step that writes into its batch, and restores the batch.

Covers tensors by torch's count of writes and, in recorded steps (``undo.written_memory``), by copies that are made
right before a write; and NumPy arrays by copies in those steps. So in a recorded step, the first one among them, the
batch of a refused step is as it was. In other steps a counted write is refused and stays, and one into a NumPy array is
not seen. Does not cover samples that were copied, to another device or to join those of several batches: the step may
write into that copy.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

import torch

from autobatch.batch.tree import is_array, leaves_of, tensors_of
from autobatch.errors import InvalidArgument
from autobatch.memory.oom import is_oom
from autobatch.torch_internals.storages import storages_of

__all__ = ["WROTE_INTO_BATCH", "WatchedBatch", "refuse_write"]

WROTE_INTO_BATCH = (
    "step() wrote into its batch in place, so a retry, or the next epoch, would see it changed; work on a copy"
)
_STAYS = " (the samples of this micro-batch stay as step() left them)"


def refuse_write(*, stays: bool) -> NoReturn:
    """Refuse a step that wrote into its batch.

    Args:
        stays: Whether the samples could not be restored, in a batch of the user's.

    Raises:
        InvalidArgument: Always.
    """
    raise InvalidArgument(WROTE_INTO_BATCH + (_STAYS if stays else ""))


class WatchedBatch:
    """The samples of one micro-batch, while a step runs on them.

    Attributes:
        samples: Views of the user's batch, on any device.
    """

    def __init__(self, samples: Any, *, copies_arrays: bool, is_copy: bool = False) -> None:
        """Note how often each tensor was written into.

        Args:
            samples: Views of a batch.
            copies_arrays: Whether NumPy arrays are copied, in which writes cannot be counted.
            is_copy: Whether the batch is a copy that the user does not see; the message then omits what stays written.
        """
        self.samples, self._is_copy = samples, is_copy
        self._tensors = [*tensors_of(samples)]
        self._versions = [_version_of(tensor) for tensor in self._tensors]
        arrays = [leaf for leaf in leaves_of(samples) if _can_be_watched(leaf)] if copies_arrays else []
        self._arrays = [(array, array.copy()) for array in arrays]
        self._copies: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self._by_storage: dict[int, list[torch.Tensor]] | None = None

    def save(self, storage: int) -> bool:
        """Copy the samples in this storage (``_cdata``), which is about to be written; False where none are there."""
        if self._by_storage is None:
            self._by_storage = {}
            for tensor in self._tensors:
                for held in storages_of(tensor):
                    self._by_storage.setdefault(held._cdata, []).append(tensor)
        here = self._by_storage.get(storage, [])
        if here and storage not in self._copies:
            parts = [(tensor, part) for tensor in here for part in _parts_of(tensor)]
            self._copies[storage] = [(tensor, part, part.clone()) for tensor, part in parts]
        return bool(here)

    def __enter__(self) -> WatchedBatch:
        """Do nothing."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Restore the samples.

        Raises:
            InvalidArgument: The step wrote into them. An error of the step itself passes through instead, unless memory
                ended and the micro-batch would be run again on changed samples.
        """
        is_written, is_back = self._is_written(), self._put_back()
        if is_written and (error is None or (not is_back and is_oom(error))):
            refuse_write(stays=not is_back and not self._is_copy)

    def _is_written(self) -> bool:
        counted = [_version_of(tensor) for tensor in self._tensors] != self._versions  # a view counts with its base
        pairs = [(part, copy) for copies in self._copies.values() for _, part, copy in copies]
        return (
            counted
            or any(not torch.equal(_bytes_of(part), _bytes_of(copy)) for part, copy in pairs)
            or any(array.tobytes() != copy.tobytes() for array, copy in self._arrays)
        )

    @torch.no_grad()
    def _put_back(self) -> bool:
        """Restore what was copied; returns whether that was everything that was written."""
        restored = set()
        for copies in self._copies.values():
            for tensor, part, copy in copies:
                with torch.inference_mode(mode=tensor.is_inference()):
                    part.copy_(copy)
                restored.add(id(tensor))
        for array, copy in self._arrays:
            array[...] = copy
        counted = zip(self._tensors, self._versions, strict=True)
        return all(id(tensor) in restored for tensor, version in counted if _version_of(tensor) != version)


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    plain = tensor.detach()
    return plain.unbind() if plain.is_nested else (plain,)  # whose rows have no common shape


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # Bits, not values: nan equals itself.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _can_be_watched(leaf: Any) -> bool:
    return is_array(leaf) and leaf.flags.writeable and not leaf.dtype.hasobject
