"""Finds cuDNN and cuBLASLt on this machine, without loading them.

Covers the packages that torch's CUDA builds bring along, and what the loader finds by itself. Does not cover versions:
only a process that has loaded cuDNN can say its own (``answers``).
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["find_libraries"]

_CUDNN = ("nvidia/cudnn/lib/libcudnn.so.9", "torch/lib/libcudnn.so.9")
_CUBLAS = (
    "nvidia/cu13/lib/libcublasLt.so.13",
    "nvidia/cublas/lib/libcublasLt.so.13",
    "nvidia/cublas/lib/libcublasLt.so.12",
    "torch/lib/libcublasLt.so.13",
    "torch/lib/libcublasLt.so.12",
)


def find_libraries() -> tuple[Path, Path] | None:
    """The files of cuDNN 9 and of cuBLASLt; ``None`` where either is missing: cuDNN aborts without cuBLASLt."""
    cudnn, cublas = _find_first(_CUDNN), _find_first(_CUBLAS)
    return None if cudnn is None or cublas is None else (cudnn, cublas)


def _find_first(names: tuple[str, ...]) -> Path | None:
    places = (Path(folder, name) for name in names for folder in sys.path if folder)
    return next((place for place in places if place.exists()), None)
