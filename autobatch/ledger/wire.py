"""Turns plans, runs and predictions into records for the server: names and numbers, never data or paths."""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from autobatch._version import __version__
from autobatch.events.run_history import Run, Setback
from autobatch.ledger.store import plan_id
from autobatch.memory.host_limit import read_host_memory
from autobatch.memory.nvml import query
from autobatch.plan import Plan
from autobatch.records import DeviceInfo
from autobatch.service.records import (
    MOST_POINTS,
    MOST_SETBACKS,
    CardReading,
    PlanIn,
    PredictedPoint,
    PredictionIn,
    RunIn,
    RunSetback,
    RunSummary,
)

SUMMARY_S = 30.0
_LATE = 0.2  # of it: a line may be written so long after its time
_PATH = re.compile(r"""(['"])[^'"]*[/\\][^'"]*\1|\S*[/\\]\S*""")
_STEP = re.compile(r"[0-9a-f]{32}")  # a fingerprint, whose first half is the step's


def host_name() -> str:
    return cut(platform.node())


def cut(text: str, longest: int = 200) -> str:
    """Return a text as the server takes it: one line of this length at most."""
    return "".join(letter for letter in text if letter.isprintable())[:longest]


def describe_plan(plan: Plan, *, paths: bool = False) -> PlanIn:
    """Return a plan without the processes of others, without the batch's keys, and without paths unless asked for."""
    fields: dict[str, Any] = {"id": plan_id(plan), "batch_lists": {}, "batch_dims": {}}
    fields["device"] = plan.device.model_copy(update={"tenants": ()})
    if not paths:
        fields["warnings"] = tuple(map(_hide_paths, plan.warnings))
        if plan.verdict is not None:
            reasons = {"causes": tuple(map(_hide_paths, plan.verdict.causes))}
            fields["verdict"] = plan.verdict.model_copy(
                update={**reasons, "unchecked": _hide_paths(plan.verdict.unchecked)}
            )
    host = next((one.host for one in plan.ranks if one.rank == plan.rank), "") or host_name()
    return PlanIn(id=fields["id"], host=cut(host), step=_step_of(plan), plan=plan.model_copy(update=fields))


def _hide_paths(text: str) -> str:
    return _PATH.sub("<path>", text)


def _step_of(plan: Plan) -> str:
    return plan.fingerprint[:16] if _STEP.fullmatch(plan.fingerprint) else ""


def describe_forecast(plan: Plan, points: Iterable[tuple[int, int]]) -> PredictionIn:
    """Return the prediction from which the search for this plan began: bytes by size."""
    predicted = tuple(PredictedPoint(size=size, reserved_bytes=held) for size, held in sorted(points)[:MOST_POINTS])
    fitting = [point.size for point in predicted if point.reserved_bytes <= plan.limit_bytes]
    return PredictionIn(
        id=plan_id(plan),
        made_at=plan.made_at,
        host=host_name(),
        model=cut(plan.model),
        step=_step_of(plan),
        card=cut(plan.device.name),
        total_bytes=plan.device.total_bytes,
        target_batch=plan.target_batch,
        world_size=plan.world_size,
        micro_batch_size=max(fitting, default=0),
        points=predicted,
        version=__version__,
    )


def describe_run(plan: Plan, run: Run, device: DeviceInfo | None = None) -> RunIn:
    """Return a run as it began; ``device`` is the one of this process, and ``None`` for a run of another."""
    return RunIn(
        id=run.id,
        plan_id=run.plan_id,
        host=host_name() if device else cut(next((one.host for one in plan.ranks), "") or host_name()),
        user=_user_name() if device else "",
        pid=run.pid,
        started_at=run.started_at,
        model=cut(plan.model),
        # With lengths a size counts samples of one length, which a prediction does not have.
        step="" if plan.lengths else _step_of(plan),
        target_batch=plan.target_batch,
        world_size=plan.world_size,
        micro_batch_size=plan.micro_batch_size,
        limit_bytes=plan.limit_bytes,
        cards=read_cards(device or plan.device) if device else (),
        version=__version__,
    )


def _user_name() -> str:
    try:
        return cut(getpass.getuser())
    except (OSError, KeyError):  # a container's user may have no name
        return ""


