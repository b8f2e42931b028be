"""Bytes as a user may write them: an int, or a text such as ``"8GiB"``.

Covers reading alone. Does not cover what a size is for, nor the message where there is none (the caller's). Nothing
here imports torch.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from autobatch._bounds import LARGEST

__all__ = ["read_bytes"]

_BYTES = TypeAdapter(ByteSize)
# pydantic reads the beginning and ignores the rest: "5%" would be five bytes, "1.2.3KiB" one.
_WHOLE_TEXT = re.compile(r"\s*\d*\.?\d+\s*[a-zA-Z]*\s*")


def read_bytes(value: Any) -> int | None:
    """The number of bytes that is meant; ``None`` where it is none, not positive, or more than any device has."""
    half_read = isinstance(value, str) and not _WHOLE_TEXT.fullmatch(value)
    if half_read or isinstance(value, bool):
        return None
    try:
        size = int(_BYTES.validate_python(value))
    except ValidationError:
        return None
    return size if 0 < size <= LARGEST else None
