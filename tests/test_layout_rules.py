"""Reading: which lists are samples and which are fields, case by case, and what the errors say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.batch.layout_rules import read
from autobatch.errors import InvalidBatch

ROWS = torch.zeros


def images(*sizes: int, channels: int = 3) -> list[torch.Tensor]:
    """Images of these heights, each 7 wide."""
    return [ROWS(channels, size, 7) for size in sizes]


def targets(*boxes: int) -> list[dict[str, torch.Tensor]]:
    """Detection targets with so many boxes each."""
    return [{"boxes": ROWS(count, 4), "labels": ROWS(count, dtype=torch.long)} for count in boxes]


NAMES = list("abcdefgh")
EIGHT = ROWS(8, 3)
HEIGHTS = range(5, 13)

# batch, number of samples, the lists that hold one entry a sample
CASES: dict[str, tuple[Any, int, set[str]]] = {
    "one tensor": (EIGHT, 8, set()),
    "array": (np.zeros((8, 2)), 8, set()),
    "x and y": ([EIGHT, ROWS(8, dtype=torch.long)], 8, set()),
    "x and y alike": ([EIGHT, ROWS(8, 1)], 8, set()),
    "x and y of one sample": ((ROWS(1, 5), ROWS(1, 1)), 1, set()),
    "x and y of two samples": ((ROWS(2, 5), ROWS(2, 1)), 2, set()),
    "three series of three samples": ([ROWS(3, 96, 7), ROWS(3, 24, 7), ROWS(3, 24, 1)], 3, set()),
    "a list of one tensor": ([EIGHT], 8, set()),
    "multi-crop": ([ROWS(8, 3, 22, 22)] * 2 + [ROWS(8, 3, 9, 9)] * 6, 8, set()),
    "pairs of sentences": ([{"ids": ROWS(8, 5)}, {"ids": ROWS(8, 7)}], 8, set()),
    "nested fields": ({"x": EIGHT, "y": [ROWS(8), ROWS(8)]}, 8, set()),
    "stacked images, listed targets": ((ROWS(8, 3, 4, 4), targets(*range(8))), 8, {"batch[1]"}),
    "listed images": (images(*HEIGHTS), 8, {"batch"}),
    "listed grey images": (images(*HEIGHTS, channels=1), 8, {"batch"}),
    "four images": (images(5, 6, 7, 8), 4, {"batch"}),
    "listed images and targets": ((images(5, 6), targets(0, 3)), 2, {"batch[0]", "batch[1]"}),
    "tupled images and numbers": ((tuple(images(5, 6)), (1, 2)), 2, {"batch[0]", "batch[1]"}),
    "images and masks": ((images(5, 6, 7), images(5, 6, 7)), 3, {"batch[0]", "batch[1]"}),
    "three images beside three labels": ({"image": images(5, 6, 7), "label": ROWS(3)}, 3, {'batch["image"]'}),
    "sample dicts with images": ([{"image": image, "id": 1} for image in images(*HEIGHTS)], 8, {"batch"}),
    "what a dataset gives: images and labels": ([(ROWS(3, 6, 6), n % 4) for n in range(40)], 40, {"batch"}),
    "what a dataset gives: dicts of one length": ([{"tokens": ROWS(12), "id": n} for n in range(40)], 40, {"batch"}),
    "what a dataset gives: dicts of tensors": ([{"tokens": ROWS(12), "mask": ROWS(12)}] * 40, 40, {"batch"}),
    "texts and tensors": ([(ROWS(12), "name")] * 5, 5, {"batch"}),
    "sequences of differing length": ([ROWS(length, 16) for length in HEIGHTS], 8, {"batch"}),
    "uncollated dicts": ([{"ids": ROWS(5)}, {"ids": ROWS(7)}], 2, {"batch"}),
    "names": ({"x": EIGHT, "names": NAMES}, 8, {'batch["names"]'}),
    "tags": ({"x": EIGHT, "tags": ["a", "b"]}, 8, set()),
    "names with one missing": ({"x": EIGHT, "names": [None, *NAMES[1:]]}, 8, {'batch["names"]'}),
    "numbers": ({"x": EIGHT, "y": tuple(range(8)), "size": (4, 4)}, 8, {'batch["y"]'}),
    "scalar tensors": ({"x": EIGHT, "y": [torch.tensor(1.0)] * 8}, 8, {'batch["y"]'}),
    "opaque objects": ({"x": ROWS(2), "images": [slice(1), range(2)]}, 2, {'batch["images"]'}),
    "per-sample lists": ({"x": ROWS(2), "words": [["a", "b"], ["c"]]}, 2, {'batch["words"]'}),
    "views of listed samples": ({"x": EIGHT, "v": [NAMES, NAMES]}, 8, {'batch["v"][0]', 'batch["v"][1]'}),
    "text only": (["a", "b", "c"], 3, {"batch"}),
    "text and numbers": ({"text": ["a", "b"], "label": [0, 1], "k": [1, 2, 3]}, 2, {'batch["text"]', 'batch["label"]'}),
    "unlike list as long as the batch": ({"x": ROWS(2), "o": ["bilinear", 3]}, 2, set()),
    "a shape": ({"x": ROWS(2), "shape": torch.Size([4, 4])}, 2, set()),
    "two targets of two boxes": ({"x": ROWS(2, 3, 4, 4), "pair": targets(2, 2)}, 2, {'batch["pair"]'}),
    "sparse samples": ({"x": ROWS(2), "graphs": [ROWS(4, 4).to_sparse()] * 2}, 2, {'batch["graphs"]'}),
}


@pytest.mark.parametrize(("batch", "count", "samples"), CASES.values(), ids=CASES)
def test_reading(batch: Any, count: int, samples: set[str]) -> None:
    """Each kind of batch is read as the rules at the head of the module say."""
    found, lists = read(batch, {})
    assert found == count
    assert {path for path, reading in lists.items() if reading == "samples"} == samples
    assert "unclear" not in lists.values()


UNCLEAR: dict[str, Any] = {
    "pair beside two rows": {"x": ROWS(2), "pair": [ROWS(2), ROWS(2)]},
    "three equal images": {"x": ROWS(3), "pair": images(5, 5, 5)},
}


@pytest.mark.parametrize("batch", UNCLEAR.values(), ids=UNCLEAR)
def test_coincidences_count_but_stay_unclear(batch: Any) -> None:
    """Entries, rows and samples of one number can be counted, and are marked as readable both ways."""
    assert read(batch, {}) == (len(batch["x"]), {'batch["pair"]': "unclear"})


@pytest.mark.parametrize("reading", ["samples", "fields"])
@pytest.mark.parametrize("batch", UNCLEAR.values(), ids=UNCLEAR)
def test_an_earlier_reading_settles_coincidences(batch: Any, reading: Any) -> None:
    """What an earlier batch has shown of a list holds for a later one that could be read both ways."""
    assert read(batch, {'batch["pair"]': reading}) == (len(batch["x"]), {'batch["pair"]': reading})


@pytest.mark.parametrize(
    "batch", [[ROWS(9)] * 11, [(ROWS(9), ROWS(9))] * 4, {"tokens": [ROWS(9)] * 4}, [[1, 2], [ROWS(3, 2)] * 5]]
)
def test_many_tensors_of_one_length_are_a_riddle(batch: Any) -> None:
    """Length-bucketed samples look like fields: split along time they would train on, wrong and silent."""
    with pytest.raises(InvalidBatch, match="nothing tells which of the two is the number of samples"):
        read(batch, {})


def test_an_earlier_reading_solves_the_riddle() -> None:
    """A runner reads lists as its plan's example was read, also where all lengths agree by chance."""
    assert read({"tokens": [ROWS(9)] * 4}, {'batch["tokens"]': "samples"})[0] == 4
    assert read({"tokens": [ROWS(9)] * 4}, {'batch["tokens"]': "fields"})[0] == 9


