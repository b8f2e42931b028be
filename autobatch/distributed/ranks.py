"""Finds the ranks over which a model is parallel, and makes calls such as ``fit`` succeed or fail on all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autobatch._user_errors import contextmanager
from autobatch.distributed.channel import open_channel
from autobatch.distributed.data_parallel import module_of, refuse_unsupported
from autobatch.distributed.lockstep import Lockstep
from autobatch.distributed.own_time import OwnTime
from autobatch.distributed.reduction import Reduction
from autobatch.distributed.sharding import group_of, is_sharded
from autobatch.distributed.sharding_limits import refuse_unsupported_sharding
from autobatch.distributed.step_agreement import name_error
from autobatch.errors import AutobatchError, InvalidArgument, RankFailed, RankLost
from autobatch.undo.interrupts import deferred_interrupts
from autobatch.undo.tensor_header import is_uninitialized

__all__ = [
    "Ranks",
    "all_or_none",
    "describe_parameters",
    "find_ranks",
    "refuse_differences",
    "several_blocks",
    "take_module",
    "world_size",
]

_LOCAL_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""In names of parameters: one rank may compile the model or checkpoint a part of it, where others do not."""


def world_size() -> int:
    """Ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Ranks:
    """This rank among the others.

    Attributes:
        model: Wrapped, as the user gave it.
        reduction: Where their gradients are summed.
        channel: Where they talk.
        lockstep: Of a model whose parameters are sharded: its passes, which all ranks end together. ``None`` of one in
            ``DistributedDataParallel``, whose passes talk to nobody.
        own_time: How long this one works in a step.
        number: Of the last block that all ranks have done; by it they know whether they run the same Runner.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Collective the first time that a process group is used."""
        self.model = model
        self.channel = open_channel(group)
        self.reduction = Reduction(group, self.channel)
        self.lockstep = Lockstep(model, self.channel) if is_sharded(model) else None
        self.own_time = OwnTime(next(model.parameters()).device)
        self.number, self._is_over = 0, False

    @property
    def wrapper(self) -> DistributedDataParallel:
        """The model, where it is not sharded."""
        assert isinstance(self.model, DistributedDataParallel)  # noqa: S101 - narrows for mypy
        return self.model

    @property
    def rank(self) -> int:
        """This process's, within the group of the model."""
        return self.channel.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.channel.size

    @contextmanager
    def several_blocks(self, call: str) -> Iterator[None]:
        """Blocks that all ranks do or none: what fails between two of them, the others hear in the next one.

        Args:
            call: What is done, as messages name it.
        """
        self._is_over = False
        self.channel.begin_block()
        try:
            yield
        except BaseException as error:
            if not self._is_over:
                self._report_failure(call, error)
            raise

    @contextmanager
    def all_or_none(self, call: str, *, is_last: bool = False) -> Iterator[list[Any]]:
        """A block that fails on every rank where it fails on one.

        What is appended to the list that this gives is sent to the others; at the end the list holds what each said.

        Args:
            call: What is done, as messages name it.
            is_last: Of ``several_blocks``.

        Raises:
            RankFailed: The block has failed on another rank, or another rank does something else.
        """
        said: list[Any] = []
        self.channel.begin_block()
        try:
            yield said
        except BaseException as error:
            self._report_failure(call, error)
            raise
        # An interrupt after the exchange would leave this rank where the others are not.
        with deferred_interrupts():
            self._agree(call, said)
            self._is_over = is_last

    def _agree(self, call: str, said: list[Any]) -> None:
        heard = self.channel.exchange({"call": call, "said": said})
        failed = {rank: message["error"] for rank, message in enumerate(heard) if "error" in message}
        if failed:
            listed = "; ".join(f"rank {self.channel.members[rank]}: {reason}" for rank, reason in failed.items())
            raise self.refuse(RankFailed(f"{call.partition(',')[0]} could not be done on each rank: {listed}"))
        calls = [message.get("call") or message["place"] for message in heard]
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in zip(self.channel.members, calls, strict=True))
            raise self.refuse(
                RankFailed(
                    f"the ranks are not at the same place ({listed}): make the same calls in the same order on each"
                )
            )
        said[:] = [one for message in heard for one in message["said"]]
        self.channel.agreed += 1
        self.number = self.channel.agreed

    def refuse(self, error: AutobatchError) -> AutobatchError:
        """An error that every rank raises, since all have heard the same."""
        self.channel.note_reported(error)
        return error

    def _report_failure(self, call: str, error: BaseException) -> None:
        """Report it to the others, unless they have heard of it."""
        channel = self.channel
        if channel.was_reported(error):
            return
        with suppress(RankLost):  # the error that is on its way says more
            channel.exchange({"call": call, "error": name_error(error)})
        channel.note_reported(error)


