"""Counts calls of functions: what code costs, in a number that no other program on the machine can change."""

from __future__ import annotations

import sys
from collections.abc import Callable


def count_calls(action: Callable[[], object], *, builtins: bool = False) -> int:
    """How many Python functions were called, and with ``builtins`` also how many of C."""
    calls, counted = 0, {"call", "c_call"} if builtins else {"call"}

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in counted

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls
