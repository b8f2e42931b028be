"""Sparse gradients: small during a step, and a trial's as large as a step's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autobatch
from autobatch.undo.gradients import Float32Sums, join_sparse_rows, widen

# torch says so once a process, at the first sparse tensor that an optimizer makes.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

ROWS, WIDTH, LENGTH = 4000, 64, 8

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}
BY_OPTIMIZER = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def make_table(dtype=torch.float32):
    """An embedding whose gradient is sparse."""
    torch.manual_seed(0)
    return nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)


def make_rows(samples):
    """``[samples, LENGTH]``; each sample looks up rows of its own."""
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(samples))[: samples * LENGTH].view(samples, -1)


def step(model, rows):
    """The mean over samples."""
    return model(rows).square().sum((1, 2)).mean()


@BY_OPTIMIZER
@pytest.mark.parametrize("target", [96, 256])
def test_a_plan_runs_its_first_steps(make_optimizer, target):
    """The optimizer's step sees the rows of all micro-batches: a trial that saw two of them would promise too much."""
    model = make_table()
    optimizer = make_optimizer(model.parameters())
    rows = make_rows(256)[:target]
    resident = 4 * ROWS * WIDTH * (2 + 2 * isinstance(optimizer, torch.optim.SparseAdam))
    with_whole_step = resident + 12 * target * LENGTH * (4 * WIDTH + 8)
    plan = autobatch.fit(
        model, target, batch=rows, step=step, optimizer=optimizer, budget=with_whole_step, headroom=0, max_micro_batch=4
    )
    runner = autobatch.Runner(plan, model, step, optimizer)
    for _ in range(3):
        assert runner.step(rows).retries == 0


@BY_OPTIMIZER
def test_a_trial_holds_the_rows_of_a_whole_step(make_optimizer):
    """Its optimizer's step takes as much as that of the step itself, or more, at any number of micro-batches."""
    peaks = {}
    for target in (8, 64, 256):
        model = make_table()
        optimizer = make_optimizer(model.parameters())
        plan = autobatch.fit(
            model, target, batch=make_rows(4), step=step, optimizer=optimizer, max_micro_batch=4, check=None
        )
        peaks[target] = plan.peak_bytes
        runner = autobatch.Runner(plan, model, step, optimizer)
        small = 2**16  # generators' states and the batch, of which there are more in a step
        assert runner.step(make_rows(target)).peak_bytes <= plan.peak_bytes + small
    assert peaks[8] < peaks[64] < peaks[256]


def test_the_gradient_has_each_row_once():
    """Micro-batches that look up the same rows do not make it longer, and its sum is the whole batch's."""
    model = make_table(torch.float64)
    rows = make_rows(4).repeat(8, 1)
    plan = autobatch.fit(model, 32, batch=rows, step=step, max_micro_batch=4, check=None)
    sizes = []

    def watch(model, part):
        sizes.append(0 if model.weight.grad is None else model.weight.grad._nnz())
        return step(model, part)

    autobatch.Runner(plan, model, watch, None).accumulate(rows)
    assert max(sizes) == 4 * LENGTH
    found = model.weight.grad.to_dense()
    model.weight.grad = None
    step(model, rows).backward()
    assert torch.allclose(found, model.weight.grad.to_dense(), rtol=1e-12, atol=0)


def test_bfloat16_sums_are_coalesced_too():
    """They are added up beside ``.grad``, in float32."""
    model = make_table(torch.bfloat16)
    rows = make_rows(4).repeat(8, 1)
    plan = autobatch.fit(model, 32, batch=rows, step=step, max_micro_batch=4, check=None)
    runner = autobatch.Runner(plan, model, step, None)
    runner.accumulate(rows)
    assert model.weight.grad.coalesce()._nnz() == model.weight.grad._nnz() == 4 * LENGTH


def test_dense_gradients_are_left_alone():
    """The very same tensor stands there."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = gradient = torch.ones(3)
    join_sparse_rows([parameter, nn.Parameter(torch.ones(2))], Float32Sums())
    assert parameter.grad is gradient
    assert widen(gradient, 4) is gradient


@pytest.mark.parametrize(("times", "rows"), [(1, 3), (2, 6), (4, 10), (100, 10)])
def test_a_wide_gradient_has_no_more_rows_than_the_table(times, rows):
    """Zeros, in distinct rows."""
    gradient = torch.sparse_coo_tensor([[1, 4, 4]], torch.ones(3, 2), (10, 2))
    wide = widen(gradient, times)
    assert wide.is_coalesced()
    assert wide._nnz() == rows
    assert not wide.to_dense().any()
