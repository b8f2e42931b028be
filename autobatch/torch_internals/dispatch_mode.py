"""Defines the base class of our dispatch modes, which leave compiled functions as they are."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode of one thread, under which no thread compiles anything.

    torch never compiles a function again that was called under a mode (``CatchErrorsWrapper`` in
    torch/_dynamo/convert_frame.py). So no function is compiled while such a mode is active.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch wraps ``__torch_dispatch__`` so that the compiler leaves it alone, and loads the compiler for that at
        # the first operator: 2 s, measured.
        return False

    def __enter__(self) -> Any:
        """Activate the mode.

        torch's own method also sets three globals. Two threads that enter and leave in turn would leave them set.
        """
        _compiler_pause.begin()
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Deactivate the mode."""
        _pop_mode()
        _compiler_pause.end()


class _CompilerPause:
    """Holds ``torch.compiler.set_stance("force_eager")`` from the first mode's beginning to the last one's end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modes = 0
        self._stance: Any = None

    def begin(self) -> None:
        with self._lock:
            self._modes += 1
            if self._stance is None and "torch._dynamo" in sys.modules:
                with suppress(RuntimeError):  # inside a compiled region, which is not compiled any further
                    self._stance = torch.compiler.set_stance("force_eager")

    def end(self) -> None:
        with self._lock:
            self._modes -= 1
            if self._stance is not None and not self._modes:
                stance, self._stance = self._stance, None
                with suppress(RuntimeError):
                    stance.__exit__(None, None, None)  # the user's own stance


_compiler_pause = _CompilerPause()


def call_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call an operator from inside a mode, and count in-place writes of ``_foreach_`` operators.

    While a mode is active, torch does not count these in ``Tensor._version`` (measured with torch 2.13). Gradient
    clipping and moving averages use them.
    """
    try:
        return func(*args, **(kwargs or {}))
    finally:
        if _writes_uncounted(func):
            for tensor in args[0]:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)


@cache
def _writes_uncounted(func: Any) -> bool:
    name = getattr(func, "_opname", "")
    return name.startswith("_foreach_") and name.endswith("_")
