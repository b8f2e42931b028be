"""Samples of different lengths on several ranks: the step of one process with the whole padded target."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from builders.rank_faults import needs_sharding, shard
from builders.ranks import run_ranks, values_of
from builders.texts import LENGTHS, Reader, count_tokens, length_of, make_texts, read_step
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from workloads import full_batch_gradient, relative_error

import autobatch
from autobatch.errors import AutobatchError
from autobatch.records import SizeAtLength
from autobatch.testing import oom_at

SIZES = (
    (SizeAtLength(length=6, micro_batch_size=4), SizeAtLength(length=24, micro_batch_size=2)),
    (SizeAtLength(length=12, micro_batch_size=5), SizeAtLength(length=24, micro_batch_size=2)),
)
"""By rank: what ran together there."""

BUDGETS = (100_000, 150_000)

DIVISIONS = ((6, 6), (11, 1), (12, 0), (0, 12))


def state_mean(model, batch):
    return autobatch.Mean(read_step(model, batch), count=count_tokens(batch))


def state_sum(model, batch):
    logits = model(batch["tokens"], batch["mask"]).flatten(0, 1)
    return autobatch.Sum(F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum"), count_tokens(batch))


class Shortages(NamedTuple):
    """Steps in which one rank ran out of memory: those done, the worst relative error, and those undone."""

    farthest: float
    retries: int
    undone: int
    steps: int


STEPS = {"weighed": (read_step, count_tokens), "mean": (state_mean, None), "sum": (state_sum, None)}


def make_model():
    """The same on every rank, and the whole target of all."""
    torch.manual_seed(0)
    return Reader(), make_texts()


def take_rows(batch, start, stop):
    """A rank's samples; ``None`` for none of them."""
    return {key: value[start:stop] for key, value in batch.items()} if stop > start else None


def own_rows(batch, division):
    start = sum(division[: dist.get_rank()])
    return take_rows(batch, start, start + division[dist.get_rank()])


CUT = autobatch.by_length(length_of)


def fit(model, step=read_step, weigh=count_tokens, **changes):
    given = {
        "batch": make_texts(),
        "optimizer": None,
        "cut": CUT,
        "max_micro_batch": 2,
        "check": None,
    }
    return autobatch.fit(model, len(LENGTHS), step=step, weigh=weigh, progress=False, **{**given, **changes})


