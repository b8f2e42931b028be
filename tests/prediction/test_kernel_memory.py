"""What kernels take beside tensors, and in which order tensors are made, as the recorder notes it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autobatch.batch.layout import describe
from autobatch.prediction.cards import find_gpu
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.timeline import combine
from autobatch.prediction.tracing.trace import trace
from autobatch.step.workload import Workload

pytestmark = pytest.mark.predicts


def trace_of(model, batch, samples, step=lambda model, batch: model(batch).square().sum()):
    """The step at this size, traced in a child."""
    return run_apart(lambda: trace(Workload(model, step, None, None), describe(batch), samples))


def blocks_of(traced, kind):
    """Phase and size of each block of a kind, in their order."""
    found = zip(traced.blocks, traced.sizes, strict=True)
    return [(block.phase, size) for block, size in found if block.kind == kind]


def test_a_bias_gradient_is_a_sum_over_the_samples():
    """How many numbers it adds up, and bytes of its results; in each of four micro-batches."""
    traced = trace_of(nn.Linear(8, 32), torch.randn(2, 8), 1024)
    assert blocks_of(traced, "addends") == [("backward", 1024)] * 4
    assert blocks_of(traced, "partial sums") == [("backward", 4 * 32)] * 4


def test_a_sum_over_what_lies_densest_is_not_noted():
    """Its parts are a few KiB."""
    traced = trace_of(nn.Linear(8, 32, bias=False), torch.randn(2, 8), 1024, lambda m, b: m(b).sum(1).mean())
    assert blocks_of(traced, "addends") == []


def test_each_thread_takes_its_handle_at_its_first_product():
    """Once: the caller's in the first forward pass, after its result, and autograd's in the first backward pass."""
    traced = trace_of(nn.Linear(8, 8), torch.randn(2, 8), 4)
    assert blocks_of(traced, "cuBLAS workspace") == [("forward", 0), ("backward", 0)]
    before = [block.kind for block in traced.blocks]
    assert before[:3] == ["parameter", "parameter", "input"]
    assert traced.blocks[4].kind == "cuBLAS workspace"


def test_an_estimate_has_them_on_the_card():
    """Workspaces are counted once, sums' buffers where they are at the peak, and numbers of addends are no bytes."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    traced = combine([trace_of(model, torch.randn(2, 2048), 1024)])
    without, on_card = Estimate(traced), Estimate(traced).on_card(find_gpu("A100-40GB"))
    assert on_card.allocated(1024) > without.allocated(1024) + 2**24
    kinds, held = on_card.by_kind(1024)
    assert kinds["cuBLAS workspace"] == 2 * find_gpu("A100-40GB").cublas_workspace_bytes
    assert kinds.total() + held == on_card.reserved(1024)
    assert "addends" not in kinds


def test_dropout_makes_its_mask_first():
    """As ``native/cuda/Dropout.cu`` does: in a full cache the order decides which block is split."""
    traced = trace_of(nn.Dropout(0.5), torch.randn(2, 512, requires_grad=True), 4)
    made = [size for size, block in zip(traced.sizes, traced.blocks, strict=True) if block.phase == "forward"]
    assert made[1:3] == [4 * 512, 4 * 4 * 512]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_bias_is_added_in_place(transposed):
    """Whether a linear layer's input is contiguous or not: its result is made once, beside a copy of such an input."""

    def step(model, batch):
        return model(batch.transpose(0, 1) if transposed else batch).sum()

    model = nn.Linear(64, 256)
    traced = trace_of(model, torch.randn(2, 16, 64), 8, step)
    results = [
        size for phase, size in blocks_of(traced, "temporary") if phase == "forward" and size == 8 * 16 * 256 * 4
    ]
    results += [size for _, size in blocks_of(traced, "activation") if size == 8 * 16 * 256 * 4]
    assert len(results) == 4


