"""Remembers how a batch of tensors is built, so that the next one of the same kind is taken apart in a few calls.

Covers tuples, lists and dicts of dense tensors, numbers and strings, which most batches are. Every other batch has no
spec and is read by the rules of ``layout_rules`` each time. The name is pytree's (torch/utils/_pytree.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["TreeSpec"]

_VALUES = frozenset((type(None), bool, int, float, complex, str, bytes))


class TreeSpec:
    """The containers of a batch of plain leaves, without the leaves.

    Attributes:
        is_pair: Whether it is a tuple of leaves, as inputs and labels are.
    """

    __slots__ = ("_children", "_keys", "_type", "is_pair")

    def __init__(self, batch: Any) -> None:
        """Read the containers of a batch.

        Raises:
            TypeError: A part of it is neither a plain container nor a dense tensor, a number or a string.
        """
        self._type = type(batch)
        self._keys = list(batch) if self._type is dict else None
        if self._type not in (tuple, list, dict):
            raise TypeError(self._type.__name__)
        values = batch.values() if self._type is dict else batch
        self._children = [None if _is_leaf(value) else TreeSpec(value) for value in values]
        self.is_pair = self._type is tuple and not any(self._children)

    @classmethod
    def of(cls, batch: Any) -> TreeSpec | None:
        """The spec of a batch, where it has one."""
        try:
            return cls(batch)
        except TypeError:
            return None

    def flatten(self, batch: Any, leaves: list[Any]) -> bool:
        """Append the leaves of a batch in order.

        Returns:
            Whether the batch has these containers; else ``leaves`` is incomplete.
        """
        if type(batch) is not self._type or len(batch) != len(self._children):
            return False
        values: Sequence[Any] = batch
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

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """A batch in containers of its own with these leaves."""
        return self.build(iter(leaves))

    def build(self, leaves: Iterator[Any]) -> Any:
        """The same, taking as many leaves as it needs."""
        values = [next(leaves) if child is None else child.build(leaves) for child in self._children]
        if self._keys is not None:
            return dict(zip(self._keys, values, strict=True))
        return values if self._type is list else tuple(values)


def _is_leaf(value: Any) -> bool:
    return type(value) is torch.Tensor or type(value) in _VALUES
