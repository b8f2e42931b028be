"""Finds mistakes of a training loop that let a run train otherwise than its user thinks, and raise no error.

- A step that writes into its batch or into gradients, which a retry could not undo. Tensors count their writes. NumPy
  arrays do not: copies of them are compared, in watched steps only.
- A step of another size than planned.
- Optimizers, scalers and schedulers that the loop steps as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch

from autobatch.batch.samples import refuse_meta
from autobatch.batch.tree import is_array, leaves_of
from autobatch.errors import InvalidArgument
from autobatch.torch_internals.storages import storages_of
from autobatch.undo.gradients import Float32Sums
from autobatch.undo.written_memory import Saved

_MOST_PARAMETERS = 8
"""Parameters of an optimizer that are looked at for a count of steps; one that was never used has none."""

_NO_ENTRY: dict[str, Any] = {}

WROTE_INTO_BATCH = (
    "the step wrote into its batch in place, so a retry, or the next epoch, would see it changed; work on a copy"
)


class BatchWatch:
    """Whether a step has written into its batches.

    Attributes:
        tensors: The batches' tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], batches: Sequence[Any] = ()) -> None:
        for tensor in tensors:
            if tensor.is_meta:
                refuse_meta(tensor)
            if tensor.requires_grad:
                _refuse_graph(tensor)
        self.tensors = tensors
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._counted]
        arrays = [leaf for leaf in leaves_of([*batches]) if _can_be_watched(leaf)] if batches else []
        self._arrays = [(array, array.copy()) for array in arrays]

    def refuse_writes(self, copied: Saved, *, stays: bool) -> None:
        """Refuse a step that wrote into its batch. Arrays are restored.

        ``copied`` memory can be restored. All else ``stays`` written where the user sees the batch.
        """
        written = [array for array, copy in self._arrays if array.tobytes() != copy.tobytes()]
        for array, copy in self._arrays if written else ():
            array[...] = copy
        counts = zip(self._counted, self._versions, strict=True)
        moved = [tensor for tensor, count in counts if tensor._version != count]  # a view counts with its base
        keys = {storage._cdata for tensor in self.tensors for storage in storages_of(tensor)} & copied.keys()
        is_recorded = any(not torch.equal(*copied[key]) for key in keys)
        if moved or is_recorded or written:
            is_lost = any(storage._cdata not in copied for tensor in moved for storage in storages_of(tensor))
            raise InvalidArgument(
                WROTE_INTO_BATCH + (" (the batch stays as the step left it)" if is_lost and stays else "")
            )


class GradientWatch:
    """Whether a forward pass has changed a gradient."""

    def __init__(self, parameters: Sequence[torch.Tensor], sums: Float32Sums) -> None:
        """Note every ``.grad``, and how often it and each float32 sum was written into."""
        self._parameters, self._sums = parameters, sums
        self._before = self._read()

    def _read(self) -> list[tuple[torch.Tensor | None, int]]:
        gradients = [*(parameter.grad for parameter in self._parameters), *self._sums.by_parameter.values()]
        return [(gradient, -1 if gradient is None else gradient._version) for gradient in gradients]

    def refuse_change(self) -> None:
        now = self._read()
        same = len(now) == len(self._before) and all(
            new is old and count == before for (new, count), (old, before) in zip(now, self._before, strict=True)
        )
        if not same:
            raise InvalidArgument(
                "the step changed .grad: return the loss only, and leave backward() and zero_grad() to autobatch"
            )


def _refuse_graph(tensor: torch.Tensor) -> None:
    """Refuse a tensor that was computed from one that requires a gradient; a view of a leaf was not."""
    base = tensor._base if tensor._is_view() and tensor._base is not None else tensor  # noqa: SLF001 - no public equivalent
    if base.grad_fn is not None:
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} in the batch carries a graph, from which micro-batches are "
            f"cut off: compute it inside the step, or detach() it"
        )


def _can_be_watched(leaf: Any) -> bool:
    return is_array(leaf) and leaf.flags.writeable and not leaf.dtype.hasobject


class StepSizes:
    """Decides which step sizes deserve a warning.

    Attributes:
        planned: Number of samples in every step.
        last: Number of samples in the last committed step that had any.
    """

    def __init__(self, planned: int) -> None:
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
                if step.device.type != "cpu" or step.ndim:
                    return None
                count: Any = step.tolist()  # which runs no operator
                return count, (step,)
            if type(step) is int or type(step) is float:
                return step, (state,)
            looked_at += 1
            if looked_at == _MOST_PARAMETERS:
                return None
    return None
