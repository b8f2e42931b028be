"""Batches: cutting and growing any tree against an oracle that builds the same tree from chosen samples."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from workloads import cut

from autobatch.batch.samples import Layout, describe, is_empty
from autobatch.batch.tree import fields_of, tensors_of
from autobatch.errors import InvalidArgument
from autobatch.planning.division import choose_rows
from autobatch.training.batches import GivenBatches

# A batch as a function of which of its samples are wanted, in which order.
Build = Callable[[Sequence[int]], Any]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any
    kept: str = field(default="kept", init=False)


class Opaque:
    """Something of the user's that is no container."""


def pick_rows(values: Any) -> Build:
    return lambda wanted: values[list(wanted)]


def pick_entries(kind: Callable[[list[Any]], Any], entries: list[Any]) -> Build:
    return lambda wanted: kind([entries[index] for index in wanted])


def nest_fields(kind: Callable[..., Any], builds: list[Build]) -> Build:
    return lambda wanted: kind(*[build(wanted) for build in builds])


def keyed(kind: type) -> Callable[..., Any]:
    """A mapping whose keys are numbers spelled out."""
    return lambda *values: kind({f"key{index}": value for index, value in enumerate(values)})


def listed(kind: type) -> Callable[..., Any]:
    """A list of fields; its first entry is unlike the others, so that no length can make samples of them."""
    return lambda *values: kind([1.5, "text", *values])


SHAPES = st.lists(st.integers(1, 3), max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool])
SHARED = st.sampled_from([3, 0.5, True, None, "text", b"bytes", torch.tensor(2.0), np.float32(1), Opaque(), {1, 2}])


@st.composite
def leaves(draw: st.DrawFn, count: int) -> Build:
    """A tensor, an array, a list of samples, or something shared."""
    kind = draw(st.sampled_from(["tensor", "array", "targets", "names", "shared"]))
    if kind == "tensor":
        shape, dtype = draw(SHAPES), draw(DTYPES)
        return pick_rows(torch.randint(0, 9, (count, *shape)).to(dtype))
    if kind == "array":
        return pick_rows(np.random.randint(0, 9, (count, *draw(SHAPES))))
    if kind == "targets":
        boxes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        entries = [{"boxes": torch.rand(number, 4), "name": str(number)} for number in boxes]
        return pick_entries(draw(st.sampled_from([list, tuple])), entries)
    if kind == "names":
        return pick_entries(list, [f"name{index}" for index in range(count)])
    shared = draw(SHARED)
    return lambda _wanted: shared


def extend(children: st.SearchStrategy[Build]) -> st.SearchStrategy[Build]:
    several = st.lists(children, min_size=1, max_size=3)
    kinds = st.sampled_from([keyed(dict), keyed(OrderedDict), keyed(UserDict), listed(list), listed(tuple)])
    pairs = st.lists(children, min_size=2, max_size=2)
    return st.builds(nest_fields, kinds, several) | st.builds(nest_fields, st.sampled_from([Pair, Frozen]), pairs)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, Build]:
    """A number of samples above every ragged size in the tree, so that no list is readable both ways, and a batch."""
    count = draw(st.integers(4, 8))
    rest = draw(st.recursive(leaves(count), extend, max_leaves=6))
    return count, nest_fields(Pair, [pick_rows(torch.arange(count)), rest])


@st.composite
def divided(draw: st.DrawFn) -> tuple[list[int], Any, Build]:
    """A batch and sizes that sum to its samples."""
    count, build = draw(batches())
    cuts = sorted(draw(st.sets(st.integers(1, count - 1))))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]
    return sizes, build(range(count)), build


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    parts = fields_of(left)
    if parts is None:
        return left is right or left == right
    others = fields_of(right)
    return [key for key, _ in parts] == [key for key, _ in others] and all(
        same(mine, theirs) for (_, mine), (_, theirs) in zip(parts, others, strict=True)
    )


def storages(batch: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch)}


@given(divided())
def test_split_gives_these_samples(case: tuple[list[int], Any, Build]) -> None:
    """Part by part a split holds the samples that stand there, in the batch's own types."""
    sizes, batch, build = case
    stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    parts = cut(describe(batch), sizes)
    assert len(parts) == len(sizes)
    for size, stop, part in zip(sizes, stops, parts, strict=True):
        assert same(part, build(range(stop - size, stop)))
        assert same(describe(batch).take(range(stop - size, stop)), part)


@st.composite
def records(draw: st.DrawFn) -> tuple[int, Build]:
    """From two samples on: a list of containers of one structure, each with tensors of its own or of one length."""
    count = draw(st.integers(2, 5))
    lengths = draw(st.just([6] * count) | st.lists(st.integers(1, 9), min_size=count, max_size=count))
    kind = draw(st.sampled_from([keyed(dict), keyed(OrderedDict), keyed(UserDict), Pair, Frozen, tuple_of]))
    first = [torch.full((length, 2), float(index)) for index, length in enumerate(lengths)]
    is_nested = draw(st.booleans())
    entries = [kind(x, {"y": torch.arange(len(x))} if is_nested else torch.arange(len(x))) for x in first]
    return count, pick_entries(list, entries)


