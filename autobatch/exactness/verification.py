"""``verify``: is splitting this step exact, and if not, why?

Covers the two ways to ask: a user's, and that of ``fit`` after its trials. Does not cover how it is found out
(``check``), nor a count that is consistent but not the intended one: class weights with samples as their count split
exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autobatch.batch.example import check_values, find_example
from autobatch.batch.layout import Layout
from autobatch.exactness.check import Check
from autobatch.memory.container import read_host_memory
from autobatch.memory.device import Device
from autobatch.records import Verdict
from autobatch.request import find_device
from autobatch.state.process_lock import one_at_a_time
from autobatch.state.training_state import TrainingState
from autobatch.step.default_step import default_step
from autobatch.step.workload import Step, Weigh, Workload

__all__ = ["check_split", "verify"]

_MOST_SAMPLES = 16
"""Enough for four quarters of four, which is what telling the causes apart takes; few enough to be quick."""


def verify(
    model: nn.Module,
    batch: Any,
    step: Step | None = None,
    weigh: Weigh | None = None,
    *,
    device: torch.device | str | Device | None = None,
) -> Verdict:
    """Whether splitting a step into micro-batches gives the whole batch's gradient; if not, why.

    At most 16 samples are run whole and in several divisions, in float32 or wider, with dropout and random draws held
    still. Exactness is checked with each module in the mode, train or eval, in which you left it, here and in ``fit``
    (whose sizes are tried in train mode): a BatchNorm layer in eval mode splits exactly. Afterwards everything is bit
    for bit as before.

    Args:
        model: The model, on its device, in the mode in which it is trained.
        batch: An example batch of at least 2 samples that differ, or a Dataset or DataLoader; as for ``fit``.
        step: ``step(model, micro_batch)``; as for ``fit``.
        weigh: What the mean is over; as for ``fit``.
        device: Where the model is; default: where its parameters are.

    Returns:
        The verdict, with every cause that was found; ``unchecked`` says why, where there is none.

    Raises:
        InvalidArgument: An argument cannot mean anything.
        InvalidBatch: The batch cannot be counted, or ``weigh`` does not count.
        InvalidStep: What the step returns is no loss. Whatever the step itself raises comes out unchanged.
    """
    workload = Workload(model, step or default_step, weigh)
    memory = find_device(workload.parameters(), type(model).__name__, device)
    layout = find_example(model, batch, _MOST_SAMPLES).layout
    check_values(layout.batch)
    host_bytes = read_host_memory().available_bytes // 2
    with (
        one_at_a_time(),
        TrainingState(model, None, memory.torch_device, host_bytes=host_bytes, outside=workload.outside()),
    ):
        verdict = Check(workload, layout, memory, _MOST_SAMPLES).run()
    memory.reclaim()
    return verdict


def check_split(workload: Workload, layout: Layout, device: Device, most: int) -> Verdict:
    """``verify`` for ``fit``, which holds a ``TrainingState`` and puts it back: the model is changed here.

    Trials have run the step before, so it raises nothing: where the step cannot be held still, or is used wrongly in a
    way that only a division shows, there is no verdict, and ``unchecked`` says why. And it is quick: where BatchNorm
    explains why the first division is not exact, nothing else is looked for.

    Args:
        workload: What is run, in the mode in which its model is.
        layout: Samples of which the first are taken; fewer where memory ends.
        device: Where.
        most: Samples that are known to fit; at most 16 are taken, and at least 2.
    """
    return Check(workload, layout, device, min(max(2, most), _MOST_SAMPLES), after_trials=True).run()
