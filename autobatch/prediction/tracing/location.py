"""Where in the model a step is: which submodule runs, or whose backward pass.

Covers forward passes by global module hooks, which leave the user's own alone, and backward passes by the number that
autograd gives each node when the forward pass makes it. Does not cover functional code outside of all modules.
"""

# ruff: noqa: SLF001 - what torch keeps for those who add devices has no public names

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

__all__ = ["Location"]


class Location:
    """The qualified name of the submodule that is running."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []
        self._thread = threading.get_ident()

    def name(self) -> str:
        """The innermost submodule in its forward pass, else the one whose node autograd runs, else ""."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        place = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[place] if place >= 0 else ""

    @contextmanager
    def follow(self) -> Iterator[None]:
        """While this lasts, forward passes are followed."""
        handles = (
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
            self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._stack:
            self._stack.pop()
            self._mark()

    def _mark(self) -> None:
        """From here on, new nodes are the current module's."""
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self._stack[-1] if self._stack else "")
