"""Finds two mistakes of a training loop: steps of another size than planned, and objects that the loop steps as well.

Both let a run train otherwise than its user thinks, and raise no error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = ["StepSizes", "SteppedObjects"]

_MOST_PARAMETERS = 8
"""Parameters of an optimizer that are looked at for a count of steps; one that was never used has none."""

_NO_ENTRY: dict[str, Any] = {}
_NUMBERS: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


class StepSizes:
    """Decides which step sizes deserve a warning.

    Attributes:
        planned: Number of samples in every step.
        last: Number of samples in the last committed step that had any.
    """

    def __init__(self, planned: int) -> None:
        """Begin before the first step."""
        self.planned, self.last, self._has_reported = planned, 0, False

    def surprise(self, samples: int) -> bool:
        """Return whether to warn of a step of this size.

        It warns once, and not of one smaller step after a full one, as at the end of an epoch. A rank whose loader has
        ended runs steps without samples on purpose.
        """
        is_expected = samples in {0, self.planned} or (samples < self.planned == self.last)
        if self._has_reported or is_expected:
            return False
        self._has_reported = True
        return True


class SteppedObjects:
    """Finds schedulers, scalers and optimizers of a Runner that something else has stepped as well.

    It is asked in every step, so it makes few calls.
    """

    def __init__(self, optimizers: Sequence[Any], scaler: Any | None, schedulers: Sequence[Any]) -> None:
        """Watch these."""
        self._has_reported = False
        watched: list[tuple[Any, _Read, str]] = [
            *((one, _read_scheduler, "scheduler.step()") for one in schedulers),
            *((one, _read_scaler, "scaler.step() and scaler.update()") for one in [scaler] if one is not None),
            *((one, _read_optimizer, "optimizer.step()") for one in optimizers),
        ]
        self._watched = [(one, read, calls, _share_notes(one)) for one, read, calls in watched]

    def note(self, *, is_ours: bool) -> None:
        """Remember positions after a step of the Runner; forget them if the update is the user's."""
        for one, read, _, notes in self._watched:
            try:
                notes[0] = read(one) if is_ours and not self._has_reported else None
            except Exception:  # noqa: BLE001 - of a user's class: the step is committed, and must not fail
                notes[0] = None

    def forget(self) -> None:
        """Forget positions: the user has loaded a state, or a step has failed."""
        self.note(is_ours=False)

    def find_moved(self) -> dict[str, str]:
        """Return the classes of those that were stepped since, with the calls to remove from the loop; once."""
        moved = dict[str, str]()
        for one, read, calls, notes in self._watched:
            before = notes[0]
            now = None if before is None else read(one)
            if before and now and before[0] < now[0] and all(map(is_, before[1], now[1])):
                moved[type(one).__name__] = calls
                self._has_reported = True
        return moved


_Position = tuple[float, tuple[Any, ...]]
"""Number of steps of an object, and parts of it that ``load_state_dict()`` replaces."""

_Read = Callable[[Any], _Position | None]

_notes: WeakKeyDictionary[Any, list[_Position | None]] = WeakKeyDictionary()
"""Where each object was after the last step of any Runner, since two Runners may share it."""


def _share_notes(one: Any) -> list[_Position | None]:
    """Return the one entry that all Runners of an object have."""
    try:
        return _notes.setdefault(one, [None])
    except TypeError:  # it has no hash, or takes no weak reference
        return [None]


# How far an object has come, read without an operator, which may run out of memory, and without waiting for a device;
# ``None`` if it does not show.


def _read_scheduler(scheduler: Any) -> _Position | None:
    """Read a torch scheduler, or one that is made of such."""
    held = vars(scheduler)
    # Loaded rates are another list than the one that was there.
    if type(held.get("last_epoch")) is int and "base_lrs" in held:
        return held["last_epoch"], (held["base_lrs"],)
    members = [one for one in held.get("_schedulers", ()) if type(getattr(one, "last_epoch", None)) is int]
    if not members:
        return (held["last_epoch"], ()) if type(held.get("last_epoch")) is int else None
    steps = held.get("last_epoch", members[0].last_epoch)
    return steps, tuple(getattr(one, "base_lrs", None) for one in members)


def _read_scaler(scaler: Any) -> _Position | None:
    """Read a ``GradScaler`` on the device: update() writes into the scale, load_state_dict() into both tensors."""
    scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    tensors = [one for one in (scale, tracker) if isinstance(one, torch.Tensor) and not one.is_inference()]
    if len(tensors) < 2:
        return None
    written, loaded = (one._version for one in tensors)
    return written, (*tensors, loaded)


def _read_optimizer(optimizer: Any) -> _Position | None:
    """Read an optimizer that counts its steps in Python or on the host."""
    state, looked_at = optimizer.state, 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            step = state.get(parameter, _NO_ENTRY).get("step") if isinstance(state, dict) else None
            if type(step) is torch.Tensor:
                kind = _NUMBERS.get(step.dtype) if step.device.type == "cpu" else None
                return None if kind is None else (kind.from_address(step.data_ptr()).value, (step,))
            if type(step) is int or type(step) is float:
                return step, (state,)
            looked_at += 1
            if looked_at == _MOST_PARAMETERS:
                return None
    return None
