"""Records everything that trials may change, and restores it.

1. ``TrainingState`` is made before the first trial. It records what the model, the optimizer and other objects in the
   step's reach hold. It copies the values of the model, the optimizer and ``.grad`` to host memory.
2. While ``record`` is active, it also copies other memory before the first write into it.
3. ``rewind`` restores between trials: all but the state that the optimizer has made, which stays resident.
4. ``restore`` restores all of it, bit for bit and in place.

Not restored: the user's other objects, generators and files.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autobatch._formatting import format_bytes, name_type
from autobatch._wrappers import is_optimizer, members_of, own_attributes, own_table
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.torch_internals.storages import UNDISTURBED, lacks_memory, storages_of
from autobatch.undo.contents import MOST_ENTRIES
from autobatch.undo.interrupts import restore_each
from autobatch.undo.module_state import ModuleState
from autobatch.undo.random_state import RandomState
from autobatch.undo.written_memory import Saved, WriteRecorder, WrittenMemory, put_storage

if TYPE_CHECKING:
    from types import TracebackType


class TrainingState:
    """A model's and its optimizer's state at one moment. As a context manager it restores at the end."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any | None,
        device: torch.device,
        *,
        host_bytes: int,
        outside: Iterable[nn.Module | torch.Tensor] = (),
    ) -> None:
        """Record all of it, and remove the optimizer's step hooks until ``restore``: they are for training.

        Modules and tensors ``outside`` of the model are copied only before a recorded write: a frozen teacher may be
        larger than the model. Copies beyond ``host_bytes`` go to a file.
        """
        self._of_model, self._of_optimizer = ModuleState([model]), ModuleState([_Holder(_attributes_of(optimizer))])
        self._of_others = ModuleState([_Holder([*outside])])
        owned = [*model.parameters(), *model.buffers(), *self._of_model.tensors, *self._of_optimizer.tensors]
        _refuse_uncopied(model, owned)
        with UNDISTURBED():
            tensors = {id(tensor): tensor for tensor in (*owned, *self._of_others.tensors)}
            leaves = [tensor for tensor in tensors.values() if tensor.is_leaf]
            self._gradients = [(tensor, tensor.grad) for tensor in leaves]
            self._unhooked = [one for one in leaves if not one._post_accumulate_grad_hooks]  # noqa: SLF001 - no public way
            gradients = [gradient for _, gradient in self._gradients if gradient is not None]
        self._of_gradients = ModuleState([_Holder(gradients)])  # half() writes into them
        self._values = HostCopies([*owned, *gradients], host_bytes=host_bytes)
        self._random = RandomState(device)
        self._optimizer = optimizer
        _remove_step_hooks(optimizer)

    def record(self, uncopied: Iterable[torch.Tensor] = ()) -> WriteRecorder:
        """While the returned mode is active, copy memory before the first write into it.

        Takes about 10 us an operator. Meanwhile compiled code runs eagerly.
        """
        return WriteRecorder(self._values.saved, WrittenMemory(), uncopied, self._values.copy)

    def rewind(self) -> None:
        """Restore values, generators and the model, and drop gradients. The optimizer keeps the state it has made."""
        self._restore()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for tensor, _ in self._gradients:
            tensor.grad = None

    def reset_optimizer(self) -> None:
        """Drop the state that the optimizer has made: a first step that ran out of memory may leave half of it."""
        self._of_optimizer.restore()
        _remove_step_hooks(self._optimizer)

    def restore(self) -> None:
        restore_each(self._restore, self._of_optimizer.restore)

    def _restore(self) -> None:
        restore_each(
            self._of_model.restore,
            self._of_others.restore,
            self._restore_gradients,
            self._values.restore,
            self._random.restore,
        )

    def _restore_gradients(self) -> None:
        self._of_gradients.restore()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient
        with UNDISTURBED():
            for tensor in self._unhooked:
                (tensor._post_accumulate_grad_hooks or {}).clear()  # noqa: SLF001 - no public way

    def __enter__(self) -> TrainingState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.restore()
        finally:
            self.drop()

    def drop(self) -> None:
        """Drop the record without restoring it."""
        self._of_model = self._of_optimizer = self._of_others = self._of_gradients = ModuleState([])
        self._gradients, self._unhooked, self._optimizer = [], [], None
        self._values.close()


