"""Layout rules: which lists are samples and which are fields, case by case, and what the errors say."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.batch.samples import describe
from autobatch.batches import Fields, Samples
from autobatch.errors import InvalidArgument

ROWS = torch.zeros


def read(batch: Any, lists: dict[str, Any], samples: int | None = None) -> tuple[int, dict[str, Any]]:
    """The number of samples, and what each list holds."""
    layout = describe(batch, lists, samples)
    return layout.count, dict(layout.lists)


@dataclass
class Sequence:
    tokens: Any
    labels: Any


class Pair(NamedTuple):
    tokens: Any
    labels: Any


def ids(*lengths: int) -> torch.Tensor:
    return ROWS(*lengths, dtype=torch.long)


def images(*sizes: int, channels: int = 3) -> list[torch.Tensor]:
    """Images of these heights, each 7 wide."""
    return [ROWS(channels, size, 7) for size in sizes]


def targets(*boxes: int) -> list[dict[str, torch.Tensor]]:
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
    "x and x of an autoencoder": ((EIGHT, EIGHT), 8, set()),
    "x, y and weight alike": ((EIGHT, EIGHT, EIGHT), 8, set()),
    "three series": ([ROWS(8, 96, 7), ROWS(8, 24, 7), ROWS(8, 24, 1)], 8, set()),
    "three series of three samples": ((ROWS(3, 96, 7), ROWS(3, 24, 7), ROWS(3, 24, 1)), 3, set()),
    "a list of one tensor": ([EIGHT], 8, set()),
    "multi-crop": ([ROWS(8, 3, 22, 22)] * 2 + [ROWS(8, 3, 9, 9)] * 6, 8, set()),
    "multi-crop of two": ([ROWS(8, 3, 22, 22), ROWS(8, 3, 9, 9)], 8, set()),
    "pairs of sentences beside labels": ([{"ids": ROWS(8, 5)}, {"ids": ROWS(8, 7)}, ids(8)], 8, set()),
    "pairs of sentences, marked": (Fields([{"ids": ROWS(8, 5)}, {"ids": ROWS(8, 7)}]), 8, set()),
    "queries and documents": ([{"query": ROWS(8, 5)}, {"document": ROWS(8, 7)}], 8, set()),
    "two sample dicts of one length": ([{"x": ROWS(12, 4), "y": ids(12)}] * 2, 2, {"batch"}),
    "three sample dicts of one length": ([{"x": ROWS(12), "y": ROWS(12)}] * 3, 3, {"batch"}),
    "two sample tuples of one length": ([(ROWS(12, 4), ids(12))] * 2, 2, {"batch"}),
    "three sample tuples of two like tensors": ([(ROWS(12), ROWS(12))] * 3, 3, {"batch"}),
    "two sample tuples of three": ([(ROWS(12), ids(12), ROWS(12, 2))] * 2, 2, {"batch"}),
    "two dataclasses": ([Sequence(ids(12), ids(12))] * 2, 2, {"batch"}),
    "two namedtuples": ([Pair(ids(12), ids(12))] * 2, 2, {"batch"}),
    "two samples in samples": ([{"a": {"x": ROWS(12)}, "b": [ROWS(12), ids(12)]}] * 2, 2, {"batch"}),
    "two samples of arrays": ([{"x": np.zeros((12, 3)), "y": np.zeros(12)}] * 2, 2, {"batch"}),
    "two samples with lists of words": ([{"x": ROWS(12), "w": ["a"]}, {"x": ROWS(12), "w": ["b", "c"]}], 2, {"batch"}),
    "two samples as lists": ([[ROWS(12, 4), ids(12)], [ROWS(9, 4), ids(9)]], 2, {"batch"}),
    "two images with labels": ([(ROWS(3, 6, 6), 1), (ROWS(3, 6, 6), 2)], 2, {"batch"}),
    "two images with targets": ([(ROWS(3, 6, 6), targets(2)[0]), (ROWS(3, 9, 6), targets(0)[0])], 2, {"batch"}),
    "two images with texts": ([{"image": ROWS(3, 6, 6), "text": text} for text in "ab"], 2, {"batch"}),
    "one image with its label": ([(ROWS(3, 6, 6), 1)], 1, {"batch"}),
    "one sample of unequal lengths": ([{"x": ROWS(12), "y": ROWS(5)}], 1, {"batch"}),
    "two sequences of unequal length": ([ROWS(8, 3), ROWS(7, 3)], 2, {"batch"}),
    "what a dataset gives: tuples of one length": ([(ROWS(9), ROWS(9))] * 4, 4, {"batch"}),
    "marked samples": (Samples([EIGHT, EIGHT]), 2, {"batch"}),
    "marked fields": (Fields([EIGHT, EIGHT]), 8, set()),
    "marked below": ({"views": Samples([EIGHT] * 5), "crops": Fields([ROWS(5, 2)] * 2)}, 5, {'batch["views"]'}),
    "marked fields of listed samples": (
        Fields([[ROWS(5), ROWS(7)], [ROWS(6), ROWS(4)]]),
        2,
        {"batch[0]", "batch[1]"},
    ),
    "images of one size beside targets": (([ROWS(3, 6, 6)] * 2, targets(3, 3)), 2, {"batch[0]", "batch[1]"}),
    "tupled images of one size and targets": (
        ((ROWS(3, 6, 6), ROWS(3, 6, 6)), tuple(targets(3, 1))),
        2,
        {"batch[0]", "batch[1]"},
    ),
    "one image and its target": (([ROWS(3, 6, 6)], targets(2)), 1, {"batch[0]", "batch[1]"}),
    "tupled image and target": (((ROWS(3, 6, 6),), tuple(targets(2))), 1, {"batch[0]", "batch[1]"}),
    "one sequence and its target": (([ROWS(12)], targets(2)), 1, {"batch[0]", "batch[1]"}),
    "images and masks of one size": (([ROWS(3, 8, 8)] * 2, [ROWS(8, 8)] * 2), 2, {"batch[0]", "batch[1]"}),
    "images and masks by name": ({"i": [ROWS(3, 8, 8)] * 2, "m": [ids(8, 8)] * 2}, 2, {'batch["i"]', 'batch["m"]'}),
    "crops and views": ({"c": [ROWS(8, 3, 9, 9), ROWS(8, 3, 5, 5)], "v": [ROWS(8)] * 3}, 8, set()),
    "lists of one tensor each": ({"a": [EIGHT], "b": [ROWS(8, 5)]}, 8, set()),
    "one row in a tuple in a dict": ([{"in": (ROWS(1, 5),)}, ROWS(1)], 1, set()),
    "one row in a list in a dict": ({"in": [ROWS(1, 5)], "y": ROWS(1)}, 1, set()),
    "one row in tuples": ({"in": ((ROWS(1, 5), ROWS(1, 2)),), "y": ROWS(1)}, 1, set()),
    "one image of one channel as an argument": ({"in": (ROWS(1, 28, 28),), "y": ROWS(1)}, 1, set()),
    "one image with one box": ({"x": ROWS(1, 3, 4, 4), "t": targets(1)}, 1, {'batch["t"]'}),
    "text samples": ([{"text": "a", "label": 0}, {"text": "b", "label": 1}], 2, {"batch"}),
    "texts with numbers": ([("a", 0), ("b", 1)], 2, {"batch"}),
    "pairs of texts": ([("a", "b")] * 5, 5, {"batch"}),
    "token numbers that are no tensors": ([[1, 2, 3], [4, 5]], 2, {"batch"}),
    "objects": ([slice(1), range(2), slice(2)], 3, {"batch"}),
    "objects and numbers": ({"image": [slice(1), slice(2)], "label": [0, 1]}, 2, {'batch["image"]', 'batch["label"]'}),
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


@pytest.mark.parametrize("reading", ["samples", "fields"])
def test_everything_that_was_read_can_be_looked_up(reading: Any) -> None:
    """Also lists and tuples of unlike entries, and lists that say it themselves."""
    assert read((EIGHT, ids(8)), {})[1] == {"batch": "fields"}
    kind = {"samples": Samples, "fields": Fields}[reading]
    assert read({"pair": kind([EIGHT] * 8)}, {})[1] == {'batch["pair"]': reading}


# batch, where it is unclear
AMBIGUOUS: dict[str, tuple[Any, str]] = {
    "two tensors of one shape": ([EIGHT, EIGHT], "batch"),
    "two arrays of one shape": ([np.zeros((8, 2)), np.zeros((8, 2))], "batch"),
    "three tensors of one shape": ([EIGHT] * 3, "batch"),
    "two tensors of one row": ([ROWS(1, 5), ROWS(1, 5)], "batch"),
    "many tensors of one length": ([ROWS(9)] * 11, "batch"),
    "many tensors of one length in a tuple": ((ROWS(9),) * 5, "batch"),
    "two views of images": ([ROWS(8, 3, 9, 9)] * 2, "batch"),
    "videos": ([ROWS(3, 16, 9, 9), ROWS(3, 12, 9, 9), ROWS(3, 10, 9, 9), ROWS(3, 9, 9, 9)], "batch"),
    "two images": (images(5, 6), "batch"),
    "one image": (images(5), "batch"),
    "nested tensors of one length": ({"tokens": [ROWS(9)] * 4}, 'batch["tokens"]'),
    "two nested tensors of one length": ({"tokens": [ROWS(9)] * 2}, 'batch["tokens"]'),
    "images and masks of two rows": ({"i": [ROWS(2, 8, 8)] * 2, "m": [ids(2, 8)] * 2}, 'batch["i"]'),
    "images of one size and numbers": ({"i": [ROWS(3, 8, 8)] * 2, "m": [1, 2]}, 'batch["i"]'),
    "spectrograms": ({"audio": [ROWS(80, 30), ROWS(80, 45)]}, 'batch["audio"]'),
    "images of one size beside names": (((ROWS(3, 6, 6),) * 2, ("a", "b")), "batch[0]"),
    "tokens beside names": (((ids(12), ids(12)), ("a", "b")), "batch[0]"),
    "unlike fields, and many tensors in one": ([[1, 2], [ROWS(3, 2)] * 5], "batch[1]"),
    "a tuple of two dicts": (({"ids": ids(8, 5)}, {"ids": ids(8, 7)}), "batch"),
    "a tuple of two tuples": (((ROWS(12, 4), ids(12)), (ROWS(12, 4), ids(12))), "batch"),
    "two lists of inputs and labels": ([[ROWS(12, 4), ids(12)], [ROWS(12, 4), ids(12)]], "batch"),
    "two lists of two like tensors": ([[ROWS(12), ROWS(12)]] * 2, "batch"),
    "sources and targets of unequal lengths": (((ids(5), ids(7)), (ids(6), ids(4))), "batch"),
    "columns of four samples": ([(ids(5), ids(7), ids(3), ids(2)), (ids(6), ids(4), ids(4), ids(9))], "batch"),
    "many with something optional": ([{"a": ids(12), "b": ids(12)}] * 3 + [{"a": ids(12)}], "batch"),
    "one dict": ([{"ids": ids(8, 5)}], "batch"),
    "one tuple": ([(EIGHT, ids(8))], "batch"),
    "two pairs of texts": ([("a", "b"), ("c", "d")], "batch"),
    "one dict of lists": ([{"text": ["a", "b"]}], "batch"),
}


@pytest.mark.parametrize(("batch", "path"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_can_be_read_in_two_ways_is_asked(batch: Any, path: str) -> None:
    """No reading is guessed: the error names the list, and both lines that can be pasted."""
    with pytest.raises(InvalidArgument) as caught:
        read(batch, {})
    message = str(caught.value)
    assert message.startswith(f"{path} is a ")
    assert f"pass autobatch.batches.Samples({path}) or autobatch.batches.Fields({path})" in message
    assert "\n" not in message


@pytest.mark.parametrize(("batch", "path"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_the_error_advises_is_taken(batch: Any, path: str) -> None:
    """With the list marked as samples the batch has as many as the list; an earlier reading does the same."""
    entries = eval(path, {"batch": batch})
    assert read(Samples(entries), {}) == (len(entries), {"batch": "samples"})
    assert read(entries, {"batch": "samples"}) == (len(entries), {"batch": "samples"})


@pytest.mark.parametrize("name", ["two tensors of one shape", "many tensors of one length", "a tuple of two dicts"])
def test_marked_as_fields_the_rows_are_the_samples(name: str) -> None:
    """Marked as fields the batch has as many samples as its tensors have rows."""
    batch, _ = AMBIGUOUS[name]
    rows = {"two tensors of one shape": 8, "many tensors of one length": 9, "a tuple of two dicts": 8}[name]
    assert read(Fields(batch), {})[0] == rows
    assert read(batch, {"batch": "fields"})[0] == rows


def test_a_mark_outweighs_an_earlier_reading() -> None:
    """Who marks a list knows better than the plan's example."""
    assert read(Samples([EIGHT, EIGHT]), {"batch": "fields"})[0] == 2
    assert read(Fields([EIGHT, EIGHT]), {"batch": "samples"})[0] == 8


