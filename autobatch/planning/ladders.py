"""Lists the micro-batch sizes that a run may change to.

Covers eager and compiled models. Does not cover which of them a step has (``pacing``).
"""

from __future__ import annotations

from autobatch.errors import InvalidArgument
from autobatch.planning.planner import useful_sizes

__all__ = ["COMPILED_SIZES", "compiled_ladder", "eager_ladder"]

COMPILED_SIZES = 3
"""Rungs for a compiled step. A batch in balanced parts has at most two sizes, so three rungs are six graphs of the
eight that ``torch._dynamo.config.recompile_limit`` allows: two are left for evaluation or the epoch's short last batch.
"""


def eager_ladder(target: int, size: int) -> tuple[int, ...]:
    """The sizes worth going on with where a new size costs nothing: ``useful_sizes`` up to the plan's, ascending.

    Raises:
        InvalidArgument: ``target`` or ``size`` is less than 1.
    """
    sizes = useful_sizes(target, size)
    return sizes if sizes[-1] == size else (*sizes, size)


def compiled_ladder(size: int) -> tuple[int, ...]:
    """A few sizes where each new one is compiled anew: ``size``, its half and its quarter, ascending.

    One sample is left out: ``torch.compile`` specialises on it even where sizes are dynamic.

    Raises:
        InvalidArgument: ``size`` is less than 1.
    """
    if size < 1:
        raise InvalidArgument(f"a micro-batch must have at least one sample, not {size}")
    halves = (size >> times for times in reversed(range(COMPILED_SIZES)))
    return tuple(half for half in halves if half > 1 or half == size)
