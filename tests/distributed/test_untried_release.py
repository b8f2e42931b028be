"""A release of torch in which ``fully_shard`` was not tried: it trains, and a failure ends in words on all ranks."""

import logging
import time
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.rank_faults import needs_sharding, shard
from builders.ranks import run_ranks, values_of, wait_at_most
from torch import nn
from torch.nn import functional as F
from workloads import make_batch, mean_step

import autobatch
from autobatch.distributed.sharded import internals, lockstep, model
from autobatch.errors import AutobatchError
from autobatch.testing import FakeDevice

pytestmark = needs_sharding

SAMPLES = 12


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 4))
        self.double()


def pretend_another_release():
    """The one that runs is unknown, and no private name may be read."""
    torch.__version__ = "2.99.0"
    for module in (internals, lockstep, model):
        mock.patch.object(module, "param_groups", side_effect=AssertionError("a private name was read")).start()


class Training:
    """A model whose modules divide by a factor of their own, and this rank's part of a batch."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = shard(Network())
        for module in self.model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(3.0)
        rank = dist.get_rank()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        plan = make_rank_plans((SAMPLES - 4, 4), 3, **SMALL)[rank]
        device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
        self.runner = autobatch.Runner(plan, self.model, mean_step, optimizer, device=device, **options)
        self.whole = make_batch(SAMPLES, torch.float64)
        parts = slice(0, SAMPLES - 4), slice(SAMPLES - 4, SAMPLES)
        self.batch = tuple(part[parts[rank]] for part in self.whole)


def train():
    """Errors of the gradient in three accumulations, log lines, and a plan's sizes."""
    pretend_another_release()
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("autobatch").addHandler(handler)
    training = Training()
    again = Training()
    plain = Network()
    plain.load_state_dict({name: tensor.full_tensor() for name, tensor in training.model.state_dict().items()})
    F.cross_entropy(plain(training.whole[0]), training.whole[1]).backward()
    errors = []
    for one in (training, again, training):
        one.model.zero_grad()
        one.runner.accumulate(one.batch)
        pairs = zip(one.model.parameters(), plain.parameters(), strict=True)
        errors += [(mine.grad.full_tensor() - other.grad).abs().max().item() for mine, other in pairs]
    training.model.zero_grad()
    plan = autobatch.fit(training.model, SAMPLES, batch=training.whole, step=mean_step, max_micro_batch=3)
    training.runner.step(training.batch)
    with pytest.raises(autobatch.InvalidArgument) as refused:
        autobatch.fit(training.model, SAMPLES, batch=training.whole, step=mean_step, strategies="auto")
    lines = [line for line in lines if "was not tried" in line]
    return max(errors), lines, plan.micro_batch_sizes, str(refused.value)


@cache
def trained():
    return run_ranks(train, limit_seconds=100)


def test_the_gradient_is_that_of_the_whole_target():
    """However the user has set the divisor, which cannot be read."""
    for error, _, sizes, _ in values_of(trained()):
        assert error < 1e-12
        assert sum(sizes) == SAMPLES // 2


def test_one_line_says_that_no_step_is_run_again():
    """Once in a process, with the releases that were tried."""
    for _, lines, *_ in values_of(trained()):
        assert len(lines) == 1
        assert "2.99" in lines[0]
        assert "2.13" in lines[0]


def test_recomputed_blocks_are_refused():
    """Nobody has shown there that each rank still ends each pass."""
    for *_, refused in values_of(trained()):
        assert refused.startswith("strategies= was not tried with fully_shard in torch 2.99")


FAILURES = {
    "a shortage": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "an error": ValueError("my own bug"),
}


def fail(name, place):
    """The error of this rank after another one fails inside a pass, and the seconds until then."""
    pretend_another_release()
    training = Training()
    training.runner.step(training.batch)
    wait_at_most(3.0)

    def act(*_):
        raise FAILURES[name]

    if dist.get_rank() == 1:
        layer = training.model[2]
        layer.register_forward_pre_hook(act) if place == "forward" else layer.register_full_backward_hook(act)
    began = time.monotonic()
    with pytest.raises((AutobatchError, ValueError)) as caught:
        training.runner.step(training.batch)
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_inside_a_pass_ends_in_words_on_all_ranks(name, place):
    """Within the process group's timeout, with the rank and its reason; no rank hangs."""
    (first, seconds), (second, _) = values_of(run_ranks(fail, name, place, limit_seconds=60))
    reason = "CUDA out of memory" if name == "a shortage" else "my own bug"
    assert first.startswith("RankLost: rank 1 of 2 could not continue: ")
    assert reason in first
    assert second.startswith(first[:30] if name == "a shortage" else "ValueError: my own bug")
    assert seconds < 30
