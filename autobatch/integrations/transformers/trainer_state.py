"""Records what a step changes in the Trainer itself, and what a checkpoint needs to go on in the same micro-batches.

Covers numbers and small containers in the Trainer's attributes, such as TRL's metrics, which a step that is undone must
put back; and the callback that saves plan and size in ``trainer_state.json``. Does not cover objects of other classes
in attributes, which are named with ``keep=``.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

__all__ = ["AutobatchState", "TrainerAttributes"]

_MOST_ENTRIES = 1000
"""Of a container in an attribute; a larger one is data, not a count."""
_PLAIN = (int, float, bool, complex, str, bytes, type(None))


class TrainerAttributes:
    """The Trainer's attributes that hold plain data, as an object that a Runner keeps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def take(self) -> dict[str, Any]:
        """Copies of all of them."""
        attributes = vars(self._trainer)
        return {name: _copy(value) for name, value in attributes.items() if _is_data(value)}

    def put(self, taken: dict[str, Any]) -> None:
        """Put them back; those that have come since are removed."""
        attributes = vars(self._trainer)
        for name in [name for name, value in attributes.items() if name not in taken and _is_data(value)]:
            del attributes[name]
        attributes.update({name: _copy(value) for name, value in taken.items()})


class AutobatchState(TrainerCallback, ExportableState):  # type: ignore[misc] # transformers is not typed
    """Saves with each checkpoint what the training runs in; the Trainer writes it to ``trainer_state.json``."""

    def __init__(self, read: Callable[[], dict[str, Any] | None] | None = None) -> None:
        self.read = read
        self.saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"args": {}, "attributes": {"saved": self.read() if self.read is not None else self.saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint that was made without it has no entry, and the Trainer would not make one."""
        if isinstance(state.stateful_callbacks, dict):
            state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    @classmethod
    def attach_to(cls, trainer: Any, read: Callable[[], dict[str, Any] | None]) -> None:
        """Let the Trainer's callbacks of this class read what is saved: a resumed Trainer may have made its own."""
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, cls):
                callback.read = read

    @classmethod
    def saved_in(cls, state: Any) -> dict[str, Any] | None:
        """What a loaded checkpoint has; ``None`` where it was made without autobatch, or before its first step."""
        entries = state.stateful_callbacks if isinstance(state.stateful_callbacks, dict) else {}
        entry = entries.get(cls.__name__)
        latest = entry[-1] if isinstance(entry, list) and entry else entry
        saved: dict[str, Any] | None = latest["attributes"]["saved"] if isinstance(latest, dict) else None
        return saved


def _is_data(value: Any) -> bool:
    """Whether it and all that it holds are numbers, texts and small tensors."""
    if isinstance(value, _PLAIN):
        return True
    return all(_is_entry(entry) for entry in _walk(value)) if _is_container(value) else _is_small_tensor(value)


def _walk(container: Any) -> Iterator[Any]:
    """Everything inside; one entry too many is no data."""
    waiting, seen = [container], 0
    while waiting:
        value = waiting.pop()
        entries = [*value.values()] if isinstance(value, dict) else [*value]
        seen += len(entries)
        if seen > _MOST_ENTRIES:
            yield object()
            return
        yield from (entry for entry in entries if not _is_container(entry))
        waiting += filter(_is_container, entries)


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, set, deque)) and len(value) <= _MOST_ENTRIES


def _is_entry(value: Any) -> bool:
    return isinstance(value, _PLAIN) or _is_small_tensor(value)


def _is_small_tensor(value: Any) -> bool:
    return type(value) is torch.Tensor and not value.requires_grad and value.numel() <= _MOST_ENTRIES


def _copy(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)
