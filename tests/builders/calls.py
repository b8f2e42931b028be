"""Calls of ``fit`` and ``Runner`` with one argument changed."""

from __future__ import annotations

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


def make_runner(step=mean_step, optimizer=True, device=None, **options):
    """A runner that works, but for the options."""
    model = Plain(torch.float32)
    plan = autobatch.fit(model, 16, batch=make_batch(4), step=mean_step, max_micro_batch=4, device=device)
    made = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    return autobatch.Runner(plan, model, step, made, device=device, **options)
