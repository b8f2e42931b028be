"""Detects writes into the user's NumPy arrays, which count none themselves, and undoes them.

Covers writable arrays that a piece may be views of. Does not cover tensors, which count their writes (``piece``), nor
what is written into a tensor's memory through ``tensor.numpy()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autobatch.batch.tree import is_array

__all__ = ["WatchedArrays"]


class WatchedArrays:
    """Copies of arrays, while a function runs on views of them.

    Read-only views would be cheaper, but ``torch.from_numpy`` warns of them, and much compiled code takes none.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        """Copy those that are arrays and can be written into."""
        self._pairs = [(leaf, leaf.copy()) for leaf in leaves if is_array(leaf) and leaf.flags.writeable]

    def put_back(self) -> bool:
        """Undo what was written; returns whether something was."""
        # Bits, not values: nan equals itself, and of objects it is asked whether they are the same.
        written = [(array, copy) for array, copy in self._pairs if array.tobytes() != copy.tobytes()]
        for array, copy in written:
            array[...] = copy
        return bool(written)
