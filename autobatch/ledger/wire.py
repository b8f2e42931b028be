"""Turns plans, runs and predictions into records for the server: names and numbers, never data or paths."""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from autobatch._version import __version__
from autobatch.events.run_history import Run, join_runs
from autobatch.ledger.store import hide_paths, plan_id
from autobatch.memory.host_limit import read_host_memory
from autobatch.memory.nvml import query
from autobatch.plan import Plan
from autobatch.records import DeviceInfo
from autobatch.service.records import (
    MOST_POINTS,
    MOST_RANKS,
    MOST_SETBACKS,
    CardReading,
    PlanIn,
    PredictedPoint,
    PredictionIn,
    RankCard,
    RunIn,
    RunSetback,
    RunSummary,
)

with suppress(ImportError):  # Windows has none
    import pwd  # noqa: F401 - getpass imports it, in a thread where a child that is forked meanwhile would have half of it

SUMMARY_S = 30.0
_LATE = 0.2  # of it: a line may be written so long after its time
_STEP = re.compile(r"[0-9a-f]{32}")  # a fingerprint, whose first half is the step's


def host_name() -> str:
    return cut(platform.node())


def cut(text: str, longest: int = 200) -> str:
    """Return a text as the server takes it: one line of this length at most."""
    return "".join(letter for letter in text if letter.isprintable())[:longest]


def describe_plan(plan: Plan, *, paths: bool = False) -> PlanIn:
    """Return a plan without the processes of others, without the batch's keys, and without paths unless asked for."""
    device = plan.device.model_copy(update={"tenants": ()})
    fields: dict[str, Any] = {"id": plan_id(plan), "device": device, "batch_lists": {}, "batch_dims": {}}
    if not paths:
        fields["warnings"] = tuple(map(hide_paths, plan.warnings))
        if (verdict := plan.verdict) is not None:
            texts = {"causes": tuple(map(hide_paths, verdict.causes)), "unchecked": hide_paths(verdict.unchecked)}
            fields["verdict"] = verdict.model_copy(update=texts)
    host = next((one.host for one in plan.ranks if one.rank == plan.rank), "") or host_name()
    return PlanIn(id=fields["id"], host=cut(host), step=_step_of(plan), plan=plan.model_copy(update=fields))


def _step_of(plan: Plan) -> str:
    return plan.fingerprint[:16] if _STEP.fullmatch(plan.fingerprint) else ""


def describe_forecast(plan: Plan, points: Iterable[tuple[int, int]]) -> PredictionIn:
    """Return the prediction from which the search for this plan began: bytes by size."""
    predicted = tuple(PredictedPoint(size=size, reserved_bytes=held) for size, held in sorted(points)[:MOST_POINTS])
    fitting = [point.size for point in predicted if point.reserved_bytes <= plan.limit_bytes]
    return PredictionIn(
        **take(plan, "made_at", "target_batch", "world_size"),
        id=plan_id(plan),
        host=host_name(),
        model=cut(plan.model),
        step=_step_of(plan),
        card=cut(plan.device.name),
        total_bytes=plan.device.total_bytes,
        micro_batch_size=max(fitting, default=0),
        points=predicted,
        version=__version__,
    )


def describe_run(plan: Plan, run: Run, device: DeviceInfo | None = None) -> RunIn:
    """Return a run as it began; ``device`` is the one of this process, and ``None`` for a run of another."""
    ranks = tuple(RankCard(host=cut(one.host), device=cut(one.device)) for one in plan.ranks[:MOST_RANKS])
    return RunIn(
        **take(run, "id", "plan_id", "pid", "started_at"),
        **take(plan, "target_batch", "world_size", "micro_batch_size", "limit_bytes"),
        host=(ranks[0].host if ranks and not device else "") or host_name(),
        user=_user_name() if device else "",
        model=cut(plan.model),
        # With lengths a size counts samples of one length, which a prediction does not have.
        step="" if plan.lengths else _step_of(plan),
        cards=read_cards(device) if device else (),
        ranks=ranks,
        version=__version__,
    )


def take(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


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
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Summaries:
    """Adds up the lines of a run's file into one summary for each half minute in which there were any.

    A summary follows from the file alone, whoever makes it and however often. So one that is handed in again is equal.
    """

    def __init__(self, begun: RunIn) -> None:
        self._started_at, self._size = begun.started_at, begun.micro_batch_size
        self._last: Run | None = None  # it may be written again, so it is added once the next line is there
        self._window, self._waiting = 0, list[Run]()  # number of the half minute, and its lines
        self._number = 0
        self._totals: dict[str, Any] = {"steps": 0, "samples": 0, "seconds": 0.0, "retries": 0, "size_changes": 0}

    def add(self, line: Run) -> Iterator[RunSummary]:
        """Add the next line of the file; yield the summary that is complete by that."""
        previous, self._last = self._last, line
        if previous is not None and previous.line != line.line:
            yield from self._take(previous)

    def close(self, now: float) -> Iterator[RunSummary]:
        """Yield the last summary, if its half minute is over."""
        if self._last is not None and self._window_of(self._last) < int((now - self._started_at) / SUMMARY_S - _LATE):
            yield from self.finish()

    def finish(self) -> Iterator[RunSummary]:
        """Yield what is left, after the end of the run."""
        if self._last is not None:
            yield from self._take(self._last)
            self._last = None
        if self._waiting:
            yield self._make()

    def _window_of(self, line: Run) -> int:
        return max(int((line.last_seen_at - self._started_at) / SUMMARY_S), self._window)

    def _take(self, line: Run) -> Iterator[RunSummary]:
        window = self._window_of(line)
        if window != self._window and self._waiting:
            yield self._make()
        self._window = window
        self._waiting.append(line)

    def _make(self) -> RunSummary:
        new, self._waiting = join_runs(self._waiting), []
        more = {
            **take(new, "steps", "retries"),
            "samples": sum(one.samples for one in new.ranks or new.ranges),
            "seconds": sum(one.seconds for one in new.ranges),
            "size_changes": sum(one.kind == "size" for one in new.setbacks),
        }
        self._totals = {name: total + more[name] for name, total in self._totals.items()}
        steps, setbacks = new.ranges[-1:], new.setbacks[-1:]
        if setbacks and not (steps and steps[0].last_step >= setbacks[0].step):
            self._size = setbacks[0].new_size
        elif steps:
            self._size = steps[0].allowed_size or steps[0].micro_batch_size or self._size
        self._number += 1
        return RunSummary(
            **self._totals,
            **take(new, "peak_bytes", "held_bytes"),
            number=self._number - 1,
            at=new.last_seen_at,
            micro_batch_size=self._size,
            rank_peaks=tuple(one.held_bytes or one.peak_bytes for one in new.ranks[:MOST_RANKS]),
            setbacks=tuple(
                RunSetback(**take(one, "step", "kind", "old_size", "new_size"), reason=cut(one.reason))
                for one in new.setbacks[-MOST_SETBACKS:]
            ),
        )
