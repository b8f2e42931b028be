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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from autobatch._formatting import name_type
from autobatch.batch.registry import find_type
from autobatch.errors import InvalidArgument
from autobatch.torch_internals.storages import bytes_of

__all__ = [
    "TreeSpec",
    "as_leaf",
    "count_bytes",
    "count_elements",
    "count_rows",
    "field_names",
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
_VALUES = frozenset((type(None), bool, int, float, complex, str, bytes))


class TreeSpec:
    """The containers of a batch without its leaves, by which the next one of the kind is taken apart in a few calls.

    Most batches have one: tuples, lists and dicts of dense tensors, numbers and strings. The name is pytree's.

    Attributes:
        pair_size: Leaves of a plain tuple, such as inputs and labels; 0 of all else.
    """

    __slots__ = ("_children", "_keys", "_type", "pair_size")

    def __init__(self, batch: Any) -> None:
        """Read the containers; raises TypeError for a part that is neither plain container nor plain leaf."""
        self._type = type(batch)
        if self._type not in (tuple, list, dict):
            raise TypeError(self._type.__name__)
        self._keys = list(batch) if self._type is dict else None
        values = batch if self._keys is None else batch.values()
        self._children = [
            None if type(value) is torch.Tensor or type(value) in _VALUES else TreeSpec(value) for value in values
        ]
        self.pair_size = len(self._children) if self._type is tuple and not any(self._children) else 0

    @classmethod
    def of(cls, batch: Any) -> TreeSpec | None:
        """The spec of a batch, where it has one."""
        try:
            return cls(batch)
        except TypeError:
            return None

    def flatten(self, batch: Any, leaves: list[Any]) -> bool:
        """Append the leaves in order; returns whether the batch has these containers, else ``leaves`` is incomplete."""
        if type(batch) is not self._type or len(batch) != len(self._children):
            return False
        values: Iterable[Any] = batch
        if self._keys is not None:
            if list(batch) != self._keys:
                return False
            values = batch.values()
        for child, value in zip(self._children, values, strict=True):
            if child is not None:
                if not child.flatten(value, leaves):
                    return False
            elif type(value) is torch.Tensor or type(value) in _VALUES:
                leaves.append(value)
            else:
                return False
        return True

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """A batch in containers of its own, of as many leaves as it needs; an iterator stays where it then is."""
        leaves = iter(leaves)
        values = [next(leaves) if child is None else child.unflatten(leaves) for child in self._children]
        if self._keys is not None:
            return dict(zip(self._keys, values, strict=True))
        return values if self._type is list else tuple(values)


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array; NumPy itself is never imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_sequence(value: Any) -> bool:
    """Whether it is a list or a tuple without named fields, which may hold one entry a sample."""
    return isinstance(value, list | tuple) and not isinstance(value, _WHOLE) and not hasattr(value, "_fields")


def field_names(node: Any) -> list[str] | None:
    """The fields of a namedtuple, or those of a dataclass that have a value; ``None`` of anything else."""
    if isinstance(node, tuple):
        return list(node._fields) if hasattr(node, "_fields") and not isinstance(node, _WHOLE) else None
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
    return None


def count_rows(leaf: Any) -> int | None:
    """Rows of a tensor or array, samples of a registered type; ``None`` of anything else and of scalars."""
    registered = find_type(leaf)
    if registered is not None:
        return registered.count_samples(leaf)
    if isinstance(leaf, torch.Tensor) or is_array(leaf):
        return int(leaf.shape[0]) if leaf.ndim > 0 else None
    return None


def fields_of(node: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, each with its part of a path (``'["x"]'``, ``"[0]"``, ``".x"``); ``None`` for a leaf."""
    children = _children_of(node)
    if children is None:
        return None
    if isinstance(node, Mapping):
        keys = (json.dumps(key, ensure_ascii=False) if isinstance(key, str) else repr(key) for key in node)
        suffixes = [f"[{key}]" for key in keys]
    elif is_sequence(node):
        suffixes = [f"[{index}]" for index in range(len(node))]
    else:
        suffixes = [f".{name}" for name in field_names(node) or ()]
    return list(zip(suffixes, children, strict=True))


def _children_of(node: Any) -> list[Any] | None:
    """The same without the suffixes, whose formatting takes as long as everything else."""
    if isinstance(node, torch.Tensor):  # first, since most are, and each question that follows takes a microsecond
        return None
    if find_type(node) is not None:
        return None
    if isinstance(node, Mapping):
        return list(node.values())
    if is_sequence(node):
        return list(node)
    names = field_names(node)
    return None if names is None else [getattr(node, name) for name in names]


def with_fields(node: Any, values: Sequence[Any]) -> Any:
    """The same container with other values, in the order of ``fields_of``; itself where no value is another object.

    Dataclasses are copied, not constructed: frozen ones and fields with ``init=False`` keep what they had. Raises
    InvalidArgument where a mapping of a foreign type cannot be made from a dict.
    """
    is_same = all(new is old for new, old in zip(values, _children_of(node) or [], strict=True))
    return node if is_same else _rebuild(node, values)


def with_fresh_containers(node: Any) -> Any:
    """The same tree in new containers, so that popping or adding an entry does not change the original."""
    children = _children_of(node)
    if children is None:
        return node
    rebuild = _rebuild if isinstance(node, dict | UserDict) or is_sequence(node) else with_fields
    return rebuild(node, [with_fresh_containers(child) for child in children])


def _rebuild(node: Any, values: Sequence[Any]) -> Any:
    if is_sequence(node):
        return with_items(node, values)
    if isinstance(node, tuple):
        return type(node)._make(values)  # type: ignore[attr-defined]
    if isinstance(node, Mapping) and not isinstance(node, dict | UserDict):
        # Not copied: a foreign mapping's copy may share its storage with the original, the user's batch.
        try:
            return type(node)(dict(zip(node, values, strict=True)))  # type: ignore[call-arg]
        except TypeError as error:
            raise InvalidArgument(f"{name_type(node)} cannot be made from a dict ({error}): pass a dict") from error
    # Copying keeps what the constructor does not take: a default factory, a tokenizer's encodings.
    changed = copy.copy(node)
    if isinstance(node, Mapping):
        for key, value in zip(node, values, strict=True):  # transformers' outputs forbid update()
            changed[key] = value
    else:
        for name, value in zip(field_names(node) or (), values, strict=True):
            object.__setattr__(changed, name, value)
    return changed


def with_items(node: Any, items: Sequence[Any]) -> Any:
    """A list or tuple of the same type with these items, as many as there are, and the attributes of the original."""
    if type(node) in (list, tuple):
        return type(node)(items)
    if isinstance(node, tuple):
        made = type(node)(items)
        if hasattr(node, "__dict__"):
            vars(made).update(vars(node))
        return made
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
    return find_type(node) is not None or any(map(holds_registered, _children_of(node) or ()))


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


def count_elements(batch: Any) -> int:
    """Elements of all tensors and NumPy arrays together."""
    return sum(leaf.numel() if isinstance(leaf, torch.Tensor) else leaf.size for leaf in _arrays_of(batch))


def count_bytes(batch: Any) -> int:
    """Bytes of all tensors and NumPy arrays together; those that share memory count each."""
    return sum(bytes_of(leaf) if isinstance(leaf, torch.Tensor) else int(leaf.nbytes) for leaf in _arrays_of(batch))


def _arrays_of(batch: Any) -> Iterator[Any]:
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) or is_array(leaf))
