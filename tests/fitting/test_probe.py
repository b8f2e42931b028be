"""One trial: measured as training runs, and nothing left of it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from workloads import Everything, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.batch.samples import describe
from autobatch.fitting.probe import Probe
from autobatch.memory.cpu import CpuDevice
from autobatch.step.workload import Workload
from autobatch.testing import FakeDevice, oom_at
from autobatch.undo.training_state import TrainingState

ROOMY = 10**9


class Wide(nn.Module):
    """Enough activations and parameters that each part of the peak can be distinguished."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def run_trials(model, optimizer, sizes, limit=ROOMY, step=mean_step):
    """Trials of these sizes, with everything put back."""
    workload, device = Workload(model, step, None, optimizer), CpuDevice()
    gc.collect()
    before = device.usage().allocated
    with TrainingState(model, optimizer, torch.device("cpu"), host_bytes=ROOMY) as state:
        probe = Probe(workload, describe(make_batch(64)), device, limit, state)
        device.watch([*model.parameters(), *model.buffers()])
        base = device.usage().allocated - parameter_bytes(model) - before
        return [probe.run(size) for size in sizes], base


def test_a_trial_holds_gradients_and_optimizer_state_and_the_second_micro_batch():
    """The peak is parameters, gradients, two Adam moments and one micro-batch's activations, at least."""
    model = Wide()
    [small, large], _ = run_trials(model, torch.optim.AdamW(model.parameters()), [2, 64])
    own = parameter_bytes(model)
    assert small.resident_bytes >= 3 * own  # parameters and both moments, before the first sample
    assert small.peak_allocated >= 4 * own  # and the gradients
    # Each hidden value is kept twice: before the ReLU for its backward, and after it for the next layer's.
    assert large.backward_allocated - small.backward_allocated >= 62 * 2 * 500 * 4 * 0.8
    assert large.outcome == small.outcome == "fits"


def test_the_second_micro_batch_is_what_peaks():
    """With gradients resident memory is higher than in a lone micro-batch: a probe of one would promise too much."""
    model, device = Wide(), CpuDevice()
    batch = make_batch(4)
    device.watch([*model.parameters(), *batch])
    start = device.usage().allocated
    with device.limit(ROOMY):
        device.reset_peak()
        mean_step(model, batch).backward()
        alone = device.usage().peak_allocated - start
    model.zero_grad()
    [trial], _ = run_trials(model, None, [4])
    assert trial.peak_allocated - trial.resident_bytes >= alone + parameter_bytes(model) // 2


def test_the_optimizers_own_peak_is_measured():
    """A foreach step holds temporaries of the size of all parameters: more than the backward pass of a small batch."""
    model = Wide()
    [trial], _ = run_trials(model, torch.optim.Adam(model.parameters(), foreach=True), [2])
    assert trial.optimizer_peak > trial.backward_allocated
    assert trial.peak_allocated == trial.optimizer_peak


def test_a_trial_out_of_memory_is_an_outcome_with_what_was_reached():
    """The budget ends a trial, not the program: the outcome says oom and holds the peak before it."""
    model = Wide()
    [small], _ = run_trials(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), [2])
    limit = small.peak_allocated + 100_000
    [small, large], _ = run_trials(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), [2, 64], limit)
    assert (small.outcome, large.outcome) == ("fits", "oom")
    assert small.resident_bytes <= large.peak_allocated <= limit


def test_an_oom_inside_the_optimizers_step_is_an_outcome_and_is_put_back():
    """Parameters that a failed step has half updated are put back bit for bit."""

    class EndsInStep(torch.optim.Adam):
        position = 10**9

        def step(self, closure=None):
            with oom_at(self.position) as planned:
                super().step(closure)
            type(self).operations = planned.operations

    model = Everything()
    optimizer = EndsInStep([p for p in model.parameters() if p.requires_grad], foreach=False)
    run_trials(model, optimizer, [2])
    before = bits_of(model, optimizer)
    for position in range(1, EndsInStep.operations + 1):
        EndsInStep.position = position
        [trial], _ = run_trials(model, optimizer, [2])
        assert trial.outcome == "oom"
        assert not differences(bits_of(model, optimizer), before), position


@pytest.mark.parametrize(("may_spill", "outcomes"), [(True, ["fits", "fits", "thrash"]), (False, ["fits"] * 3)])
def test_a_trial_that_crawls_where_memory_may_spill_does_not_fit(may_spill, outcomes, monkeypatch):
    """A size that runs at a fraction of another one's rate; on other systems the time is no evidence."""
    now = [0.0]
    monkeypatch.setattr("autobatch.fitting.probe.time.perf_counter", lambda: now[0])

    def step(model, batch):
        now[0] += 2 if len(batch[0]) >= 32 else 0.01  # the host's memory is far away
        return mean_step(model, batch)

    model = Wide()
    device = FakeDevice(lambda n: 100 + n, total_bytes=1000)
    device.may_spill = may_spill
    with TrainingState(model, None, torch.device("cpu"), host_bytes=ROOMY) as state:
        probe = Probe(Workload(model, step), describe(make_batch(64)), device, 1000, state)
        assert [probe.run(size).outcome for size in (2, 16, 32)] == outcomes


def test_a_growing_count_of_allocator_retries_is_thrash():
    """A size that runs but makes the allocator free and ask again is not one to choose."""
    device = FakeDevice(lambda n: 100 + n, total_bytes=1000, thrashes_from=8)
    model = Wide()
    with TrainingState(model, None, torch.device("cpu"), host_bytes=ROOMY) as state:
        probe = Probe(Workload(model, mean_step), describe(make_batch(16)), device, 1000, state)
        trials = [probe.run(size) for size in (4, 8)]
    assert [trial.outcome for trial in trials] == ["fits", "thrash"]
    assert trials[1].alloc_retries == 2


@pytest.mark.parametrize("kind", ["plain", "checkpointed conv"])
def test_the_trials_peak_is_the_runners_peak_to_the_byte(kind):
    """What a plan promises is what training then takes: the same code runs in both."""
    if kind == "plain":
        model, batch, step = Wide(), make_batch(60), mean_step
    else:
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
        batch = torch.randn(60, 1, 8, 8)

        def step(model, images):
            hidden = torch.utils.checkpoint.checkpoint(model[:3], images, use_reentrant=False)
            return F.mse_loss(model[3:](hidden), torch.ones(len(images), 3))

    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()
    plan = autobatch.fit(model, 60, batch=batch, step=step, optimizer=optimizer, max_micro_batch=20)
    runner = autobatch.Runner(plan, model, step, optimizer)
    peaks = [runner.step(batch).peak_bytes for _ in range(3)]
    assert plan.micro_batch_sizes == (20, 20, 20)
    # The first step makes the optimizer's state at its end; from the second on it stands beside everything.
    assert peaks[1] == peaks[2] == plan.peak_bytes
