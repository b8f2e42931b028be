"""What all of our dispatch modes have in common: the compiler stays out of them, and is not loaded for that.

Covers the base class alone. Does not cover what a mode does with an operator.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode"]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch wraps ``__torch_dispatch__`` so that the compiler leaves it alone, and loads the compiler for that at
        # the first operator: 2 s, measured. Whoever enters a mode of ours holds the compiler off (``run_eagerly``).
        return False
