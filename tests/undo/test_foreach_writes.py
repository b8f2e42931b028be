"""What a ``_foreach_`` operator writes is seen as any other write, also while operators are counted or recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autobatch
from autobatch.errors import CannotRetry, InvalidArgument
from autobatch.memory.cpu import CpuDevice
from autobatch.testing import oom_at
from autobatch.undo.written_memory import WriteRecorder, WrittenMemory

MODES = {
    "counted": lambda: CpuDevice().limit(2**40),
    "recorded": lambda: WriteRecorder({}, WrittenMemory(), []),
    "with a fault planned": lambda: oom_at(10**9),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_write_raises_the_count_of_each_tensor(mode):
    """Once or more, and without a mode as torch does; those that are only read stay as they are."""
    written, read = [torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(3)]
    with MODES[mode]():
        torch._foreach_add_(written, read)
    assert all(tensor._version > 0 for tensor in written)
    assert all(tensor._version == 0 for tensor in read)


def clip_norm(model):
    """As in a loop by hand."""
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


class Moving(nn.Module):
    """Moves a part of itself from some step on."""

    def __init__(self):
        super().__init__()
        self.trained, self.follower, self.moves = nn.Linear(6, 1), nn.Linear(6, 1).requires_grad_(False), False
        nn.init.zeros_(self.follower.weight)

    def forward(self, inputs):
        if self.moves:
            with torch.no_grad():
                torch._foreach_add_([self.follower.weight], 1.0)
        return self.trained(inputs)


@pytest.mark.parametrize("budget", [None, "1GiB"])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 6])
def test_a_write_that_begins_late_is_undone_or_refused(start, budget):
    """Each micro-batch that stays moves it once; where it was not copied before, the retry is refused."""
    batch, model, calls, fails = (torch.randn(12, 6), torch.randn(12, 1)), Moving(), [], []

    def step(model, part):
        loss = mse_loss(model(part[0]), part[1])
        calls.append(True)
        if fails and len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB (planned)")
        return loss

    plan = autobatch.fit(model, 12, batch=batch, step=step, max_micro_batch=4, check=None, budget=budget)
    runner = autobatch.Runner(plan, model, step, None)
    for _ in range(start):
        runner.accumulate(batch)
    calls.clear()
    fails.append(True)
    model.moves = True
    try:
        moved = len(runner.accumulate(batch).micro_batch_sizes)
    except CannotRetry:
        return
    assert model.follower.weight.eq(moved).all()
