"""Defines the events of a ``Runner`` with their log lines, and a step's numbers for trackers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from autobatch._bounds import Count
from autobatch._formatting import format_bytes, plural
from autobatch.events.event import Event
from autobatch.events.run_history import StepTotals


class StepEvent(Event):
    """An event of one step.

    Attributes:
        step: Number of the step, from 0.
    """

    step: int


class Retried(StepEvent):
    """A step ran out of memory, was undone and runs again in smaller micro-batches, or recomputes blocks from then on.

    Attributes:
        failed_size: Samples in the micro-batch that did not fit.
        new_size: Most samples in a micro-batch from now on.
        used_bytes: Bytes held on the device after the clean-up.
        budget_bytes: Bytes that the process may hold.
        reason: First line of the error.
        sums_in_each: Whether the size stays, and gradients of sharded parameters are summed in each micro-batch now.
        recomputed: Number of further blocks that are recomputed from now on, since no smaller micro-batch can run.
        inexact: Reason why splitting this step is not exact, as the plan's check found; empty if it is exact.
    """

    failed_size: int
    new_size: int
    used_bytes: int
    budget_bytes: int
    reason: str
    sums_in_each: bool = False
    recomputed: int = 0
    inexact: str = ""
    level: ClassVar[int] = logging.WARNING  # a retry costs time

    def __str__(self) -> str:
        failed = plural(self.failed_size, "sample")
        what = f"ran out of memory at {failed} and runs again with at most {self.new_size}"
        if self.sums_in_each:
            what = f"ran out of memory at {failed} and runs again with a sum of gradients in each micro-batch"
        if self.recomputed:
            what = f"ran out of memory at {failed} and recomputes {plural(self.recomputed, 'block')} more from now on"
        return (
            f"{self.source}step {self.step} {what}; "
            f"{format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} "
            f"held by others and us after clean-up; {self.reason}{_warn_of_inexactness(self.inexact)}"
        )


class UpdateCopied(StepEvent):
    """The optimizer's step ran out of memory on this rank; parameters and optimizer state were copied from another one.

    Attributes:
        giver: Number of the rank that had made the same update.
    """

    giver: Count
    level: ClassVar[int] = logging.WARNING  # without another rank the run would have ended

    def __str__(self) -> str:
        return (
            f"{self.source}step {self.step} ran out of memory inside the optimizer's step; parameters and optimizer "
            f"state were copied from rank {self.giver}"
        )


class SizeChanged(StepEvent):
    """The micro-batch size changed between two steps, before ``step``.

    Attributes:
        old_size: Most samples in a micro-batch before.
        new_size: Most samples in a micro-batch from now on.
        reason: ``"thrash"``, ``"less is free"`` or ``"grown back"``.
        inexact: As in ``Retried``.
    """

    old_size: int
    new_size: int
    reason: str
    inexact: str = ""

    @property
    def level(self) -> int:
        """``WARNING`` if the size became smaller."""
        return logging.INFO if self.new_size > self.old_size else logging.WARNING

    def __str__(self) -> str:
        return (
            f"{self.source}from step {self.step} on at most {plural(self.new_size, 'sample')} in a micro-batch, "
            f"before {self.old_size}: {_CAUSES.get(self.reason, self.reason)}{_warn_of_inexactness(self.inexact)}"
        )


def _warn_of_inexactness(why: str) -> str:
    return f"; THE GRADIENT IS NOT EXACT: {why}" if why else ""


_CAUSES = {
    "thrash": "the allocator had to free its cache and ask again in two steps running",
    "less is free": "less memory is free than that size needs",
    "grown back": "the last steps had no trouble and enough memory is free",
}


class BatchDiffers(StepEvent):
    """A step has another number of samples than planned; emitted once for each runner.

    One smaller step after full ones, as at the end of an epoch, is not reported.

    Attributes:
        samples: Number of this rank's samples.
        planned: Number of samples in the plan, for this rank.
        target_batch: Number of samples over all ranks; 0 if unknown.
        can_run: Whether the runner has an optimizer, and so ``run``.
    """

    samples: int
    planned: int
    target_batch: int = 0
    can_run: bool = True
    level: ClassVar[int] = logging.WARNING  # the run trains with another batch size than its user wanted

    def __str__(self) -> str:
        planned = f"planned {self.planned}"
        if self.world_size > 1 and self.target_batch:
            planned += f", this rank's share of target_batch={self.target_batch}"
        return (
            f"{self.source}step {self.step} was given {plural(self.samples, 'sample')}, {planned}: use "
            f"{'runner.run(loader), or ' if self.can_run else ''}batch_size={self.planned}"
        )


class SteppedTwice(StepEvent):
    """The user's loop stepped an object that the runner steps too; emitted once for each runner.

    Attributes:
        names: Classes of the objects that were stepped.
        calls: Calls to remove from the loop, one for each class.
    """

    names: tuple[str, ...]
    calls: tuple[str, ...]
    level: ClassVar[int] = logging.WARNING  # a learning rate decays twice as fast

    def __str__(self) -> str:
        names, calls = " and ".join(self.names), " and ".join(dict.fromkeys(self.calls))
        return (
            f"{self.source}{names} moved between two steps of the Runner, which steps what it was given: remove "
            f"{calls} from the loop"
        )


class GradientsFound(StepEvent):
    """A step began with earlier gradients; emitted once for each runner."""

    level: ClassVar[int] = logging.WARNING  # most loops clear gradients after the update, not before the next one

    def __str__(self) -> str:
        return (
            f"{self.source}step {self.step} began with gradients from before, which are part of its update; if they "
            f"were used already, call optimizer.zero_grad() before runner.step()"
        )


class PlanDiffers(Event):
    """A runner has a plan of another model, optimizer or device; emitted once for each runner."""

    plan_id: str
    differences: tuple[str, ...]
    level: ClassVar[int] = logging.WARNING  # it may be intended, such as another number of classes

    def __str__(self) -> str:
        name = f"plan {self.plan_id}" if self.plan_id else "the plan"
        return (
            f"{self.source}{name} is not of this training: {'; '.join(self.differences)}; its sizes may not fit, so "
            f"run fit() again"
        )


class StepSkipped(StepEvent):
    """A step was skipped, since nothing in its batch counts."""

    samples: int
    level: ClassVar[int] = logging.WARNING  # labels that are all ignored often come from a wrong tokenizer

    def __str__(self) -> str:
        return (
            f"{self.source}step {self.step} was skipped: nothing counts in its {plural(self.samples, 'sample')}, so "
            f"it has no mean; parameters, optimizer and scheduler did not change"
        )


class StepFailed(StepEvent):
    """A step ended in an error, which is raised as well.

    Attributes:
        reason: Type of the error; for errors of autobatch also the first line.
        out_of_memory: Whether it ran out of memory.
    """

    reason: str
    out_of_memory: bool
    level: ClassVar[int] = logging.DEBUG  # the user sees the error

    def __str__(self) -> str:
        return f"{self.source}step {self.step} failed: {self.reason}"


class RankStep(StepTotals):
    """One rank's part of a committed step.

    ``seconds`` is the time from the common start until its own gradient was ready, without waiting for other ranks. On
    CUDA it is that of the last step which the device had finished by then; 0 before the first.

    Attributes:
        rank: Number of the rank, from 0.
    """

    rank: Count


class StepFinished(StepEvent):
    """One optimizer step (or one accumulation) was committed.

    Attributes:
        micro_batch_sizes: Sizes of the committed micro-batches.
        retries: Number of times that the step ran out of memory and began again.
        peak_bytes: Most bytes in tensors at once.
        held_bytes: Most bytes that the allocator held at once; 0 if unknown.
        seconds: Wall time; on an asynchronous device this is the time to enqueue the work.
        budget_bytes: Bytes that the process may hold; 0 if unknown.
        ranks: Each rank's part of the step; empty with one rank.
        loss: The loss of ``StepResult``, a 0-dim tensor. ``float(event.loss)`` waits for the device, so JSON leaves it
            out; ``None`` in an event that was read from a file.
        gradient_norm: Norm of the gradients before clipping, likewise; ``None`` without ``max_grad_norm``.
    """

    micro_batch_sizes: tuple[int, ...]
    retries: int
    peak_bytes: int
    seconds: float
    held_bytes: int = 0
    budget_bytes: int = 0
    ranks: tuple[RankStep, ...] = ()
    loss: Any = Field(default=None, exclude=True, repr=False)
    gradient_norm: Any = Field(default=None, exclude=True, repr=False)
    level: ClassVar[int] = logging.DEBUG  # one line a step would hide everything else

    def __str__(self) -> str:
        return (
            f"{self.source}step {self.step}: {plural(len(self.micro_batch_sizes), 'micro-batch', 'micro-batches')} "
            f"of at most {max(self.micro_batch_sizes, default=0)}, {plural(self.retries, 'retry', 'retries')}, "
            f"peak {format_bytes(self.peak_bytes)}{self._describe_slowest()}"
        )

    def _describe_slowest(self) -> str:
        slowest = find_slowest_step(self.ranks)
        return f"; the slowest rank was {slowest.rank} with {slowest.seconds:.3f} s of its own work" if slowest else ""


def find_slowest_step(ranks: Sequence[RankStep]) -> RankStep | None:
    """Return the rank that the others waited for; ``None`` with one rank."""
    return max(ranks, key=lambda one: one.seconds, default=None)


def step_metrics(
    sizes: Sequence[int], retries: int, peak_bytes: int, seconds: float, ranks: Sequence[RankStep] = ()
) -> dict[str, int | float]:
    """Return a step's numbers under the keys that trackers show, ``autobatch/...``, without the loss.

    With several ranks, the slowest rank, its seconds and the largest peak are among them.
    """
    slowest = find_slowest_step(ranks)
    of_all: dict[str, int | float] = {}
    if slowest is not None:
        of_all = {
            "autobatch/slowest_rank": slowest.rank,
            "autobatch/slowest_rank_seconds": slowest.seconds,
            "autobatch/largest_peak_bytes": max(one.peak_bytes for one in ranks),
        }
    return {
        "autobatch/samples": sum(sizes),
        "autobatch/micro_batch_size": max(sizes, default=0),
        "autobatch/accumulation_steps": len(sizes),
        "autobatch/retries": retries,
        "autobatch/peak_bytes": peak_bytes,
        "autobatch/seconds": seconds,
        **of_all,
    }
