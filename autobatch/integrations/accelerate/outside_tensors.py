"""Copies the values of tensors that a function names and that belong to no module, such as an average of weights.

Covers as many bytes as an average or two of the model take. Does not cover larger tensors, which are data: a copy of a
data set would take longer and more memory than a training step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autobatch.torch_internals.storages import storages_of

__all__ = ["OutsideTensors"]

_LEAST_BYTES = 16 * 1024**2  # as of arrays; so much is copied beside any model
_AVERAGES = 2  # times the model


class OutsideTensors:
    """The values of tensors at one moment, in host memory."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, model_bytes: int, host_bytes: int) -> None:
        """Copy them, the smallest first.

        Args:
            tensors: What to copy; those that share memory are copied once.
            model_bytes: What the modules and optimizers take.
            host_bytes: Host memory that copies may take.
        """
        storages = {storage._cdata: storage for tensor in tensors for storage in storages_of(tensor)}
        left = min(max(_AVERAGES * model_bytes, _LEAST_BYTES), host_bytes)
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in sorted(storages.values(), key=torch.UntypedStorage.nbytes):
            left -= storage.nbytes()
            if left < 0:
                return
            copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
            self._copies.append((storage, copy.copy_(storage, non_blocking=False)))

    def restore(self) -> None:
        """Put the values back that have changed. Can be done any number of times."""
        for storage, copy in self._copies:
            if storage.nbytes() != copy.nbytes():  # resize_ was called on it
                storage.resize_(copy.nbytes())
            # On the host it may be a file that is open for reading, and to write into that ends the process.
            if storage.device.type != "cpu" or not torch.equal(_bytes_in(storage), _bytes_in(copy)):
                storage.copy_(copy, non_blocking=False)

    def drop(self) -> None:
        """Free the copies."""
        self._copies = []


def _bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
