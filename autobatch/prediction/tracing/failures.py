"""Why a step could not be traced, with the user's own line.

Covers what fake tensors raise where a step needs values, and any other error on the fake device. Does not cover what is
refused before a step runs (``twins``, ``fake_device``).
"""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = ["explain"]

_NOT_THEIRS = (*(str(Path(module).resolve().parent) for module in (torch.__file__, __file__)), "<frozen")


def explain(error: Exception) -> str:
    """One line: where in the user's code, what happened there, and what to do."""
    return f"{_place_of(error)}{_reason_of(error)}"


def _reason_of(error: Exception) -> str:
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return "needs a tensor's value, and there are none: leave it out of the step, or run fit() on a GPU"
    if isinstance(error, DynamicOutputShapeException):
        return "makes a tensor whose size depends on values, so its memory cannot be predicted; run fit() on a GPU"
    if isinstance(error, UnsupportedOperatorException):
        return f"calls {error.func}, which cannot run without memory; run fit() on a GPU"
    if "fork-based multiprocessing" in str(error):  # torch/csrc/autograd/engine.cpp
        return (
            "was not run: this process has run a backward pass on a GPU, after which none can run in a child of it; "
            "predict before training begins, or in a process of its own"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    return f"failed on a tensor without memory ({type(error).__name__}: {first[:200]})"


def _place_of(error: Exception) -> str:
    theirs = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THEIRS)
    ]
    if not theirs:
        return "the step "
    own = [frame for frame in theirs if "site-packages" not in frame.filename]
    frame = (own or theirs)[-1]
    source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    source = source if len(source) <= 120 else f"{source[:120]}..."
    return f"{frame.filename}:{frame.lineno}: `{source}` "
