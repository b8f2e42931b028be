"""Decides which parts of a batch have one entry a sample; if the batch does not show it, the error says what to pass.

How a batch is read:

- A tensor or NumPy array with dimensions has one row a sample, an object of a registered type as many samples as its
  ``count`` says; all of them agree on how many.
- Mappings, dataclasses and namedtuples are *fields*: each value belongs to all samples.
- A list or tuple is fields, as in ``(inputs, labels)``, or holds one entry for each of its *samples*, as detection
  targets do:

  1. ``batches.Samples([...])`` and ``batches.Fields([...])`` say it themselves. Other lists are read as in an earlier
     batch (the plan's example).
  2. Entries unlike each other (other types, dtypes, numbers of dimensions) are fields.
  3. Alike entries, where tensors outside such lists show the number of samples: one a sample if there are that many,
     else fields. If there are that many and every tensor inside has that many rows too: one a sample if the entries are
     mappings, fields if it is a single entry, else the batch can be counted but not divided.
  4. Alike entries and nothing else to go by: ``list_rules`` judges the list by its entries.

- Everything else is shared by all samples: numbers, strings, scalar tensors, any other object, and lists of those that
  are longer or shorter than the number of samples. Without any tensor, lists of strings or of objects show that number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from autobatch._formatting import name_type, show_value, with_article
from autobatch._wrappers import own_table
from autobatch.batch.list_rules import (
    ROOT,
    ListReading,
    Marked,
    OpenList,
    are_alike,
    are_images,
    find_only_count,
    is_record,
    judge,
    refuse_to_guess,
    rows_beneath,
)
from autobatch.batch.registry import find_type
from autobatch.batch.tree import count_rows, fields_of, is_sequence, leaves_of
from autobatch.errors import InvalidArgument

_NUMBERS = (bool, int, float, complex, bytes)
_UNORDERED = (set, frozenset, range)
_KNOWN = (type(None), *_NUMBERS, str, *_UNORDERED, slice, torch.Tensor, torch.Size)

_DEPTH, _WIDTH = 3, 64
"""How far an unknown object is looked into: torch_geometric's ``Data`` has its tensors in a dict in a store in it."""


class _Part(NamedTuple):
    """Something with one entry a sample: how it is reached, and how many it has."""

    path: str
    size: int


def read(
    batch: Any, earlier: Mapping[str, ListReading], samples: int | None = None
) -> tuple[int, dict[str, ListReading]]:
    """The number of samples, and what each list holds, by path; lists that ``earlier`` has are decided already.

    A tensor's rows outweigh ``samples``, of which the batch was made. Raises InvalidArgument with paths and sizes: of
    nothing to count, no samples, unequal numbers, a list that can be read in two ways, or a tensor whose rows cannot be
    viewed (sparse, nested, packed).
    """
    lists: dict[str, ListReading] = {path: reading for path, reading in earlier.items() if reading != "unclear"}
    count = _count(batch, lists, samples)
    count = _agree([part for part in _survey(batch, ROOT, lists, count) if isinstance(part, _Part)], batch)
    _refuse_undivided(batch, ROOT, count, lists)
    return count, lists


def _count(batch: Any, lists: dict[str, ListReading], samples: int | None) -> int:
    """The number of samples, by what is certain, else by the lists; how a list is read is added to ``lists``."""
    while True:
        found = list(_survey(batch, ROOT, lists))
        certain = [part for part in found if isinstance(part, _Part)]
        if certain:
            return _agree(certain, batch)
        if samples is not None:
            return samples
        open_lists = [entry for entry in found if isinstance(entry, OpenList)]
        judged = [(entry, judge(entry)) for entry in open_lists]
        readings = {reading for _, reading in judged}
        # Samples first: they show a number, by which lists that could be read in two ways are decided.
        if "samples" not in readings and (only := find_only_count(open_lists)) is not None:
            return only
        decided: ListReading = "samples" if "samples" in readings else "fields"
        if decided not in readings:
            for entry, reading in judged:
                if reading == "unclear":
                    refuse_to_guess(entry)
            return _agree(_counted_by_texts(open_lists), batch)
        lists |= {entry.path: decided for entry, reading in judged if reading == decided}


def _survey(
    node: Any, path: str, lists: dict[str, ListReading], count: int | None = None
) -> Iterator[_Part | OpenList]:
    """Yield the parts that have one entry a sample, and the lists that are still to be decided: none with a count."""
    _refuse_unviewable(node, path)
    rows = count_rows(node)
    if rows is not None:
        yield _Part(path, rows)
        return
    if is_sequence(node):
        is_open = not isinstance(node, Marked) and path not in lists and are_alike(node)
        if is_open and count is None:
            yield OpenList(path, node)
            return
        if is_open:
            lists[path] = _decide(node, count)
        else:
            lists[path] = node.reading if isinstance(node, Marked) else lists.get(path, "fields")
        if lists[path] != "fields":
            yield _Part(path, len(node))
            return
    for suffix, child in fields_of(node) or ():
        yield from _survey(child, path + suffix, lists, count)


