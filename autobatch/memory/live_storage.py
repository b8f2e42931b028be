"""Counts the bytes in live CPU tensors exactly, and enforces a budget on them.

Covers every storage that an operator returns while a ``StorageBudget`` is active (forward, backward, optimizer), plus
those that were announced with ``LiveStorage.add``. That is all a step holds from one operator to the next: the count
equals torch's own allocator's for Linear, GRU, attention, AdamW, sparse embeddings and checkpointing of both kinds.

Does not cover scratch memory inside one kernel (convolutions that convert layouts, LSTM, bfloat16 done in float32,
expanded tensors made contiguous first: up to 2.3 times the operator's own tensors, in a small 3-D convolution), memory
of oneDNN tensors and packed weights, ``storage.resize_``, and other threads' operators. So the process grows by more
than is counted: measured with torch 2.13 at 64 samples, 96 % of the growth was counted in a network of nine
convolutions, 85 % in six transformer layers, 77 % in these with bfloat16 autocast; at 4 samples about half of it. Code
from ``torch.compile`` runs eagerly under any dispatch mode, and is counted as such.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from autobatch._formatting import format_bytes
from autobatch.torch_internals.dispatch_mode import DispatchMode
from autobatch.torch_internals.storages import storages_of

__all__ = ["LiveStorage", "StorageBudget"]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with the bytes of it that are in the total. Compared and hashed by identity."""

    __slots__ = ("byte_count", "key")
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # of the referent otherwise, which is dead when this goes into a set

    key: int
    byte_count: int


class LiveStorage:
    """Bytes in live CPU storages: one entry a storage, however many views share it.

    torch keeps one Python object a storage alive for as long as the storage itself (``torch/csrc/Storage.cpp``), so a
    weak reference's callback runs at the moment torch frees it. CPython prints what such a callback raises and goes on
    (``handle_callback`` in ``Objects/weakrefobject.c``), so an interrupt would be lost in one that is Python code. The
    callback here is ``set.add``, a C function in which no signal handler runs: the dead are subtracted when the count
    is next used.

    Any statement may be the last one before an interrupt, and other threads may count and free meanwhile, so each
    statement leaves the count right or is done again by the next user of it: the total and the part that one reference
    has in it change in a single assignment, in which CPython neither runs signal handlers nor switches threads.

    Attributes:
        peak_bytes: The most bytes at once since this was last set.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._total = 0
        self._references: dict[int | None, _StorageReference] = {}
        self._dead: set[_StorageReference] = set()

    @property
    def live_bytes(self) -> int:
        """Bytes in the counted storages that are alive now."""
        if self._dead:
            self._subtract_dead()
        return self._total

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors from now on; those already counted are counted once.

        Args:
            tensors: Any tensors. Those that are not in CPU memory are passed over.
        """
        for tensor in tensors:
            self.count(tensor)
        self.raise_peak()

    def raise_peak(self) -> None:
        """Make the peak at least what is live now."""
        live = self.live_bytes
        if live > self.peak_bytes:  # noqa: PLR1730 - after a call to max() another thread may have raised it further
            self.peak_bytes = live

    def count(self, tensor: torch.Tensor) -> int:
        """Count one tensor's storages without moving the peak; returns how many bytes are new."""
        if type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided and tensor.device.type == "cpu":
            return self._count_storage(tensor.untyped_storage())
        on_cpu = (storage for storage in storages_of(tensor) if storage.device.type == "cpu")
        return sum(self._count_storage(storage) for storage in on_cpu)

    def _count_storage(self, storage: torch.UntypedStorage) -> int:
        if self._dead:
            self._subtract_dead()  # first: this storage may have the address of one that died
        key = storage._cdata
        byte_count = storage.nbytes()
        reference = self._references.get(key)
        if reference is None:
            reference = self._refer_to(storage, key)
        new_bytes = byte_count - reference.byte_count
        if new_bytes:
            self._total, reference.byte_count = self._total + byte_count - reference.byte_count, byte_count
        return max(new_bytes, 0)

    def _refer_to(self, storage: torch.UntypedStorage, key: int) -> _StorageReference:
        reference = _StorageReference(storage, self._dead.add)
        reference.key, reference.byte_count = key, 0
        return self._references.setdefault(key, reference)  # another thread's, if it was faster

    def _subtract_dead(self) -> None:
        known = self._references
        for reference in self._dead.copy():
            self._total, reference.byte_count = self._total - reference.byte_count, 0
            # Another thread may have done this, and the address may be another storage's by now: then no key is None.
            known.pop(reference.key if reference.key in known and known[reference.key] is reference else None, None)
            self._dead.discard(reference)  # last: until here it is done again after an interrupt


class StorageBudget(DispatchMode):
    """While active, counts what operators return and raises when that passes the budget.

    The operator has run by then; its result is dropped before the error leaves, so nothing of it stays and the peak
    does not contain it (only ``resize_`` and ``out=`` leave the larger tensor). A view or an in-place
    update of a tensor that is counted never raises; of one that is not, it counts it.

    Attributes:
        budget_bytes: May be changed while active: that is how nested limits work without a second mode.
    """

    def __init__(self, storage: LiveStorage, budget_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage = storage
        self.budget_bytes = budget_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, count its result."""
        result = func(*args, **(kwargs or {}))
        storage = self.storage
        made = storage.count(result) if isinstance(result, torch.Tensor) else self._count_nested(result)
        if made:
            if storage.live_bytes > self.budget_bytes:
                del result
                raise torch.OutOfMemoryError(
                    f"CPU out of memory. Tried to allocate {format_bytes(made)} in {func} with "
                    f"{format_bytes(storage.live_bytes)} in tensors; the limit is {format_bytes(self.budget_bytes)}"
                )
            storage.raise_peak()
        return result

    def _count_nested(self, result: Any) -> int:
        if isinstance(result, torch.Tensor):
            return self.storage.count(result)
        if isinstance(result, (tuple, list)):
            return sum(self._count_nested(part) for part in result)
        return 0
