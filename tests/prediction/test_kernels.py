"""Operators that are one kernel on CUDA, and that torch writes out or refuses on fake devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autobatch.batch.samples import describe
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.tracing.kernels import find_grouped_product
from autobatch.prediction.tracing.trace import Circumstances, trace
from autobatch.step.workload import Workload

WIDTH = 64
HAS_GROUPED = hasattr(F, "grouped_mm")
GROUPED = torch.ops.aten._grouped_mm.default if HAS_GROUPED else None


def trace_once(model, run):
    """One micro-batch of 32 rows."""
    once = Circumstances(micro_batches=1, steps=1)
    return run_apart(lambda: trace(Workload(model, run), describe(torch.zeros(2, WIDTH)), 32, once))


def blocks_of(traced, module):
    """Phases and bytes of what a module made."""
    return [
        (block.phase, size)
        for block, size in zip(traced.blocks, traced.sizes, strict=True)
        if block.module == module and block.phase != "before"
    ]


@pytest.mark.predicts
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_an_rms_norm_keeps_its_output_and_a_number_a_row(dtype, itemsize):
    """Forward and backward are a kernel each: no squares, no means, no products in between."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.RMSNorm(WIDTH, dtype=dtype))
    traced = trace_once(model, lambda model, rows: model(rows.to(dtype)).float().square().mean())
    rows = 32 * WIDTH * itemsize
    forward = [("forward", rows), ("forward", 32 * 4)]
    backward = [("backward", rows), ("backward", WIDTH * itemsize)]
    found = blocks_of(traced, "1")
    assert found[:2] == forward
    assert found[2:4] == backward


@pytest.mark.predicts
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_an_rms_norm_of_another_dtype_than_its_weight_is_written_out():
    """As CUDA does it: in float32, step by step."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), nn.RMSNorm(WIDTH))
    traced = trace_once(model, lambda model, rows: model(rows.bfloat16()).float().square().mean())
    assert blocks_of(traced, "1").count(("forward", 32 * WIDTH * 4)) >= 3


class Experts(nn.Module):
    """Two experts, each with half of the rows."""

    def __init__(self, dtype, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, width, 20, dtype=dtype))

    def forward(self, rows):
        ends = torch.tensor([16, 32], dtype=torch.int32, device=rows.device)
        return F.grouped_mm(rows.to(self.weight.dtype), self.weight, offs=ends)


@pytest.mark.predicts
@pytest.mark.skipif(not HAS_GROUPED, reason="this torch has no grouped_mm")
@pytest.mark.parametrize(("dtype", "row"), [(torch.float32, 80), (torch.float16, 48), (torch.bfloat16, 48)])
def test_a_grouped_product_runs_in_every_dtype(dtype, row):
    """CUDA takes them all; each row of the result is padded to 16 bytes."""
    traced = trace_once(Experts(dtype), lambda model, rows: model(rows).float().square().mean())
    assert ("forward", 32 * row - (row - 20 * dtype.itemsize)) in blocks_of(traced, "")


@pytest.mark.predicts
@pytest.mark.skipif(not HAS_GROUPED, reason="this torch has no grouped_mm")
def test_a_grouped_product_that_cannot_be_is_refused():
    """As on a card, where it is one error of many."""
    with pytest.raises(RuntimeError, match=r"contraction dimension of \(32, 64\) and \(2, 32, 20\) must match"):
        trace_once(Experts(torch.float32, width=32), lambda model, rows: model(rows).mean())


@pytest.mark.skipif(not HAS_GROUPED, reason="this torch has no grouped_mm")
@pytest.mark.parametrize(
    ("left", "right", "groups", "shape"),
    [
        ((24, 8), (2, 8, 16), 2, (24, 16)),
        ((2, 24, 8), (8, 16), 2, (24, 16)),
        ((24, 8), (8, 16), 3, (3, 24, 16)),
        ((2, 24, 8), (2, 8, 16), None, (2, 24, 16)),
    ],
)
def test_its_shape_is_that_of_the_operator(left, right, groups, shape):
    """As torch's own rule for bfloat16 has it, with groups along rows, columns or the inner dimension."""
    matrices = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in (left, right)]
    offsets = None if groups is None else torch.empty(groups, dtype=torch.int32, device="meta")
    found = find_grouped_product(GROUPED, tuple(matrices), {"offs": offsets})
    assert found is not None
    assert found[0] == shape == tuple(GROUPED(*matrices, offs=offsets).shape)
    assert find_grouped_product(torch.ops.aten.mm.default, tuple(matrices), {}) is None


@pytest.mark.skipif(not HAS_GROUPED, reason="this torch has no grouped_mm")
def test_groups_that_differ_are_refused():
    """Three ends of two groups."""
    left, right = torch.empty(8, 4, device="meta"), torch.empty(2, 4, 16, device="meta")
    with pytest.raises(RuntimeError, match=r"sizes have to match, not be \[2, 3\]"):
        find_grouped_product(GROUPED, (left, right), {"offs": torch.empty(3, device="meta")})
