"""How much the ledger keeps.

Covers the two limits and the user's word on one of them. Does not cover deleting (``store``).
"""

from __future__ import annotations

import math
import os

from pydantic import PositiveFloat, PositiveInt

from autobatch.ledger.complaint import complain_once
from autobatch.records import Record

__all__ = ["Retention", "find_retention"]


class Retention(Record):
    """What is kept; the rest goes when the next plan comes.

    Attributes:
        plans: The newest of them, and as many runs: ten plans a day for three years. 600 plans of three trials took
            1.3 MB, so this is some 22 MB.
        days: A year, and the month in which somebody asks what last year's cards could do.
    """

    plans: PositiveInt = 10_000
    days: PositiveFloat = 400.0


def find_retention() -> Retention:
    """The default, or with the days of ``AUTOBATCH_RETENTION_DAYS``; what is no positive number there is told once."""
    named = os.environ.get("AUTOBATCH_RETENTION_DAYS", "").strip()
    if not named:
        return Retention()
    try:
        days = float(named)
    except ValueError:
        days = math.nan
    if not (math.isfinite(days) and days > 0):
        default = Retention()
        complain_once(
            "AUTOBATCH_RETENTION_DAYS",
            f"AUTOBATCH_RETENTION_DAYS={named!r} is no positive number of days; plans are kept for {default.days:.0f}",
        )
        return default
    return Retention(days=days)
