"""Records what modules hold, except the values of tensors, and restores it.

A record is made at the beginning of every step. Modules that are hidden in an attribute, such as a teacher in a list,
are recorded too.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autobatch.torch_internals.storages import LAZY, UNDISTURBED, lacks_memory, storage_key, storages_of
from autobatch.undo.contents import Contents, find_parts, is_same, put_entries

_COUNT = len(vars(nn.Module()))
"""Number of the attributes that every module begins with: ``training``, parameters, buffers, hooks, modules."""

_TABLES = (dict, set, list, deque, bytearray)
_PLAIN_TENSORS = frozenset((torch.Tensor, nn.Parameter))


class ModuleState:
    """Record of what modules held at one moment.

    Attributes:
        modules: The given modules, those below them, and hidden ones.
        parameters: Parameters of the first given module, in the order of ``parameters()``; a shared one comes again.
        buffers: The modules' buffers that can be copied, each once.
        tensors: Tensors in their tables, attributes and containers, each once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._contents, self._seen = Contents(), set[int]()
        self.modules: list[nn.Module] = []
        self.parameters: Sequence[nn.Parameter | None] = ()
        self._attributes: list[dict[str, Any]] = []
        self._tables: list[dict[str, Any]] = []  # of buffers
        was_enabled = gc.isenabled()
        gc.disable()  # thousands of small dicts would set off collections of the whole heap: half of the time
        try:
            roots = [*modules]
            for root in roots:  # grows while it is read, by hidden modules
                parameters, held = self._copy_attributes(root)
                if root is roots[0] and not self.parameters:
                    self.parameters = parameters
                roots += self._contents.add([*parameters, *held])
            self.tensors = self._contents.tensors
            with UNDISTURBED():
                self._headers = _Headers(self.tensors)
        finally:
            if was_enabled:
                gc.enable()
        self._classes = [*map(type, self.modules)]
        buffers = {id(buffer): buffer for table in self._tables for buffer in table.values() if buffer is not None}
        self.buffers = [buffer for buffer in buffers.values() if type(buffer) not in LAZY and _is_own(buffer)]

    def _copy_attributes(self, root: nn.Module) -> tuple[list[nn.Parameter | None], list[Any]]:
        """Copy the attributes of a module and of those below it; return parameters, and what else may hold something.

        One loop for all that is asked of each module: ``root.modules()`` alone takes as long.
        """
        parameters: list[nn.Parameter | None] = []
        held: list[Any] = []
        tables: list[dict[str, Any]] = []
        waiting: list[nn.Module | None] = [root]
        while waiting:
            module = waiting.pop()
            if module is None or id(module) in self._seen:
                continue
            self._seen.add(id(module))
            self.modules.append(module)
            self._attributes.append(attributes := module.__dict__.copy())
            values = [*attributes.values()]
            own, buffers, below = module._parameters, module._buffers, module._modules  # noqa: SLF001 - as above
            if len(values) >= _COUNT and values[1] is own and values[2] is buffers and values[_COUNT - 1] is below:
                held += filter(None, values[3 : _COUNT - 1])  # tables of hooks: empty ones are only cleared again
                held += values[_COUNT:]
            else:
                held += values
            if own:
                tables.append(own)
                parameters += own.values()
            if buffers:
                tables.append(buffers)
                self._tables.append(buffers)
                held += buffers.values()
            if below:
                tables.append(below)
                waiting += reversed(below.values())
        self._contents.add_tables(tables)
        return parameters, held

    def restore(self) -> None:
        """Restore all of it. Can be done any number of times."""
        for module, kind, attributes in zip(self.modules, self._classes, self._attributes, strict=True):
            if type(module) is not kind:  # a lazy module has become an ordinary one
                module.__class__ = kind
            put_entries(vars(module), attributes)
        for table in self._filled():
            table.clear()
        self._contents.restore()
        with UNDISTURBED():
            self._headers.restore()

    def _filled(self) -> list[Any]:
        """Tables of modules that were empty and are not any more."""
        values = [
            value for attributes in self._attributes for value in attributes.values() if isinstance(value, _TABLES)
        ]
        return [table for table in values if table and not self._contents.has(table)]

    def find_written(self) -> list[torch.Tensor]:
        """Tensors into which torch has counted a write; it counts none through ``.data`` and in inference mode."""
        return self._headers.find_written()

    def find_changed(self) -> list[nn.Module]:
        """Modules whose class, attributes or containers changed; tensors are not looked at."""
        changed = self._contents.find_changed() | {id(table) for table in self._filled()}
        return [
            module
            for module, kind, attributes in zip(self.modules, self._classes, self._attributes, strict=True)
            if type(module) is not kind
            or not is_same(vars(module), attributes)
            or (changed and any(id(value) in changed for value in _find_below(attributes.values())))
        ]

    def tensors_of(self, module: nn.Module) -> list[torch.Tensor]:
        """The tensors that one of the modules holds itself."""
        attributes = next(a for one, a in zip(self.modules, self._attributes, strict=True) if one is module)
        return [value for value in _find_below(attributes.values()) if isinstance(value, torch.Tensor)]

    def storages(self) -> set[int]:
        """Storages (``_cdata``) to which the tensors referred, and those to which they refer now."""
        return {s._cdata for tensor in (*self._headers.aliases, *self.tensors) for s in storages_of(tensor)}


