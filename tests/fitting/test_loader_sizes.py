"""``fit`` warns where the loader or dataset that it is given does not make up the target."""

from __future__ import annotations

import logging

import pytest
import torch
from builders.plans import make_rank_plans
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.fitting.fit import warn_of_loader
from autobatch.testing import FakeDevice

DATA = TensorDataset(*make_batch(64, torch.float64))


class Stream(IterableDataset):
    def __iter__(self):
        yield from DATA


class LongStream(Stream):
    def __len__(self):
        return len(DATA)


class Silly(TensorDataset):
    def __len__(self):
        raise NotImplementedError


BATCH, DATASET = "batch_size", "samples"
GIVEN = {
    "no loader": (lambda: make_batch(4, torch.float64), 16, set()),
    "nothing": (lambda: None, 16, set()),
    "the target": (lambda: DataLoader(DATA, batch_size=16), 16, set()),
    "smaller": (lambda: DataLoader(DATA, batch_size=4), 16, {BATCH}),
    "batch_size=1, torch's default": (lambda: DataLoader(DATA), 16, {BATCH}),
    "larger": (lambda: DataLoader(DATA, batch_size=32), 16, {BATCH}),
    "a stream": (lambda: DataLoader(Stream(), batch_size=4), 16, {BATCH}),
    "a stream of the target": (lambda: DataLoader(Stream(), batch_size=16), 16, set()),
    "a batch sampler": (lambda: DataLoader(DATA, batch_sampler=BatchSampler(range(64), 4, drop_last=False)), 16, set()),
    "a list of batches": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), 16, set()),
    "no batches": (lambda: DataLoader([DATA[:8]], batch_size=None), 16, set()),
    "a dataset": (lambda: DATA, 16, set()),
    "a dataset of the target": (lambda: DATA, 64, set()),
    "too small a dataset": (lambda: DATA, 65, {DATASET}),
    "too small a loader": (lambda: DataLoader(DATA, batch_size=100), 100, {DATASET}),
    "both": (lambda: DataLoader(DATA, batch_size=4), 100, {BATCH, DATASET}),
    "a part of a dataset": (
        lambda: DataLoader(DATA, batch_size=16, sampler=SubsetRandomSampler(range(8))),
        16,
        {DATASET},
    ),
    "drawn with replacement": (
        lambda: DataLoader(DATA, batch_size=100, sampler=RandomSampler(DATA, replacement=True, num_samples=100)),
        100,
        set(),
    ),
    "a long stream": (LongStream, 100, {DATASET}),
    "a stream of any length": (Stream, 100, set()),
    "a batch sampler over little": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(range(64), 100, drop_last=False)),
        100,
        {DATASET},
    ),
    "a length that raises": (lambda: Silly(*DATA.tensors), 100, set()),
}


def kinds_of(warnings):
    """Which of the two each is; each names the target or the share, and is one line."""
    assert all("\n" not in warning for warning in warnings)
    return {BATCH if "batch_size=" in warning else DATASET for warning in warnings}


@pytest.mark.parametrize("kind", GIVEN)
def test_a_loader_that_does_not_give_the_target_is_warned_of(kind):
    """Its batch size, if it is one, and the samples of an epoch, if they are known."""
    make, target, expected = GIVEN[kind]
    assert kinds_of([*warn_of_loader(make(), target, target, 1)]) == expected


ON_RANKS = {
    "its share": (lambda plan: DataLoader(DATA, batch_size=8), set()),
    "the whole target": (lambda plan: DataLoader(DATA, batch_size=16), {BATCH}),
    "a share of the samples": (lambda plan: DataLoader(DATA, batch_sampler=autobatch.ShareSampler(plan, DATA)), set()),
    "a part for this rank": (lambda plan: DataLoader(DATA, batch_size=8, sampler=range(4)), {DATASET}),
}


@pytest.mark.parametrize("kind", ON_RANKS)
def test_several_ranks_have_shares(kind):
    """A rank's loader gives its share; of what it sees it cannot be known that the others see other samples."""
    make, expected = ON_RANKS[kind]
    plan = make_rank_plans((8, 8), 4)[0]
    found = [*warn_of_loader(make(plan), 16, 8, 2)]
    assert kinds_of(found) == expected
    assert all("8" in warning for warning in found)


def test_a_shared_dataset_that_is_too_small():
    """All ranks draw from it."""
    plan = make_rank_plans((40, 40), 4)[0]
    loader = DataLoader(DATA, batch_sampler=autobatch.ShareSampler(plan, DATA))
    assert kinds_of([*warn_of_loader(loader, 80, 40, 2)]) == {DATASET}


def fit(batch, target, call):
    model = Plain(torch.float64)
    options = {
        "batch": batch,
        "step": mean_step,
        "device": FakeDevice(lambda n: 10 + n, total_bytes=1000),
        "check": None,
    }
    if call == "fit":
        return autobatch.fit(model, target, **options)
    return autobatch.Runner.fit(model, target, optimizer=torch.optim.SGD(model.parameters()), **options).plan


@pytest.mark.parametrize(
    ("call", "size", "target", "expected"),
    [
        ("fit", 4, 16, {BATCH}),
        ("fit", 16, 16, set()),
        ("fit", 4, 100, {BATCH, DATASET}),
        ("Runner.fit", 4, 16, set()),
        ("Runner.fit", 4, 100, {DATASET}),
    ],
)
def test_the_plan_and_the_log_have_it(call, size, target, expected, caplog):
    """``Runner.fit`` is silent about sizes: its ``run`` joins and cuts batches, and its ``step`` warns."""
    with caplog.at_level(logging.INFO, "autobatch"):
        plan = fit(DataLoader(DATA, batch_size=size), target, call)
    own = [warning for warning in plan.warnings if warning.startswith(("the loader has", "the data has"))]
    assert kinds_of(own) == expected
    [line] = [record for record in caplog.records if f"{target} = " in record.getMessage()]
    assert line.levelno == (logging.WARNING if expected else logging.INFO)
    assert all(warning in line.getMessage() for warning in own)
    assert "runner.run(loader)" in line.getMessage() or BATCH not in expected
