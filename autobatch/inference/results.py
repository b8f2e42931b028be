"""Reads what a function returned for a piece: one entry a sample, taken apart or joined with other pieces'.

A tensor or array has one row a sample, a list one entry; mappings, tuples and dataclasses hold several such results;
``None`` is the result of every sample. Nothing else is divided: what one object means for several samples cannot be
known. Does not cover how a piece is run (``piece``), nor types registered as batches, which are objects here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autobatch._formatting import name_type, plural
from autobatch.batch.tree import fields_of, is_array, is_sequence, with_fields
from autobatch.errors import InvalidArgument
from autobatch.memory.oom import is_oom

__all__ = ["Joined", "check_result", "rows_of"]

Indices = range | list[int]


def check_result(result: Any, samples: int, path: str = "the result") -> None:
    """Refuse what has not one entry a sample.

    Raises:
        InvalidArgument: With the path inside the result, and what is there.
    """
    for path_here, leaf in _leaves(result, path):
        if leaf is None or _count(leaf) == samples:
            continue
        raise InvalidArgument(
            f"fn returned {_describe(leaf)} as {path_here} for {plural(samples, 'sample')}; it must return one entry a "
            f"sample: tensors with as many rows, or a list as long; several of these in a tuple or a dict"
        )


def rows_of(result: Any, samples: int, path: str = "the result") -> list[Any]:
    """The result of each sample: of tensors rows, which are views where torch has one.

    Raises:
        InvalidArgument: With the path of a tensor that torch cannot take apart.
    """
    if result is None:
        return [None] * samples
    if isinstance(result, torch.Tensor):
        return _unbind(result, path)
    if isinstance(result, list) or is_array(result):
        return list(result)
    columns = [rows_of(child, samples, path + suffix) for suffix, child in fields_of(result) or ()]
    return [with_fields(result, [column[row] for column in columns]) for row in range(samples)]


def _unbind(tensor: torch.Tensor, path: str) -> list[torch.Tensor]:
    try:
        return list(tensor.unbind(0))
    except RuntimeError as error:
        if is_oom(error) or not _form_without_rows(tensor):
            raise
    raise InvalidArgument(
        f"fn returned a {_form_without_rows(tensor)} {type(tensor).__name__} as {path}, whose rows cannot be taken "
        f"apart: return a dense one, or a list with one tensor a sample"
    )


@dataclass
class Joined:
    """The results of all samples of a batch as one: what ``fn`` would have returned for the whole.

    Memory for all is taken with the first piece, so that no concatenation needs it twice and later pieces are sized by
    what is left. A single piece of all samples is its own result.
    """

    samples: int
    done: list[int] = field(default_factory=list)
    _columns: list[Any] | None = None
    _kinds: list[str] = field(default_factory=list)  # of the first piece's results
    _first: Any = None

    def add(self, indices: Indices, result: Any) -> None:
        """Put the results of a piece into their places; the same may be done again after an error.

        Raises:
            InvalidArgument: It cannot be put together, or not with the pieces before it.
        """
        _refuse_forms(result)
        if self._columns is None:
            leaves = [leaf for _, leaf in _leaves(result, "the result")]
            is_whole = len(indices) == self.samples and isinstance(indices, range)
            columns = leaves if is_whole else [self._make_column(leaf) for leaf in leaves]
            self._columns, self._first = columns, _without_leaves(result)
            self._kinds = [_kind(leaf) for leaf in leaves]
            if is_whole:
                self.done.extend(indices)
                return
        found = [*_leaves_like(self._first, iter(self._kinds), result, "the result")]
        for column, leaf in zip(self._columns, found, strict=True):
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
            numpy, shape = sys.modules["numpy"], (self.samples, *leaf.shape[1:])
            is_masked = isinstance(leaf, numpy.ma.MaskedArray)  # a plain array would lose the mask
            return (numpy.ma.masked_all if is_masked else numpy.empty)(shape, dtype=leaf.dtype)
        return [None] * self.samples


def _leaves(result: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything that has one entry a sample, with its path."""
    children = None if isinstance(result, list) else fields_of(result)
    if children is None:
        yield path, result
        return
    for suffix, child in children:
        yield from _leaves(child, path + suffix)


