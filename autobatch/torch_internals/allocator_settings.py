"""Reads how torch's CUDA caching allocator was set up, for which torch has no public interface.

Does not cover the other settings: they change what is reserved, not what a limit means.
"""

from __future__ import annotations

import os

import torch

__all__ = ["caches_memory", "uses_expandable_segments"]

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Of several that are set the first counts."""


def caches_memory() -> bool:
    """Whether there is a cache: without, each tensor is a ``cudaMalloc``, nothing is counted, and no limit holds."""
    return "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ  # set to anything, as torch reads it


def uses_expandable_segments() -> bool:
    """Whether segments grow: then memory is mapped in units of 20 MiB."""
    return "expandable_segments:True" in "".join(_read_settings().split()).split(",")


def _read_settings() -> str:
    """As last set, by the environment or while the process ran; older versions of torch report only the former."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 - the only one without a snapshot
    if read is not None:
        return str(read())
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), "")
