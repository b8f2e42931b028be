"""Finds the memory that a step writes into, and copies it before the first write.

Examples are a key encoder that follows another in ``forward()``, a memory bank, or a teacher that the step updates.
While a step is watched, each storage is copied right before the first write. From then on each step begins with a copy
of it. Writes without torch's operators are not seen (NumPy, other kernels).

Watching costs about 10 us an operator, so it is done in few steps. In others torch counts writes
(``Tensor._version``), except those through ``.data``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from autobatch.torch_internals.dispatch_mode import DispatchMode, call_operator
from autobatch.torch_internals.storages import storages_of

Saved = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By storage: all of its bytes as a view, and a copy of them."""


class WrittenMemory:
    """The storages that steps are known to write into, by weak references."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for storage in storages_of(tensor):
                self.known[storage._cdata] = weakref.ref(storage)

    @torch.no_grad()
    def save(self) -> Saved:
        """Copy all that is known, each on its own device."""
        storages = [(key, reference()) for key, reference in self.known.items()]
        self.known = {key: self.known[key] for key, storage in storages if storage is not None}
        return {key: save_storage(storage) for key, storage in storages if storage is not None}


def save_storage(storage: torch.UntypedStorage) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes of a storage as a view, and a copy that a count of memory can see."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    return view, view.clone()


@torch.no_grad()
def put_storage(memory: torch.Tensor, value: torch.Tensor) -> None:
    """Write the copied bytes back into a storage."""
    storage = memory.untyped_storage()
    if storage.nbytes() != value.nbytes:  # resize_ was called on it
        storage.resize_(value.nbytes)
    with torch.inference_mode(mode=memory.is_inference()):  # torch writes into such a view nowhere else
        memory.copy_(value)


class WriteRecorder(DispatchMode):
    """While active, copies each storage that was there before into a record, before an operator writes into it."""

    # Such as flex_attention run eagerly: they run unchanged, and the operators that they call are recorded.
    supports_higher_order_operators = True

    def __init__(
        self,
        saved: Saved,
        known: WrittenMemory,
        uncopied: Iterable[torch.Tensor],
        save: Callable[[torch.UntypedStorage], tuple[torch.Tensor, torch.Tensor]] = save_storage,
    ) -> None:
        """Add copies to ``saved`` and storages to ``known``; leave ``uncopied`` tensors out, such as gradients."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved, self._known, self._copy = saved, known, save
        # Tensors that are made while this is active are added: they were not there before.
        self._uncopied = {storage._cdata for tensor in uncopied for storage in storages_of(tensor)}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Copy what the operator writes into, run it, and note what it has made."""
        kwargs = kwargs or {}
        for tensor in _written_by(func, args, kwargs):
            self._save(tensor)
        result = call_operator(func, args, kwargs)
        # ``torch.tensor(0.0)`` comes here only as the argument of lift_fresh, which returns it.
        inputs = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        given = {storage._cdata for tensor in _tensors_in(inputs) for storage in storages_of(tensor)}
        made = {storage._cdata for tensor in _tensors_in(result) for storage in storages_of(tensor)}
        self._uncopied |= made - given
        return result

    @torch.no_grad()
    def _save(self, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            if storage._cdata not in self._uncopied and storage._cdata not in self._saved:
                self._saved[storage._cdata] = self._copy(storage)
                self._known.add([tensor])


_WRITTEN: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {}


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator's schema says it writes into."""
    if func not in _WRITTEN:
        _WRITTEN[func] = _read_schema(func)
    positions, names = _WRITTEN[func]
    for position in positions:
        if position < len(args):
            yield from _tensors_in(args[position])
    for name in names:
        yield from _tensors_in(kwargs.get(name))


def _read_schema(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    arguments = func._schema.arguments if isinstance(func, torch._ops.OpOverload) else ()  # noqa: SLF001 - no public way
    written = [(i, a.name) for i, a in enumerate(arguments) if _is_written(a)]
    return tuple(i for i, _ in written), tuple(name for _, name in written)


def _is_written(argument: torch.Argument) -> bool:
    # native_batch_norm, cudnn_batch_norm and miopen_batch_norm write into these without saying so
    # (aten/src/ATen/native/native_functions.yaml).
    undeclared = argument.name in ("running_mean", "running_var")
    return undeclared or (argument.alias_info is not None and argument.alias_info.is_write)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_in(part)
