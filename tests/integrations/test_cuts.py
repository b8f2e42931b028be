"""How a Trainer's batch is divided: rows, rows without padding, and samples that are collated again."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.batch.samples import describe
from autobatch.integrations.attributes import are_equal
from autobatch.integrations.transformers.cuts import (
    IGNORED,
    CollatedSamples,
    Rows,
    SampleKeeper,
    TrimmedRows,
    take_samples,
)

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def collate(samples):
    """Texts of tokens from 1 on, padded with 0 on the right."""
    width = max(map(len, samples))
    texts = torch.tensor([[*sample, *[0] * (width - len(sample))] for sample in samples])
    return {"input_ids": texts, "attention_mask": (texts > 0).long(), "labels": texts.masked_fill(texts == 0, IGNORED)}


def collate_drawing(samples):
    return {**collate(samples), "noise": torch.rand(len(samples))}


def texts_of(lengths):
    """A text of each length, of tokens that are all different."""
    return [[*range(10 * number + 1, 10 * number + 1 + length)] for number, length in enumerate(lengths)]


@pytest.mark.quick
@given(LENGTHS, st.integers(1, 6))
def test_rows_without_padding_have_every_token_once(lengths, size):
    """In micro-batches of any size, each as wide as its longest text."""
    samples = texts_of(lengths)
    cut, layout = TrimmedRows(), describe(TrimmedRows().batch_of(collate(samples), samples))
    tokens = []
    for start in range(0, layout.count, size):
        inputs = cut.inputs_of(layout.take(range(start, min(layout.count, start + size))))
        used = inputs["attention_mask"].sum(1)
        assert inputs["input_ids"].shape[1] == used.max()
        assert torch.equal(inputs["labels"] != IGNORED, inputs["attention_mask"].bool())
        tokens += inputs["input_ids"][inputs["attention_mask"].bool()].tolist()
    assert sorted(tokens) == sorted(token for sample in samples for token in sample)


@pytest.mark.quick
def test_neighbours_have_about_the_same_length():
    """The longest come first; a batch that is run whole stays as it is."""
    batch = collate(texts_of([2, 9, 4, 7]))
    ordered = TrimmedRows().batch_of(batch, None)
    assert ordered["attention_mask"].sum(1).tolist() == [9, 7, 4, 2]
    assert TrimmedRows().batch_of(batch, None, largest=4) is batch


@pytest.mark.parametrize(
    ("name", "values"),
    [("labels", torch.ones(1, 8, dtype=torch.long)), ("labels", torch.ones(1, 8)), ("features", torch.ones(1, 8))],
    ids=["labels", "chances", "features"],
)
def test_what_is_no_position_stays(name, values):
    """As many numbers as the text is wide, by accident: nothing of them is cut off."""
    row = {name: value[1:] for name, value in collate(texts_of([8, 3])).items()}
    assert TrimmedRows().inputs_of(row)["input_ids"].shape == (1, 3)
    kept = TrimmedRows().inputs_of({**row, name: values})
    assert kept[name].shape == kept["input_ids"].shape == (1, 8)


def test_columns_under_another_prefix_have_a_width_of_their_own():
    """Two texts a sample, as sentence-transformers has them."""
    one, other = collate(texts_of([5, 2])), collate(texts_of([3, 8]))
    batch = {
        **{f"one_{name}": value for name, value in one.items()},
        **{f"other_{name}": v for name, v in other.items()},
    }
    row = {name: value[1:] for name, value in batch.items()}
    widths = {name: value.shape[1] for name, value in TrimmedRows().inputs_of(row).items()}
    assert {width for name, width in widths.items() if name.startswith("one_")} == {2}
    assert {width for name, width in widths.items() if name.startswith("other_")} == {8}


def test_which_ways_are_possible():
    """Rows if each sample has one; samples collated again if that gives the same batch."""
    samples = texts_of([3, 5])
    batch, pairs = collate(samples), collate([*samples, *samples])
    assert Rows().can_divide(batch, samples)
    assert Rows().can_divide(batch, None)
    assert not Rows().can_divide(pairs, samples)
    assert not Rows().can_divide({"input_ids": batch["input_ids"].reshape(1, -1), "lengths": torch.ones(3)}, None)
    assert CollatedSamples(collate).can_divide(batch, samples)
    assert not CollatedSamples(collate).can_divide(batch, None)
    assert not CollatedSamples(collate_drawing).can_divide(collate_drawing(samples), samples)


def test_samples_are_collated_when_their_turn_comes():
    """A whole batch is the loader's own; a part is made of its samples, and leaves them as they are."""
    samples = texts_of([3, 5, 2])
    cut, whole = CollatedSamples(collate), collate(samples)
    layout = describe(cut.batch_of(whole, samples))
    assert layout.count == 3
    assert cut.inputs_of(layout.take(range(3))) == whole
    part = cut.inputs_of(layout.take(range(2, 3)))
    assert part["input_ids"].tolist() == [samples[2]]


def test_a_worker_process_sends_a_batch_though_nothing_can_send_its_collate_function():
    """A lambda or a closure is collate function in a forked worker; what is sent has the samples alone."""
    samples = texts_of([3, 5])
    batch = pickle.loads(pickle.dumps(SampleKeeper(lambda texts: {**collate(texts)})(samples)))
    assert take_samples(batch) == samples
    assert are_equal(batch, collate(samples))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([0]), np.array([0, 0])),
        (np.array([]), np.array([1.0])),
        (np.ones(2, np.float32), np.ones(2)),
        ([np.ones(1)], [np.ones(3)]),
        (torch.ones(1), torch.ones(2)),
    ],
)
def test_arrays_of_other_shapes_or_dtypes_are_not_equal(one, other):
    """NumPy's own comparison repeats the smaller one."""
    assert not are_equal(one, other)
    assert are_equal(one, one)
