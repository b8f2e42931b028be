"""Batches joined with their neighbours: only where the batch of all their samples is known."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.batch.cut import cut_apart, cut_joined, divide
from autobatch.batch.samples import describe


class Pair(NamedTuple):
    inputs: torch.Tensor
    labels: torch.Tensor


@dataclass
class Fields:
    inputs: torch.Tensor
    names: list[str]


@dataclass
class Marked:
    """One that a collate function may hang something on."""

    inputs: torch.Tensor


class Image(torch.Tensor):
    """A tensor with a meaning of its own, as torchvision's are."""


class Encoding(UserDict):
    """A mapping with something beside its data, as a tokenizer's is."""

    def __init__(self, data: Any, encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


def rows(count: int, first: int = 0, width: int = 3, **options: Any) -> torch.Tensor:
    return torch.arange(first, first + count).float().repeat(width, 1).T.contiguous().to(**options)


def texts(count: int, first: int = 0) -> list[str]:
    return [f"text {index}" for index in range(first, first + count)]


def pictures(count: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Images of unlike size, as detection has them."""
    return [{"image": torch.full((3, 4 + index % 3, 5), float(index))} for index in range(first, first + count)]


def describe_all(batches: Any) -> list[Any]:
    """Each read as those before it, as a Runner does."""
    layouts: list[Any] = []
    for batch in batches:
        layouts.append(describe(batch, layouts[-1].lists if layouts else None))
    return layouts


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal in type, containers and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.dtype == other.dtype and np.array_equal(np.asarray(one), np.asarray(other))
    if isinstance(one, dict | UserDict):
        return [*one] == [*other] and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return same(vars(one), vars(other)) if isinstance(one, Fields | Marked) else bool(one == other)


MAKE = {
    "tensor": lambda n, first=0: rows(n, first),
    "pair": lambda n, first=0: (rows(n, first), torch.arange(first, first + n)),
    "pair in a list": lambda n, first=0: [rows(n, first), torch.arange(first, first + n)],
    "dict": lambda n, first=0: {"x": rows(n, first), "more": {"y": rows(n, first, 2).double()}},
    "ordered dict": lambda n, first=0: OrderedDict(x=rows(n, first)),
    "user dict": lambda n, first=0: Encoding({"x": rows(n, first)}),
    "namedtuple": lambda n, first=0: Pair(rows(n, first), torch.arange(first, first + n)),
    "dataclass": lambda n, first=0: Fields(rows(n, first), texts(n, first)),
    "detection": lambda n, first=0: pictures(n, first),
    "images and targets": lambda n, first=0: (
        [torch.full((3, 4 + i % 2, 9), float(i)) for i in range(first, first + n)],
        [{"boxes": torch.full((i % 3, 4), float(i)), "label": i} for i in range(first, first + n)],
    ),
    "arrays": lambda n, first=0: {"x": rows(n, first).numpy(), "names": np.array(texts(n, first), dtype=object)},
    "shared": lambda n, first=0: {"x": rows(n, first), "task": "rank", "mask": None, "train": True},
    "channels last": lambda n, first=0: rows(n, first, 24).view(n, 2, 3, 4).to(memory_format=torch.channels_last),
}


def join(layouts: Any) -> Any:
    return cut_joined(layouts)


def make_part(group: Any, start: int, stop: int) -> Any:
    [part] = divide(group._replace(rows=range(start, stop)), stop - start)
    return part


def make_micro_batch(layout: Any, start: int, stop: int) -> Any:
    return make_part(layout, start, stop).take(torch.clone, torch.device("cpu"))


@pytest.mark.parametrize("kind", MAKE)
@given(counts=st.lists(st.integers(2, 5), min_size=2, max_size=5), cuts=st.lists(st.integers(0, 25), max_size=4))
def test_any_part_is_that_of_a_loader_with_larger_batches(kind, counts, cuts):
    """Wherever it begins and ends, in as few or as many batches."""
    starts = [sum(counts[:index]) for index in range(len(counts))]
    layouts = describe_all(MAKE[kind](count, start) for count, start in zip(counts, starts, strict=True))
    [whole] = cut_apart([describe(MAKE[kind](sum(counts)), layouts[0].lists)])
    [joined] = join(layouts)
    assert joined.rows == whole.rows
    bounds = sorted({0, len(joined.rows), *(cut % len(joined.rows) for cut in cuts)})
    for start, stop in pairwise(bounds):
        assert same(make_part(joined, start, stop).samples(), whole.batch.take(range(start, stop)))
        assert same(*(make_micro_batch(layout, start, stop) for layout in (joined, whole)))


APART = {
    "another width": [rows(2), rows(2, width=4)],
    "another dtype": [rows(2), rows(2).double()],
    "another device": [rows(2), torch.zeros(2, 3, device="meta")],
    "a gradient is asked for in one": [rows(2), rows(2).requires_grad_()],
    "other keys": [{"x": rows(2)}, {"x": rows(2), "y": rows(2)}],
    "keys in another order": [{"x": rows(2), "y": rows(2)}, {"y": rows(2), "x": rows(2)}],
    "another container": [(rows(2), rows(2).long()), [rows(2), rows(2).long()]],
    "a number, which may count samples": [{"x": rows(2), "items": 2}, {"x": rows(2), "items": 2}],
    "a scalar tensor": [{"x": rows(2), "items": torch.tensor(2)}, {"x": rows(2), "items": torch.tensor(2)}],
    "another text": [{"x": rows(2), "task": "a"}, {"x": rows(2), "task": "b"}],
    "nothing in one": [{"x": rows(2), "mask": None}, {"x": rows(2), "mask": rows(2)}],
    "tensors of a kind of their own": [rows(2).as_subclass(Image), rows(2).as_subclass(Image)],
    "masked arrays": [np.ma.masked_array(np.zeros((2, 3)), mask=True), np.ma.masked_array(np.zeros((2, 3)))],
    "arrays of another dtype": [np.zeros((2, 3)), np.zeros((2, 3), dtype=np.float32)],
    "an object": [{"x": rows(2), "more": object()}, {"x": rows(2), "more": object()}],
    "something beside the data": [Encoding({"x": rows(2)}, [1, 2]), Encoding({"x": rows(2)}, [3, 4])],
    "a set": [{"x": rows(2), "more": {1}}, {"x": rows(2), "more": {1}}],
}


@pytest.mark.parametrize("case", APART)
def test_what_is_not_known_to_be_one_batch_stays_apart(case):
    """Each is then divided by itself, as the very layout that it was."""
    layouts = describe_all(APART[case])
    assert [group.batch for group in join(layouts)] == layouts


def test_samples_of_one_batch_are_not_copied():
    """Views, as of a batch that is not joined."""
    batches = [rows(4), rows(4, 4)]
    [joined] = join(describe_all(batches))
    assert make_part(joined, 5, 7).samples().data_ptr() == batches[1][1:].data_ptr()


@pytest.mark.parametrize("make", [rows, lambda n, first=0: rows(n, first).requires_grad_()])
def test_a_whole_batch_is_a_tensor_of_the_step_s_own(make):
    """A micro-batch that is one of the user's batches, joined or not, does not hold the user's tensor."""
    batches = [make(2), make(2, 2)]
    layouts = describe_all(batches)
    for group, start, index in ((cut_joined(layouts)[0], 2, 1), (cut_apart(layouts)[0], 0, 0)):
        taken = make_part(group, start, start + 2).take(lambda tensor: tensor, torch.device("cpu"))
        assert taken is not batches[index]
        assert taken.data_ptr() == batches[index].data_ptr()
        assert taken.is_leaf


def test_a_leaf_that_requires_a_gradient_is_joined_to_one():
    """As every micro-batch's tensor: without a graph to the given ones."""
    [joined] = join(describe_all([rows(2).requires_grad_(), rows(2).requires_grad_()]))
    taken = make_part(joined, 0, 4).samples()
    assert taken.requires_grad
    assert taken.is_leaf
