"""CI runs a sample of what is slow and rarely fails; ``make proof``, which sets PROOF, runs all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

IN_PROOF = "PROOF" in os.environ


def sample(cases: Iterable[Case], every: int) -> list[Case]:
    """Return all cases in ``make proof``, else the first and every so-manieth after it."""
    return [*cases][:: 1 if IN_PROOF else every]
