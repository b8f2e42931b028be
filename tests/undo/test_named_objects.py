"""Objects that the user names in ``keep=`` are put back whatever their size, any number of times."""

import numpy as np
import pytest
import torch
from torch import nn

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.undo.undo import Undo
from autobatch.undo.user_objects import check_objects

CPU = torch.device("cpu")


class Taker:
    """A metric as people write it: ``put`` keeps the very list that it is given."""

    def __init__(self):
        self.values = []

    def take(self):
        return list(self.values)

    def put(self, taken):
        self.values = taken


@pytest.mark.parametrize("nested", [False, True])
def test_a_large_array_is_put_back(nested):
    """Arrays have methods named ``take`` and ``put`` too; the user asked for this one by name."""
    array = np.zeros(3 * 1024**2)
    undo = Undo(None, CPU, keep=check_objects([[array] if nested else array]))
    array += 1
    undo.restore()
    assert not array.any()


def test_an_array_that_cannot_be_written_into_is_refused():
    """It could not be put back."""
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(InvalidArgument, match=r"keep\[0\]"):
        check_objects([array])


def test_a_long_list_of_tensors_is_put_back():
    """A replay buffer that the user names is recorded whole."""
    tensors = [torch.zeros(1) for _ in range(1001)]
    undo = Undo(None, CPU, keep=check_objects([tensors]))
    tensors[1000].add_(1)
    undo.restore()
    assert not tensors[1000].any()


def test_a_step_that_is_undone_twice_puts_back_the_same_value():
    """``put`` may keep what it is given, and the step may change that."""
    taker = Taker()
    undo = Undo(None, CPU, keep=check_objects([taker]))
    for _ in range(2):
        taker.values.append(1)
        undo.restore()
        assert taker.values == []


class Refuses:
    """Its own code fails when a step is undone."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise RuntimeError("no")


def test_no_hook_stays_where_the_users_object_cannot_be_put_back():
    """Gradients of a loop after it would vanish into sums that nobody writes."""

    def step(model, batch):
        if is_failing and batch[0, 0]:
            raise ValueError
        return model(batch).square().mean()

    model, is_failing = nn.Linear(2, 1, dtype=torch.bfloat16), False
    batch = torch.arange(8, dtype=torch.bfloat16).view(4, 2)
    plan = autobatch.fit(model, 4, batch=batch, step=step, max_micro_batch=2, check=None, progress=False, reuse=False)
    runner = autobatch.Runner(plan, model, step, None, keep=[Refuses()])
    is_failing = True
    with pytest.raises(RuntimeError, match="no"):
        runner.accumulate(batch)
    model(batch).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
