"""Trees: every container is flattened and rebuilt in its own type, and the user's objects are not written to."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from autobatch.batch.tree import (
    fields_of,
    map_tensors,
    tensors_of,
    with_fresh_containers,
)
from autobatch.errors import InvalidArgument

pytestmark = pytest.mark.quick

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - the untyped kind is what old code uses


@dataclass(frozen=True)
class Frozen:
    x: Any
    kept: str = field(default="", init=False)


@dataclass(slots=True)
class Slotted:
    x: Any
    never_set: int = field(init=False)


class Encoding(UserDict[str, Any]):
    """As tokenizers return it: more than its entries."""

    def __init__(self, data: dict[str, Any], *, length: int) -> None:
        super().__init__(data)
        self.length = length


class Growing(list[Any]):
    note = ""


class Foreign(Mapping[str, Any]):
    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Closed(Foreign):
    def __init__(self, path: str, entries: dict[str, Any]) -> None:
        super().__init__(entries)


X = torch.arange(4.0)


def growing() -> Growing:
    """A list subclass with an attribute of its own."""
    entries = Growing([X, "s"])
    entries.note = "n"
    return entries


TREES = {
    "dict": {"x": X, 1: "s"},
    "ordered": OrderedDict(x=X),
    "defaultdict": defaultdict(list, x=X),
    "user dict": Encoding({"x": X}, length=4),
    "proxy": types.MappingProxyType({"x": X}),
    "foreign mapping": Foreign({"x": X}),
    "list": [X, "s"],
    "list subclass": growing(),
    "tuple": (X, 3),
    "namedtuple": Pair(X, None),
    "max": X.reshape(2, 2).max(dim=0),
    "frozen": Frozen(X),
    "slotted": Slotted(X),
    "deep": {"a": [(Frozen(Pair(X, {"b": X})),)]},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_map_keeps_types_and_originals(tree: Any) -> None:
    """A mapped tree has the same type and the new tensors, and the original still holds its own."""
    before = [tensor.clone() for tensor in tensors_of(tree)]
    mapped = map_tensors(tree, lambda tensor: tensor + 1)
    assert type(mapped) is type(tree)
    assert [suffix for suffix, _ in fields_of(mapped)] == [suffix for suffix, _ in fields_of(tree)]
    assert all(torch.equal(new, old + 1) for new, old in zip(tensors_of(mapped), before, strict=True))
    assert all(torch.equal(kept, old) for kept, old in zip(tensors_of(tree), before, strict=True))


def test_what_is_beside_the_entries_is_kept() -> None:
    """Default factories, attributes and fields that no constructor takes come along."""
    frozen = Frozen(X)
    object.__setattr__(frozen, "kept", "set later")
    assert map_tensors(frozen, torch.neg).kept == "set later"
    assert map_tensors(TREES["defaultdict"], torch.neg).default_factory is list
    assert map_tensors(TREES["user dict"], torch.neg).length == 4
    assert map_tensors(TREES["list subclass"], torch.neg).note == "n"
    assert not hasattr(map_tensors(TREES["slotted"], torch.neg), "never_set")


def test_a_mapping_that_cannot_be_made_says_so() -> None:
    """A foreign mapping with another constructor is refused by name."""
    with pytest.raises(InvalidArgument, match="a Closed cannot be made from a dict"):
        map_tensors(Closed("p", {"x": X}), torch.neg)


def test_paths_are_what_one_would_type() -> None:
    """Each way down is spelled as Python would."""
    assert [suffix for suffix, _ in fields_of({"x": 0, 'a"b': 0, 3: 0, (1, 2): 0})] == [
        '["x"]',
        '["a\\"b"]',
        "[3]",
        "[(1, 2)]",
    ]
    assert [suffix for suffix, _ in fields_of(Pair(0, 0))] == [".left", ".right"]
    assert [suffix for suffix, _ in fields_of(Frozen(0))] == [".x", ".kept"]


class Ordered(tuple):  # noqa: SLOT001 - with attributes
    """A tuple that says in which order its samples are."""


@pytest.mark.parametrize("nested", [False, True], ids=["outside", "inside"])
def test_containers_of_its_own_have_the_attributes_of_the_users(nested: bool) -> None:
    """What ``cut`` and ``weigh`` are called with is the batch, with all that it carries."""
    batch = Ordered((torch.arange(3), [torch.arange(3)]))
    batch.order = [[2], [0, 1]]
    fresh = with_fresh_containers([batch] if nested else batch)
    found = fresh[0] if nested else fresh
    assert type(found) is Ordered
    assert found is not batch
    assert found.order is batch.order
    assert found[1] is not batch[1]
