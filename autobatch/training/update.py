"""Makes the update: one optimizer step on a finished gradient.

1. ``make_state`` makes the optimizer's state. Torch's own optimizers make it with the first gradients, before the step;
   SGD copies the first gradient, so SGD makes it in the step.
2. ``prepare`` unscales and clips the gradients.
3. ``cancel`` undoes both, until ``keep``.
4. ``apply`` steps optimizers and scaler. Once it has begun, parameters may have moved.
5. ``step_schedulers`` steps what follows the optimizers.
"""

from __future__ import annotations

import inspect
import logging
import numbers
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from autobatch._arguments import is_instance_with, takes_none
from autobatch._formatting import format_bytes, name_type, show_value
from autobatch._user_errors import add_note, note_where
from autobatch._wrappers import SeveralOptimizers, members_of, state_of, unwrap_optimizer
from autobatch.errors import AutobatchError, CannotRetry, DoesNotFit, InvalidArgument
from autobatch.memory.oom import describe_error, is_oom
from autobatch.plan import Plan
from autobatch.undo.gradients import gradient_dtype

_LOG = logging.getLogger("autobatch")

_UPDATED = (
    "scheduler.step() raised this after the optimizer had stepped: parameters have moved, so do not run this step "
    "again; step the scheduler yourself before the next one"
)

_INTERRUPTED = (
    "the update had begun: some parameters may have moved, and the scheduler may not have; do not run this step again, "
    "and load your last checkpoint if training goes on"
)


@dataclass
class Update:
    """The update of a runner: its optimizer, scaler, clipping and scheduler.

    Attributes:
        optimizers: Each is stepped once, in this order; nothing is undone once the first one steps.
        plan: The plan, for messages.
        scaler: Unscales, steps and updates once.
        max_grad_norm: The gradients of all optimizers' parameters, taken as one vector, are clipped to this norm.
        schedulers: Stepped after the optimizers, if these stepped.
        gradient_norm: Before clipping, in the last step; 0-dim, on the gradients' device. ``None`` without clipping.
    """

    optimizers: Sequence[Any]
    plan: Plan
    scaler: torch.amp.GradScaler | None = None
    max_grad_norm: float | None = None
    schedulers: Sequence[Any] = ()
    gradient_norm: torch.Tensor | None = field(default=None, init=False, repr=False)
    _inner: Any = field(init=False, repr=False)
    _entries: Sequence[dict[str, Any] | None] = ()
    _made: list[torch.Tensor] = field(default_factory=list)
    _scale: float = 0.0
    _has_skipped: bool = False

    def __post_init__(self) -> None:
        self._inner = unwrap_optimizer([*self.optimizers])

    def make_state(self, summed: Collection[torch.Tensor] = ()) -> None:
        """Make the optimizer's state, also of parameters whose gradients are still sums beside ``.grad``."""
        for parameter in summed:  # of one number's memory
            zero = torch.zeros((), dtype=gradient_dtype(parameter), device=parameter.device)
            parameter.grad = zero.expand_as(parameter)
        try:
            self._made += make_state(self._inner)
        finally:
            for parameter in summed:
                parameter.grad = None

    def prepare(self) -> None:
        """Unscale and clip the gradients. An error leaves everything but ``.grad`` as it was."""
        self._entries = [] if self.scaler is None else [_read_entry(self.scaler, one) for one in self.optimizers]
        self._scale = self._scale_and_clip() if self.scaler is not None or self.max_grad_norm is not None else 0.0

    def keep(self) -> None:
        """Keep what was made: it is not undone from here on."""
        self._made, self._entries = [], []

    def cancel(self) -> None:
        forget_state(self._inner, self._made)
        for optimizer, entry in zip(self.optimizers, self._entries, strict=False):
            _write_entry(self.scaler, optimizer, entry)
        self.keep()

    def apply(self, step: int) -> None:
        """Step the optimizers, then the scaler."""
        self.keep()
        reason, handled = None, sys.exc_info()[1]
        try:
            for optimizer in self.optimizers:
                optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
            if self.scaler is not None:
                self.scaler.update()
            self.note_skip()
        except BaseException as error:
            for optimizer in self.optimizers if self.scaler is not None else ():
                # After a checkpoint is loaded, unscale_() must not raise that it was called already.
                _write_entry(self.scaler, optimizer, None)
            if not isinstance(error, Exception) or not is_oom(error, handled=handled):
                _note_update(error)
                raise
            reason = describe_error(error, handled=handled)
        finally:
            # An autocast block around the whole loop caches casts of weights that have moved.
            torch.clear_autocast_cache()
        if reason is not None:
            raise CannotRetry(
                f"ran out of memory inside the optimizer's step ({reason}): parameters may have moved, "
                f"{explain_no_retry(step, self.plan)}"
            )

    def note_skip(self) -> None:
        """Note whether infinities made the scaler skip a step: only then the scale falls."""
        self._has_skipped = self.scaler is not None and bool(self.schedulers) and self.scaler.get_scale() < self._scale

    def step_schedulers(self) -> None:
        """Step the schedulers, if the optimizers stepped; the user's own error passes, with a note."""
        if self._has_skipped:
            return
        try:
            for scheduler in self.schedulers:
                scheduler.step()
        except BaseException as error:
            add_note(error, _UPDATED if isinstance(error, Exception) else _INTERRUPTED)
            if isinstance(error, Exception):
                _LOG.warning("%s: %s", type(error).__name__, _UPDATED)
            raise

    def _scale_and_clip(self) -> float:
        """Unscale and clip; returns the scale of the losses."""
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if self.max_grad_norm is not None:
            # The optimizers' own parameters: unscale_() divides only these.
            parameters = [parameter for group in self._inner.param_groups for parameter in group["params"]]
            self.gradient_norm = nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        # Reading the scale waits for the device: only where the scheduler needs to know whether the optimizer stepped.
        return self.scaler.get_scale() if self.scaler is not None and self.schedulers else 0.0


