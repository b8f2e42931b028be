"""Explains why a step could not be traced, with the user's own line."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing.fake_device import DEVICE

_RAISES_ON_CARDS = ("Expected all tensors to be on the same device", "No available kernel", "cudnn RNN backward")
"""Beginnings of torch's messages that cards raise too."""

_NO_VALUES = "needs a tensor's value, and there are none: leave it out of the step, or run fit() on a GPU"
_READS = (
    ".numpy() is not supported for tensor subclasses",  # torch/csrc/autograd/python_variable_methods.cpp
    ".tolist() is not supported for tensor subclasses",
    "unsupported format string passed to FakeTensor.__format__",
)
"""Other messages of torch when a fake tensor is read."""

_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_PACKAGES = (Path(torch.__file__).resolve().parent, Path(__file__).resolve().parents[2])  # torch and this one
_OURS = ("<frozen", *(f"{folder}{os.sep}" for folder in _PACKAGES))
_LIBRARY = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")})
_LONGEST = 120


class TooLong(InvalidArgument):
    """A trace has too many events."""


def explain(error: Exception) -> str:
    """One line: the place in the user's code, what happened, and what to do."""
    return f"{_line_of(error)} {_cause_of(error)}"


def _cause_of(error: Exception) -> str:
    needs_value = isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode))
    if needs_value or any(words in str(error) for words in _READS):
        return _NO_VALUES
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"makes a tensor whose size depends on values ({error.func}), so its memory cannot be predicted; run fit() "
            f"on a GPU"
        )
    if isinstance(error, UnsupportedOperatorException):
        return f"calls {error.func}, which cannot run without memory; run fit() on a GPU"
    first_line = (str(error).strip().splitlines() or [""])[0]
    if first_line.startswith(_RAISES_ON_CARDS):
        return f"would raise on a card: {first_line.replace(DEVICE, 'the card')}"
    if "fork-based multiprocessing" in str(error):  # torch/csrc/autograd/engine.cpp
        return (
            "was not run: this process is a fork of one that had run a backward pass on a GPU, and can run none; "
            "predict in the process that it was forked from, or in a new one"
        )
    return f"failed on a tensor without memory ({type(error).__name__}: {first_line[:200]})"


def _line_of(error: Exception) -> str:
    """The user's innermost line, and that of an installed package if it called torch."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_librarys(frame.filename)]
    own = [frame for frame in theirs if not _INSTALLED.search(frame.filename)]
    if not theirs:
        return "the step"
    if not own or theirs[-1] is own[-1]:
        return _show(theirs[-1])
    return f"{_show(own[-1])} (in {_show(theirs[-1])})"


def _is_librarys(file: str) -> bool:
    return file.startswith(_OURS) or (file.startswith(_LIBRARY) and not _INSTALLED.search(file))


def _show(frame: traceback.FrameSummary) -> str:
    source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    if not source:
        return f"{frame.filename}:{frame.lineno}"
    return f"{frame.filename}:{frame.lineno}: `{source if len(source) <= _LONGEST else f'{source[:_LONGEST]}...'}`"
