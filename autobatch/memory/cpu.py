"""Enforces a budget on the CPU: live tensors are counted, and passing the budget raises an out-of-memory error.

So a training job in a container meets an error that can be retried instead of the kernel's out-of-memory killer.

Covers every storage that an operator returns while a ``StorageBudget`` is active (forward, backward, optimizer), plus
those that were announced with ``LiveStorage.add``. That is all a step holds from one operator to the next: the count
equals torch's own allocator's for Linear, GRU, attention, AdamW, sparse embeddings and checkpointing of both kinds.

Does not cover memory that is not in tensors, scratch memory inside one kernel (convolutions that convert layouts, LSTM,
bfloat16 done in float32, expanded tensors made contiguous first: up to 2.3 times the operator's own tensors, in a small
3-D convolution), memory of oneDNN tensors and packed weights, ``storage.resize_``, and other threads' operators. So the
process grows by more than is counted: measured with torch 2.13 at 64 samples, 96 % of the growth was counted in a
network of nine convolutions, 85 % in six transformer layers, 77 % in these with bfloat16 autocast; at 4 samples about
half of it. Code from ``torch.compile`` runs eagerly under any dispatch mode, and is counted as such.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from autobatch._formatting import format_bytes
from autobatch._user_errors import contextmanager
from autobatch.memory.device import Device
from autobatch.memory.host_limit import read_host_memory
from autobatch.records import DeviceInfo, MemoryUsage
from autobatch.torch_internals.dispatch_mode import DispatchMode, call_operator
from autobatch.torch_internals.storages import storages_of

__all__ = ["CpuDevice", "LiveStorage", "StorageBudget"]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_READ_AGAIN_SECONDS = 1.0


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with the bytes of it that are in the total. Compared and hashed by identity."""

    __slots__ = ("byte_count", "key")
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # of the referent otherwise, which is dead when this goes into a set

    key: int
    byte_count: int


class LiveStorage:
    """Bytes in live CPU storages: one entry a storage, however many views share it; and the most since a reset.

    torch keeps one Python object a storage alive for as long as the storage itself (``torch/csrc/Storage.cpp``), so a
    weak reference's callback runs at the moment torch frees it. An interrupt would be lost in one that is Python code
    (``handle_callback`` in CPython's ``Objects/weakrefobject.c``), so it is ``set.add``, in C: the dead are subtracted
    when the count is next used.

    An interrupt may follow any statement, and other threads count and free meanwhile, so each statement leaves the
    count right or is done again by its next user: the total and one reference's part in it change in one assignment.
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
        """Count these tensors from now on, each once; those that are not in CPU memory are passed over."""
        for tensor in tensors:
            self.count(tensor)
        self.raise_peak()

    def raise_peak(self) -> None:
        """Make the peak at least what is live now."""
        live = self.live_bytes
        if live > self.peak_bytes:  # noqa: PLR1730 - after a call to max() another thread may have raised it further
            self.peak_bytes = live

    def count(self, result: Any) -> int:
        """Count the storages of a tensor, or of those in a tuple, without moving the peak; returns the new bytes."""
        if isinstance(result, torch.Tensor):
            if type(result) in _PLAIN_TYPES and result.layout is torch.strided and result.device.type == "cpu":
                return self._count_storage(result.untyped_storage())
            on_cpu = (storage for storage in storages_of(result) if storage.device.type == "cpu")
            return sum(self._count_storage(storage) for storage in on_cpu)
        return sum(map(self.count, result)) if isinstance(result, (tuple, list)) else 0

    def _count_storage(self, storage: torch.UntypedStorage) -> int:
        if self._dead:
            self._subtract_dead()  # first: this storage may have the address of one that died
        key = storage._cdata
        byte_count = storage.nbytes()
        reference = self._references.get(key)
        if reference is None:
            reference = _StorageReference(storage, self._dead.add)
            reference.key, reference.byte_count = key, 0
            reference = self._references.setdefault(key, reference)  # another thread's, if it was faster
        new_bytes = byte_count - reference.byte_count
        if new_bytes:
            self._total, reference.byte_count = self._total + byte_count - reference.byte_count, byte_count
        return max(new_bytes, 0)

    def _subtract_dead(self) -> None:
        known = self._references
        for reference in self._dead.copy():
            self._total, reference.byte_count = self._total - reference.byte_count, 0
            # Another thread may have done this, and the address may be another storage's by now: then no key is None.
            known.pop(reference.key if reference.key in known and known[reference.key] is reference else None, None)
            self._dead.discard(reference)  # last: until here it is done again after an interrupt


class StorageBudget(DispatchMode):
    """While active, counts what operators return and raises when that passes the budget, which may change meanwhile.

    The operator has run by then; its result is dropped before the error leaves, so nothing of it stays and the peak
    does not contain it (only ``resize_`` and ``out=`` leave the larger tensor). A view or an in-place
    update of a tensor that is counted never raises; of one that is not, it counts it.
    """

    def __init__(self, storage: LiveStorage, budget_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage = storage
        self.budget_bytes = budget_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, count its result."""
        # In inference mode torch does not take composite operators apart before a mode sees them (torch 2.13): what
        # they make inside, such as the scores of attention, would not be counted.
        if torch.is_inference_mode_enabled():
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        result = call_operator(func, args, kwargs)
        storage = self.storage
        if made := storage.count(result):
            if storage.live_bytes > self.budget_bytes:
                del result
                raise torch.OutOfMemoryError(
                    f"CPU out of memory. Tried to allocate {format_bytes(made)} in {func} with "
                    f"{format_bytes(storage.live_bytes)} in tensors; the limit is {format_bytes(self.budget_bytes)}"
                )
            storage.raise_peak()
        return result


