"""Tells errors of the user's step from what cannot be traced, and explains the latter with the user's own line."""

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

from autobatch._formatting import plural
from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing.fake_device import DEVICE, DEVICE_TYPE

_RAISES_ON_CARDS = ("Expected all tensors to be on the same device", "No available kernel", "cudnn RNN backward")
"""Beginnings of torch's messages that cards raise too."""

_NEED_VALUES = (DataDependentOutputException, GuardOnDataDependentSymNode)
_READS = (
    ".numpy() is not supported for tensor subclasses",  # torch/csrc/autograd/python_variable_methods.cpp
    ".tolist() is not supported for tensor subclasses",
    "unsupported format string passed to FakeTensor.__format__",
)
"""Other messages of torch when a fake tensor is read."""

_OF_FAKES = ("torch._subclasses", "torch.fx.experimental")
"""Modules whose errors are about tensors without memory only."""
_NAMES_FAKES = re.compile(rf"FakeTensor|{DEVICE_TYPE}|'Meta'|[Mm]eta tensor|data pointer")

_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[2])  # torch and this one
_FOLDERS = {str(folder) for path in _PACKAGES for folder in (path, path.resolve())}
_OURS = ("<frozen", *(f"{folder}{os.sep}" for folder in _FOLDERS))
_LIBRARY = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")})
_LONGEST = 120


class TooLong(InvalidArgument):
    """A trace has too many events."""


def explain(error: BaseException) -> str:
    """Explain why a step cannot be traced: the user's line, what happened, what to do. Empty if the error is theirs."""
    cause = _find_cause(error)
    return cause and f"{_line_of(error)} {cause}"


def describe_place(error: BaseException, samples: int) -> str:
    """Describe where the user's step raised an error, for a note."""
    size = plural(samples, "sample")
    return f"raised while autobatch.predict traced the step with {size} on tensors without memory; {_line_of(error)}"


def _find_cause(error: BaseException) -> str:
    text = str(error)
    first_line = (text.strip().splitlines() or [""])[0]
    if isinstance(error, _NEED_VALUES) or any(words in text for words in _READS):
        cause = "needs a tensor's value, and there are none: leave it out of the step, or run fit() on a GPU"
    elif isinstance(error, DynamicOutputShapeException):
        cause = (
            f"makes a tensor whose size depends on values ({error.func}), so its memory cannot be predicted; run fit() "
            f"on a GPU"
        )
    elif isinstance(error, UnsupportedOperatorException):
        cause = f"calls {error.func}, which cannot run without memory; run fit() on a GPU"
    elif first_line.startswith(_RAISES_ON_CARDS):
        cause = f"would raise on a card: {first_line.replace(DEVICE, 'the card')}"
    elif "fork-based multiprocessing" in text:  # torch/csrc/autograd/engine.cpp
        cause = (
            "was not run: this process is a fork of one that had run a backward pass on a GPU, and can run none; "
            "predict in the process that it was forked from, or in a new one"
        )
    elif type(error).__module__.startswith(_OF_FAKES) or _NAMES_FAKES.search(text):
        cause = f"failed on a tensor without memory ({type(error).__name__}: {first_line[:200]}); run fit() on a GPU"
    else:
        cause = ""
    return cause


def _line_of(error: BaseException) -> str:
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
