"""Records what a training function is given and names: models, optimizers, what accelerate keeps beside them.

Covers its arguments, closure and globals, and attributes of those: modules, torch optimizers, schedulers, scalers, the
``Accelerator`` and its state, and the random generators. Does not cover what a call changes elsewhere: files, trackers,
the position of a dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from autobatch.state.training_state import TrainingState
from autobatch.state.user_objects import UserObjects
from autobatch.step.reachable import attributes_of, parts_of, walk

__all__ = ["OutsideState"]

_RECORDED = (LRScheduler, AcceleratedScheduler, torch.amp.GradScaler, Accelerator, GradientState)
"""Whose attributes a training step changes; what an attempt has prepared stays in lists of the last two."""


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
        tensors = [value for value in reached if isinstance(value, torch.Tensor)]
        device.watch([*tensors, *modules.parameters(), *modules.buffers()])
        self._objects = UserObjects([vars(value) for value in reached if isinstance(value, _RECORDED)])
        host_bytes = read_host_memory().available_bytes // 2
        optimizer = SeveralOptimizers(optimizers) if optimizers else None
        self._state = TrainingState(modules, optimizer, device.torch_device, host_bytes=host_bytes)
        self._state.restore()  # the hooks of the optimizers, which recording has removed

    def restore(self) -> None:
        """Put all of it back. Can be done any number of times."""
        self._state.restore()
        self._objects.put_back()

    def drop(self) -> None:
        """Free the copies."""
        self._state.drop()


def _lead(value: Any) -> Iterator[Any]:
    is_end = isinstance(value, nn.Module | torch.Tensor | torch.optim.Optimizer)
    return iter(()) if is_end else parts_of(value, attributes_of)
