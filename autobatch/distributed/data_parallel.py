"""Keeps ``DistributedDataParallel`` from communicating while the Runner trains, and sends its buffers instead."""

# ruff: noqa: SLF001 - torch has no public name for what a DistributedDataParallel was made with

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from autobatch._user_errors import contextmanager
from autobatch._wrappers import members_of
from autobatch.distributed.channel import Channel
from autobatch.distributed.sharding import is_sharded
from autobatch.errors import InvalidArgument

__all__ = [
    "SharedBuffers",
    "broadcast_buffers_of",
    "module_of",
    "refuse_sharded_optimizer",
    "refuse_unsupported",
    "undisturbed",
]

_CALLED = (
    "step() called the DistributedDataParallel model itself, which would talk to the other ranks in the middle of a "
    "micro-batch: call the model that step() is given"
)

_JOINED = (
    "join() was called on the model, where ranks without samples answer sums that DistributedDataParallel makes, and "
    "the Runner makes its own: leave it out, and call runner.step(None) on a rank that has no samples left"
)


def module_of(model: nn.Module) -> nn.Module:
    """The module inside: its forward pass broadcasts nothing, and its backward pass sums nothing."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse what talks to other ranks inside a forward or backward pass, where a rank may retry alone.

    Args:
        model: As the user gave it: in ``DistributedDataParallel``, or not wrapped.

    Raises:
        InvalidArgument: One line that says what to use instead.
    """
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise InvalidArgument(
            "torch.compile(DistributedDataParallel(model)) is not supported: pass "
            "DistributedDataParallel(torch.compile(model))"
        )
    inner = module_of(model)
    for name, module in inner.named_modules():
        _refuse_module(name, module)
    for name, parameter in () if is_sharded(inner) else inner.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise InvalidArgument(
                f"the parameter {name} is a DTensor, and fully_shard was not called on the model (tensor parallelism), "
                f"which is not supported: use fully_shard(model) or DistributedDataParallel(model)"
            )
    if isinstance(model, DistributedDataParallel):
        _refuse_options(model)


def _refuse_module(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.SyncBatchNorm):
        raise InvalidArgument(
            f"the layer {name or 'model'} is SyncBatchNorm, which talks to the other ranks inside the forward pass, so "
            f"that a rank that retries alone would leave them waiting: use GroupNorm, or BatchNorm of each micro-batch"
        )
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        raise InvalidArgument(
            f"the layer {name or 'model'} is {type(module).__name__} inside the model: wrap the whole model once, in "
            f"DistributedDataParallel"
        )
    if type(module).__name__ == "FullyShardedDataParallel":
        raise InvalidArgument(
            "FullyShardedDataParallel is not supported: use fully_shard(model) or DistributedDataParallel(model)"
        )


def _refuse_options(model: DistributedDataParallel) -> None:
    hook = getattr(model, "_comm_hooks", None) or model._get_ddp_logging_data().get("comm_hook")
    if hook:
        raise InvalidArgument(
            "the model has a DDP communication hook, which would not be called, as gradients are summed after the last "
            "micro-batch: build DistributedDataParallel without register_comm_hook()"
        )
    if set(model.parameters_to_ignore) & {name for name, p in model.module.named_parameters() if p.requires_grad}:
        raise InvalidArgument(
            "the model ignores trained parameters (DDP's parameters_to_ignore), which would then differ between the "
            "ranks: leave them out of it, or freeze them"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise InvalidArgument(
            "DistributedDataParallel(mixed_precision=...) is not supported: use torch.autocast inside step()"
        )
    if getattr(model, "_delay_all_reduce_params", None):
        raise InvalidArgument(
            "DistributedDataParallel(delay_all_reduce_named_params=...) is not supported: leave it out"
        )
    if getattr(model, "_use_python_reducer", False):
        raise InvalidArgument(
            'torch._dynamo.config.optimize_ddp = "python_reducer" is not supported: leave it at its default'
        )


def refuse_sharded_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that talks to the other ranks in its step, which each rank tries alone.

    Raises:
        InvalidArgument: One line that says what to use instead.
    """
    for member in members_of(optimizer):
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(member).__mro__):
            raise InvalidArgument(
                "ZeroRedundancyOptimizer talks to the other ranks in its step, and each rank's trials are its own: use "
                "fully_shard(model), or plan with the optimizer that it wraps and pass this one to Runner()"
            )


def broadcast_buffers_of(model: DistributedDataParallel) -> list[torch.Tensor]:
    """The buffers that are rank 0's on every rank; none with ``broadcast_buffers=False``."""
    if not model.broadcast_buffers:
        return []
    ignored = model.parameters_to_ignore
    return [buffer for name, buffer in model.module.named_buffers() if name not in ignored]


@contextmanager
def undisturbed(model: DistributedDataParallel) -> Iterator[None]:
    """A block in which it neither sums nor broadcasts anything, and a call of it is an error.

    Raises:
        InvalidArgument: From the call; or ``join()`` was called, whose end torch does not note.
    """
    if model._join_config.enable:
        raise InvalidArgument(_JOINED)
    # A forward pass without a backward pass, such as an evaluation, leaves the reducer waiting: its hooks would begin
    # to sum inside the first micro-batch. Only this resets it (torch/csrc/distributed/c10d/reducer.cpp).
    _reset(model)
    handle = model.register_forward_pre_hook(_refuse_call)
    try:
        with model.no_sync():
            yield
    finally:
        handle.remove()
        _reset(model)  # find_unused_parameters remembers what was used while nothing was summed


def _reset(model: DistributedDataParallel) -> None:
    model._update_process_group(model.process_group)


def _refuse_call(*_: Any) -> None:
    raise InvalidArgument(_CALLED)


class SharedBuffers:
    """Some buffers of the first rank, which all others take: a copy of them in one tensor for each dtype.

    Attributes:
        description: What differs where two ranks have other buffers.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        """Make the copies: here memory may end, and after this nothing more is needed."""
        alike: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for buffer in buffers:
            alike[buffer.dtype, buffer.device].append(buffer.detach())
        self._groups = [(group, torch.cat([buffer.reshape(-1) for buffer in group])) for group in alike.values()]
        facts = [(str(buffer.dtype), tuple(buffer.shape)) for buffer in buffers]
        self.description = hashlib.sha256(repr(facts).encode()).hexdigest()[:16] if facts else ""

    @torch.no_grad()
    def take_first(self, group: dist.ProcessGroup | None, channel: Channel) -> None:
        """Make the buffers those of the group's first rank.

        Raises:
            RankLost: A rank is gone.
        """
        with _disable_current_modes():  # a budget that raised in here would leave the others waiting
            for _, numbers in self._groups:
                try:
                    dist.broadcast(numbers.view(torch.uint8), group=group, group_src=0)
                except RuntimeError as error:
                    reason = f"sending the buffers broke off: {error}".strip().partition("\n")[0]
                    raise channel.lose(reason) from error
        for buffers, numbers in self._groups:
            for buffer, values in zip(buffers, numbers.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))
