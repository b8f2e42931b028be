"""The promises of ``fit`` and ``Runner`` on a real card, with real out-of-memory errors.

A budget of a few hundred MiB makes any card small, so memory ends for real and cheaply.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from workloads import (
    Everything,
    Plain,
    bits_of,
    differences,
    full_batch_gradient,
    gradients_of,
    make_batch,
    mean_step,
    relative_error,
)

import autobatch
from autobatch.errors import DoesNotFit
from autobatch.memory.devices import device_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
MIB = 2**20


class Convolutions(nn.Module):
    """About 2.4 MiB of activations a sample, so that a few hundred samples meet a budget of a few hundred MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 8, 1)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images).mean(dim=(2, 3))


def image_step(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def make_images(samples, dtype=torch.float32):
    """Images in CPU memory: only micro-batches go to the card."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, 64, 64, generator=generator, dtype=dtype)
    return images, torch.randint(0, 8, (samples,), generator=generator)


def tight_fit(budget=400 * MIB, target=256, dtype=torch.float32):
    """A plan in a budget in which the target does not fit."""
    torch.manual_seed(0)
    model = Convolutions().to(CUDA, dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    empty_the_card()
    batch = make_images(8, dtype)
    plan = autobatch.fit(model, target, batch=batch, step=image_step, optimizer=optimizer, budget=budget)
    return model, optimizer, plan


def empty_the_card():
    """Give back what earlier tests have left on it: a budget includes what the cache holds."""
    gc.collect()
    torch.cuda.empty_cache()


class Visitor:
    """``image_step``, in whose next call somebody else takes memory and keeps it.

    Inside the step: one that had come before it would be seen, and the step would begin with smaller micro-batches.
    """

    def __init__(self, size):
        self.size, self.is_due, self.held = size, False, None

    def step(self, model, batch):
        if self.is_due:
            self.is_due, self.held = False, torch.empty(self.size, dtype=torch.uint8, device=CUDA)
        return image_step(model, batch)


def test_a_plan_keeps_a_real_budget_and_training_keeps_the_plan():
    """The target does not fit, the plan does: no retry in training, and reserved bytes stay inside the budget.

    Its size is close to the largest: one accumulation step fewer does not fit the limit, or was measured to run out.
    """
    model, optimizer, plan = tight_fit()
    assert 1 < plan.accumulation_steps < 256
    assert 0 < plan.peak_bytes <= plan.limit_bytes
    fewer = -(-256 // (plan.accumulation_steps - 1))
    failed = [trial for trial in plan.trials if trial.outcome != "fits" and trial.micro_batch_size <= fewer]
    assert failed or plan.curve.peak_reserved(fewer) > plan.limit_bytes
    runner = autobatch.Runner(plan, model, image_step, optimizer)
    batch = make_images(256)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        result = runner.step(batch)
        assert result.retries == 0
        assert torch.cuda.max_memory_reserved() <= plan.budget_bytes


def test_memory_and_the_allocators_fraction_are_back_after_fit():
    """After fit the card holds what it held before, and the process's memory fraction is as it was."""
    model = Convolutions().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters())
    empty_the_card()
    torch.zeros(1, device=CUDA) @ torch.zeros(1, device=CUDA)  # workspaces of libraries are made once and stay
    before = torch.cuda.memory_allocated(), torch.cuda.get_per_process_memory_fraction()
    autobatch.fit(model, 128, batch=make_images(8), step=image_step, optimizer=optimizer, budget=400 * MIB)
    allocated, fraction = torch.cuda.memory_allocated(), torch.cuda.get_per_process_memory_fraction()
    assert fraction == before[1]
    assert allocated - before[0] <= 40 * MIB  # a cuBLAS workspace that this fit was the first to need


@pytest.mark.parametrize("fused", [False, True])
def test_fit_leaves_no_trace(fused):
    """Bit for bit as before, on the card too, with an optimizer that has state and with CUDA's own generator."""
    model = Everything().to(CUDA)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=fused)
    batch = tuple(part.to(CUDA) for part in make_batch(16))
    mean_step(model, batch).backward()
    optimizer.step()
    before, generator = bits_of(model, optimizer), torch.cuda.get_rng_state()
    autobatch.fit(model, 64, batch=batch, step=mean_step, optimizer=optimizer, max_micro_batch=16)
    assert not differences(bits_of(model, optimizer), before)
    assert torch.equal(torch.cuda.get_rng_state(), generator)


def test_the_split_gradient_is_the_full_batch_gradient():
    """The oracle holds on the card: float64, ragged micro-batches."""
    model = Plain().to(CUDA)
    batch = make_batch(37, torch.float64)
    expected = full_batch_gradient(model, mean_step, tuple(part.to(CUDA) for part in batch))
    plan = autobatch.fit(model, 37, batch=batch, step=mean_step, max_micro_batch=8)
    autobatch.Runner(plan, model, mean_step, None).accumulate(batch)
    assert relative_error(gradients_of(model), expected) <= 1e-12


def test_a_real_oom_in_training_is_survived_exactly():
    """Somebody takes most of the budget inside a step: it is retried, and its gradient is the full batch's."""
    model, optimizer, plan = tight_fit(target=128, dtype=torch.float64)
    batch, visitor = make_images(128, torch.float64), Visitor(200 * MIB)
    runner = autobatch.Runner(plan, model, visitor.step, optimizer)
    runner.step(batch)
    visitor.is_due = True
    result = runner.accumulate(batch)
    visitor.held = None
    empty_the_card()
    assert result.retries >= 1
    assert sum(result.micro_batch_sizes) == 128
    found = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    expected = full_batch_gradient(model, image_step, tuple(part.to(CUDA) for part in batch))
    assert relative_error(found, expected) <= 1e-12


def test_a_card_that_is_too_small_is_named():
    """DoesNotFit says what was needed and what there was; the state is as before."""
    model = Convolutions().to(CUDA)
    empty_the_card()
    before = bits_of(model)
    with pytest.raises(DoesNotFit, match="1 sample does not fit on"):
        autobatch.fit(model, 64, batch=make_images(2), step=image_step, budget=torch.cuda.memory_reserved() + 2 * MIB)
    assert not differences(bits_of(model), before)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")  # what setting it says
def test_the_runner_adds_no_synchronisation():
    """Steps are enqueued without waiting for the card: under sync debug mode nothing warns."""
    model = Convolutions().to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = autobatch.fit(model, 32, batch=make_images(8), step=image_step, optimizer=optimizer, max_micro_batch=16)
    runner = autobatch.Runner(plan, model, image_step, optimizer)
    batch = tuple(part.to(CUDA) for part in make_images(32))
    runner.step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_device_is_found_and_described():
    """The card's name and total stand in the plan."""
    info = device_for(CUDA).describe()
    assert info.kind == "cuda"
    assert info.name == torch.cuda.get_device_name()
    assert info.total_bytes == torch.cuda.get_device_properties(0).total_memory