def test_a_known_number_of_samples_decides() -> None:
    """Whoever collated the batch knows how many samples went in, and so which reading is right."""
    assert read([EIGHT, EIGHT], {}, 8) == (8, {"batch": "fields"})
    assert read([EIGHT, EIGHT], {}, 2) == (2, {"batch": "samples"})
    assert read([{"ids": ROWS(8, 5)}, {"ids": ROWS(8, 7)}], {}, 8) == (8, {"batch": "fields"})
    assert read([ROWS(2), ROWS(2)], {}, 2) == (2, {"batch": "unclear"})


def test_an_earlier_reading_shows_that_a_single_image_is_no_batch_of_channels() -> None:
    """One image of a list that held images is one sample, where alone it may also be three rows."""
    assert read(images(5), {"batch": "samples"})[0] == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": EIGHT, "y": [ROWS(8), ROWS(7)]}, 'batch["x"] has 8, batch["y"][1] has 7;'),
        ((EIGHT, ROWS(7, 3)), "batch[0] has 8, batch[1] has 7;"),
        ([EIGHT, ROWS(7, dtype=torch.long)], "batch[0] has 8, batch[1] has 7;"),
        ({"x": EIGHT, "weight": ROWS(10)}, 'batch["x"] has 8, batch["weight"] has 10;'),
        ({"x": EIGHT, "targets": targets(1, 2)}, 'batch["x"] has 8, batch["targets"][0]["boxes"] has 1,'),
        ((images(5, 6, 7), targets(1, 2)), "batch[0] has 3, batch[1] has 2;"),
        ([{"x": ROWS(8)}, {"x": ROWS(7), "y": ROWS(7)}], 'batch[0]["x"] has 8, batch[1]["x"] has 7;'),
        ({"text": ["a", "b"], "more": ["a"]}, 'batch["text"] has 2, batch["more"] has 1;'),
        (ROWS(0, 3), "batch has 0 samples"),
        ({"x": np.zeros((0, 3))}, 'batch["x"] has 0 samples'),
        (torch.tensor(3.0), "no samples to count"),
        ({}, "no samples to count"),
        ([], "no samples to count"),
        ([1, 2], "no samples to count"),
        ({"a": "text", "b": None}, "no samples to count"),
        (SimpleNamespace(x=EIGHT), "a SimpleNamespace is no container that autobatch knows: pass a dict"),
        (SimpleNamespace(x=EIGHT), "autobatch.batches.register(SimpleNamespace, count=..., take=...)"),
        ({"graph": SimpleNamespace(x=EIGHT), "k": 3}, "a SimpleNamespace is no container"),
        ({"x": ROWS(3, 3).to_sparse()}, 'batch["x"] is a sparse_coo tensor'),
        ({"x": torch.nn.utils.rnn.pack_sequence([ROWS(3, 1), ROWS(2, 1)])}, 'batch["x"] is a PackedSequence'),
    ],
)
def test_errors_name_paths_and_sizes(batch: Any, message: str) -> None:
    """What cannot be counted is refused in one line that says where and how many."""
    with pytest.raises(InvalidArgument) as caught:
        read(batch, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)  # torch's own, on the first one made
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    """A nested tensor has no rows to view, of either layout."""
    with pytest.raises(InvalidArgument, match="batch is a nested tensor"):
        read(torch.nested.nested_tensor([ROWS(2), ROWS(3)], layout=layout), {})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_unequal_rows_are_never_counted(sizes: list[int]) -> None:
    """A dict of tensors has a count exactly where all sizes are equal; else up to four of the sizes are named."""
    batch = {str(index): ROWS(size) for index, size in enumerate(sizes)}
    if len(set(sizes)) == 1:
        assert read(batch, {})[0] == sizes[0]
        return
    with pytest.raises(InvalidArgument) as caught:
        read(batch, {})
    assert sum(f" has {size}" in str(caught.value) for size in set(sizes)) == min(4, len(set(sizes)))
