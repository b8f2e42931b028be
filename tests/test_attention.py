"""``autobatch.prediction.tracing.attention``: the kernel that CUDA would choose."""

from __future__ import annotations

import pytest
import torch
from nets import GPT, step, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel

from autobatch.prediction.tracing.attention import Attention, choose_kernel
from autobatch.prediction.tracing.trace import trace
from autobatch.workload.batches import describe
from autobatch.workload.step import Workload

pytestmark = pytest.mark.apart


def _call(dtype=torch.bfloat16, *, width=64, keys=16, key_heads=4, **options):
    query = torch.empty(2, 4, 16, width, dtype=dtype, device="meta")
    key = torch.empty(2, key_heads, keys, width, dtype=dtype, device="meta")
    return Attention(query, key, key, **options)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (_call(), "flash"),
        (_call(torch.float16, causal=True), "flash"),
        (_call(width=36), "flash"),
        (_call(key_heads=2, grouped=True), "flash"),
        (_call(torch.float32), "efficient"),
        (_call(torch.float32, dropout=0.1, causal=True), "efficient"),
        (_call(mask=torch.empty(16, 16, dtype=torch.bool, device="meta")), "efficient"),
        (_call(causal=True, keys=32), "efficient"),
        (_call(width=512), "efficient"),
        (_call(torch.float32, width=30), "math"),
        (_call(torch.float64), "math"),
        (_call(torch.float32, key_heads=2, grouped=True), "math"),
    ],
)
def test_the_first_kernel_that_takes_the_tensors_is_chosen(call, kernel):
    """Flash for 16 bits without a mask, memory-efficient for float32 and masks, else the plain formula."""
    assert choose_kernel(call) == kernel


def test_kernels_that_the_user_has_switched_off_are_not_chosen():
    """``sdpa_kernel`` holds for a predicted step too."""
    with sdpa_kernel(SDPBackend.MATH):
        assert choose_kernel(_call()) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert choose_kernel(_call()) == "efficient"


def _largest_activation(run, length=256):
    model = GPT(length=length, words=100, dropout=0.0)
    traced = trace(Workload(model, run), describe(tokens(2, length)), 2)
    return max(s for s, block in zip(traced.sizes, traced.blocks, strict=True) if block.kind == "activation")


def _plain(model, batch):
    with sdpa_kernel(SDPBackend.MATH):
        return step(model, batch)


def test_only_the_plain_formula_keeps_a_weight_for_each_pair():
    """``queries x keys`` floats a head are saved by it and by no other kernel."""
    pairs = 2 * 4 * 256 * 256 * 4
    assert _largest_activation(_plain) == pairs
    assert _largest_activation(step) < pairs
