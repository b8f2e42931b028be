"""Refuses arguments that are wrong for any model: sizes, choices, a budget, a device.

Covers ``fit`` and what integrations are given before there is a batch, so that they refuse it at once. Does not cover
what only the device shows, such as a headroom that is more than its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autobatch._arguments import (
    check_choice,
    check_count,
    check_micro_batches,
    check_switch,
    check_target,
    parse_bytes,
)
from autobatch.events import Hook
from autobatch.memory.devices import parse_device, parse_headroom
from autobatch.step.workload import Weigh, check_weigh
from autobatch.training.step_events import check_hooks
from autobatch.undo.user_objects import check_objects

__all__ = ["Options", "check_choices", "check_sizes"]


@dataclass(frozen=True)
class Options:
    """What the user gave to an integration, checked.

    Attributes:
        target: Samples of an optimizer step over all ranks; ``None``: what the loader gives.
        fit: Arguments of ``fit``, by name.
        device: The device's memory; ``None``: where the model is.
        hooks: Called with the Runner's events.
        keep: Objects of the user that the step changes.
        weigh: What the loss is a mean over, where the user says that.
    """

    target: int | None
    fit: Mapping[str, Any]
    device: Any
    hooks: Sequence[Hook]
    keep: Sequence[Any]
    weigh: Weigh | None = None

    @classmethod
    def read(
        cls,
        passed_on: Mapping[str, Any],
        *,
        target: int | None,
        device: Any | None,
        hooks: Any,
        keep: Any,
        weigh: Any | None = None,
    ) -> Options:
        """Check all of it; ``passed_on`` are the arguments of ``fit``.

        Raises:
            InvalidArgument: One of them cannot mean anything.
        """
        _check_passed_on(passed_on, target=target, device=device)
        check_weigh(weigh)
        return cls(target, passed_on, device, check_hooks(hooks), check_objects(keep), weigh)


def _check_passed_on(options: Mapping[str, Any], *, target: int | None, device: Any | None) -> None:
    """Check what an integration passes on to ``fit``; ``target`` is ``None`` where it is not known yet."""
    rest = dict(options)
    bound = rest.pop("max_micro_batch")
    if target is not None:
        check_sizes(target, bound)
    elif bound is not None:
        check_count("max_micro_batch", bound)
    check_choices(**rest)
    if device is not None:
        parse_device(device)


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