def read_cards(device: DeviceInfo) -> tuple[CardReading, ...]:
    """Read the device of a run; nothing if it cannot be asked."""
    name, kind = cut(device.name), cut(device.kind)
    if device.kind == "cpu":
        host = read_host_memory()
        free, total = host.available_bytes, host.total_bytes
        return (CardReading(name=name, kind=kind, total_bytes=total, free_bytes=max(free, 0), own_bytes=_own_bytes()),)
    reading = query(device.uuid) if device.uuid else None
    if reading is None or not reading.total_bytes:
        return ()
    others = sum(tenant.used_bytes for tenant in reading.tenants)
    return (
        CardReading(
            uuid=cut(device.uuid or ""),
            name=name,
            kind=kind,
            total_bytes=reading.total_bytes,
            free_bytes=reading.free_bytes,
            own_bytes=max(reading.total_bytes - reading.free_bytes - others, 0),
        ),
    )


def _own_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Summaries:
    """Adds up the lines of a run's file into one summary for each half minute in which there were any.

    A summary follows from the file alone, whoever makes it and however often. So one that is handed in again is equal.
    """

    def __init__(self, begun: RunIn) -> None:
        self.last: Run | None = None  # line; it may be written again, so it is added once the next one is there
        self._started_at, self._window, self._number = begun.started_at, 0, 0
        self._size = begun.micro_batch_size
        self._steps = self._samples = self._retries = self._size_changes = 0
        self._seconds = 0.0
        self._at, self._peak, self._held, self._setbacks = 0.0, 0, 0, list[Setback]()  # since the summary before

    def add(self, line: Run) -> Iterator[RunSummary]:
        """Add the next line of the file; yield the summary that is complete by that."""
        previous, self.last = self.last, line
        if previous is not None and previous.line != line.line:
            yield from self._take(previous)

    def close(self, now: float) -> Iterator[RunSummary]:
        """Yield the last summary, if its half minute is over."""
        if self.last is not None and self._window_of(self.last) < int((now - self._started_at) / SUMMARY_S - _LATE):
            yield from self.finish()

    def finish(self) -> Iterator[RunSummary]:
        """Yield what is left, after the end of the run."""
        if self.last is not None:
            last, self.last = self.last, None
            yield from self._take(last)
        if self._at:
            yield self._make()

    def _window_of(self, line: Run) -> int:
        return max(int((line.last_seen_at - self._started_at) / SUMMARY_S), self._window)

    def _take(self, line: Run) -> Iterator[RunSummary]:
        window = self._window_of(line)
        if window != self._window and self._at:
            yield self._make()
        self._window, self._at = window, line.last_seen_at
        rows = line.ranks or line.ranges
        self._steps += line.steps
        self._samples += sum(one.samples for one in rows)
        self._seconds += sum(one.seconds for one in line.ranges)
        self._retries += line.retries
        self._size_changes += sum(one.kind == "size" for one in line.setbacks)
        self._peak, self._held = max(self._peak, line.peak_bytes), max(self._held, line.held_bytes)
        self._setbacks.extend(line.setbacks)
        steps, setbacks = line.ranges[-1:], line.setbacks[-1:]
        if steps:
            self._size = steps[0].allowed_size or steps[0].micro_batch_size or self._size
        if setbacks and not (steps and steps[0].last_step >= setbacks[0].step):
            self._size = setbacks[0].new_size

    def _make(self) -> RunSummary:
        setbacks = tuple(
            RunSetback(
                step=one.step, kind=one.kind, old_size=one.old_size, new_size=one.new_size, reason=cut(one.reason)
            )
            for one in self._setbacks[-MOST_SETBACKS:]
        )
        summary = RunSummary(
            number=self._number,
            at=self._at,
            steps=self._steps,
            samples=self._samples,
            seconds=self._seconds,
            retries=self._retries,
            size_changes=self._size_changes,
            micro_batch_size=self._size,
            peak_bytes=self._peak,
            held_bytes=self._held,
            setbacks=setbacks,
        )
        self._number, self._at, self._peak, self._held, self._setbacks = self._number + 1, 0.0, 0, 0, []
        return summary
