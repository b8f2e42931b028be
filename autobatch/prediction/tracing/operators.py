"""Runs operators on fake tensors, and remembers the shapes of their results.

``FakeTensorMode`` is general and slow: GPT-2 takes 4.7 s with it and 1.8 s with this memory (torch 2.13, two traces):
a step runs the same operators in every layer and micro-batch.
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from autobatch.prediction.tracing.fake_device import DEVICE, DEVICE_TYPE
from autobatch.prediction.tracing.kernels import find_grouped_product, find_layout

_Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))

_aten = torch.ops.aten
_TAKES_HOSTS = (_aten.copy_.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_VIEWS = frozenset((
    _aten.view.default, _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
    _aten.unsqueeze.default, _aten.slice.Tensor, _aten.select.int, _aten.split.Tensor, _aten.detach.default,
    _aten._unsafe_view.default, _aten.alias.default, _aten.split_with_sizes.default, _aten.unbind.int,
))  # fmt: skip
_WRITTEN_OUT = frozenset((
    _aten.native_batch_norm.default, _aten.native_batch_norm_backward.default, _aten.silu_backward.default,
    _aten.threshold_backward.default,
)) & decomposition_table.keys()  # fmt: skip
_MAKES = frozenset((
    _aten.zeros_like.default, _aten.empty_strided.default, _aten.empty.memory_format, _aten.zeros.default,
))  # fmt: skip


@cache
def only_writes(func: Any) -> bool:
    """Whether an operator only writes into its first argument (or list of them), and allocates nothing."""
    name = func._schema.name.partition("::")[2]
    return (
        func.namespace == "aten"
        and name.endswith("_")
        and torch.Tag.inplace_view not in func.tags
        and not name.startswith(("resize", "set_", "_amp"))
        and len(func._schema.returns) <= 1
    )


def check_devices(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse tensors of the host as CUDA does: an operator that writes takes single values, indices and copies."""
    for tensor in tensors_in(args) if func not in _TAKES_HOSTS else ():
        if tensor.dim() and not is_on_device(tensor):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
                f"{tensor.device}!"
            )


def is_on_device(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.fake_device.type == DEVICE_TYPE


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class Operators:
    """The operators of one trace with the shapes of their results."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode, self._device = mode, torch.device(DEVICE)
        self._known: dict[Any, tuple[type, list[_Spec | None]]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _kind_of(func)
        try:
            key = None if kind == "other" else (func, _key_of(args), _key_of([*kwargs.items()]))
        except _UnknownArgumentError:
            key = None
        if key is None:
            return func(*args, **kwargs)
        if kind == "view":
            with in_kernel_invocation_manager(self._mode):
                viewed = func(*args, **kwargs)
            return self._wrap(viewed) if isinstance(viewed, torch.Tensor) else [self._wrap(part) for part in viewed]
        known = self._known.get(key)
        if known is not None:
            container, specs = known
            made = [None if spec is None else self._make(*spec) for spec in specs]
            return made[0] if container is FakeTensor else container(made)
        result = self._compute(func, args, kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, *kwargs.values()))}
        parts = list(result) if isinstance(result, (tuple, list)) else [result]
        specs = _specify(parts, given) if all(part is None or is_on_device(part) for part in parts) else []
        if specs:
            self._known[key] = (type(result), specs)
        return result

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grouped = find_grouped_product(func, args, kwargs)
        if grouped is not None:
            return self._make(*grouped)
        written = self._write_out(func, args) if func in _WRITTEN_OUT else None
        return self._lay_out(func, args, func(*args, **kwargs) if written is None else written)

    def _write_out(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The result of torch's decomposition with plain tensors, in a tenth of the time; ``None`` if it is not new."""
        with torch._C._DisableTorchDispatch():
            plain = [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                if isinstance(value, torch.Tensor)
                else value
                for value in args
            ]
            made = decomposition_table[func](*plain)
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in(plain)}
            specs = _specify(made if isinstance(made, tuple) else (made,), given)
        parts = tuple(spec and self._make(*spec) for spec in specs) or None
        return parts if parts is None or isinstance(made, tuple) else parts[0]

    def _lay_out(self, func: Any, args: tuple[Any, ...], result: Any) -> Any:
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


def _specify(parts: Sequence[torch.Tensor | None], given: set[int]) -> list[_Spec | None]:
    """Shapes, strides and dtypes of results; empty unless all are new tensors that fill their storages.

    ``given`` has the storages of the arguments.
    """
    tensors = [part for part in parts if part is not None]
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    if len(storages) < len(tensors) or storages & given or not all(map(_fills_its_storage, tensors)):
        return []
    return [part if part is None else (tuple(part.shape), part.stride(), part.dtype) for part in parts]


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = 1 + sum(spans) if tensor.numel() else 0
    return not tensor.storage_offset() and count * tensor.itemsize == tensor.untyped_storage().nbytes()


class _UnknownArgumentError(Exception):
    """An argument does not determine the result's shape."""


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
    named = named and func not in _MAKES
    return "other" if aliases or schema.is_mutable or named or not schema.returns else "fresh"
