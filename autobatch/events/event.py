"""Defines ``Event`` and ``Hook``, and the events of ``fit`` and ``map``; logs each in one line and calls the hooks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

from autobatch._bounds import Count
from autobatch._formatting import format_bytes, plural
from autobatch.records import Record, Trial

_LOG = logging.getLogger("autobatch")
_failed: list[Callable[[], Hook | None]] = []
"""Hooks that have failed, as weak references. Each is logged once: an unreachable tracker fails in every step."""


class Event(Record):
    """Something that happened; its text is the log line.

    Attributes:
        rank: Rank of the process, from 0.
        world_size: Number of ranks.
    """

    rank: Count = 0
    world_size: Count = 1

    @property
    def source(self) -> str:
        """Beginning of the log line: ``"rank 3 of 8: "``, or empty with one rank."""
        return "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}: "

    @property
    def level(self) -> int:
        """Level at which it is logged."""
        return logging.INFO


class Hook(Protocol):
    """Anything that can be called with an event."""

    def __call__(self, event: Event, /) -> None:
        """Handle the event. An error that is raised here costs a log line, never a step."""


def log_event(event: Event) -> None:
    """Log the event's line on logger ``autobatch``."""
    _LOG.log(event.level, "%s", event)


def emit(event: Event, hooks: Iterable[Hook] = ()) -> None:
    """Log the event, then call each hook with it; an error of a hook is logged and the next one is called."""
    log_event(event)
    for hook in hooks:
        try:
            hook(event)
        except Exception as error:  # noqa: BLE001 - an error of a hook must not end the step
            if not any(other() is hook for other in _failed):
                _failed[:] = [other for other in _failed if other() is not None] + [_refer_to(hook)]
                name = type(event).__name__
                _LOG.error("hook %r failed on %s; its further failures are not logged", hook, name, exc_info=error)


def _refer_to(hook: Hook) -> Callable[[], Hook | None]:
    try:
        return weakref.ref(hook)
    except TypeError:  # a builtin, or an object with slots
        return lambda: hook


class StageBegan(Event):
    """``fit`` or ``predict`` began something that may take more than a few seconds, such as a trace or a comparison."""

    stage: str
    level: ClassVar[int] = logging.DEBUG  # for a user who waits

    def __str__(self) -> str:
        return f"{self.source}{self.stage}"


class TrialFinished(Event):
    """``fit`` tried one size."""

    trial: Trial
    limit_bytes: int
    level: ClassVar[int] = logging.DEBUG  # the plan's line has the sum of all trials

    def __str__(self) -> str:
        trial = self.trial
        peak = f"peak {format_bytes(trial.peak_reserved)} of {format_bytes(self.limit_bytes)}, "
        where = f" ({trial.ended_in})" if trial.ended_in else ""
        return (
            f"{self.source}trial of {plural(trial.micro_batch_size, 'sample')}: {trial.outcome}{where}, "
            f"{peak if trial.peak_reserved else ''}{trial.seconds:.2f} s"
        )


class PlanRecalled(Event):
    """``fit`` found an earlier plan for the same step; one trial confirms it in place of a search."""

    plan_id: str
    micro_batch_size: int

    def __str__(self) -> str:
        return (
            f"{self.source}plan {self.plan_id} of an earlier run is for this step: one trial of "
            f"{plural(self.micro_batch_size, 'sample')} has to confirm it"
        )


class PlanRefused(Event):
    """An earlier plan for the same step cannot be used today, so ``fit`` searches again."""

    plan_id: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}plan {self.plan_id} of an earlier run is not reused: {self.reason}; searching again"


class PlanMade(Event):
    """``fit`` ended with a plan; warnings say why splitting is not exact, or why steps will not have the target."""

    summary: str
    warnings: tuple[str, ...] = ()

    @property
    def level(self) -> int:
        """``WARNING`` if there are warnings."""
        return logging.WARNING if self.warnings else logging.INFO

    def __str__(self) -> str:
        return "; ".join((self.summary, *self.warnings))


class PieceFinished(Event):
    """``map`` has the results of one piece.

    Attributes:
        samples: Number of samples in the piece.
        samples_done: Number of samples in all pieces so far.
        peak_bytes: Most bytes held on the device during the piece.
        budget_bytes: Bytes that the process may hold.
        seconds: Wall time of the piece.
    """

    samples: int
    samples_done: int
    peak_bytes: int
    budget_bytes: int
    seconds: float
    level: ClassVar[int] = logging.DEBUG  # the line at the end has the sums

    def __str__(self) -> str:
        peak = f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}, " if self.peak_bytes else ""
        samples = plural(self.samples, "sample")
        return f"{self.source}map: {samples}, {self.samples_done} done, {peak}{self.seconds:.2f} s"


class PieceRetried(Event):
    """A piece ran out of memory; its samples are run again in smaller ones, a single one once more.

    Attributes:
        samples: Number of samples in the piece that did not fit.
        used_bytes: Bytes held on the device after the clean-up.
        budget_bytes: Bytes that the process may hold.
        reason: First line of the error.
    """

    samples: int
    used_bytes: int
    budget_bytes: int
    reason: str
    level: ClassVar[int] = logging.WARNING  # a retry costs time

    def __str__(self) -> str:
        again = "is run once more after the clean-up" if self.samples == 1 else "are run again in smaller pieces"
        return (
            f"{self.source}map ran out of memory at {plural(self.samples, 'sample')}, which {again}; "
            f"{format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} held after clean-up; "
            f"{self.reason}"
        )


class MapFinished(Event):
    """``map`` ended, or its caller took no more results.

    Attributes:
        samples: Number of results.
        pieces: Number of pieces.
        smallest: Samples in the smallest piece.
        largest: Samples in the largest piece.
        shortages: Number of pieces that ran out of memory.
        peak_bytes: Most bytes held on the device during a piece.
        budget_bytes: Bytes that the process may hold.
        device: Name of the device.
        seconds: Wall time of all pieces.
    """

    samples: int
    pieces: int
    smallest: int
    largest: int
    shortages: int
    peak_bytes: int
    budget_bytes: int
    device: str
    seconds: float

    def __str__(self) -> str:
        sizes = f" of {self.smallest} to {self.largest}" if self.smallest < self.largest else f" of {self.largest}"
        pieces = plural(self.pieces, "piece") + (sizes if self.pieces else "")
        peak = f"; peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}" if self.peak_bytes else ""
        return (
            f"{self.source}map: {plural(self.samples, 'sample')} in {pieces} on {self.device}{peak}; "
            f"{self.shortages} out of memory, {self.seconds:.1f} s"
        )
