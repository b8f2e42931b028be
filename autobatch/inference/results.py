"""Reads what a function returned for a piece: one entry a sample, joined with other pieces' or taken apart.

A tensor or array has one row a sample, a list one entry. Mappings, tuples and dataclasses hold several such results.
``None`` is the result of every sample. Nothing else is divided.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autobatch._formatting import name_type, plural
from autobatch.batch.tree import fields_of, is_array, is_sequence, with_fields
from autobatch.errors import InvalidArgument

Indices = range | list[int]
_ROOT = "the result"
_NOTHING = object()  # no piece has run yet


def check_result(result: Any, samples: int) -> None:
    """Raise InvalidArgument, with the path and what is there, if a part has not one entry a sample."""
    for path, leaf in _leaves(result):
        if leaf is not None and count_entries(leaf) != samples:
            raise InvalidArgument(
                f"fn returned {describe_entries(leaf)} as {path} for {plural(samples, 'sample')}; it must return one "
                f"entry a sample: tensors with as many rows, or a list as long; several of these in a tuple or a dict"
            )


def rows_of(result: Any, samples: int) -> list[Any]:
    """List the result of each sample: of tensors rows."""
    if result is None:
        return [None] * samples
    if isinstance(result, list) or is_array(result):
        return list(result)
    if isinstance(result, torch.Tensor):
        return list(result.unbind(0))
    columns = [rows_of(child, samples) for _, child in fields_of(result) or ()]
    return [with_fields(result, [column[row] for column in columns]) for row in range(samples)]


class Joined:
    """The results of all samples of a batch in one: what ``fn`` would have returned for the whole batch.

    The first piece takes memory for all, so that no concatenation needs it twice and later pieces are sized by what is
    left. If one piece has all samples, its result is returned.

    Attributes:
        samples: Number of samples of the batch.
        done: Indices of the samples whose results are in their places.
    """

    def __init__(self, samples: int) -> None:
        self.samples, self.done = samples, list[int]()
        self._columns: Any = _NOTHING  # containers as in the first piece, with room for all samples

    def add(self, indices: Indices, result: Any) -> None:
        """Put the results of a piece into their places; the same may be done again after an error."""
        for path, leaf in _leaves(result):  # of a single piece too: its size must not decide
            _refuse_without_rows(leaf, path)
        is_whole = isinstance(indices, range) and len(indices) == self.samples
        if self._columns is _NOTHING:
            # Also of one piece in new containers: fn may fill its own again in the next call of map().
            self._columns = _map(result, lambda leaf: leaf if is_whole else _make_column(leaf, self.samples))
        if not is_whole:
            _write(self._columns, indices, result)
        self.done.extend(indices)

    def result(self) -> Any:
        """Return the results of all samples, in their order; ``None`` before the first piece."""
        return None if self._columns is _NOTHING else self._columns

    def partial(self) -> Any:
        """Return the results of the samples that are done, in the order of ``done``."""
        return _map(self.result(), lambda column: _pick(column, self.done))


def count_entries(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor):
        return int(leaf.size(0)) if leaf.ndim else None  # not ``shape``: a nested tensor may have none
    if is_array(leaf):
        return int(leaf.shape[0]) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list) else None


def describe_entries(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return f"a nested {type(leaf).__name__} of {plural(leaf.size(0), 'row')}"
    if isinstance(leaf, torch.Tensor) or is_array(leaf):
        return f"{name_type(leaf)} of shape {tuple(leaf.shape)}"
    return f"a list of {len(leaf)}" if isinstance(leaf, list) else name_type(leaf)


# ------------------------------------------------------------------------- trees of which each list is a leaf


def _children(node: Any) -> list[tuple[str, Any]] | None:
    return None if isinstance(node, list) else fields_of(node)


def _leaves(node: Any, path: str = _ROOT) -> Iterator[tuple[str, Any]]:
    children = _children(node)
    if children is None:
        yield path, node
    for suffix, child in children or ():
        yield from _leaves(child, path + suffix)


def _map(node: Any, function: Callable[[Any], Any]) -> Any:
    children = _children(node)
    return function(node) if children is None else with_fields(node, [_map(child, function) for _, child in children])


def _refuse_without_rows(leaf: Any, path: str) -> None:
    """Refuse a form of tensor of which torch cannot fill rows in all cases."""
    if not isinstance(leaf, torch.Tensor) or (
        leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized
    ):
        return
    form = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else leaf.layout
    raise InvalidArgument(
        f"fn returned a {form} {type(leaf).__name__} as {path}, whose rows cannot be put together: pass "
        f"on_result=, or return a dense one, or a list with one tensor a sample"
    )


def _kind(node: Any) -> str:
    """Describe what has to be the same in all pieces; of a mapping its keys in any order."""
    if isinstance(node, torch.Tensor) or is_array(node):
        name = "a Tensor" if isinstance(node, torch.Tensor) else "a masked array" if _is_masked(node) else "an array"
        return f"{name} of {node.dtype} with rows of shape {tuple(node.shape[1:])}"
    suffixes = [suffix for suffix, _ in _children(node) or ()]
    if not suffixes:
        return "a list" if isinstance(node, list) else name_type(node)
    if is_sequence(node):
        return f"{name_type(node)} of {plural(len(suffixes), 'result')}"
    return f"{name_type(node)} with {', '.join(sorted(suffixes) if isinstance(node, Mapping) else suffixes)}"


def _is_masked(array: Any) -> bool:
    return isinstance(array, sys.modules["numpy"].ma.MaskedArray)


def _make_column(leaf: Any, samples: int) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, torch.Tensor):
        return torch.empty((samples, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
    if is_array(leaf):
        numpy = sys.modules["numpy"]
        make = numpy.ma.masked_all if _is_masked(leaf) else numpy.empty  # a plain array would lose the mask
        return make((samples, *leaf.shape[1:]), dtype=leaf.dtype)
    return [None] * samples


def _write(columns: Any, indices: Indices, found: Any, path: str = _ROOT) -> None:
    """Put the entries of a piece into their places; raise InvalidArgument if other pieces have another form."""
    if (kind := _kind(found)) != (before := _kind(columns)):
        raise InvalidArgument(
            f"fn returned {kind} as {path}, and {before} for the pieces before it, which cannot be "
            f"joined: return the same for all samples, or pass samples instead of a batch (a list or a "
            f"Dataset), whose results stay apart"
        )
    if (children := _children(columns)) is not None:
        parts = dict(_children(found) or ())  # by name: a mapping may have its keys in another order
        for suffix, column in children:
            _write(column, indices, parts[suffix], path + suffix)
    elif isinstance(columns, list):
        for index, entry in zip(indices, found, strict=True):
            columns[index] = entry
    elif columns is not None:
        columns[_index_of(indices, columns)] = found


def _pick(column: Any, indices: list[int]) -> Any:
    if column is None:
        return None
    if indices == list(range(len(indices))):
        return column[: len(indices)]  # a view
    return [column[index] for index in indices] if isinstance(column, list) else column[_index_of(indices, column)]


def _index_of(indices: Indices, column: Any) -> Any:
    if isinstance(indices, range):
        return slice(indices.start, indices.stop)
    return torch.tensor(indices, device=column.device) if isinstance(column, torch.Tensor) else indices
