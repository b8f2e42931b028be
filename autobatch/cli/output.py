"""Defines a command's answer: text for people, the same as data, and an exit code.

Covers what commands share: numbers as options, paths that the system refuses, and files that are written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument

if TYPE_CHECKING:  # --help needs none
    from autobatch.plan import Plan

__all__ = ["DONE", "NO", "USAGE", "Answer", "check_folder", "find_kind", "read_count", "refusals_of", "save_plan"]

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\n")}
"""C0 and C1 controls: a plan file of another user, or a card's name, could hold them."""

DONE, NO, USAGE = 0, 1, 2
"""Exit codes: it was done; it was done and the answer is no; the command line cannot mean anything."""

_MOST_DIGITS = 18
"""Of a number that fits into 64 bits, which counts the plans that are listed."""


def read_count(text: str) -> int:
    """A whole number from 1 on, for ``add_argument(type=...)``."""
    digits = text.strip().lstrip("0")
    if not re.fullmatch(r"[0-9]+", digits):
        raise argparse.ArgumentTypeError(f"{show_value(text)} is no whole number from 1 on")
    if len(digits) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(
            f"{show_value(text)} is larger than any count: it has more than {_MOST_DIGITS} digits"
        )
    return int(digits)


@contextmanager
def refusals_of(named: str) -> Iterator[None]:
    """A block that does nothing but ask the system about a path of the user's: what it refuses ends in one line.

    Args:
        named: The path, as the message begins with it.
    """
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{named} cannot be used: {error.strerror or error}") from error


def find_kind(path: str, named: str | None = None) -> int | None:
    """What a path leads to, as ``stat.S_IFMT`` has it; ``None`` where there is nothing.

    Args:
        path: As the user gave it.
        named: How a message names it; default: the path.

    Raises:
        InvalidArgument: The system does not say, as of a name that is too long or in a folder that is closed.
    """
    # Path.is_file() and its like raise for some of these, and answer False for others, as the version of Python has it.
    with refusals_of(named or show_value(path)):
        try:
            return stat.S_IFMT(Path(path).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError, ValueError):  # the last for a zero byte
            return None


def check_folder(option: str, file: str | None) -> None:
    """Check before long work that its answer can be written there."""
    if file is None:
        return
    if file == "-":
        raise InvalidArgument(f"{option} -: name a file; --json prints the answer")
    named = f"{option} {show_value(file)}"
    if file.strip() and find_kind(file, named) != stat.S_IFDIR:
        with refusals_of(named):
            folder = Path(file).absolute().parent
            if folder.is_dir() and os.access(folder, os.W_OK):
                return
    raise InvalidArgument(f"{named}: no file can be written there")


def save_plan(plan: Plan, file: str) -> None:
    """Write what ``--save`` asks for; where that cannot be, the plan itself is in the message."""
    try:
        plan.save(file)
    except OSError as error:
        raise InvalidArgument(f"--save {file} cannot be written: {error}; the plan was: {plan}") from error


class Answer(NamedTuple):
    """What is printed, for people or for programs (records, or what JSON can hold), and how the process ends."""

    text: str
    data: Any
    code: int = DONE

    def show(self, *, as_json: bool) -> str:
        """The text with its control characters escaped, or the data as JSON."""
        if not as_json:
            return self.text.translate(_ESCAPED)
        from pydantic_core import to_jsonable_python  # noqa: PLC0415 - a quarter of the time that --help takes

        return json.dumps(to_jsonable_python(self.data), indent=2)
