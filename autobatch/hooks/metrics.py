"""An event as numbers for a tracker, and the step that they are of.

Covers which events carry numbers. Does not cover any tracker.
"""

from __future__ import annotations

from typing import NamedTuple

from autobatch.events import Event, Retried, SizeChanged, StepFinished
from autobatch.events.step_metrics import step_metrics

__all__ = ["Reading", "read_event"]


class Reading(NamedTuple):
    """Numbers under their keys, at a step."""

    step: int
    values: dict[str, int | float]


def read_event(event: Event) -> Reading | None:
    """What a tracker should draw of an event; ``None`` where there is nothing to draw."""
    if isinstance(event, StepFinished):
        values = step_metrics(event.micro_batch_sizes, event.retries, event.peak_bytes, event.seconds)
        return Reading(event.step, {**values, "autobatch/budget_bytes": event.budget_bytes})
    if isinstance(event, Retried):
        return Reading(event.step, {"autobatch/out_of_memory_at": event.failed_size})
    if isinstance(event, SizeChanged):
        return Reading(event.step, {"autobatch/size_limit": event.new_size})
    return None
