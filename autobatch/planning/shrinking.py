"""How many samples to go on with after a micro-batch ran out of memory.

Covers the one number. Does not cover what is cleaned up, restored or run again (``accumulation``).
"""

from __future__ import annotations

from autobatch.errors import InvalidArgument
from autobatch.planning.curve import MemoryCurve

__all__ = ["shrink"]


def shrink(failed: int, curve: MemoryCurve | None, room_bytes: int | None) -> int:
    """The next size to try: at least 1, always smaller than the one that failed.

    What the curve says fits is tried first. Where the curve says that the failed size fits, it is wrong today (longer
    sequences, another tenant, fragmentation), but it was right on an earlier day: so only a quarter is given up.
    Without a curve, or without knowing the room, half.

    Args:
        failed: Samples in the micro-batch that did not fit, at least 2.
        curve: Peak memory by size, where a plan has one.
        room_bytes: What this step may hold now, what is resident included; ``None`` where it cannot be told.

    Raises:
        InvalidArgument: ``failed`` is less than 2: one sample cannot be split.
    """
    if failed < 2:
        raise InvalidArgument(f"a micro-batch of {failed} cannot be made smaller")
    if curve is None or room_bytes is None:
        return failed // 2
    fitting = curve.largest(room_bytes)
    return failed * 3 // 4 if fitting >= failed else max(fitting, 1)
