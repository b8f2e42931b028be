"""Lists that say themselves how they are read, for batches from which that cannot be decided.

Covers the two marks. Does not cover how a list without a mark is read (``layout_rules``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autobatch._formatting import name_type
from autobatch.errors import InvalidArgument

__all__ = ["Fields", "Samples"]


class _Marked(list[Any]):
    def __init__(self, entries: Iterable[Any] = (), /) -> None:
        """Hold these entries.

        Raises:
            InvalidArgument: They are no list, or a text or a mapping, which would be taken apart.
        """
        if not isinstance(entries, Iterable) or isinstance(entries, str | bytes | Mapping):
            name = type(self).__name__
            raise InvalidArgument(f"autobatch.batches.{name}() takes a list of entries, not {name_type(entries)}")
        super().__init__(entries)


class Samples(_Marked):
    """A list in a batch with one entry for each sample.

    It is a ``list`` in every other way: ``step`` is called with one, and a collate function may return one. A plan
    holds how its example batch was read (``plan.batch_lists``), so batches of later steps need no mark.
    """


class Fields(_Marked):
    """A list in a batch whose entries are fields, such as inputs and targets: each holds all samples."""
