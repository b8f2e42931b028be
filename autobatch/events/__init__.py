"""Defines the events of ``fit``, ``Runner`` and ``map`` as records with a log line each, and the protocol ``Hook``."""

from autobatch.events.event import Event, Hook, emit, log_event
from autobatch.events.fit_and_map_events import (
    MapFinished,
    PieceFinished,
    PieceRetried,
    PlanMade,
    PlanRecalled,
    PlanRefused,
    StageBegan,
    TrialFinished,
)
from autobatch.events.runner_events import (
    BatchDiffers,
    GradientsFound,
    PlanDiffers,
    Retried,
    SizeChanged,
    StepFailed,
    StepFinished,
    SteppedTwice,
    StepSkipped,
)

__all__ = [
    "BatchDiffers",
    "Event",
    "GradientsFound",
    "Hook",
    "MapFinished",
    "PieceFinished",
    "PieceRetried",
    "PlanDiffers",
    "PlanMade",
    "PlanRecalled",
    "PlanRefused",
    "Retried",
    "SizeChanged",
    "StageBegan",
    "StepFailed",
    "StepFinished",
    "StepSkipped",
    "SteppedTwice",
    "TrialFinished",
    "emit",
    "log_event",
]
