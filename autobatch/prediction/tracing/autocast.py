"""Applies CUDA's autocast rules on the fake device: the same operators, and the same cache of cast weights.

The operators are those of ``ATen/autocast_mode.h`` (torch 2.13). While a step is traced, ``torch.autocast("cuda")``
means the fake device.
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_KEY = "AutocastPrivateUse1"

_LOWER, _FLOAT32, _FLOAT32_RESULT, _WIDEST = "lower", "float32", "float32 result", "widest"
_OPERATORS = {
    _LOWER: """
        _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
        baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
        rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
    """,
    _FLOAT32: """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """,
    _FLOAT32_RESULT: """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
    """,
    _WIDEST: "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
}
"""By precision: the lower one, float32, float32 by an argument, the widest of their arguments."""

_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights with their copies in the lower precision, made once in the outermost autocast region."""


def register(device_type: str) -> tuple[Any, ...]:
    """Give the fake device CUDA's autocast rules, as long as the result is referenced."""
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, _KEY)
    library = torch.library.Library("aten", "IMPL")
    for rule, names in _OPERATORS.items():
        for name in names.split():
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if operator is not None:  # some versions of torch do not have it
                library.impl(name, _make_kernel(operator, rule, device_type), _KEY)
    return fallback, library


def _make_kernel(operator: Any, rule: str, device_type: str) -> Callable[..., Any]:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
    names = [argument.name for argument in operator._schema.arguments]

    def is_eligible(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == device_type and value.is_floating_point()

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return [cast(item, dtype) for item in value]
        return _cast(value, dtype, caches=rule in (_LOWER, _WIDEST)) if is_eligible(value) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if rule == _FLOAT32_RESULT:
                has_dtype = kwargs.get("dtype") is not None or "dtype" in names[: len(args)]
                if has_dtype or not is_eligible(args[0]) or args[0].dtype == torch.float32:
                    return operator(*args, **kwargs)
                if "dtype" in names:
                    return operator(*args, **{**kwargs, "dtype": torch.float32})
            is_wide = any(is_eligible(value) and value.dtype == torch.float32 for value in args)
            is_lower = rule == _LOWER or (rule == _WIDEST and not is_wide)
            dtype = torch.get_autocast_dtype(device_type) if is_lower else torch.float32
            # Last argument first, as in torch's Linux builds: GCC evaluates a call's arguments from right to left.
            options = {name: cast(kwargs[name], dtype) for name in reversed(kwargs)}
            values = [cast(value, dtype) for value in reversed(args)]
            return operator(*reversed(values), **options)

    return run


def _cast(tensor: torch.Tensor, dtype: torch.dtype, *, caches: bool) -> torch.Tensor:
    if tensor.dtype in (dtype, torch.double):
        return tensor
    is_weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    if not (caches and is_weight and torch.is_autocast_cache_enabled()):
        return tensor.to(dtype)
    if id(tensor) not in _casts:
        _casts[id(tensor)] = (tensor, tensor.to(dtype))
    return _casts[id(tensor)][1]


@contextmanager
def redirect(target: str, from_types: Collection[str]) -> Iterator[None]:
    """Make this thread's autocast regions for any of ``from_types`` regions of ``target``.

    ``torch.autocast("cuda")`` disables itself without CUDA, and the user's object may be older than this block. So the
    constructor and the entrance are patched.
    """
    region: Any = torch.amp.autocast_mode.autocast
    construct, enter, leave = region.__init__, region.__enter__, region.__exit__
    thread = threading.get_ident()
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

    region.__init__, region.__enter__, region.__exit__ = construct_here, enter_here, leave_here
    try:
        yield
    finally:
        region.__init__, region.__enter__, region.__exit__ = construct, enter, leave
        _casts.clear()
