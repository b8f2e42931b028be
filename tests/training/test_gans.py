"""GANs: two Runners that share a model end on the weights of a loop by hand, also where either runs out of memory."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from workloads import differences

import autobatch
from autobatch.testing import FakeDevice, oom_at

STEPS = 3


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
        self.critic = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 1))
        self.double()


def judge(gan, batch):
    with torch.no_grad():
        made = gan.generator(batch["noise"])
    real = bce(gan.critic(batch["points"]), torch.ones(len(made), 1, dtype=torch.float64))
    return real + bce(gan.critic(made), torch.zeros(len(made), 1, dtype=torch.float64))


def deceive(gan, batch):
    return bce(gan.critic(gan.generator(batch["noise"])), torch.ones(len(batch["noise"]), 1, dtype=torch.float64))


def make_batch(seed):
    draw = torch.Generator().manual_seed(seed)
    return {
        "points": torch.randn(12, 2, generator=draw, dtype=torch.float64) + 3,
        "noise": torch.randn(12, 5, generator=draw, dtype=torch.float64),
    }


def make_optimizers(gan):
    return [torch.optim.Adam(part.parameters(), lr=0.05, betas=(0.5, 0.9)) for part in (gan.critic, gan.generator)]


@cache
def train_by_hand():
    torch.manual_seed(0)
    gan = Gan()
    for_critic, for_generator = make_optimizers(gan)
    for number in range(STEPS):
        for optimizer, loss in ((for_critic, judge), (for_generator, deceive)):
            gan.zero_grad()
            loss(gan, make_batch(number)).backward()
            optimizer.step()
    return gan


@cache
def make_plan(step):
    """12 samples in three pieces."""
    gan = Gan()
    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    return autobatch.fit(
        gan, 12, batch=make_batch(99), step=step, max_micro_batch=5, device=device, check="raise", reuse=False
    )


class Training:
    def __init__(self):
        plans = [make_plan(judge), make_plan(deceive)]
        torch.manual_seed(0)
        self.gan = Gan()
        self.runners = [
            autobatch.Runner(plan, self.gan, step, optimizer, device=FakeDevice(lambda n: 10 + n, total_bytes=1000))
            for plan, step, optimizer in zip(plans, (judge, deceive), make_optimizers(self.gan), strict=True)
        ]

    def run(self, number, *, freezes=False):
        """One step of each; the number of retries."""
        critic, generator = self.runners
        retries = critic.step(make_batch(number)).retries
        self.gan.critic.requires_grad_(not freezes)
        retries += generator.step(make_batch(number)).retries
        self.gan.critic.requires_grad_(True)
        return retries


def assert_near(found, expected):
    """To rounding, in float64."""
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("freezes", [False, True])
def test_the_weights_are_those_of_a_loop_by_hand(freezes):
    """Whether or not the critic is frozen while the generator learns."""
    training = Training()
    for number in range(STEPS):
        assert training.run(number, freezes=freezes) == 0
    assert_near(training.gan, train_by_hand())


def test_no_gradient_of_the_other_network_is_left():
    """Each step moves its own network alone, and every gradient is None after it."""
    training = Training()
    for runner, own in zip(training.runners, ("critic", "generator"), strict=True):
        before = {name: value.clone() for name, value in training.gan.state_dict().items()}
        runner.step(make_batch(0))
        assert all(parameter.grad is None for parameter in training.gan.parameters())
        moved = [path.removeprefix("/") for path in differences(dict(training.gan.state_dict()), before)]
        assert len(moved) == 4
        assert all(name.startswith(own) for name in moved)


def test_memory_that_ends_in_either_changes_nothing():
    """In the step of the critic or of the generator: the weights of the loop by hand, or the same step again."""
    expected, retried, first = train_by_hand(), 0, make_batch(0)
    for position in range(5, 160, 9):
        training = Training()
        pending = [*training.runners]
        with oom_at(position):
            while pending:
                try:
                    retried += pending[0].step(first).retries
                except autobatch.DoesNotFit:  # before the update: everything is as before
                    continue
                except autobatch.CannotRetry:  # inside an update
                    break
                pending.pop(0)
        if not pending:
            for number in range(1, STEPS):
                training.run(number)
            assert_near(training.gan, expected)
    assert retried >= 5
