"""Defines ``StepResult``, the result of one step of the runner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from autobatch._formatting import describe_fields
from autobatch.events.runner_events import RankStep, step_metrics


@dataclass(frozen=True, repr=False)
class StepResult:
    """One committed step.

    Attributes:
        loss: The batch's mean loss: a detached 0-dim tensor on the device. Reading it waits for the device.
        micro_batch_sizes: The committed micro-batches, in order; sums to the batch's samples.
        retries: Number of times that the step ran out of memory and was run again in smaller micro-batches.
        peak_bytes: Most bytes in tensors at once during the step; 0 if the device cannot measure. Without a budget
            that you passed, a CPU counts two steps, and this is the last counted one's.
        seconds: Wall time. On an asynchronous device this is the time to enqueue the work.
        aux: Values that the user's step returned beside the loss, detached: one entry a committed micro-batch. An entry
            is ``None`` if the micro-batch counts for nothing and was not run.
        skipped: Whether there was nothing to take a mean over (all labels ignored). Then ``loss`` is nan, no
            micro-batch is committed, and nothing has changed.
        gradient_norm: Norm of the gradients before they were clipped to ``max_grad_norm``, a detached 0-dim tensor.
            ``None`` without clipping.
        samples: With ``cut``, the rows of each committed micro-batch in the batch, in the order of ``aux``. Rows of
            several batches are numbered on. Empty if samples run in their own order.
        ranks: Samples, retries, peak and seconds of each rank; empty for one rank.
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

    def __repr__(self) -> str:
        """Return one line; this reads the loss, which waits for the device."""
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
        """Return numbers for any tracker.

        ``autobatch/loss`` and, with ``max_grad_norm``, ``autobatch/gradient_norm`` are detached 0-dim tensors. Trackers
        read them with ``float()``, which waits for the device.
        """
        tensors = {"autobatch/loss": self.loss}
        if self.gradient_norm is not None:
            tensors["autobatch/gradient_norm"] = self.gradient_norm
        return {
            **step_metrics(self.micro_batch_sizes, self.retries, self.peak_bytes, self.seconds, self.ranks),
            **tensors,
        }
