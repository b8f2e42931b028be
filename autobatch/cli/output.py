"""Defines a command's answer and its tables, and checks paths."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import rich.table
from rich.console import Console
from rich.text import Text

from autobatch._formatting import divide_columns, show_value
from autobatch.errors import InvalidArgument

if TYPE_CHECKING:  # --help needs none
    from autobatch.plan import Plan

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\n")}
"""C0 and C1 controls: a plan file of another user, or a card's name, could hold them."""

_STYLES = {"WRONG": "bold red", "beware": "yellow", "fine": "green"}
_GAP = 2
_WIDE = 200  # columns of a table that goes to a pipe or a file: no row should be folded there

DONE, NO, USAGE, TOO_LARGE = 0, 1, 2, 3
"""Exit codes: done; done and the answer is no; the command line cannot be understood; the gate is closed."""


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


class Table(NamedTuple):
    """A table without lines; columns in ``right`` are aligned to the right."""

    rows: Sequence[Sequence[str]]
    headings: Sequence[str] = ()
    right: Collection[int] = ()

    def fit(self, width: int) -> Iterator[rich.table.Table]:
        """Yield tables of at most so many columns in which no usual word is broken, each with the first column."""
        texts = [[cell.translate(_ESCAPED) for cell in row] for row in (self.headings or self.rows[0], *self.rows)]
        columns = [*zip(*texts, strict=True)]
        whole = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
        words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
        least = [min(20, max(word, line // 2)) for word, line in zip(words, whole, strict=True)]
        least[0] = whole[0]  # it names the row, as an id that other commands take
        for block in divide_columns(least, _GAP, width):
            widths, left = {index: least[index] for index in block}, width - sum(least[i] + _GAP for i in block) + _GAP
            for index in sorted(block, key=lambda index: whole[index] - least[index]):
                widths[index] += (more := min(whole[index] - least[index], left))
                left -= more
            yield self._draw(texts[1:], widths)

    def _draw(self, texts: Sequence[Sequence[str]], widths: Mapping[int, int]) -> rich.table.Table:
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.show_header = bool(self.headings)
        for index, width in widths.items():
            side: Any = "right" if index in self.right else "left"
            table.add_column(*self.headings[index : index + 1], justify=side, width=width, overflow="fold")
        for row in texts:
            table.add_row(*(Text(row[index], style=_STYLES.get(row[index].strip(), "")) for index in widths))
        return table


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


def text_width() -> int:
    """Return the columns of a text for people: at most those of the terminal."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return max(40, min(shutil.get_terminal_size().columns, 120)) if is_terminal else 80


def _render(part: str | Table, stream: TextIO) -> str:
    if isinstance(part, str):
        return part.translate(_ESCAPED)
    console = Console(file=stream, width=None if stream.isatty() else _WIDE)
    with console.capture() as captured:
        for table in part.fit(console.width):
            console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
