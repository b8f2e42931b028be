"""Calls of ``fit`` and ``Runner`` with one argument changed."""

from __future__ import annotations

from functools import cache

import torch
from workloads import Plain, make_batch, mean_step

import autobatch


def fit(**changes):
    """A fit that works, but for the changes."""
    arguments = {
        "model": Plain(torch.float32),
        "target_batch": 16,
        "batch": make_batch(4),
        "step": mean_step,
        **changes,
    }
    return autobatch.fit(arguments.pop("model"), arguments.pop("target_batch"), **arguments)


@cache
def make_plan(device=None):
    """A plan of four micro-batches, made once: the same for each Runner."""
    return fit(max_micro_batch=4, device=device)


def make_runner(step=mean_step, optimizer=True, device=None, **options):
    """A runner that works, but for the options."""
    model, plan = Plain(torch.float32), make_plan(device)
    made = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    return autobatch.Runner(plan, model, step, made, device=device, **options)
