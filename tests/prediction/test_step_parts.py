"""A step of one micro-batch is that of two without what the second makes and drops."""

from __future__ import annotations

import pytest
import torch
from nets import GPT, ConvNet, images, step, tokens
from sampling import sample
from torch import nn
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.batch.samples import describe
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.timeline import Block, Timeline, find_parts
from autobatch.prediction.tracing.trace import Circumstances, trace, trace_timeline
from autobatch.step.workload import Workload


def make_workload(make_model, run, make_optimizer):
    model = make_model()
    return Workload(model, run, None, make_optimizer(model.parameters()) if make_optimizer else None)


WORKLOADS = {
    "transformer": (lambda: make_workload(GPT, step, torch.optim.AdamW), tokens),
    "convolutions": (lambda: make_workload(ConvNet, step, torch.optim.SGD), images),
    "no optimizer": (lambda: make_workload(Plain, mean_step, None), lambda: make_batch(2)),
}


@pytest.mark.predicts
@pytest.mark.parametrize("name", sample(WORKLOADS, 3))
def test_one_micro_batch_takes_what_a_trace_of_one_takes(name):
    """To the byte of tensors and to a segment of what the allocator holds, at the target; below it there are two."""
    make, make_samples = WORKLOADS[name]
    workload, layout = make(), describe(make_samples())
    estimate = Estimate(run_apart(lambda: trace_timeline(workload, layout)), target=16)
    one = run_apart(lambda: trace(workload, layout, 16, Circumstances(micro_batches=1)))
    found = estimate.step(16)
    assert found.peak() == one.peak() < estimate.timeline.at(16).peak()
    assert estimate.tensor_bytes(16) == one.peak()
    assert estimate.reserved(16) <= estimate.changed(target=0).reserved(16)
    assert estimate.tensor_bytes(8) == estimate.timeline.at(8).peak()


def test_parts_that_cannot_be_told_apart_are_left_as_they_are():
    """A pass that allocates nothing is not found."""
    blocks = [Block(phase="forward", kind="activation"), Block(phase="backward", kind="gradient")]
    assert find_parts([1, 2, -1], blocks) is None
    timeline = Timeline(order=(1, 2, -1), fixed=(512, 512), per_sample=(0, 512), blocks=tuple(blocks))
    assert Estimate(timeline, target=4).tensor_bytes(4) == 512 + 512 + 4 * 512


@pytest.mark.slow
@pytest.mark.predicts
def test_a_target_that_fits_in_one_micro_batch_needs_no_second():
    """On a card where two micro-batches of the whole target would not fit, and one does, that is the plan."""
    model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"batch": torch.zeros(2, 512), "step": lambda model, rows: model(rows).square().mean()}
    options |= {"optimizer": optimizer, "margin": 0, "gpu": "A100-40GB"}
    target = 1 << 19
    whole = autobatch.predict(model, target_batch=target, **options)
    half = autobatch.predict(model, target_batch=2 * target, **options)
    at_target = next(point for point in whole.points if point.size == target)
    with_second = next(point for point in half.points if point.size == target)
    parameters = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert 0 < with_second.allocated - at_target.allocated <= 2 * parameters
    assert whole.points[-1].size == target
