"""Writes of ``_foreach_`` operators are seen as any others, also while operators are counted or recorded."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autobatch
from autobatch.errors import InvalidArgument


def clip_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_value(model):
    """The same by value, which torch refuses where no gradient is there yet."""
    if model.weight.grad is not None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@pytest.mark.parametrize("budget", [None, "1GiB"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("write", [clip_norm, clip_value])
def test_a_step_that_clips_is_refused_in_its_first_steps(write, first, budget):
    """In those that are counted, too: the gradient would be wrong."""
    torch.manual_seed(0)
    batch, model = (torch.randn(12, 6), torch.randn(12, 1)), nn.Linear(6, 1)
    steps = []

    def step(model, part):
        if len(steps) >= first:
            write(model)
        return mse_loss(model(part[0]), part[1])

    plan = autobatch.fit(
        model, 12, batch=batch, step=lambda m, b: mse_loss(m(b[0]), b[1]), max_micro_batch=4, budget=budget
    )
    runner = autobatch.Runner(plan, model, step, None)
    for _ in range(first):
        runner.accumulate(batch)
        model.zero_grad()
        steps.append(True)
    with pytest.raises(InvalidArgument, match=r"the step changed \.grad"):
        runner.accumulate(batch)
