"""How long samples are, which dimensions are padded, and what is left of a batch when padding is trimmed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from texts import LENGTHS, length_of, make_texts

from autobatch import by_length
from autobatch.batch.lengths import (
    ByLength,
    PlannedLengths,
    SamplesByLength,
    find_padding,
    padded_length,
    read_by_length,
)
from autobatch.batch.samples import Trim, describe
from autobatch.errors import InvalidArgument
from autobatch.records import Padding

N, L = len(LENGTHS), max(LENGTHS)


def with_mask(batch, *, kind=torch.bool):
    """The batch with a square mask of each sample."""
    mask = batch["mask"].bool()
    return {**batch, "square": (mask[:, :, None] & mask[:, None]).to(kind)}


def padding_of(batch, lengths=length_of):
    layout, read = describe(batch), read_by_length(lengths if isinstance(lengths, ByLength) else by_length(lengths))
    return find_padding(layout, read, read.read(batch, layout.count))


def gather(layout, rows, padding, length):
    return layout.part(rows, Trim(padding, length)).batch


def sort(batch, values, padding):
    return PlannedLengths(by_length(length_of), (), padding).sort(describe(batch), values)


ONE = {'batch["tokens"]': (1,), 'batch["mask"]': (1,), 'batch["labels"]': (1,)}
SQUARE = {**ONE, 'batch["square"]': (1, 2)}
BATCHES = {
    "right": (make_texts(), ONE, "right"),
    "left": (make_texts(left=True), ONE, "left"),
    "padded further than the longest": (make_texts(padded=40), ONE, "right"),
    "features beside them": ({**make_texts(), "scores": torch.rand(N, 7)}, ONE, "right"),
    "a label a sample": ({**make_texts(), "kind": torch.arange(N)}, ONE, "right"),
    "what all share": ({**make_texts(), "temperature": 0.5, "name": "texts"}, ONE, "right"),
    "positions, alike in each": (
        {**make_texts(), "at": torch.arange(L).expand(N, L)},
        {**ONE, 'batch["at"]': (1,)},
        "right",
    ),
    "a square mask": (with_mask(make_texts()), SQUARE, "right"),
    "a square mask of numbers, left": (with_mask(make_texts(left=True), kind=torch.float32), SQUARE, "left"),
    "a mask with heads": (
        {**make_texts(), "square": with_mask(make_texts())["square"][:, None]},
        {**ONE, 'batch["square"]': (2, 3)},
        "right",
    ),
    "vectors a position": (
        {**make_texts(), "vectors": torch.rand(N, L, 5) * make_texts()["mask"][:, :, None]},
        {**ONE, 'batch["vectors"]': (1,)},
        "right",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_the_padded_dimensions_are_those_of_the_padded_length(name):
    """Found from sizes and confirmed by values, on either side."""
    batch, dims, side = BATCHES[name]
    assert padding_of(batch) == Padding(dims=dims, side=side)


@pytest.mark.parametrize("name", BATCHES)
def test_a_trimmed_part_has_its_samples_and_no_padding_that_none_needs(name):
    """Rows in the order asked for, cut on the side of the padding; everything else is whole."""
    batch, dims, side = BATCHES[name]
    rows = [4, 2, 7]
    length = max(LENGTHS[row] for row in rows)
    part = gather(describe(batch), rows, Padding(dims=dims, side=side), length)
    assert part["mask"].sum(1).tolist() == [LENGTHS[row] for row in rows]
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            assert part[key] == value
            continue
        whole = value[rows]
        for dim in dims.get(f'batch["{key}"]', ()):
            whole = whole.narrow(dim, 0 if side == "right" else value.shape[dim] - length, length)
        assert torch.equal(part[key], whole)


def test_a_tuple_of_arrays_is_trimmed_like_tensors():
    """Paths are of any container, and NumPy's arrays stay arrays."""
    texts = make_texts()
    batch = texts["tokens"].numpy(), (texts["mask"].numpy(), np.arange(N))
    padding = padding_of(batch, lambda batch: batch[1][0].sum(1))
    assert padding.dims == {"batch[0]": (1,), "batch[1][0]": (1,)}
    part = gather(describe(batch), [1, 5], padding, 3)
    assert part[0].shape == (2, 3)
    assert part[1][1].tolist() == [1, 5]


def test_samples_in_lists_have_nothing_to_trim():
    """Each has its own length; they are only sorted."""
    batch = {"texts": [torch.arange(n + 1) for n in (3, 9, 5)], "labels": torch.tensor([0, 1, 2])}
    lengths = by_length(lambda batch: [len(text) for text in batch["texts"]])
    samples = SamplesByLength.read(describe(batch), lengths)
    assert (samples.padding, samples.longest) == (Padding(), 10)
    group = sort(batch, samples.values, samples.padding)
    part = group.batch.part(group.rows[:2], group.lengths.trims[0]).batch
    assert [len(text) for text in part["texts"]] == [10, 6]
    assert part["labels"].tolist() == [1, 2]
    assert samples.at(8)[1] == 6
    assert samples.at(2)[1] == 4


def test_all_samples_are_trimmed_too():
    """A batch that is one micro-batch may be padded further than its longest sample."""
    group = sort(make_texts(padded=40), LENGTHS, Padding(dims=ONE))
    assert group.lengths.trims[0].length == L
    assert group.lengths.values == sorted(LENGTHS, reverse=True)
    assert gather(group.batch, group.rows, *group.lengths.trims[0])["tokens"].shape == (N, L)


