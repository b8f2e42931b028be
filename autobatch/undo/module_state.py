"""Records what modules hold, except the values of tensors, and restores it.

A record is made at the beginning of every step: one walk with shallow copies. Modules that are hidden in an attribute,
such as a teacher in a list, are walked too.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autobatch.torch_internals.storages import LAZY, UNDISTURBED, lacks_memory, storage_key, storages_of
from autobatch.undo.containers import KINDS, MOST_ENTRIES, Contents, Kind, children_of, is_same, record_contents

_DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
_PLAIN_CONTAINERS = frozenset((*_DICTS, list, set, deque))
_SIMPLE = frozenset((bool, int, float, str, type(None)))
_TABLES = frozenset((dict, OrderedDict, set))
_PLAIN_TENSORS = frozenset((torch.Tensor, nn.Parameter))


class ModuleState:
    """Record of what modules held at one moment.

    Attributes:
        modules: The given modules, those below them, and hidden ones.
        buffers: The modules' buffers that can be copied, each once.
        tensors: Tensors in their tables, attributes and containers, each once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Record them and all modules below them."""
        self.modules: list[nn.Module] = []
        self._classes: list[type[nn.Module]] = []
        self._attributes: list[dict[str, Any]] = []
        self._copies: dict[int, tuple[Any, Any]] = {}  # a container and its copy, by the container's id
        self._contents: dict[int, Contents] = {}  # of arrays, generators, dataclasses and containers of other classes
        was_enabled = gc.isenabled()
        gc.disable()  # thousands of small dicts would set off collections of the whole heap: half of the time
        try:
            tensors = self._walk([*modules])
        finally:
            if was_enabled:
                gc.enable()
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        tables = [table for module in self.modules if (table := module._buffers)]
        buffers = {id(buffer): buffer for table in tables for buffer in table.values() if buffer is not None}
        self.buffers = [buffer for buffer in buffers.values() if type(buffer) not in LAZY and _is_own(buffer)]
        with UNDISTURBED():
            self._headers = _Headers(self.tensors)

    def _walk(self, modules: list[nn.Module]) -> list[torch.Tensor]:  # noqa: C901, PLR0912 - one loop: calls would cost most of it
        """Copy attributes and containers, level by level; return the tensors in them."""
        seen: set[int] = set()
        copies, tensors = self._copies, list[torch.Tensor]()
        while modules:
            values: list[Any] = []
            for module in modules:
                if id(module) not in seen:
                    seen.add(id(module))
                    self.modules.append(module)
                    self._attributes.append(attributes := vars(module).copy())
                    values += attributes.values()
            modules = []
            # Most attributes are flags and tables that are empty: those that were not copied are cleared again.
            values = [v for v in values if not (((found := type(v)) in _TABLES and not v) or found in _SIMPLE)]
            for value in values:  # grows while it is read
                found = type(value)
                if found in _PLAIN_TENSORS:
                    tensors.append(value)
                elif found in _PLAIN_CONTAINERS:
                    if id(value) not in copies:
                        copies[id(value)] = value, value.copy()
                        if len(value) <= MOST_ENTRIES:
                            values += value.values() if found in _DICTS else value
                elif found is tuple:  # its entries may change, the tuple cannot
                    if id(value) not in seen:
                        seen.add(id(value))
                        values += value
                elif (kind := KINDS[found]) is Kind.MODULE:
                    modules.append(value)
                elif kind is Kind.TENSOR:
                    tensors.append(value)
                elif kind is not Kind.PLAIN and id(value) not in seen:
                    seen.add(id(value))
                    if (content := record_contents(value)) is not None:
                        self._contents[id(value)] = content
                    values += children_of(value)
        self._classes = [type(module) for module in self.modules]
        return tensors

    def restore(self) -> None:
        """Restore all of it. Can be done any number of times."""
        for module, kind, attributes in zip(self.modules, self._classes, self._attributes, strict=True):
            if type(module) is not kind:  # a lazy module has become an ordinary one
                module.__class__ = kind
            _put_entries(vars(module), attributes)
        for table in self._filled():
            table.clear()
        for container, copy in self._copies.values():
            _put_entries(container, copy)
        for content in self._contents.values():
            content.put_back()
        with UNDISTURBED():
            self._headers.restore()

    def _filled(self) -> list[Any]:
        """Tables of modules that were empty and are not any more."""
        tables = [v for attributes in self._attributes for v in attributes.values() if type(v) in _TABLES and v]
        return [table for table in tables if id(table) not in self._copies]

    def find_written(self) -> list[torch.Tensor]:
        """Tensors into which torch has counted a write; it counts none through ``.data`` and in inference mode."""
        return self._headers.find_written()

    def find_changed(self) -> list[nn.Module]:
        """Modules whose class, attributes or containers changed; tensors are not looked at."""
        changed = {key for key, (container, copy) in self._copies.items() if not _is_equal(container, copy)}
        changed |= {key for key, content in self._contents.items() if not content.is_current()}
        changed |= {id(table) for table in self._filled()}
        return [
            module
            for module, kind, attributes in zip(self.modules, self._classes, self._attributes, strict=True)
            if type(module) is not kind
            or not _is_equal(vars(module), attributes)
            or any(id(value) in changed for value in _find_below(attributes.values()))
        ]

    def tensors_of(self, module: nn.Module) -> list[torch.Tensor]:
        """The tensors that one of the modules holds itself."""
        attributes = next(a for one, a in zip(self.modules, self._attributes, strict=True) if one is module)
        return [value for value in _find_below(attributes.values()) if isinstance(value, torch.Tensor)]

    def storages(self) -> set[int]:
        """Storages (``_cdata``) to which the tensors referred, and those to which they refer now."""
        return {s._cdata for tensor in (*self._headers.aliases, *self.tensors) for s in storages_of(tensor)}

    def release(self) -> None:
        """Drop every reference; nothing can be restored from here on."""
        self.modules, self._classes, self._attributes, self._copies, self._contents = [], [], [], {}, {}
        self.tensors, self.buffers, self._headers = [], [], _Headers([])


class _Headers:
    """Record of the memory to which tensors refer, and of their flags; a list each, as a model has thousands."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._requires_grad = tensors, [tensor.requires_grad for tensor in tensors]
        self._lazy = [(tensor, type(tensor), tensor.data) for tensor in tensors if type(tensor) in LAZY]
        self._counted = [tensor for tensor in tensors if type(tensor) not in LAZY and not tensor.is_inference()]
        # Another tensor of the same memory; of a subclass the tensor itself, as its ``.data`` may be anything.
        self.aliases = [tensor.data if type(tensor) in _PLAIN_TENSORS else tensor for tensor in self._counted]
        self._versions = [tensor._version for tensor in self._counted]
        self._attributes = {id(tensor): attributes.copy() for tensor in tensors if (attributes := vars(tensor))}
        # By value: the handle of a hook refers to the table, so the table stays the same object.
        self._hooks = {id(tensor): dict(hooks) for tensor in tensors if (hooks := tensor._backward_hooks)}  # noqa: SLF001 - no public way

    def find_written(self) -> list[torch.Tensor]:
        """Aliases of tensors that were written into."""
        counted = zip(self._counted, self.aliases, self._versions, strict=True)
        return [a for tensor, a, version in counted if not tensor.is_inference() and tensor._version != version]

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
                _put_entries(hooks, self._hooks.get(id(tensor), {}))
            _put_entries(vars(tensor), self._attributes.get(id(tensor), {}))
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
            found += children_of(value)
    return found


def _is_equal(container: Any, copy: Any) -> bool:
    """Whether a container holds the very objects that its copy holds, in the same order."""
    if isinstance(container, dict):
        return is_same([*container], [*copy]) and is_same([*container.values()], [*copy.values()])
    return is_same([*container], [*copy])


def _put_entries(container: Any, copy: Any) -> None:
    """Make a container hold what its copy holds; one that has not changed is not written into."""
    if _is_equal(container, copy):
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in copy.items():  # one by one: Counter.update() adds
            container[key] = value
    elif isinstance(container, set):
        container.update(copy)
    else:
        container.extend(copy)


def _is_own(tensor: torch.Tensor) -> bool:
    """Whether each of its elements has memory of its own; torch refuses to write into others (``expand``)."""
    if tensor.layout is not torch.strided:
        return True
    if lacks_memory(tensor):  # what it holds are other tensors, and its class need not know how to copy into it
        return False
    return not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