class _Holder(nn.Module):
    """Holds any objects, so that a record of modules has them too."""

    def __init__(self, held: list[Any]) -> None:
        super().__init__()
        self.held = held


def _attributes_of(optimizer: Any | None) -> list[Any]:
    """Return what the optimizers hold that were passed, and those inside them."""
    found: list[Any] = []
    waiting, seen = [*members_of(optimizer)], set[int]()
    for value in waiting:  # grows while it is read
        if id(value) in seen:
            continue
        seen.add(id(value))
        held = own_attributes(value)
        found += [own_table(value), held]
        # The state of a large model has more entries than a record looks into.
        found += [entry for part in held if issubclass(type(part), dict) for entry in part.values()]
        held = [one for part in held for one in (part if type(part) in (list, tuple) else [part])]
        waiting += [part for part in held if is_optimizer(part) or any(map(is_optimizer, own_attributes(part)))]
    return [found[start : start + MOST_ENTRIES] for start in range(0, len(found), MOST_ENTRIES)]


def _remove_step_hooks(optimizer: Any | None) -> None:
    for member in members_of(optimizer):
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks = getattr(member, name, None)
            if isinstance(hooks, dict):
                hooks.clear()


def _refuse_uncopied(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse tensors whose values a trial would change and nobody could restore. Frozen ones need no copy."""
    for tensor in tensors:
        if tensor.requires_grad and lacks_memory(tensor) and next(storages_of(tensor), None) is None:
            name = next((name for name, one in model.named_parameters() if one is tensor), "a tensor")
            raise InvalidArgument(
                f"{name} is {name_type(tensor)} of shape {tuple(tensor.shape)}, whose values cannot be copied: give "
                f"{type(tensor).__name__} a __tensor_flatten__(), or freeze it with requires_grad_(False)"
            )


class HostCopies:
    """Copies of whole storages in host memory, or in a file if host memory is short.

    Whole storages make views, tied tensors, overlapping strides and payloads of NaN right by construction.

    Attributes:
        saved: By storage, its bytes and their copy.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, host_bytes: int) -> None:
        self._host_bytes, self._total = host_bytes, 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.saved: Saved = {}
        storages = {storage._cdata: storage for tensor in tensors for storage in storages_of(tensor)}
        self._reserve(sum(storage.nbytes() for storage in storages.values()))
        self.saved.update({key: self._copy(storage, index) for index, (key, storage) in enumerate(storages.items())})

    def copy(self, storage: torch.UntypedStorage) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all bytes of one more storage, and a copy of them."""
        self._reserve(storage.nbytes())
        return self._copy(storage, len(self.saved))

    def _reserve(self, byte_count: int) -> None:
        self._total += byte_count
        if self._total <= self._host_bytes:
            return
        if self._folder is None:
            self._folder, byte_count = tempfile.TemporaryDirectory(prefix="autobatch-"), self._total
        free = shutil.disk_usage(self._folder.name).free
        if free >= byte_count:
            return
        if not self.saved:
            self.close()
        # Checked, because the files are mapped: a disk that is full when a page is written ends the process (SIGBUS).
        raise DoesNotFit(
            f"trials need a copy of the training state, {format_bytes(self._total)}, but host memory has "
            f"{format_bytes(self._host_bytes)} for it and {tempfile.gettempdir()} {format_bytes(free)}; free some, or "
            f"set TMPDIR to a larger disk"
        )

    def _copy(self, storage: torch.UntypedStorage, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with _disable_current_modes():  # a copy is no part of a measurement, and does not run out of memory in a test
            size, device = storage.nbytes(), storage.device
            memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
            if self._folder is None or size == 0:
                return memory, memory.to("cpu", copy=True)
            path = str(Path(self._folder.name, str(index)))
            return memory, torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu").copy_(memory)

    def restore(self) -> None:
        """Write the copied bytes back. Can be done any number of times."""
        with _disable_current_modes():
            for memory, value in self.saved.values():
                put_storage(memory, value)

    def close(self) -> None:
        """Free the copies, and delete the file."""
        self.saved.clear()  # a recorder holds it too
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
