"""Runs operators on fake tensors: what they only write into, what they return, and which sums autograd makes in place.

Covers where an operator's arguments are, and a memory of the shapes that are returned by operators that neither write
nor alias, and by views. Everything else goes to ``FakeTensorMode``, whose own memory is general and slow: GPT-2
takes 4.7 s with it and 1.8 s with this one (torch 2.13, two traces), since a step runs the same operators in every
layer and every micro-batch.

torch adds up gradients that meet in the backward pass in place if nobody else holds the first one
(``torch/csrc/autograd/input_buffer.cpp``), but never with fake tensors or while a dispatch mode is active: that would
count a copy that a GPU does not have. So these sums are recognised by who called the operator and by how many hold its
first argument. Does not cover sums that the step itself makes.
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from autobatch.prediction.tracing.convolutions import find_layout
from autobatch.prediction.tracing.fake_device import DEVICE, DEVICE_TYPE, original_errors
from autobatch.torch_internals.dispatch_mode import DispatchMode

__all__ = [
    "Holders",
    "Operators",
    "check_devices",
    "holders_of",
    "is_dense",
    "is_on_device",
    "only_writes",
    "sole_holder",
    "tensors_in",
]

_Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))

_aten = torch.ops.aten
_TAKES_HOSTS = (_aten.copy_.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_VIEWS = frozenset((
    _aten.view.default, _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
    _aten.unsqueeze.default, _aten.slice.Tensor, _aten.select.int, _aten.split.Tensor, _aten.detach.default,
    _aten._unsafe_view.default, _aten.alias.default, _aten.split_with_sizes.default,
))  # fmt: skip


@cache
def only_writes(func: Any) -> bool:
    """Whether an operator does nothing but write into its first argument, or list of them: no memory comes or goes."""
    name = func._schema.name.partition("::")[2]
    return (
        func.namespace == "aten"
        and name.endswith("_")
        and torch.Tag.inplace_view not in func.tags
        and not name.startswith(("resize", "set_", "_amp"))
        and len(func._schema.returns) <= 1
    )


def check_devices(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse what CUDA refuses: an operator that writes takes of the host single values, indices, and what it copies.

    Raises:
        RuntimeError: A tensor is the host's, in torch's own words.
    """
    for tensor in tensors_in(args) if func not in _TAKES_HOSTS else ():
        if tensor.dim() and not is_on_device(tensor):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
                f"{tensor.device}!"
            )


def is_on_device(value: Any) -> bool:
    """Whether a value is a fake tensor on the fake device."""
    return isinstance(value, FakeTensor) and value.fake_device.type == DEVICE_TYPE


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """All tensors in arguments, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class Operators:
    """One trace's operators with the shapes that they returned."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode, self._device = mode, torch.device(DEVICE)
        self._known: dict[Any, tuple[type, list[_Spec]]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As ``func(*args, **kwargs)``."""
        kind = _kind_of(func)
        key = None if kind == "other" else _key_of_call(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if kind == "view":
            with in_kernel_invocation_manager(self._mode):
                viewed = func(*args, **kwargs)
            return self._wrap(viewed) if isinstance(viewed, torch.Tensor) else [self._wrap(part) for part in viewed]
        known = self._known.get(key)
        if known is not None:
            container, specs = known
            made = [self._make(*spec) for spec in specs]
            return made[0] if container is FakeTensor else container(made)
        result = self._lay_out(func, args, func(*args, **kwargs))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, *kwargs.values()))}
        specs = _describe(result, given)
        if specs:
            self._known[key] = (type(result), specs)
        return result

    def _lay_out(self, func: Any, args: tuple[Any, ...], result: Any) -> Any:
        """A convolution's results as cuDNN lays them out; fake tensors lose channels last on other devices."""
        layout = find_layout(func, args)
        if layout is None:
            return result
        if isinstance(result, tuple):
            return tuple(part if part is None or part.dim() < 4 else self._make_like(part, layout) for part in result)
        return self._make_like(result, layout)

    def _make_like(self, tensor: torch.Tensor, layout: torch.memory_format) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=layout)
        return self._wrap(meta)

    def _make(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._wrap(meta)

    def _wrap(self, meta: torch.Tensor) -> FakeTensor:
        return FakeTensor(self._mode, meta, self._device)


def _describe(result: Any, given: set[int]) -> list[_Spec]:
    """Shapes, strides and dtypes; none where a result is no tensor of its own that fills its storage."""
    parts = list(result) if isinstance(result, (tuple, list)) else [result]
    if not all(is_on_device(part) and _fills_its_storage(part) for part in parts):
        return []
    storages = {part.untyped_storage()._cdata for part in parts}
    if len(storages) < len(parts) or storages & given:
        return []
    return [(tuple(part.shape), part.stride(), part.dtype) for part in parts]


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = 1 + sum(spans) if tensor.numel() else 0
    return not tensor.storage_offset() and count * tensor.itemsize == tensor.untyped_storage().nbytes()


class _UnknownArgumentError(Exception):
    """An argument does not determine the result's shape."""


def _key_of_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    try:
        return func, _key_of(args), tuple((name, _key_of(value)) for name, value in kwargs.items())
    except _UnknownArgumentError:
        return None


def _key_of(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if not is_on_device(value) or value.layout is not torch.strided:
            raise _UnknownArgumentError
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return tuple(map(_key_of, value))
    raise _UnknownArgumentError


@cache
def _kind_of(func: Any) -> Literal["view", "fresh", "other"]:
    schema, tags = func._schema, func.tags
    if func.namespace != "aten" or torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return "other"
    if func in _VIEWS:
        return "view"
    aliases = func.is_view or any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns))
    named = any("device" in argument.name for argument in schema.arguments)
    return "other" if aliases or schema.is_mutable or named or not schema.returns else "fresh"


