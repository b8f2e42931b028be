"""Decides how much the ledger keeps, and deletes the rest.

Covers the two limits, the user's word on one of them, and deleting in the order in which rows were written: dates are
those of the clocks that wrote them, which may have been wrong. Does not cover how time is counted (``clock``).
"""

from __future__ import annotations

import math
import os
import sqlite3

from pydantic import PositiveFloat, PositiveInt

from autobatch._formatting import show_value
from autobatch.ledger.warnings import warn_once
from autobatch.records import Record

__all__ = ["DAY_S", "Retention", "find_retention", "prune", "read_days"]

DAY_S = 24 * 60 * 60
_MOST_SET_ASIDE = 1000


class Retention(Record):
    """What is kept; the rest goes when the next plan comes.

    Attributes:
        plans: The newest of them, and as many runs: ten plans a day for three years. 600 plans of three trials took
            1.3 MB, so this is some 22 MB.
        days: A year, and the month in which somebody asks what last year's cards could do. By the ledger's own clock,
            which counts a long pause as an eighth of this.
    """

    plans: PositiveInt = 10_000
    days: PositiveFloat = 400.0


def find_retention() -> Retention:
    """The default, or with the days of ``AUTOBATCH_RETENTION_DAYS``; what is no positive number there is told once."""
    named = os.environ.get("AUTOBATCH_RETENTION_DAYS", "").strip()
    if not named:
        return Retention()
    days = read_days(named)
    if days is None:
        default = Retention()
        warn_once(
            "AUTOBATCH_RETENTION_DAYS",
            f"AUTOBATCH_RETENTION_DAYS={show_value(named)} is no positive number of days; plans are "
            f"kept for {default.days:.0f}",
        )
        return default
    return Retention(days=days)


def read_days(text: str) -> float | None:
    """A positive number of days; ``None`` where the text is none."""
    try:
        days = float(text)
    except ValueError:
        return None
    return days if math.isfinite(days) and days > 0 else None


def prune(connection: sqlite3.Connection, retention: Retention, elapsed: float) -> int:
    """Delete what is beyond the retention: old runs, then old plans that have no run any more.

    Args:
        connection: In a transaction that writes.
        retention: How much stays.
        elapsed: The ledger's own clock.

    Returns:
        How many plans are gone.
    """
    oldest, most = elapsed - retention.days * DAY_S, retention.plans
    connection.execute("DELETE FROM runs WHERE seen < ?", (oldest,))
    newest_runs = "SELECT rowid FROM runs ORDER BY seen DESC, rowid DESC LIMIT -1 OFFSET ?"
    connection.execute(f"DELETE FROM runs WHERE rowid IN ({newest_runs})", (most,))  # noqa: S608 - ours
    connection.execute("DELETE FROM set_aside WHERE added < ?", (oldest,))
    newest = "SELECT rowid FROM set_aside ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    connection.execute(f"DELETE FROM set_aside WHERE rowid IN ({newest})", (_MOST_SET_ASIDE,))  # noqa: S608 - ours
    return _prune_plans(connection, oldest, most)


def _prune_plans(connection: sqlite3.Connection, oldest: float, most: int) -> int:
    idle = "NOT EXISTS (SELECT 1 FROM runs WHERE plan_id = plans.id)"
    old = connection.execute(f"DELETE FROM plans WHERE added < ? AND {idle}", (oldest,)).rowcount  # noqa: S608 - ours
    surplus = "SELECT rowid FROM plans ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    many = f"DELETE FROM plans WHERE rowid IN ({surplus}) AND {idle}"  # noqa: S608 - ours
    return old + connection.execute(many, (most,)).rowcount
