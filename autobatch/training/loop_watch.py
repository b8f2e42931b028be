"""Finds two mistakes of a training loop: steps of another size than planned, and objects that the loop steps as well.

Both let a run train otherwise than its user thinks, and raise no error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain, islice
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

__all__ = ["StepSizes", "SteppedObjects"]

_MOST_PARAMETERS = 8
"""Parameters of an optimizer that are looked at for a count of steps; one that was never used has none."""

_NUMBERS: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


class StepSizes:
    """Decides which steps' sizes a user should hear of."""

    def __init__(self, planned: int) -> None:
        """Expect ``planned`` samples in every step."""
        self._planned, self._follows_full, self._has_reported = planned, False, False

    def surprise(self, samples: int) -> bool:
        """Return whether to warn of a step of this size.

        Once, and not of one smaller step after a full one, as at the end of an epoch. A step without samples is never
        an accident.
        """
        is_expected = samples in {0, self._planned} or (samples < self._planned and self._follows_full)
        if self._has_reported or is_expected:
            return False
        self._has_reported = True
        return True

    def note(self, samples: int) -> None:
        """Remember a committed step."""
        self._follows_full = samples == self._planned or (self._follows_full and not samples)

    def resume(self) -> None:
        """Expect that a run goes on after a full step: its next one may be the last of an epoch."""
        self._follows_full = True


class _Position(NamedTuple):
    """How far an object has come, and what ``load_state_dict()`` would put another object in place of."""

    steps: float
    kept: tuple[Any, ...]

    def is_before(self, now: _Position) -> bool:
        """Whether ``now`` was reached by steps."""
        return all(map(is_, self.kept, now.kept)) and now.steps > self.steps


_noted: WeakKeyDictionary[Any, _Position] = WeakKeyDictionary()
"""Of all Runners, some of which may share an object: where each object was after the last step of any of them."""


class SteppedObjects:
    """Schedulers, a scaler and optimizers that a Runner steps: finds those that something else has stepped as well."""

    def __init__(self, optimizers: Sequence[Any], scaler: Any | None, schedulers: Sequence[Any]) -> None:
        """Watch these."""
        self._has_reported = False
        self._watched = [
            *((one, "scheduler.step()") for one in schedulers),
            *((one, "scaler.step() and scaler.update()") for one in [scaler] if one is not None),
            *((one, "optimizer.step()") for one in optimizers),
        ]

    def note(self, *, is_ours: bool) -> None:
        """Remember where they are after a step; after one whose update the user makes, expect nothing."""
        self.forget()
        for one, _ in self._watched if is_ours and not self._has_reported else ():
            position = _read_position(one)
            if position is not None:
                with suppress(TypeError):  # of an object that has no hash or takes no weak reference
                    _noted[one] = position

    def forget(self) -> None:
        """Expect nothing of where they will be: the user has loaded a state, or a step has failed."""
        for one, _ in self._watched:
            with suppress(TypeError):
                _noted.pop(one, None)

    def find_moved(self) -> dict[str, str]:
        """Return the classes of those that were stepped since, with the calls to remove from the loop; once."""
        moved = dict[str, str]()
        for one, calls in self._watched:
            with suppress(TypeError):
                before, now = _noted.get(one), _read_position(one)
                if before is not None and now is not None and before.is_before(now):
                    moved[type(one).__name__] = calls
        self._has_reported |= bool(moved)
        return moved


def _read_position(stepped: Any) -> _Position | None:
    """Where it is, read without waiting for a device; ``None`` where it does not show."""
    for read in (_read_scheduler, _read_scaler, _read_optimizer):
        position = read(stepped)
        if position is not None:
            return position
    return None


def _read_scheduler(scheduler: Any) -> _Position | None:
    """A scheduler of torch, or of such ones."""
    members = vars(scheduler).get("_schedulers", ()) if hasattr(scheduler, "__dict__") else ()
    counted = [one for one in (scheduler, *members) if isinstance(getattr(one, "last_epoch", None), int)]
    if not counted or not hasattr(scheduler, "step") or hasattr(scheduler, "param_groups"):
        return None
    # Loaded rates are other lists, or other objects in a list, than those that were there.
    return _Position(counted[0].last_epoch, tuple(getattr(one, "base_lrs", None) for one in counted))


def _read_scaler(scaler: Any) -> _Position | None:
    """A ``GradScaler``: its numbers lie on the device, and update() writes into the scale, load_state_dict() into all."""
    scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    tensors = [one for one in (scale, tracker) if isinstance(one, torch.Tensor) and not one.is_inference()]
    if len(tensors) < 2:
        return None
    written, loaded = (one._version for one in tensors)  # noqa: SLF001 - to read them would wait for the device
    return _Position(written, (*tensors, loaded))


def _read_optimizer(optimizer: Any) -> _Position | None:
    """One that counts its steps in Python or on the host."""
    state, groups = getattr(optimizer, "state", None), getattr(optimizer, "param_groups", ())
    parameters: Iterable[Any] = islice(chain.from_iterable(group["params"] for group in groups), _MOST_PARAMETERS)
    for parameter in parameters:
        entry = state.get(parameter) if isinstance(state, dict) else None
        step = entry.get("step") if isinstance(entry, dict) else None
        if isinstance(step, torch.Tensor):
            kind = _NUMBERS.get(step.dtype) if type(step) is torch.Tensor and step.device.type == "cpu" else None
            # Not by an operator, which may run out of memory where the step is over.
            return None if kind is None else _Position(kind.from_address(step.data_ptr()).value, (step,))
        if isinstance(step, int | float):
            return _Position(step, (state,))
    return None
