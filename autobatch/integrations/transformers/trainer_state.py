"""Records what steps and evaluations change in the Trainer, and saves plan and size with its checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from autobatch.integrations.transformers.logs import TABLES
from autobatch.undo.contents import Contents
from autobatch.undo.undo import Undo

_MOST_ENTRIES = 1000  # of a container in an attribute; a larger one is data, not a count
_MOST_METRICS = 10**6  # of TRL's lists, which have an entry for each step since the last log
_PLAIN = (int, float, bool, complex, str, bytes, type(None))


@dataclass(frozen=True)
class _Attributes:
    data: dict[str, Any]  # plain data by name; a callback may hold the same objects, so they stay the same
    others: frozenset[str]  # names of all other attributes; their objects may hold a batch's memory
    found: Contents  # what each container in the data held
    values: list[tuple[torch.Tensor, torch.Tensor]]  # tensors in the data, with copies


class TrainerAttributes:
    """The Trainer's attributes that hold plain data, as an object that a Runner keeps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def take(self) -> _Attributes:
        attributes = vars(self._trainer)
        most = dict.fromkeys(TABLES, _MOST_METRICS)
        data = {name: one for name, one in attributes.items() if _is_data(one, most.get(name, _MOST_ENTRIES))}
        found = Contents(data.values())
        values = [(tensor, tensor.detach().clone()) for tensor in found.tensors]
        others = frozenset(attributes) - frozenset(data)
        return _Attributes(data, others, found, values)

    @torch.no_grad()
    def put(self, taken: _Attributes) -> None:
        """Restore them in the same objects; remove those that are new."""
        attributes = vars(self._trainer)
        known = taken.others | taken.data.keys()
        for name in [name for name, value in attributes.items() if name not in known and _is_data(value)]:
            del attributes[name]
        attributes.update(taken.data)
        taken.found.restore()
        for tensor, value in taken.values:
            if tensor.shape != value.shape:  # it was resized, or got other memory
                tensor.data = value.clone()
            elif not torch.equal(tensor, value):  # an expanded one, which has its value, cannot be written into
                with torch.inference_mode(tensor.is_inference()):
                    tensor.copy_(value)


def _is_data(value: Any, most: int = _MOST_ENTRIES) -> bool:
    """Return whether it and all that it holds are numbers, texts and small tensors, and not too many."""
    waiting, seen = [value], 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list | tuple | set | deque):
            seen += len(one)
            if seen > most:
                return False
            waiting += one.values() if isinstance(one, dict) else one
        elif not isinstance(one, _PLAIN):
            is_tensor = type(one) is torch.Tensor and not one.requires_grad
            if not is_tensor or one.numel() > _MOST_ENTRIES:
                return False
    return True


@contextmanager
def undone(trainer: Any, model: nn.Module, device: torch.device, keep: Sequence[Any]) -> Iterator[None]:
    """Undo at the block's end what its passes changed, also in memory that only the user's objects hold."""
    before = Undo(model, device, keep=[TrainerAttributes(trainer), *keep])
    try:
        with before.watch():
            yield
    finally:
        before.restore()


class AutobatchState(TrainerCallback, ExportableState):  # type: ignore[misc] # transformers is not typed
    """Saves plan and size with each checkpoint; the Trainer writes it to ``trainer_state.json``."""

    def __init__(self, read: Callable[[], dict[str, Any] | None] | None = None) -> None:
        self.read = read
        self.saved: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saved": self.read() if self.read is not None else self.saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add an entry to the state of a checkpoint that was made without autobatch: the Trainer adds none."""
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
        """Return what a loaded checkpoint has; ``None`` if it was made without autobatch, or before its first step."""
        entries = state.stateful_callbacks if isinstance(state.stateful_callbacks, dict) else {}
        entry = entries.get(cls.__name__)
        latest = entry[-1] if isinstance(entry, list) and entry else entry
        saved: dict[str, Any] | None = latest["attributes"]["saved"] if isinstance(latest, dict) else None
        return saved
