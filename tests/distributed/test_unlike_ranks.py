"""Ranks that are not alike: one is slower and has less memory, or shares its memory with a tenant."""

import logging
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.rank_clock import CLOCK, stop_time
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import Plain, full_batch_gradient, gradients_of, make_batch, mean_step, relative_error

import autobatch
from autobatch.testing import FakeDevice, tenant

SECONDS = (0.002, 0.006)
"""A sample takes, by rank."""

MOST = (64, 16)
"""Samples that fit, by rank."""

TARGET = 96


def slow_step(model, batch):
    CLOCK.advance(len(batch[0]) * SECONDS[dist.get_rank()])
    return mean_step(model, batch)


def part_of(plan, whole):
    start = sum(plan.shares[: plan.rank])
    return tuple(part[start : start + plan.shares[plan.rank]] for part in whole)


def train_at(share):
    """How the target was divided, into which micro-batches here, and the seconds of a step."""
    most = MOST[dist.get_rank()]
    device = FakeDevice(lambda n: 100 + 10 * n, total_bytes=100 + 10 * most)
    whole = make_batch(TARGET, torch.float64)
    model = DistributedDataParallel(Plain(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"step": slow_step, "optimizer": optimizer, "device": device}
    plan = autobatch.fit(model, TARGET, batch=whole, headroom=0, check=None, share=share, **options)
    runner, batch, began = autobatch.Runner(plan, model, **options), part_of(plan, whole), CLOCK.now
    result = runner.step(batch)
    return plan.shares, result.micro_batch_sizes, CLOCK.now - began


def train_beside_a_tenant(model, whole, device, held, **fit_options):
    """Sizes on this rank and errors of the gradient: alone, twice with a tenant beside the second rank, and alone."""
    expected = full_batch_gradient(model, mean_step, whole)
    parallel = DistributedDataParallel(model)
    options = {"step": mean_step, "optimizer": None, "device": device}
    plan = autobatch.fit(parallel, len(whole[0]), batch=whole, check=None, **options, **fit_options)
    runner, batch, found = autobatch.Runner(plan, parallel, **options), part_of(plan, whole), []
    for is_there in (False, True, True, False):
        with tenant(held, device) if is_there and plan.rank == 1 else nullcontext():
            result = runner.accumulate(batch)
        found.append((result.micro_batch_sizes, relative_error(gradients_of(model), expected)))
        model.zero_grad()
    return found


def meet_tenants():
    """On a device of which each byte is known, and inside a real budget on the CPU."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    device = FakeDevice(lambda n: 100 + 10 * n, total_bytes=420)
    known = train_beside_a_tenant(layers, make_batch(64, torch.float64), device, 200, headroom=0)
    images = torch.randn(64, 3, 16, 16, dtype=torch.float64), torch.randint(10, (64,))
    convolution = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10)).double()
    return known, train_beside_a_tenant(convolution, images, "cpu", "5MiB", budget="8MiB")


def run_all():
    """In one process a rank, which takes longer to start than to run."""
    logging.getLogger("autobatch").setLevel(logging.CRITICAL)
    stop_time()
    return train_at("equal"), train_at("speed"), *meet_tenants()


@cache
def answers():
    return [*zip(*values_of(run_ranks(run_all)), strict=True)]


def test_shares_by_speed_are_faster_than_equal_ones():
    """One rank is three times slower and has a quarter of the memory: a step takes two thirds of the time or less."""
    equal, speed, *_ = answers()
    assert [one[0] for one in equal] == [(48, 48)] * 2
    assert speed[0][0] == speed[1][0]
    assert sum(speed[0][0]) == TARGET
    for rank, (shares, sizes, _) in enumerate(speed):
        assert sum(sizes) == shares[rank]
        assert max(sizes) <= MOST[rank]
    assert max(one[2] for one in equal) / max(one[2] for one in speed) >= 1.5


@pytest.mark.parametrize("part", [2, 3], ids=["known device", "budget on the CPU"])
def test_a_tenant_makes_micro_batches_smaller_on_its_rank_only(part):
    """The others run what they planned, the gradient is that of one process, and the size comes back."""
    first, second = answers()[part]
    sizes, errors = zip(*first, strict=True)
    assert len({*sizes}) == 1
    (before, beside, still, after), more = zip(*second, strict=True)
    assert max(beside) < max(before)
    assert max(still) < max(before)
    assert sum(beside) == sum(still) == sum(before) == 32
    assert after == before
    assert max(*errors, *more) < 1e-12
