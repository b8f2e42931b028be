"""Finds the batch size that a training function fits with: accelerate's decorator, by measured steps.

Covers the search, the call that trains, and what follows where memory ends later. Where steps cannot be measured it
does what accelerate's own does: it begins with the largest size and goes down by a tenth when memory ends.
"""

from __future__ import annotations

import functools
import inspect
import logging
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.state import PartialState

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument
from autobatch.events import TrialFinished, emit
from autobatch.integrations.accelerate.calls import Call, Calls
from autobatch.integrations.accelerate.named_steps import trains
from autobatch.integrations.accelerate.next_batch_size import next_batch_size
from autobatch.integrations.accelerate.outside_state import OutsideState
from autobatch.integrations.accelerate.step_watch import StepWatch
from autobatch.memory.cpu import CpuDevice
from autobatch.memory.device import Device
from autobatch.memory.devices import find_allowance, open_device
from autobatch.memory.oom import describe_error
from autobatch.planning.evidence import Evidence, Question
from autobatch.records import Trial

__all__ = ["find_executable_batch_size"]

_log = logging.getLogger("autobatch")


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    budget: int | str | None = None,
    headroom: float | str | None = None,
    device: torch.device | str | Device | None = None,
) -> Any:
    """Call a training function with the largest batch size that fits; ``accelerate.utils`` has one of the same name.

    The function is called with two samples, then with more, and each of these calls is ended after its second optimizer
    step, which is measured. The call whose size is the answer goes on to its end. What the function is given or names
    is put back between calls: models, optimizers, schedulers, scalers, the ``Accelerator``, random generators, tensors,
    containers of tensors. What it does elsewhere before its second step, such as a line in a file or what it takes from
    an iterator, is done once a call, as with accelerate's own.

    It does what accelerate's own does, calls beginning with ``starting_batch_size``, where steps cannot be measured: in
    a function that calls no ``step()`` or raises an error with few samples, with several processes, and on devices that
    do not report memory. The size that was found holds for later calls.

    Args:
        function: Takes the batch size as its first argument. ``None``: a decorator is returned.
        starting_batch_size: The largest size.
        reduce_batch_size_fn: Called without arguments for the next size after a failed one. Then sizes are those that
            it gives, and none is tried that is measured to be too large.
        budget: What this process may hold, in bytes or as ``"8GiB"``; default: what is free to it plus what it holds.
            It is enforced in all calls.
        headroom: Left free of the budget when a size is chosen: bytes, a text, or a fraction; default 5 %.
        device: Where the function trains; default: accelerate's device.

    Returns:
        The function without its first argument, which returns what the function returns.

    Raises:
        InvalidArgument: When it is called: an argument cannot mean anything.
        RuntimeError: When it is called: no size fits. The text is accelerate's.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            budget=budget,
            headroom=headroom,
            device=device,
        )
    sizes = _BatchSizes(
        function, starting_batch_size, reduce_batch_size_fn, budget=budget, headroom=headroom, device=device
    )

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return sizes.run(args, kwargs)

    return run


class _BatchSizes:
    """The batch size of one function, from call to call."""

    def __init__(
        self,
        function: Callable[..., Any],
        starting_batch_size: int,
        reduce_batch_size_fn: Callable[[], int] | None,
        *,
        budget: int | str | None,
        headroom: float | str | None,
        device: torch.device | str | Device | None,
    ) -> None:
        self._function, self._size, self._reduce_fn = function, starting_batch_size, reduce_batch_size_fn
        self._name: str = getattr(function, "__name__", type(function).__name__)  # a partial has none
        self._budget, self._headroom, self._device = budget, headroom, device
        self._is_searched = False

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function with the largest size that fits."""
        self._refuse_batch_size(args)
        if not isinstance(self._size, numbers.Integral) or isinstance(self._size, bool):
            raise InvalidArgument(f"starting_batch_size={show_value(self._size)} must be an int: it counts samples")
        if self._reduce_fn is not None and not callable(self._reduce_fn):
            raise InvalidArgument(f"reduce_batch_size_fn={show_value(self._reduce_fn)} must be a function")
        device = open_device(_current_device() if self._device is None else self._device)
        device.reclaim()
        outside = OutsideState(self._function, args, kwargs, device)
        try:
            calls = Calls(
                lambda size: self._function(size, *args, **kwargs),
                device,
                find_allowance(device, self._budget, self._headroom),
                self._budget is not None or not isinstance(device, CpuDevice),
                outside,
            )
            can_measure = self._can_measure(device) and trains(self._function, [*args, *kwargs.values()])
            call = self._search(calls) if can_measure else None
            return self._go_down(calls) if call is None else call.result
        finally:
            outside.drop()

    def _refuse_batch_size(self, args: Sequence[Any]) -> None:
        parameters = inspect.signature(self._function).parameters.values()
        if not parameters:
            raise TypeError(f"{self._name}() takes no argument, and its first is to be the batch size")
        has_any_number = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
        if len(args) + 1 > len(parameters) and not has_any_number:
            raise TypeError(
                f"{self._name}() gets its batch size from the decorator: call it with at most "
                f"{len(parameters) - 1} arguments, not {len(args)}"
            )

    def _can_measure(self, device: Device) -> bool:
        is_new, self._is_searched = not self._is_searched, True
        return is_new and self._size > 1 and device.measures and _processes() == 1

    def _search(self, calls: Calls) -> Call | None:
        """Find the size; returns the call that trained with it, where there was one."""
        question = Question(bound=self._size, limit_bytes=calls.allowance.limit_bytes, smallest_probe=2)
        may_go_on = calls.enforces and self._reduce_fn is None
        trials: list[Trial] = []

        def is_answer(trial: Trial) -> bool:
            seen = [*trials, trial]
            return may_go_on and next_batch_size(question, seen) is None and Evidence(question, seen).lowest == size

        while (size := next_batch_size(question, trials)) is not None:
            watch = StepWatch(size, calls.device, calls.outside, is_answer)
            call = self._try(calls, size, watch)
            if call is not None and watch.is_answer:
                return self._end(call, size)
            if call is None or (call.ended == "stopped" and watch.trial is None):
                return None
            out_of_memory = Trial(micro_batch_size=size, outcome="oom")
            trials.append(watch.trial if watch.trial is not None and call.ended == "stopped" else out_of_memory)
            emit(TrialFinished(trial=trials[-1], limit_bytes=question.limit_bytes))
        self._lower_to(Evidence(question, trials).lowest)
        return None

    def _try(self, calls: Calls, size: int, watch: StepWatch) -> Call | None:
        """Measure one size; ``None`` where the function fails with so few samples for another reason than memory."""
        try:
            return calls.run(size, watch)
        except Exception as error:
            if watch.is_answer or size == self._size:
                raise
            reason = describe_error(error)
        calls.undo()
        _log.warning(
            "%s() with a batch size of %d: %s; begins with %d instead, and goes down where memory ends",
            self._name,
            size,
            reason,
            self._size,
        )
        return None

    def _end(self, call: Call, size: int) -> Call | None:
        """Keep the size of the call that trained; where memory ended in it after all, the next one."""
        _log.info("%s(): a batch size of %d of at most %d fits", self._name, size, self._size)
        self._size = size
        if call.ended == "returned":
            return call
        self._reduce(call.reason)
        return None

    def _lower_to(self, largest: int) -> None:
        """Take the largest size that the user allows and that is no larger than this."""
        if self._reduce_fn is None:
            self._size = largest
            return
        while self._size > largest:
            size, self._size = self._size, self._next_of_the_users()
            if self._size >= size:  # as it likes: it does not go down
                return

    def _next_of_the_users(self) -> int:
        """The size that the user's function gives after a failed one."""
        assert self._reduce_fn is not None  # noqa: S101 - narrows for mypy
        size = self._reduce_fn()
        if not isinstance(size, numbers.Integral) or isinstance(size, bool):
            raise InvalidArgument(f"reduce_batch_size_fn() returned {show_value(size)}: return an int, the next size")
        return int(size)

    def _go_down(self, calls: Calls) -> Any:
        """Call the function with the size, and where memory ends with a smaller one."""
        while self._size > 0:
            call = calls.run(self._size)
            if call.ended == "returned":
                return call.result
            self._reduce(call.reason)
        raise RuntimeError("No executable batch size found, reached zero.")

    def _reduce(self, reason: str) -> None:
        failed = self._size
        self._size = int(failed * 0.9) if self._reduce_fn is None else self._next_of_the_users()
        _log.warning(
            "%s() ran out of memory with a batch size of %d; begins again with %d; %s",
            self._name,
            failed,
            self._size,
            reason,
        )


def _current_device() -> torch.device:
    # To make a PartialState would begin accelerate's, before the user's own Accelerator has its say.
    known = PartialState._shared_state.get("device")  # noqa: SLF001
    return known or torch.accelerator.current_accelerator() or torch.device("cpu")


def _processes() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
