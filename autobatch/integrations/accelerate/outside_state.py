"""Records what a training function is given and names: models, optimizers, what accelerate keeps beside them.

Covers its arguments, closure and globals, and attributes of those: modules, torch optimizers, schedulers, scalers, the
``Accelerator`` and its state, the random generators of the process and those that are objects, arrays, tensors, and
containers of tensors. Does not cover what a call changes elsewhere: files, trackers, the position of an iterator or a
dataset, names that are bound anew, nor containers without tensors, in which a function notes what it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from autobatch._wrappers import SeveralOptimizers
from autobatch.memory.device import Device
from autobatch.memory.host_limit import read_host_memory
from autobatch.step.reachable import attributes_of, parts_of, walk
from autobatch.torch_internals.storages import storages_of
from autobatch.undo.containers import children_of, find_contents, is_copied_by_value
from autobatch.undo.training_state import TrainingState
from autobatch.undo.user_objects import UserObjects

__all__ = ["OutsideState"]

_RECORDED = (LRScheduler, AcceleratedScheduler, torch.amp.GradScaler, Accelerator, GradientState)
"""Whose attributes a training step changes; what an attempt has prepared stays in lists of the last two."""
_LEAST_BYTES = 16 * 1024**2  # as of arrays; so much is copied beside any model
_AVERAGES = 2  # times the model


class OutsideState:
    """What was there before a function was called."""

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: Device
    ) -> None:
        """Copy it to host memory.

        Raises:
            DoesNotFit: Neither host memory nor the disk has space for the copies.
        """
        reached = [*walk((function, [*args], {**kwargs}, GradientState()), _lead)]
        modules = nn.ModuleList([value for value in reached if isinstance(value, nn.Module)])
        optimizers = [value for value in reached if isinstance(value, torch.optim.Optimizer)]
        beside = [value for value in reached if _is_beside(value)]
        tensors = find_contents(beside).tensors
        self._known = [*tensors, *modules.parameters(), *modules.buffers()]
        device.watch(self._known)
        self._objects = UserObjects([vars(value) for value in reached if isinstance(value, _RECORDED)])
        host_bytes = read_host_memory().available_bytes // 2
        optimizer = SeveralOptimizers(optimizers) if optimizers else None
        self._state = TrainingState(
            modules, optimizer, device.torch_device, host_bytes=host_bytes, outside=(*beside, *tensors)
        )
        of_model = [*modules.parameters(), *modules.buffers(), *_states_of(optimizers)]
        taken = _storages_in(of_model)
        values = [tensor for tensor in tensors if not taken.keys() & _storages_in([tensor]).keys()]
        self._values = _OutsideTensors(
            values, model_bytes=sum(storage.nbytes() for storage in taken.values()), host_bytes=host_bytes // 2
        )
        self._state.restore()  # the hooks of the optimizers, which recording has removed

    def bytes_with(self, others: Iterable[torch.Tensor], kind: str) -> int:
        """Bytes on a kind of device of all tensors that were found, and of some others; each memory counts once."""
        storages = _storages_in(chain(self._known, others)).values()
        return sum(storage.nbytes() for storage in storages if storage.device.type == kind)

    def restore(self) -> None:
        """Put all of it back. Can be done any number of times."""
        self._state.restore()
        self._values.restore()
        self._objects.put_back()

    def drop(self) -> None:
        """Free the copies."""
        self._state.drop()
        self._values.drop()
        self._known = []


def _lead(value: Any) -> Iterator[Any]:
    is_end = isinstance(value, nn.Module | torch.Tensor | torch.optim.Optimizer)
    return iter(()) if is_end else parts_of(value, attributes_of)


def _is_beside(value: Any) -> bool:
    """Whether it is a tensor, a container of tensors, a generator or an array."""
    if isinstance(value, dict | list | deque | set):
        return any(isinstance(entry, torch.Tensor) for entry in children_of(value))
    return isinstance(value, torch.Tensor) or is_copied_by_value(type(value))


def _states_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    entries = [entry for optimizer in optimizers for entry in optimizer.state.values() if isinstance(entry, dict)]
    return [one for entry in entries for one in entry.values() if isinstance(one, torch.Tensor)]


def _storages_in(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    return {storage._cdata: storage for tensor in tensors for storage in storages_of(tensor)}


class _OutsideTensors:
    """The values of tensors at one moment, in host memory."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, model_bytes: int, host_bytes: int) -> None:
        """Copy them, the smallest first.

        Args:
            tensors: What to copy; those that share memory are copied once.
            model_bytes: What the modules and optimizers take.
            host_bytes: Host memory that copies may take.
        """
        storages = _storages_in(tensors)
        left = min(max(_AVERAGES * model_bytes, _LEAST_BYTES), host_bytes)
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in sorted(storages.values(), key=torch.UntypedStorage.nbytes):
            left -= storage.nbytes()
            if left < 0:
                return
            copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
            self._copies.append((storage, copy.copy_(storage, non_blocking=False)))

    def restore(self) -> None:
        """Put the values back that have changed. Can be done any number of times."""
        for storage, copy in self._copies:
            if storage.nbytes() != copy.nbytes():  # resize_ was called on it
                storage.resize_(copy.nbytes())
            # On the host it may be a file that is open for reading, and to write into that ends the process.
            if storage.device.type != "cpu" or not torch.equal(_bytes_in(storage), _bytes_in(copy)):
                storage.copy_(copy, non_blocking=False)

    def drop(self) -> None:
        """Free the copies."""
        self._copies = []


def _bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
