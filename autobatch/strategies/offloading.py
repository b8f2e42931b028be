"""Keeps what a block saves for its backward pass in host memory.

1. Each memory that its forward pass saves is copied to the host, once and whole. Saved views of it come back as views.
2. Parameters, buffers and inputs of the block stay, since copies would free nothing. So do small tensors, those that
   are not plain strided ones, and what the host has no room for.
3. A tensor that stays and is written into before the backward pass raises an error, as without copies.

Nothing runs twice, so any block may do this. Copies run on the stream of the pass. What the bus can move meanwhile is
not modelled: ``each_way.py`` times the block with its copies, and one whose copies take too long is not chosen.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autobatch.memory.host_limit import read_host_memory
from autobatch.memory.oom import is_oom
from autobatch.torch_internals.storages import storages_of

_LEAST_BYTES = 2**14
"""Bytes of the smallest memory that is moved: of less, the call takes longer than the copy."""

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass
class HostRoom:
    """Bytes of host memory that further copies may take."""

    left: int

    @classmethod
    def read(cls) -> HostRoom:
        """Return half of what is free, or was pinned before: torch keeps pinned memory. Ranks of a host share it."""
        pinned = torch.cuda.host_memory_stats() if torch.cuda.is_initialized() else {}
        kept = max((count for name, count in pinned.items() if name.endswith("bytes.current")), default=0)
        ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
        return cls((read_host_memory().available_bytes // ranks + kept) // 2)

    def take(self, byte_count: int) -> bool:
        """Take room for a copy, if there is enough. Pinned memory comes in powers of two."""
        needed = 1 << (byte_count - 1).bit_length()
        if needed > self.left:
            return False
        self.left -= needed
        return True


class HostCopies:
    """Copies of what one forward pass saves; ``held`` are tensors that stay whatever it saves."""

    def __init__(self, room: HostRoom, held: Iterable[torch.Tensor]) -> None:
        self._room = room
        self._held = {storage._cdata for one in held for storage in storages_of(one)}
        self._copies: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], Copy]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        copy = self._copy(tensor)
        if copy is None:
            return tensor.detach(), tensor._version
        return copy, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed[0], Copy):
            copy, dtype, *view = packed
            storage = copy.bring_back()
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *view)
        tensor, version = packed
        if tensor._version != version:  # torch does not look where a hook returns what was saved
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {[*tensor.shape]} is at version {tensor._version}; expected version {version} instead"
            )
        return tensor  # type: ignore[no-any-return]

    def _copy(self, tensor: torch.Tensor) -> Copy | None:
        """Return the copy of a tensor's memory as it is now; ``None`` if it stays."""
        is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._held or storage.nbytes() < _LEAST_BYTES:
            return None
        key = storage._cdata, tensor._version
        reference, copy = self._copies.get(key, (None, None))
        if reference is not None and reference() is not None:  # no other memory has got its address since
            return copy
        if not self._room.take(storage.nbytes()):
            return None
        copy = Copy(storage)
        self._copies[key] = weakref.ref(storage), copy
        return copy


class Copy:
    """Copy of one memory.

    Attributes:
        host: Its bytes in host memory.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._device = storage.device
        self._is_pinned = self._device.type == "cuda"
        self.host = self._allocate(storage.nbytes())
        self.host.copy_(bytes_in(storage), non_blocking=self._is_pinned)
        self._back: tuple[weakref.ref[torch.UntypedStorage], Any] | None = None

    def _allocate(self, byte_count: int) -> torch.Tensor:
        if self._is_pinned:
            try:
                return torch.empty(byte_count, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:  # a system may limit how much is pinned
                if not is_oom(error):
                    raise
            self._is_pinned = False
        return torch.empty(byte_count, dtype=torch.uint8, device="cpu")

    def bring_back(self) -> torch.UntypedStorage:
        """Return the memory on its device; the same one while another view of it is in use on this stream."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        reference, used_on = self._back or (None, None)
        storage = None if reference is None or used_on != stream else reference()
        if storage is None:
            storage = self.host.to(self._device, non_blocking=self._is_pinned).untyped_storage()
            self._back = weakref.ref(storage), stream
        return storage


def offloading(
    block: nn.Module, forward: Callable[..., Any], room: HostRoom, kind: type[HostCopies] = HostCopies
) -> Callable[..., Any]:
    """Return a forward pass of a block that saves host copies of a kind for its backward pass."""

    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        copies = kind(room, [*block.parameters(), *block.buffers(), *inputs])
        with torch.autograd.graph.saved_tensors_hooks(copies.pack, copies.unpack):
            return forward(*args, **kwargs)

    return run


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a memory as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
