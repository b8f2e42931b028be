"""Copies the objects in ``Runner(keep=[...])``, which a step changes, and restores them.

An object has ``take()`` and ``put(taken)``, or ``state_dict()`` and ``load_state_dict(state)``, or is a tensor, a
container, an array, a generator or a dataclass. Modules are recorded as the model is (``module_state``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autobatch._formatting import name_type, show_value
from autobatch.errors import InvalidArgument
from autobatch.undo.contents import Contents, find_parts, is_copied_by_value

__all__ = ["UserObjects", "check_objects", "expand_objects"]


def check_objects(objects: Any) -> tuple[Any, ...]:
    """Return the argument of ``keep=`` as a tuple.

    Raises:
        InvalidArgument: It is not a sequence of objects, or one of them cannot be restored.
    """
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
        """Ask each for its state, and copy that."""
        self._taken = [(item, item.take()) for item in objects if _takes(item)]
        self._states = [
            (item, _copy(item.state_dict())) for item in objects if not _takes(item) and _has_state_dict(item)
        ]
        data = [item for item in objects if not _takes(item) and not _has_state_dict(item)]
        self._contents = Contents(data, whole=True)
        self._values = [(tensor, tensor.detach().clone()) for tensor in self._contents.tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore all of them. Can be done any number of times."""
        with ExitStack() as parts:  # an error of one object's own code leaves none of the others out
            for tensor, value in self._values:
                parts.callback(tensor.detach().copy_, value)
            parts.callback(self._contents.restore)
            for item, state in reversed(self._states):
                parts.callback(_load, item, state)
            for item, taken in reversed(self._taken):
                parts.callback(_put, item, taken)


def _load(item: Any, state: Any) -> None:
    # A copy, since some take the very tensors that they are given. Memory may be full: it is not counted.
    with _disable_current_modes():
        fresh = _copy(state)
    item.load_state_dict(fresh)


def _put(item: Any, taken: Any) -> None:
    with _disable_current_modes():
        fresh = _copy(taken, copy_other=lambda other: other)  # a step may be undone again: put() may keep what it gets
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
