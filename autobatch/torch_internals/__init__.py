"""Wraps torch's dispatch modes, storages, engine of backward passes and import."""

from __future__ import annotations

import importlib
import importlib.util
import warnings


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
