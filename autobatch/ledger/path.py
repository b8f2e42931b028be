"""Finds the ledger's file, and warns once about each thing that is wrong with it.

Covers the environment variables, the user's state folder and what log lines of this package have in common. Does not
cover opening the file (``database``).
"""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path

from platformdirs import user_state_path

__all__ = ["cause_of", "find_home", "find_ledger", "is_enabled", "next_file", "warn_once"]

logger = logging.getLogger("autobatch")
_warned: set[str] = set()

_OFF = frozenset({"off", "0", "false", "no"})
_MOST_FILES = 9
"""A disk that damages file after file should be looked at, not filled."""


def is_enabled() -> bool:
    """Whether plans are stored: yes, unless ``AUTOBATCH_LEDGER`` is off, 0, false or no, in any case of letters."""
    return os.environ.get("AUTOBATCH_LEDGER", "").strip().lower() not in _OFF


def find_home() -> Path:
    """The absolute path of ``AUTOBATCH_HOME``, else of the user's state folder; it need not exist.

    Raises:
        OSError: The system knows no home folder of this user.
    """
    named = os.environ.get("AUTOBATCH_HOME", "").strip()
    try:
        home = Path(named).expanduser() if named else user_state_path("autobatch", appauthor=False)
    except RuntimeError:
        home = Path("~")
    if str(home).startswith("~"):  # older platformdirs leave it as it is: a folder called ~ is not meant
        raise FileNotFoundError("this user has no home folder; set AUTOBATCH_HOME to a folder for the ledger")
    return home.absolute()


def find_ledger(home: Path) -> Path:
    """The ledger's file in this folder: the last that exists of ``ledger.sqlite3``, ``ledger-2.sqlite3``...

    A damaged file is not renamed; the next name is used. If it were, another process that has it open would delete, on
    closing, the write-ahead log that by then belongs to the new file of the same name.
    """
    later = (home / f"ledger-{number}.sqlite3" for number in range(_MOST_FILES, 1, -1))
    return next((file for file in later if file.exists()), home / "ledger.sqlite3")


def next_file(damaged: Path) -> Path | None:
    """The file that replaces a damaged one, the same in every process; ``None`` after the ninth."""
    number = int(damaged.stem.partition("-")[2] or 1) + 1
    return damaged.with_name(f"ledger-{number}.sqlite3") if number <= _MOST_FILES else None


def warn_once(cause: str, message: str) -> None:
    """Log a warning, unless this process has already warned of this cause."""
    if cause not in _warned:
        _warned.add(cause)
        logger.warning("autobatch: %s", message)


def cause_of(error: Exception) -> str:
    """What two errors of the same cause have in common, whatever file, step or time they are about."""
    if isinstance(error, sqlite3.Error):
        return str(error)  # SQLite's own texts are few and fixed
    return f"{type(error).__name__} {getattr(error, 'errno', None)}"
