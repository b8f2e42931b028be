"""Defines a command's answer and what commands share: numbers as options, and checks of paths."""

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

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\n")}
"""C0 and C1 controls: a plan file of another user, or a card's name, could hold them."""

DONE, NO, USAGE = 0, 1, 2
"""Exit codes: done; done and the answer is no; the command line cannot be understood."""

_MOST_DIGITS = 18
"""Most digits of a number that surely fits into 64 bits."""


def read_count(text: str) -> int:
    """Return a whole number from 1 on, for ``add_argument(type=...)``."""
    digits = text.strip().lstrip("0")
    if not re.fullmatch(r"[0-9]+", digits):
        raise argparse.ArgumentTypeError(f"{show_value(text)} is not a whole number from 1 on")
    if len(digits) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(
            f"{show_value(text)} is larger than any count: it has more than {_MOST_DIGITS} digits"
        )
    return int(digits)


@contextmanager
def refusals_of(named: str) -> Iterator[None]:
    """Turn an error of the system about a path of the user's into one line that begins with ``named``."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{named} cannot be used: {error.strerror or error}") from error


def find_kind(path: str, named: str | None = None) -> int | None:
    """Return the kind of a file, as ``stat.S_IFMT`` has it; ``None`` if there is none.

    Args:
        path: Path of the user.
        named: Name of the path in a message; default: the path.

    Raises:
        InvalidArgument: The system refuses to look, for a name that is too long or a folder that is closed.
    """
    # Path.is_file() raises an error for some of these and returns False for others, which depends on Python's version.
    with refusals_of(named or show_value(path)):
        try:
            return stat.S_IFMT(Path(path).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError, ValueError):  # the last for a zero byte
            return None


def check_folder(option: str, file: str | None) -> None:
    """Check before long work that a file can be written."""
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
    """Write the plan for ``--save``; if the disk fails, the message has the plan."""
    try:
        plan.save(file)
    except OSError as error:
        raise InvalidArgument(f"--save {file} cannot be written: {error}; the plan was: {plan}") from error


class Answer(NamedTuple):
    """Answer of a command.

    Attributes:
        text: Text for people.
        data: The same for programs: records, or values that JSON can hold.
        code: Exit code of the process.
    """

    text: str
    data: Any
    code: int = DONE

    def show(self, *, as_json: bool) -> str:
        """Return the text with its control characters escaped, or the data as JSON."""
        if not as_json:
            return self.text.translate(_ESCAPED)
        from pydantic_core import to_jsonable_python  # noqa: PLC0415 - a quarter of the time that --help takes

        return json.dumps(to_jsonable_python(self.data), indent=2)
