"""Runs scaled dot product attention as CUDA does: which kernel, and what that one saves for the backward pass.

Covers ``F.scaled_dot_product_attention`` by the rules of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` for
compute capability 8.0 or more, and the switches of ``torch.nn.attention.sdpa_kernel``. Does not cover nested tensors,
nor that Hopper cards prefer cuDNN's kernel, which saves as much as flash: it is taken where no other is enabled. On a
fake device torch itself would always take the plain formula, with 20 to 50 times the memory.
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

__all__ = ["Attention", "choose_kernel", "register"]

Kernel = Literal["flash", "efficient", "cudnn", "math"]

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


@dataclass(frozen=True)
class Attention:
    """One call's arguments.

    Attributes:
        query: ``[..., heads, queries, width]``.
        key: ``[..., heads, keys, width]``; fewer heads with ``grouped``.
        value: As ``key``.
        mask: Boolean or added; broadcasts to ``[..., heads, queries, keys]``.
        dropout: Probability.
        causal: Whether queries see no later key.
        scale: ``None`` for 1 / sqrt(width).
        grouped: Whether several query heads share one key head.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False


def choose_kernel(call: Attention) -> Kernel:
    """The first of flash, memory-efficient, cuDNN's and plain that takes these tensors and is enabled, as CUDA chooses.

    Raises:
        RuntimeError: As torch does, where none that is enabled takes them.
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
    tensors = (call.query, call.key, call.value)
    return (
        all(tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.numel() > 0 for tensor in tensors)
        and len({tensor.dtype for tensor in tensors}) == 1
        and len({tensor.shape[0] for tensor in tensors}) == 1
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
    return (
        call.query.dtype in (*_HALF, torch.float32)
        and _heads_agree(call)
        and call.query.shape[-1] % aligned == 0
        and call.value.shape[-1] % aligned == 0
    )


def _suits_cudnn(call: Attention) -> bool:
    """Widths above 128 need a Hopper card."""
    widths = (call.query.shape[-1], call.value.shape[-1])
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
    return _KERNELS[choose_kernel(call)](call)


def _run_flash(call: Attention) -> torch.Tensor:
    width = call.query.shape[-1]
    scale = call.scale if call.scale is not None else width**-0.5
    tensors = [call.query, call.key, call.value]
    if width % 8:  # torch pads before the kernel and takes the width back after it
        tensors = [torch.nn.functional.pad(tensor, (0, 8 - width % 8)) for tensor in tensors]
    results = _aten._scaled_dot_product_flash_attention(*tensors, call.dropout, call.causal, scale=scale)
    output: torch.Tensor = results[0]
    return output[..., :width] if width % 8 else output


def _run_with_bias(call: Attention, operator: Any) -> torch.Tensor:
    tensors = (call.query, call.key, call.value)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    results = operator(*tensors, _bias_of(call), needs_grad, call.dropout, call.causal, scale=call.scale)
    output: torch.Tensor = results[0]
    return output


def _bias_of(call: Attention) -> torch.Tensor | None:
    """The mask as the kernel wants it: added, in the query's dtype, with rows padded to 16 elements in memory."""
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


def _run_plain(call: Attention) -> torch.Tensor:
    output: torch.Tensor = _aten._scaled_dot_product_attention_math(
        call.query, call.key, call.value, call.mask, call.dropout, call.causal,
        scale=call.scale, enable_gqa=call.grouped,
    )[0]  # fmt: skip
    return output


_KERNELS: dict[Kernel, Callable[[Attention], torch.Tensor]] = {
    "flash": _run_flash,
    "efficient": partial(_run_with_bias, operator=_aten._scaled_dot_product_efficient_attention),
    "cudnn": partial(_run_with_bias, operator=_aten._scaled_dot_product_cudnn_attention),
    "math": _run_plain,
}


def register() -> torch.library.Library:
    """Run attention so on the fake device, for as long as the result is referenced."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    return library
