"""Detects a step that writes into its batch or into gradients, which a retry could not undo.

Tensors count their writes. NumPy arrays do not: copies of them are compared, in watched steps only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autobatch.batch.tree import is_array, leaves_of
from autobatch.errors import InvalidArgument
from autobatch.torch_internals.storages import storages_of
from autobatch.undo.gradients import Float32Sums
from autobatch.undo.written_memory import Saved

WROTE_INTO_BATCH = (
    "step() wrote into its batch in place, so a retry, or the next epoch, would see it changed; work on a copy"
)


class BatchWatch:
    """Whether a step has written into its batches.

    Attributes:
        tensors: The batches' tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], batches: Iterable[Any] = ()) -> None:
        """Note how often each tensor was written into.

        Args:
            tensors: The batches' tensors.
            batches: Batches in which NumPy arrays are watched too.
        """
        self.tensors = tensors
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._counted]
        arrays = [leaf for leaf in leaves_of([*batches]) if _can_be_watched(leaf)]
        self._arrays = [(array, array.copy()) for array in arrays]

    def refuse_writes(self, copied: Saved, *, stays: bool) -> None:
        """Refuse a step that wrote into its batch; arrays are restored.

        Args:
            copied: Memory that was copied before the step wrote into it, so that it can be restored.
            stays: Whether the user sees the batch, in which other writes stay.

        Raises:
            InvalidArgument: It did.
        """
        written = [array for array, copy in self._arrays if array.tobytes() != copy.tobytes()]
        for array, copy in self._arrays if written else ():
            array[...] = copy
        counts = zip(self._counted, self._versions, strict=True)
        moved = [tensor for tensor, count in counts if tensor._version != count]  # a view counts with its base
        keys = {storage._cdata for tensor in self.tensors for storage in storages_of(tensor)} & copied.keys()
        is_recorded = any(not torch.equal(*copied[key]) for key in keys)
        if moved or is_recorded or written:
            is_lost = any(storage._cdata not in copied for tensor in moved for storage in storages_of(tensor))
            raise InvalidArgument(
                WROTE_INTO_BATCH + (" (the batch stays as step() left it)" if is_lost and stays else "")
            )


class GradientWatch:
    """Whether a forward pass has changed a gradient."""

    def __init__(self, parameters: Sequence[torch.Tensor], sums: Float32Sums) -> None:
        """Note every ``.grad``, and how often it and each float32 sum was written into."""
        self._parameters, self._sums = parameters, sums
        self._before = self._read()

    def _read(self) -> list[tuple[torch.Tensor | None, int]]:
        gradients = [*(parameter.grad for parameter in self._parameters), *self._sums.tensors()]
        return [(gradient, -1 if gradient is None else gradient._version) for gradient in gradients]

    def refuse_change(self) -> None:
        """Refuse a step that has changed a gradient.

        Raises:
            InvalidArgument: It has.
        """
        now = self._read()
        same = len(now) == len(self._before) and all(
            new is old and count == before for (new, count), (old, before) in zip(now, self._before, strict=True)
        )
        if not same:
            raise InvalidArgument(
                "step() changed .grad: leave backward() and zero_grad() to the Runner, return the loss only"
            )


def _can_be_watched(leaf: Any) -> bool:
    return is_array(leaf) and leaf.flags.writeable and not leaf.dtype.hasobject
