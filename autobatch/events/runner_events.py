"""What a ``Runner`` tells: its steps, and what changed or went wrong in them.

Covers these records and their log lines. Does not cover when they happen (``telling``).
"""

from __future__ import annotations

import logging

from autobatch._formatting import format_bytes, plural
from autobatch.events.event import Event

__all__ = [
    "BatchDiffers",
    "GradientsFound",
    "PlanDiffers",
    "Retried",
    "SizeChanged",
    "StepFailed",
    "StepFinished",
    "StepSkipped",
]


class Retried(Event):
    """A step met the end of memory and goes on with smaller micro-batches.

    Attributes:
        step: Which step of the runner, counted from 0.
        failed_size: Samples in the micro-batch that did not fit.
        new_size: The most samples in a micro-batch from here on.
        samples_kept: Samples whose gradient was already complete and is kept.
        samples_redone: Samples that have to be done again.
        used_bytes: Held on the device after the clean-up.
        budget_bytes: What the process may hold.
        reason: The first line of the error.
        inexact: Why splitting this step is not exact, where the plan's check has found so; empty otherwise.
    """

    step: int
    failed_size: int
    new_size: int
    samples_kept: int
    samples_redone: int
    used_bytes: int
    budget_bytes: int
    reason: str
    inexact: str = ""

    @property
    def level(self) -> int:
        """A retry costs time: the user should see it."""
        return logging.WARNING

    def __str__(self) -> str:
        """One line: sizes, bytes and reason."""
        return (
            f"autobatch: step {self.step} ran out of memory at {plural(self.failed_size, 'sample')}; "
            f"goes on with at most {self.new_size} ({self.samples_kept} kept, {self.samples_redone} redone); "
            f"{format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} "
            f"held by others and us after clean-up; {self.reason}{_warn_of_inexactness(self.inexact)}"
        )


class SizeChanged(Event):
    """The micro-batch size changed between two steps; no step was undone for it.

    Attributes:
        step: The first step of the runner that has the new size, counted from 0.
        old_size: The most samples in a micro-batch before.
        new_size: The most from here on.
        reason: ``"thrash"``, ``"less is free"`` or ``"grown back"``.
        inexact: As in ``Retried``.
    """

    step: int
    old_size: int
    new_size: int
    reason: str
    inexact: str = ""

    @property
    def level(self) -> int:
        """Less speed should be seen; having it back is good news."""
        return logging.INFO if self.new_size > self.old_size else logging.WARNING

    def __str__(self) -> str:
        """One line: sizes and reason."""
        return (
            f"autobatch: from step {self.step} on at most {plural(self.new_size, 'sample')} in a micro-batch, before "
            f"{self.old_size}: {_CAUSES.get(self.reason, self.reason)}{_warn_of_inexactness(self.inexact)}"
        )


def _warn_of_inexactness(why: str) -> str:
    return f"; THE GRADIENT IS NOT EXACT: {why}" if why else ""


_CAUSES = {
    "thrash": "the allocator had to free its cache and ask again in two steps running",
    "less is free": "less memory is free than that size needs",
    "grown back": "the last steps had no trouble and there is room",
}


class BatchDiffers(Event):
    """A step was given another number of samples than the plan was made for; told once a number."""

    step: int
    samples: int
    planned: int

    def __str__(self) -> str:
        """One line: it is run exactly as given."""
        return (
            f"autobatch: step {self.step} was given {plural(self.samples, 'sample')}, "
            f"the plan was made for {self.planned}; the update is the mean over the {self.samples}"
        )


class GradientsFound(Event):
    """A step began with gradients from before; told once a runner."""

    step: int

    @property
    def level(self) -> int:
        """Seldom meant: most loops clear gradients after the update, not before the next one."""
        return logging.WARNING

    def __str__(self) -> str:
        """One line: what happens to them, and how to avoid it."""
        return (
            f"autobatch: step {self.step} began with gradients from before, which are part of its update; if they were "
            f"used already, call optimizer.zero_grad() before runner.step()"
        )


class PlanDiffers(Event):
    """A runner was given a plan that was made for another model or optimizer; told once a runner."""

    plan_id: str
    differences: tuple[str, ...]

    @property
    def level(self) -> int:
        """It may be meant, as with another number of classes, and it may run out of memory."""
        return logging.WARNING

    def __str__(self) -> str:
        """One line: what differs, and what to do."""
        name = f"plan {self.plan_id}" if self.plan_id else "the plan"
        return (
            f"autobatch: {name} is not of this training: {'; '.join(self.differences)}; its sizes may not fit, so run "
            f"fit() again"
        )


class StepSkipped(Event):
    """A step whose batch holds nothing to take a mean over was left out."""

    step: int
    samples: int

    @property
    def level(self) -> int:
        """Seldom meant: labels that are all ignored often come from a wrong tokenizer or a cut text."""
        return logging.WARNING

    def __str__(self) -> str:
        """One line: why, and that nothing has changed."""
        return (
            f"autobatch: step {self.step} was skipped: nothing counts in its {plural(self.samples, 'sample')}, so "
            f"there is no mean; parameters, optimizer and scheduler are as before"
        )


class StepFailed(Event):
    """A step ended in an error, which is raised as well.

    Attributes:
        step: Which step of the runner, counted from 0.
        reason: The error's type, and its first line where the error is one of ours.
        out_of_memory: Whether memory was what it lacked.
    """

    step: int
    reason: str
    out_of_memory: bool

    @property
    def level(self) -> int:
        """The error itself is what is seen."""
        return logging.DEBUG

    def __str__(self) -> str:
        """One line: which step, and why."""
        return f"autobatch: step {self.step} failed: {self.reason}"


class StepFinished(Event):
    """One optimizer step (or one accumulation) was committed.

    Attributes:
        step: Which step of the runner, counted from 0.
        micro_batch_sizes: The committed micro-batches.
        retries: How often this step had to begin again with less.
        peak_bytes: Most bytes in tensors at once, in the whole step.
        seconds: Wall time; on an asynchronous device the time to enqueue, the runner adds no synchronisation.
        budget_bytes: What the process may hold; 0 where the device cannot tell.
    """

    step: int
    micro_batch_sizes: tuple[int, ...]
    retries: int
    peak_bytes: int
    seconds: float
    budget_bytes: int = 0

    @property
    def level(self) -> int:
        """One a step would drown everything else."""
        return logging.DEBUG

    def __str__(self) -> str:
        """One line: the committed sizes, retries, peak."""
        return (
            f"autobatch: step {self.step}: {plural(len(self.micro_batch_sizes), 'micro-batch', 'micro-batches')} "
            f"of at most {max(self.micro_batch_sizes, default=0)}, {plural(self.retries, 'retry', 'retries')}, "
            f"peak {format_bytes(self.peak_bytes)}"
        )