def test_samples_of_length_nothing_keep_one_position():
    """A tensor without positions is no input for most models."""
    batch = make_texts([4, 0, 2])
    assert gather(describe(batch), [1], Padding(dims=ONE), 0)["tokens"].shape == (1, 1)


def test_what_was_given_is_taken_at_its_word():
    """The user's own dims and side need no evidence, and what is left out is not trimmed."""
    lengths = by_length(length_of, dims={'batch["tokens"]': 1}, padding="left")
    assert padding_of(make_texts([5, 5]), lengths) == Padding(dims={'batch["tokens"]': (1,)}, side="left")


REFUSED = {
    "two sizes": (
        {**make_texts(), "sound": torch.rand(N, 60)},
        length_of,
        r'could be 24 \(batch\["labels"\]\) or 60 \(batch\["sound"\]\): pass cut=autobatch.by_length',
    ),
    "hidden size equal to the length": (
        {**make_texts(), "vectors": torch.rand(N, L, L) * make_texts()["mask"][:, :, None]},
        length_of,
        r'batch\["vectors"\] has other values than padding beyond its samples\' lengths in dimensions \[1, 2\]',
    ),
    "as many classes as positions": (
        {**make_texts(), "classes": torch.rand(N, L)},
        length_of,
        r'batch\["classes"\] has other values than padding',
    ),
    "as many classes as positions, padding on the left": (
        {**make_texts(left=True), "classes": torch.rand(N, L)},
        length_of,
        r'batch\["classes"\] has other values than padding .* padding=\'left\'\)',
    ),
    "no shorter sample": (make_texts([6, 6]), length_of, "all samples of the example batch are 6 long"),
    "no such dimension": (
        {"tokens": torch.ones(3, 4)},
        lambda batch: [9, 9, 9],
        r'the longest sample is 9 by length_of\(\), and no tensor has a dimension for it: batch\["tokens"\] \(3, 4\)',
    ),
    "the other side": (
        make_texts(),
        by_length(length_of, padding="left"),
        r'batch\["tokens"\] has other values than padding',
    ),
    "no number": (make_texts(), lambda batch: 3, r"length_of\(\) gave an? .*int.*: return one whole number a sample"),
    "too few": (make_texts(), lambda batch: [1], "gave 1 lengths for 12 samples"),
    "fractions": (make_texts(), lambda batch: [0.5] * N, "gave 0.5 as a sample's length"),
    "negative": (make_texts(), lambda batch: [-1] * N, "gave -1 as a sample's length"),
    "longer than the padding": (
        make_texts(),
        by_length(lambda batch: batch["mask"].sum(1) + 1, dims={'batch["tokens"]': 1}),
        "gave 25 for a sample of a batch that is padded to 24",
    ),
    "padded to two lengths": (
        {**make_texts(), "more": torch.zeros(N, 30)},
        by_length(length_of, dims={'batch["tokens"]': 1, 'batch["more"]': 1}),
        "the batch is padded to different lengths",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_example_leaves_open_is_refused(name):
    """In words, with what to pass; nothing is guessed."""
    batch, lengths, match = REFUSED[name]
    with pytest.raises(InvalidArgument, match=match):
        padding_of(batch, lengths)


WHOLE = {
    "a list of NumPy's ints": lambda batch: [*batch["mask"].sum(1).numpy()],
    "a list of tensors": lambda batch: [*batch["mask"].sum(1)],
    "a tuple of NumPy's arrays without dimensions": lambda batch: tuple(map(np.array, batch["mask"].sum(1).tolist())),
    "a tensor of bytes": lambda batch: batch["mask"].sum(1).to(torch.uint8),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_of_any_library_are_lengths(name):
    """As ``map`` takes them; what is read is Python's own."""
    values = by_length(WHOLE[name]).read(make_texts(), N)
    assert values == [*LENGTHS]
    assert {type(value) for value in values} == {int}


@pytest.mark.parametrize(
    ("length", "shown"),
    [
        (True, "True"),
        (np.bool_(True), "True"),
        (torch.tensor(True), "True"),
        (np.float32(2.0), "2.0"),
        (torch.tensor(2.5), "2.5"),
        (torch.tensor(-1), "-1"),
        (torch.tensor([3]), "a Tensor"),
        (None, "a NoneType"),
    ],
)
def test_what_is_no_whole_number_is_no_length(length, shown):
    """A truth value counts nothing, and a fraction is no position, even a whole one."""
    with pytest.raises(InvalidArgument, match=rf"length_of\(\) gave {shown} as a sample's length"):
        by_length(lambda _: [length] * N).read(make_texts(), N)


def test_lengths_that_change_when_padding_goes_are_refused():
    """A side that was given and is the wrong one: trimming would cut the samples themselves."""
    lengths = by_length(length_of, dims={'batch["tokens"]': 1, 'batch["mask"]': 1}, padding="right")
    with pytest.raises(
        InvalidArgument, match=r"length_of\(\) gives 0 for a sample, and gave 11 .* trimmed on the right"
    ):
        SamplesByLength.read(describe(make_texts(left=True)), lengths)


def test_a_later_batch_of_another_kind_is_refused():
    """Its padded tensor is missing, or has too few dimensions."""
    padding = Padding(dims=ONE)
    with pytest.raises(InvalidArgument, match=r'batch\["tokens"\] is not in the batch'):
        padded_length(describe({"mask": torch.ones(2, 3)}), padding, [3, 3])
    with pytest.raises(InvalidArgument, match=r'batch\["mask"\] is of shape \(2,\)'):
        padded_length(describe({"tokens": torch.ones(2, 3), "mask": torch.ones(2)}), padding, [3, 3])
