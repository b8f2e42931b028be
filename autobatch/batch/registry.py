"""Lets users define how batches are read that autobatch cannot read: own types, and lists with two meanings.

The registry is one for the process, as pytree's and einops' are.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.overrides import TorchFunctionMode

from autobatch._formatting import name_type, show_value, with_article
from autobatch.errors import InvalidArgument
from autobatch.planning.division import as_index

OnTensor = Callable[[torch.Tensor], torch.Tensor]

ListReading = Literal["samples", "fields", "unclear"]

BUILT_IN = (object, torch.Tensor, torch.nn.Parameter, dict, UserDict, list, tuple, str, bytes, int, float, bool)
"""Types of which every batch is made: a registration of one would change how all batches are read."""


@dataclass(frozen=True)
class BatchType:
    """A registered type and the user's functions on it, each checked where it is called."""

    type: type
    count: Callable[[Any], int]
    take: Callable[[Any, list[int]], Any]
    map: Callable[[Any, OnTensor], Any]

    def count_samples(self, batch: Any) -> int:
        returned = self.count(batch)
        if as_index(returned) < 0:
            raise InvalidArgument(
                f"count= of {self.type.__name__} returned {show_value(returned)}: it must return the number of "
                f"samples, an int"
            )
        return as_index(returned)

    def take_samples(self, batch: Any, indices: Sequence[int]) -> Any:
        """Return the samples at these indices, which may repeat; raises InvalidArgument for another type or number."""
        part = self.take(batch, list(indices))
        if not isinstance(part, self.type):
            raise InvalidArgument(
                f"take= of {self.type.__name__} returned {name_type(part)}: it must return "
                f"{with_article(self.type.__name__)} with the samples at the given indices"
            )
        count = self.count_samples(part)
        if count != len(indices):
            raise InvalidArgument(
                f"take= of {self.type.__name__} was given {len(indices)} indices and returned {count} samples: it must "
                f"return one sample for each index, in that order, also where an index repeats"
            )
        return part

    def check_take(self, batch: Any) -> None:
        """Raise InvalidArgument where ``take`` ignores its indices, if the batch shows that its samples differ."""
        count = self.count_samples(batch)
        rows = [tensor for tensor in self.tensors(batch) if _is_dense(tensor) and tensor.shape[:1] == (count,)]
        if all(torch.equal(tensor[0], tensor[-1]) for tensor in rows):
            return
        last = count - 1
        taken = [self.tensors(self.take_samples(batch, indices)) for indices in ([0, last], [last, 0])]
        pairs = zip(*taken, strict=False)
        is_alike = all(_is_dense(one) and _is_dense(other) and torch.equal(one, other) for one, other in pairs)
        if is_alike and len(taken[0]) == len(taken[1]):
            raise InvalidArgument(
                f"take= of {self.type.__name__} returned the same samples for the indices [0, {last}] and [{last}, 0]: "
                f"it must return the samples at the given indices, in that order"
            )

    def map_tensors(self, batch: Any, function: OnTensor) -> Any:
        changed: list[bool] = []

        def observe(tensor: torch.Tensor) -> torch.Tensor:
            result = function(tensor)
            changed.append(result is not tensor)
            return result

        mapped = self.map(batch, observe)
        if not isinstance(mapped, self.type):
            raise InvalidArgument(
                f"map= of {self.type.__name__} returned {name_type(mapped)}: it must return "
                f"{with_article(self.type.__name__)} in which each tensor is function(tensor)"
            )
        if mapped is batch and any(changed):
            raise InvalidArgument(f"map= of {self.type.__name__} changed the batch in place: it must return a new one")
        return mapped

    def tensors(self, batch: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        self.map_tensors(batch, collect)
        return found


_registered: dict[type, BatchType] = {}


def register(
    type: type,  # noqa: A002 - the name in the public contract
    *,
    count: Callable[[Any], int],
    take: Callable[[Any, list[int]], Any],
    map: Callable[[Any, OnTensor], Any] | None = None,  # noqa: A002 - what the function does
) -> None:
    """Let batches be, or hold, objects of a type of your own, such as a batch of graphs.

    ``fit``, ``Runner``, ``verify`` and ``predict`` then count, divide and move them as they do tensors. Errors of the
    three functions come out as they were raised.

    Args:
        type: The class. Its subclasses are included, unless one is registered itself.
        count: ``count(batch) -> int``, the number of samples.
        take: ``take(batch, indices) -> batch``: a new batch of the same type with the samples at these indices (a list
            of int), in that order. Indices may repeat: this is how a batch larger than the example is made. The given
            batch must not change; tensors may be views of its tensors or copies.
        map: ``map(batch, function) -> batch``: a new batch in which each tensor is ``function(tensor)``, as pytree's
            ``tree_map`` does; used to move a micro-batch to the device. Default: ``copy.deepcopy`` of the batch in
            which each tensor, wherever it is, is replaced and none is copied.

    Registering a type again replaces what was registered before, so that a notebook's cell may be run twice.

    Raises:
        InvalidArgument: ``type`` is not a class, or every batch is made of it (``dict``, ``torch.Tensor``), or one of
            the others cannot be called.
    """
    if not isinstance(type, _class) or type in BUILT_IN:
        given = type.__name__ if isinstance(type, _class) else name_type(type)
        raise InvalidArgument(f"register() takes a class of your own, such as a batch of graphs, not {given}")
    for name, function in (("count", count), ("take", take), ("map", map)):
        if not callable(function) and not (name == "map" and function is None):
            raise InvalidArgument(f"register({type.__name__}, {name}=...) needs a function, not {name_type(function)}")
    _registered[type] = BatchType(type, count, take, map or _copy_with)


_class = type  # ``register`` has an argument of that name


def find_type(node: Any) -> BatchType | None:
    if not _registered:  # asked for every node of every batch
        return None
    return next((_registered[base] for base in type(node).__mro__ if base in _registered), None)


class Marked(list[Any]):
    """A list with a known reading."""

    reading: ClassVar[ListReading]

    def __init__(self, entries: Iterable[Any] = (), /) -> None:
        """Refuse a text or a mapping, which would be taken apart, and other types than lists."""
        if not isinstance(entries, Iterable) or isinstance(entries, str | bytes | Mapping):
            name = type(self).__name__
            raise InvalidArgument(f"autobatch.batches.{name}() takes a list of entries, not {name_type(entries)}")
        super().__init__(entries)


class Samples(Marked):
    """A list in a batch with one entry for each sample.

    It is a ``list`` in every other way: ``step`` is called with one, and a collate function may return one. A plan
    holds how its example batch was read (``plan.batch_lists``), so batches of later steps need no mark.
    """

    reading = "samples"


class Fields(Marked):
    """A list in a batch whose entries are fields, such as inputs and targets: each holds all samples."""

    reading = "fields"


class _ReplacedTensors(TorchFunctionMode):
    """Lets ``copy.deepcopy`` take ``function(tensor)`` for the copy of a tensor."""

    def __init__(self, function: OnTensor) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._function(args[0])
        return func(*args, **(kwargs or {}))


def _is_dense(tensor: torch.Tensor) -> bool:
    return not tensor.is_nested and tensor.layout is torch.strided


def _copy_with(batch: Any, function: OnTensor) -> Any:
    with _ReplacedTensors(function):
        try:
            return copy.deepcopy(batch)
        except (TypeError, copy.Error) as error:
            raise InvalidArgument(
                f"{name_type(batch)} cannot be copied ({error}): pass map=(batch, function) -> batch to "
                f"autobatch.batches.register({type(batch).__name__}, ...)"
            ) from error
