"""Gives tensors on the stand-in card values: each operator runs as CUDA, then on the CPU over the same memory.

The first run makes torch's allocations real ones, the second computes. Covers what a ``TorchDispatchMode`` sees. Does
not cover kernels behind it: custom extensions, Triton, CUDA graphs, and cuDNN (switch it off:
``torch.backends.cudnn.enabled = False``). Attention is computed without dropout.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any, ClassVar

import stand_in
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

_aten = torch.ops.aten
_MOVE_NO_VALUES = {
    _aten.detach.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.alias.default,
    _aten.record_stream.default,
    _aten._local_scalar_dense.default,
}
_LEAVE_MEMORY_AS_IT_IS = ("empty", "new_empty", "resize", "set_")
_CAUSAL_ARGUMENT = {"_scaled_dot_product_flash_attention": 4, "_scaled_dot_product_efficient_attention": 6}
"""Fused attention has no CPU kernel of that name: by name, which argument says whether the mask is causal."""


class Mirror(TorchDispatchMode):
    """While active, tensors on the card have values.

    Attributes:
        missing: For each operator that could not be computed, why; its results are what the memory held before.
    """

    missing: ClassVar[dict[str, str]] = {}

    def __enter__(self) -> Mirror:
        stand_in.zero_reads(whether=False)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        stand_in.zero_reads(whether=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not tree_any(_is_on_card, (args, kwargs)):
            return func(*args, **kwargs)
        if torch.Tag.dynamic_output_shape in func.tags:
            return _compute_shape_first(func, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        generator = torch.cuda.get_rng_state() if is_random else None
        result = func(*args, **kwargs)
        if not _has_new_values(func):
            return result
        before = None if generator is None else _seed_host(generator)
        try:
            with torch.no_grad():
                values = _compute(func, args, kwargs)
                _write(result, values)
            return values if isinstance(result, (bool, int, float)) else result
        except Exception as error:  # whatever the CPU has no kernel for
            self.missing[str(func)] = f"{type(error).__name__}: {str(error)[:150]}"
            return result
        finally:
            if before is not None:
                torch.set_rng_state(before)


def _is_on_card(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    return isinstance(value, torch.device) and value.type == "cuda"


def _has_new_values(func: Any) -> bool:
    if func in _MOVE_NO_VALUES or _name(func).startswith(_LEAVE_MEMORY_AS_IT_IS):
        return False
    return not func.is_view or func._schema.is_mutable


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _compute_shape_first(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator whose result's shape depends on values, such as ``nonzero``: no kernel on the card knows it."""
    values = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
    return tree_map(lambda value: value.cuda() if isinstance(value, torch.Tensor) else value, values)


def _seed_host(generator: torch.Tensor) -> torch.Tensor:
    """Seed the CPU's generator from the card's state; returns the state that it had."""
    before = torch.get_rng_state()
    digest = hashlib.sha256(generator.numpy().tobytes()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
    return before


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _alias(value) if value.is_cuda else value
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of one on the card."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype)
    alias.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        alias = torch._conj(alias)
    return torch._neg_view(alias) if tensor.is_neg() else alias


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs, name = tree_map(_on_host, args), tree_map(_on_host, kwargs), _name(func)
    if name in _CAUSAL_ARGUMENT:
        return (_attend(name, args, kwargs),)
    if name.removesuffix("_backward") in _CAUSAL_ARGUMENT:
        return _attend_backward(name, args, kwargs)
    for option in ("pin_memory", "non_blocking"):
        kwargs.pop(option, None)
    if kwargs.get("generator") is not None:
        kwargs["generator"] = None
    return func(*args, **kwargs)


def _attend(name: str, args: Any, kwargs: Any) -> torch.Tensor:
    query, key, value = (part.float() for part in args[:3])
    bias = args[3].float() if "efficient" in name and args[3] is not None else None
    is_causal = len(args) > _CAUSAL_ARGUMENT[name] and args[_CAUSAL_ARGUMENT[name]]
    attend = _aten._scaled_dot_product_attention_math
    found: torch.Tensor = attend(query, key, value, bias, 0.0, is_causal, scale=kwargs.get("scale"))[0]
    return found.to(args[0].dtype)


def _attend_backward(name: str, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
    gradient, query, key, value = (part.float() for part in args[:4])
    bias = args[4].float() if "efficient" in name and args[4] is not None else 0
    scale = query.shape[-1] ** -0.5 if kwargs.get("scale") is None else kwargs["scale"]
    scores = scale * query @ key.mT + bias
    if len(args) > 11 and args[11]:  # causal
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    of_weights = gradient @ value.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    return scale * of_scores @ key, scale * of_scores.mT @ query, weights.mT @ gradient


def _write(target: Any, values: Any) -> None:
    if isinstance(target, (list, tuple)) and isinstance(values, (list, tuple)):
        for part, value in zip(target, values, strict=False):  # of fused attention only the first ones are computed
            _write(part, value)
    elif isinstance(target, torch.Tensor) and isinstance(values, torch.Tensor) and target.is_cuda:
        is_placeholder = values.shape != target.shape and 0 in (values.numel(), target.numel())
        if not is_placeholder and values.data_ptr() != target.data_ptr():
            _alias(target).copy_(values)
