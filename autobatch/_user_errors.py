"""Lets errors of the user's functions pass unchanged, with one note that names the function."""

from __future__ import annotations

from contextlib import suppress

from autobatch._formatting import plural

_BEGINS, _NAMES = "raised in ", ", called by autobatch"


def add_note(error: BaseException, note: str) -> None:
    """Add a note like ``BaseException.add_note``, which Python 3.10 lacks; that version does not print notes."""
    _write_notes(error, [*_notes_of(error), note])


def note_where(error: BaseException, function: str, called_by: str, samples: int = 0) -> None:
    """Note which of the user's functions raised an error; a later note of this kind replaces an earlier one.

    Args:
        error: Error of the user's function. The same object may be raised several times.
        function: Name of the function for the user, such as ``your weigh(batch)``.
        called_by: Public function that called it.
        samples: Number of samples in its batch; 0 if unknown.
    """
    size = f" with {plural(samples, 'sample')}" if samples else ""
    others = [note for note in _notes_of(error) if not (str(note).startswith(_BEGINS) and _NAMES in str(note))]
    _write_notes(error, [*others, f"{_BEGINS}{function}{size}{_NAMES}{called_by.removeprefix('autobatch')}"])


def _notes_of(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [*notes] if isinstance(notes, list | tuple) else []


def _write_notes(error: BaseException, notes: list[str]) -> None:
    with suppress(Exception):  # a class of the user's may refuse
        vars(error)["__notes__"] = notes  # frozen dataclasses refuse setattr