def tuple_of(*values: Any) -> tuple[Any, ...]:
    """A tuple as a container of its arguments."""
    return values


@given(records(), st.data())
def test_a_list_of_records_divides_between_them(case: tuple[int, Build], data: st.DataObject) -> None:
    """Also of two or three, and of one length: parts hold whole records, and read like the whole do so again."""
    count, build = case
    layout = describe(build(range(count)))
    assert (layout.count, layout.lists["batch"]) == (count, "samples")
    first = data.draw(st.integers(1, count - 1))
    parts = cut(layout, [first, count - first])
    assert same(parts[0] + parts[1], layout.batch)
    for part, size in zip(parts, (first, count - first), strict=True):
        again = describe(part, layout.lists)
        assert (again.count, again.lists["batch"]) == (size, "samples")


@given(divided())
def test_a_part_is_read_as_the_whole(case: tuple[list[int], Any, Build]) -> None:
    """Described like the batch it was cut from, each part has its own size, and its lists hold what they held."""
    sizes, batch, _ = case
    layout = describe(batch)
    for size, part in zip(sizes, cut(layout, sizes), strict=True):
        again = describe(part, layout.lists)
        assert again.count == size
        assert dict(again.lists) == dict(layout.lists)


@given(divided())
def test_split_copies_nothing(case: tuple[list[int], Any, Build]) -> None:
    """Every tensor of every part lies in the batch's own memory."""
    sizes, batch, _ = case
    assert all(storages(part) <= storages(batch) for part in cut(describe(batch), sizes))


@given(batches(), st.integers(1, 20))
def test_grow_repeats_in_order(case: tuple[int, Build], n: int) -> None:
    """Sample i of a grown batch is sample i modulo the count, and the original is as it was."""
    count, build = case
    batch = build(range(count))
    assert same(describe(batch).grown(n).batch, build([index % count for index in range(n)]))
    assert same(batch, build(range(count)))


@given(batches(), st.integers(1, 20))
def test_a_grown_batch_counts_what_was_asked(case: tuple[int, Build], n: int) -> None:
    """Described like the original, a grown batch has n samples, also where alone its lists would read otherwise."""
    count, build = case
    layout = describe(build(range(count)))
    assert layout.count == count
    assert describe(layout.grown(n).batch, layout.lists).count == n


@given(batches())
def test_growing_by_nothing_views(case: tuple[int, Build]) -> None:
    """Up to the batch's own count a grown batch takes no memory."""
    count, build = case
    batch = build(range(count))
    assert all(storages(describe(batch).grown(n).batch) <= storages(batch) for n in (1, count))


def test_shared_things_are_the_same_objects() -> None:
    """Whatever has no samples is in every part and every grown batch by reference."""
    shared = {"config": Opaque(), "tags": ["a", "b"], "scale": torch.tensor(2.0), "mean": np.float32(0.5)}
    batch = {"x": torch.zeros(8), **shared, "nested": {"tags": shared["tags"]}}
    for part in (*cut(describe(batch), [5, 3]), describe(batch).grown(20).batch):
        assert all(part[name] is value for name, value in shared.items() if name != "tags")
        assert part["tags"] == shared["tags"]
        assert part["nested"] == batch["nested"]


def test_the_whole_batch_is_itself() -> None:
    """One part of everything is the user's own batch."""
    batch = (torch.zeros(4), torch.zeros(4))
    assert cut(describe(batch), [4])[0] is batch


@pytest.mark.parametrize("n", [1, 2, 5])
def test_growing_keeps_requires_grad_and_reaches_no_original(n: int) -> None:
    """A grown input requires a gradient as its original does, and keeps it to itself."""
    batch = {"x": torch.ones(2, requires_grad=True), "y": torch.ones(2)}
    grown = describe(batch).grown(n).batch
    assert (grown["x"].requires_grad, grown["y"].requires_grad) == (True, False)
    grown["x"].sum().backward()
    assert batch["x"].grad is None
    assert torch.equal(grown["x"].grad, torch.ones(n))


def test_parts_reach_the_original() -> None:
    """A split is differentiable: gradients of parts arrive in the user's input."""
    x = torch.ones(4, requires_grad=True)
    cut(describe(x), [3, 1])[1].sum().backward()
    assert x.grad.tolist() == [0, 0, 0, 1]


@given(samples=st.integers(1, 40), wanted=st.integers(1, 40))
def test_spread_takes_the_chosen_rows(samples: int, wanted: int) -> None:
    """Tensors and lists alike, in order; the original is not written through."""
    batch = {"x": torch.arange(samples), "names": [str(row) for row in range(samples)]}
    part = describe(batch).spread(wanted)
    assert part.batch["x"].tolist() == choose_rows(wanted, samples)
    assert part.batch["names"] == [str(row) for row in choose_rows(wanted, samples)]
    assert part.count == wanted
    part.batch["x"].zero_()
    assert batch["x"].tolist() == list(range(samples))


