"""The example batch: the user's own, a dataset's largest samples, or inferred from the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from workloads import Plain, make_batch

import autobatch
from autobatch.batch.example import find_example
from autobatch.errors import NeedsBatch


class Sentences(Dataset):
    """Token sequences of growing length; the longest comes last."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.arange(index + 1)


def pad(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_a_batch_that_is_given_is_taken_as_it_is():
    """The very same object, without a word."""
    batch = make_batch(5)
    example = find_example(Plain(), batch, 256)
    assert example.layout.batch is batch
    assert example.layout.count == 5
    assert example.warnings == ()


@pytest.mark.parametrize(("samples", "most", "count"), [(20, 4, 4), (20, 100, 20), (100, 1000, 64)])
def test_of_a_loader_the_largest_samples_are_taken(samples, most, count):
    """As many as are of use, never more than 64, through the loader's own collate function."""
    loader = DataLoader(Sentences(samples), batch_size=2, collate_fn=pad)
    example = find_example(Plain(), loader, most)
    assert example.layout.count == count
    assert example.layout.batch.shape == (count, samples)


def test_without_a_batch_the_model_is_asked_and_the_plan_will_say_so():
    """A first layer that fixes its input's shape is enough."""
    example = find_example(nn.Sequential(nn.Linear(7, 3), nn.ReLU()), None, 256)
    assert example.layout.count >= 1
    assert example.layout.batch.shape[1:] == (7,)
    [warning] = example.warnings
    assert "no batch= was given" in warning
    assert "real samples may be larger" in warning


@pytest.mark.parametrize("call", ["fit", "Runner.fit", "verify", "predict"])
def test_a_step_of_the_users_own_needs_a_batch(call):
    """What it takes cannot be read from the model: a batch that was made up would fail inside the user's loss."""
    model = nn.Sequential(nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch):
        raise AssertionError("the step was called")

    calls = {
        "fit": lambda: autobatch.fit(model, 8, step=step, optimizer=optimizer),
        "Runner.fit": lambda: autobatch.Runner.fit(model, step=step, optimizer=optimizer, target_batch=8),
        "verify": lambda: autobatch.verify(model, None, step),
        "predict": lambda: autobatch.predict(model, step=step, optimizer=optimizer, gpu="A100-80GB"),
    }
    with pytest.raises(NeedsBatch, match=r"batch=.*step\(\)") as caught:
        calls[call]()
    assert "\n" not in str(caught.value)


def test_the_smallest_sample_of_a_dataset_stands_first_beside_the_largest():
    """Trials run the largest ones alone."""
    loader = DataLoader(Sentences(20), batch_size=2, collate_fn=pad)
    example = find_example(Plain(), loader, 4)
    assert example.with_smallest.count == 5
    assert torch.equal(example.with_smallest.batch[1:], example.layout.batch)
    assert (example.with_smallest.batch[0] != 0).sum() <= 1
    every = find_example(Plain(), loader, 100)
    assert every.layout.count == 20
    assert torch.equal(every.with_smallest.batch[0], every.layout.batch[-1])
    for alike in (DataLoader([torch.ones(3)] * 9), DataLoader([torch.ones(3, 2)] * 9, batch_size=None)):
        assert find_example(Plain(), alike, 4).with_smallest is None


def test_a_smallest_sample_that_cannot_stand_beside_the_largest_is_left_out():
    """Images of one size and a smaller one, which torch's own collate function cannot stack."""
    dataset = [torch.ones(3, 2)] + [torch.ones(3, 4)] * 8
    example = find_example(Plain(), DataLoader(dataset, batch_size=1), 4)
    assert example.layout.batch.shape == (4, 3, 4)
    assert example.with_smallest is None


class AttributeDict(dict):
    """The common snippet: every name is an attribute, ``None`` if it is no key."""

    __getattr__ = dict.get


class StrictAttributeDict(dict):
    """The other one, which raises KeyError for a name that is no key."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("kind", [AttributeDict, StrictAttributeDict])
def test_a_dict_with_attributes_is_a_batch_and_no_dataset(kind):
    """Whatever name it is asked for."""
    batch = kind(x=torch.randn(8, 4), y=torch.randn(8, 1))
    assert find_example(nn.Linear(4, 1), batch, 8).layout.count == 8
