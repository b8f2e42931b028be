"""Estimates what a convolution takes as workspace where cuDNN is not installed and cannot be asked.

Covers which kernels work on copies of their tensors in another layout. The rule is a fit to what cuDNN 9.20 answers for
21 networks of timm and torchvision on five cards: of the process's whole memory it is off by 0 to 5 % in the median, by
15 % below at worst. Where cuDNN is there, ``answers`` is exact. Imports no torch.
"""

from __future__ import annotations

from autobatch.prediction.cudnn.convolution import Convolution

__all__ = ["estimate_workspace"]

_WIDE_POINTS = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "unknown")
"""Cards on which a kernel of size 1 is run on copies, too."""

_NO_TF32 = ("sm_60", "sm_70", "sm_75")


def estimate_workspace(convolution: Convolution, architecture: str) -> int:
    """Bytes of the workspace on a card of this architecture, ``"sm_80"`` for instance.

    Tensor cores want the channels last: what is laid out otherwise is copied, once each tensor that is read, and the
    result once more in half precision. Half of the largest of a step's comes on top, see ``estimate``.
    """
    inputs, outputs, weight = convolution.byte_counts()
    is_half = convolution.dtype in ("float16", "bfloat16")
    has_tf32 = convolution.tf32 and convolution.dtype == "float32" and architecture not in _NO_TF32
    if not (is_half or has_tf32) or max(convolution.inputs[2:]) == 1:  # one point of space: a product of matrices
        return 0
    if convolution.groups == convolution.inputs[1] > 1:
        return _estimate_depthwise(convolution, inputs + outputs, is_half=is_half)
    if convolution.groups > 1:
        return inputs + outputs + weight
    if convolution.channels_last:
        return 0
    if max(convolution.weight[2:]) > 1 or architecture in _WIDE_POINTS:
        reads_all = is_half or convolution.kind != "forward"
        return inputs + weight + (outputs if reads_all else 0)
    return inputs + outputs + weight if is_half and convolution.kind == "weight gradient" else 0


def _estimate_depthwise(convolution: Convolution, tensor_bytes: int, *, is_half: bool) -> int:
    """In float32 and channels first torch has kernels of its own, which take none."""
    is_large = max(convolution.weight[2:]) >= 7
    if convolution.channels_last and is_large and convolution.kind == "weight gradient":
        return round(4.6 * tensor_bytes)
    return 0 if not is_half or convolution.channels_last else tensor_bytes
