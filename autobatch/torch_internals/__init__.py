"""Wraps what is needed of torch's own objects: dispatch modes, storages, the engine of backward passes, its import."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

__all__ = ["import_torch"]


def import_torch() -> None:
    """Import torch without its warning that NumPy is missing, which nothing here needs.

    torch tries to import NumPy once, on its own import or with the first optimizer, depending on its version, and warns
    where it cannot (``torch/csrc/utils/tensor_numpy.cpp``).
    """
    if importlib.util.find_spec("numpy") is not None:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        importlib.import_module("torch")
        importlib.import_module("torch._subclasses.functional_tensor")  # here it looks, in each version since 2.8
