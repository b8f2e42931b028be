"""A step on several ranks is the step of one process with the whole target, in float64 to rounding."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.rank_losses import (
    count_some,
    mean_of_some,
    state_mean,
    state_sum,
    weigh_classes,
    weighted_classes,
)
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import Plain, full_batch_gradient, make_batch, mean_step, relative_error

import autobatch
from autobatch.planning.division import spread
from autobatch.testing import FakeDevice

DIVISIONS = {
    1: [(16,)],  # as torchrun --nproc-per-node 1 starts it
    2: [(8, 8), (11, 5), (1, 15), (16, 0), (0, 16)],
    3: [(6, 5, 5), (14, 1, 1), (0, 13, 3), (0, 0, 16)],
    4: [(4, 4, 4, 4), (9, 0, 6, 1)],
}
SAMPLES = 16


def terms(model, batch):
    """Two means over different counts, and a term that counts once a step."""
    return {
        "classes": mean_of_some(model, batch),
        "size": model(batch[0]).square().mean(),
        "weights": autobatch.PerStep(sum(p.square().sum() for p in model.parameters()) * 0.1),
    }


def weigh_terms(batch):
    return {"classes": count_some(batch), "size": len(batch[0])}


def whole_terms(model, batch):
    parts = terms(model, batch)
    return parts["classes"] + parts["size"] + parts["weights"].loss


class Used(nn.Sequential):
    """A model of which every parameter is used, as DistributedDataParallel expects."""

    def __init__(self):
        super().__init__(nn.Linear(6, 10, dtype=torch.float64), nn.Tanh(), nn.Linear(10, 4, dtype=torch.float64))


class LastChannels(nn.Module):
    """A convolution whose weight has its channels last in memory."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, (1, 2), dtype=torch.float64).to(memory_format=torch.channels_last)

    def forward(self, inputs):
        images = inputs.view(-1, 3, 1, 2).to(memory_format=torch.channels_last)
        return self.convolution(images).flatten(1)


def divide_before(model, batch):
    share = len(batch[0]) / SAMPLES
    return autobatch.Sum(mean_step(model, batch) * share, count=share)


CASES = {
    "samples": (mean_step, None, mean_step, Plain, {}),
    "divided before": (divide_before, None, mean_step, Plain, {}),
    "tokens": (mean_of_some, count_some, mean_of_some, Plain, {}),
    "class weights": (weighted_classes, weigh_classes, weighted_classes, Plain, {}),
    "stated mean": (state_mean, None, mean_of_some, Plain, {}),
    "stated sum": (state_sum, None, mean_of_some, Plain, {}),
    "terms": (terms, weigh_terms, whole_terms, Plain, {}),
    "bucket views": (mean_step, None, mean_step, Used, {"gradient_as_bucket_view": True}),
    "static graph": (mean_step, None, mean_step, Used, {"static_graph": True}),
    "unused parameters": (mean_step, None, mean_step, Plain, {"find_unused_parameters": True}),
    "channels last": (mean_step, None, mean_step, LastChannels, {}),
}


def step_on_a_rank(name, size):
    """Relative errors of gradient, loss and weights, of every division."""
    step, weigh, whole_step, make_model, options = CASES[name]
    rank, whole, errors = dist.get_rank(), make_batch(SAMPLES, torch.float64), []
    for division in DIVISIONS[size]:
        torch.manual_seed(0)
        model = make_model()
        expected = full_batch_gradient(model, whole_step, whole)
        loss = whole_step(model, whole).item()
        parallel = DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = sum(division[:rank])
        batch = tuple(part[start : start + division[rank]] for part in whole)
        plan = make_rank_plans(spread(SAMPLES, size), 3, weighed=weigh is not None, **SMALL)[rank]
        device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
        runner = autobatch.Runner(plan, parallel, step, optimizer, weigh=weigh, device=device)
        if options:  # an ordinary step before, and a forward pass without a backward pass
            parallel(whole[0]).sum().backward()
            optimizer.zero_grad()
            parallel(whole[0])
        result = runner.accumulate(batch if len(batch[0]) else None)
        found = {key: parameter.grad for key, parameter in model.named_parameters()}
        errors.append((relative_error(found, expected), abs(result.loss.item() / loss - 1)))
        assert sum(result.micro_batch_sizes) == division[rank]
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        joined = runner.step_over(zip(*(part.split(2) for part in batch), strict=True))
        assert joined.micro_batch_sizes == result.micro_batch_sizes
        moved = {key: (old - new) / 0.1 for (key, new), old in zip(model.named_parameters(), before, strict=True)}
        gone = {
            key: torch.zeros_like(p) if expected[key] is None else expected[key] for key, p in model.named_parameters()
        }
        errors.append((relative_error(moved, gone), 0.0))
    return errors


def step_all(size):
    """Every case, in one process a rank: they take longer to start than to run."""
    return {name: step_on_a_rank(name, size) for name in CASES}


@cache
def answers_of(size):
    return run_ranks(step_all, size, size=size)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", DIVISIONS)
def test_the_gradient_is_that_of_the_whole_target(size, name):
    """Every division of the samples is exact, also with none on a rank; so is a step over small batches."""
    for errors in values_of(answers_of(size)):
        assert len(errors[name]) == 2 * len(DIVISIONS[size])
        assert max(max(pair) for pair in errors[name]) < 1e-12, errors[name]
