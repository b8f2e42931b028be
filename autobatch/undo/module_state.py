"""Records what modules hold, except the values of tensors, and restores it.

A record is made at the beginning of every step, so it is one walk with shallow copies: 3 us a module. Modules that are
hidden in an attribute, such as a teacher in a list, are walked too.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from autobatch.torch_internals.storages import lacks_memory, storage_key, storages_of
from autobatch.undo.containers import (
    KINDS,
    MOST_ENTRIES,
    Contents,
    Kind,
    children_of,
    find_containers,
    is_same,
    record_contents,
)
from autobatch.undo.tensor_header import LAZY, UNDISTURBED

_DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
_PLAIN_CONTAINERS = frozenset((*_DICTS, list, set, deque))
_SIMPLE = frozenset((bool, int, float, str, type(None)))
_TABLES = frozenset((dict, OrderedDict, set))
_PLAIN, _MODULE, _TENSOR = Kind.PLAIN, Kind.MODULE, Kind.TENSOR
_PLAIN_TENSORS = frozenset((torch.Tensor, nn.Parameter))


class _Held(NamedTuple):
    """What one module held: its class, its attributes, and where in the record the things below these are."""

    module: nn.Module
    type: type[nn.Module]
    attributes: dict[str, Any]
    contents: slice
    tensors: slice


class ModuleState:
    """What modules held at one moment.

    Attributes:
        modules: The given modules, those below them, and hidden ones.
        buffers: The modules' buffers that can be copied, each once.
        tensors: Tensors in their tables, attributes and containers, each once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Record them and all modules below them."""
        self._held: list[_Held] = []
        self._entries: list[tuple[Any, Any]] = []  # a container and its copy
        self._empty: list[Any] = []  # containers that are empty, as most tables of modules are
        self._contents: list[Contents] = []  # of arrays, generators, dataclasses and containers of other classes
        self.tensors: list[torch.Tensor] = []
        was_enabled = gc.isenabled()
        gc.disable()  # thousands of small dicts would set off collections of the whole heap: half of the time
        try:
            self._walk([*modules])
        finally:
            if was_enabled:
                gc.enable()
        self.modules = [held.module for held in self._held]
        buffers = {id(b): b for held in self._held for b in held.module._buffers.values() if b is not None}
        self.buffers = [buffer for buffer in buffers.values() if type(buffer) not in LAZY and _is_own(buffer)]
        with UNDISTURBED():
            self._headers = _Headers(self.tensors)

    def _walk(self, modules: list[nn.Module]) -> None:  # noqa: C901 - one loop: a call for each attribute would cost most of it
        seen: set[int] = set()
        for module in modules:  # grows while it is read
            if id(module) in seen:
                continue
            seen.add(id(module))
            attributes = vars(module).copy()
            first_content, first_tensor = len(self._contents), len(self.tensors)
            # Most attributes are flags and tables that are empty: those that were not copied are cleared again.
            level = [v for v in attributes.values() if type(v) not in _SIMPLE and (type(v) not in _TABLES or v)]
            for value in level:  # grows, too
                found = type(value)
                if found in _PLAIN_CONTAINERS and not value:
                    self._empty.append(value)
                    continue
                kind = KINDS[found]
                if kind is _MODULE:
                    modules.append(value)
                if kind is _PLAIN or kind is _MODULE or id(value) in seen:
                    continue
                seen.add(id(value))
                if kind is _TENSOR:
                    self.tensors.append(value)
                elif found in _PLAIN_CONTAINERS:
                    self._entries.append((value, value.copy()))
                    if len(value) <= MOST_ENTRIES:
                        level += value.values() if found in _DICTS else value
                else:
                    if (content := record_contents(value)) is not None:
                        self._contents.append(content)
                    level += children_of(value)
            contents, tensors = slice(first_content, len(self._contents)), slice(first_tensor, len(self.tensors))
            self._held.append(_Held(module, type(module), attributes, contents, tensors))

    def restore(self) -> None:
        """Restore all of it. Can be done any number of times."""
        for module, kind, attributes, *_ in self._held:
            if type(module) is not kind:  # a lazy module has become an ordinary one
                module.__class__ = kind
            _put_entries(vars(module), attributes)
        copied = {id(container) for container, _ in self._entries}
        tables = [v for held in self._held for v in held.attributes.values() if type(v) in _TABLES]
        for container in (*self._empty, *tables):
            if container and id(container) not in copied:
                container.clear()
        for container, copy in self._entries:
            _put_entries(container, copy)
        for content in self._contents:
            content.put_back()
        with UNDISTURBED():
            self._headers.restore()

    def find_written(self) -> list[torch.Tensor]:
        """Tensors into which torch has counted a write; it counts none through ``.data`` and in inference mode."""
        return self._headers.find_written()

    def find_changed(self) -> list[nn.Module]:
        """Modules whose class, attributes or containers changed; tensors are not looked at."""
        changed = {id(container) for container, copy in self._entries if not _is_equal(container, copy)}
        copied = {id(container) for container, _ in self._entries}
        tables = [v for held in self._held for v in held.attributes.values() if type(v) in _TABLES]
        changed |= {id(container) for container in (*self._empty, *tables) if container and id(container) not in copied}

        def is_current(held: _Held) -> bool:
            return (
                type(held.module) is held.type
                and _is_equal(vars(held.module), held.attributes)
                and all(content.is_current() for content in self._contents[held.contents])
                and not changed.intersection(find_containers(held.attributes.values()))
            )

        return [held.module for held in self._held if not is_current(held)]

    def tensors_of(self, module: nn.Module) -> list[torch.Tensor]:
        """The tensors that one of the modules held itself."""
        return next(self.tensors[held.tensors] for held in self._held if held.module is module)

    def storages(self) -> set[int]:
        """Storages (``_cdata``) to which the tensors referred, and those to which they refer now."""
        return {s._cdata for tensor in (*self._headers.aliases(), *self.tensors) for s in storages_of(tensor)}

    def release(self) -> None:
        """Drop every reference; nothing can be restored from here on."""
        self._held, self._entries, self._empty, self._contents = [], [], [], []
        self.modules, self.tensors, self.buffers, self._headers = [], [], [], _Headers([])


class _Headers:
    """What tensors referred to, and their flags; a list each, as a model has thousands."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        lazy = [tensor for tensor in tensors if type(tensor) in LAZY]
        self._lazy = [(tensor, type(tensor), tensor.data) for tensor in lazy]
        known = [tensor for tensor in tensors if type(tensor) not in LAZY]
        self._flags = [(tensor, tensor.requires_grad) for tensor in tensors]
        self._counted = [tensor for tensor in known if not tensor.is_inference()]
        # Another tensor of the same memory; of a subclass the tensor itself, as its ``.data`` may be anything.
        self._aliases = [tensor.data if type(tensor) in _PLAIN_TENSORS else tensor for tensor in self._counted]
        self._versions = [tensor._version for tensor in self._counted]
        self._attributes = [(tensor, vars(tensor).copy()) for tensor in tensors if vars(tensor)]
        self._bare = [tensor for tensor in tensors if not vars(tensor)]
        # By value: the handle of a hook refers to the table, so the table stays the same object.
        hooked = [tensor for tensor in tensors if tensor._backward_hooks]  # noqa: SLF001 - no public way
        self._hooks = {id(tensor): dict(tensor._backward_hooks or ()) for tensor in hooked}  # noqa: SLF001 - no public way

    def aliases(self) -> list[torch.Tensor]:
        return self._aliases

    def find_written(self) -> list[torch.Tensor]:
        """Aliases of tensors that were written into."""
        counted = zip(self._counted, self._aliases, self._versions, strict=True)
        return [a for tensor, a, version in counted if not tensor.is_inference() and tensor._version != version]

    def restore(self) -> None:
        for tensor, kind, alias in self._lazy:
            if type(tensor) is not kind:  # a lazy module's parameter has got a shape
                tensor.data = alias
                tensor.__class__ = kind
        for tensor, requires_grad in self._flags:
            if not tensor.is_leaf and not requires_grad and not tensor._is_view():  # noqa: SLF001 - torch cannot detach a view
                tensor.detach_()  # a buffer was updated in place with part of a graph
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            hooks = tensor._backward_hooks  # noqa: SLF001 - no public way
            if hooks is not None:
                _put_entries(hooks, self._hooks.get(id(tensor), {}))
        for tensor, alias in zip(self._counted, self._aliases, strict=True):
            if alias is not tensor and storage_key(tensor) != storage_key(alias):
                tensor.data = alias
        for tensor, attributes in (*self._attributes, *((tensor, {}) for tensor in self._bare)):
            _put_entries(vars(tensor), attributes)


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
