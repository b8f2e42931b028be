"""Defines the events of ``fit`` and their log lines: its trials, an earlier run's plan, and the plan it made."""

from __future__ import annotations

import logging
from typing import ClassVar

from autobatch._formatting import format_bytes, plural
from autobatch.events.event import Event
from autobatch.records import Trial


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
