"""``Runner.fit``: the plan and the steps of ``fit`` and ``Runner``, with nothing said twice."""

import pytest
import torch
from torch import nn
from workloads import Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import InvalidArgument, NeedsBatch
from autobatch.events import StepFinished
from autobatch.testing import FakeDevice


def make_training():
    torch.manual_seed(0)
    model = Plain(torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_it_is_the_two_calls_in_one():
    """The same sizes, and weights bit for bit; what each takes arrives there."""
    batch, states, plans = make_batch(16), [], []
    for is_one_call in (True, False):
        model, optimizer = make_training()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        events = []
        both = {"weigh": lambda part: len(part[0]), "device": FakeDevice(lambda n: 10 + 10 * n, total_bytes=100)}
        of_fit = {"batch": make_batch(4), "headroom": 10, "reuse": False, "check": None}
        of_runner = {"max_grad_norm": 0.01, "scheduler": scheduler, "hooks": [events.append]}
        if is_one_call:
            runner = autobatch.Runner.fit(model, 16, step=mean_step, optimizer=optimizer, **both, **of_fit, **of_runner)
        else:
            plan = autobatch.fit(model, 16, step=mean_step, optimizer=optimizer, **both, **of_fit)
            runner = autobatch.Runner(plan, model, mean_step, optimizer, **both, **of_runner)
        assert type(runner) is autobatch.Runner
        for _ in range(3):
            runner.step(batch)
        states.append({**bits_of(model, optimizer), "rate": scheduler.get_last_lr()})
        plans.append(runner.plan)
        assert sum(isinstance(event, StepFinished) for event in events) == 3
    assert plans[0].micro_batch_sizes == plans[1].micro_batch_sizes == (8, 8)
    assert not differences(states[0], states[1])


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0


def test_what_it_keeps_is_as_before_the_trials():
    """Trials run the step; metrics begin at 0 all the same, of every kind."""
    metric, seen, history = Counter(), {"samples": 0}, torch.zeros(1)

    def step(model, batch):
        metric.total += len(batch[0])
        metric.calls += 1
        seen["samples"] += len(batch[0])
        history.add_(1)
        return mean_step(model, batch)

    model, optimizer = make_training()
    runner = autobatch.Runner.fit(
        model, 16, batch=make_batch(4), step=step, optimizer=optimizer, keep=[metric, seen, history], max_micro_batch=4
    )
    assert (metric.total.item(), metric.calls, seen["samples"], history.item()) == (0, 0, 0, 0)
    runner.step(make_batch(16))
    assert (metric.total.item(), metric.calls, seen["samples"], history.item()) == (16, 4, 16, 4)


def test_a_subclass_makes_its_own():
    """As other constructors of classes do."""

    class Mine(autobatch.Runner):
        pass

    model, optimizer = make_training()
    assert type(Mine.fit(model, 4, batch=make_batch(4), step=mean_step, optimizer=optimizer)) is Mine


def test_errors_are_those_of_the_two():
    """``fit`` raises its own before any Runner is made, ``Runner`` raises its own after."""
    model, optimizer = make_training()
    with pytest.raises(NeedsBatch):
        autobatch.Runner.fit(nn.Conv2d(3, 4, 3), 16, step=mean_step)
    with pytest.raises(InvalidArgument, match="max_grad_norm="):
        autobatch.Runner.fit(model, 4, batch=make_batch(4), step=mean_step, optimizer=optimizer, max_grad_norm=-1)
    with pytest.raises(InvalidArgument, match="keep="):
        autobatch.Runner.fit(model, 4, batch=make_batch(4), step=mean_step, optimizer=optimizer, keep="metric")
