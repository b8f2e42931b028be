"""Where the ledger lies, and whether one is kept at all.

Covers the environment's words for it and the user's state folder. Does not cover making or opening anything.
"""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_state_path

__all__ = ["find_home", "find_ledger", "is_on", "name_successor"]

_OFF = frozenset({"off", "0", "false", "no"})
_MOST_FILES = 9
"""A disk that damages file after file should be looked at, not filled."""


def is_on() -> bool:
    """Whether plans are kept: yes, unless ``AUTOBATCH_LEDGER`` is off, 0, false or no, in any case of letters."""
    return os.environ.get("AUTOBATCH_LEDGER", "").strip().lower() not in _OFF


def find_home() -> Path:
    """The folder of all that autobatch keeps: ``AUTOBATCH_HOME``, else the user's state folder.

    Returns:
        An absolute path; nothing needs to be there yet.

    Raises:
        OSError: The system knows no home of this user.
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
    """The ledger's file in this folder: the last in the row of ``ledger.sqlite3``, ``ledger-2.sqlite3``...

    A damaged file stays where it is and the next name is used. Moving it away would be worse: another process that has
    it open would delete, on closing, the write-ahead log that by then belongs to the new file of the same name.
    """
    later = (home / f"ledger-{number}.sqlite3" for number in range(_MOST_FILES, 1, -1))
    return next((file for file in later if file.exists()), home / "ledger.sqlite3")


def name_successor(damaged: Path) -> Path | None:
    """The file that takes over from a damaged one, the same in every process; ``None`` after the ninth."""
    number = int(damaged.stem.partition("-")[2] or 1) + 1
    return damaged.with_name(f"ledger-{number}.sqlite3") if number <= _MOST_FILES else None
