"""Reads what a function returned for a piece: one entry a sample, taken apart or joined with other pieces'.

A tensor or array has one row a sample, a list one entry; mappings, tuples and dataclasses hold several such results;
``None`` is the result of every sample. Nothing else is divided: what one object means for several samples cannot be
known. Does not cover how a piece is run (``piece``), nor types registered as batches, which are objects here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autobatch._formatting import name_type, plural
from autobatch.batch.tree import fields_of, is_array, with_fields
from autobatch.errors import InvalidResult

__all__ = ["Joined", "check_result", "rows_of"]

Indices = range | list[int]


def check_result(result: Any, samples: int, path: str = "the result") -> None:
    """Refuse what has not one entry a sample.

    Raises:
        InvalidResult: With the path inside the result, and what is there.
    """
    for path_here, leaf in _leaves(result, path):
        if leaf is None or _count(leaf) == samples:
            continue
        raise InvalidResult(
            f"fn returned {_describe(leaf)} as {path_here} for {plural(samples, 'sample')}; it must return one entry a "
            f"sample: tensors with as many rows, or a list as long; several of these in a tuple or a dict"
        )


def rows_of(result: Any, samples: int) -> list[Any]:
    """The result of each sample: of tensors rows, which are views."""
    if result is None:
        return [None] * samples
    if isinstance(result, torch.Tensor):
        return list(result.unbind(0))
    if isinstance(result, list) or is_array(result):
        return list(result)
    columns = [rows_of(child, samples) for _, child in fields_of(result) or ()]
    return [with_fields(result, [column[row] for column in columns]) for row in range(samples)]


@dataclass
class Joined:
    """The results of all samples of a batch as one: what ``fn`` would have returned for the whole.

    Memory for all is taken with the first piece, so that no concatenation needs it twice and later pieces are sized by
    what is left. A single piece of all samples is its own result.
    """

    samples: int
    done: list[int] = field(default_factory=list)
    _columns: list[Any] | None = None
    _first: Any = None

    def add(self, indices: Indices, result: Any) -> None:
        """Put the results of a piece into their places; the same may be done again after an error.

        Raises:
            InvalidResult: It does not fit together with the pieces before it.
        """
        leaves = [*_leaves(result, "the result")]
        if self._columns is None:
            if len(indices) == self.samples and isinstance(indices, range):
                columns = [leaf for _, leaf in leaves]
            else:
                columns = [self._make_column(leaf) for _, leaf in leaves]
            self._columns, self._first = columns, _without_leaves(result)
            if len(indices) == self.samples and isinstance(indices, range):
                self.done.extend(indices)
                return
        self._check_alike(leaves, result)
        for column, (_, leaf) in zip(self._columns, leaves, strict=True):
            _write(column, indices, leaf)
        self.done.extend(indices)

    def result(self) -> Any:
        """The results of all samples, in their order; ``None`` where there is no piece yet."""
        return None if self._columns is None else _with_leaves(self._first, iter(self._columns))

    def partial(self) -> Any:
        """The results of the samples that are done, in the order of ``done``."""
        if self._columns is None:
            return None
        return _with_leaves(self._first, iter([_pick(column, self.done) for column in self._columns]))

    def _make_column(self, leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, torch.Tensor):
            return torch.empty((self.samples, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
        if is_array(leaf):
            return sys.modules["numpy"].empty((self.samples, *leaf.shape[1:]), dtype=leaf.dtype)
        return [None] * self.samples

    def _check_alike(self, leaves: Sequence[tuple[str, Any]], result: Any) -> None:
        columns = self._columns or []
        known = [_kind(column) for column in columns]
        for (path, leaf), kind in zip(leaves, known, strict=False):
            if _kind(leaf) != kind:
                raise InvalidResult(
                    f"fn returned {_describe(leaf)} as {path}, and {kind} for the pieces before it, so that they are "
                    f"no one result: pass samples instead of a batch (a list or a Dataset), whose results stay apart"
                )
        if len(leaves) != len(columns):
            raise InvalidResult(
                f"fn returned {name_type(result)} of {len(leaves)} results, and {len(columns)} for the pieces before "
                f"it, so that they are no one result: return the same ones for all samples"
            )


def _leaves(result: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything that has one entry a sample, with its path."""
    children = None if isinstance(result, list) else fields_of(result)
    if children is None:
        yield path, result
        return
    for suffix, child in children:
        yield from _leaves(child, path + suffix)


def _without_leaves(result: Any) -> Any:
    """Its containers alone, so that the first piece's own results are not held."""
    children = None if isinstance(result, list) else fields_of(result)
    return None if children is None else with_fields(result, [_without_leaves(child) for _, child in children])


def _with_leaves(containers: Any, leaves: Iterator[Any]) -> Any:
    children = fields_of(containers)
    if children is None:
        return next(leaves)
    return with_fields(containers, [_with_leaves(child, leaves) for _, child in children])


def _count(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor) or is_array(leaf):
        return int(leaf.shape[0]) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list) else None


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor) or is_array(leaf):
        return f"{name_type(leaf)} of shape {tuple(leaf.shape)}"
    return f"a list of {len(leaf)}" if isinstance(leaf, list) else name_type(leaf)


def _kind(leaf: Any) -> str:
    """What has to be the same in all pieces."""
    if isinstance(leaf, torch.Tensor) or is_array(leaf):
        return f"{name_type(leaf)} of {leaf.dtype} with rows of shape {tuple(leaf.shape[1:])}"
    return "a list" if isinstance(leaf, list) else name_type(leaf)


def _write(column: Any, indices: Indices, leaf: Any) -> None:
    if leaf is None:
        return
    if isinstance(leaf, list):
        for index, entry in zip(indices, leaf, strict=True):
            column[index] = entry
    elif isinstance(indices, range):
        column[indices.start : indices.stop] = leaf
    elif isinstance(leaf, torch.Tensor):
        column[torch.tensor(indices, device=column.device)] = leaf
    else:
        column[indices] = leaf


def _pick(column: Any, indices: list[int]) -> Any:
    if column is None:
        return None
    if indices == list(range(len(indices))):
        return column[: len(indices)]  # a view
    if isinstance(column, list):
        return [column[index] for index in indices]
    return column[torch.tensor(indices, device=column.device)] if isinstance(column, torch.Tensor) else column[indices]
