"""Defines ``Prediction``: what ``predict`` returns, and what you do with it: print, explain, plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from autobatch._bounds import LISTED, Bytes, Count, Flag, Samples, Seconds, Target, Text, Whole
from autobatch.plan import Plan
from autobatch.planning.curve import MemoryCurve
from autobatch.prediction import text
from autobatch.prediction.cards import Gpu
from autobatch.records import Record
from autobatch.report.pictures import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Strategy = Literal["ddp", "fsdp2"]
"""Each rank has the whole model (``DistributedDataParallel``), or a shard of it (``fully_shard``)."""


class Part(Record):
    """Some of the bytes at the peak: of one kind, or of one module."""

    name: Text
    byte_count: Bytes


class Point(Record):
    """Peaks at one size, in bytes: in tensors and cuBLAS's workspaces, and held by the allocator."""

    size: Samples
    allocated: Bytes
    reserved: Bytes


class CardFit(Record):
    """How the step fits one card."""

    gpu: Text  # its name
    total_bytes: Bytes  # as CUDA reports it
    micro_batch_size: Count  # the most samples that fit with the margin; 0 if none do
    accumulation_steps: Count  # micro-batches for the target; 0 if nothing fits
    peak_bytes: Bytes  # of the process at that size, CUDA's own included, without the margin
    measured: Flag  # whether the total was read on such a card


class Reach(Record):
    """The most samples in a micro-batch on the asked card, without the margin; 0 if none fit."""

    comfortable: Count  # the allocator never gives memory back
    tight: Count  # it does, which costs time; no more samples are predicted to run


class Change(Record):
    """Another way to do the same step; traced, not calculated."""

    name: Text
    effect: Text = ""  # what it costs besides memory: "lower precision", "another optimizer", "more time"
    peak_bytes: Bytes = 0  # held by the allocator at the judged size of the unchanged step
    saved_bytes: Whole = 0  # negative if it takes more
    micro_batch_size: Count = 0  # the most samples that fit then, with the margin
    failed: Text = ""  # why it could not be traced


class Prediction(Record):
    """What one training step would need on a card; frozen, and equal by content.

    Example:
        >>> prediction = autobatch.predict(model, batch=batch, step=step, gpu="L4")  # doctest: +SKIP
        >>> print(prediction)  # doctest: +SKIP
        autobatch: predicted on L4: 256 = 6 x 43 (two of 42); peak 18.1 GiB of 22.0 GiB; nothing was run, 1.9 s

    Nothing in it was measured. A size fits if ``(reserved + context_bytes) * (1 + margin)`` is at most the card's
    total: the margin is on all that the process takes. The budget of ``plan`` is the card's total less
    ``context_bytes``. Its headroom is what the margin leaves free, and its peak is the allocator's alone.

    Attributes:
        gpu: The card.
        target_batch: Samples of an optimizer step over all ranks.
        curve: Peaks by micro-batch size, in bytes of the allocator: a convex cover of ``points``.
        points: A choice of the simulated sizes, in order.
        plan: The plan for this card, marked ``predicted``; ``None`` if not even one sample fits.
        largest_judged: The largest size that was judged: the target, or the largest traced size if ``interpolated``.
        reach: How many samples the card takes without the margin, up to ``largest_judged``.
        judged_size: The size that the next six describe: the plan's, or without a plan the least that can run.
        peak_bytes: Peak of the process at that size, without the margin: ``breakdown`` and ``context_bytes`` together.
        breakdown: The allocator's bytes at the peak, the largest first: tensors by kind, and workspaces. The last
            entry is what it holds beside them, as it rounds sizes up and other moments need other blocks. ``"aux"`` is
            what the step returns beside its loss.
        modules: The modules with most of the tensors at the peak, at most ten entries. Modules with the same place in
            blocks and as many bytes are one (``"layers.*.mlp (32 alike)"``); the last entry is all others.
        per_sample_bytes: Bytes that one more sample adds to the peak in tensors; 0 if the optimizer's step peaks.
        context_bytes: Bytes that CUDA takes outside the allocator on this card.
        changes: Other ways to do the step, the most gained first; empty without ``what_if=True``.
        margin: The fraction of the predicted peak of the process that is left free on top of it.
        margin_reason: Why it is that much.
        cards: The same step on the common cards and the asked one, or on all known cards.
        peaks_in_loss: Whether the peak is in the loss of a ``WholeBatch``, which is as large in any micro-batches.
        interpolated: Whether the step ran different operators at different sizes. Numbers for other sizes then lie on
            lines through the two nearest traces.
        has_convolutions: Whether any operator may take a workspace of cuDNN.
        cudnn_version: The version of the cuDNN that answered, 92000 for 9.20; 0 if a rule was used.
        proven_at: The judged size, if it was traced and agrees byte for byte; else 0.
        doubt: Why it was not traced.
        warnings: Reasons to doubt the prediction or its plan, a sentence each.
        seconds: How long the prediction took.
        world_size: Ranks that share the target.
        data_parallel: How they share the model; ``None`` for one process.
        shares: Samples of an optimizer step on each rank; empty for one rank. All else describes the first rank: no
            other has more samples or larger shards.
        model: Class of the model.
        step: Digest of model, step, batch and optimizer, the same on every card; empty if unknown.
        units: With ``"fsdp2"`` the paths of the modules that are sharded apart; the rest of the model is one more unit.
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
    peaks_in_loss: Flag = False
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
    model: Text = ""
    step: Text = ""

    @property
    def share(self) -> int:
        """Samples of an optimizer step on the rank that the prediction describes."""
        return self.shares[0] if self.shares else self.target_batch

    def __str__(self) -> str:
        """The prediction in one line."""
        return text.summarise_prediction(self)

    __repr__ = __str__

    @property
    def micro_batch_size(self) -> int:
        """As in ``plan``; 0 if not even one sample fits."""
        return self.plan.micro_batch_size if self.plan else 0

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """As in ``plan``; empty if not even one sample fits."""
        return self.plan.micro_batch_sizes if self.plan else ()

    @property
    def accumulation_steps(self) -> int:
        """As in ``plan``; 0 if not even one sample fits."""
        return self.plan.accumulation_steps if self.plan else 0

    def explain(self) -> str:
        """Explain the prediction: what fits, where the memory goes, what would help, all cards."""
        return text.explain_prediction(self)

    def explain_cards(self) -> str:
        """Show ``cards`` as a table."""
        return text.explain_cards(self)

    def plot(self, kind: str = "peak", ax: Axes | None = None) -> Axes:
        """Draw the prediction with matplotlib, which ``torch-autobatch[plot]`` installs.

        Args:
            kind: ``"peak"`` for the memory curve and the card's memory, ``"memory"`` for where that memory goes.
            ax: Axes to draw on; default: those of a new figure. A figure without a layout gets the constrained one, in
                which the legend has a place.

        Raises:
            InvalidArgument: The kind is unknown, ``ax`` is something else, or matplotlib is not installed.
        """
        return plot(text.charts(self), kind, ax)

    def _repr_html_(self) -> str:
        """Show the prediction in a notebook, with pictures and tables."""
        return text.render_prediction(self)