def make_runner(model, name="weighed", **options):
    """A Runner on two ranks, each with its own sizes at its own lengths."""
    step, weigh = STEPS[name]
    parallel = DistributedDataParallel(model)
    plan = fit(parallel, step, weigh).model_copy(update={"lengths": SIZES[dist.get_rank()]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autobatch.Runner(plan, parallel, step, optimizer, weigh=weigh, cut=CUT, **options)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def accumulate_all():
    """Relative errors of gradient and loss, by kind of step and by division; every sample has run once."""
    errors = {}
    for name in STEPS:
        model, whole = make_model()
        expected, loss = full_batch_gradient(model, read_step, whole), read_step(model, whole).item()
        runner = make_runner(model, name)
        for division in DIVISIONS:
            model.zero_grad()
            result = runner.accumulate(own_rows(whole, division))
            assert sorted(row for rows in result.samples for row in rows) == list(range(division[dist.get_rank()]))
            found = relative_error(gradients(model), expected), abs(result.loss.item() / loss - 1)
            errors[name, division] = max(found)
    return errors


def step_in_halves():
    """Two batches a step, gradients clipped: how far the weights are from those of one process."""
    model, whole = make_model()
    alone, _ = make_model()
    read_step(alone, whole).backward()
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    own, runner = own_rows(whole, (6, 6)), make_runner(model, max_grad_norm=0.01)
    runner.step_over([take_rows(own, 0, 3), take_rows(own, 3, 6)])
    return relative_error(model.state_dict(), alone.state_dict())


def run_short(failing, stride):
    """Memory ends at operations of a step on one rank: how far each gradient is, and how many retries there were."""
    model, whole = make_model()
    expected, own = full_batch_gradient(model, read_step, whole), own_rows(whole, (7, 5))
    runner, far, retries, undone = make_runner(model), [], 0, 0
    with oom_at(10**9) as planned:
        runner.accumulate(own)
    everyone, planned_sizes = [None, None], runner.state_dict()
    dist.all_gather_object(everyone, planned.operations)
    for position in range(1, everyone[failing], stride):
        model.zero_grad()
        runner.load_state_dict(planned_sizes)
        with oom_at(position if dist.get_rank() == failing else 10**9):
            try:
                result = runner.accumulate(own)
            except AutobatchError:
                assert all(parameter.grad is None for parameter in model.parameters())
                undone += 1
                continue
        far.append(relative_error(gradients(model), expected))
        retries += result.retries
        assert sorted(row for rows in result.samples for row in rows) == list(range(len(own["tokens"])))
    return Shortages(max(far), retries, undone, len(far))


def fit_and_train():
    """A plan of trials within a budget, and what a step of it is beside one of one process."""
    model, whole = make_model()
    alone, _ = make_model()
    parallel, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"optimizer": optimizer, "max_micro_batch": None, "budget": BUDGETS[dist.get_rank()], "check": "raise"}
    plan = fit(parallel, **given)
    options = {"weigh": count_tokens, "cut": CUT}
    result = autobatch.Runner(plan, parallel, read_step, optimizer, **options).step(own_rows(whole, plan.shares))
    read_step(alone, whole).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    far = relative_error(model.state_dict(), alone.state_dict())
    return far, plan.shares, sum(result.micro_batch_sizes), [size.micro_batch_size for size in plan.lengths]


def fail(call):
    with pytest.raises(AutobatchError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def fail_all():
    """The errors of all ranks if one has a sample that is too long, or no lengths."""
    rank = dist.get_rank()
    model, whole = make_model()
    runner = make_runner(model)
    own, before = own_rows(whole, (6, 6)), [p.detach().clone() for p in model.parameters()]
    found = {
        "too long": fail(lambda: runner.step(make_texts([25, 3]) if rank else own)),
        "one has none": fail(lambda: fit(DistributedDataParallel(model), cut=None if rank else CUT)),
    }
    assert all(map(torch.equal, before, model.parameters()))
    return found, sum(runner.step(own).micro_batch_sizes)


def refuse_sharded():
    """``fit`` and ``Runner`` of a sharded model."""
    model, _ = make_model()
    plan = fit(DistributedDataParallel(model))
    sharded = shard(make_model()[0])
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    return (
        fail(lambda: fit(sharded)),
        fail(lambda: autobatch.Runner(plan, sharded, read_step, optimizer, weigh=count_tokens, cut=CUT)),
    )


def run_all():
    """Everything that needs no sharding, in one process a rank."""
    logging.getLogger("autobatch").setLevel(logging.CRITICAL)
    return {
        "gradients": accumulate_all(),
        "halves": step_in_halves(),
        "short": [run_short(0, 17), run_short(1, 11)],
        "errors": fail_all(),
        "fitted": fit_and_train(),
    }


@cache
def answers():
    """Asked once: the processes take longer to start than to run."""
    return run_ranks(run_all)


def results_of(name):
    return [value[name] for value in values_of(answers())]


def test_the_gradient_is_that_of_the_padded_whole():
    """However the ranks divide the target, and whatever each one's sizes are."""
    for errors in results_of("gradients"):
        assert len(errors) == len(STEPS) * len(DIVISIONS)
        assert max(errors.values()) < 1e-12, errors


def test_a_step_over_several_batches_is_clipped_as_one():
    """The weights are those of one process that had all samples at once."""
    assert max(results_of("halves")) < 1e-12


def test_each_rank_finds_its_own_sizes_by_length():
    """Within its own budget; the step of the plan is exact, and each sample has run."""
    for far, shares, samples, _ in results_of("fitted"):
        assert far < 1e-12
        assert shares == (6, 6)
        assert samples == 6
    (*_, first), (*_, second) = results_of("fitted")
    assert len(first) > 1
    assert first[-1] < second[-1]


@pytest.mark.parametrize("failing", [0, 1])
def test_memory_may_end_on_one_rank(failing):
    """It alone continues with less, or all have undone the step; a step that was done has run every sample once."""
    runs = [runs[failing] for runs in results_of("short")]
    assert all(run.farthest < 1e-12 for run in runs)
    assert runs[failing].retries > 2
    assert runs[1 - failing].retries == 0
    assert runs[0].undone == runs[1].undone < runs[0].steps


def test_a_rank_that_refuses_a_sample_stops_all():
    """The other one gets the reason, nothing has moved, and the next step runs."""
    (first, first_ran), (second, second_ran) = results_of("errors")
    text = "InvalidArgument: a sample is 25 long, and the longest that fit() tried is 24"
    assert second["too long"].startswith(text)
    assert first["too long"].startswith("RankFailed: step 0 was undone on every rank")
    assert text in first["too long"]
    assert first_ran == second_ran == 6


def test_lengths_are_for_all_ranks_or_none():
    """In the same words on each."""
    text = "cut= differs between the ranks (rank 0: by_length(); rank 1: None): pass the same on each"
    assert [found["one has none"] for found, _ in results_of("errors")] == [f"InvalidArgument: {text}"] * 2


@needs_sharding
def test_sharded_parameters_are_refused_on_all_ranks():
    """By ``fit``, and by a Runner with a plan that was made for the model before."""
    text = (
        "InvalidArgument: cut= is not supported where parameters are sharded: ranks run their micro-batches "
        "together, and each would divide its samples otherwise"
    )
    assert values_of(run_ranks(refuse_sharded)) == [(text, text)] * 2
