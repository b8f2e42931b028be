"""Records what modules hold, except the values of tensors, and restores it.

Covers each module's class, attributes and tables (parameters, buffers, submodules, hooks), what ``containers`` covers
below them, and what the tensors in all of these refer to. Modules that are hidden in an attribute, such as a teacher
in a list, count as well. Does not cover the values of tensors: ``rewind_point`` and ``written_memory`` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from operator import is_

import torch
from torch import nn

from autobatch.torch_internals.storages import lacks_memory
from autobatch.undo.containers import VALUES_OF, Watch, find_contents, put_entries_back
from autobatch.undo.tensor_header import TensorHeaders, is_uninitialized

__all__ = ["Location", "ModuleState", "tensors_at"]

_NO_TENSORS, _NO_WATCH = TensorHeaders([]), Watch(())

Location = tuple[int, str, str]
"""The ``id`` of a module, one of its attributes, and, in its table of parameters, a name."""


def tensors_at(locations: AbstractSet[Location], modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The tensors at these locations now."""
    if not locations:
        return []
    by_id = {id(module): module for module in modules}
    found = []
    for key, attribute, name in locations:
        value = vars(by_id[key]).get(attribute) if key in by_id else None
        found.append(value.get(name) if attribute == "_parameters" and value else value)
    return find_contents(found).tensors


class ModuleState:
    """What modules held at one moment.

    Attributes:
        modules: Those that were given, and those hidden below them.
        watch: Whether classes, attributes and containers are as they were; tensors are not looked at.
        headers: Of each tensor in their tables, attributes and containers.
        buffers: The modules' buffers, each once, but those of which no copy can be made.
        is_complete: Whether no reference was dropped.
    """

    def __init__(self, modules: Sequence[nn.Module], earlier: ModuleState | None = None) -> None:
        """Record all of them; copies are made only of generators and arrays that are attributes.

        Args:
            modules: ``[*model.modules()]``.
            earlier: An earlier record: what has not changed is taken from it, which is several times faster.
        """
        seen = {} if earlier is None else earlier._attributes  # noqa: SLF001 - of its own class
        self._attributes: dict[int, _Attributes] = {}
        waiting: list[nn.Module] = [*modules]
        while waiting:
            waiting = [*self._look_at(waiting, seen)]
        self.modules = [attributes.module for attributes in self._attributes.values()]
        tensors = {id(tensor): tensor for found in self._attributes.values() for tensor in found.tensors}
        self.headers = TensorHeaders([*tensors.values()])
        buffers = {id(b): b for module in self.modules for b in module._buffers.values() if b is not None}
        known = [b for b in buffers.values() if not is_uninitialized(b)]
        self.buffers = [*filter(_is_own, known)]
        self._strided = [b for b in known if b.layout is torch.strided]
        self._strides = [*map(torch.Tensor.stride, self._strided)]
        self.watch = Watch(self.modules, [held.found for held in self._attributes.values()])
        self._tables = [table for module in self.modules for table in (module._parameters, module._modules)]  # noqa: SLF001 - not public
        self._table_sizes = [*map(len, self._tables)]
        self._table_entries = [*chain.from_iterable(map(VALUES_OF, self._tables))]
        lasting = {key: held for key, held in self._attributes.items() if not held.may_hold_activations}
        self._lasting = lasting if len(lasting) < len(self._attributes) else None
        self.is_complete = True

    def _look_at(self, modules: Iterable[nn.Module], known: dict[int, _Attributes]) -> Iterable[nn.Module]:
        """Add what these modules hold; the hidden ones among that come back."""
        for module in modules:
            if id(module) in self._attributes:
                continue
            attributes = known.get(id(module))
            if attributes is None or not attributes.are_current():
                attributes = _Attributes(module)
            self._attributes[id(module)] = attributes
        held = [module for attributes in self._attributes.values() for module in attributes.modules]
        return [module for module in held if id(module) not in self._attributes]

    def renew(self) -> bool:
        """Look at the tensors again, where all else is as it was; costs little where it is.

        Returns:
            Whether it is. If not, this is good as ``earlier`` only.
        """
        return (
            self.is_complete
            and self.watch.is_current()
            and self.headers.renew()
            and [*map(torch.Tensor.stride, self._strided)] == self._strides  # which `.data` of another shape changes
        )

    def release(self) -> None:
        """Drop the references to activations, so that one is freed when its module drops it.

        References to parameters, buffers and numbers stay, for ``renew``. From here on nothing can be restored.
        """
        if self._lasting is None:
            self.headers.release()
            return
        # In one assignment: an interrupt must find the update begun or not.
        self._attributes, self.modules, self.buffers, self.headers, self.watch, self.is_complete = (
            *(self._lasting, [], [], _NO_TENSORS, _NO_WATCH, False),
        )

    def holds_same_parameters(self) -> bool:
        """Whether the modules still have the same parameters and submodules; all else is not looked at."""
        entries = chain.from_iterable(map(VALUES_OF, self._tables))
        return [*map(len, self._tables)] == self._table_sizes and all(map(is_, entries, self._table_entries))

    def is_current(self) -> bool:
        """Whether all of it is as it was."""
        return self.watch.is_current() and self.headers.are_current()

    def find_changed(self) -> list[nn.Module]:
        """The modules whose class, attributes or containers are not as they were; tensors are not looked at."""
        return [held.module for held in self._attributes.values() if not held.are_current()]

    def find_locations(self, storages: AbstractSet[int]) -> set[Location]:
        """Where modules held tensors with these storages (``_cdata``)."""
        tensors = self.headers.find_referring(storages)
        return {location for held in self._attributes.values() for location in held.find_locations(tensors)}

    def tensors_of(self, module: nn.Module) -> list[torch.Tensor]:
        """The tensors that one of the modules held itself."""
        return self._attributes[id(module)].tensors

    def put_back(self) -> None:
        """Restore all of it. Can be done any number of times."""
        for held in self._attributes.values():
            held.put_back()
        self.headers.put_back()


