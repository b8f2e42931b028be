"""Flattens and rebuilds a batch: a tree of mappings, lists, tuples and dataclasses, each in its own type.

Covers containers and the tensors in them, those of registered types too (``registry``). No tensor is copied, and a
container in which nothing changes comes back as the same object; a registered type comes back as its ``map`` returns
it. Does not cover what a sample is or how a batch is cut (``layout``).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from autobatch._formatting import name_type
from autobatch.batch.registry import find_type
from autobatch.errors import InvalidBatch
from autobatch.torch_internals.storages import bytes_of

__all__ = [
    "as_leaf",
    "count_bytes",
    "count_elements",
    "fields_of",
    "holds_registered",
    "is_array",
    "is_sequence",
    "leaves_of",
    "map_tensors",
    "tensors_of",
    "with_fields",
    "with_fresh_containers",
    "with_items",
]

# A shape describes, it holds no samples; a packed sequence's rows are time steps of several samples at once.
_WHOLE = (torch.Size, PackedSequence)


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array; NumPy itself is never imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_sequence(value: Any) -> bool:
    """Whether it is a list or a tuple without named fields, which may hold one entry a sample."""
    return isinstance(value, list | tuple) and not isinstance(value, _WHOLE) and not hasattr(value, "_fields")


def fields_of(node: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, each with its part of a path (``'["x"]'``, ``"[0]"``, ``".x"``); ``None`` for a leaf."""
    children = _children_of(node)
    return None if children is None else list(zip(_suffixes_of(node), children, strict=True))


def _children_of(node: Any) -> list[Any] | None:
    """The same without the suffixes, whose formatting takes as long as everything else."""
    if isinstance(node, torch.Tensor):  # first, since most are, and each question that follows takes a microsecond
        return None
    if find_type(node) is not None:
        return None
    if isinstance(node, Mapping):
        return list(node.values())
    if is_sequence(node) or _is_named(node):
        return list(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, name) for name in _assigned(node)]
    return None


def _suffixes_of(node: Any) -> list[str]:
    if isinstance(node, Mapping):
        return [f"[{json.dumps(key, ensure_ascii=False) if isinstance(key, str) else repr(key)}]" for key in node]
    if is_sequence(node):
        return [f"[{index}]" for index in range(len(node))]
    return [f".{name}" for name in (node._fields if _is_named(node) else _assigned(node))]


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields") and not isinstance(node, _WHOLE)


def with_fields(node: Any, values: Sequence[Any]) -> Any:
    """The same container with other values, in the order of ``fields_of``; itself where no value is another object.

    Dataclasses are copied, not constructed: frozen ones and fields with ``init=False`` keep what they had. Raises
    InvalidBatch where a mapping of a foreign type cannot be made from a dict.
    """
    if all(new is old for new, old in zip(values, _children_of(node) or [], strict=True)):
        return node
    if isinstance(node, Mapping):
        return _with_values(node, values)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)._make(values)  # type: ignore[attr-defined]
    if is_sequence(node):
        return with_items(node, values)
    changed = copy.copy(node)
    for name, value in zip(_assigned(node), values, strict=True):
        object.__setattr__(changed, name, value)
    return changed


def with_items(node: Any, items: Sequence[Any]) -> Any:
    """A list or tuple of the same type with these items, as many as there are."""
    if type(node) is list:
        return list(items)
    if isinstance(node, tuple):
        return type(node)(items)
    changed = copy.copy(node)
    changed[:] = items
    return changed


def leaves_of(node: Any) -> Iterator[Any]:
    """Everything that is no container, in order; of a registered type its tensors."""
    children = _children_of(node)
    if children is None:
        registered = None if isinstance(node, torch.Tensor) else find_type(node)
        yield from [node] if registered is None else registered.tensors(node)
        return
    for child in children:
        yield from leaves_of(child)


def holds_registered(node: Any) -> bool:
    """Whether it is of a registered type, or a container with such an object anywhere in it."""
    return find_type(node) is not None or any(holds_registered(child) for child in _children_of(node) or ())


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of the tree, in order, also scalars and those inside per-sample lists; no NumPy arrays."""
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tree with ``function(tensor)`` for each tensor; NumPy arrays and all else stay as they are."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    registered = find_type(batch)
    if registered is not None:
        return registered.map_tensors(batch, function)
    children = _children_of(batch)
    return batch if children is None else with_fields(batch, [map_tensors(child, function) for child in children])


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without a graph: a leaf that requires a gradient where the given tensor does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def with_fresh_containers(node: Any) -> Any:
    """The same tree in new containers, so that popping or adding an entry does not change the original."""
    held = _children_of(node)
    if held is None:
        return node
    children = [with_fresh_containers(child) for child in held]
    if isinstance(node, dict | UserDict):
        fresh = copy.copy(node)
        for key, child in zip(node, children, strict=True):
            fresh[key] = child
        return fresh
    return with_items(node, children) if is_sequence(node) else with_fields(node, children)


def count_elements(batch: Any) -> int:
    """Elements of all tensors and NumPy arrays together."""
    return sum(leaf.numel() if isinstance(leaf, torch.Tensor) else leaf.size for leaf in _arrays_of(batch))


def count_bytes(batch: Any) -> int:
    """Bytes of all tensors and NumPy arrays together; those that share memory count each."""
    return sum(bytes_of(leaf) if isinstance(leaf, torch.Tensor) else int(leaf.nbytes) for leaf in _arrays_of(batch))


def _arrays_of(batch: Any) -> Iterator[Any]:
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) or is_array(leaf))


def _assigned(node: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]


def _with_values(node: Mapping[Any, Any], values: Sequence[Any]) -> Any:
    replaced = dict(zip(node, values, strict=True))
    # Copying keeps what the constructor does not take: a default factory, a tokenizer's encodings. A foreign mapping's
    # copy may share its storage with the original, so that writing to it would write to the user's batch.
    if isinstance(node, dict | UserDict):
        changed = copy.copy(node)
        for key, value in replaced.items():  # transformers' outputs forbid update()
            changed[key] = value
        return changed
    try:
        return type(node)(replaced)  # type: ignore[call-arg]
    except TypeError as error:
        raise InvalidBatch(f"{name_type(node)} cannot be made from a dict ({error}): pass a dict") from error
