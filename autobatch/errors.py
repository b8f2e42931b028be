"""Defines the errors that autobatch raises itself; those of the user's own step come out as they were raised."""

from __future__ import annotations

__all__ = [
    "AutobatchError",
    "CannotPredict",
    "CannotRetry",
    "DoesNotFit",
    "InexactSplit",
    "InvalidArgument",
    "InvalidBatch",
    "InvalidResult",
    "InvalidStep",
    "NeedsBatch",
    "RankFailed",
    "RankLost",
]


class AutobatchError(Exception):
    """The base of all errors that autobatch raises itself."""


class NeedsBatch(AutobatchError):
    """The model does not say what its input looks like, so an example batch is needed."""


class DoesNotFit(AutobatchError):
    """Not even one sample fits the budget, or a step could not be done at any size; all state is as before.

    Attributes:
        sample_index: In ``map``, the sample that does not fit; ``None`` elsewhere.
    """

    sample_index: int | None = None


class CannotRetry(AutobatchError):
    """Memory ended where a retry could not be exact: parameters may have moved."""


class CannotPredict(AutobatchError):
    """The step cannot be traced without running it."""


class InexactSplit(AutobatchError):
    """Splitting this step changes its gradient, and the user asked to be stopped (``check="raise"``)."""


class InvalidArgument(AutobatchError, ValueError):
    """An argument of the user's cannot mean anything."""


class InvalidBatch(AutobatchError, ValueError):
    """A batch cannot be counted or split: unequal leading dimensions, no tensors, no samples."""


class InvalidResult(AutobatchError, ValueError):
    """What a function returned for some samples has not one entry for each of them, or cannot be joined."""


class InvalidStep(AutobatchError, TypeError):
    """A step returned something whose gradient is not defined: not a scalar, or without a graph."""


class RankFailed(AutobatchError):
    """Another rank could not do its part, so that nothing was done on any; everything is as before."""


class RankLost(AutobatchError):
    """Another rank is gone or did not answer in time: the process group cannot be used any more."""
