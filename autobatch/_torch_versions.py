"""Lists the releases of torch that each part needs, for the metadata, ``doctor``, ``predict`` and the tests."""

from __future__ import annotations

import re

OLDEST = (2, 8)
"""Oldest release that the metadata allows: ``fit``, ``Runner`` and ``verify`` work in it, ``predict`` does not."""

OLDEST_TO_PREDICT = (2, 10)
"""First release that can register a device from Python (``torch._C._acc``)."""


def read_release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version such as ``2.13.0+cpu``; zeros if there are none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def format_release(release: tuple[int, int]) -> str:
    """Return the release as text: ``2.10``."""
    return ".".join(map(str, release))