def _decide(entries: Sequence[Any], count: int | None) -> ListReading:
    """Return how a list of entries of one kind is read beside so many samples."""
    if len(entries) != count:
        return "fields"
    rows = list(rows_beneath(entries))
    if not rows or any(size != count for size in rows) or are_images(entries):
        return "samples"
    # A record for each sample, as detection targets are: two boxes in each of two images leave nothing open.
    if all(is_record(entry) for entry in entries):
        return "samples"
    return "fields" if count == 1 else "unclear"


def _counted_by_texts(open_lists: Sequence[OpenList]) -> list[_Part]:
    """Lists of texts or objects, which show the number of samples where no tensor does."""
    for is_one in (_is_text, _is_object):
        found = [entry for entry in open_lists if all(map(is_one, entry.entries))]
        if found:
            return [_Part(entry.path, len(entry.entries)) for entry in found]
    return []


def _is_text(entry: Any) -> bool:
    return entry is None or isinstance(entry, str)


def _is_object(entry: Any) -> bool:
    return not _is_text(entry) and not isinstance(entry, _NUMBERS) and fields_of(entry) is None


def _agree(parts: Sequence[_Part], batch: Any) -> int:
    """The size that all parts have."""
    if not parts:
        raise InvalidArgument(_explain_nothing(batch))
    firsts = {part.size: part for part in reversed(parts)}
    if len(firsts) > 1:
        shown = ", ".join(f"{path} has {size}" for path, size in sorted(firsts.values(), key=parts.index)[:4])
        raise InvalidArgument(
            f"the number of samples is unclear: {shown}; each needs one entry a sample ({_advise_groups(firsts)}what "
            f"all samples share can live in the step; samples that are joined, as graphs are, go into a type for "
            f"autobatch.batches.register)"
        )
    if parts[0].size == 0:
        raise InvalidArgument(f"{parts[0].path} has 0 samples: pass a batch of at least one")
    return parts[0].size


def _advise_groups(parts: Mapping[int, _Part]) -> str:
    """How several entries a sample, such as unlabelled images beside labelled ones, become one."""
    fewest, most = min(parts), max(parts)
    if len(parts) != 2 or fewest < 1 or most % fewest or most == fewest:
        return ""
    each = most // fewest
    return (
        f"{each} entries of {parts[most].path} for one sample are exact as the shape ({fewest}, {each}, ...), "
        f"flattened inside the step; "
    )


def _explain_nothing(batch: Any) -> str:
    nothing = "the batch has no samples to count: no tensor or array with dimensions, no list of samples"
    opaque = next((leaf for leaf in leaves_of(batch) if _is_opaque(leaf) or isinstance(leaf, _UNORDERED)), None)
    if opaque is None:
        return nothing if fields_of(batch) else f"{nothing}; pass what a loader yields, not batch={show_value(batch)}"
    if isinstance(opaque, Iterator):
        return f"{nothing}; {name_type(opaque)} can be read only once: pass one batch of it, such as next(iterator)"
    if isinstance(opaque, (*_UNORDERED, deque)):
        return f"{nothing}; {name_type(opaque)} is not read as samples: pass a list"
    name = type(opaque).__name__
    return (
        f"{nothing}; {with_article(name)} is no container that autobatch knows: pass a dict of what it holds, or call "
        f"autobatch.batches.register({name}, count=..., take=...) once"
    )


def _tensors_held(node: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Tensors in the attributes of an object of unknown type, and in what those hold, up to a depth and a width."""
    if isinstance(node, torch.Tensor):
        yield node
    elif depth and not isinstance(node, (type, torch.nn.Module)):
        children = [child for _, child in fields_of(node) or ()] or own_table(node).values()
        for child in islice(children, _WIDTH):
            yield from _tensors_held(child, depth - 1)


def _refuse_undivided(node: Any, path: str, count: int, lists: Mapping[str, ListReading]) -> None:
    """Refuse an object of unknown type with samples in it: each micro-batch would get it whole."""
    if count == 1 or lists.get(path) == "samples":
        return
    children = fields_of(node)
    for suffix, child in children or ():
        _refuse_undivided(child, path + suffix, count, lists)
    if children is None and _is_opaque(node) and any(count_rows(tensor) == count for tensor in _tensors_held(node)):
        name = type(node).__name__
        raise InvalidArgument(
            f"{path} is {with_article(name)}, no container that autobatch knows, and a tensor in it has {count} rows, "
            f"as the batch has samples: pass a dict of what it holds, or call autobatch.batches.register({name}, "
            f"count=..., take=...) once"
        )


def _is_opaque(leaf: Any) -> bool:
    return not isinstance(leaf, _KNOWN) and count_rows(leaf) is None


def _refuse_unviewable(node: Any, path: str) -> None:
    if find_type(node) is not None:
        return
    if isinstance(node, PackedSequence):
        raise InvalidArgument(f"{path} is a PackedSequence, which has no rows: pass it padded and pack it in the step")
    if isinstance(node, torch.Tensor) and (node.is_nested or node.layout is not torch.strided):
        kind = "nested" if node.is_nested else str(node.layout).removeprefix("torch.")
        raise InvalidArgument(
            f"{path} is a {kind} tensor, whose rows are no views: pass a dense one or a list of samples"
        )
