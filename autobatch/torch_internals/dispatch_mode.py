"""Defines the base class of our dispatch modes: active in one thread, with no effect on any other."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = ["DispatchMode", "call_operator"]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which compiled functions run as they were written.

    They would do so anyway, but torch never compiles a function again that it has once met under a mode
    (``CatchErrorsWrapper`` in torch/_dynamo/convert_frame.py). ``torch.compiler.set_stance("force_eager")`` prevents
    that, for all threads of the process: two that enter and leave in turn would leave it set for good, and meanwhile
    nothing is compiled in the others.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch wraps ``__torch_dispatch__`` so that the compiler leaves it alone, and loads the compiler for that at
        # the first operator: 2 s, measured.
        return False

    def __enter__(self) -> Any:
        """Activate the mode, in this thread.

        torch's own method also notes that in three globals, which two threads that enter and leave in turn would leave
        set. What reads them is compiled code, which does not run here.
        """
        if "torch._dynamo" in sys.modules:
            _set_up_compiler()
        try:
            _push_mode(self)
        except BaseException:
            self.remove()  # interrupted once it was active: nobody would leave it
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End what ``__enter__`` began."""
        _pop_mode()

    def remove(self) -> None:
        """End it where an interrupt left it active, innermost in this thread; else do nothing."""
        if (active := _get_current_dispatch_mode_stack()) and active[-1] is self:
            _pop_mode()


def call_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call an operator from inside a mode, and count what a ``_foreach_`` operator writes in place.

    While any mode is active, torch does not count that in ``Tensor._version`` (measured with torch 2.13), as it does
    without one and for other operators. Gradient clipping and moving averages use them.
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


def _set_up_compiler() -> None:
    """Wrap torch's function that says, at each call of a compiled function, what is done with its frames.

    torch calls it in the thread that calls the function (``compile_wrapper`` in torch/_dynamo/eval_frame.py), and each
    thread has its own modes. The wrapper holds nothing, so it can stay for the life of the process and needs no lock.
    """
    from torch._dynamo import eval_frame  # noqa: PLC0415 - waits where another thread is just importing it

    choose = eval_frame._callback_from_stance  # noqa: SLF001 - all that is public holds for every thread
    if choose.__module__ == __name__:
        return

    def choose_by_modes(callback: Any) -> Any:
        if any(isinstance(mode, DispatchMode) for mode in _get_current_dispatch_mode_stack()):
            return None  # frames are run as they are
        return choose(callback)

    eval_frame._callback_from_stance = choose_by_modes  # noqa: SLF001 - as above
