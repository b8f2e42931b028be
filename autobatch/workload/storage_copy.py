"""Values of tensors, kept aside and put back bit for bit.

Covers whole storages: views, tied tensors and overlapping strides (``expand``) are then right by construction, and so
is every dtype, payloads of NaN included. Does not cover which tensors belong to a model or an optimizer (``state``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["StorageCopies"]


class StorageCopies:
    """Copies of storages, in host memory, or in a file when host memory is short.

    The tensors stay where they are and keep their identity: ``restore`` writes the old bytes back into the same memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, host_bytes: int) -> None:
        """Copy every distinct storage once.

        Args:
            tensors: What to remember, on any device.
            host_bytes: How much host memory the copies may take; beyond it they go to a temporary file, whose pages the
                kernel can write out.
        """
        storages = {storage._cdata: storage for tensor in tensors for storage in _storages(tensor)}
        total = sum(storage.nbytes() for storage in storages.values())
        self._folder = tempfile.TemporaryDirectory(prefix="autobatch-") if total > host_bytes else None
        self._copies = [(storage, self._copy(storage, index)) for index, storage in enumerate(storages.values())]

    def _copy(self, storage: torch.UntypedStorage, index: int) -> torch.UntypedStorage:
        copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
        if self._folder is not None and storage.nbytes() > 0:
            path = str(Path(self._folder.name, str(index)))
            copy = cast("torch.UntypedStorage", torch.UntypedStorage.from_file(path, True, storage.nbytes()))
        return copy.copy_(storage, non_blocking=False)

    def restore(self) -> None:
        """Write the remembered bytes back. Can be done any number of times."""
        for storage, copy in self._copies:
            storage.copy_(copy, non_blocking=False)

    def close(self) -> None:
        """Let go of the copies, and of the file."""
        self._copies = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> StorageCopies:
        """Close at the end of the block; restoring stays the caller's decision."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See ``close``."""
        self.close()


def _storages(tensor: torch.Tensor) -> Iterable[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [storage for name in names for storage in _storages(getattr(tensor, name))]
    if tensor.layout is not torch.strided:
        parts = (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor.values(),)
        return [part.untyped_storage() for part in parts]
    return [tensor.untyped_storage()]
