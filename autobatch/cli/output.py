"""Defines a command's answer and its tables, and checks paths."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autobatch._formatting import show_value
from autobatch.errors import InvalidArgument

if TYPE_CHECKING:  # --help needs none
    from autobatch.plan import Plan

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\n")}
"""C0 and C1 controls: a plan file of another user, or a card's name, could hold them."""

_STYLES = {"WRONG": "bold red", "beware": "yellow", "fine": "green"}
_WIDE = 200  # columns of a table that goes to a pipe or a file: no row should be folded there

DONE, NO, USAGE = 0, 1, 2
"""Exit codes: done; done and the answer is no; the command line cannot be understood."""


@contextmanager
def refusals_of(named: str) -> Iterator[None]:
    """Turn an error of the system about a path of the user's, such as one too long, into one line."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{named} cannot be used: {error.strerror or error}") from error


def check_folder(option: str, file: str | None) -> None:
    """Check before long work that a file can be written."""
    if file == "-":
        raise InvalidArgument(f"{option} -: name a file; --json prints the answer")
    if file is not None:
        named, path = f"{option} {show_value(file)}", Path(file).absolute()
        with refusals_of(named):
            if not file.strip() or path.is_dir() or not os.access(path.parent, os.W_OK):
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
        body: Lines and tables for people.
        data: The same for programs: records, or values that JSON can hold.
        code: Exit code of the process.
        to_stderr: Whether the text is an error.
    """

    body: Sequence[str | Table]
    data: Any
    code: int = DONE
    to_stderr: bool = False

    def write(self, *, as_json: bool) -> int:
        """Print the answer and return the exit code."""
        stream = sys.stderr if self.to_stderr else sys.stdout
        if stream is None:  # closed by whoever started this
            return USAGE
        text = self._as_json() if as_json else "\n".join(_render(part, stream) for part in self.body)
        if stream.encoding:  # a container's ASCII lacks letters
            text = text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)
        try:
            stream.write(f"{text}\n")
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python's own last flush must not raise
            if isinstance(error, BrokenPipeError):  # the reader, such as head, has seen enough
                return self.code
            unwritten = Answer([f"autobatch: the answer cannot be written: {error}"], None, USAGE, to_stderr=True)
            return USAGE if self.to_stderr else unwritten.write(as_json=False)
        return self.code

    def _as_json(self) -> str:
        from pydantic_core import to_jsonable_python  # noqa: PLC0415 - a quarter of the time that --help takes

        return json.dumps(to_jsonable_python(self.data), indent=2)


def make_table(rows: Iterable[Sequence[str]], headings: Sequence[str] = (), right: Collection[int] = ()) -> Table:
    """Return a table without lines that fits the terminal; columns in ``right`` are aligned to the right."""
    texts = [[Text(cell.translate(_ESCAPED), style=_STYLES.get(cell.strip(), "")) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(headings), header_style="bold")
    for index in range(len(headings or texts[0])):
        heading, side = headings[index] if headings else "", "right" if index in right else "left"
        # The first column names the row, as an id that other commands take: the others give way to it.
        table.add_column(heading, justify=side, overflow="fold", no_wrap=index == 0)  # type: ignore[arg-type]
    for row in texts:
        table.add_row(*row)
    return table


def text_width() -> int:
    """Return the columns of a text for people: at most those of the terminal."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return max(40, min(shutil.get_terminal_size().columns, 120)) if is_terminal else 80


def _render(part: str | Table, stream: TextIO) -> str:
    if isinstance(part, str):
        return part.translate(_ESCAPED)
    console = Console(file=stream, width=None if stream.isatty() else _WIDE)
    with console.capture() as captured:
        console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
