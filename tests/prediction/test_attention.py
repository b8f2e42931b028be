"""``autobatch.prediction.tracing.attention``: the kernel that CUDA would choose."""

from __future__ import annotations

import pytest
import torch
from nets import GPT, step, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel

from autobatch.batch.samples import describe
from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing.attention import Attention, choose_kernel
from autobatch.prediction.tracing.trace import trace
from autobatch.step.workload import Workload

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


@pytest.mark.parametrize(
    ("forced", "call", "kernel"),
    [
        (SDPBackend.FLASH_ATTENTION, _call(), "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, _call(), "efficient"),
        (SDPBackend.CUDNN_ATTENTION, _call(), "cudnn"),
        (SDPBackend.CUDNN_ATTENTION, _call(mask=torch.empty(16, 16, dtype=torch.bool, device="meta")), "cudnn"),
        (SDPBackend.MATH, _call(torch.float64), "math"),
    ],
)
def test_a_kernel_that_is_forced_is_taken(forced, call, kernel):
    """The only one that is enabled, where it takes the tensors."""
    with sdpa_kernel(forced):
        assert choose_kernel(call) == kernel


@pytest.mark.parametrize(
    ("forced", "call"),
    [
        (SDPBackend.FLASH_ATTENTION, _call(torch.float32)),
        (SDPBackend.FLASH_ATTENTION, _call(mask=torch.empty(16, 16, device="meta"))),
        (SDPBackend.EFFICIENT_ATTENTION, _call(torch.float64)),
        (SDPBackend.CUDNN_ATTENTION, _call(torch.float32)),
        (SDPBackend.CUDNN_ATTENTION, _call(width=36)),
    ],
)
def test_a_forced_kernel_that_does_not_take_the_tensors_raises(forced, call):
    """As torch does on a card, with what was asked of it."""
    with sdpa_kernel(forced), pytest.raises(RuntimeError, match=r"^No available kernel: .*query \(2, 4, 16, "):
        choose_kernel(call)


def _forcing(backend):
    def run(model, batch):
        with sdpa_kernel(backend):
            return step(model, batch)

    return run


def _trace_gpt(run, dtype=torch.bfloat16):
    return trace(Workload(GPT(length=256, words=100, dropout=0.0).to(dtype), run), describe(tokens(2, 256)), 2)


@pytest.mark.predicts
def test_a_step_that_forces_what_cannot_run_is_refused_by_its_line():
    """Float32 and flash."""
    with pytest.raises(InvalidArgument, match=r"nets\.py:\d+: `mixed = .*raise on a card: No available kernel"):
        _trace_gpt(_forcing(SDPBackend.FLASH_ATTENTION), torch.float32)


@pytest.mark.predicts
def test_cudnns_kernel_keeps_as_much_as_flash():
    """The result and one number a query and head; neither keeps a weight for each pair."""
    saved = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        traced = _trace_gpt(_forcing(backend))
        blocks = zip(traced.sizes, traced.blocks, strict=True)
        saved.append(sum(size for size, block in blocks if block.kind == "activation"))
    assert saved[1] == pytest.approx(saved[0], rel=0.01)
