"""DistributedDataParallel beside the Runner, and the Runner in its place."""

import copy
from contextlib import suppress
from functools import cache

import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import full_batch_gradient, gradients_of, make_batch, mean_step, relative_error

import autobatch
from autobatch.testing import FakeDevice

SAMPLES = 16


def make_runner(model, optimizer, step=mean_step, device=None):
    plan = make_rank_plans((8, 8), 4, **SMALL)[dist.get_rank()]
    device = device or FakeDevice(lambda n: 10 + n, total_bytes=1000)
    return autobatch.Runner(plan, model, step=step, optimizer=optimizer, device=device)


def halve(batch):
    start = 8 * dist.get_rank()
    return tuple(part[start : start + 8] for part in batch)


class TwoHeads(nn.Module):
    """A step of the wrapper's own uses one of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(6, 4, dtype=torch.float64) for _ in range(2))
        self.uses_both = True

    def forward(self, inputs):
        return self.first(inputs) + (self.second(inputs) if self.uses_both else 0)


def expect(model, whole):
    """The gradient of the whole batch, of a copy: the wrapper notes each backward pass through its own module."""
    return full_batch_gradient(copy.deepcopy(model.module), mean_step, whole)


def train_by_hand():
    """Steps of the Runner and of the wrapper's own in turn: how far each gradient is from that of the whole batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner, whole = make_runner(model, optimizer), make_batch(SAMPLES, torch.float64)
    errors = []
    for _ in range(2):
        runner.accumulate(halve(whole))
        errors.append(relative_error(gradients_of(model.module), expect(model, whole)))
        optimizer.zero_grad()
        model.module.uses_both = False
        expected = expect(model, whole)
        mean_step(model, halve(whole)).backward()
        errors.append(
            relative_error({"first.weight": model.module.first.weight.grad}, {"first.weight": expected["first.weight"]})
        )
        optimizer.zero_grad()
        model.module.uses_both = True
        with torch.no_grad():
            model(whole[0])  # an evaluation
        model(whole[0])  # and one that forgets to say so
    return errors


def fail_after_a_forward_pass():
    """The error of a step that fails on one rank, after a call of the wrapper without a backward pass."""
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHeads())

    def step(module, batch):
        if dist.get_rank() == 1:
            raise ValueError("mine")
        return mean_step(module, batch)

    runner = make_runner(model, torch.optim.SGD(model.parameters(), lr=0.1), step)
    model(make_batch(4, torch.float64)[0])
    try:
        runner.step(halve(make_batch(SAMPLES, torch.float64)))
    except Exception as error:
        return type(error).__name__


class Normalised(nn.Module):
    """BatchNorm, whose statistics are of the samples of a rank."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.head = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, inputs):
        return self.head(self.norm(inputs))


def compare_buffers(broadcast):
    """This rank's running mean before, after a step that was undone, and after one that was not."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Normalised(), broadcast_buffers=broadcast)
    fails = [True]

    def step(module, batch):
        loss = mean_step(module, batch)
        if fails.pop() if fails else False:
            raise ValueError("once")
        return loss

    runner = make_runner(model, torch.optim.SGD(model.parameters(), lr=0.1), step)
    means = [model.module.norm.running_mean.tolist()]
    for _ in range(2):
        with suppress(ValueError):
            runner.step(halve(make_batch(SAMPLES, torch.float64)))
        means.append(model.module.norm.running_mean.tolist())
    return means


def fit_small(wrap, target):
    """The peak of a plan, and the bytes of the parameters."""
    torch.manual_seed(0)
    inner = nn.Linear(512, 512)
    batch, step = torch.randn(8, 512), lambda model, inputs: model(inputs).square().mean()
    options = {"step": step, "optimizer": torch.optim.SGD(inner.parameters(), lr=0.1), "check": None, "reuse": False}
    plan = autobatch.fit(wrap(inner), target, batch=batch, budget="256MiB", **options)
    return plan.peak_bytes, sum(parameter.nbytes for parameter in inner.parameters())


def run_all():
    names = fail_after_a_forward_pass()
    return names, train_by_hand(), compare_buffers(True), compare_buffers(False), fit_small(DistributedDataParallel, 16)


@cache
def answers():
    return run_ranks(run_all, timeout_seconds=15)


def test_the_wrapper_trains_as_ever_after_a_step():
    """Also after an evaluation, with parameters that are not used, and after a forward pass without a backward pass."""
    for _, errors, *_ in values_of(answers()):
        assert max(errors) < 1e-12


def test_a_forward_pass_before_a_step_sums_nothing_in_it():
    """Its backward pass never came; in the step's own, one rank alone would wait for the others."""
    assert [found[0] for found in values_of(answers())] == ["RankFailed", "ValueError"]


def test_buffers_are_the_first_ranks_after_a_step():
    """As the wrapper broadcasts them; and as they were after a step that was undone."""
    first, second = [found[2] for found in values_of(answers())]
    assert first == second
    assert first[0] == first[1] != first[2]


def test_buffers_stay_apart_where_the_wrapper_leaves_them():
    """With ``broadcast_buffers=False``."""
    first, second = [found[3] for found in values_of(answers())]
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_trials_hold_the_bucket_in_which_gradients_are_summed():
    """As each step of training does; here it is as large as the gradients."""
    alone, parameters = fit_small(lambda model: model, 8)
    for *_, (peak, _) in values_of(answers()):
        assert peak >= alone + parameters
