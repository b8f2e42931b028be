"""Copies whole storages, and restores them bit for bit.

Views, tied tensors, overlapping strides and payloads of NaN are then right by construction. Meta tensors and opaque
ones (oneDNN's own layout) have no storage to copy.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from autobatch._formatting import format_bytes
from autobatch.errors import DoesNotFit
from autobatch.torch_internals.storages import storages_of

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
            tensors: What to copy, on any device.
            host_bytes: How much host memory the copies may take; beyond it they go to a temporary file, whose pages the
                kernel can write out.

        Raises:
            DoesNotFit: The disk has not enough space either.
        """
        self._host_bytes, self._total = host_bytes, 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._add_storages([storage for tensor in tensors for storage in storages_of(tensor)])

    def add(self, tensor: torch.Tensor) -> None:
        """Copy what this tensor refers to as it is now, unless there is a copy of it.

        Raises:
            DoesNotFit: As when this was made.
        """
        self._add_storages(storages_of(tensor))

    def _add_storages(self, storages: Iterable[torch.UntypedStorage]) -> None:
        # By address: that of a storage that is copied stays its own, since it is held here.
        new = {storage._cdata: storage for storage in storages if storage._cdata not in self._copies}
        self._total += sum(storage.nbytes() for storage in new.values())
        if self._folder is None and self._total > self._host_bytes:
            self._folder = _open_folder(self._total, self._host_bytes)
        for key, storage in new.items():
            self._copies[key] = storage, self._copy(storage, len(self._copies))

    def _copy(self, storage: torch.UntypedStorage, index: int) -> torch.UntypedStorage:
        if self._folder is not None and storage.nbytes() > 0:
            path = str(Path(self._folder.name, str(index)))
            copy = cast("torch.UntypedStorage", torch.UntypedStorage.from_file(path, True, storage.nbytes()))
        else:
            copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
        return copy.copy_(storage, non_blocking=False)

    def restore(self) -> None:
        """Write the copied bytes back. Can be done any number of times."""
        for storage, copy in self._copies.values():
            if storage.nbytes() != copy.nbytes():  # resize_ was called on it
                storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=False)

    def close(self) -> None:
        """Free the copies, and delete the file."""
        self._copies = {}
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


def _open_folder(total: int, host_bytes: int) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="autobatch-")
    free = shutil.disk_usage(folder.name).free
    if free >= total:
        return folder
    folder.cleanup()
    # Checked, because the files are mapped: a disk that is full when a page is written ends the process (SIGBUS).
    raise DoesNotFit(
        f"the state has to be put aside while sizes are tried: {format_bytes(total)}, but host memory has "
        f"{format_bytes(host_bytes)} for it and {tempfile.gettempdir()} {format_bytes(free)}; free some, or set TMPDIR "
        f"to a larger disk"
    )
