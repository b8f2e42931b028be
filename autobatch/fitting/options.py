"""Defines the options that several calls share, and checks their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch

from autobatch._arguments import (
    check_choice,
    check_count,
    check_micro_batches,
    check_switch,
    check_target,
    parse_bytes,
)
from autobatch._formatting import show_value
from autobatch.batch.cut import CutFunction
from autobatch.batch.lengths import ByLength
from autobatch.errors import InvalidArgument
from autobatch.events import Hook
from autobatch.memory.device import Device
from autobatch.memory.devices import parse_device, parse_headroom
from autobatch.planning.division import Objective, Share
from autobatch.records import Strategy
from autobatch.step.workload import Weigh, check_weigh
from autobatch.training.given_backward import Backward
from autobatch.training.step_events import check_hooks
from autobatch.undo.user_objects import check_objects

_CHOICES = {"objective": ("throughput", "memory"), "check": ("warn", "raise", None)}
_SWITCHES = ("accumulate_in_float32", "reuse", "progress")


class SearchOptions(TypedDict, total=False):
    """Options of every call that makes a plan; ``fit`` explains them."""

    budget: int | str | None
    headroom: float | str | None
    max_micro_batch: int | None
    objective: Objective
    accumulate_in_float32: bool
    check: Literal["warn", "raise"] | None
    reuse: bool
    progress: bool
    strategies: Literal["auto"] | Sequence[Strategy] | None


class IntegrationOptions(SearchOptions, total=False):
    """Options of ``attach`` and of the Lightning callback; the last three are those of ``Runner``."""

    device: Device | None
    hooks: Iterable[Hook]
    keep: Sequence[Any]


class SharedOptions(TypedDict, total=False):
    """Options that ``fit`` and ``Runner`` both take."""

    weigh: Weigh | None
    cut: ByLength | CutFunction | None
    device: torch.device | str | Device | None


class FitOptions(SharedOptions, SearchOptions, total=False):
    """Options of ``fit`` beside the batch, the step and the optimizer."""

    share: Share


class RunnerOptions(SharedOptions, total=False):
    """Options of ``Runner`` beside the step and the optimizer."""

    scaler: torch.amp.GradScaler | None
    max_grad_norm: float | None
    scheduler: Any | None
    hooks: Iterable[Hook]
    keep: Sequence[Any]
    backward: Backward | None


class FitAndRunOptions(FitOptions, RunnerOptions, total=False):
    """Options of ``Runner.fit``."""


def names_of(*options: type) -> list[str]:
    return list(dict.fromkeys(name for one in options for name in one.__annotations__))


def select(given: Mapping[str, Any], options: type) -> dict[str, Any]:
    return {name: given[name] for name in names_of(options) if name in given}


def refuse_unknown(call: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise InvalidArgument for arguments that the call does not have; name those that it has."""
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InvalidArgument(f"{call} has no argument {', '.join(unknown)}; it has {', '.join(known)}")


@dataclass(frozen=True)
class Options:
    """Checked options of an integration."""

    target: int | None  # samples of an optimizer step over all ranks; ``None``: the batch of the loader
    fit: Mapping[str, Any]  # options of ``fit`` by name, ``check`` always among them
    device: Any
    hooks: Sequence[Hook]
    keep: Sequence[Any]
    weigh: Weigh | None = None

    @classmethod
    def read(cls, given: IntegrationOptions, *, target: int | None, weigh: Weigh | None = None) -> Options:
        fit = {"check": "raise", **select(given, SearchOptions)}
        bound = fit.get("max_micro_batch")
        if target is not None:
            check_sizes(target, bound)
        elif bound is not None:
            check_count("max_micro_batch", bound)
        check_options(fit)
        device = given.get("device")
        if device is not None:
            parse_device(device)
        check_weigh(weigh)
        hooks, keep = check_hooks(given.get("hooks", ())), check_objects(given.get("keep", ()))
        return cls(target, fit, device, hooks, keep, weigh)


def check_sizes(target_batch: Any, max_micro_batch: Any | None) -> tuple[int, int]:
    target = check_target(target_batch)
    bound = check_count("max_micro_batch", target if max_micro_batch is None else max_micro_batch)
    check_micro_batches(target, bound)
    return target, bound


def read_strategies(given: Any) -> tuple[Strategy, ...]:
    """Return the strategies that were asked for, each once and in one order: all for ``"auto"``, none for ``None``."""
    known = get_args(Strategy)
    named = known if given == "auto" else () if given is None else given
    if not isinstance(named, list | tuple) or any(one not in known for one in named):
        raise InvalidArgument(
            f"strategies={show_value(given)} is not known: pass 'auto', None, or a list of "
            f"{', '.join(map(repr, known))}"
        )
    return tuple(one for one in known if one in named)


def check_options(given: Mapping[str, Any]) -> None:
    """Check the ``SearchOptions`` that were given, except for ``max_micro_batch``."""
    for name, value in given.items():
        if name in _CHOICES:
            check_choice(name, value, _CHOICES[name])
        elif name in _SWITCHES:
            check_switch(name, value)
    read_strategies(given.get("strategies"))
    budget = given.get("budget")
    parse_headroom(given.get("headroom"), 0 if budget is None else parse_bytes("budget", budget))
