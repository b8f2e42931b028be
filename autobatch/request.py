"""The arguments of ``fit``, checked once: what the user asked for, in bytes and samples.

Covers meaning and range of each plain argument. Does not cover the model, the batch and the step.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from autobatch.errors import InvalidArgument
from autobatch.memory.device import Device
from autobatch.records import Record
from autobatch.wording import format_bytes

__all__ = [
    "DEFAULT_HEADROOM",
    "Allowance",
    "check_choice",
    "check_count",
    "find_allowance",
    "parse_bytes",
    "parse_headroom",
]

DEFAULT_HEADROOM = 0.05
"""Fraction of the budget left free: room for a longer batch and for fragmentation."""

_BYTES = TypeAdapter(ByteSize)
# pydantic reads the beginning and ignores the rest: "5%" would be five bytes.
_WHOLE_TEXT = re.compile(r"\s*[\d.]+\s*[a-zA-Z]*\s*")


class Allowance(Record):
    """What a process may hold on a device, in bytes; both 0 where the device cannot tell and the user did not say."""

    budget_bytes: int
    headroom_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def limit_bytes(self) -> int:
        """What a trial has to stay within."""
        return self.budget_bytes - self.headroom_bytes


def find_allowance(device: Device, budget: Any | None, headroom: Any | None) -> Allowance:
    """The user's budget, or what the device has for this process; never more than that.

    Raises:
        InvalidArgument: A size cannot be understood.
    """
    available = device.available_bytes()
    asked = available if budget is None else parse_bytes("budget", budget)
    warnings: tuple[str, ...] = ()
    if 0 < available < asked:
        warnings = (f"budget={budget!r} is more than is available now: {format_bytes(available)} are the budget",)
        asked = available
    kept = parse_headroom(headroom, asked)
    return Allowance(budget_bytes=asked, headroom_bytes=kept if asked else 0, warnings=warnings)


def parse_bytes(name: str, value: Any) -> int:
    """Bytes from an int or a text such as ``"8GiB"``.

    Raises:
        InvalidArgument: It is neither, or not positive.
    """
    try:
        size = int(_BYTES.validate_python(value))
    except ValidationError:
        size = 0
    half_read = isinstance(value, str) and not _WHOLE_TEXT.fullmatch(value)
    if size <= 0 or half_read or isinstance(value, bool):
        raise InvalidArgument(
            f"{name}={value!r} is no size: pass bytes as an int, or a text such as '8GiB' or '512MiB'"
        )
    return size


def parse_headroom(value: Any, budget_bytes: int) -> int:
    """Bytes to leave free: an int, a text, or a fraction of the budget.

    Raises:
        InvalidArgument: It is none of them, or leaves nothing of the budget.
    """
    if value is None:
        value = DEFAULT_HEADROOM
    if isinstance(value, float):
        if not 0 <= value < 1:
            raise InvalidArgument(
                f"headroom={value!r}: a fraction must be at least 0 and less than 1; for bytes pass an int or '512MiB'"
            )
        return int(budget_bytes * value)
    size = 0 if value == 0 and not isinstance(value, bool) else parse_bytes("headroom", value)
    if budget_bytes and size >= budget_bytes:
        raise InvalidArgument(f"headroom={value!r} leaves nothing of a budget of {format_bytes(budget_bytes)}")
    return size


def check_count(name: str, value: Any) -> int:
    """A number of samples, at least 1.

    Raises:
        InvalidArgument: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name}={value!r} must be an int of at least 1: it counts samples")
    return value


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """One of a few.

    Raises:
        InvalidArgument: It is none of them.
    """
    if value not in choices:
        raise InvalidArgument(f"{name}={value!r} is not known; one of {', '.join(map(repr, choices))}")
