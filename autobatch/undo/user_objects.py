"""Copies the objects in ``Runner(keep=[...])``, which a step changes, and restores them.

An object has ``take()`` and ``put(taken)``, or ``state_dict()`` and ``load_state_dict(state)``, or is a tensor, a
container, an array, a generator or a dataclass. Modules are recorded as the model is (``module_state``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autobatch._formatting import name_type, show_value
from autobatch.errors import InvalidArgument
from autobatch.undo.contents import Contents, find_parts, is_copied_by_value
from autobatch.undo.interrupts import restore_each


def check_objects(objects: Any) -> tuple[Any, ...]:
    """Return the argument of ``keep=`` as a tuple."""
    if not isinstance(objects, list | tuple):
        raise InvalidArgument(f"keep={show_value(objects)}: pass a list of objects, keep=[...]")
    for index, item in enumerate(objects):
        if not _can_be_put_back(item):
            raise InvalidArgument(
                f"keep[{index}] is {name_type(item)}, which cannot be put back: give it state_dict() and "
                f"load_state_dict(state), or take() and put(taken)"
            )
    return tuple(objects)


def expand_objects(objects: Sequence[Any]) -> list[Any]:
    """The objects, and those inside the lists, tuples and dicts among them, which may be modules or have methods."""
    found: list[Any] = []
    waiting = [*objects]
    while waiting:
        item = waiting.pop()
        if any(item is one for one in found):
            continue
        found.append(item)
        if not _takes(item) and not _has_state_dict(item):
            waiting += find_parts(item)
    return [item for item in found if _can_be_put_back(item)]


class UserObjects:
    """Record of the values that the user's objects held at one moment."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._taken = [(item, item.take()) for item in objects if _takes(item)]
        self._states = [
            (item, _copy(item.state_dict())) for item in objects if not _takes(item) and _has_state_dict(item)
        ]
        data = [item for item in objects if not _takes(item) and not _has_state_dict(item)]
        self._contents = Contents(data, whole=True)
        self._values = [(tensor, tensor.detach().clone()) for tensor in self._contents.tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all of them. Can be done any number of times."""
        restore_each(
            *(partial(_put, item, taken) for item, taken in self._taken),
            *(partial(_load, item, state) for item, state in self._states),
            self._contents.restore,
            *(partial(tensor.detach().copy_, value) for tensor, value in self._values),
        )


# An object may keep what it is given, and change it; a step may be undone again. So both get copies, which are not
# counted: memory may be full.


def _load(item: Any, state: Any) -> None:
    with _disable_current_modes():
        fresh = _copy(state)
    item.load_state_dict(fresh)


def _put(item: Any, taken: Any) -> None:
    with _disable_current_modes():
        fresh = _copy(taken, copy_other=lambda other: other)
    item.put(fresh)


def _can_be_put_back(item: Any) -> bool:
    is_known = isinstance(item, nn.Module) or _takes(item) or _has_state_dict(item) or _is_data(item)
    return is_known and not isinstance(item, type)


def _takes(item: Any) -> bool:
    has_both = callable(getattr(item, "take", None)) and callable(getattr(item, "put", None))
    is_array = is_copied_by_value(type(item))  # which has methods by these names, too
    return has_both and not is_array and (is_dataclass(item) or not _is_data(item))


def _has_state_dict(item: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return not isinstance(item, nn.Module) and all(callable(getattr(item, name, None)) for name in names)


def _is_data(item: Any) -> bool:
    found = Contents([item], whole=True)
    return not found.is_empty() or (isinstance(item, tuple) and not found.modules)


def _copy(state: Any, copy_other: Callable[[Any], Any] = copy.deepcopy) -> Any:
    """Copy tensors without their graphs, and containers; everything else by ``copy_other``."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        fresh = copy.copy(state)
        for key, value in state.items():
            fresh[key] = _copy(value, copy_other)
        return fresh
    if type(state) in (list, tuple, set):
        return type(state)(_copy(value, copy_other) for value in state)
    return copy_other(state)
