"""Defines a command's answer: text for people, the same as data, and an exit code.

Covers what commands share: numbers as options, and files that are written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument

if TYPE_CHECKING:  # --help needs none
    from autobatch.plan import Plan

__all__ = ["DONE", "NO", "USAGE", "Answer", "check_folder", "read_count", "save_plan"]

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\n")}
"""C0 and C1 controls: a plan file of another user, or a card's name, could hold them."""

DONE, NO, USAGE = 0, 1, 2
"""Exit codes: it was done; it was done and the answer is no; the command line cannot mean anything."""


def read_count(text: str) -> int:
    """A whole number from 1 on, for ``add_argument(type=...)``."""
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{show_value(text)} is no whole number from 1 on")
    return int(text)


def check_folder(option: str, file: str | None) -> None:
    """Check before long work that its answer can be written there."""
    if file is None:
        return
    if file == "-":
        raise InvalidArgument(f"{option} -: name a file; --json prints the answer")
    folder = Path(file).absolute().parent
    if not file.strip() or not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise InvalidArgument(f"{option} {show_value(file)}: no file can be written there")


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
