"""Finds the user's own objects inside the wrappers that frameworks put around them.

Those of Lightning, Lightning Fabric and accelerate are recognised by name, as nothing of theirs is imported; wrappers
of other kinds stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autobatch._formatting import name_type
from autobatch.errors import InvalidArgument

__all__ = [
    "SeveralOptimizers",
    "is_accumulating",
    "is_optimizer",
    "members_of",
    "own_table",
    "state_of",
    "unwrap_for_training",
    "unwrap_members",
    "unwrap_model",
    "unwrap_optimizer",
    "unwrap_scheduler",
    "warn_of_wrapper",
]

_LIGHTNING = {
    ("lightning", "LightningOptimizer"),  # lightning/pytorch/core/optimizer.py; step() counts trainer.global_step
    ("pytorch_lightning", "LightningOptimizer"),
    ("lightning", "_FabricOptimizer"),  # lightning/fabric/wrappers.py; step() calls callbacks
    ("lightning_fabric", "_FabricOptimizer"),
}
_ACCELERATE = ("accelerate", "AcceleratedOptimizer")  # accelerate/optimizer.py; step() does nothing in accumulate()
_ACCELERATE_SCHEDULER = ("accelerate", "AcceleratedScheduler")  # accelerate/scheduler.py


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's own module, whose signature and class name the wrappers hide."""
    while True:
        is_parallel = isinstance(model, (DistributedDataParallel, DataParallel))
        inner = model.module if is_parallel else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class SeveralOptimizers:
    """Several optimizers as one: their groups and their state together, and one step of each.

    Attributes:
        members: They, in the order in which they step.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        """Hold these."""
        self.members = tuple(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all."""
        return [*chain.from_iterable(map(_GROUPS, self.members))]

    @property
    def state(self) -> dict[Any, Any]:
        """That of all, to be read: what is put into it reaches none of them."""
        return {key: value for member in self.members for key, value in state_of(member).items()}

    def step(self, closure: None = None) -> None:
        """Step each once."""
        for member in self.members:
            member.step()


_GROUPS = attrgetter("param_groups")


def own_table(value: Any) -> dict[str, Any]:
    """Return an object's ``__dict__`` without running its code; an empty one where it has none.

    A client that connects when it is first asked, or makes whatever it is asked for, must not notice.
    """
    return object.__getattribute__(value, "__dict__") if _HAS_TABLE[type(value)] else {}


class _HasTable(dict[type, bool]):
    """Whether objects of each type have a ``__dict__`` that no code of their class stands in front of."""

    def __missing__(self, found: type) -> bool:
        table = next((vars(base)["__dict__"] for base in found.__mro__ if "__dict__" in vars(base)), None)
        self[found] = has_table = isinstance(table, GetSetDescriptorType | MemberDescriptorType)
        return has_table


_HAS_TABLE = _HasTable()


def is_optimizer(value: Any) -> bool:
    """Whether it has ``param_groups``, by its class and its own attributes alone: its code may answer anything."""
    return "param_groups" in own_table(value) or any("param_groups" in vars(base) for base in type(value).__mro__)


def state_of(optimizer: Any, depth: int = 3) -> Mapping[Any, Any]:
    """Return what an optimizer holds for its parameters; of a wrapper without ``state``, what those inside hold."""
    state = getattr(optimizer, "state", None)
    if isinstance(state, Mapping):
        return state
    inner = [part for part in _held_by(optimizer) if is_optimizer(part)] if depth else []
    return {key: value for one in inner for key, value in state_of(one, depth - 1).items()}


def _held_by(owner: Any) -> list[Any]:
    """Values of an object's attributes, and the entries of lists among them."""
    values = own_table(owner).values()
    return [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]


