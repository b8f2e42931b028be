"""Substitutes fake tensors for those of a model and its optimizer, and follows which module is running.

Each module's ``__dict__`` is exchanged and put back, so a step that closes over the model meets fake tensors too, and
whatever it writes into a module is gone afterwards. The optimizer is copied without its state.
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

import sys
import threading
import types
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autobatch._formatting import name_type
from autobatch._wrappers import SeveralOptimizers, is_optimizer, own_attributes, own_table
from autobatch.errors import InvalidArgument
from autobatch.prediction.timeline import Kind
from autobatch.prediction.tracing.fake_device import DEVICE
from autobatch.prediction.tracing.recording import Recorder, make_fake
from autobatch.step.reachable import parts_of, walk

_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, deque)
_LEADS = (nn.Module, partial, types.FunctionType, types.MethodType, list, tuple, dict)
_MOST_REACHED = 10_000  # values between a step and its modules


class FakeModel:
    """One fake tensor for each real one; needs an active ``FakeMode`` and its recorder.

    This rank holds a part of the ``sharded`` parameters, as ``fully_shard`` divides them.
    """

    def __init__(self, recorder: Recorder, sharded: Sequence[nn.Parameter] = (), world_size: int = 1) -> None:
        self._recorder = recorder
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self._sharded, self._world_size = set(map(id, sharded)), world_size
        self.shards: dict[torch.Tensor, torch.Tensor] = {}  # this rank's parts, by the whole fake parameter

    def of(self, tensor: torch.Tensor, kind: Kind = "buffer", module: str = "") -> torch.Tensor:
        known = self._pairs.get(id(tensor))
        if known is None:
            is_sharded = id(tensor) in self._sharded
            with self._recorder.unrecorded() if is_sharded else nullcontext():
                known = self._pairs[id(tensor)] = (tensor, _imitate(tensor))
            self._recorder.label(self._shard(known[1]) if is_sharded else known[1], kind, module)
        fake: torch.Tensor = known[1]
        return fake

    def _shard(self, whole: torch.Tensor) -> torch.Tensor:
        # Each rank has rows as ``torch.chunk`` divides them, the last ones padded.
        shape = (-(-whole.shape[0] // self._world_size), *whole.shape[1:]) if whole.dim() else ()
        part = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=DEVICE))
        self.shards[whole] = part.requires_grad_(whole.requires_grad)
        return part

    def copy(self, value: Any, *, reads_scalars: bool = False) -> Any:
        """Copy containers with fake tensors; modules and other objects stay.

        With ``reads_scalars`` a scalar on the host, such as a learning rate, stays readable.
        """
        if isinstance(value, torch.Tensor):
            if reads_scalars and id(value) not in self._pairs and value.dim() == 0 and value.device.type == "cpu":
                with torch._C._DisableTorchDispatch():
                    number = value.item()
                return torch.tensor(number, dtype=value.dtype)
            return self.of(value)
        if type(value) not in _CONTAINERS:
            return value
        known = self._pairs.get(id(value))
        return self._copy_items(value, reads_scalars=reads_scalars) if known is None else known[1]

    @contextmanager
    def substitute(self, modules: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        """Let these modules hold fake tensors within this block; afterwards they have their own dicts again."""
        for name, module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.of(parameter, "parameter", name)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.of(buffer, "buffer", name)
        contents = [(module, vars(module), self._copy_items(vars(module))) for _, module in modules]
        try:
            for module, _, fake in contents:
                object.__setattr__(module, "__dict__", fake)
            yield
        finally:
            for module, original, _ in contents:
                object.__setattr__(module, "__dict__", original)

    def optimizer(self, optimizer: Any) -> Any:
        """Make an optimizer of the same class and options on fake tensors, without state and step hooks."""
        if isinstance(optimizer, SeveralOptimizers):
            return SeveralOptimizers([self.optimizer(member) for member in optimizer.members])
        if (known := self._pairs.get(id(optimizer))) is not None:
            return known[1]  # it holds itself, or two others hold it
        fake = object.__new__(type(optimizer))
        self._pairs[id(optimizer)] = optimizer, fake
        for name, value in own_table(optimizer).items():
            if name == "state" or (hasattr(type(optimizer), name) and callable(value)):
                continue  # a scheduler has put its own step() there, which would step the original
            is_inner = is_optimizer(value) and bool(own_table(value))
            fake.__dict__[name] = self.optimizer(value) if is_inner else self.copy(value, reads_scalars=True)
        if "state" in own_table(optimizer):
            fake.__dict__["state"] = defaultdict(dict)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if name in vars(fake):
                fake.__dict__[name] = OrderedDict()
        _choose_foreach(fake)
        return fake

    def _copy_items(self, value: Any, *, reads_scalars: bool = False) -> Any:
        def copy(item: Any) -> Any:
            return self.copy(item, reads_scalars=reads_scalars)

        if isinstance(value, tuple):
            copied: Any = tuple(map(copy, value))
            self._pairs[id(value)] = value, copied
            return copied
        if isinstance(value, deque):
            copied = deque(maxlen=value.maxlen)
        else:
            copied = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        self._pairs[id(value)] = value, copied  # first: it may hold itself
        if isinstance(value, dict):
            copied.update((self.of(k) if isinstance(k, torch.Tensor) else k, copy(v)) for k, v in value.items())
        elif isinstance(value, set):
            copied.update(map(copy, value))
        else:
            copied.extend(map(copy, value))
        return copied


def _choose_foreach(optimizer: Any) -> None:
    """Choose ``foreach`` as torch does on a card: ``torch/optim/optimizer.py`` does not know the fake tensors' type."""
    modules = {kind.__module__ for kind in type(optimizer).__mro__} - {torch.optim.Optimizer.__module__}
    if not any(hasattr(sys.modules.get(module), "_default_to_fused_or_foreach") for module in modules):
        return
    for group in optimizer.param_groups:
        chosen = group.get("fused") or group.get("differentiable") or isinstance(group.get("lr"), torch.Tensor)
        if group.get("foreach") is None and not chosen:
            group["foreach"] = True


