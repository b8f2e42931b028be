"""Operators that are one kernel on a card hold there what a trace says of them."""

from __future__ import annotations

import gc

import pytest
import stand_in
import torch
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.batch.samples import describe
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.prior import read_card
from autobatch.prediction.tracing.trace import trace_timeline
from autobatch.step.workload import Workload
from autobatch.undo.gradients import Float32Sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, SAMPLES = 1024, 4096


class Normalized(nn.Module):
    """RMS norms between linear layers, with weights of one dtype in activations of another, or the same."""

    def __init__(self, dtype, weight_dtype):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, dtype=weight_dtype) for _ in range(3))
        self.dtype = dtype

    def forward(self, rows):
        hidden = rows.to(self.dtype)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden = norm(layer(hidden))
        return hidden


class Experts(nn.Module):
    """Four experts, each with a quarter of the rows."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH, dtype=dtype) / WIDTH)
        self.dtype = dtype

    def forward(self, rows):
        ends = torch.arange(1, 5, device=rows.device, dtype=torch.int32) * (len(rows) // 4)
        hidden = F.gelu(F.grouped_mm(rows.to(self.dtype), self.weight, offs=ends))
        return F.grouped_mm(hidden, self.weight, offs=ends)


MODELS = {
    "RMSNorm": lambda: Normalized(torch.float32, torch.float32),
    "RMSNorm in bfloat16": lambda: Normalized(torch.bfloat16, torch.bfloat16),
    "RMSNorm with float32 weights": lambda: Normalized(torch.bfloat16, torch.float32),
    "experts": lambda: Experts(torch.float32),
    "experts in float16": lambda: Experts(torch.float16),
    "experts in bfloat16": lambda: Experts(torch.bfloat16),
}


def step(model, rows):
    return model(rows).float().square().mean()


def measure(model):
    """Most bytes in tensors and workspaces of two micro-batches on the card."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = model.cuda()
    torch.cuda.reset_peak_memory_stats()
    sums = Float32Sums()
    sums.begin([*model.parameters()])
    for _ in range(2):
        rows = torch.zeros(SAMPLES, WIDTH, device="cuda")
        (step(model, rows) / 2).backward()
        del rows  # not before: a loop holds its batch while the backward pass runs
    sums.write()
    sums.end()
    return torch.cuda.max_memory_allocated() - before


def _has_own_kernel():
    """Whether torch multiplies groups in bfloat16 by a kernel for this card; the stand-in takes the general one."""
    return not stand_in.is_loaded() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    "name",
    [  # a CPU has no kernel for the norms' backward pass; how large groups are is a value
        pytest.param(name, marks=pytest.mark.no_values if "RMSNorm" in name else ()) for name in MODELS
    ],
)
def test_a_kernel_holds_what_was_predicted(name):
    """Within a hundredth, of which each step of the formula by itself would be far off."""
    if "experts" in name and not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    if name == "experts in bfloat16" and _has_own_kernel():
        pytest.xfail("on an H200 its own kernel took 151 MB, 218 MB were predicted: the copies of other cards' kernels")
    model = MODELS[name]()
    workload, layout = Workload(model, step), describe(torch.zeros(2, WIDTH))
    timeline = run_apart(lambda: trace_timeline(workload, layout))
    predicted = Estimate(timeline).on_card(read_card()).allocated(SAMPLES)
    assert predicted == pytest.approx(measure(model), rel=0.01)


@pytest.mark.no_values
def test_the_runner_holds_what_was_predicted():
    """To some KiB, also where no gradient needs the samples: they are there until the backward pass has ended."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model = Normalized(torch.bfloat16, torch.bfloat16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload, batch = Workload(model, step, None, optimizer), torch.zeros(2 * SAMPLES, WIDTH)
    timeline = run_apart(lambda: trace_timeline(workload, describe(batch[:2])))
    predicted = Estimate(timeline).on_card(read_card()).allocated(SAMPLES)
    options = {"batch": batch[:2], "step": step, "optimizer": optimizer, "check": None, "progress": False}
    plan = autobatch.fit(model, len(batch), max_micro_batch=SAMPLES, **options)
    runner = autobatch.Runner(plan, model, step, optimizer)
    runner.step(batch)
    torch.cuda.reset_peak_memory_stats()
    runner.step(batch)
    beyond = 2**16 if stand_in.is_loaded() else 2**20  # an H200 took 1 MiB more
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated() - before, abs=beyond)
