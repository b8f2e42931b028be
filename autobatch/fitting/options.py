"""Checks arguments of ``fit`` that mean nothing whatever the model: sizes, choices, a budget, a device.

Covers what integrations are given before there is a batch, so that they refuse it at once, as ``fit`` does. Does not
cover what only the device shows, such as a headroom that is more than its memory.
"""

from __future__ import annotations

from typing import Any

from autobatch._arguments import (
    check_choice,
    check_count,
    check_micro_batches,
    check_switch,
    check_target,
    parse_bytes,
)
from autobatch.distributed.ranks import read_timeout
from autobatch.memory.devices import parse_device, parse_headroom

__all__ = ["check_choices", "check_options", "check_sizes"]


def check_options(options: dict[str, Any], *, target: int | None, device: Any | None, timeout: Any | None) -> None:
    """Check what an integration passes on to ``fit``.

    Args:
        options: Arguments of ``fit``, by name.
        target: The target batch, where it is known.
        device: A device's name, or what stands in for one; ``None``: where the model is.
        timeout: Seconds.

    Raises:
        InvalidArgument: One of them cannot mean anything.
    """
    rest = dict(options)
    bound = rest.pop("max_micro_batch")
    if target is not None:
        check_sizes(target, bound)
    elif bound is not None:
        check_count("max_micro_batch", bound)
    check_choices(**rest)
    if device is not None:
        parse_device(device)
    read_timeout(timeout)


def check_sizes(target_batch: Any, max_micro_batch: Any | None) -> tuple[int, int]:
    """The target, and the most samples that a micro-batch may have."""
    target = check_target(target_batch)
    bound = check_count("max_micro_batch", target if max_micro_batch is None else max_micro_batch)
    check_micro_batches(target, bound)
    return target, bound


def check_choices(objective: Any, check: Any, budget: Any | None, headroom: Any | None, **switches: Any) -> None:
    """Check that choices and switches have one of their values, and that budget and headroom are sizes."""
    check_choice("objective", objective, ("throughput", "memory"))
    check_choice("check", check, ("warn", "raise", None))
    parse_headroom(headroom, 0 if budget is None else parse_bytes("budget", budget))
    for name, switch in switches.items():
        check_switch(name, switch)