def members_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that were given: none, one, or several."""
    if isinstance(optimizer, list | tuple):
        return tuple(optimizer)
    if isinstance(optimizer, SeveralOptimizers):
        return optimizer.members
    return () if optimizer is None else (optimizer,)


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer that does the arithmetic, without what a framework's loop adds to its ``step()``.

    Of several, in a list, one that stands for all.
    """
    if isinstance(optimizer, list | tuple):
        if all(member is None for member in optimizer):
            raise InvalidArgument(f"optimizer={[*optimizer]} holds none: pass optimizers, or None")
        if len(optimizer) > 1:
            return SeveralOptimizers([unwrap_optimizer(member) for member in optimizer])
        (optimizer,) = optimizer
    while _is_lightning(optimizer) or _is_accelerate(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def unwrap_members(optimizer: Any, scaler: Any | None) -> tuple[tuple[Any, ...], Any | None]:
    """What a training step calls ``step()`` of, one after the other, and the gradient scaler that belongs to all."""
    found = []
    for member in members_of(optimizer):
        inner, scaler = unwrap_for_training(member, scaler)
        found.append(inner)
    return tuple(found), scaler


def unwrap_for_training(optimizer: Any, scaler: Any | None) -> tuple[Any, Any | None]:
    """What a training step calls ``step()`` of, and the gradient scaler that belongs to it.

    Lightning's wrappers are stepped, since ``trainer.global_step`` and callbacks count on that. accelerate's is not:
    inside ``accelerator.accumulate()`` its ``step()`` does nothing, and with a scaler it unscales a second time, since
    ``GradScaler`` counts by the identity of the optimizer.
    """
    while _is_accelerate(optimizer):
        own = optimizer.scaler
        if scaler is not None and own is not None and scaler is not own:
            raise InvalidArgument(
                "scaler= is not the one that accelerate's optimizer was prepared with: pass accelerator.scaler, or "
                "leave scaler= out"
            )
        scaler, optimizer = own if scaler is None else scaler, optimizer.optimizer
    if scaler is not None and _is_lightning(optimizer):
        raise InvalidArgument(
            "scaler= cannot be used with Lightning's optimizer, whose step() unscales with a scaler of its own: pass "
            "the torch optimizer inside it, optimizer.optimizer"
        )
    return optimizer, scaler


def unwrap_scheduler(scheduler: Any) -> Any:
    """The scheduler inside accelerate's, whose ``step()`` does nothing inside ``accelerator.accumulate()``."""
    while _name(type(scheduler)) == _ACCELERATE_SCHEDULER:
        scheduler = scheduler.scheduler
    return scheduler


def is_accumulating() -> bool:
    """Whether the step() of accelerate's optimizers does nothing now, as inside ``accelerator.accumulate()``."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and not state._shared_state.get("sync_gradients", True)  # noqa: SLF001 - to make one would begin it


def warn_of_wrapper(optimizer: Any) -> tuple[str, ...]:
    """One sentence where trials step an optimizer that wraps another one in a way that is not known here."""
    return tuple(chain.from_iterable(map(_warn_of_wrapper, members_of(unwrap_optimizer(optimizer)))))


def _warn_of_wrapper(optimizer: Any) -> tuple[str, ...]:
    own = own_table(optimizer)
    inner = next((part for part in _held_by(optimizer) if isinstance(part, torch.optim.Optimizer)), None)
    # A torch optimizer by itself, as SAM and Lookahead are, changes only what is its own.
    if inner is None or (isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in own):
        return ()
    warning = (
        f"optimizer= is {name_type(optimizer)} around {type(inner).__name__}, and its own step() ran in the "
        f"trials: what that changes outside of tensors and of its own attributes, such as a trainer's count of steps, "
        f"was not put back; pass the {type(inner).__name__} itself if that matters"
    )
    return (warning,)


def _is_lightning(optimizer: Any) -> bool:
    # Both derive a class of their own for each wrapped one, so the name is that of a base.
    return any(_name(base) in _LIGHTNING for base in type(optimizer).__mro__)


def _is_accelerate(optimizer: Any) -> bool:
    # Subclasses are the wrappers for DeepSpeed and Megatron-LM, whose engines step by themselves.
    return _name(type(optimizer)) == _ACCELERATE


def _name(kind: type) -> tuple[str, str]:
    return str(kind.__module__).partition(".")[0], kind.__name__  # it may be anything, as a property
