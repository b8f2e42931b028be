"""What nobody uses any more does not count: a failed backward pass, an earlier model in a cycle."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from sampling import sample
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autobatch
from autobatch.events import Retried
from autobatch.memory.cpu import CpuDevice
from autobatch.testing import oom_at

MIB = 2**20


def make():
    """What ``fit`` takes, so that memory is mostly activations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    return {
        "model": model,
        "target_batch": 2048,
        "batch": (torch.randn(2048, 256), torch.randint(10, (2048,))),
        "step": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "budget": "40MiB",
    }


class FailsAt(TorchDispatchMode):
    """Raises at the first operator of this name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == self.name:
            raise torch.OutOfMemoryError("planned")
        return func(*args, **(kwargs or {}))


class Mark:
    """Something whose end can be seen."""


@pytest.mark.parametrize("inference", [False, True])
def test_the_graph_of_a_failed_backward_pass_is_let_go(inference):
    """Torch's engine keeps it for the thread's next pass, which may be long after the memory is needed."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers(torch.ones(2, 8)).sum().backward()
    held = []

    def fail():
        hidden = layers[0](torch.ones(2, 8)) * 1
        hidden.grad_fn.metadata["held"] = mark = Mark()  # lives as long as the node
        held.append(weakref.ref(mark))
        loss = layers[1](hidden).sum()
        with FailsAt("aten.add_.Tensor"), pytest.raises(torch.OutOfMemoryError):
            loss.backward()

    fail()
    gc.collect()
    assert held[0]() is not None
    with torch.inference_mode(inference), FailsAt("aten.zeros.default"):
        CpuDevice().reclaim()
    assert held[0]() is None


@pytest.mark.parametrize("position", sample(range(36, 48), 4))
def test_wherever_memory_ends_the_same_is_held_after_the_clean_up(position):
    """In the gradient's own sum, too: what is still held decides how small the next pieces are."""
    arguments = make()
    plan = autobatch.fit(**arguments, check=None)
    events = []
    runner = autobatch.Runner(
        plan, arguments["model"], arguments["step"], arguments["optimizer"], hooks=[events.append]
    )
    runner.step(arguments["batch"])
    with oom_at(position):
        result = runner.step(arguments["batch"])
    [retried] = [event for event in events if isinstance(event, Retried)]
    assert retried.used_bytes < 18 * MIB
    assert max(result.micro_batch_sizes) >= plan.micro_batch_size // 2


def test_a_second_fit_is_as_the_first_though_the_first_model_lies_in_a_cycle():
    """It is gone for its user, so the budget is not its any more."""

    def fit():
        arguments = make()
        arguments["model"].itself = [arguments["model"]]
        return autobatch.fit(**arguments, check=None)

    gc.disable()
    try:
        first, second = fit(), fit()
    finally:
        gc.enable()
    assert second.micro_batch_sizes == first.micro_batch_sizes
    assert second.out_of_memory_trials == 0


def test_a_runner_counts_no_model_that_is_gone():
    """Nothing is free that should be, until what lies in cycles is let go; then the size stays."""
    arguments = make()
    plan = autobatch.fit(**arguments, check=None)
    runner = autobatch.Runner(plan, arguments["model"], arguments["step"], arguments["optimizer"])
    runner.step(arguments["batch"])

    def train_another():
        other = make()
        other["model"].itself = [other["model"]]
        autobatch.Runner(plan, other["model"], other["step"], other["optimizer"]).accumulate(
            tuple(part[:64] for part in other["batch"])
        )

    gc.disable()
    try:
        train_another()
        result = runner.step(arguments["batch"])
    finally:
        gc.enable()
    assert result.micro_batch_sizes == plan.micro_batch_sizes
