"""Samples of ranks: joined by rank, they are the target batches of one process, in any epoch and after a resume."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import make_plan, make_rank_plans
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import autobatch
from autobatch.errors import InvalidArgument

pytestmark = pytest.mark.quick

ALL_SHARES = [(12,), (6, 6), (9, 3), (1, 11), (4, 4, 4), (7, 1, 4), (3, 3, 3, 3), (1, 1, 1, 9)]
"""One target batch of twelve, as one to four ranks share it."""


def samplers(shares, samples=40, **options):
    return [autobatch.ShareSampler(plan, range(samples), **options) for plan in make_rank_plans(shares, 5)]


def joined(ranks):
    """The samples of all ranks in each step, in the order of the ranks."""
    return [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


class Stream(IterableDataset):
    """Has a length, as some streams have, and no samples by number."""

    def __iter__(self):
        return iter(range(40))

    def __len__(self):
        return 40


class Endless(Dataset):
    """A dataset that wraps one without a length."""

    def __getitem__(self, index):
        return index

    def __len__(self):
        raise TypeError("no length")


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples", [40, 36, 12, 5])
@pytest.mark.parametrize("shares", ALL_SHARES)
def test_ranks_together_have_the_batches_of_one(shares, samples, shuffle):
    """For equal and unequal shares and ragged ends: each batch, and each sample once an epoch."""
    options = {"samples": samples, "shuffle": shuffle, "seed": 3}
    (alone,), ranks = samplers((12,), **options), samplers(shares, **options)
    for epoch in range(2):
        for sampler in (alone, *ranks):
            sampler.set_epoch(epoch)
        whole = list(alone)
        assert joined(ranks) == whole
        assert sorted(itertools.chain(*whole)) == list(range(samples))
        assert [len(batch) for batch in whole[:-1]] == [12] * (len(whole) - 1)
        assert {len(sampler) for sampler in ranks} == {len(whole)}


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 300), st.booleans())
def test_any_shares_have_every_sample_once(shares, samples, drop_last):
    """Or the sampler refuses them beforehand; no rank ever gets an empty list."""
    target = sum(shares)
    try:
        ranks = samplers(tuple(shares), samples=samples, drop_last=drop_last)
    except InvalidArgument:
        assert samples < target if drop_last else 0 < samples % target < len(shares)
        return
    batches = joined(ranks)
    assert min(len(part) for sampler in ranks for part in sampler) >= 1
    assert sum(map(len, batches)) == (samples // target * target if drop_last else samples)
    assert len(set(itertools.chain(*batches))) == sum(map(len, batches))


def test_epochs_differ_and_a_seed_gives_them_again():
    """An order belongs to a seed and an epoch, and no two pairs share one: not seed 1, epoch 0 and seed 0, epoch 1."""
    orders = {}
    for seed, epoch in itertools.product(range(4), range(4)):
        twins = [*samplers((12,), seed=seed), *samplers((12,), seed=seed)]
        for sampler in twins:
            sampler.set_epoch(epoch)
        orders[seed, epoch] = tuple(itertools.chain(*twins[0]))
        assert orders[seed, epoch] == tuple(itertools.chain(*twins[1])) == tuple(itertools.chain(*twins[0]))
    assert len(set(orders.values())) == 16
    assert all(sorted(order) == list(range(40)) for order in orders.values())


def test_a_trainer_sets_the_epoch_where_batch_samplers_have_it():
    """Lightning calls ``set_epoch`` of ``loader.batch_sampler.sampler``, and of nothing else of a batch sampler."""
    by_hand, by_trainer = samplers((12,)) + samplers((12,))
    by_hand.set_epoch(1)
    DataLoader(range(40), batch_sampler=by_trainer).batch_sampler.sampler.set_epoch(1)
    assert list(by_trainer) == list(by_hand)


def test_an_order_neither_reads_nor_moves_what_the_process_has():
    """Global generators stay as they are, and the default device is not asked."""
    (sampler,) = samplers((12,))
    before = list(sampler)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with torch.device("meta"):
        again = list(sampler), list(samplers((12,), shuffle=False)[0])
    assert again == (before, [list(range(40))[begin : begin + 12] for begin in range(0, 40, 12)])
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("after", ALL_SHARES)
@pytest.mark.parametrize("before", [(12,), (9, 3), (3, 3, 3, 3)])
@pytest.mark.parametrize("done", range(5))
def test_an_epoch_is_resumed_on_another_number_of_ranks(before, after, done):
    """The rest of the epoch is the same as without the resume; after the last batch the next epoch begins."""
    (alone,) = samplers((12,), seed=5)
    epochs = []
    for epoch in (2, 3):
        alone.set_epoch(epoch)
        epochs.append(list(alone))
    earlier, later = samplers(before, seed=5), samplers(after, seed=5)
    for sampler in earlier:
        sampler.set_epoch(2)
    states = [json.loads(json.dumps(sampler.state_dict(done))) for sampler in earlier]
    assert all(state == states[0] for state in states)
    for sampler in later:
        sampler.load_state_dict(states[0])
        assert (sampler.epoch, sampler.first_batch) == ((2, done) if done < 4 else (3, 0))
        sampler.set_epoch(sampler.epoch)
    assert joined(later) == (epochs[0][done:] if done < 4 else epochs[1])
    for sampler in later:
        sampler.set_epoch(3)
    assert joined(later) == epochs[1]


def test_only_the_first_iteration_after_a_resume_begins_in_the_middle():
    """The next one has the whole epoch, whether or not an epoch was set; its length is always the whole one's."""
    (sampler,) = samplers((12,), shuffle=False)
    sampler.load_state_dict(sampler.state_dict(3))
    assert (len(sampler), len(list(sampler)), len(list(sampler))) == (4, 1, 4)
    sampler.load_state_dict(sampler.state_dict(3))
    sampler.set_epoch(1)
    assert (sampler.first_batch, len(list(sampler))) == (0, 4)


