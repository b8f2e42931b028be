"""Checks plain arguments: counts, choices, bytes, paths, and objects by the methods that are called on them."""

from __future__ import annotations

import inspect
import numbers
import os
import re
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from autobatch._bounds import LARGEST, MOST_MICRO_BATCHES, MOST_SAMPLES
from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument

SIZES = "pass bytes as an int, or a text such as '8GiB' or '512MiB'"

_BYTES = TypeAdapter(ByteSize)
# pydantic reads the beginning and ignores the rest: "5%" would be five bytes, "1.2.3KiB" one.
_WHOLE_TEXT = re.compile(r"\s*\d*\.?\d+\s*[a-zA-Z]*\s*")


def read_bytes(value: Any) -> int | None:
    """Return bytes from an int or a text; ``None`` for another value, or one that no device can have."""
    half_read = isinstance(value, str) and not _WHOLE_TEXT.fullmatch(value)
    if half_read or isinstance(value, bool):
        return None
    try:
        size = int(_BYTES.validate_python(value))
    except ValidationError:
        return None
    return size if 0 < size <= LARGEST else None


def parse_bytes(name: str, value: Any) -> int:
    """Return bytes from an int or a text; raise ``InvalidArgument`` for another value."""
    size = read_bytes(value)
    if size is None and isinstance(value, int) and value > LARGEST:
        raise InvalidArgument(f"{name}={show_value(value)} is more bytes than any device has: {SIZES}")
    if size is None:
        raise InvalidArgument(f"{name}={show_value(value)} is not a size: {SIZES}")
    return size


def check_count(name: str, value: Any, counted: str = "samples") -> int:
    """Return a number of at least 1 as a Python int; ``counted`` names what it counts."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InvalidArgument(f"{name}={show_value(value)} must be an int of at least 1: it counts {counted}")
    return int(value)


def check_target(value: Any) -> int:
    """Return the samples of an optimizer step: at least 1 and at most ``MOST_SAMPLES``."""
    target = check_count("target_batch", value)
    if target > MOST_SAMPLES:
        raise InvalidArgument(
            f"target_batch={show_value(value)} is more than the {MOST_SAMPLES} samples that one optimizer step may "
            f"have: count what dimension 0 counts, such as images or texts, not tokens or bytes"
        )
    return target


def check_micro_batches(target: int, size: int) -> None:
    """Refuse more than ``MOST_MICRO_BATCHES`` in one optimizer step, since a plan lists them one by one."""
    count = -(-target // size)
    if count > MOST_MICRO_BATCHES:
        raise InvalidArgument(
            f"target_batch={target} would be {count} micro-batches of at most {size}, more than the "
            f"{MOST_MICRO_BATCHES} that one optimizer step may have: ask for fewer samples, or allow larger "
            f"micro-batches"
        )


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Check that a value is one of a few, of the same type."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise InvalidArgument(f"{name}={show_value(value)} is not known; one of {', '.join(map(repr, choices))}")


def check_switch(name: str, value: Any) -> None:
    """Check that a value is ``True`` or ``False``; a text such as ``"no"`` would be true."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}={show_value(value)} must be True or False")


def check_path(call: str, value: Any, example: str = "plan.json") -> Path:
    """Return a path from a text or an ``os.PathLike``; the message names ``call``."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or "\0" in text:
        raise InvalidArgument(f"{call}({show_value(value)}): pass a path, such as {example!r}")
    return Path(text)


def is_instance_with(value: Any, *methods: str) -> bool:
    """Return whether a value is an instance, not a class, with these methods."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def is_function_of(value: Any, count: int) -> bool:
    """Return whether a value can be called with so many arguments, as far as it shows, and is not a class."""
    if isinstance(value, type) or not callable(value):
        return False
    try:
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def takes_none(value: Any, method: str) -> bool:
    """Return whether a method can be called without an argument; ``True`` if its class does not show that.

    A scheduler of torch replaces the ``step`` of its optimizer by a function that shows one argument too many
    (``torch/optim/lr_scheduler.py``, ``patch_track_step_called``), so the instance itself is not asked.
    """
    try:
        signature = inspect.signature(getattr(type(value), method))
    except (AttributeError, TypeError, ValueError):
        return True
    try:
        signature.bind(value)
    except TypeError:
        return False
    return True
