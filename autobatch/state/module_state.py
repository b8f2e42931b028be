"""Remembers what modules hold, values of tensors apart, and puts it back.

Covers each module's class, attributes and tables (parameters, buffers, submodules, hooks), what ``containers`` covers
below them, and what the tensors in all of these refer to. Modules that are hidden in an attribute, such as a teacher
in a list, count as well. Does not cover the values of tensors: ``rewind_point`` and ``written_memory`` do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autobatch.state.containers import are_same, find_contents, put_entries_back
from autobatch.state.tensor_header import TensorHeader

__all__ = ["ModuleState"]


class ModuleState:
    """What modules held at one moment.

    Attributes:
        modules: Those that were given, and those hidden below them.
        headers: Of each tensor in their tables, attributes and containers.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Look at all of them; nothing is copied but references, and generators and arrays that are attributes."""
        self._attributes = [(module, type(module), vars(module).copy()) for module in modules]
        seen = {id(module) for module in modules}
        self._found = [find_contents((v for _, _, held in self._attributes for v in held.values()), seen)]
        while self._found[-1].modules:
            hidden = [part for module in self._found[-1].modules for part in module.modules()]
            hidden = [*{id(module): module for module in hidden if not self._knows(module)}.values()]
            added = [(module, type(module), vars(module).copy()) for module in hidden]
            self._attributes += added
            seen |= {id(module) for module in hidden}
            self._found.append(find_contents((v for _, _, held in added for v in held.values()), seen))
        self.modules = [module for module, _, _ in self._attributes]
        tensors = [tensor for found in self._found for tensor in found.tensors]
        # Aliases take no memory: neither a count of it nor a planned fault has anything to do with them.
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - no public way
            self.headers = [TensorHeader(tensor) for tensor in tensors]

    def _knows(self, module: nn.Module) -> bool:
        return any(module is known for known, _, _ in self._attributes)

    def is_current(self) -> bool:
        """Whether all of it is as it was."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - no public way
            return (
                all(type(module) is cls and _holds(module, held) for module, cls, held in self._attributes)
                and all(found.are_current() for found in self._found)
                and all(header.is_current() for header in self.headers)
            )

    def put_back(self) -> None:
        """Let all of it be as it was. Can be done any number of times."""
        for module, cls, held in self._attributes:
            if type(module) is not cls:  # a lazy module has become an ordinary one
                module.__class__ = cls
            put_entries_back(vars(module), held)
        for found in self._found:
            found.put_back()
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - no public way
            for header in self.headers:
                header.put_back()


def _holds(module: nn.Module, held: dict[str, object]) -> bool:
    now = vars(module)
    return are_same([*now], [*held]) and are_same([*now.values()], [*held.values()])
