"""Defines ``StepResult``: what one step of the runner returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from autobatch._formatting import describe_fields
from autobatch.events.rank_step import RankStep
from autobatch.events.runner_events import step_metrics

__all__ = ["StepResult"]


@dataclass(frozen=True, init=False, repr=False)
class StepResult:
    """One committed step.

    Attributes:
        loss: The batch's mean loss: a detached 0-dim tensor on the device. Reading it waits for the device.
        micro_batch_sizes: The committed micro-batches, in order; sums to the batch's samples.
        retries: How often memory ended and the step went on with less.
        peak_bytes: Most bytes in tensors at once during the step; 0 where the device cannot measure. Without a budget
            that you passed, a CPU counts two steps, and this is the last counted one's.
        seconds: Wall time. On an asynchronous device the time to enqueue the work: nothing is waited for.
        aux: What the user's step returned beside the loss, one entry a committed micro-batch, detached. ``None`` for
            a micro-batch that was not run because it counts for nothing.
        skipped: Whether nothing was done because there was nothing to take a mean over (all labels ignored): then
            ``loss`` is nan, no micro-batch is committed, and everything is as before.
        gradient_norm: Of the gradients that the optimizer used, before they were clipped to ``max_grad_norm``: a
            detached 0-dim tensor. ``None`` where nothing was clipped; then nobody has computed it.
        samples: With ``lengths``, by which samples are sorted, and with ``cut``, the rows of each committed micro-batch
            in the batch, as ``aux`` has them; of several batches counted on. Empty without: samples come in their own
            order.
        ranks: What each rank did, by rank: samples, retries, peak and its own seconds; empty where there is one rank.
    """

    loss: torch.Tensor
    micro_batch_sizes: tuple[int, ...]
    retries: int
    peak_bytes: int
    seconds: float
    aux: tuple[Any, ...] = ()
    skipped: bool = False
    ranks: tuple[RankStep, ...] = ()
    gradient_norm: torch.Tensor | None = None
    samples: tuple[tuple[int, ...], ...] = ()

    def __init__(  # noqa: PLR0917 - as dataclasses make it
        self,
        loss: torch.Tensor,
        micro_batch_sizes: tuple[int, ...],
        retries: int,
        peak_bytes: int,
        seconds: float,
        aux: tuple[Any, ...] = (),
        skipped: bool = False,  # noqa: FBT001, FBT002 - in the order of the fields, as dataclasses have it
        ranks: tuple[RankStep, ...] = (),
        gradient_norm: torch.Tensor | None = None,
        samples: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        """All fields in one write: a frozen dataclass writes each by a call, 17 us in each step (2 CPU cores)."""
        vars(self).update(
            loss=loss,
            micro_batch_sizes=micro_batch_sizes,
            retries=retries,
            peak_bytes=peak_bytes,
            seconds=seconds,
            aux=aux,
            skipped=skipped,
            ranks=ranks,
            gradient_norm=gradient_norm,
            samples=samples,
        )

    def __repr__(self) -> str:
        """One line; it reads the loss, which waits for the device."""
        sizes = Counter(self.micro_batch_sizes)
        fields = {
            "loss": float(self.loss),
            "micro_batch_sizes": " + ".join(f"{count} x {size}" for size, count in sizes.items()),
            "retries": self.retries,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "aux": tuple(one for one in self.aux if one is not None),
            "ranks": self.ranks,
        }
        always = {"loss", "micro_batch_sizes", "retries"}
        return describe_fields("StepResult", ((name, one) for name, one in fields.items() if one or name in always))

    def metrics(self) -> dict[str, int | float | torch.Tensor]:
        """Numbers for any tracker.

        Plain ones but for ``autobatch/loss`` and, with ``max_grad_norm``, ``autobatch/gradient_norm``: these are
        detached 0-dim tensors, which trackers read with ``float()``. Only that waits for the device.
        """
        tensors = {"autobatch/loss": self.loss}
        if self.gradient_norm is not None:
            tensors["autobatch/gradient_norm"] = self.gradient_norm
        return {
            **step_metrics(self.micro_batch_sizes, self.retries, self.peak_bytes, self.seconds, self.ranks),
            **tensors,
        }
