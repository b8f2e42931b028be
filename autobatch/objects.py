"""Checks objects of the user's or of another library by the methods that are called on them.

Covers optimizers, schedulers and scalers, which need not derive from torch's classes. Does not cover what their methods
do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["is_instance_with", "takes_none"]


def is_instance_with(value: Any, *methods: str) -> bool:
    """Whether it is an instance with these methods: a class has them too, and cannot be called like one."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def takes_none(function: Callable[..., Any]) -> bool:
    """Whether it can be called without an argument; ``True`` where it shows no signature, as builtins do."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:
        return True
    return True
