"""The largest samples: found in every kind of dataset and loader, within limits, leaving nothing open."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from autobatch.batch.example import choose_samples, is_source
from autobatch.batch.lengths import ByLength
from autobatch.errors import InvalidArgument


def largest_samples(source, count=32, lengths=None, **options):
    found = choose_samples(source, count, lengths, **options)
    return found.layout, found.warnings[0] if found.warnings else None


class Sequences(Dataset[torch.Tensor]):
    """Sample i is a sequence of lengths[i] times the number i; remembers what it was asked for."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.full((self.lengths[index],), index)


class Stream(IterableDataset[Any]):
    """Yields entries; remembers whether its iterator was closed, and holds it so that nothing else closes it."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries
        self.closed = False
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.iterator = self.read()
        return self.iterator

    def read(self) -> Iterator[Any]:
        try:
            for entry in self.entries:
                self.given += 1
                yield entry
        finally:
            self.closed = True


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=-1)


LENGTHS = [3, 9, 1, 7, 2, 8]


def indices(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].tolist()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 10))
def test_largest_of_a_map_style_loader(lengths: list[int], count: int) -> None:
    """The padded batch has the longest samples, as many as asked for or there are, and no more is said."""
    dataset = Sequences(lengths)
    layout, note = largest_samples(DataLoader(dataset, batch_size=3, shuffle=True, collate_fn=pad), count)
    batch = layout.batch
    assert (batch >= 0).sum(dim=1).tolist() == sorted(lengths, reverse=True)[:count]
    assert note is None
    assert sorted(dataset.asked) == list(range(len(lengths)))


def count_own(batch: torch.Tensor) -> torch.Tensor:
    """How long each sample of a padded batch is."""
    return (batch >= 0).sum(1)


@given(st.lists(st.integers(0, 600), min_size=1, max_size=60), st.integers(1, 10))
def test_where_lengths_are_known_shorter_samples_are_taken_too(lengths: list[int], count: int) -> None:
    """For each sample down to 1/32 of the longest there is one as long as it, or at most a fifth longer."""
    dataset = Sequences(lengths)
    layout, _ = largest_samples(DataLoader(dataset, collate_fn=pad), count, lengths=ByLength(count_own))
    found = count_own(layout.batch).tolist()
    assert found == sorted(found, reverse=True)
    assert found[0] == max(lengths)
    assert len(found) <= -(-count // 2) + 24
    assert sorted(dataset.asked) == list(range(len(lengths)))
    wanted = [length for length in lengths if length >= max(1, max(lengths) / 32)]
    assert all(any(length <= one <= 1.2 * length for one in found) for length in wanted)


def test_lengths_go_before_elements() -> None:
    """Of samples that are padded before they are collated, only those that are asked know how long they are."""
    rows = [torch.tensor([index] * length + [-1] * (9 - length)) for index, length in enumerate(LENGTHS)]
    assert indices(largest_samples(DataLoader(rows), 2)[0].batch) == [0, 5]
    assert indices(largest_samples(DataLoader(rows), 2, lengths=ByLength(count_own))[0].batch) == [1, 5, 3, 0, 4, 2]


def test_scan_limit_is_kept_and_said() -> None:
    """No more samples than the limit are fetched; the note says how many of how many."""
    dataset = Sequences([1] * 99 + [50])
    layout, note = largest_samples(DataLoader(dataset, collate_fn=pad), 2, scan_limit=10)
    batch = layout.batch
    assert len(dataset.asked) == 10
    assert batch.shape == (2, 50)
    assert note == "the largest was looked for among 10 of the dataset's 100 samples"


def test_time_limit_is_kept_and_said() -> None:
    """After the time limit no further sample is looked at, but one always is."""

    class Slow(Sequences):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.02)
            return super().__getitem__(index)

    dataset = Slow([4] * 50)
    _, note = largest_samples(DataLoader(dataset, collate_fn=pad), time_limit=0.05)
    assert 1 <= len(dataset.asked) < 10
    assert f"{len(dataset.asked)} of the dataset's 50 samples" in note
    assert len(largest_samples(Slow([4] * 50), time_limit=0)[0].batch) == 1


def test_a_dataset_alone_is_collated_as_torch_does() -> None:
    """A TensorDataset gives the list of columns that a loader would."""
    layout, note = largest_samples(TensorDataset(torch.arange(6).reshape(3, 2), torch.arange(3)), 2)
    batch = layout.batch
    assert isinstance(batch, list)
    assert [tuple(column.shape) for column in batch] == [(2, 2), (2,)]
    assert note is None


def test_a_random_sample_is_the_one_that_was_measured() -> None:
    """Where each access gives another size, the batch has the sizes that were ranked."""

    class Random(Sequences):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(int(torch.randint(1, 100, ())))

    made: list[int] = []

    def remember(samples: list[torch.Tensor]) -> torch.Tensor:
        made.extend(len(sample) for sample in samples)
        return pad(samples)

    batch = largest_samples(DataLoader(Random([0] * 20), collate_fn=remember), 3)[0].batch
    assert made[-4:-1] == sorted(made[:20], reverse=True)[:3]
    assert batch.shape == (3, max(made[:20]))


PADDED = [torch.full((length,), index) for index, length in enumerate(LENGTHS)] * 1000


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_stream_one_batch_is_read(workers: int) -> None:
    """Its largest samples are taken, its iterator is closed, and the note says that it was read."""
    stream = Stream(PADDED)
    loader = DataLoader(stream, batch_size=4, collate_fn=pad, num_workers=workers)
    layout, note = largest_samples(loader, 2)
    assert indices(layout.batch) == [1, 3]
    assert stream.closed
    assert stream.given == 4
    assert "Stream" in note
    assert "\n" not in note
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("make", "count", "given"),
    [
        (lambda stream: stream, 3, 3),
        (lambda stream: DataLoader(stream, batch_size=None), 3, 1),
        (lambda stream: DataLoader(stream, batch_size=8, collate_fn=pad), 3, 8),
        (lambda stream: DataLoader(stream, batch_size=8, collate_fn=pad, drop_last=True), 300, 8),
    ],
    ids=["alone", "of whole batches", "a larger batch", "a smaller batch"],
)
def test_what_a_batch_of_a_stream_is(make: Any, count: int, given: int) -> None:
    """The loader's own; of a dataset alone as many samples as were asked for."""
    stream = Stream([torch.zeros(4, 2)] * 1000)
    assert largest_samples(make(stream), count)[1] is not None
    assert stream.given == given
    assert stream.closed


