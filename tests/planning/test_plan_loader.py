"""``plan.loader``: a DataLoader whose batches are what one step of this rank has."""

from __future__ import annotations

import pytest
import torch
from builders.plans import make_plan, make_rank_plans
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

import autobatch
from autobatch.errors import InvalidArgument

DATA = TensorDataset(torch.arange(40))


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(40)


def sizes_of(loader):
    return [len(batch[0] if isinstance(batch, list) else batch) for batch in loader]


def values_of(loader):
    return [int(value) for batch in loader for value in (batch[0] if isinstance(batch, list) else batch)]


def test_one_rank_gets_batches_of_the_target():
    """A DataLoader as anybody would write it; options are DataLoader's."""
    plan = make_plan(16, 5)
    loader = plan.loader(DATA, num_workers=0, generator=torch.Generator().manual_seed(3))
    assert type(loader) is DataLoader
    assert loader.batch_size == 16
    assert sizes_of(loader) == [16, 16, 8]
    assert sorted(values_of(loader)) == [*range(40)]
    assert values_of(loader) != [*range(40)]
    assert values_of(plan.loader(DATA, shuffle=False)) == [*range(40)]
    assert sizes_of(plan.loader(DATA, drop_last=True)) == [16, 16]
    assert values_of(plan.loader(DATA, sampler=SequentialSampler(DATA))) == [*range(40)]
    assert values_of(plan.loader(Stream())) == [*range(40)]
    assert sizes_of(plan.loader(Stream(), drop_last=True)) == [16, 16]


def test_several_ranks_get_their_shares():
    """Each sample once, by a ShareSampler; an order of its own in each epoch."""
    loaders = [plan.loader(DATA, seed=4) for plan in make_rank_plans((10, 6), 5)]
    assert all(isinstance(loader.batch_sampler, autobatch.ShareSampler) for loader in loaders)
    assert [sizes_of(loader) for loader in loaders] == [[10, 10, 5], [6, 6, 3]]
    assert sorted(values_of(loaders[0]) + values_of(loaders[1])) == [*range(40)]
    first = values_of(loaders[0])
    loaders[0].batch_sampler.set_epoch(1)
    assert values_of(loaders[0]) != first
    whole = [plan.loader(DATA, shuffle=False, drop_last=True) for plan in make_rank_plans((10, 6), 5)]
    assert [values_of(loader) for loader in whole] == [[*range(10), *range(16, 26)], [*range(10, 16), *range(26, 32)]]


def test_what_the_plan_chooses_is_refused():
    """With the argument's name; on several ranks the order is not the user's, nor can a stream be shared."""
    alone, shared = make_plan(16, 5), make_rank_plans((10, 6), 5)[0]
    for name in ("batch_size", "batch_sampler"):
        with pytest.raises(InvalidArgument, match=f"{name}="):
            alone.loader(DATA, **{name: None})
    with pytest.raises(InvalidArgument, match="sampler="):
        shared.loader(DATA, sampler=SequentialSampler(DATA))
    with pytest.raises(InvalidArgument, match="Stream"):
        shared.loader(Stream())
    for data, message in ((5, "dataset is an int, whose"), (iter([1]), "have no indices"), ([], "without samples")):
        with pytest.raises(InvalidArgument, match=message):
            alone.loader(data)
    with pytest.raises(InvalidArgument, match="shuffle"):
        alone.loader(DATA, shuffle="yes")


@pytest.mark.parametrize("options", [{}, {"sampler": SequentialSampler(DATA)}])
def test_what_has_no_samples_by_number_is_refused(options):
    """A DataLoader would take a number for a dataset, and fail at its first batch."""
    with pytest.raises(InvalidArgument, match="dataset is an int"):
        make_plan(16, 5).loader(5, **options)
