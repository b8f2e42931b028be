"""Describes the ranks over which a model is parallel, and lets a block of code succeed or fail on all of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autobatch._user_errors import contextmanager
from autobatch.distributed.agreement import Agreement
from autobatch.distributed.channel import open_channel
from autobatch.distributed.overlapped_sum import KnownGradients
from autobatch.distributed.own_time import OwnTime
from autobatch.distributed.reduction import Reduction
from autobatch.distributed.update_copy import UpdateCopy, are_copyable
from autobatch.errors import InvalidArgument
from autobatch.torch_internals.storages import has_shards, is_uninitialized

_LOCAL_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # in names of parameters, perhaps on some ranks only
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_RATES = 16
_RATES_DIFFER_BY = 1e-9
_ELEMENTS_AT_ONCE = 2**20  # of a digest, which needs 8 bytes more for each


def world_size() -> int:
    """Return the number of ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Ranks:
    """The ranks over which a model is parallel, and this one among them.

    Attributes:
        model: The user's model, wrapped.
        number: Number that tells one Runner from another, the same on all ranks.
        by_term: Whether ``weigh`` counts each term by itself, the same on all ranks; ``None`` until a rank has samples.
        known: Gradients of the last step that was summed after its backward pass, the same on all ranks.
        update: The last update, if another rank can take it.
        have_varied: Whether a step had others than were expected, so that sums begin after the backward pass.
    """

    by_term: bool | None = None
    known: KnownGradients | None = None
    have_varied: bool = False
    update: UpdateCopy | None = None

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Collective the first time that a process group is used."""
        self.model, self.channel = model, open_channel(group)
        self.rank, self.size, self.number = self.channel.rank, self.channel.size, self.channel.exchanges
        self.reduction = Reduction(group, self.channel)
        self.own_time = OwnTime(next(model.parameters()).device)
        self._group = group

    def bind(self, optimizers: Sequence[Any], scaler: Any | None, *, is_weighed: bool) -> None:
        """Let a rank that runs out of memory in these optimizers' step take the update from another one."""
        self.by_term = None if is_weighed else False
        if optimizers and are_copyable(optimizers):
            self.update = self.channel.updates[self.number] = UpdateCopy(self._group, optimizers, scaler)


@contextmanager
def all_or_none(ranks: Ranks | None, call: str) -> Iterator[list[Any]]:
    """Block that fails on every rank if it fails on one; ``call`` names it in messages: ``"fit(), the search"``.

    It yields a list. Values that a rank appends are sent to the others; at the end the list holds those of all ranks.
    """
    gathered: list[Any] = []
    if ranks is None:
        yield gathered
        return
    name, _, point = call.partition(", ")
    with Agreement(ranks.channel, name) as agreement:
        yield gathered
    messages = agreement.gather(point, values=gathered)
    gathered[:] = [value for message in messages for value in message["values"]]


def refuse_differences(gathered: Sequence[Mapping[str, Any]], ranks: Ranks | None) -> None:
    """Refuse named values, by rank, that must be the same on every rank; ``None``: this process trains alone."""
    if ranks is None:
        return
    for name in gathered[0]:
        values = {rank: named[name] for rank, named in enumerate(gathered)}
        if any(value != values[0] for value in values.values()):
            listed = ranks.channel.list_by_rank(values)
            ranks.channel.is_over = True  # every rank raises this
            raise InvalidArgument(f"{name} differs between the ranks ({listed}): pass the same on each")


def describe_parameters(model: nn.Module, parameters: Sequence[torch.Tensor]) -> str:
    """Return a text that differs if two ranks train other parameters, or the same ones in another order."""
    names = [name for name, _ in model.named_parameters()]  # layers of one shape may be in another order
    for wrapper in _LOCAL_WRAPPERS:
        names = [name.replace(f"{wrapper}.", "") for name in names]
    facts = [(str(p.dtype), () if is_uninitialized(p) else tuple(p.shape), p.requires_grad) for p in parameters]
    return f"{len(facts)} parameters {hashlib.sha256(repr((names, facts)).encode()).hexdigest()[:8]}"


@torch.no_grad()
def digest_values(tensors: Sequence[torch.Tensor | None]) -> str:
    """Return a short text that differs if any bit of the tensors does; empty without tensors. Waits for the device.

    Each rank has another part of a sharded tensor, so only its presence counts.
    """
    if all(tensor is None for tensor in tensors):
        return ""
    sums = [None if tensor is None else _sum_bits(tensor) for tensor in tensors]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def _sum_bits(tensor: torch.Tensor) -> int:
    """Sum the elements' bits as integers, each times its position.

    A sum of floats would depend on the order in which a device adds them.
    """
    if tensor.is_meta or is_uninitialized(tensor) or has_shards(tensor):
        return 0
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.view(_INTEGERS[tensor.element_size()]).reshape(-1)
    total = begin = 0
    for part in bits.split(_ELEMENTS_AT_ONCE):
        positions = torch.arange(begin + 1, begin + len(part) + 1, device=bits.device)
        total, begin = total + int(positions.mul_(part).sum()), begin + len(part)
    return total % 2**64  # int64 may not hold the sum of the parts


def read_rates(optimizer: Any | None) -> list[float]:
    """Return a few different learning rates; without tensors, as reading them would wait for a device."""
    rates = [group.get("lr") for group in optimizer.param_groups] if optimizer is not None else []
    return list(dict.fromkeys(float(rate) for rate in rates if isinstance(rate, int | float)))[:_MOST_RATES]


def are_close(rates: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether rates are equal up to the last bits, which may differ between processors."""
    pairs = zip(rates, others, strict=False)
    return len(rates) == len(others) and all(math.isclose(a, b, rel_tol=_RATES_DIFFER_BY) for a, b in pairs)