def _note_update(error: BaseException) -> None:
    """Say what an error other than a shortage of memory has left."""
    if isinstance(error, Exception):
        note_where(error, "your optimizer.step()", "autobatch.Runner")
    else:
        add_note(error, _INTERRUPTED)


def check_options(scaler: Any, max_grad_norm: Any, schedulers: Sequence[Any], *, has_optimizer: bool) -> None:
    """Refuse options that an update cannot use."""
    if scaler is not None and not is_instance_with(scaler, "scale", "unscale_", "step", "update", "get_scale"):
        raise InvalidArgument(f"scaler is {name_type(scaler)}: pass a torch.amp.GradScaler")
    if max_grad_norm is not None and not _is_norm(max_grad_norm):
        raise InvalidArgument(
            f"max_grad_norm={show_value(max_grad_norm)} must be a float greater than 0, or None for no clipping"
        )
    for scheduler in schedulers:
        _check_scheduler(scheduler)
    if max_grad_norm is not None and not has_optimizer:
        raise InvalidArgument(
            "max_grad_norm= belongs to the update, and this Runner has no optimizer: clip after "
            "runner.accumulate(batch)"
        )
    if schedulers and not has_optimizer:
        raise InvalidArgument(
            "scheduler= belongs to the update, and this Runner has no optimizer: step it yourself after your update"
        )


def _check_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, type):
        raise InvalidArgument(f"scheduler is {name_type(scheduler)}: pass an instance of it")
    if not is_instance_with(scheduler, "step"):
        raise InvalidArgument(f"scheduler is {name_type(scheduler)} without step(): pass a scheduler, or leave it out")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InvalidArgument("ReduceLROnPlateau needs a metric: call its step(metric) yourself after runner.step()")
    if not takes_none(scheduler, "step"):
        raise InvalidArgument(
            f"scheduler= is {name_type(scheduler)} whose step() takes arguments: leave it out and step it yourself "
            f"after runner.step()"
        )


def _is_norm(value: Any) -> bool:
    """A positive number that fits a float; infinity does, as in ``clip_grad_norm_``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return float(value) > 0
    except OverflowError:
        return False


def _read_entry(scaler: Any, optimizer: Any) -> dict[str, Any] | None:
    """A scaler's record of an optimizer between ``unscale_`` and ``update``."""
    entry = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer))
    return None if entry is None else dict(entry)