def _imitate(tensor: torch.Tensor) -> torch.Tensor:
    if is_traceable_wrapper_subclass(tensor):
        raise InvalidArgument(f"{name_type(tensor)} of shape {tuple(tensor.shape)} cannot be traced: plain tensors can")
    fake = make_fake(tensor)
    if isinstance(tensor, nn.Parameter):
        fake = nn.Parameter(fake, tensor.requires_grad)
    elif tensor.is_leaf:
        fake.requires_grad_(tensor.requires_grad)
    for name, value in vars(tensor).items():
        if not hasattr(fake, name):
            setattr(fake, name, value)
    return fake


def modules_of(model: nn.Module, step: Callable[..., Any]) -> list[tuple[str, nn.Module]]:
    """List the modules of the model and of the step, inner ones first, as ``model.to("cuda")`` allocates."""
    names = {id(module): name for name, module in model.named_modules()}
    seen: set[int] = set()
    found: list[tuple[str, nn.Module]] = []

    def visit(module: nn.Module) -> None:
        if id(module) not in seen:
            seen.add(id(module))
            for child in module.children():
                visit(child)
            found.append((names.get(id(module), ""), module))

    for value in (model, *walk(step, _lead_on, _MOST_REACHED)):
        if isinstance(value, nn.Module):
            visit(value)
    return found


def _lead_on(value: Any) -> Iterator[Any]:
    def leads(holder: Any) -> Iterator[Any]:
        return (part for part in own_attributes(holder) if isinstance(part, _LEADS))

    return iter(()) if isinstance(value, nn.Module) else parts_of(value, leads)


class Location:
    """Follows which submodule is running, or its backward pass.

    Global module hooks follow forward passes. The sequence number of an autograd node leads to its forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []
        self._thread = threading.get_ident()

    def name(self) -> str:
        """Qualified name of the innermost running submodule, or of the module whose node autograd runs, or ""."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        index = 0 if node is None else bisect_right(self._starts, node._sequence_nr())
        return self._owners[index - 1] if index else ""

    @contextmanager
    def follow(self) -> Iterator[None]:
        handles = (
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
            self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._stack:
            self._stack.pop()
            self._mark()

    def _mark(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self._stack[-1] if self._stack else "")
