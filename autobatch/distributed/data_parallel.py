"""Keeps ``DistributedDataParallel`` from communicating while the Runner trains, and sends its buffers instead."""

# ruff: noqa: SLF001 - torch has no public name for the options of a DistributedDataParallel

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autobatch._user_errors import contextmanager
from autobatch._wrappers import members_of
from autobatch.distributed.channel import Channel
from autobatch.errors import InvalidArgument
from autobatch.torch_internals.storages import has_shards


def module_of(model: nn.Module) -> nn.Module:
    """Return the module inside ``DistributedDataParallel``; its passes do not communicate."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse a model that communicates inside a forward or backward pass, which one rank may retry alone."""
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise InvalidArgument(
            "torch.compile(DistributedDataParallel(model)) is not supported: pass "
            "DistributedDataParallel(torch.compile(model))"
        )
    for name, module in module_of(model).named_modules():
        _refuse_module(name, module)
    if isinstance(model, DistributedDataParallel):
        _refuse_options(model)


def refuse_tensor_parallelism(model: nn.Module) -> None:
    """Refuse a model without ``fully_shard`` whose parameters are in parts on several ranks."""
    for name, parameter in model.named_parameters():
        if has_shards(parameter):
            raise InvalidArgument(
                f"the parameter {name} is a DTensor in a model without fully_shard (tensor parallelism), which is not "
                f"supported: use fully_shard(model) or DistributedDataParallel(model)"
            )


def _refuse_module(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.SyncBatchNorm):
        raise InvalidArgument(
            f"the layer {name or 'model'} is SyncBatchNorm: it communicates inside the forward pass, so a rank that "
            f"retries alone would leave the others waiting; use GroupNorm, or BatchNorm of each micro-batch"
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
    if getattr(model, "_comm_hooks", None) or model._get_ddp_logging_data().get("comm_hook"):
        raise InvalidArgument(
            "the model has a DDP communication hook, but autobatch sums gradients after the last micro-batch and "
            "would not call it: build DistributedDataParallel without register_comm_hook()"
        )
    if set(model.parameters_to_ignore) & {name for name, p in model.module.named_parameters() if p.requires_grad}:
        raise InvalidArgument(
            "the model ignores trained parameters (DDP's parameters_to_ignore), so they would differ between the "
            "ranks: do not ignore them, or freeze them"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise InvalidArgument(
            "DistributedDataParallel(mixed_precision=...) is not supported: use torch.autocast inside the step"
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
    """Refuse an optimizer that communicates in its step, which each rank tries alone."""
    for member in members_of(optimizer):
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(member).__mro__):
            raise InvalidArgument(
                "ZeroRedundancyOptimizer communicates in its step, but each rank runs its trials alone: use "
                "another optimizer or fully_shard(model), or pass fit() the optimizer inside it and Runner() this one"
            )


def broadcast_buffers_of(model: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the buffers that rank 0 sends to every rank; none with ``broadcast_buffers=False``."""
    if not model.broadcast_buffers:
        return []
    return [buffer for name, buffer in model.module.named_buffers() if name not in model.parameters_to_ignore]


@contextmanager
def undisturbed(model: DistributedDataParallel) -> Iterator[None]:
    """Block in which the wrapper neither sums nor broadcasts, and a call of it is an error."""
    if model._join_config.enable:
        raise InvalidArgument(
            "join() was called on the model, but autobatch sums gradients without DistributedDataParallel: leave "
            "join() out, and call runner.step(None) on a rank without samples"
        )
    # After a forward pass without a backward pass, such as an evaluation, the reducer's hooks would begin to sum in the
    # first micro-batch. Only this call resets it (torch/csrc/distributed/c10d/reducer.cpp).
    model._update_process_group(model.process_group)
    handle = model.register_forward_pre_hook(_refuse_call)
    try:
        with model.no_sync():
            yield
    finally:
        handle.remove()
        model._update_process_group(model.process_group)  # drops what find_unused_parameters noted meanwhile


def _refuse_call(*_: Any) -> None:
    raise InvalidArgument(
        "the step called the DistributedDataParallel model, which would communicate in the middle of a micro-batch: "
        "call the model that it gets as its argument"
    )


class SharedBuffers:
    """Flat copies of some buffers, one tensor for each dtype, in which rank 0 sends them to all ranks.

    Attributes:
        description: Text that differs if two ranks have other buffers.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        """Make the copies; nothing after this needs more memory."""
        groups: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for buffer in buffers:
            groups[buffer.dtype, buffer.device].append(buffer.detach())
        self._groups = [(group, torch.cat([buffer.reshape(-1) for buffer in group])) for group in groups.values()]
        facts = [(str(buffer.dtype), tuple(buffer.shape)) for buffer in buffers]
        self.description = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def send(self, group: dist.ProcessGroup | None, channel: Channel) -> None:
        """Make the copies those of the group's first rank."""
        with channel.collective("the broadcast of buffers"):
            for _, numbers in self._groups:
                dist.broadcast(numbers.view(torch.uint8), group=group, group_src=0)

    @torch.no_grad()
    def write(self) -> None:
        """Make the buffers what the copies are."""
        for buffers, numbers in self._groups:
            for buffer, values in zip(buffers, numbers.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))
