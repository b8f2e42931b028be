"""Calls a training function with one size after another, each time from what was there at first.

Covers the budget, the end of a measured call, and an out-of-memory error. Does not cover which size is next
(``batch_size``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.utils.memory import should_reduce_batch_size

from autobatch.integrations.accelerate.outside_state import OutsideState
from autobatch.integrations.accelerate.step_watch import EnoughMeasured, StepWatch
from autobatch.memory.device import Device
from autobatch.memory.devices import Allowance
from autobatch.memory.oom import describe_error, is_oom

__all__ = ["Call", "Calls"]


@dataclass(frozen=True)
class Call:
    """How one call of the function ended.

    Attributes:
        ended: Whether it came to its end, was ended after its second step, or ran out of memory.
        result: What it returned.
        reason: Of an out-of-memory error, the first line.
    """

    ended: Literal["returned", "stopped", "out of memory"]
    result: Any = None
    reason: str = ""


@dataclass
class Calls:
    """Calls one function.

    Attributes:
        function: Takes the batch size.
        device: Where it trains.
        allowance: What it may hold.
        enforces: Whether the budget holds in calls that are not measured, too.
        outside: What was there before the first call.
    """

    function: Callable[[int], Any]
    device: Device
    allowance: Allowance
    enforces: bool
    outside: OutsideState

    def run(self, size: int, watch: StepWatch | None = None) -> Call:
        """Call it; only a call that returned, and whose size is the answer, changes anything outside."""
        handled = sys.exc_info()[1]
        is_limited = self.allowance.budget_bytes > 0 and (self.enforces or watch is not None)
        try:
            with (
                self.device.limit(self.allowance.budget_bytes) if is_limited else nullcontext(),
                watch or nullcontext(),
            ):
                result = self.function(size)
        except EnoughMeasured:
            call = Call("stopped")
        except Exception as error:
            if not (is_oom(error, handled=handled) or should_reduce_batch_size(error)):
                raise
            call = Call("out of memory", reason=describe_error(error, handled=handled))
        else:
            if watch is not None:
                watch.judge()
            if watch is None or watch.is_answer:
                return Call("returned", result)
            del result
            call = Call("stopped")
        self.undo()  # after the ``except`` block, whose error holds the call's tensors
        return call

    def undo(self) -> None:
        """Put back what the last call has changed, and free what it held."""
        self.outside.restore()
        self.device.reclaim()
