"""Defines every error that autobatch raises; errors of the user's own code reach the user unchanged."""

from __future__ import annotations

__all__ = [
    "AutobatchError",
    "CannotRetry",
    "DoesNotFit",
    "InexactSplit",
    "InvalidArgument",
    "NeedsBatch",
    "RankFailed",
    "RankLost",
]


class AutobatchError(Exception):
    """Base class of all errors that autobatch raises."""


class NeedsBatch(AutobatchError):
    """The model does not show what its input looks like: pass an example as ``batch=``."""


class DoesNotFit(AutobatchError):
    """The smallest micro-batch does not fit in the budget; all state was restored.

    Attributes:
        sample_index: Index of the sample that does not fit in ``map``, else ``None``.
    """

    sample_index: int | None = None


class CannotRetry(AutobatchError):
    """The step ran out of memory where it cannot be undone: load a checkpoint."""


class InexactSplit(AutobatchError):
    """Micro-batches would change the gradient, and ``check="raise"`` was passed."""


class InvalidArgument(AutobatchError, ValueError):
    """An argument, a batch or the return value of a user's function cannot be used."""


class RankFailed(AutobatchError):
    """Another rank failed, or the ranks made different calls."""


class RankLost(AutobatchError):
    """Another rank ended or did not answer in time; the process group cannot be used any more."""
