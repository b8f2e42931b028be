"""Records everything that a step may change before its update, and restores it.

That is: random generators, what modules hold (``module_state``), the values of buffers, memory that steps are known to
write into (``written_memory``) and objects that the user has named (``user_objects``). Gradients are recorded by
``gradients``. Copies of values stay on their device, and are made once a step, at its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from autobatch.torch_internals.storages import storages_of
from autobatch.undo.module_state import Location, ModuleState, tensors_at
from autobatch.undo.random_state import RandomState
from autobatch.undo.user_objects import UserObjects, expand_objects
from autobatch.undo.written_memory import Saved, WriteRecorder, WrittenMemory

__all__ = ["RewindPoint", "StepState"]

_NO_OBJECTS = UserObjects(())


class RewindPoint:
    """Everything that a step may change before its update, at one moment.

    Attributes:
        random: The generators.
        modules: What the modules held.
        memory: Copies of memory that is known to be written into; a recorder adds to them.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        *,
        state: ModuleState | None = None,
        memory: WrittenMemory | None = None,
        objects: Sequence[Any] = (),
    ) -> None:
        """Record all of it as it is now.

        Args:
            modules: ``[*model.modules()]``, listed once for many points.
            device: The device whose generator is recorded.
            state: A record of what the modules hold; default: a new one.
            memory: The memory that steps are known to write into.
            objects: The objects that the user has named.
        """
        self.random = RandomState(device)
        self.modules: ModuleState = state or ModuleState(modules)
        # By value: running statistics are written without a change of ``_version``.
        self._buffers = self.modules.buffers
        self._values = [*map(torch.clone, map(torch.Tensor.detach, self._buffers))]
        self.memory: Saved = {} if memory is None else memory.save()
        self._objects = UserObjects(objects) if objects else _NO_OBJECTS

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of which this has copies."""
        return self._buffers

    def record(self, apart: Iterable[torch.Tensor]) -> WriteRecorder:
        """While active, copies all that is written into, so that ``restore`` puts it back.

        Args:
            apart: Tensors of which no copies are made: gradients, the batch.
        """
        return WriteRecorder(self.memory, WrittenMemory(), [*apart, *self.buffers()])

    def find_moved(self) -> list[nn.Module]:
        """The modules whose attributes, or whose tensors' values, are not as they were."""
        changed = {id(module) for module in self.modules.find_changed()}
        values = zip(self._buffers, self._values, strict=True)
        buffers = {id(buffer) for buffer, value in values if not torch.equal(buffer, value)}
        written = {key for key, (memory, value) in self.memory.items() if not torch.equal(memory, value)}

        def holds_moved(module: nn.Module) -> bool:
            tensors = self.modules.tensors_of(module)
            return any(id(t) in buffers or any(s._cdata in written for s in storages_of(t)) for t in tensors)

        return [module for module in self.modules.modules if id(module) in changed or holds_moved(module)]

    def restore(self) -> None:
        """Restore all of it bit for bit, in place; allocates nothing of size."""
        try:
            self._put_back()
        except BaseException:
            self._put_back()  # interrupted: half of it would be neither before nor after
            raise

    def _put_back(self) -> None:
        with ExitStack() as parts:  # what one of them raises leaves none of the others out
            parts.callback(self.random.restore)  # last: the user's objects may draw when they are loaded
            parts.callback(self._objects.put_back)
            parts.callback(self._put_values_back)
            parts.callback(self.modules.put_back)

    @torch.no_grad()
    def _put_values_back(self) -> None:
        for buffer, value in zip(self._buffers, self._values, strict=True):
            with torch.inference_mode(mode=buffer.is_inference()):  # torch writes into such a one nowhere else
                buffer.copy_(value)
        for memory, value in self.memory.values():
            _put_value_back(memory, value)

    def restore_outside(self) -> None:
        """Restore the recorded values of memory to which no known module refers."""
        own = self.modules.headers.storages()
        for key in self.memory.keys() - own:
            _put_value_back(*self.memory[key])

    def release(self) -> None:
        """Drop every copy and reference that a hand-written loop would not hold; nothing can be restored after it."""
        if self.memory:
            self.memory.clear()  # a recorder holds it too
        self._buffers, self._values, self._objects = [], [], _NO_OBJECTS
        self.modules.release()