def find_ranks(model: nn.Module) -> Ranks | None:
    """The ranks over which the model is parallel; ``None`` where it trains on one.

    Args:
        model: Wrapped, as the user gave it.

    Raises:
        InvalidArgument: Several ranks are running, and nobody would sum this model's gradients.
    """
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
        return Ranks(model, group) if dist.get_world_size(group) > 1 else None
    if is_sharded(model):  # on one rank, too: a pass that broke off has to be cleared
        refuse_unsupported_sharding(model)
        return Ranks(model, group_of(model))
    size = world_size()
    if size > 1:
        refuse_unsupported(model)
        raise InvalidArgument(
            f"{size} ranks are running and the model is {type(model).__name__}, whose gradients nobody sums over them: "
            f"pass torch.nn.parallel.DistributedDataParallel(model) or fully_shard(model), or plan on one rank and use "
            f"plan.settings()"
        )
    return None


def take_module(model: nn.Module, ranks: Ranks | None) -> nn.Module:
    """The module inside ``DistributedDataParallel``, whose passes talk to no other rank.

    Also where it is parallel over one rank: with ``static_graph=True`` the wrapper cannot run two forward passes in a
    row, and with ``gradient_as_bucket_view=True`` it moves gradients.

    Raises:
        InvalidArgument: Something in it would talk to the others.
    """
    if ranks is not None:
        refuse_unsupported(model)
    return module_of(model)


def all_or_none(ranks: Ranks | None, call: str, *, is_last: bool = False) -> AbstractContextManager[list[Any]]:
    """``Ranks.all_or_none``, or a block of this process alone."""
    return nullcontext([]) if ranks is None else ranks.all_or_none(call, is_last=is_last)


def several_blocks(ranks: Ranks | None, call: str) -> AbstractContextManager[None]:
    """``Ranks.several_blocks``, or nothing in a process alone."""
    return nullcontext() if ranks is None else ranks.several_blocks(call)


def refuse_differences(said: Sequence[Mapping[str, Any]], ranks: Ranks | None) -> None:
    """Refuse what must be the same on each rank and is not.

    Args:
        said: By rank; each names the same things. Nothing where this process is alone.
        ranks: Who said it.

    Raises:
        InvalidArgument: On every rank, since all have heard the same.
    """
    for name in said[0] if said else ():
        values = [one[name] for one in said]
        if any(value != values[0] for value in values):
            members = range(len(values)) if ranks is None else ranks.channel.members
            listed = "; ".join(f"rank {rank}: {value}" for rank, value in zip(members, values, strict=True))
            error = InvalidArgument(f"{name} differs between the ranks ({listed}): pass the same on each")
            raise error if ranks is None else ranks.refuse(error)


def describe_parameters(model: nn.Module, parameters: Sequence[torch.Tensor]) -> str:
    """What differs where two ranks train other parameters, or the same in another order.

    Also those of one shape, as of layers that were made in the order of a set: by their names.
    """
    names = [name for name, _ in model.named_parameters()]
    for wrapper in _LOCAL_WRAPPERS:
        names = [name.replace(f"{wrapper}.", "") for name in names]
    facts = [(str(p.dtype), () if is_uninitialized(p) else tuple(p.shape), p.requires_grad) for p in parameters]
    return f"{len(facts)} parameters {hashlib.sha256(repr((names, facts)).encode()).hexdigest()[:8]}"
