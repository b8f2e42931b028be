"""Objects that the user names in ``keep=`` are put back whatever their size, any number of times."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.undo.gradients import Float32Sums
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


def test_a_generator_without_a_state_is_left_alone():
    """The operating system draws for ``SystemRandom``."""
    model = nn.Linear(1, 1)
    model.source = random.SystemRandom()
    Undo(model, CPU).restore()


@pytest.mark.parametrize("kinds", ["sd", "ds", "ss", "dd"])
def test_sparse_and_dense_gradients_of_one_parameter_add_up(kinds):
    """One micro-batch looks rows up, another uses the whole table."""
    parameter, sums = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16)), Float32Sums()
    sums.begin([parameter])
    for kind in kinds:
        if kind == "d":
            parameter.sum().backward()
        else:
            nn.functional.embedding(torch.tensor([1]), parameter, sparse=True).sum().backward()
    sums.write()
    sums.end()
    rows = torch.tensor([[0.0], [1.0], [0.0]])
    expected = sum((torch.ones(3, 2) if kind == "d" else rows.expand(3, 2)) for kind in kinds)
    found = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    assert torch.equal(found.float(), expected)


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
