"""Counts how much time has passed for a ledger, whatever the clock of one process says.

Covers one row: the seconds that have passed, and the latest time of day at which anything was written. Does not cover
what grows too old by it (``retention``).

A clock that was 500 days ahead once must not delete 400 days of plans. So a gap between two writes counts for at most
an eighth of what is kept, and a clock that goes back, or is ahead of others that write to the same file, counts
nothing until the time that was seen last has come.
"""

from __future__ import annotations

import math
import sqlite3
import time

from autobatch.ledger.retention import DAY_S, Retention

__all__ = ["read_elapsed", "tick"]

_GAPS = 8


def tick(connection: sqlite3.Connection, retention: Retention) -> float:
    """Count the time since the last write.

    Args:
        connection: In a transaction that writes.
        retention: An eighth of its days is the most that counts.

    Returns:
        The seconds that have passed since the ledger was made.
    """
    now = time.time()
    elapsed, latest = _read(connection) or (_find_elapsed(connection), now)
    elapsed += min(max(now - latest, 0.0), retention.days * DAY_S / _GAPS)
    connection.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?)", (elapsed, max(now, latest)))
    return elapsed


def read_elapsed(connection: sqlite3.Connection) -> float:
    """The seconds that had passed at the last write."""
    row = _read(connection)
    return _find_elapsed(connection) if row is None else row[0]


def _read(connection: sqlite3.Connection) -> tuple[float, float] | None:
    row = connection.execute("SELECT elapsed, latest FROM clock WHERE id = 1").fetchone()
    is_whole = row is not None and all(isinstance(value, float) and math.isfinite(value) for value in row)
    return row if is_whole else None


def _find_elapsed(connection: sqlite3.Connection) -> float:
    """From the plans, where the row itself is missing or damaged."""
    (latest,) = connection.execute("SELECT max(added) FROM plans").fetchone()
    return latest if isinstance(latest, float) and math.isfinite(latest) else 0.0