class _Attributes:
    """The class and the attributes of one module, and what the containers among them held."""

    __slots__ = (
        *("_class", "_held", "_names", "_values"),
        *("found", "may_hold_activations", "module", "modules", "tensors"),
    )

    def __init__(self, module: nn.Module) -> None:
        self.module, self._class = module, type(module)
        self._held = vars(module).copy()
        self._names, self._values = [*self._held], [*self._held.values()]
        self.found = find_contents(self._values)
        self.modules, self.tensors = self.found.modules, self.found.tensors
        self.may_hold_activations = self._holds_loose_tensors()

    def are_current(self) -> bool:
        held = vars(self.module)
        return (
            type(self.module) is self._class
            and len(held) == len(self._values)
            and all(map(is_, held.values(), self._values))
            and [*held] == self._names
            and self.found.are_current()
        )

    def _holds_loose_tensors(self) -> bool:
        """Whether it holds a tensor that is in no table, or an object that may hold one."""
        if self.found.may_hold_more:
            return True
        tables = [*self._held.get("_parameters", {}).values(), *self._held.get("_buffers", {}).values()]
        known = {id(tensor) for tensor in tables}
        return any(id(tensor) not in known for tensor in self.tensors)

    def find_locations(self, tensors: AbstractSet[int]) -> Iterator[Location]:
        for attribute, value in self._held.items():
            entries = value.items() if attribute == "_parameters" else [("", value)]
            for name, entry in entries:
                if any(id(tensor) in tensors for tensor in find_contents([entry]).tensors):
                    yield id(self.module), attribute, name

    def put_back(self) -> None:
        if type(self.module) is not self._class:  # a lazy module has become an ordinary one
            self.module.__class__ = self._class
        put_entries_back(vars(self.module), self._held)
        self.found.put_back()


def _is_own(tensor: torch.Tensor) -> bool:
    """Whether each of its elements has memory of its own; torch refuses to write into others (``expand``)."""
    if tensor.layout is not torch.strided:
        return True
    if lacks_memory(tensor):  # what it holds are other tensors, and its class need not know how to copy into it
        return False
    return not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
