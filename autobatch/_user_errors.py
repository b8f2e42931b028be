"""Lets errors of the user's functions pass unchanged, with one note that names the function."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from autobatch._formatting import plural

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.10 has none
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


def clear_frames(error: BaseException, handled: BaseException | None) -> None:
    """Empty the frames that ended with this error, and with those it came from, down to ``handled``.

    Tracebacks hold all local variables, such as the tensors of the call that failed; afterwards only their lines.
    """
    found = [error]
    for link in found:  # which grows
        traceback.clear_frames(link.__traceback__)
        members = link.exceptions if isinstance(link, _GROUPS) else ()
        links = [link.__cause__, link.__context__, *members]
        # By identity, since an exception class may define its own comparison.
        seen = {id(handled), *map(id, found)}
        found += [one for one in links if one is not None and id(one) not in seen]


def _notes_of(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [*notes] if isinstance(notes, list | tuple) else []


def _write_notes(error: BaseException, notes: list[str]) -> None:
    with suppress(Exception):  # a class of the user's may refuse
        vars(error)["__notes__"] = notes  # frozen dataclasses refuse setattr


class _Block(AbstractContextManager[_Made]):
    """One run of a generator function with one ``yield``."""

    def __init__(self, generator: Iterator[_Made]) -> None:
        self._generator = generator

    def __enter__(self) -> _Made:
        return next(self._generator)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is None:
            next(self._generator, None)
            return False
        try:
            self._generator.throw(error)  # type: ignore[attr-defined]
        except StopIteration as ended:
            return ended is not error
        except BaseException as raised:
            if raised is not error and not (isinstance(error, StopIteration) and raised.__cause__ is error):
                raise
            BaseException.with_traceback(error, trace)  # without the frames of this block
            return False
        raise RuntimeError("a block has a second yield")


def contextmanager(function: Callable[_Given, Iterator[_Made]]) -> Callable[_Given, AbstractContextManager[_Made]]:
    """Make a context manager of a generator function, like ``contextlib.contextmanager``, for errors of any class.

    contextlib assigns ``error.__traceback__``. A frozen dataclass refuses that with a FrozenInstanceError.
    """

    @wraps(function)
    def make(*arguments: _Given.args, **options: _Given.kwargs) -> AbstractContextManager[_Made]:
        return _Block(function(*arguments, **options))

    return make
