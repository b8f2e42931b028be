"""Decides which plans and runs are old, and deletes them.

Dates are those of the clocks that wrote them, which may have been wrong: one that was 500 days ahead once must not
delete 400 days of plans. So rows are deleted in the order in which they were written, by the ledger's own clock: a gap
between two writes counts for at most an eighth of the limit, and a clock that goes back, or is ahead of others that
write to the same file, counts nothing until it has caught up.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from typing import NamedTuple

from autobatch._formatting import show_value
from autobatch.ledger.database import warn_once

__all__ = ["Retention", "find_retention", "prune", "read_clock", "read_days", "tick"]

_DAY_S = 24 * 60 * 60
_GAPS = 8
_MOST_SET_ASIDE = 1000


class Retention(NamedTuple):
    """How much is stored; the rest is deleted when the next plan comes."""

    # And as many runs: ten plans a day for three years. 600 plans of three trials took 1.3 MB, so this is some 22 MB.
    plans: int = 10_000
    days: float = 400.0  # by the ledger's own clock: a year, and the month in which somebody asks about last year's


def find_retention() -> Retention:
    """The default, or with the days of ``AUTOBATCH_RETENTION_DAYS``."""
    named = os.environ.get("AUTOBATCH_RETENTION_DAYS", "").strip()
    default = Retention()
    days = read_days(named)
    if named and days is None:
        warn_once(
            "AUTOBATCH_RETENTION_DAYS",
            f"AUTOBATCH_RETENTION_DAYS={show_value(named)} is no positive number of days; plans are "
            f"stored for {default.days:.0f}",
        )
    return Retention(days=days or default.days)


def read_days(text: str) -> float | None:
    """A positive number of days; ``None`` where the text is none."""
    try:
        days = float(text)
    except ValueError:
        return None
    return days if math.isfinite(days) and days > 0 else None


def prune(connection: sqlite3.Connection, retention: Retention, elapsed: float) -> int:
    """Delete old runs, then old plans without a run, at these seconds of the ledger's own clock; how many plans."""
    oldest, most = elapsed - retention.days * _DAY_S, retention.plans
    connection.execute("DELETE FROM runs WHERE seen < ?", (oldest,))
    connection.execute(_SURPLUS_RUNS, (most,))
    connection.execute("DELETE FROM set_aside WHERE added < ?", (oldest,))
    connection.execute(_SURPLUS_SET_ASIDE, (_MOST_SET_ASIDE,))
    old = connection.execute(_OLD_PLANS, (oldest,)).rowcount
    return old + connection.execute(_SURPLUS_PLANS, (most,)).rowcount


_SURPLUS_RUNS = """
    DELETE FROM runs WHERE rowid IN (SELECT rowid FROM runs ORDER BY seen DESC, rowid DESC LIMIT -1 OFFSET ?)"""
_SURPLUS_SET_ASIDE = """
    DELETE FROM set_aside WHERE rowid IN (SELECT rowid FROM set_aside ORDER BY rowid DESC LIMIT -1 OFFSET ?)"""
_OLD_PLANS = """
    DELETE FROM plans WHERE added < ?
    AND NOT EXISTS (SELECT 1 FROM runs WHERE plan_id IN (plans.id, plans.whole))"""
_SURPLUS_PLANS = """
    DELETE FROM plans WHERE rowid IN (SELECT rowid FROM plans ORDER BY rowid DESC LIMIT -1 OFFSET ?)
    AND NOT EXISTS (SELECT 1 FROM runs WHERE plan_id IN (plans.id, plans.whole))"""


def tick(connection: sqlite3.Connection, retention: Retention) -> float:
    """Count the time since the last write; the seconds that have passed since the ledger was made."""
    now = time.time()
    elapsed, latest = read_clock(connection)
    elapsed += min(max(now - latest, 0.0), retention.days * _DAY_S / _GAPS)
    connection.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?)", (elapsed, max(now, latest)))
    return elapsed


def read_clock(connection: sqlite3.Connection) -> tuple[float, float]:
    """The seconds that had passed at the last write, and the latest time of day; a damaged clock is made anew."""
    row = connection.execute("SELECT elapsed, latest FROM clock WHERE id = 1").fetchone()
    if row is not None and all(map(_is_finite, row)):
        return float(row[0]), float(row[1])
    (added,) = connection.execute("SELECT max(added) FROM plans").fetchone()
    return added if _is_finite(added) else 0.0, time.time()


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
