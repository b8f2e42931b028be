"""Records what steps and evaluations change, of the Trainer's own too, and what a checkpoint needs to go on.

Covers numbers and small containers in the Trainer's attributes, which a step that is undone must put back, and lists of
TRL's metrics however long they are; of an evaluation also random numbers and what the model holds, but no parameters:
none changes them; and the callback that saves plan and size in ``trainer_state.json``. Does not cover objects of other
classes in attributes, which are named with ``keep=``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from autobatch.integrations.transformers.metrics import MetricLengths
from autobatch.memory.device import Device
from autobatch.undo.containers import Found, find_contents
from autobatch.undo.undo import Undo

__all__ = ["AutobatchState", "EvaluationState", "TrainerAttributes"]

_MOST_ENTRIES = 1000
"""Of a container in an attribute; a larger one is data, not a count."""
_PLAIN = (int, float, bool, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Attributes:
    """What the Trainer's attributes held at one moment.

    Attributes:
        data: The objects that are plain data, by name: they may be a callback's too, so they stay the same objects.
        others: Names of all other attributes. Their objects are not held: they may hold the memory of a batch.
        found: What each container in the data held.
        values: Copies of the tensors in the data.
        metrics: How long the lists of TRL's metrics were.
    """

    data: dict[str, Any]
    others: frozenset[str]
    found: Found
    values: list[tuple[torch.Tensor, torch.Tensor]]
    metrics: MetricLengths


class TrainerAttributes:
    """The Trainer's attributes that hold plain data, as an object that a Runner keeps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def take(self) -> Attributes:
        """What all of them hold."""
        attributes = vars(self._trainer)
        data = {name: value for name, value in attributes.items() if _is_data(value)}
        found = find_contents(data.values())
        values = [(tensor, tensor.detach().clone()) for tensor in found.tensors]
        others = frozenset(attributes) - frozenset(data)
        return Attributes(data, others, found, values, MetricLengths(self._trainer))

    @torch.no_grad()
    def put(self, taken: Attributes) -> None:
        """Put it back into the same objects; those that have come since are removed."""
        attributes = vars(self._trainer)
        known = taken.others | taken.data.keys()
        for name in [name for name, value in attributes.items() if name not in known and _is_data(value)]:
            del attributes[name]
        attributes.update(taken.data)
        taken.found.put_back()
        taken.metrics.shorten()
        for tensor, value in taken.values:
            _write(tensor, value)


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


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor its earlier value; one that has it is not touched, as an expanded one cannot be written into."""
    if tensor.shape != value.shape:  # it was resized, or given other memory
        tensor.data = value.clone()
    elif not torch.equal(tensor, value):
        with torch.inference_mode(tensor.is_inference()):
            tensor.copy_(value)


class EvaluationState:
    """What passes of one Trainer's evaluations may change.

    Args:
        trainer: Whose attributes are recorded.
        device: Whose random numbers are.
        keep: Objects of the user that a pass changes.
    """

    def __init__(self, trainer: Any, device: Callable[[], Device], keep: Sequence[Any]) -> None:
        self._attributes, self._device, self._keep = TrainerAttributes(trainer), device, keep
        self._begun: tuple[Attributes, Undo] | None = None

    def begin(self, model: nn.Module) -> Undo:
        """Record all of it before a pass, in the place of what was recorded before another."""
        self.end()
        point = Undo(model, self._device().torch_device, keep=self._keep)
        self._begun = self._attributes.take(), point
        return point

    @contextmanager
    def undone(self, model: nn.Module) -> Iterator[None]:
        """A block after which all of it is as before, and all memory that is written into in it, whoever holds it."""
        try:
            with self.begin(model).watch():
                yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Make it what it was; nothing is done where memory ended before all of it was recorded."""
        if self._begun is None:
            return
        taken, point = self._begun
        with ExitStack() as parts:  # what one of them raises leaves the other not out
            parts.callback(point.restore)  # last: it puts random numbers back
            parts.callback(self._attributes.put, taken)
        self.end()

    def end(self) -> None:
        """Drop the record: the pass was the evaluation's own."""
        if self._begun is not None:
            self._begun[1].release()
        self._begun = None
