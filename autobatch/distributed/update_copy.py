"""Copies an update to ranks that ran out of memory inside the optimizer's step.

Every rank that made the update holds the parameters and the optimizer's state that they lack.

1. The first rank that made it describes them: tensors by their layout, everything else by its value.
2. Each rank that lacks it makes the tensors of the state that it has not got. All exchange whether they could.
3. Each tensor is sent in place. From here on nothing fails on one rank alone.

Learning rates are not copied: a scheduler of the other ranks may have moved theirs for the next step.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from autobatch.distributed.channel import Channel
from autobatch.torch_internals.storages import has_shards, is_dense

_NAME = "the copy of an update"


@dataclass(frozen=True)
class _Layout:
    """A tensor on the device that trains, without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not is_dense(tensor):
            raise TypeError(f"{type(tensor).__name__} cannot be sent in place")
        return cls(tensor.shape, tensor.stride(), tensor.dtype)


class UpdateCopy:
    """All that an update changes, on one of the ranks that make it."""

    def __init__(self, group: dist.ProcessGroup | None, optimizers: Sequence[Any], scaler: Any | None) -> None:
        """Read nothing yet; ``optimizers`` are those of which ``are_copyable`` holds."""
        self._group, self._optimizers, self._scaler = group, optimizers, scaler
        self._parameters = [one for member in optimizers for one in _parameters_of(member)]

    @torch.no_grad()
    def copy(self, channel: Channel, source: int, *, is_lacking: bool) -> bool:
        """Send the update from the rank ``source``. Collective.

        Args:
            channel: Exchanges among the ranks.
            source: Rank that made the update.
            is_lacking: Whether this rank takes the update.

        Returns:
            Whether every rank has the update now. If not, no rank has changed.

        Raises:
            RankLost: A rank is gone or did not answer.
        """
        description: list[Any] = [None]
        if channel.rank == source:
            with suppress(Exception):
                description = [pickle.dumps(tree_map(self._describe, self._read()))]
        with channel.collective(_NAME):
            dist.broadcast_object_list(description, group=self._group, group_src=source)
        made: dict[str, Any] = {}
        with suppress(Exception):
            made = self._make(pickle.loads(description[0]))  # noqa: S301 - from a rank of the same job
        ready, _ = channel.exchange(bool(made))
        if not all(ready):
            return False
        with channel.collective(_NAME):
            for tensor in filter(self._is_sent, tree_leaves(made)):
                dist.broadcast(_read_bytes(tensor), group=self._group, group_src=source)
        if is_lacking:
            self._take(made)
        return True

    def _read(self) -> dict[str, Any]:
        """Return what an update changes. The tensors are this rank's own."""
        states = [member.state.get(one) for member in self._optimizers for one in _parameters_of(member)]
        return {
            "parameters": self._parameters,
            "states": states,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def _is_sent(self, value: Any) -> bool:
        """Return whether it is a tensor on the device that trains; a step count may be on the host."""
        return isinstance(value, torch.Tensor) and value.device == self._parameters[0].device

    def _describe(self, value: Any) -> Any:
        return _Layout.of(value) if self._is_sent(value) else value

    def _make(self, described: dict[str, Any]) -> dict[str, Any]:
        """Return what is described, in this rank's own tensors, and in new ones where it has none."""
        own = dict(tree_flatten_with_path(self._read())[0])
        pairs, nest = tree_flatten_with_path(described)
        made: dict[str, Any] = tree_unflatten((self._find(own.get(path), value) for path, value in pairs), nest)
        if [*map(id, made["parameters"])] != [*map(id, self._parameters)]:
            raise ValueError("the parameters are laid out in another way")
        return made

    def _find(self, own: Any, wanted: Any) -> Any:
        if not isinstance(wanted, _Layout):
            return wanted
        if self._is_sent(own) and _Layout.of(own) == wanted:
            return own
        device = self._parameters[0].device
        return torch.empty_strided(wanted.shape, wanted.stride, dtype=wanted.dtype, device=device)

    def _take(self, made: dict[str, Any]) -> None:
        states = iter(made["states"])
        for member in self._optimizers:
            for parameter in _parameters_of(member):
                state = next(states)
                member.state.pop(parameter, None)
                if state is not None:
                    member.state[parameter] = state
        if self._scaler is not None:
            self._scaler.load_state_dict(made["scaler"])


def are_copyable(optimizers: Iterable[Any]) -> bool:
    """Return whether steps of these optimizers change parameters and ``state`` alone: torch's own, without hooks."""
    return all(
        f"{type(one).__module__}.".startswith("torch.optim.")
        and not one._optimizer_step_post_hooks  # noqa: SLF001 - no public name
        and not any(map(has_shards, _parameters_of(one)))
        for one in optimizers
    )


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _read_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory; writing into it is not noted as a write of the tensor, whose graph may still run."""
    return tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