def _write_entry(scaler: Any, optimizer: Any, entry: dict[str, Any] | None) -> None:
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        return
    states.pop(id(optimizer), None)
    if entry is not None:
        states[id(optimizer)] = entry


def explain_no_retry(step: int, plan: Plan) -> str:
    return (
        f"so step {step} was not retried; load your last checkpoint, and plan with the optimizer and more headroom= "
        f"than {format_bytes(plan.headroom_bytes)}"
    )


def explain_shortage(step: int, plan: Plan, reason: str, *, is_agreed: bool) -> AutobatchError:
    """Return the error of a step that ran out of memory after its micro-batches, and was undone."""
    if is_agreed:
        return CannotRetry(
            f"ran out of memory after the ranks had agreed on the step ({reason}): this rank's parameters lack "
            f"it, {explain_no_retry(step, plan)}"
        )
    return DoesNotFit(
        f"ran out of memory outside the micro-batches, before the update ({reason}); the step was undone: free memory "
        f"or pass more headroom="
    )


def make_state(optimizer: Any) -> list[torch.Tensor]:
    """Let the optimizer make the entries that its next step would begin with: zeros, and a step count of 0.

    Each of torch's optimizers does this first in ``step`` (``_init_group`` in ``torch/optim/*.py``). Nothing is
    counted, so the step that follows is the first one, bit for bit.
    """
    made: list[torch.Tensor] = []
    try:
        for member in members_of(optimizer):
            if not _makes_state_first(type(member)):  # type: ignore[arg-type]  # mypy: a type is not hashable
                continue
            state, held = member.state, [p for group in member.param_groups for p in group["params"]]
            if [*map(id, held)] == [*map(id, state)]:
                continue  # each parameter has its entry, as in most steps; to look each up takes ten times as long
            new = [p for p in held if p.grad is not None and p not in state]
            made += new
            if new:
                _make_entries(member)
    except BaseException:
        forget_state(optimizer, made)
        raise
    return made


@torch.no_grad()
def _make_entries(optimizer: torch.optim.Optimizer) -> None:
    lists = len(inspect.signature(optimizer._init_group).parameters) - 1  # type: ignore[attr-defined]  # noqa: SLF001 - no public equivalent
    for group in optimizer.param_groups:
        optimizer._init_group(group, *([] for _ in range(lists)))  # type: ignore[attr-defined]  # noqa: SLF001 - no public equivalent


@cache
def _makes_state_first(kind: type) -> bool:
    is_of_torch = f"{kind.__module__}.".startswith("torch.optim.") and hasattr(kind, "_init_group")
    return is_of_torch and not issubclass(kind, torch.optim.SGD)  # whose momentum is made by the step itself


def forget_state(optimizer: Any, parameters: list[torch.Tensor]) -> None:
    for member in members_of(optimizer):
        if _makes_state_first(type(member)):  # type: ignore[arg-type]  # mypy: a type is not hashable
            for parameter in parameters:
                member.state.pop(parameter, None)


def count_state(optimizer: Any) -> int:
    """How many values the optimizer holds for its parameters, and how many parameters it holds any for."""
    return sum(1 + len(entry) if isinstance(entry, dict) else 1 for entry in state_of(optimizer).values())


def is_making_state(optimizer: Any, before: int) -> bool:
    """Whether a step that failed was making the optimizer's state."""
    if isinstance(optimizer, SeveralOptimizers):
        return any(map(_lacks_momentum, optimizer.members)) or count_state(optimizer) > before
    if isinstance(optimizer, torch.optim.SGD):  # it writes buffers down after all are made (torch/optim/sgd.py)
        return _lacks_momentum(optimizer)
    return count_state(optimizer) > before


def _lacks_momentum(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and any(
        _lacks_buffer(optimizer, p) for g in optimizer.param_groups if g["momentum"] for p in g["params"]
    )


def _lacks_buffer(optimizer: Any, parameter: torch.Tensor) -> bool:
    entry = optimizer.state.get(parameter) or {}
    return parameter.grad is not None and entry.get("momentum_buffer") is None
