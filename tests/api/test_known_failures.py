"""Failures of batch-size tools as users met them, pinned by name: each must not happen here."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from workloads import Plain, full_batch_gradient, gradients_of, make_batch, mean_step, relative_error

import autobatch
from autobatch.testing import FakeDevice, oom_at


def fit_fake(largest, target, **options):
    """A plan on a device where so many samples fit, and the sizes that ran."""
    device = FakeDevice(lambda n: n + 1, total_bytes=largest + 1, measures=options.pop("measures", True))
    batch = make_batch(4, torch.float64)
    plan = autobatch.fit(Plain(), target, batch=batch, step=mean_step, device=device, headroom=0, **options)
    return plan, device.ran_sizes


@pytest.mark.parametrize("measures", [True, False])
def test_an_untested_size_is_returned(measures):
    """Lightning 2.6: the cap of 8192 is returned although 5000 fit and 4096 was the largest that ran."""
    plan, ran = fit_fake(5000, 8192, measures=measures)
    assert plan.micro_batch_sizes == (4096, 4096)
    assert 4096 in ran


@pytest.mark.parametrize("measures", [True, False])
def test_the_search_never_ends_at_a_failing_cap(measures):
    """Lightning 2.6: with 50 samples of which 37 fit, the search repeats a failing size without end."""
    plan, _ran = fit_fake(37, 50, measures=measures)
    assert plan.micro_batch_sizes == (25, 25)
    assert len(plan.trials) <= 9


def test_one_is_returned_when_nothing_fits():
    """Lightning's bisection, batch-probe, mldoct: a size is returned though no size ran."""
    with pytest.raises(autobatch.DoesNotFit):
        fit_fake(0, 64, measures=False)


def test_generators_are_not_restored_after_the_probe():
    """No finder restores them: a seeded run then differs from one that did not look for a size."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def step(model, batch):
        random.random()
        np.random.rand()
        return mean_step(model, batch)

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    autobatch.fit(model, 32, batch=make_batch(8), step=step)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_non_persistent_buffers_are_not_restored_after_the_probe():
    """Lightning's checkpoint does not contain them: a counter stood at 16 instead of 0."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("passes", torch.zeros(()), persistent=False)

        def forward(self, inputs):
            self.passes += 1
            return self.layer(inputs)

    model = Counts()
    autobatch.fit(model, 32, batch=make_batch(8), step=mean_step)
    assert model.passes == 0


def test_the_effective_batch_changes_in_silence():
    """HF's auto_find_batch_size went from 16 x 2 to 14 x 2: 28 samples a step where 32 were asked for."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = make_batch(32, torch.float64)
    plan = autobatch.fit(model, 32, batch=batch, step=mean_step, optimizer=optimizer, max_micro_batch=16)
    runner = autobatch.Runner(plan, model, mean_step, optimizer)
    with oom_at(10):
        result = runner.step(batch)
    assert result.retries == 1
    assert sum(result.micro_batch_sizes) == 32


def test_training_goes_on_with_trained_weights_after_the_probe():
    """batch-probe and others train the user's own weights while they look."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    autobatch.fit(model, 32, batch=make_batch(8, torch.float64), step=mean_step, optimizer=optimizer)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("samples", "largest"), [(5, 2), (6, 4), (100, 33), (10, 4)])
def test_the_ragged_piece_gets_full_weight(samples, largest):
    """mbp-pytorch, koila, loss / K: a smaller last piece counts as much as the others."""
    model, batch = Plain(), make_batch(samples, torch.float64)
    plan = autobatch.fit(model, samples, batch=batch, step=mean_step, max_micro_batch=largest)
    expected = full_batch_gradient(model, mean_step, batch)
    autobatch.Runner(plan, model, mean_step, None).accumulate(batch)
    assert relative_error(gradients_of(model), expected) <= 1e-12


def test_partial_gradients_are_counted_twice_in_the_retry():
    """Dynabatch keeps what a backward pass that ran out had already added, and adds it again."""
    batch = make_batch(16, torch.float64)
    model = Plain()
    plan = autobatch.fit(model, 16, batch=batch, step=mean_step, max_micro_batch=8)
    expected = full_batch_gradient(model, mean_step, batch)
    for position in range(1, 40):
        runner = autobatch.Runner(plan, model, mean_step, None)
        model.zero_grad()
        with oom_at(position) as planned:
            runner.accumulate(batch)
        assert planned.raised
        assert relative_error(gradients_of(model), expected) <= 1e-12, position


def test_a_batch_is_stepped_twice():
    """Composer's path for a thrashing allocator trains a batch again after its step was applied."""
    steps = []
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    device = FakeDevice(lambda n: 10 + n, total_bytes=10**6)
    batch = make_batch(16, torch.float64)
    plan = autobatch.fit(model, 16, batch=batch, step=mean_step, optimizer=optimizer, device=device)
    device.thrashes_from = 1
    autobatch.Runner(plan, model, mean_step, optimizer, device=device).step(batch)
    assert steps == [1]


def test_an_error_that_only_mentions_memory_counts_as_running_out():
    """batch-finder took any exception for a size too large, vrambatch a ValueError that mentions memory."""

    def step(model, batch):
        if len(batch[0]) > 2:
            raise ValueError("more samples than the memory bank: out of memory slots")
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ValueError, match="memory bank"):
        autobatch.fit(Plain(torch.float32), 32, batch=make_batch(8), step=step)