def test_no_batch_of_nothing() -> None:
    """A batch cannot be grown to no samples."""
    with pytest.raises(InvalidArgument, match="0 samples"):
        describe(torch.zeros(8)).grown(0)


def test_an_unclear_list_is_counted_and_not_divided() -> None:
    """A list readable both ways can be counted and taken whole; dividing it says what to do."""
    batch = {"x": torch.zeros(2), "pair": [torch.zeros(2), torch.zeros(2)]}
    assert describe(batch).count == 2
    assert cut(describe(batch), [2])[0] is batch
    for divide in (lambda: cut(describe(batch), [1, 1]), lambda: describe(batch).grown(4).batch):
        with pytest.raises(InvalidArgument, match=r'batch\["pair"\] has 2 entries, every tensor in it has 2 rows'):
            divide()


def test_a_batch_is_divided_as_an_earlier_one_was() -> None:
    """After a batch that showed its list to be fields, two samples of the same kind divide as fields."""
    earlier = describe({"x": torch.zeros(8), "pair": [torch.zeros(8), torch.zeros(8)]})
    later = describe({"x": torch.zeros(2), "pair": [torch.zeros(2), torch.zeros(2)]}, earlier.lists)
    assert [len(tensor) for tensor in later.take(range(1))["pair"]] == [1, 1]


_ROWS, _FEW = torch.ones(4, 2), torch.ones(4)

FORMS = (
    (_ROWS, _FEW),
    [_ROWS, _FEW],
    (_ROWS[:3], _FEW[:3]),
    (_ROWS, _FEW[:3]),
    (_ROWS, _FEW, _FEW),
    (_ROWS[:0], _FEW[:0]),
    (nn.Parameter(_ROWS), _FEW),
    {"x": _ROWS, "y": _FEW},
    {"y": _FEW, "x": _ROWS},
    {"x": _ROWS, "y": torch.tensor(2.0)},
    {"x": _ROWS, "y": [1, 2, 3, 4]},
    {"x": (_ROWS, _FEW)},
    {"x": _ROWS.to_sparse(), "y": _FEW},
    {1: _ROWS},
    _ROWS,
)


@pytest.mark.parametrize("first", range(len(FORMS)))
def test_a_batch_is_described_as_by_itself_after_any_other(first: int) -> None:
    """Of the same form or another, with the same error where it has no samples to be counted."""

    def tell(describe_one: Callable[[Any], Layout], batch: Any) -> Any:
        try:
            layout = describe_one(batch)
        except InvalidArgument as error:
            return str(error)
        containers = [made and (id(made[0]), made[1]) for made in layout.containers]
        return layout.count, [(leaf.path, leaf.kind, id(leaf.value)) for leaf in layout.leaves], containers

    for batch in FORMS:
        given = GivenBatches({})
        tell(given.describe, FORMS[first])
        lists = dict(given.lists)
        assert tell(given.describe, batch) == tell(lambda one, known=lists: describe(one, known), batch)


def test_a_tokenizers_encoding_stays_one() -> None:
    """A BatchEncoding of transformers keeps its type and what it holds beside its tensors."""
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(12).reshape(4, 3)}, prepend_batch_axis=False)
    part = describe(encoding).take(range(1, 3))
    assert type(part) is transformers.BatchEncoding
    assert part.input_ids.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert encoding.input_ids.shape == (4, 3)
    assert describe(encoding).grown(9).batch["input_ids"].shape == (9, 3)


def test_a_models_output_stays_one() -> None:
    """A ModelOutput of transformers, at once a dict and a dataclass, is split in both guises."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    part = describe(outputs.BaseModelOutput(last_hidden_state=torch.arange(4))).take(range(1, 2))
    assert part.last_hidden_state.tolist() == [1]
    assert part["last_hidden_state"].tolist() == [1]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (None, True),
        ([], True),
        ((), True),
        ({}, True),
        (torch.zeros(0, 3), True),
        ((torch.zeros(0, 3), torch.zeros(0)), True),
        ({"x": torch.zeros(0, 3), "temperature": torch.tensor(2.0)}, True),
        (UserDict(x=torch.zeros(0, 3)), True),
        (torch.tensor(2.0), False),
        ((torch.zeros(0, 3), torch.zeros(2)), False),
        (["a text"], False),
        ({"texts": ["one"]}, False),
        (torch.zeros(1, 0), False),
    ],
)
def test_a_batch_without_samples_is_told_from_a_wrong_one(batch: Any, expected: bool) -> None:
    """A rank may have none in a step; what cannot be counted is refused elsewhere."""
    assert is_empty(batch) is expected
