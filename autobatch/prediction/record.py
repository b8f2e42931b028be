"""Defines what a prediction is, as plain data.

Covers what was predicted, for which card, and how sure that is. Does not cover what a user does with it
(``prediction``) nor how it is shown (``text``). Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autobatch._bounds import LISTED, Bytes, Count, Flag, Samples, Seconds, Target, Text, Whole
from autobatch.plan import Plan
from autobatch.planning.curve import MemoryCurve
from autobatch.prediction.cards import Gpu
from autobatch.records import Record

__all__ = ["CardFit", "Change", "Part", "Point", "PredictionRecord", "Reach", "Strategy"]

Strategy = Literal["ddp", "fsdp2"]
"""How ranks share a model: each has all of it (``DistributedDataParallel``), or a shard (``fully_shard``)."""


class Part(Record):
    """Some of the bytes at the peak: of one kind, or made by one module."""

    name: Text
    byte_count: Bytes


class Point(Record):
    """Peaks at one size, in bytes: in tensors and cuBLAS's workspaces, and held by the allocator, undisturbed."""

    size: Samples
    allocated: Bytes
    reserved: Bytes


class CardFit(Record):
    """What the step would be on one card.

    Attributes:
        gpu: The card's name.
        total_bytes: As CUDA reports it.
        micro_batch_size: The most samples that fit with the margin; 0 where not even one does.
        accumulation_steps: Micro-batches for the target; 0 where nothing fits.
        peak_bytes: Of the whole process at that size, what CUDA itself takes included; without the margin.
        measured: Whether the card's total is known from such a card.
    """

    gpu: Text
    total_bytes: Bytes
    micro_batch_size: Count
    accumulation_steps: Count
    peak_bytes: Bytes
    measured: Flag


class Reach(Record):
    """The most samples in a micro-batch on the asked card, by how much is risked; 0 where not even one.

    Attributes:
        comfortable: The allocator never has to give memory back.
        tight: It has to, which costs time, and still runs. More than this is predicted to be impossible.
    """

    comfortable: Count
    tight: Count


class Change(Record):
    """What another way to do the same step would need; traced, not calculated.

    Attributes:
        name: What is changed.
        effect: What it costs besides: ``"lower precision"``, ``"another optimizer"``, ``"more time"``; empty where
            training stays as it is.
        peak_bytes: Held by the allocator at the size at which the unchanged step is judged.
        saved_bytes: How much less that is; negative where it is more.
        micro_batch_size: The most samples that fit then, with the margin.
        failed: Why it could not be traced; empty where it could.
    """

    name: Text
    effect: Text = ""
    peak_bytes: Bytes = 0
    saved_bytes: Whole = 0
    micro_batch_size: Count = 0
    failed: Text = ""


class PredictionRecord(Record):
    """What one training step would need on a card that need not be there; frozen, and equal by content.

    Nothing in it was measured. A size fits where ``(reserved + context_bytes) * (1 + margin)`` is at most the card's
    total: the margin is on all that the process takes. In ``plan`` the budget is the card's total less
    ``context_bytes``, the headroom what the margin leaves free, and the peak the allocator's alone.

    Attributes:
        gpu: The card that was asked for.
        target_batch: Samples an optimizer step should see, over all ranks.
        curve: Peaks by micro-batch size, in bytes of the allocator: a convex cover of ``points``.
        points: What was simulated, in order of size; where there are many, a choice of it.
        plan: For the target on this card, marked ``predicted``; ``None`` where not even one sample fits.
        largest_judged: No size above this was judged: the target, or the largest size that was traced where the step
            ran different operators at different sizes.
        reach: How far the card goes, up to ``largest_judged``.
        judged_size: The size that the next six are of: the plan's, or the least that can be run where there is
            none.
        peak_bytes: Of the whole process at that size, without the margin: the sum of ``breakdown`` and
            ``context_bytes``.
        breakdown: What the allocator holds at the peak: tensors by kind and the workspaces of cuBLAS and cuDNN, the
            largest first; last what it holds beside them, as sizes are rounded up and other moments of the step need
            other blocks. ``"aux"`` is what the step returns beside its loss, of all micro-batches.
        modules: The modules that most of the tensors at the peak belong to, in at most ten entries: those that have the
            same place in blocks and as many bytes are one (``"layers.*.mlp (32 alike)"``), and the last is all others.
        per_sample_bytes: What one more sample adds to the peak in tensors alone, before anything is rounded; 0 where
            that peak is in the optimizer's step.
        context_bytes: What CUDA takes outside the allocator on this card.
        changes: What else could be done, the most gained first; empty unless asked for.
        margin: The fraction of the predicted peak of the whole process that is left free on top of it.
        margin_reason: Why it is that much.
        cards: The same step on the common cards and on the asked one, if it is known, or on all that are known, where
            that was asked for; with the same margin.
        interpolated: Whether the step ran different operators at different sizes, so that all numbers for sizes in
            between are on lines through the nearest two that were traced.
        has_convolutions: Whether any operator is a call of cuDNN that may take a workspace.
        cudnn_version: The version of cuDNN that was asked what they take, 92000 for 9.20; 0 where a rule says it.
        proven_at: The judged size, where the step was traced at just that size and what is said of it is byte for byte
            what it allocates and frees; 0 where it was not.
        doubt: Why it was not; empty where it was.
        warnings: What the user should know before trusting it, a sentence each.
        seconds: How long the prediction took.
        world_size: Ranks that share the target.
        data_parallel: How they share the model; ``None`` where there is one process.
        shares: Samples of an optimizer step on each rank, empty where one has all. All else is said of the first one:
            no other rank has more samples or larger shards.
        units: With ``"fsdp2"`` the modules that are taken to be sharded apart, by their paths; the rest of the model is
            one more.
    """

    gpu: Gpu
    target_batch: Target
    curve: MemoryCurve
    points: Annotated[tuple[Point, ...], LISTED]
    plan: Plan | None
    largest_judged: Samples
    reach: Reach
    judged_size: Samples
    peak_bytes: Bytes
    breakdown: Annotated[tuple[Part, ...], LISTED]
    modules: Annotated[tuple[Part, ...], LISTED]
    per_sample_bytes: Whole
    context_bytes: Bytes
    changes: Annotated[tuple[Change, ...], LISTED] = ()
    margin: Annotated[float, Field(ge=0, lt=1)]
    margin_reason: Text
    cards: Annotated[tuple[CardFit, ...], LISTED]
    interpolated: Flag = False
    has_convolutions: Flag = False
    cudnn_version: Count = 0
    proven_at: Count = 0
    doubt: Text = ""
    warnings: Annotated[tuple[Text, ...], LISTED] = ()
    seconds: Seconds = 0.0
    world_size: Target = 1
    data_parallel: Strategy | None = None
    shares: Annotated[tuple[Samples, ...], LISTED] = ()
    units: Annotated[tuple[Text, ...], LISTED] = ()

    @property
    def share(self) -> int:
        """Samples of an optimizer step on the rank that the prediction is about."""
        return self.shares[0] if self.shares else self.target_batch
