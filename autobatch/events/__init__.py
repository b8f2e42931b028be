"""What happened, as records, and how others may listen.

Covers the events of fitting and running, the ``Hook`` protocol and the log line of each event. Does not cover when they
happen (``fitting``, ``runner``) nor sinks for trackers (``hooks``).
"""

from autobatch.events.event import Event, Hook, emit, log_event
from autobatch.events.fit_events import PlanMade, PlanRecalled, PlanRefused, TrialFinished
from autobatch.events.runner_events import (
    BatchDiffers,
    GradientsFound,
    PlanDiffers,
    Retried,
    SizeChanged,
    StepFailed,
    StepFinished,
    StepSkipped,
)

__all__ = [
    "BatchDiffers",
    "Event",
    "GradientsFound",
    "Hook",
    "PlanDiffers",
    "PlanMade",
    "PlanRecalled",
    "PlanRefused",
    "Retried",
    "SizeChanged",
    "StepFailed",
    "StepFinished",
    "StepSkipped",
    "TrialFinished",
    "emit",
    "log_event",
]
