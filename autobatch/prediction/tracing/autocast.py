"""Applies CUDA's autocast rules on the fake device: the same operators, and the same cache of cast weights.

Covers the operator lists of ``ATen/autocast_mode.h`` (torch 2.13), the copies of float32 weights that stay until the
outermost region ends, and the user's ``torch.autocast("cuda")``, which means the fake device while a step is traced.
Does not cover ``binary_cross_entropy``, which CUDA refuses, nor operators that a library casts by its own rules
(``custom_fwd``).
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["redirect", "register"]

_KEY = "AutocastPrivateUse1"

_LOWER = """_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention""".split()  # noqa: SIM905 - names as a list would take a page

_FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
upsample_bicubic2d _upsample_bicubic2d_aa""".split()  # noqa: SIM905 - names as a list would take a page

_FLOAT32_RESULT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim""".split()  # noqa: SIM905 - names as a list would take a page

_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()  # noqa: SIM905 - names as a list would take a page

_PATCHED = ("__init__", "__enter__", "__exit__")  # of torch.autocast


_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights, each with its copy in the lower precision, which is made once in the outermost autocast region."""


def _cast(tensor: torch.Tensor, dtype: torch.dtype, *, caches: bool) -> torch.Tensor:
    if tensor.dtype in (dtype, torch.double):
        return tensor
    if not (caches and _is_weight(tensor) and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    if id(tensor) not in _casts:
        _casts[id(tensor)] = (tensor, tensor.to(dtype))
    return _casts[id(tensor)][1]


def _is_weight(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


def register(device_type: str) -> tuple[Any, ...]:
    """Give the fake device CUDA's autocast rules, for as long as the result is referenced."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, _KEY)
    library = torch.library.Library("aten", "IMPL")
    rules = ((_LOWER, _lower), (_FLOAT32, _in_float32), (_FLOAT32_RESULT, _to_float32), (_WIDEST, _in_widest))
    for names, rule in rules:
        for name in names:
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if operator is not None:  # some versions of torch do not have it
                library.impl(name, _wrap(operator, rule, device_type, excluded), _KEY)
    return fallback, library


_Rule = Callable[[Any, str, tuple[Any, ...], dict[str, Any]], Any]


def _wrap(operator: Any, rule: _Rule, device_type: str, excluded: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return rule(operator, device_type, args, kwargs)

    return run


def _lower(operator: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call(operator, torch.get_autocast_dtype(device_type), device_type, args, kwargs, caches=True)


def _in_float32(operator: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call(operator, torch.float32, device_type, args, kwargs, caches=False)


def _to_float32(operator: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    has_dtype = kwargs.get("dtype") is not None or "dtype" in names[: len(args)]
    if has_dtype or not _is_eligible(args[0], device_type) or args[0].dtype == torch.float32:
        return operator(*args, **kwargs)
    if "dtype" not in names:
        return _in_float32(operator, device_type, args, kwargs)
    return operator(*args, **{**kwargs, "dtype": torch.float32})


def _in_widest(operator: Any, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    eligible = [tensor for tensor in args if _is_eligible(tensor, device_type)]
    wide = any(tensor.dtype == torch.float32 for tensor in eligible)
    dtype = torch.float32 if wide else torch.get_autocast_dtype(device_type)
    return _call(operator, dtype, device_type, args, kwargs, caches=True)


def _call(
    operator: Any, dtype: torch.dtype, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, caches: bool
) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return [cast(item) for item in value]
        return _cast(value, dtype, caches=caches) if _is_eligible(value, device_type) else value

    return operator(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def _is_eligible(value: Any, device_type: str) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == device_type and value.is_floating_point()


@contextmanager
def redirect(target: str, from_types: Collection[str]) -> Iterator[None]:
    """While this lasts, autocast regions of this thread for any of ``from_types`` are regions of ``target``.

    ``torch.autocast("cuda")`` disables itself where there is no CUDA, and the user's object may be older than this
    block, so both its constructor and its entrance are patched; objects are as before once a region has been left.
    """
    region, thread = torch.amp.autocast_mode.autocast, threading.get_ident()
    construct, enter, leave = (getattr(region, name) for name in _PATCHED)
    entered: list[tuple[Any, str]] = []

    def is_meant(device_type: str, *, enabled: bool) -> bool:
        # Recomputation under torch.utils.checkpoint disables the host's autocast, and only that.
        return threading.get_ident() == thread and device_type in from_types and (enabled or device_type != "cpu")

    def construct_here(
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: Any = True,  # noqa: FBT002 - torch's own signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if is_meant(device_type, enabled=enabled):
            device_type, dtype = target, dtype or torch.get_autocast_dtype(device_type)
        construct(self, device_type, dtype, enabled, *args, **kwargs)

    def enter_here(self: Any) -> Any:
        if threading.get_ident() == thread:
            entered.append((self, self.device))
            self.device = target if is_meant(self.device, enabled=self._enabled) else self.device
        return enter(self)

    def leave_here(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if threading.get_ident() == thread and entered:
                left, device_type = entered.pop()
                left.device = device_type
                if not entered:
                    _casts.clear()

    _patch(region, construct_here, enter_here, leave_here)
    try:
        yield
    finally:
        _patch(region, construct, enter, leave)
        _casts.clear()


def _patch(region: Any, *functions: Any) -> None:
    for name, function in zip(_PATCHED, functions, strict=True):
        setattr(region, name, function)
