"""Notes on a user's own error what happened to it here: a line below its message, and attributes."""

from __future__ import annotations

from typing import Any

__all__ = ["add_note", "set_attributes"]


def add_note(error: Exception, note: str) -> None:
    """As ``BaseException.add_note``, which Python 3.10 does not have: there the note is not printed."""
    set_attributes(error, __notes__=[*getattr(error, "__notes__", []), note])


def set_attributes(error: Exception, **values: Any) -> None:
    """Set what its class allows."""
    for name, value in values.items():
        try:
            setattr(error, name, value)
        except AttributeError:  # a class whose attributes cannot be set
            return
