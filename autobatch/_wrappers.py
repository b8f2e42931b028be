"""Finds the user's own objects inside the wrappers of Lightning, Lightning Fabric and accelerate.

It knows these wrappers by name, so that it need not import the frameworks. Other wrappers are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autobatch._formatting import name_type
from autobatch.errors import InvalidArgument

_LIGHTNING = {
    ("lightning", "LightningOptimizer"),  # lightning/pytorch/core/optimizer.py; step() counts trainer.global_step
    ("pytorch_lightning", "LightningOptimizer"),
    ("lightning", "_FabricOptimizer"),  # lightning/fabric/wrappers.py; step() calls callbacks
    ("lightning_fabric", "_FabricOptimizer"),
}
_ACCELERATE = ("accelerate", "AcceleratedOptimizer")  # accelerate/optimizer.py; step() does nothing in accumulate()
_ACCELERATE_SCHEDULER = ("accelerate", "AcceleratedScheduler")  # accelerate/scheduler.py


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own module, whose signature and class name the wrappers hide."""
    while True:
        is_parallel = isinstance(model, (DistributedDataParallel, DataParallel))
        inner = model.module if is_parallel else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class SeveralOptimizers:
    """Several optimizers as one: their groups and their state together, and one step of each.

    Attributes:
        members: The optimizers, in the order in which they step.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        """Hold the optimizers."""
        self.members = tuple(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """A copy of the state of all optimizers, to be read."""
        return {key: value for member in self.members for key, value in state_of(member).items()}

    def step(self, closure: None = None) -> None:
        """Step each optimizer once."""
        for member in self.members:
            member.step()


def own_table(value: Any) -> dict[str, Any]:
    """Return an object's ``__dict__`` without running its code; an empty one if it has none.

    A client that connects at the first access, or a mock that makes any attribute, must not be touched.
    """
    kind: Any = type(value)  # mypy: a type is not hashable
    return object.__getattribute__(value, "__dict__") if _has_table(kind) else {}


@cache
def _has_table(kind: type) -> bool:
    """Return whether objects of a type have a plain ``__dict__``, not one that code of their class computes."""
    table = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), None)
    return isinstance(table, GetSetDescriptorType | MemberDescriptorType)


def own_attributes(value: Any) -> list[Any]:
    """Return the values of an object's own attributes, in slots or not, without running its code."""
    values = [*own_table(value).values()]
    for slot in _slots_of(type(value)):  # type: ignore[arg-type]  # mypy: a type is not hashable
        try:
            values.append(slot.__get__(value))
        except AttributeError:  # nothing was assigned to it
            continue
    return values


@cache
def _slots_of(kind: type) -> list[MemberDescriptorType]:
    defined = [vars(base).values() for base in kind.__mro__ if "__slots__" in vars(base)]
    return [member for members in defined for member in members if isinstance(member, MemberDescriptorType)]


def is_optimizer(value: Any) -> bool:
    """Return whether the object or its class has ``param_groups``, without running its code."""
    return "param_groups" in own_table(value) or any("param_groups" in vars(base) for base in type(value).__mro__)


def state_of(optimizer: Any, depth: int = 3) -> Mapping[Any, Any]:
    """Return the state of an optimizer, or of the optimizers inside a wrapper without ``state``."""
    state = getattr(optimizer, "state", None)
    if isinstance(state, Mapping):
        return state
    inner = [part for part in _held_by(optimizer) if is_optimizer(part)] if depth else []
    return {key: value for one in inner for key, value in state_of(one, depth - 1).items()}


def _held_by(owner: Any) -> list[Any]:
    """Return the values of an object's attributes, and the entries of lists among them."""
    values = own_table(owner).values()
    return [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]


def members_of(optimizer: Any) -> tuple[Any, ...]:
    """Return what was passed as ``optimizer=`` or ``scheduler=``: none, one, or several."""
    if isinstance(optimizer, list | tuple):
        return tuple(optimizer)
    if isinstance(optimizer, SeveralOptimizers):
        return optimizer.members
    return () if optimizer is None else (optimizer,)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that does the arithmetic, without the wrapper of a framework; several become one object."""
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
    """Return the optimizers that a training step has to step, and their gradient scaler."""
    found = []
    for member in members_of(optimizer):
        inner, scaler = unwrap_for_training(member, scaler)
        found.append(inner)
    return tuple(found), scaler


def unwrap_for_training(optimizer: Any, scaler: Any | None) -> tuple[Any, Any | None]:
    """Return the optimizer that a training step has to step, and its gradient scaler.

    Lightning's wrapper is stepped itself, since ``trainer.global_step`` and callbacks depend on that. accelerate's is
    not: its ``step()`` does nothing inside ``accelerator.accumulate()``. With a scaler it unscales a second time, since
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
    """Return the scheduler inside accelerate's, whose ``step()`` does nothing inside ``accelerator.accumulate()``."""
    while _name(type(scheduler)) == _ACCELERATE_SCHEDULER:
        scheduler = scheduler.scheduler
    return scheduler


def is_accumulating() -> bool:
    """Return whether ``accelerator.accumulate()`` turns the ``step()`` of accelerate's optimizers off now."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and not state._shared_state.get("sync_gradients", True)  # noqa: SLF001 - to make one would begin it


def warn_of_wrapper(optimizer: Any) -> tuple[str, ...]:
    """Return a warning if trials step an unknown wrapper around another optimizer."""
    members = members_of(unwrap_optimizer(optimizer))
    return tuple(warning for member in members for warning in _warn_of_wrapper(member))


def _warn_of_wrapper(optimizer: Any) -> tuple[str, ...]:
    own = own_table(optimizer)
    inner = next((part for part in _held_by(optimizer) if isinstance(part, torch.optim.Optimizer)), None)
    # A torch optimizer, such as SAM and Lookahead, changes only its own attributes.
    if inner is None or (isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in own):
        return ()
    warning = (
        f"optimizer= is {name_type(optimizer)} around {type(inner).__name__}, and its own step() ran in the "
        f"trials: what that changes outside of tensors and of its own attributes, such as a trainer's count of steps, "
        f"was not put back; pass the {type(inner).__name__} itself if that matters"
    )
    return (warning,)


def _is_lightning(optimizer: Any) -> bool:
    # Both derive a new class for each wrapped optimizer, so a base has the name.
    return any(_name(base) in _LIGHTNING for base in type(optimizer).__mro__)


def _is_accelerate(optimizer: Any) -> bool:
    # Subclasses are the wrappers for DeepSpeed and Megatron-LM, whose engines step by themselves.
    return _name(type(optimizer)) == _ACCELERATE


def _name(kind: type) -> tuple[str, str]:
    return str(kind.__module__).partition(".")[0], kind.__name__  # __module__ may be any object, such as a property
