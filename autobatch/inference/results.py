"""Reads what a function returned for a piece: one entry a sample, joined with other pieces' or taken apart.

A tensor or array has one row a sample, a list one entry. Mappings, tuples and dataclasses hold several such results.
``None`` is the result of every sample. Nothing else is divided.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

import torch

from autobatch._formatting import name_type, plural
from autobatch.batch.tree import fields_of, is_array, is_sequence, with_fields
from autobatch.errors import InvalidArgument

Indices = range | list[int]
_ROOT = "the result"


def check_result(result: Any, samples: int) -> None:
    """Raise InvalidArgument, with the path and what is there, if a part has not one entry a sample."""
    for path, leaf in _leaves(result).items():
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
        self._columns: dict[str, Any] | None = None  # by path
        self._kinds: dict[str, str] = {}  # of the first piece's leaves and containers, by path
        self._containers: Any = None  # of the first piece, which is not held itself

    def add(self, indices: Indices, result: Any) -> None:
        """Put the results of a piece into their places; the same may be done again after an error.

        Raises InvalidArgument if it cannot be joined, or not with the pieces before it.
        """
        leaves = _leaves(result)
        for path, leaf in leaves.items():  # of a single piece too: its size must not decide
            if form := _form_without_rows(leaf):
                raise InvalidArgument(
                    f"fn returned a {form} {type(leaf).__name__} as {path}, whose rows cannot be put together: pass "
                    f"on_result=, or return a dense one, or a list with one tensor a sample"
                )
        if self._columns is None:
            is_whole = len(indices) == self.samples and isinstance(indices, range)
            columns = leaves if is_whole else {path: _make_column(leaf, self.samples) for path, leaf in leaves.items()}
            self._columns, self._kinds = columns, {path: _kind(node) for path, node, _ in _nodes(result)}
            self._containers = _fill(result, repeat(None))
            if is_whole:
                self.done.extend(indices)
                return
        for path, node, _ in _nodes(result):  # containers come first, so that they have the same entries
            if (kind := _kind(node)) != self._kinds[path]:
                raise InvalidArgument(
                    f"fn returned {kind} as {path}, and {self._kinds[path]} for the pieces before it, which cannot be "
                    f"joined: return the same for all samples, or pass samples instead of a batch (a list or a "
                    f"Dataset), whose results stay apart"
                )
        for path, column in self._columns.items():
            _write(column, indices, leaves[path])
        self.done.extend(indices)

    def result(self) -> Any:
        """Return the results of all samples, in their order; ``None`` before the first piece."""
        return None if self._columns is None else _fill(self._containers, iter(self._columns.values()))

    def partial(self) -> Any:
        """Return the results of the samples that are done, in the order of ``done``."""
        if self._columns is None:
            return None
        return _fill(self._containers, iter([_pick(column, self.done) for column in self._columns.values()]))


def _nodes(result: Any, path: str = _ROOT) -> Iterator[tuple[str, Any, bool]]:
    """Yield each container, then what it holds, with paths and whether it has one entry a sample itself."""
    children = None if isinstance(result, list) else fields_of(result)
    yield path, result, children is None
    for suffix, child in children or ():
        yield from _nodes(child, path + suffix)


def _leaves(result: Any) -> dict[str, Any]:
    return {path: node for path, node, is_leaf in _nodes(result) if is_leaf}


def _fill(containers: Any, leaves: Iterator[Any]) -> Any:
    children = None if isinstance(containers, list) else fields_of(containers)
    if children is None:
        return next(leaves)
    return with_fields(containers, [_fill(child, leaves) for _, child in children])


def _form_without_rows(leaf: Any) -> str:
    """Name a form of a tensor of which torch cannot fill rows in all cases; ``""`` for all else."""
    if not isinstance(leaf, torch.Tensor):
        return ""
    form = "" if leaf.layout is torch.strided else str(leaf.layout)
    return "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else form


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


def _kind(node: Any) -> str:
    """Describe what has to be the same in all pieces; of a mapping its keys in any order."""
    if isinstance(node, torch.Tensor) or is_array(node):
        return f"{name_type(node)} of {node.dtype} with rows of shape {tuple(node.shape[1:])}"
    suffixes = [suffix for suffix, _ in fields_of(node) or ()]
    if isinstance(node, list) or not suffixes:
        return name_type(node)
    if is_sequence(node):
        return f"{name_type(node)} of {plural(len(suffixes), 'result')}"
    return f"{name_type(node)} with {', '.join(sorted(suffixes) if isinstance(node, Mapping) else suffixes)}"


def _make_column(leaf: Any, samples: int) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, torch.Tensor):
        return torch.empty((samples, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
    if is_array(leaf):
        numpy, shape = sys.modules["numpy"], (samples, *leaf.shape[1:])
        is_masked = isinstance(leaf, numpy.ma.MaskedArray)  # a plain array would lose the mask
        return (numpy.ma.masked_all if is_masked else numpy.empty)(shape, dtype=leaf.dtype)
    return [None] * samples


def _write(column: Any, indices: Indices, leaf: Any) -> None:
    if leaf is None:
        return
    if isinstance(leaf, list):
        for index, entry in zip(indices, leaf, strict=True):
            column[index] = entry
    else:
        column[_index_of(indices, column)] = leaf


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
