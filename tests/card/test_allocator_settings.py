"""Budgets under the settings of torch's allocator that change what a limit means: each is read when torch starts."""

from __future__ import annotations

import itertools

import pytest
import torch
from own_process import call
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.memory.cuda import CudaDevice

pytestmark = pytest.mark.card

MIB = 2**20
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def fill(budget, request):
    """Take blocks of this size in the budget until memory ends; returns the most that was reserved."""
    device = CudaDevice(torch.device("cuda"))
    blocks = []
    with device.limit(budget):
        try:
            while True:
                blocks.append(torch.empty(request, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            return torch.cuda.max_memory_reserved()


def fill_each(budgets, requests):
    """``fill`` with each of the budgets and each of the requests, the cache empty before."""
    found = []
    for budget, request in itertools.product(budgets, requests):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found.append((budget, request, fill(budget, request)))
    return found


@pytest.mark.parametrize("settings", [{}, EXPANDABLE], ids=["fixed", "expandable"])
def test_no_more_is_reserved_than_the_budget(settings):
    """Whatever is asked for: expandable segments are mapped in units of 20 MiB, after the limit was looked at."""
    budgets = [size * MIB for size in (24, 64, 101, 150)]
    requests = [size * MIB // 2 for size in (1, 3, 11, 22, 44, 63, 82, 128)]
    for budget, request, reserved in call(fill_each, budgets, requests, mirror=False, **settings):
        assert reserved <= budget, f"{reserved // MIB} MiB in requests of {request} bytes"
        assert reserved > budget - 40 * MIB - request


def fit_a_wide_model(budget):
    """Fit and train; returns the sizes that were tried, the plan's, the warnings, and the retries of three steps."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    batch = torch.randn(8, 512), torch.randint(0, 10, (8,))
    plan = autobatch.fit(
        model, 40000, batch=batch, step=step, optimizer=optimizer, budget=budget, reuse=False, check=None
    )
    runner = autobatch.Runner(plan, model, step, optimizer)
    whole = torch.randn(40000, 512), torch.randint(0, 10, (40000,))
    retries = sum(runner.step(whole).retries for _ in range(3))
    trials = [(trial.micro_batch_size, trial.outcome) for trial in plan.trials]
    return {"trials": trials, "size": plan.micro_batch_size, "warnings": plan.warnings, "retries": retries}


def test_without_a_cache_sizes_are_found_by_running_out():
    """There the allocator counts nothing: a trial of 0 bytes promises nothing, and the card itself says what fits."""
    found = call(fit_a_wide_model, None, mirror=False, STANDIN_TOTAL=str(1024 * MIB), **UNCACHED)
    outcomes = dict(found["trials"])
    assert outcomes[found["size"]] == "fits"
    failed = [size for size, outcome in outcomes.items() if outcome == "oom"]
    assert failed
    assert found["size"] < min(failed) <= 2 * found["size"]
    assert found["retries"] == 0


def test_without_a_cache_a_budget_is_said_not_to_hold():
    """A budget that nothing can enforce is not passed over in silence."""
    found = call(fit_a_wide_model, "512MiB", mirror=False, STANDIN_TOTAL=str(1024 * MIB), **UNCACHED)
    assert any("512MiB" in warning and "PYTORCH_NO_CUDA_MEMORY_CACHING" in warning for warning in found["warnings"])
