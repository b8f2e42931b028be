"""Fake twins of a model and its optimizer: the user's own objects run on them for a while, and nothing is copied.

Covers modules, by exchanging what each one holds (its ``__dict__``) and putting the very same dict back, so that also a
step that closes over the model meets the twins, and whatever it writes into a module is gone afterwards. An optimizer
is made anew, of the same class with the same options, on the twins. Does not cover tensors that objects other than
modules and functions hold; those that need no gradient are replaced when an operator meets them (``recording``).
"""

# ruff: noqa: SLF001 - what torch keeps for those who add devices has no public names

from __future__ import annotations

import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autobatch._formatting import name_type
from autobatch.errors import CannotPredict
from autobatch.prediction.timeline import Kind
from autobatch.prediction.tracing.recording import Recorder, make_fake
from autobatch.step.reachable import parts_of, walk

__all__ = ["FakeModel", "modules_of"]

_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, deque)
_LEADS = (nn.Module, partial, types.FunctionType, types.MethodType, list, tuple, dict)
_MOST_REACHED = 10_000  # values on the way from a step to the modules that it uses


class FakeModel:
    """One fake tensor for each real one; those that are one tensor under two names have one twin.

    Made and used while a ``FakeMode`` and its recorder are active.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pairs: dict[int, tuple[Any, Any]] = {}

    def of(self, tensor: torch.Tensor, kind: Kind = "buffer", module: str = "") -> torch.Tensor:
        """The twin of a tensor, on the fake device.

        Raises:
            CannotPredict: Its memory is not that of one dense block.
        """
        known = self._pairs.get(id(tensor))
        if known is None:
            known = self._pairs[id(tensor)] = (tensor, _make_twin(tensor))
            self._recorder.label(known[1], kind, module)
        twin: torch.Tensor = known[1]
        return twin

    def copy(self, value: Any) -> Any:
        """A nest with twins instead of tensors, in containers of its own; modules and other objects stay."""
        if isinstance(value, torch.Tensor):
            return self.of(value)
        if type(value) not in _CONTAINERS or not value:
            return value if not isinstance(value, (dict, list, set, deque)) else _fresh(value)
        known = self._pairs.get(id(value))
        if known is None:
            known = self._pairs[id(value)] = (value, self._copy_items(value))
        return known[1]

    @contextmanager
    def inhabit(self, modules: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        """While this lasts, these modules hold twins; then what they held before, in the same dicts."""
        for name, module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.of(parameter, "parameter", name)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.of(buffer, "buffer", name)
        contents = [(module, vars(module), self._copy_items(vars(module))) for _, module in modules]
        try:
            for module, _, twin in contents:
                object.__setattr__(module, "__dict__", twin)
            yield
        finally:
            for module, original, _ in contents:
                object.__setattr__(module, "__dict__", original)

    def optimizer(self, optimizer: Any) -> Any:
        """An optimizer of the same class with the same options on the twins, without state and step hooks."""
        twin = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            if name == "state" or (hasattr(type(optimizer), name) and callable(value)):
                continue  # a scheduler has put its own step() there, which would step the original
            if hasattr(value, "param_groups") and hasattr(value, "__dict__"):
                twin.__dict__[name] = self.optimizer(value)
            else:
                twin.__dict__[name] = self._copy_option(value)
        twin.__dict__["state"] = defaultdict(dict)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if name in vars(twin):
                twin.__dict__[name] = OrderedDict()
        _choose_foreach(twin)
        return twin

    def _copy_option(self, value: Any) -> Any:
        """As ``copy``, but a scalar on the host stays one that can be read: a learning rate."""
        if isinstance(value, torch.Tensor) and id(value) not in self._pairs and value.dim() == 0:
            return torch.tensor(_read(value), dtype=value.dtype) if value.device.type == "cpu" else self.of(value)
        if type(value) is dict:
            return {name: self._copy_option(item) for name, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self._copy_option, value))
        return self.copy(value)

    def _copy_items(self, value: Any) -> Any:
        if isinstance(value, dict):
            fresh = _fresh(value)
            fresh.update((self._copy_key(key), self.copy(item)) for key, item in value.items())
            return fresh
        items = [self.copy(item) for item in value]
        return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)

    def _copy_key(self, key: Any) -> Any:
        return self.of(key) if isinstance(key, torch.Tensor) else key


def _choose_foreach(optimizer: Any) -> None:
    """As torch would on a card, where nobody has chosen: all parameters at once, with temporaries as large as they are.

    ``torch/optim/optimizer.py`` looks at the parameters' type, and twins are not of the type that it looks for.
    """
    modules = {kind.__module__ for kind in type(optimizer).__mro__} - {torch.optim.Optimizer.__module__}
    if not any(hasattr(sys.modules.get(module), "_default_to_fused_or_foreach") for module in modules):
        return
    for group in optimizer.param_groups:
        chosen = group.get("fused") or group.get("differentiable") or isinstance(group.get("lr"), torch.Tensor)
        if group.get("foreach") is None and not chosen:
            group["foreach"] = True


def _fresh(value: Any) -> Any:
    """An empty container of the same type; itself if its type is a stranger's."""
    if type(value) not in _CONTAINERS:
        return value
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory)
    return type(value)() if not isinstance(value, deque) else deque(maxlen=value.maxlen)


def _make_twin(tensor: torch.Tensor) -> torch.Tensor:
    if is_traceable_wrapper_subclass(tensor):
        raise CannotPredict(f"{name_type(tensor)} of shape {tuple(tensor.shape)} cannot be traced: plain tensors can")
    twin = make_fake(tensor)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, tensor.requires_grad)
    elif tensor.is_leaf:
        twin.requires_grad_(tensor.requires_grad)
    for name, value in vars(tensor).items():
        if not hasattr(twin, name):
            setattr(twin, name, value)
    return twin


def _read(tensor: torch.Tensor) -> Any:
    with torch._C._DisableTorchDispatch():
        return tensor.item()


def modules_of(model: nn.Module, step: Callable[..., Any]) -> list[tuple[str, nn.Module]]:
    """The model's modules and those that the step closes over, each once, named; inner ones first.

    That order is in which ``model.to("cuda")`` allocates (``nn.Module._apply``).
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for root in (model, *_modules_in(step)):
        names = {id(module): name for name, module in root.named_modules()} if root is model else {}
        for module in _inner_first(root, set()):
            found.setdefault(id(module), (names.get(id(module), ""), module))
    return list(found.values())


def _inner_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


def _modules_in(step: Callable[..., Any]) -> Iterator[nn.Module]:
    """Modules that a function can reach, the nearest first: bound arguments, its closure, the globals it names.

    However many functions are around it: a wrapper changes the depth of what is inside and not the count.
    """
    reached = walk(step, _lead_on, _MOST_REACHED)
    return (value for value in reached if isinstance(value, nn.Module))


def _lead_on(value: Any) -> Iterator[Any]:
    return iter(()) if isinstance(value, nn.Module) else parts_of(value, _attributes)


def _attributes(value: Any) -> Iterator[Any]:
    return (part for part in vars(value).values() if isinstance(part, _LEADS))