def test_an_iteration_keeps_the_order_that_it_began_with():
    """A loader with workers asks for batches after the next epoch was set, as torch's own samplers allow."""
    (first,), (second,) = samplers((12,)), samplers((12,))
    batches = iter(first)
    first.set_epoch(1)
    first.load_state_dict(first.state_dict(2))
    assert list(batches) == list(second)
    assert (first.epoch, first.first_batch) == (1, 2)


def test_a_resumed_trainer_that_counts_from_its_resume_is_refused():
    """Its batches are too few by those from before: the next resume would repeat samples."""
    (sampler,) = samplers((12,))
    sampler.load_state_dict(sampler.state_dict(2))
    assert sampler.state_dict(2)["batch"] == 2
    list(sampler)
    with pytest.raises(InvalidArgument) as caught:
        sampler.state_dict(1)
    assert str(caught.value) == "batches_done=1 must be an int from 2 to 4, counted from the epoch's first batch"
    assert sampler.state_dict(3)["batch"] == 3
    list(sampler)
    assert sampler.state_dict(1)["batch"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_yields_each_ranks_samples(workers):
    """Through torch's own loader, also with workers that are ahead: two epochs, the second resumed in the middle."""
    dataset = TensorDataset(torch.arange(40) * 10)
    ranks = [autobatch.ShareSampler(plan, dataset, seed=1) for plan in make_rank_plans((7, 5), 5)]
    loaders = [DataLoader(dataset, batch_sampler=sampler, num_workers=workers) for sampler in ranks]
    (alone,) = samplers((12,), seed=1)
    for loader, rank in zip(loaders, (0, 1), strict=True):
        assert [len(batch[0]) for batch in loader] == [[7, 7, 7, 2], [5, 5, 5, 2]][rank]
        assert len(loader) == 4
    alone.set_epoch(1)
    state = None
    for sampler, loader in zip(ranks, loaders, strict=True):
        sampler.set_epoch(1)
        for done, _ in enumerate(loader, start=sampler.first_batch + 1):
            if done == 1:
                state = sampler.state_dict(done)
                break
    got = []
    for sampler, loader in zip(ranks, loaders, strict=True):
        sampler.load_state_dict(state)
        got.append([batch[0].tolist() for batch in loader])
    assert joined(got) == [[10 * index for index in batch] for batch in list(alone)[1:]]


def sample(dataset=range(40), plan=None, **options):
    """A sampler that works, but for the changes."""
    return autobatch.ShareSampler(plan or make_plan(12, 5), dataset, **options)


def load(**changes):
    """A state that can be loaded, but for the changes."""
    sample().load_state_dict({**sample().state_dict(1), **changes})


OTHERS = {"seed": (1, 0), "shuffle": (False, True), "samples": (41, 40), "target_batch": (24, 12)}
"""What the state says, and what the sampler has."""
REFUSED = [
    (lambda: sample(Stream()), ["dataset", "Stream", "len()"]),
    (lambda: sample(Endless()), ["dataset", "Endless"]),
    (lambda: sample(DataLoader(range(40))), ["dataset", "DataLoader"]),
    (lambda: sample(TensorDataset), ["dataset", "the class TensorDataset"]),
    (lambda: sample([]), ["dataset", "a list"]),
    (lambda: sample(plan=12), ["plan", "an int", "fit()", "Plan.load(path)"]),
    (lambda: sample(plan=make_plan(12, 5, 2)), ["2 ranks", "target_batch=12", "fit()"]),
    (lambda: sample(shuffle="no"), ["shuffle='no'", "True or False"]),
    (lambda: sample(drop_last=0), ["drop_last=0", "True or False"]),
    *((lambda seed=seed: sample(seed=seed), [f"seed={seed!r}"]) for seed in (-1, True, 1.0, "1", None, 2**63)),
    *((lambda epoch=epoch: sample().set_epoch(epoch), [f"epoch={epoch!r}"]) for epoch in (-1, False, 1.0, "1", None)),
    *(
        (lambda done=done: sample().state_dict(done), [f"batches_done={done!r}", "from 0 to 4"])
        for done in (-1, 5, True, 1.0, None)
    ),
    (lambda: sample(range(11), drop_last=True), ["drop_last=True", "11 samples", "target_batch=12"]),
    (lambda: samplers((6, 3, 3), samples=38), ["2 samples for 3 ranks", "38", "target_batch=12", "drop_last=True"]),
    *(
        (lambda state=state: sample().load_state_dict(state), [f"state={state!r}", "state_dict()"])
        for state in (None, 5, {}, {"epoch": 0, "batch": 0}, [("epoch", 0)])
    ),
    *(
        (lambda name=name, saved=saved: load(**{name: saved}), [f"{name}={saved}", f"{name}={has}", "set_epoch()"])
        for name, (saved, has) in [*OTHERS.items(), ("seed", (False, 0))]
    ),
    (lambda: load(epoch=-1), ["state['epoch']=-1"]),
    (lambda: load(epoch="1"), ["state['epoch']='1'"]),
    (lambda: load(batch=5), ["state['batch']=5", "from 0 to 4"]),
    (lambda: load(batch=None), ["state['batch']=None"]),
]


@pytest.mark.parametrize(("call", "named"), REFUSED, ids=[" ".join(named) for _, named in REFUSED])
def test_what_cannot_be_meant_is_refused(call, named):
    """One line names the argument and a remedy."""
    with pytest.raises(InvalidArgument) as caught:
        call()
    message = str(caught.value)
    assert [text for text in named if text not in message] == []
    assert len(message.splitlines()) == 1


def test_a_state_that_is_refused_changes_nothing():
    """Neither the epoch nor the batch: what comes next is what would have come."""
    (sampler,) = samplers((12,))
    sampler.load_state_dict({**sampler.state_dict(2), "epoch": 4})
    for wrong in ({"epoch": 5, "batch": 9}, {"epoch": -1}, {"seed": 9}):
        with pytest.raises(InvalidArgument):
            sampler.load_state_dict({**sampler.state_dict(3), **wrong})
        assert (sampler.epoch, sampler.first_batch) == (4, 2)
