"""Batches are taken apart and put together; each is read by its own containers and values."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from typing import NamedTuple

import pytest
import torch
from workloads import cut

from autobatch.batch.cut import Group, divide
from autobatch.batch.samples import Layout, describe
from autobatch.errors import InvalidArgument

pytestmark = pytest.mark.quick


class Pair(NamedTuple):
    inputs: torch.Tensor
    labels: torch.Tensor


def rows(n=4, width=3):
    return torch.arange(n * width, dtype=torch.float32).reshape(n, width)


BATCHES = {
    "a tensor pair": lambda: (rows(), torch.arange(4)),
    "a dict": lambda: {"x": rows(), "y": torch.arange(4)},
    "a list of fields": lambda: [rows(), torch.arange(4)],
    "nested, with values": lambda: {"x": (rows(), {"z": rows(width=2)}), "name": "train", "epoch": 3, "none": None},
    "a scalar tensor": lambda: (rows(), torch.tensor(2.0)),
    "a lone tensor": rows,
    "a named tuple": lambda: Pair(rows(), torch.arange(4)),
    "an ordered dict": lambda: OrderedDict(x=rows()),
    "a list in a dict": lambda: {"x": [rows()], "y": torch.arange(4)},
    "a parameter": lambda: (torch.nn.Parameter(rows()),),
    "an object": lambda: (rows(), object()),
    "a deque": lambda: (rows(), deque([1, 2])),
    "a user dict": lambda: UserDict(x=rows()),
}


@pytest.mark.parametrize("name", BATCHES)
def test_leaves_come_back_in_containers_of_their_own(name):
    """The same types, keys and values, and no container of the user's."""
    batch = BATCHES[name]()
    layout = describe(batch)
    built = layout.rebuild([leaf.value for leaf in layout.leaves])
    again = describe(built, layout.lists)
    assert [leaf.path for leaf in again.leaves] == [leaf.path for leaf in layout.leaves]
    assert all(one.value is other.value for one, other in zip(layout.leaves, again.leaves, strict=True))
    assert type(built) is type(batch)
    assert built is not batch or isinstance(batch, tuple | torch.Tensor)


OTHERS = {
    "another key": ({"x": rows()}, {"y": rows()}),
    "another order of keys": ({"x": rows(), "y": rows()}, {"y": rows(), "x": rows()}),
    "another length": ((rows(), rows()), (rows(), rows(), rows())),
    "another container": ((rows(), torch.arange(4)), [rows(), torch.arange(4)]),
    "a parameter instead": ((rows(),), (torch.nn.Parameter(rows()),)),
    "a dict instead": ((rows(), rows()), (rows(), {"x": rows()})),
    "an array instead": ((rows(),), (rows().numpy(),)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_batch_of_another_kind_is_noticed(name):
    """And read anew, with the same result as if none had come before it."""
    first, second = OTHERS[name]
    assert describe(second, describe(first).lists).count == describe(second).count == 4


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_micro_batches_are_those_of_the_rules(name, sizes):
    """The same samples as ``take`` gives, as leaves that share the batch's memory."""
    batch = BATCHES[name]()
    layout = describe(batch, describe(batch).lists)
    start = 0
    for size, expected in zip(sizes, cut(layout, sizes), strict=True):
        [part] = divide(Group(layout, range(start, start + size)), size)
        found = part.take(lambda tensor: tensor, torch.device("cpu"))
        ours, theirs = Layout(found, size, {}).tensors(), Layout(expected, size, {}).tensors()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            assert one is not other
            assert one.is_leaf
            assert one.data_ptr() == other.data_ptr()
        start += size


@pytest.mark.parametrize(
    "make_wrong",
    [
        lambda: (rows(4), torch.arange(3)),
        lambda: (rows(4), rows(4).to_mkldnn()),
        lambda: (rows(0), torch.arange(0)),
        lambda: (rows(0), torch.arange(4)),
        lambda: (rows(4), torch.arange(0)),
    ],
    ids=["unequal numbers", "a tensor without rows to view", "no samples", "no inputs", "no labels"],
)
def test_a_batch_of_the_same_containers_is_refused_all_the_same(make_wrong):
    """By the rules, with their message."""
    lists = describe((rows(), torch.arange(4))).lists
    with pytest.raises(InvalidArgument):
        describe(make_wrong(), lists)