Holders = tuple[int, int, int]
"""Counts of a gradient: who holds the tensor in C++, its storage, and the tensor in Python. Ours are among them."""


def holders_of(args: tuple[Any, ...]) -> Holders | None:
    """How many hold the first of two gradients that autograd adds; ``None`` for any other sum.

    ``args`` are those of ``aten.add.Tensor``; a dispatch mode's ``__torch_dispatch__`` must be the caller.
    """
    first, second = args[:2]
    if torch.is_grad_enabled() or not isinstance(second, torch.Tensor) or first.shape != second.shape:
        return None
    caller = sys._getframe(2)
    while caller.f_code.co_name == "_fn" and caller.f_back is not None:
        caller = caller.f_back
    if caller.f_code.co_name != "_engine_run_backward" or first.dtype != second.dtype or not is_dense(first):
        return None
    in_storage: int = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    in_tensor: int = first._use_count()
    return in_tensor, in_storage, sys.getrefcount(first)


@cache
def sole_holder() -> Holders | None:
    """What ``holders_of`` returns where autograd alone holds the gradient; needs an active ``FakeMode``.

    The counts depend on the versions of torch and Python, so they are looked at once in a process, on three sums of
    which two have another holder. ``None`` where these look the same: then every sum is taken for one that is
    allocated, so that too much memory is predicted, and never too little.
    """
    held: list[Any] = []

    def hold_in_python(hidden: torch.Tensor, _oldest: torch.Tensor) -> torch.Tensor:
        branch = hidden.cos()
        branch.grad_fn.register_hook(lambda given, _: held.append(given))  # type: ignore[union-attr]
        return branch

    try:
        alone, by_python = _try_sum(lambda hidden, _: hidden.cos()), _try_sum(hold_in_python)
        # The gradient of a sum is that of both of its terms, and the older term waits for it longer.
        by_autograd = _try_sum(lambda hidden, oldest: (hidden + oldest).cos())
    except (AttributeError, RuntimeError, TypeError):  # a torch that counts nowhere, or elsewhere
        return None
    return None if alone in (by_python, by_autograd) else alone


class _Observer(DispatchMode):
    """While active, notes the holders of each sum and makes it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Holders | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator as it is."""
        if func is torch.ops.aten.add.Tensor:
            self.seen.append(holders_of(args))
        return func(*args, **(kwargs or {}))


def _try_sum(branch: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Holders | None:
    """What is seen of two gradients that meet, of which ``branch`` may have somebody hold the first."""
    with torch.enable_grad():
        oldest, hidden = (torch.empty(4, 4, device=DEVICE, requires_grad=True).exp() for _ in range(2))
        later = hidden.sin()
        sooner = branch(hidden, oldest)  # what was made last is differentiated first
        total = torch.stack([later.sum(), sooner.sum()]).sum()
    observer = _Observer()
    with observer, original_errors():
        total.backward()
    (seen,) = observer.seen
    return seen


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie side by side, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
