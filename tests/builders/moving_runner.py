"""A runner of a model whose forward pass changes state."""

from __future__ import annotations

import torch
from workloads import make_batch, mean_step

import autobatch
from autobatch.testing import FakeDevice


def make_runner(model, **options):
    """Two micro-batches of four a step, and the optimizer."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    plan = autobatch.fit(
        model, 8, batch=make_batch(8), step=mean_step, optimizer=optimizer, device=device, max_micro_batch=4, check=None
    )
    return autobatch.Runner(plan, model, mean_step, optimizer, device=device, **options), optimizer
