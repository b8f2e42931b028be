"""A trial of ``fit`` is replayed as it runs: a first step of two samples, caches released, then a step."""

from __future__ import annotations

import pytest
import torch
from nets import GPT, step, tokens
from torch import nn
from workloads import Plain, make_batch, mean_step

from autobatch.batch.samples import describe
from autobatch.prediction.allocator import simulate
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.prior import TrialReplay
from autobatch.prediction.timeline import Block, TracedStep, align
from autobatch.prediction.tracing.trace import trace_timeline
from autobatch.step.workload import Workload

MIB = 2**20


def make_step(samples: int) -> TracedStep:
    """Two steps of two micro-batches: a parameter, activations, a gradient, state from the first update on."""
    order, sizes, blocks = [1], [30 * MIB], [Block(phase="before", kind="parameter")]

    def add(phase, kind, size):
        sizes.append(size)
        blocks.append(Block(phase=phase, kind=kind))
        order.append(len(sizes))
        return len(sizes)

    for now in range(2):
        gradient = 0
        for _ in range(2):
            activation = add("forward", "activation", samples * 11 * MIB)
            passed = add("backward", "temporary", 12 * MIB)
            gradient = gradient or add("backward", "gradient", 30 * MIB)
            order.extend([-activation, -passed])
        if now == 0:
            add("optimizer", "optimizer state", 40 * MIB)
        order.append(-gradient)
    return TracedStep(samples=samples, order=tuple(order), sizes=tuple(sizes), blocks=tuple(blocks))


TIMELINE = align(make_step(2), make_step(3))


def test_a_trial_begins_after_a_first_step_of_two_samples():
    """Parameter and state are there, each in a segment of its own, and no cache of the first step."""
    assert TIMELINE is not None
    replay = TrialReplay.of(Estimate(TIMELINE))
    for samples in (2, 5, 40):
        assert replay.reserved(samples) == (30 + 40 + 11 * samples + samples % 2 + 12 + 30) * MIB


def test_released_caches_are_not_reserved_and_peaks_begin_there():
    """A block that is held keeps its segment; what was freed before gives its own back."""
    order, sizes = [1, 2, -1, 3], [100 * MIB, 10 * MIB, 20 * MIB]
    assert simulate(order, sizes).reserved == 110 * MIB
    released = simulate(order, sizes, released_at=3)
    assert (released.reserved, released.allocated, released.allocated_at_end) == (30 * MIB, 30 * MIB, 30 * MIB)


def without_optimizer():
    return Workload(Plain(torch.float32), mean_step), make_batch(2)


def with_state():
    model = GPT()
    return Workload(model, step, None, torch.optim.AdamW(model.parameters())), tokens()


def without_memory_in_the_update():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return Workload(model, lambda model, rows: model(rows).square().mean(), None, optimizer), torch.randn(2, 64)


@pytest.mark.predicts
@pytest.mark.parametrize("make", [without_optimizer, with_state, without_memory_in_the_update])
def test_parts_are_found_in_real_traces(make):
    """With and without an optimizer: a trial holds at least its tensors, and grows with its samples."""
    workload, batch = make()
    replay = TrialReplay.of(Estimate(run_apart(lambda: trace_timeline(workload, describe(batch)))))
    parameters = sum(parameter.numel() * 4 for parameter in workload.model.parameters())
    assert parameters <= replay.resident_bytes <= 2 * parameters + 2**16
    assert 0 < replay.forward.in_tensors <= replay.forward.left
    assert replay.reserved(2) <= replay.reserved(20_000) < replay.reserved(40_000)
