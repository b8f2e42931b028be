"""Says which release of torch is needed for what, from its number alone: nothing here imports torch.

Covers what the metadata, ``autobatch doctor``, the refusal of ``predict`` and the tests go by. Does not cover builds of
torch (CPU, CUDA, ROCm), nor what another package asks of it.
"""

from __future__ import annotations

import re

__all__ = ["LATEST_TRIED", "OLDEST", "OLDEST_TO_PREDICT", "format_release", "read_release"]

OLDEST = (2, 8)
"""The oldest that the metadata allows: ``fit``, ``Runner`` and ``verify`` work in it, ``predict`` does not."""

OLDEST_TO_PREDICT = (2, 10)
"""The first that lets a device be registered from Python (``torch._C._acc``): 2.9.1 has no such module."""


LATEST_TRIED = (2, 13)
"""The newest that is tested. In later ones, private functions are avoided where there is a public way."""


def read_release(version: str) -> tuple[int, int]:
    """The first two numbers of a version such as ``2.13.0+cpu``; zeros where it does not begin with two."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def format_release(release: tuple[int, int]) -> str:
    """As it is written: ``2.10``."""
    return ".".join(map(str, release))