class _Headers:
    """Record of the memory to which tensors refer, and of their flags; a list each, as a model has thousands."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._requires_grad = tensors, [tensor.requires_grad for tensor in tensors]
        self._lazy = [(tensor, type(tensor), tensor.data) for tensor in tensors if type(tensor) in LAZY]
        shaped = [tensor for tensor in tensors if type(tensor) not in LAZY] if self._lazy else tensors
        try:
            self._counted, self._versions = shaped, [tensor._version for tensor in shaped]
        except RuntimeError:  # tensors of inference mode count no writes; to ask each takes longer
            self._counted = [tensor for tensor in shaped if not tensor.is_inference()]
            self._versions = [tensor._version for tensor in self._counted]
        # Another tensor of the same memory; of a subclass the tensor itself, as its ``.data`` may be anything.
        self.aliases = [tensor.data if type(tensor) in _PLAIN_TENSORS else tensor for tensor in self._counted]
        self._attributes = {id(tensor): attributes.copy() for tensor in tensors if (attributes := tensor.__dict__)}
        # By value: the handle of a hook refers to the table, so the table stays the same object.
        self._hooks = {id(tensor): dict(hooks) for tensor in tensors if (hooks := tensor._backward_hooks)}  # noqa: SLF001 - no public way

    def find_written(self) -> list[torch.Tensor]:
        """Aliases of tensors that were written into."""
        versions = [tensor._version for tensor in self._counted]
        if versions == self._versions:
            return []
        written = zip(self.aliases, versions, self._versions, strict=True)
        return [alias for alias, now, before in written if now != before]

    def restore(self) -> None:
        for tensor, kind, alias in self._lazy:
            if type(tensor) is not kind:  # a lazy module's parameter has got a shape
                tensor.data = alias
                tensor.__class__ = kind
        for tensor, requires_grad in zip(self._tensors, self._requires_grad, strict=True):
            if not tensor.is_leaf and not requires_grad and not tensor._is_view():  # noqa: SLF001 - torch cannot detach a view
                tensor.detach_()  # a buffer was updated in place with part of a graph
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            hooks = tensor._backward_hooks  # noqa: SLF001 - no public way
            if hooks is not None:
                put_entries(hooks, self._hooks.get(id(tensor), {}))
            put_entries(vars(tensor), self._attributes.get(id(tensor), {}))
        for tensor, alias in zip(self._counted, self.aliases, strict=True):
            if alias is not tensor and storage_key(tensor) != storage_key(alias):
                tensor.data = alias


def _find_below(values: Iterable[Any]) -> list[Any]:
    """Objects in these values and in the containers among them; modules are not looked into."""
    seen: set[int] = set()
    found = [*values]
    for value in found:  # grows while it is read
        if id(value) not in seen:
            seen.add(id(value))
            found += find_parts(value)
    return found


def _is_own(tensor: torch.Tensor) -> bool:
    """Whether each of its elements has memory of its own; torch refuses to write into others (``expand``)."""
    if tensor.layout is not torch.strided:
        return True
    if lacks_memory(tensor):  # what it holds are other tensors, and its class need not know how to copy into it
        return False
    return not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
