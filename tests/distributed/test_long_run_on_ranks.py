"""Thousands of steps on two ranks while memory comes and goes: nothing hangs, grows or drifts apart."""

import gc
import logging
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import make_batch, mean_step

import autobatch
from autobatch.errors import DoesNotFit, RankFailed
from autobatch.testing import FakeDevice, tenant

STEPS = 10_000

WARM = 1000
"""Steps after which memory is first looked at."""


def train():
    """The outcomes of the steps, the growth of memory, the number of new open files, and the weights at the end."""
    logging.getLogger("autobatch").setLevel(logging.CRITICAL)
    rank, draw = dist.get_rank(), random.Random(dist.get_rank())
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 4, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    device, failing, counts = FakeDevice(lambda n: 10 + n, total_bytes=100), [], [0, 0, 0]

    def step(module, batch):
        if failing and len(batch[0]) >= failing[0]:
            failing.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return mean_step(module, batch)

    plan = make_rank_plans((8, 8), 8, **{**SMALL, "budget_bytes": 100})[rank]
    runner = autobatch.Runner(plan, model, step=step, optimizer=optimizer, device=device)
    batches = [make_batch(8, torch.float64, seed=seed) for seed in range(20)]
    before = None
    for number in range(STEPS):
        if number == WARM:
            before = read_process()
        failing[:] = [draw.choice((1, 2, 4))] if draw.random() < 0.02 else []
        try:
            with tenant(draw.choice((84, 86)) if draw.random() < 0.02 else 1, device):
                result = runner.step(batches[number % 20])
        except (RankFailed, DoesNotFit):
            counts[2] += 1
        else:
            counts[0] += 1
            counts[1] += result.retries
    after = read_process()
    assert before is not None
    weights = model.module.weight.detach().flatten().tolist()
    return counts, after[0] - before[0], after[1] - before[1], weights


def read_process():
    """Bytes of memory and the number of open files."""
    gc.collect()
    own = Path("/proc/self")
    pages = int((own / "statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len([*(own / "fd").iterdir()])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thousands_of_steps_on_two_ranks():
    """With errors out of memory on either rank and memory that others take, weights stay the same on both."""
    answers = run_ranks(train, timeout_seconds=60, limit_seconds=550)
    first, second = values_of(answers)
    assert first[3] == second[3]
    for (done, retries, undone), grown, files, _ in (first, second):
        assert done + undone == STEPS
        assert retries >= STEPS // 100
        assert grown < 1860 * (STEPS - WARM)  # bytes
        assert files <= 0  # what was open after the first steps may be closed since