def test_a_stream_is_closed_when_it_fails() -> None:
    """An error of the collate function comes out as it is, and nothing is left open."""
    stream = Stream([torch.zeros(1), torch.zeros(2)])

    def fail(samples: list[torch.Tensor]) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match=r"^mine$"):
        largest_samples(DataLoader(stream, collate_fn=fail))
    assert stream.closed


WHOLE = [torch.zeros(8, 5), torch.zeros(2, 9), torch.zeros(30, 6)]


class Batches(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return len(WHOLE)

    def __getitem__(self, index: int) -> torch.Tensor:
        return WHOLE[index]


def test_whole_batches() -> None:
    """A loader with batch_size=None gives the batch with most elements a sample, not the one with most in all."""
    assert largest_samples(DataLoader(Batches(), batch_size=None), 4)[0].batch.shape == (2, 9)


def test_bulk_reads() -> None:
    """A dataset asked for lists of indices by a batch sampler gives the largest of those batches."""

    class Bulk(Sequences):
        def __getitem__(self, wanted: Any) -> torch.Tensor:
            return pad([torch.full((self.lengths[index],), index) for index in wanted])

    dataset = Bulk(LENGTHS)
    sampler = BatchSampler(SequentialSampler(dataset), 2, drop_last=False)
    assert indices(largest_samples(DataLoader(dataset, sampler=sampler, batch_size=None))[0].batch) == [0, 1]


def test_a_batch_sampler_changes_nothing() -> None:
    """With a batch_sampler samples are still looked at one by one."""
    dataset = Sequences(LENGTHS)
    sampler = BatchSampler(SequentialSampler(dataset), 2, drop_last=False)
    assert indices(largest_samples(DataLoader(dataset, batch_sampler=sampler, collate_fn=pad), 2)[0].batch) == [1, 5]


def test_a_subset_sampler_is_kept_to() -> None:
    """Samples that the loader never draws are not looked at."""
    dataset = Sequences(LENGTHS)
    loader = DataLoader(dataset, sampler=SubsetRandomSampler([0, 2, 4]), collate_fn=pad)
    assert indices(largest_samples(loader, 2)[0].batch) == [0, 4]
    assert sorted(dataset.asked) == [0, 2, 4]


def test_a_dict_is_asked_for_its_keys() -> None:
    """A loader over a dict, whose sampler draws keys, is looked through by those keys."""
    dataset = {"a": torch.zeros(1), "b": torch.zeros(3), "c": torch.zeros(2)}
    assert largest_samples(DataLoader(dataset, sampler=list(dataset), collate_fn=pad), 2)[0].batch.shape == (2, 3)


def test_no_workers_are_started() -> None:
    """A loader with workers is read in this process, where the dataset remembers what it was asked for."""
    dataset = Sequences(LENGTHS)
    largest_samples(DataLoader(dataset, num_workers=2, collate_fn=pad), 4)
    assert sorted(dataset.asked) == list(range(len(LENGTHS)))
    assert multiprocessing.active_children() == []


def test_text_is_ranked_by_its_length() -> None:
    """Where samples are strings that the step turns into tokens, the longest are taken."""
    assert largest_samples(DataLoader(["a", "abc", "ab"], collate_fn=list), 2)[0].batch == ["abc", "ab"]


def test_a_foreign_dataset() -> None:
    """A dataset without torch's base class works alone if it fetches many samples as torch's loader asks."""

    class Table:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.tensor(index)}

        def __getitems__(self, wanted: list[int]) -> list[dict[str, torch.Tensor]]:
            return [self[index] for index in wanted]

    assert is_source(Table())
    assert sorted(largest_samples(Table())[0].batch["x"].tolist()) == [0, 1, 2]


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Sequences([]), "Sequences gave no samples"),
        (DataLoader(Sequences([]), collate_fn=pad), "Sequences gave no samples"),
        (Stream([]), "Stream gave no samples"),
        (Endless(), "Endless has no length"),
    ],
)
def test_nothing_to_take(source: Any, message: str) -> None:
    """An empty dataset and one without a length say what to pass instead."""
    with pytest.raises(InvalidArgument, match=message):
        largest_samples(source)


def test_a_datasets_own_error_comes_out() -> None:
    """What a dataset raises reaches the user as it was raised."""

    class Broken(Sequences):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise KeyError("column")

    with pytest.raises(KeyError, match="column"):
        largest_samples(Broken([1]))