def test_an_earlier_reading_tells_a_single_image_from_channels() -> None:
    """One image of a list that held images is one sample, where alone it would be three rows."""
    assert read(images(5), {})[0] == 3
    assert read(images(5), {"batch": "samples"})[0] == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": EIGHT, "y": [ROWS(8), ROWS(7)]}, 'batch["x"] has 8, batch["y"][1] has 7;'),
        ((EIGHT, ROWS(7, 3)), "batch[0] has 8, batch[1] has 7;"),
        ([EIGHT, ROWS(7, dtype=torch.long)], "batch[0] has 8, batch[1] has 7;"),
        ({"x": EIGHT, "weight": ROWS(10)}, 'batch["x"] has 8, batch["weight"] has 10;'),
        ({"x": EIGHT, "targets": targets(1, 2)}, 'batch["x"] has 8, batch["targets"][0]["boxes"] has 1,'),
        ((images(5, 6, 7), targets(1, 2)), 'batch[0] has 3, batch[1][0]["boxes"] has 1, batch[1][1]["boxes"] has 2;'),
        ({"text": ["a", "b"], "more": ["a"]}, 'batch["text"] has 2, batch["more"] has 1;'),
        (ROWS(0, 3), "batch has 0 samples"),
        ({"x": np.zeros((0, 3))}, 'batch["x"] has 0 samples'),
        (torch.tensor(3.0), "no samples to count"),
        ({}, "no samples to count"),
        ([], "no samples to count"),
        ([1, 2], "no samples to count"),
        ({"a": "text", "b": None}, "no samples to count"),
        ({"x": ROWS(3, 3).to_sparse()}, 'batch["x"] is a sparse_coo tensor'),
        ({"x": torch.nn.utils.rnn.pack_sequence([ROWS(3, 1), ROWS(2, 1)])}, 'batch["x"] is a PackedSequence'),
    ],
)
def test_errors_name_paths_and_sizes(batch: Any, message: str) -> None:
    """What cannot be counted is refused in one line that says where and how many."""
    with pytest.raises(InvalidBatch) as caught:
        read(batch, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)  # torch's own, on the first one made
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    """A nested tensor has no rows to view, of either layout."""
    with pytest.raises(InvalidBatch, match="batch is a nested tensor"):
        read(torch.nested.nested_tensor([ROWS(2), ROWS(3)], layout=layout), {})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_unequal_rows_are_never_counted(sizes: list[int]) -> None:
    """A dict of tensors has a count exactly where all sizes are equal; else up to four of the sizes are named."""
    batch = {str(index): ROWS(size) for index, size in enumerate(sizes)}
    if len(set(sizes)) == 1:
        assert read(batch, {})[0] == sizes[0]
        return
    with pytest.raises(InvalidBatch) as caught:
        read(batch, {})
    assert sum(f" has {size}" in str(caught.value) for size in set(sizes)) == min(4, len(set(sizes)))
