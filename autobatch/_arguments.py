"""The arguments of ``fit``, checked once: what the user asked for, in bytes and samples.

Covers meaning and range of each plain argument, and the device that the model's parameters are on. Does not cover the
model itself, the batch and the step.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from autobatch._bounds import MOST_MICRO_BATCHES, MOST_SAMPLES
from autobatch._formatting import format_bytes, show_value
from autobatch._quantities import read_bytes
from autobatch.errors import InvalidArgument
from autobatch.memory.device import Device
from autobatch.memory.devices import device_for
from autobatch.records import Record

__all__ = [
    "DEFAULT_HEADROOM",
    "Allowance",
    "check_choice",
    "check_count",
    "check_micro_batches",
    "check_switch",
    "check_target",
    "find_allowance",
    "find_device",
    "open_device",
    "parse_bytes",
    "parse_headroom",
]

DEFAULT_HEADROOM = 0.05
"""Fraction of the budget left free: room for a longer batch and for fragmentation."""

_SIZES = "pass bytes as an int, or a text such as '8GiB' or '512MiB'"


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
        warnings = (
            f"budget={show_value(budget)} is more than is available now: {format_bytes(available)} are the budget",
        )
        asked = available
    kept = parse_headroom(headroom, asked)
    return Allowance(budget_bytes=asked, headroom_bytes=kept if asked else 0, warnings=warnings)


def find_device(parameters: Sequence[torch.Tensor], model_name: str, device: Any | None) -> Device:
    """The memory of the one device that all parameters are on, or the ``Device`` object that stands in for it.

    Args:
        parameters: What is trained, of any shapes and dtypes.
        model_name: For the messages.
        device: ``None``, a name such as ``"cuda:0"``, a ``torch.device``, or a ``Device``, which is taken as it is.

    Raises:
        InvalidArgument: There are no parameters, or they are on the meta device or on several; or ``device`` is none,
            or not theirs.
    """
    home = _find_home(parameters, model_name)
    if device is None:
        return device_for(home)
    if isinstance(device, Device) and not isinstance(device, type):
        return device
    asked = _parse_device(device)
    if asked.type != home.type or asked.index not in (None, home.index or 0):
        raise InvalidArgument(
            f"device={str(device)!r}, but the model is on {home}; move the model first, or leave device= out"
        )
    return device_for(home)


def open_device(device: Any) -> Device:
    """The memory of a device that a user names, or the ``Device`` object that stands in for it.

    Raises:
        InvalidArgument: It is none, or torch cannot use it here.
    """
    if isinstance(device, Device) and not isinstance(device, type):
        return device
    asked = _parse_device(device)
    try:
        torch.empty(0, device=asked)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, NotImplementedError):  # each backend's own way to say that it is missing
        asked = torch.device("meta")
    if asked.type == "meta":
        raise InvalidArgument(f"device={show_value(device)} is not here: torch has no memory of it in this process")
    return device_for(asked)


def _find_home(parameters: Sequence[torch.Tensor], model_name: str) -> torch.device:
    if not parameters:
        raise InvalidArgument(f"{model_name} has no parameters: there is nothing to train")
    # There is one CPU, whether it was named "cpu" or "cpu:0".
    devices = {torch.device("cpu") if p.device.type == "cpu" else p.device for p in parameters}
    if len(devices) > 1:
        raise InvalidArgument(
            f"{model_name} has parameters on several devices: {', '.join(sorted(map(str, devices)))}; a budget is one "
            f"device's, so move them to one"
        )
    [home] = devices
    if home.type == "meta":
        raise InvalidArgument(
            f"{model_name} is on the meta device, which has no memory to run in; move it with to_empty() first"
        )
    return home


def _parse_device(device: Any) -> torch.device:
    try:
        if isinstance(device, (str, torch.device)):
            return torch.device(device)
    except RuntimeError:  # torch knows no such device; its own list of them helps nobody here
        pass
    raise InvalidArgument(
        f"device={show_value(device)} is no device: pass a torch.device, a name such as 'cuda:0' or 'cpu', or leave it "
        f"out"
    )


def parse_bytes(name: str, value: Any) -> int:
    """Bytes from an int or a text such as ``"8GiB"``.

    Raises:
        InvalidArgument: It is neither, or not positive.
    """
    size = read_bytes(value)
    if size is None:
        raise InvalidArgument(f"{name}={show_value(value)} is no size: {_SIZES}")
    return size


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
        raise InvalidArgument(f"headroom={show_value(value)} is no size: {_SIZES}; a fraction is a float such as 0.1")
    if budget_bytes and size >= budget_bytes:
        raise InvalidArgument(
            f"headroom={show_value(value)} leaves nothing of a budget of {format_bytes(budget_bytes)}"
        )
    return size


def check_count(name: str, value: Any) -> int:
    """A number of samples, at least 1, as a Python int.

    Raises:
        InvalidArgument: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InvalidArgument(f"{name}={show_value(value)} must be an int of at least 1: it counts samples")
    return int(value)


def check_target(value: Any) -> int:
    """The samples of a step: at least 1 and at most a hundred million.

    Raises:
        InvalidArgument: It is something else.
    """
    target = check_count("target_batch", value)
    if target > MOST_SAMPLES:
        raise InvalidArgument(
            f"target_batch={show_value(value)} is more than the {MOST_SAMPLES} samples that one optimizer step may "
            f"have: count what dimension 0 counts, such as images or texts, not tokens or bytes"
        )
    return target


def check_micro_batches(target: int, size: int) -> None:
    """At most a million in one optimizer step: a plan lists them one by one.

    Raises:
        InvalidArgument: There are more.
    """
    count = -(-target // size)
    if count > MOST_MICRO_BATCHES:
        raise InvalidArgument(
            f"target_batch={target} would be {count} micro-batches of at most {size}, more than the "
            f"{MOST_MICRO_BATCHES} that one optimizer step may have: ask for fewer samples, or allow larger "
            f"micro-batches"
        )


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """One of a few.

    Raises:
        InvalidArgument: It is none of them.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise InvalidArgument(f"{name}={show_value(value)} is not known; one of {', '.join(map(repr, choices))}")


def check_switch(name: str, value: Any) -> None:
    """``True`` or ``False``: a text such as ``"no"`` would be true.

    Raises:
        InvalidArgument: It is something else.
    """
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}={show_value(value)} must be True or False")
