"""Which of a loader's samples the size of a micro-batch is found on, and that none of them ends a training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler
from trainers import Classes, apart, bert, train, trainer_of
from transformers import Trainer

from autobatch.integrations.transformers.cuts import collate_largest


class Rows(Dataset):
    """Sample ``n`` has n entries; some cannot be read."""

    def __init__(self, broken=()):
        self.broken = broken

    def __len__(self):
        return 200

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError(f"sample {index} is corrupt")
        return {"row": [0] * index}


def lengths(samples):
    """A batch with as many numbers as its longest sample; which samples it is made of is in the first column."""
    width = max(len(sample["row"]) for sample in samples)
    return torch.tensor([[len(sample["row"]), *[0] * width] for sample in samples])


def test_the_largest_come_first():
    """At most 64 of them, and nothing is drawn."""
    before = torch.get_rng_state()
    assert collate_largest(DataLoader(Rows(), 4, collate_fn=lengths, shuffle=True))[:, 0].tolist() == [
        *range(199, 135, -1)
    ]
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_that_cannot_be_read_or_collated():
    """Then the first batch has to do, as with a stream; an end of memory is no error of the training either."""

    def run_out(samples):
        raise torch.OutOfMemoryError("out of memory")

    assert collate_largest(DataLoader(Rows([7]), 4, collate_fn=lengths)) is None
    assert collate_largest(DataLoader(Rows(), 4, collate_fn=run_out)) is None
    assert collate_largest([1]) is None


class Keyed(Classes):
    """Samples are asked for by number and width."""

    def __getitem__(self, index):
        number, _ = index
        return super().__getitem__(number)


class Broken(Classes):
    """The first samples cannot be read."""

    def __getitem__(self, index):
        if index < 32:
            raise OSError(f"sample {index} is corrupt")
        return super().__getitem__(index)


class Chosen(Trainer):
    """A loader with a sampler of its own."""

    def get_train_dataloader(self):
        keys = [(number, 24) for number in range(192)] if isinstance(self.train_dataset, Keyed) else range(32, 192)
        size, collate = self.args.train_batch_size, self.data_collator
        return self.accelerator.prepare(DataLoader(self.train_dataset, size, sampler=[*keys], collate_fn=collate))


class Subset(Trainer):
    """A sampler that gives some of the samples."""

    def _get_train_sampler(self, *_, **__):
        return SubsetRandomSampler(range(32, 192), torch.Generator().manual_seed(0))


class Hidden(Trainer):
    """A sampler of which nothing is known."""

    def _get_train_sampler(self, *_, **__):
        class Late(torch.utils.data.Sampler):
            def __iter__(self):
                return iter(range(32, 192))

            def __len__(self):
                return 160

        return Late()


@pytest.mark.parametrize(("kind", "data"), [(Chosen, Keyed), (Chosen, Broken), (Subset, Broken), (Hidden, Broken)])
def test_a_training_that_reads_some_of_its_dataset(kind, data, tmp_path):
    """It ends where the Trainer's own whole batches end."""
    make = partial(trainer_of, tmp_path, bert, data(), kind=kind, max_steps=3)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert all(len(sizes) > 1 for sizes in split.sizes)