class StepState:
    """What the steps of one model change, learnt as they run.

    Attributes:
        records: Whether writes may be recorded.
        is_recording: Whether the step that began last is one of those in which writes are recorded.
        makes_sparse: Whether a step has made a sparse gradient.
        may_be_sparse: Whether gradients of the step that began last are searched for sparse ones.
        is_looked_over: Whether it is one of those in which each micro-batch is searched for what it changes: step 0, 1,
            4, 16, 64 and so on.
    """

    def __init__(self, model: nn.Module, device: torch.device, objects: Sequence[Any] = (), *, records: bool) -> None:
        """Begin with nothing learnt.

        Args:
            model: Its submodules are covered too.
            device: The device whose generator is recorded.
            objects: The objects that the user has named: see ``user_objects``.
            records: False for compiled models, which would run eagerly while writes are recorded.
        """
        self._model, self._device = model, device
        named = expand_objects(objects)
        self._modules = [part for item in named if isinstance(item, nn.Module) for part in item.modules()]
        self._objects = [item for item in named if not isinstance(item, nn.Module)]
        self.records, self._begun, self._next_recorded = records, 0, 0
        self._memory = WrittenMemory()
        self._latest: ModuleState | None = None
        self._recorder: WriteRecorder | None = None
        self._written: set[int] = set()
        self._locations: set[Location] = set()
        self.is_recording = self.is_looked_over = self.may_be_sparse = self.makes_sparse = False

    def begin(self) -> RewindPoint:
        """Record everything, before a step."""
        self.is_looked_over = self._begun == self._next_recorded
        if self.is_looked_over:
            self._next_recorded = 4 * self._begun or 1
        self.is_recording = self.records and self.is_looked_over
        self._begun += 1
        if self.is_recording:
            self._memory = WrittenMemory()  # learnt anew: what was written once may never be again
        if self._latest is None or not self._latest.renew():
            modules = [*self._model.modules(), *self._modules]
            self._latest = ModuleState(modules, self._latest)
        self.may_be_sparse = self.is_looked_over or self.makes_sparse
        return self._make_point(self._latest)

    def _make_point(self, state: ModuleState) -> RewindPoint:
        memory = None
        if self._locations:  # a tensor that is replaced in each step and written into is never the same one
            self._memory.add(tensors_at(self._locations, state.modules))
        if self._modules:
            self._memory.add(tensor for module in self._modules for tensor in state.tensors_of(module))
        if self._memory.known:
            memory = self._memory
        return RewindPoint(state.modules, self._device, state=state, memory=memory, objects=self._objects)

    def mark(self) -> RewindPoint:
        """Record everything, before calls in the middle of a step that must leave no trace."""
        return self._make_point(ModuleState([*self._model.modules(), *self._modules]))

    def record(
        self,
        begun: RewindPoint,
        apart: Iterable[torch.Tensor],
        before_write: Callable[[int], bool] | None = None,
    ) -> WriteRecorder:
        """Around a micro-batch of a step that is recorded: copies what it writes into.

        Args:
            begun: The step's beginning, which gets the copies.
            apart: Tensors of which there are no copies: gradients, the batch.
            before_write: As in ``WriteRecorder``.
        """
        if self._recorder is not None:  # of an earlier micro-batch, which may have written into other memory
            self._written |= self._recorder.written
        self._recorder = WriteRecorder(begun.memory, self._memory, [*apart, *begun.buffers()], before_write)
        return self._recorder

    def stop_recording(self) -> None:
        """At the end of a step, however it ended."""
        if self._recorder is not None:
            self._recorder.stop()
            written = self._written | self._recorder.written
            self._locations |= self._latest.find_locations(written) if self._latest else set()
        self._recorder, self._written = None, set()

    def learn(self, begun: RewindPoint) -> list[torch.Tensor]:
        """Find what was written since a step began, by torch's counts, in case the step is not recorded.

        Returns:
            Tensors that cannot be restored, since they were not copied. In later steps they will be.
        """
        if not begun.modules.headers.any_written():
            return []
        copied = {s._cdata for buffer in begun.buffers() for s in storages_of(buffer)} | begun.memory.keys()
        written = begun.modules.headers.find_written()
        unsaved = [alias for alias in written if any(s._cdata not in copied for s in storages_of(alias))]
        if unsaved:
            self._memory.add(unsaved)
            self._locations |= begun.modules.find_locations({s._cdata for t in unsaved for s in storages_of(t)})
        return unsaved


@torch.no_grad()
def _put_value_back(memory: torch.Tensor, value: torch.Tensor) -> None:
    storage = memory.untyped_storage()
    if storage.nbytes() != value.nbytes:  # resize_ was called on it
        storage.resize_(value.nbytes)
    memory.copy_(value)
