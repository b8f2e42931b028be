"""Computes the loss in chunks where the smallest micro-batch does not fit and its logits are large."""

from __future__ import annotations

from typing import Any

from autobatch.fitting.make_plan import Request
from autobatch.fitting.trials import Trials
from autobatch.memory.oom import describe_error
from autobatch.records import ChunkedLoss
from autobatch.step.whole_batch import WholeBatch
from autobatch.strategies.chunked_logits import CHUNKS
from autobatch.strategies.chunked_loss import find_head, try_chunks

_COPIES = 3
"""Copies of its logits that a cross entropy holds at once: their logarithm, and two gradients."""

_SMALL = 0.1
"""Part of the limit that these must take."""


def chunk_loss(request: Request, trials: Trials, size: int) -> None:
    """Let ``trials`` compute the loss in chunks, or note why they do not."""
    workload = request.workload
    head = "" if isinstance(workload.step, WholeBatch) else find_head(workload.model)
    if not head:
        if "checkpoint" not in request.strategies:  # who asks for "auto" may have no classes at all
            trials.not_chunked = "no nn.Linear of the model has more outputs than inputs and its own forward()"
        return
    request.announce("comparing the loss with that in chunks")
    found = list[tuple[int, str]]()

    def run(samples: Any) -> None:
        found.append(try_chunks(workload, head, samples))

    try:
        shortage = trials.probe.examine(run, size)
    except Exception as error:  # noqa: BLE001 - the plain step has not raised it
        trials.not_chunked = f"the step fails ({describe_error(error)})"
        return
    if shortage is not None:
        trials.not_chunked = f"its forward pass alone does not fit ({shortage})"
        return
    logits_bytes, reason = found[-1]
    if _COPIES * logits_bytes < _SMALL * request.allowance.limit_bytes:
        return
    trials.not_chunked = reason
    if not reason:
        trials.chunk(ChunkedLoss(head=head, chunks=CHUNKS, micro_batch_size=size, logits_bytes=logits_bytes))