# One count for the process, as it has one heap: a tensor that one device object has seen counts for all.
_STORAGE = LiveStorage()


class _Innermost(threading.local):
    """The budget in force. One a thread: torch's dispatch modes, which enforce it, are of one thread too."""

    budget: StorageBudget | None = None


_INNERMOST = _Innermost()


class CpuDevice(Device):
    """The host's memory behind the ``Device`` protocol; all objects of this class share one count and one budget.

    A ``limit`` holds in the thread that entered it. What other threads make is counted only by ``watch``.
    """

    measures = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._read_at, self._available = -math.inf, 0

    def describe(self) -> DeviceInfo:
        """Total is the container's limit where there is one."""
        return DeviceInfo(kind="cpu", name="CPU", total_bytes=read_host_memory().total_bytes)

    def available_bytes(self) -> int:
        """What the host can still give plus what our counted tensors hold."""
        return read_host_memory().available_bytes + _STORAGE.live_bytes

    @contextmanager
    def limit(self, budget_bytes: int) -> Iterator[None]:
        """Count every operator's result inside the block, and raise ``torch.OutOfMemoryError`` beyond the budget."""
        budget_bytes = self.limit_bytes(budget_bytes)
        if _INNERMOST.budget is None:
            budget = _INNERMOST.budget = StorageBudget(_STORAGE, budget_bytes)
            try:
                with budget:
                    yield
            finally:
                _INNERMOST.budget = None
                budget.remove()  # an interrupt may have come as the block ended, before the mode did
            return
        outer, _INNERMOST.budget.budget_bytes = _INNERMOST.budget.budget_bytes, budget_bytes
        try:
            yield
        finally:
            _INNERMOST.budget.budget_bytes = outer

    def limit_bytes(self, budget_bytes: int) -> int:
        """The budget, or what the host had at most a second ago, as others may have taken from it since.

        A reading takes a dozen files, 0.3 to 1 ms. After ``reclaim`` the host is read again at once.
        """
        if time.monotonic() - self._read_at > _READ_AGAIN_SECONDS:
            self._read_at, self._available = time.monotonic(), self.available_bytes()
        return min(budget_bytes, self._available)

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before, or outside, any ``limit`` block."""
        _STORAGE.add(tensors)

    def reset_peak(self) -> None:
        """The peak begins at what is live now."""
        _STORAGE.peak_bytes = _STORAGE.live_bytes

    def usage(self) -> MemoryUsage:
        """Allocated and reserved are the same here: freed memory goes back to the C library at once."""
        live, peak = _STORAGE.live_bytes, _STORAGE.peak_bytes
        return MemoryUsage(allocated=live, reserved=live, peak_allocated=peak, peak_reserved=peak)

    def reclaim(self) -> None:
        """Free what nothing refers to; the host is read again at the next step."""
        super().reclaim()
        self._read_at = -math.inf
