"""Records everything that a training step may change before its update, and restores it.

1. ``Undo`` is made when a step begins. It holds random generators, attributes of modules, copies of buffers and of
   memory that steps are known to write into, the objects in ``keep=``, and earlier gradients.
2. ``restore`` makes all of it what it was, bit for bit and in place. It can be called again.
3. ``restart`` restores too, and leaves ``.grad`` empty, for another attempt at the same step.
4. ``release`` drops the record. Nothing can be restored from then on.

Invariants, asserted by the tests:

- A step that runs out of memory at any operation ends, once it was run again, as one in its final micro-batches.
- Nothing of size is allocated to restore, since memory may be full; but objects in ``keep=`` get copies of their state.
- Nothing of the step lives longer because of the record, once it is released.

Not restored: attributes that a step sets on tensors that no module holds, and what it changes in other objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autobatch.errors import CannotRetry
from autobatch.torch_internals.storages import storages_of
from autobatch.undo.gradients import EarlierGradients
from autobatch.undo.interrupts import restore_each
from autobatch.undo.module_state import ModuleState
from autobatch.undo.random_state import RandomState
from autobatch.undo.user_objects import UserObjects, expand_objects
from autobatch.undo.written_memory import Saved, WriteRecorder, WrittenMemory, put_storage


class Undo:
    """Everything that a step may change before its update, at one moment.

    Attributes:
        modules: Record of what the modules held.
        memory: Copies of memory that steps write into; a recorder adds to them.
        gradients: Gradients from before the step.
        is_released: Whether the record was dropped.
    """

    def __init__(
        self,
        model: nn.Module | None,
        device: torch.device,
        *,
        keep: Sequence[Any] = (),
        written: WrittenMemory | None = None,
        held: Iterable[torch.Tensor] | None = None,
    ) -> None:
        """Record all of it; only values that move are copied, each on its own device.

        Args:
            model: Its modules are recorded, hidden ones too, and copies of their buffers.
            device: The device whose random generator is recorded, beside the CPU's.
            keep: Objects of the user. If a module is among them, its parameters are copied too.
            written: Memory that earlier steps wrote into: it is copied. This step's own is added.
            held: Parameters that an optimizer holds. Their gradients are recorded, and those of the model's; ``None``:
                no gradients are.
        """
        named = expand_objects(keep) if keep else []
        kept = [item for item in named if isinstance(item, nn.Module)]
        self._generators = RandomState(device)
        self.modules = ModuleState([*([] if model is None else [model]), *kept])
        # By value: BatchNorm writes running statistics without a change of ``_version``.
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.modules.buffers]
        self._written = WrittenMemory() if written is None else written
        self.memory: Saved = self._written.save() if self._written.known else {}
        if kept:
            self.memory |= WrittenMemory(ModuleState(kept).tensors).save()
        self._objects = UserObjects([item for item in named if not isinstance(item, nn.Module)]) if named else None
        parameters = () if held is None else (*self.modules.parameters, *held)
        self.gradients = EarlierGradients([*{id(one): one for one in parameters if one is not None}.values()])
        self.is_released = False

    def watch(self, uncopied: Iterable[torch.Tensor] = ()) -> WriteRecorder:
        """While the returned mode is active, copy memory before it is written into; later records copy it too."""
        return WriteRecorder(self.memory, self._written, [*uncopied, *(buffer for buffer, _ in self._buffers)])

    def find_lost(self) -> list[torch.Tensor]:
        """Tensors that were written into and not copied, by torch's counts: they cannot be restored.

        Later records copy them.
        """
        written = self.modules.find_written()
        if not written:
            return []
        copied = {s._cdata for buffer, _ in self._buffers for s in storages_of(buffer)} | self.memory.keys()
        lost = [tensor for tensor in written if any(s._cdata not in copied for s in storages_of(tensor))]
        self._written.add(lost)
        return lost

    def refuse_lost(self, reason: str) -> None:
        """Refuse to run a step again that wrote into memory without a copy."""
        if lost := self.find_lost():
            raise CannotRetry(
                f"cannot run the step again ({reason}) after the step wrote for the first time into a tensor of shape "
                f"{tuple(lost[0].shape)}; there was no copy: it keeps what was written, all else was restored; load "
                f"your last checkpoint"
            )

    def find_moved(self) -> list[nn.Module]:
        """Modules whose attributes changed, or the values of whose tensors did."""
        changed = {id(module) for module in self.modules.find_changed()}
        buffers = {id(buffer) for buffer, value in self._buffers if not torch.equal(buffer, value)}
        written = {key for key, (memory, value) in self.memory.items() if not torch.equal(memory, value)}

        def holds_moved(module: nn.Module) -> bool:
            tensors = self.modules.tensors_of(module) if buffers or written else ()
            return any(id(t) in buffers or any(s._cdata in written for s in storages_of(t)) for t in tensors)

        return [module for module in self.modules.modules if id(module) in changed or holds_moved(module)]

    def restore(self) -> None:
        """Restore all of it, bit for bit and in place."""
        restore_each(self.rewind, self.gradients.restore)

    def rewind(self) -> None:
        """Restore all but gradients."""
        restore_each(
            self.modules.restore,
            self._restore_values,
            *(() if self._objects is None else (self._objects.restore,)),
            self._generators.restore,  # last: the user's objects may draw when they are loaded
        )

    def restart(self) -> None:
        """Restore, and drop every ``.grad``, to run the step again."""
        self.restore()
        self.gradients.set_aside()

    @torch.no_grad()
    def _restore_values(self) -> None:
        for buffer, value in self._buffers:
            with torch.inference_mode(mode=buffer.is_inference()):  # torch writes into such a one nowhere else
                buffer.copy_(value)
        for memory, value in self.memory.values():
            put_storage(memory, value)

    def restore_outside(self) -> None:
        """Restore the values of copied memory to which no recorded module refers."""
        for key in self.memory.keys() - self.modules.storages():
            put_storage(*self.memory[key])

    def release(self) -> None:
        """Drop every copy and reference that a hand-written loop would not hold."""
        memory = self.memory
        self.__dict__ = {"is_released": True}  # at once: an interrupt comes before it, or after it
        memory.clear()  # a recorder holds it too