def _leaves_like(containers: Any, kinds: Iterator[str], result: Any, path: str) -> Iterator[Any]:
    """What has one entry a sample, in the order of the first piece: a dict may name its keys in another one.

    Args:
        containers: Of the first piece.
        kinds: Of what they held, in order.
        result: Of another piece.
        path: Of that result.

    Raises:
        InvalidArgument: It is another container, or of another kind.
    """
    known, found = _named_children(containers), _named_children(result)
    if known is None or found is None or known.keys() != found.keys():
        before = next(kinds) if known is None else _kind(containers)
        if known is not None or found is not None:
            raise InvalidArgument(
                f"fn returned {_kind(result)} as {path}, and {before} for the pieces before it, so that they are no "
                f"one result: return the same ones for all samples"
            )
        if _kind(result) != before:
            raise InvalidArgument(
                f"fn returned {_kind(result)} as {path}, and {before} for the pieces before it, so that they are no "
                f"one result: pass samples instead of a batch (a list or a Dataset), whose results stay apart"
            )
        yield result
        return
    for name, (suffix, child) in known.items():
        yield from _leaves_like(child, kinds, found[name][1], path + suffix)


def _named_children(node: Any) -> dict[Any, tuple[str, Any]] | None:
    """What a container holds by key, by position or by the name of a field; ``None`` for a leaf."""
    children = None if isinstance(node, list) else fields_of(node)
    if children is None:
        return None
    names = [("key", key) for key in node] if isinstance(node, Mapping) else [suffix for suffix, _ in children]
    return dict(zip(names, children, strict=True))


def _without_leaves(result: Any) -> Any:
    """Its containers alone, so that the first piece's own results are not held."""
    children = None if isinstance(result, list) else fields_of(result)
    return None if children is None else with_fields(result, [_without_leaves(child) for _, child in children])


def _with_leaves(containers: Any, leaves: Iterator[Any]) -> Any:
    children = fields_of(containers)
    if children is None:
        return next(leaves)
    return with_fields(containers, [_with_leaves(child, leaves) for _, child in children])


def _refuse_forms(result: Any) -> None:
    """Refuse tensors of which no larger one can be filled; of one piece alone too: its size must not decide."""
    for path, leaf in _leaves(result, "the result"):
        form = _form_without_rows(leaf)
        if form:
            raise InvalidArgument(
                f"fn returned a {form} {type(leaf).__name__} as {path}, whose rows cannot be put together: pass "
                f"on_result=, or return a dense one, or a list with one tensor a sample"
            )


def _form_without_rows(leaf: Any) -> str:
    """What a tensor is, of which torch cannot give or fill rows in all cases; ``""`` of all else."""
    if not isinstance(leaf, torch.Tensor):
        return ""
    if leaf.is_nested:
        return "nested"
    if leaf.layout is not torch.strided:
        return f"sparse ({leaf.layout})" if "sparse" in str(leaf.layout) else str(leaf.layout)
    return "quantized" if leaf.is_quantized else ""


def _count(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor):
        return int(leaf.size(0)) if leaf.ndim else None  # not ``shape``: a nested tensor may have none
    if is_array(leaf):
        return int(leaf.shape[0]) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list) else None


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return f"a nested {type(leaf).__name__} of {plural(leaf.size(0), 'row')}"
    if isinstance(leaf, torch.Tensor) or is_array(leaf):
        return f"{name_type(leaf)} of shape {tuple(leaf.shape)}"
    return f"a list of {len(leaf)}" if isinstance(leaf, list) else name_type(leaf)


def _kind(leaf: Any) -> str:
    """What has to be the same in all pieces; of a container what it holds."""
    if isinstance(leaf, torch.Tensor) or is_array(leaf):
        return f"{name_type(leaf)} of {leaf.dtype} with rows of shape {tuple(leaf.shape[1:])}"
    suffixes = [suffix for suffix, _ in fields_of(leaf) or ()]
    if isinstance(leaf, list) or not suffixes:
        return name_type(leaf)
    held = plural(len(suffixes), "result") if is_sequence(leaf) else ", ".join(suffixes)
    return f"{name_type(leaf)} {'of' if is_sequence(leaf) else 'with'} {held}"


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
