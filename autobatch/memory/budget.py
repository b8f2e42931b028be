"""Decides how many bytes this process may use on a device: the budget, and the headroom left free of it.

Does not cover how a budget is enforced (``cuda``, ``cpu``).
"""

from __future__ import annotations

import numbers
from typing import Any

from autobatch._arguments import SIZES, parse_bytes, read_bytes
from autobatch._formatting import format_bytes, show_value
from autobatch.errors import InvalidArgument
from autobatch.memory.device import Device
from autobatch.records import Record

__all__ = ["DEFAULT_HEADROOM", "Allowance", "find_allowance", "parse_headroom"]

DEFAULT_HEADROOM = 0.05
"""Fraction of the budget left free, for longer batches and for fragmentation."""


class Allowance(Record):
    """Bytes that a process may hold on a device; both 0 where the user gave none and the device does not report any."""

    budget_bytes: int
    headroom_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def limit_bytes(self) -> int:
        """What a trial has to stay within."""
        return self.budget_bytes - self.headroom_bytes


def find_allowance(device: Device, budget: Any | None, headroom: Any | None) -> Allowance:
    """The user's budget, or what is available on the device; never more than that.

    Raises:
        InvalidArgument: A size cannot be understood.
    """
    available = device.available_bytes()
    budget_bytes = available if budget is None else parse_bytes("budget", budget)
    warnings: tuple[str, ...] = ()
    if 0 < available < budget_bytes:
        warnings = (
            f"budget={show_value(budget)} is more than is available now: {format_bytes(available)} are the budget",
        )
        budget_bytes = available
    headroom_bytes = parse_headroom(headroom, budget_bytes)
    return Allowance(budget_bytes=budget_bytes, headroom_bytes=headroom_bytes if budget_bytes else 0, warnings=warnings)


def parse_headroom(value: Any, budget_bytes: int) -> int:
    """Bytes to leave free: an int, a text, or a fraction of the budget.

    Raises:
        InvalidArgument: It is none of them, or leaves nothing of the budget.
    """
    if value is None:
        value = DEFAULT_HEADROOM
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        fraction: Any = value
        if not 0 <= fraction < 1:
            raise InvalidArgument(
                f"headroom={show_value(value)}: a fraction must be at least 0 and less than 1, such as 0.1; for bytes "
                f"pass an int or '512MiB'"
            )
        # In NumPy's float32 the product would be rounded, up to the whole budget.
        return int(budget_bytes * float(fraction))
    is_zero = isinstance(value, numbers.Integral) and not isinstance(value, bool) and value == 0
    size = 0 if is_zero else read_bytes(value)
    if size is None:
        raise InvalidArgument(f"headroom={show_value(value)} is no size: {SIZES}; a fraction is a float such as 0.1")
    if budget_bytes and size >= budget_bytes:
        raise InvalidArgument(
            f"headroom={show_value(value)} leaves nothing of a budget of {format_bytes(budget_bytes)}"
        )
    return size
