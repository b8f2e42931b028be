"""Runs scaled dot product attention as CUDA does: which kernel, and what it saves for the backward pass.

The rules are those of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` for compute capability 8.0 or more. On
a fake device torch would take the plain formula, with 20 to 50 times the memory.
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Kernel = Literal["flash", "efficient", "cudnn", "math"]

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


class Attention(NamedTuple):
    """The arguments of one call."""

    query: torch.Tensor  # [..., heads, queries, width]
    key: torch.Tensor  # [..., heads, keys, width]
    value: torch.Tensor
    mask: torch.Tensor | None = None  # boolean or added
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None  # None for 1 / sqrt(width)
    grouped: bool = False  # several query heads share a head of keys


def choose_kernel(call: Attention) -> Kernel:
    """Choose as CUDA does: the first enabled kernel that takes these tensors.

    Hopper cards prefer cuDNN's kernel, which saves as much as flash; here it is taken only if no other is enabled.
    Raises ``RuntimeError`` as torch does if no enabled kernel takes the tensors.
    """
    switches = torch.backends.cuda
    if _is_plain(call):
        if switches.flash_sdp_enabled() and _suits_flash(call):
            return "flash"
        if switches.mem_efficient_sdp_enabled() and _suits_efficient(call):
            return "efficient"
        if switches.cudnn_sdp_enabled() and not switches.math_sdp_enabled() and _suits_cudnn(call):
            return "cudnn"
    if not switches.math_sdp_enabled():
        raise RuntimeError(
            f"No available kernel: sdpa_kernel() has none enabled that takes a query {tuple(call.query.shape)} and a "
            f"key {tuple(call.key.shape)} of {call.query.dtype}{'' if call.mask is None else ' with a mask'}"
        )
    return "math"


def _is_plain(call: Attention) -> bool:
    tensors = call[:3]
    return (
        all(tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.numel() > 0 for tensor in tensors)
        and len({(tensor.dtype, tensor.shape[0]) for tensor in tensors}) == 1
    )


def _suits_flash(call: Attention) -> bool:
    return (
        call.mask is None
        and call.query.dtype in _HALF
        and call.query.shape[-1] == call.key.shape[-1] == call.value.shape[-1] <= 256
        and not (call.causal and call.query.shape[-2] != call.key.shape[-2])
        and (_heads_agree(call) or call.grouped)
    )


def _suits_efficient(call: Attention) -> bool:
    aligned = 8 if call.query.dtype in _HALF else 4  # 16 bytes, what one load takes
    widths = (call.query.shape[-1], call.value.shape[-1])
    is_known = call.query.dtype in (*_HALF, torch.float32)
    return is_known and _heads_agree(call) and not any(width % aligned for width in widths)


def _suits_cudnn(call: Attention) -> bool:
    widths = (call.query.shape[-1], call.value.shape[-1])  # above 128 only on Hopper
    heads_divide = call.query.shape[1] % call.key.shape[1] == 0 and (call.grouped or _heads_agree(call))
    return call.query.dtype in _HALF and heads_divide and all(width % 8 == 0 and width <= 256 for width in widths)


def _heads_agree(call: Attention) -> bool:
    return call.query.shape[1] == call.key.shape[1] == call.value.shape[1]


def _attend(  # noqa: PLR0917 - torch's own signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    call = Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    kernel = choose_kernel(call)
    if kernel == "flash":
        return _run_flash(call)
    if kernel == "math":
        results = _aten._scaled_dot_product_attention_math(*call[:6], scale=scale, enable_gqa=enable_gqa)
    else:
        operator = getattr(_aten, f"_scaled_dot_product_{kernel}_attention")
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call[:3])
        results = operator(*call[:3], _bias_of(call), needs_grad, dropout_p, is_causal, scale=scale)
    output: torch.Tensor = results[0]
    return output


def _run_flash(call: Attention) -> torch.Tensor:
    width = call.query.shape[-1]
    scale = call.scale if call.scale is not None else width**-0.5
    tensors: tuple[torch.Tensor, ...] = call[:3]
    if width % 8:  # torch pads before the kernel and takes the width back after it
        tensors = tuple(torch.nn.functional.pad(tensor, (0, 8 - width % 8)) for tensor in tensors)
    results = _aten._scaled_dot_product_flash_attention(*tensors, call.dropout, call.causal, scale=scale)
    output: torch.Tensor = results[0]
    return output[..., :width] if width % 8 else output


def _bias_of(call: Attention) -> torch.Tensor | None:
    """The mask as the kernel wants it: added, in the query's dtype, its rows padded to 16 elements in memory."""
    bias = call.mask
    if bias is None:
        return None
    if bias.dtype == torch.bool:
        zeros = torch.zeros((), dtype=call.query.dtype, device=bias.device)
        bias = torch.where(bias, zeros, float("-inf")).to(call.query.dtype)
    keys = bias.shape[-1]
    if keys % 16:
        bias = torch.nn.functional.pad(bias, (0, 16 - keys % 16))[..., :keys]
    return bias.expand(*call.query.shape[:-1], call.key.shape[-2])


def register() -> torch.library.Library:
    """Run attention so on the fake device, as long as the result is referenced."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    return library
