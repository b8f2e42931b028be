"""Checks paths that a user passes, before anything is read or written.

Covers what is no path at all. Does not cover whether there is a file (the errors of the system say that). Nothing here
imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument

__all__ = ["check_path"]


def check_path(call: str, value: Any) -> Path:
    """The path that was passed to a call, which the message names.

    Raises:
        InvalidArgument: It is no text and no ``os.PathLike`` of one, or has a null character.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or "\0" in text:
        raise InvalidArgument(f"{call}({show_value(value)}): pass a path, such as 'plan.json'")
    return Path(text)