def attend(model, batch, heads=4):
    """A linear layer, and attention of its result to itself: ``(samples, queries, heads * width)``."""
    query = model(batch).unflatten(-1, (heads, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(2)


def temporaries_of(traced, sizes):
    """The blocks of these sizes, in the order in which they are made and freed."""
    names = {size: name for name, size in sizes.items()}
    made = [(entry, names.get(traced.sizes[abs(entry) - 1])) for entry in traced.order if entry]
    return [("+" if entry > 0 else "-") + name for entry, name in made if name is not None]


def test_attention_in_float32_takes_buffers_in_its_backward_pass():
    """The product of the result and its gradient, its sums, and tiles of the query's gradient."""
    traced = trace_of(nn.Linear(256, 256), torch.randn(2, 128, 256), 8, lambda m, b: attend(m, b).sum())
    sizes = {"sums": 8 * 4 * 128 * 4, "tiles": 8 * 4 * 2 * (64 * 64 * 4 + 16)}
    found = temporaries_of(traced, sizes)
    assert found.count("+tiles") == 4
    tiles = found.index("+tiles")
    assert found[tiles - 3 : tiles + 3] == ["+sums", "+sums", "-sums", "+tiles", "-sums", "-tiles"]


def test_sums_of_one_head_are_not_laid_out_anew():
    """They are in the order that the kernel wants."""
    traced = trace_of(nn.Linear(64, 64), torch.randn(2, 128, 64), 8, lambda m, b: attend(m, b, heads=1).sum())
    sizes = {"sums": 8 * 128 * 4, "tiles": 8 * 2 * (64 * 64 * 4 + 16)}
    found = temporaries_of(traced, sizes)
    tiles = found.index("+tiles")
    assert found[tiles - 2 : tiles + 3] == ["+sums", "+sums", "+tiles", "-sums", "-tiles"]  # the first of the result


@pytest.mark.parametrize("keys", [4, 2])
def test_flash_attention_takes_buffers_in_its_backward_pass(keys):
    """Sums in float32 for each query, in whole tiles; with few heads of keys their gradients for each head besides."""

    def step(model, batch):
        query = model(batch).unflatten(-1, (4, -1)).transpose(1, 2)
        shared = query[:, :keys]
        return F.scaled_dot_product_attention(query, shared, shared, enable_gqa=keys < 4).float().sum()

    def step_in_half(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return step(model, batch)

    traced = trace_of(nn.Linear(80, 80), torch.randn(2, 100, 80), 8, step_in_half)
    sizes = {
        "rows": 8 * 4 * 128 * 4,
        "sums": 8 * 4 * 128 * 32 * 4,
        "heads": 8 * 4 * 100 * 24 * 2,
    }  # of 20 columns, padded to 24
    found = temporaries_of(traced, sizes)
    first = found.index("+sums")
    of_heads = [] if keys == 4 else ["+heads", "+heads", "-heads", "-heads"]
    assert found[first - 1 : first + len(of_heads) + 3] == ["+rows", "+sums", *of_heads, "-sums", "-rows"]


def test_a_layer_norm_copies_what_is_not_contiguous():
    """Its input in the forward pass, input and gradient in the backward pass."""
    numbers = 8 * 16 * 48 * 4

    def step(model, batch, *, transposed):
        mixed = batch.transpose(1, 2) if transposed else batch
        return model(mixed).square().sum()

    plain, copied = (
        trace_of(nn.LayerNorm(48), torch.randn(2, *shape), 8, partial(step, transposed=transposed))
        for shape, transposed in (((16, 48), False), ((48, 16), True))
    )
    assert copied.sizes.count(numbers) == plain.sizes.count(numbers) + 4 * 2


def test_samples_are_held_to_the_end_of_the_backward_pass():
    """As in training, by the loop: also where no gradient needs them."""
    traced = trace_of(nn.Linear(64, 8), torch.randn(2, 64), 16, lambda m, b: m(b * 2).square().sum())
    first = next(number for number, block in enumerate(traced.blocks, 1) if block.kind == "input")
    freed = traced.order.index(-first)
    later = [traced.blocks[entry - 1].phase for entry in traced.order[:freed] if entry > 0]
    assert "backward" in later


def test_autocast_casts_weights_before_inputs():
    """The last argument first: in a full cache the order decides which block is split."""

    def step(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).float().sum()

    traced = trace_of(nn.Linear(64, 8), torch.randn(2, 64), 16, step)
    made = [size for size, block in zip(traced.sizes, traced.blocks, strict=True) if block.phase == "forward"]
    assert made[1:4] == [2 * 8, 2 * 64 * 8, 2 * 16 * 64]
