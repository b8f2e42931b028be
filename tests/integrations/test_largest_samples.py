"""Which of a loader's samples the size of a micro-batch is found on, and that none of them ends a training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler
from trainers import Classes, apart, bert, train, trainer_of
from transformers import Trainer


class Keyed(Classes):
    """Samples are asked for by number and width."""

    def __getitem__(self, index):
        number, _ = index
        return super().__getitem__(number)


class Broken(Classes):
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
