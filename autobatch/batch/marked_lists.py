"""Lists that say themselves how they are read, for batches from which that cannot be decided.

Covers the two marks. Does not cover how a list without a mark is read (``layout_rules``).
"""

from __future__ import annotations

from typing import Any

__all__ = ["Fields", "Samples"]


class Samples(list[Any]):
    """A list in a batch with one entry for each sample.

    It is a ``list`` in every other way: ``step`` is called with one, and a collate function may return one. A plan
    holds how its example batch was read (``plan.batch_lists``), so batches of later steps need no mark.
    """


class Fields(list[Any]):
    """A list in a batch whose entries are fields, such as inputs and targets: each holds all samples."""
