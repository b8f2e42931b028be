"""Takes batches apart into leaves, and makes containers like theirs: mappings, lists, tuples and dataclasses.

No tensor is copied. ``torch.utils._pytree`` knows neither dataclasses nor a tokenizer's output.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from autobatch._formatting import name_type
from autobatch._user_errors import note_where
from autobatch.batch.registry import BUILT_IN, ListReading, Marked, find_type
from autobatch.errors import InvalidArgument
from autobatch.torch_internals.storages import bytes_of

ROOT = "batch"

# A shape describes, it holds no samples; a packed sequence's rows are time steps of several samples at once.
_WHOLE = (torch.Size, PackedSequence)


class Leaf(NamedTuple):
    """One part of a batch that is taken apart no further.

    ``"rows"`` (a tensor or an array), ``"registered"`` and ``"samples"`` (a list) have one entry a sample, ``"shared"``
    is the same for all samples. ``"unclear"`` could be either, and is refused where the batch is divided. ``"open"`` is
    not decided yet.
    """

    path: str  # such as batch["x"]
    value: Any
    kind: Literal["rows", "registered", "samples", "fields", "unclear", "open", "shared"]


Container = tuple[Any, int]
"""A container, and the number of its parts."""


def take_apart(batch: Any, lists: Mapping[str, ListReading]) -> tuple[list[Leaf], list[Container | None]]:
    """List the leaves in order; and ``None`` for each of them, with each container after its parts.

    ``lists`` has the readings of lists by path.
    """
    leaves: list[Leaf] = []
    order: list[Container | None] = []
    _visit(batch, ROOT, lists, leaves, order)
    return leaves, order


def _visit(
    node: Any, path: str, lists: Mapping[str, ListReading], leaves: list[Leaf], order: list[Container | None]
) -> None:
    # A function of the module: one inside ``take_apart`` would refer to itself, and hold each batch until a collection.
    kind: Any = "shared"
    if type(node) not in BUILT_IN and find_type(node) is not None:
        kind = "registered"
    elif isinstance(node, torch.Tensor) or is_array(node):
        kind = "rows" if node.ndim else "shared"
    elif is_sequence(node) and (reading := _read_list(node, lists.get(path, "open"))) != "fields":
        kind = reading
    elif (fields := fields_of(node)) is not None:
        for suffix, child in fields:
            _visit(child, f"{path}{suffix}", lists, leaves, order)
        order.append((node, len(fields)))
        return
    leaves.append(Leaf(path, node, kind))
    order.append(None)


def _read_list(node: Any, known: str) -> str:
    return "open" if isinstance(node, Marked) and node.reading != known else known


def is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_sequence(value: Any) -> bool:
    """Return whether it is a list or tuple that may hold one entry a sample."""
    return isinstance(value, list | tuple) and not isinstance(value, _WHOLE) and not hasattr(value, "_fields")


def field_names(node: Any) -> list[str] | None:
    """Return the fields of a namedtuple, or those of a dataclass that have a value; ``None`` of anything else."""
    if isinstance(node, tuple):
        return list(node._fields) if hasattr(node, "_fields") and not isinstance(node, _WHOLE) else None
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
    return None


def is_record(entry: Any) -> bool:
    return find_type(entry) is None and (isinstance(entry, Mapping) or field_names(entry) is not None)


def count_rows(leaf: Any) -> int | None:
    """Return the rows of a tensor or array, or the samples of a registered type; ``None`` of all else."""
    if (registered := find_type(leaf)) is not None:
        return registered.count_samples(leaf)
    return int(leaf.shape[0]) if (isinstance(leaf, torch.Tensor) or is_array(leaf)) and leaf.ndim else None


def children_of(node: Any) -> list[Any] | None:
    if isinstance(node, torch.Tensor) or (type(node) not in BUILT_IN and find_type(node) is not None):
        return None
    if isinstance(node, Mapping):
        return list(node.values())
    if is_sequence(node):
        return list(node)
    names = field_names(node)
    return None if names is None else [getattr(node, name) for name in names]


def fields_of(node: Any) -> list[tuple[str, Any]] | None:
    """Return what a container holds, each with its part of a path (``'["x"]'``, ``"[0]"``, ``".x"``), or ``None``."""
    children = children_of(node)
    if children is None:
        return None
    if isinstance(node, Mapping):
        suffixes = [name_key(key) for key in node]
    elif is_sequence(node):
        suffixes = [f"[{index}]" for index in range(len(node))]
    else:
        suffixes = [f".{name}" for name in field_names(node) or ()]
    return list(zip(suffixes, children, strict=True))


def name_key(key: Any) -> str:
    if not isinstance(key, str):
        return f"[{key!r}]"
    return f'["{key}"]' if key.isidentifier() else f"[{json.dumps(key, ensure_ascii=False)}]"


def leaves_of(node: Any) -> Iterator[Any]:
    children = children_of(node)
    if children is None:
        registered = None if isinstance(node, torch.Tensor) else find_type(node)
        yield from [node] if registered is None else registered.tensors(node)
        return
    for child in children:
        yield from leaves_of(child)


def holds_registered(node: Any) -> bool:
    return find_type(node) is not None or any(holds_registered(child) for child in children_of(node) or ())


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))


def count_elements(batch: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) or is_array(leaf))


def count_bytes(batch: Any) -> int:
    arrays = sum(int(leaf.nbytes) for leaf in leaves_of(batch) if is_array(leaf))
    return arrays + sum(map(bytes_of, tensors_of(batch)))


def with_fields(node: Any, values: Sequence[Any]) -> Any:
    if is_sequence(node):
        return with_items(node, values)
    if all(new is old for new, old in zip(values, children_of(node) or [], strict=True)) and not _is_dict(node):
        return node
    if isinstance(node, tuple):
        return type(node)._make(values)  # type: ignore[attr-defined]
    if isinstance(node, Mapping) and not _is_dict(node):
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
            object.__setattr__(changed, name, value)  # also of a frozen dataclass
    return changed


def with_items(node: Any, items: Sequence[Any]) -> Any:
    """Return a list or tuple of the same type with these items, and the attributes of the original."""
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


def _is_dict(node: Any) -> bool:
    return isinstance(node, dict | UserDict)


def map_leaves(node: Any, function: Callable[[Any], Any]) -> Any:
    children = children_of(node)
    return (
        function(node) if children is None else with_fields(node, [map_leaves(child, function) for child in children])
    )


def with_fresh_containers(node: Any) -> Any:
    """Return the same tree in new containers, so that an entry added or popped there does not change this one."""
    return map_leaves(node, lambda leaf: leaf)


def copy_arrays(node: Any) -> Any:
    """Return the tree in new containers with copies of its NumPy arrays, which count no writes; all else stays."""
    return map_leaves(node, lambda leaf: leaf.copy() if is_array(leaf) else leaf)


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the tree in new containers with ``function(tensor)`` for each tensor; all else stays."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        registered = find_type(leaf)
        return leaf if registered is None else registered.map_tensors(leaf, function)

    return map_leaves(batch, change)


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values without a graph: a leaf that requires a gradient where the given tensor does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def call_read_only(
    name: str, function: Callable[..., Any], batch: Any, *others: Any, called_by: str = "autobatch"
) -> Any:
    """Call a function of the user, such as ``weigh``, with new containers; raise InvalidArgument if it wrote there."""
    tensors = [tensor for tensor in tensors_of(batch) if not tensor.is_inference()]
    versions = [tensor._version for tensor in tensors]
    try:
        answer = function(with_fresh_containers(batch), *others)
    except Exception as error:
        note_where(error, f"your {name}(batch{', largest' if others else ''})", called_by)
        raise
    if [tensor._version for tensor in tensors] != versions:
        raise InvalidArgument(
            f"{name}() wrote into its batch in place, and the samples stay as it left them: use a copy"
        )
    return answer
