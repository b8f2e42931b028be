"""One warning for each thing that is wrong with the ledger, and then silence.

Covers the log lines of all of ``ledger``. Does not cover what is done about it.
"""

from __future__ import annotations

import logging
import sqlite3

__all__ = ["spell_cause", "warn_once"]

logger = logging.getLogger("autobatch")
_told: set[str] = set()


def warn_once(cause: str, message: str) -> None:
    """Warn, unless this process was already told of this cause."""
    if cause not in _told:
        _told.add(cause)
        logger.warning("autobatch: %s", message)


def spell_cause(error: Exception) -> str:
    """What two errors of the same cause have in common, whatever file, step or moment they speak of."""
    if isinstance(error, sqlite3.Error):
        return str(error)  # SQLite's own texts are few and fixed
    return f"{type(error).__name__} {getattr(error, 'errno', None)}"
