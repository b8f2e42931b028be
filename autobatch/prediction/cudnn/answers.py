"""Finds cuDNN, remembers what it answered, and asks it for the rest in a process of its own.

Covers the process (cuDNN may abort it, and brings half a gigabyte of libraries), and answers on disk, by the library's
file, the card's architecture and its multiprocessors. The library is one that torch's CUDA builds bring along, or that
the loader finds by itself. Does not cover the questions (``plans``) nor what is done without an answer
(``workspaces``). Imports no torch.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from autobatch.ledger.ledger import find_home, is_enabled
from autobatch.prediction.cudnn.convolution import Convolution
from autobatch.prediction.cudnn.graph_api import DEVICES

__all__ = ["Answers", "ask_cudnn", "find_libraries"]

_MOST_SECONDS = 60.0
"""For all questions of one call; a question takes 13 ms, so 60 s is for thousands."""

_MOST_PROCESSES = 3
"""So often cuDNN may abort before what is left goes without an answer."""

_WAITS_FOR_WRITERS_S = 1.0
_MAKE_TABLES = """
    CREATE TABLE IF NOT EXISTS libraries (file TEXT PRIMARY KEY, version INTEGER NOT NULL);
    CREATE TABLE IF NOT EXISTS workspaces (question TEXT PRIMARY KEY, bytes INTEGER);
"""


class Answers(NamedTuple):
    """What cuDNN says.

    Attributes:
        version: cuDNN's number of its own version, 92000 for 9.20.0; 0 where there is none to ask.
        workspaces: Bytes, of those convolutions for which it has a plan.
    """

    version: int
    workspaces: dict[Convolution, int]


class _Card(NamedTuple):
    cudnn: Path
    cublas: Path
    architecture: str
    multiprocessors: int

    @property
    def library(self) -> str:
        """The file as it is now: another version has another size or time."""
        known = self.cudnn.stat()
        return f"{self.cudnn} {known.st_size} {known.st_mtime_ns}"

    def question(self, convolution: Convolution) -> str:
        """The key of an answer."""
        return f"{self.library} {self.architecture} {self.multiprocessors} {json.dumps(convolution)}"


def ask_cudnn(convolutions: Iterable[Convolution], architecture: str, multiprocessors: int) -> Answers:
    """The workspaces of convolutions on a card: what is remembered, and what this machine's cuDNN says of the others.

    Args:
        convolutions: May come several times.
        architecture: ``"sm_80"``, for instance; of one that ``graph_api.DEVICES`` does not name nothing is known.
        multiprocessors: How many the card has.
    """
    files = find_libraries()
    if files is None or architecture not in DEVICES:
        return Answers(0, {})
    card = _Card(*files, architecture, multiprocessors)
    wanted = [*dict.fromkeys(convolutions)]
    version, known = _recall(card, wanted)
    missing = [convolution for convolution in wanted if convolution not in known]
    if missing or not version:
        version, found = _ask(card, missing)
        _remember(card, version, found)
        known |= found
    return Answers(version, {convolution: size for convolution, size in known.items() if size is not None})


def _ask(card: _Card, convolutions: Sequence[Convolution]) -> tuple[int, dict[Convolution, int | None]]:
    """The version of cuDNN, and its answers; of what it was asked when it aborted there is none."""
    version, found, left = 0, dict[Convolution, int | None](), [*convolutions]
    for _ in range(_MOST_PROCESSES):
        said = _run(card, left)
        if not said:
            break
        version, *answers = said
        found |= zip(left, answers, strict=False)
        if len(answers) == len(left):
            break
        found[left[len(answers)]] = None
        left = left[len(answers) + 1 :]
    return version, found


def _run(card: _Card, convolutions: Sequence[Convolution]) -> list[int]:
    """What one process says before it ends: the version, then an answer each, ``None`` where there is no plan."""
    arguments = (str(card.cudnn), str(card.cublas), card.architecture, str(card.multiprocessors))
    questions = "".join(f"{json.dumps(convolution)}\n" for convolution in convolutions)
    command = [sys.executable, "-m", "autobatch.prediction.cudnn.plans", *arguments]
    said: list[int] = []
    with subprocess.Popen(  # noqa: S603 - this interpreter, and a module of ours
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        stop = threading.Timer(_MOST_SECONDS, process.kill)
        stop.start()
        try:
            output, _ = process.communicate(questions)
        finally:
            stop.cancel()
    for line in output.splitlines():
        try:
            said.append(json.loads(line))
        except ValueError:  # half a line, of a process that was killed
            break
    return said


def _recall(card: _Card, convolutions: Sequence[Convolution]) -> tuple[int, dict[Convolution, int | None]]:
    try:
        with closing(_open()) as database:
            row = database.execute("SELECT version FROM libraries WHERE file = ?", [card.library]).fetchone()
            find = "SELECT bytes FROM workspaces WHERE question = ?"
            rows = ((each, database.execute(find, [card.question(each)]).fetchone()) for each in convolutions)
            return (row[0] if row else 0), {each: found[0] for each, found in rows if found}
    except (sqlite3.Error, OSError):  # no home, no room, another's file: it is asked again
        return 0, {}


def _remember(card: _Card, version: int, found: dict[Convolution, int | None]) -> None:
    if not version:
        return
    try:
        with closing(_open()) as database, database:
            database.execute("INSERT OR REPLACE INTO libraries VALUES (?, ?)", [card.library, version])
            rows = [(card.question(convolution), size) for convolution, size in found.items()]
            database.executemany("INSERT OR REPLACE INTO workspaces VALUES (?, ?)", rows)
    except (sqlite3.Error, OSError):
        return


def _open() -> sqlite3.Connection:
    """The file of answers; where nothing is to be stored, one in memory."""
    if not is_enabled():
        return _make_tables(sqlite3.connect(":memory:"))
    home = find_home()
    home.mkdir(parents=True, exist_ok=True)
    return _make_tables(sqlite3.connect(home / "cudnn.sqlite3", timeout=_WAITS_FOR_WRITERS_S))


def _make_tables(database: sqlite3.Connection) -> sqlite3.Connection:
    try:
        database.executescript(_MAKE_TABLES)
    except BaseException:
        database.close()
        raise
    return database


_CUDNN = ("nvidia/cudnn/lib/libcudnn.so.9", "torch/lib/libcudnn.so.9")
_CUBLAS = (
    "nvidia/cu13/lib/libcublasLt.so.13",
    "nvidia/cublas/lib/libcublasLt.so.13",
    "nvidia/cublas/lib/libcublasLt.so.12",
    "torch/lib/libcublasLt.so.13",
    "torch/lib/libcublasLt.so.12",
)


def find_libraries() -> tuple[Path, Path] | None:
    """The files of cuDNN 9 and of cuBLASLt; ``None`` where either is missing: cuDNN aborts without cuBLASLt."""
    cudnn, cublas = _find_first(_CUDNN), _find_first(_CUBLAS)
    return None if cudnn is None or cublas is None else (cudnn, cublas)


def _find_first(names: tuple[str, ...]) -> Path | None:
    places = (Path(folder, name) for name in names for folder in sys.path if folder)
    return next((place for place in places if place.exists()), None)
