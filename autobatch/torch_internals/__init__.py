"""Wraps torch's dispatch modes and storages, imports torch, and lists the releases that each part needs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings

OLDEST = (2, 8)
"""Oldest release that the metadata allows: ``fit``, ``Runner`` and ``verify`` work in it, ``predict`` does not."""

OLDEST_TO_PREDICT = (2, 10)
"""First release that can register a device from Python (``torch._C._acc``)."""


def import_torch() -> None:
    """Import torch without its warning that NumPy is missing, which nothing here needs.

    torch tries that once, on its own import or with the first optimizer (``torch/csrc/utils/tensor_numpy.cpp``).
    """
    if importlib.util.find_spec("numpy") is not None:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        importlib.import_module("torch")
        importlib.import_module("torch._subclasses.functional_tensor")  # looks for NumPy, since 2.8


def read_release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version such as ``2.13.0+cpu``; zeros if there are none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def format_release(release: tuple[int, int]) -> str:
    """Return the release as text: ``2.10``."""
    return ".".join(map(str, release))
