"""A plan says how long an epoch takes, where it knows the dataset."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autobatch

DATA = TensorDataset(torch.arange(6000.0).reshape(750, 8))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(64, 8))


BATCHES = {
    "dataset": (lambda: DATA, 750),
    "loader": (lambda: DataLoader(DATA, batch_size=32, shuffle=True), 750),
    "stream": (Stream, 0),
    "batch": (lambda: (torch.randn(32, 8),), 0),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_an_epoch_is_the_dataset_at_the_measured_rate(kind):
    """Of a stream or a lone batch nobody knows it, and nothing is said."""
    make, samples = BATCHES[kind]
    plan = autobatch.fit(
        nn.Linear(8, 1), 32, batch=make(), step=lambda model, batch: model(first(batch)).mean(), reuse=False
    )
    assert plan.dataset_samples == samples
    said = re.findall(r"An epoch of (\d+) samples takes about ([\d.]+) (s|min|h|d)", plan.explain())
    assert [int(count) for count, _, _ in said] == ([samples] if samples else [])
    trial = plan.trials[-1].model_copy(update={"seconds": 2.0 * 60})  # two micro-batches of 32 in two minutes
    slow = plan.model_copy(update={"trials": (trial,), "dataset_samples": 320 * plan.micro_batch_size})
    assert "takes about 5.3 h at this size" in slow.explain()


def test_the_one_call_knows_the_dataset_too():
    """``Runner.fit`` plans on the same data as ``fit``."""
    runner = autobatch.Runner.fit(
        nn.Linear(8, 1), 32, batch=DataLoader(DATA, batch_size=32), step=lambda model, batch: model(first(batch)).mean()
    )
    assert runner.plan.dataset_samples == 750


def first(batch):
    return batch[0] if isinstance(batch, tuple | list) else batch
