"""What kernels take beside tensors, and in which order tensors are made, as the recorder notes it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autobatch.batch.samples import describe
from autobatch.prediction.cards import find_gpu
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.timeline import combine
from autobatch.prediction.tracing.kernels import find_buffers
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


def attend(model, batch, heads=4, mask=None):
    """A linear layer, and attention of its result to itself: ``(samples, queries, heads * width)``."""
    query = model(batch).unflatten(-1, (heads, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(query, query, query, attn_mask=mask).transpose(1, 2).flatten(2)


def around(traced, sizes, name, before, after):
    """What is made and freed around the first block of that name: names of sizes, and how many from it on each side."""
    names = {size: name for name, size in sizes.items()}
    assert len(names) == len(sizes)
    made = [(entry, names.get(traced.sizes[abs(entry) - 1])) for entry in traced.order if entry]
    found = [("+" if entry > 0 else "-") + name for entry, name in made if name is not None]
    first = found.index("+" + name)
    return found[first - before : first + after]


# Bytes as torch 2.13 asks its allocator for them on a card of compute capability 8.0, for each head of each sample.
TILES = [
    (torch.float32, 32, 256, 65600),
    (torch.float32, 80, 60, 65568),
    (torch.float32, 80, 130, 131136),
    (torch.float32, 160, 100, 98352),
    (torch.float32, 160, 256, 196704),
    (torch.float32, 256, 130, 262272),
    (torch.bfloat16, 64, 130, 49200),
    (torch.bfloat16, 80, 60, 65552),
    (torch.bfloat16, 128, 256, 131104),
    (torch.bfloat16, 160, 60, 229424),
    (torch.bfloat16, 160, 130, 589920),
    (torch.bfloat16, 160, 256, 720992),
    (torch.bfloat16, 256, 60, 262208),
    (torch.bfloat16, 256, 100, 393280),
]


@pytest.mark.parametrize(("dtype", "width", "queries", "measured"), TILES)
def test_tiles_of_attention_are_as_large_as_was_measured(dtype, width, queries, measured):
    """By dtype, width of a head and number of queries."""
    query = torch.empty(8, 4, queries, width, dtype=dtype, device="meta")
    operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    sizes, order = find_buffers(operator, (query, query, query, query))
    assert sizes[-1] == 8 * 4 * measured
    assert order.count(len(sizes)) == 1


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("heads", [4, 1])
def test_attention_in_float32_takes_buffers_in_its_backward_pass(heads, expanded):
    """The product of the result and its gradient, its sums, tiles; a copy of a gradient that is expanded."""

    def step(model, batch):
        result = attend(model, batch, heads)
        return result.sum() if expanded else result.square().sum()

    traced = trace_of(nn.Linear(256, 256), torch.randn(2, 100, 256), 8, step)
    numbers, tile_rows = 8 * 100 * 256 * 4, 128 if heads == 1 else 64
    tiles = 8 * heads * -(-100 // tile_rows) * (256 // heads // 64) * (tile_rows * 64 * 4 + 16)
    sizes = {"numbers": numbers, "sums": 8 * heads * 100 * 4, "tiles": tiles}
    results, copy = ["+numbers"] * 3, expanded * ["+numbers"]
    laid_out, last = (["+sums", "-sums"], ["-sums"]) if heads > 1 else ([], ["-sums"])
    before = [*copy, *results, "+numbers", "+sums", *laid_out, "-numbers"]
    found = around(traced, sizes, "tiles", len(before), 3 + expanded)
    assert found == [*before, "+tiles", *last, "-tiles", *(expanded * ["-numbers"])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_copies_a_gradient_that_is_not_contiguous(dtype):
    """As its samples, queries, heads and columns lie; the copy is the first buffer and the last."""
    operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    dense = torch.empty(8, 100, 4, 64, dtype=dtype, device="meta").transpose(1, 2)
    expanded = torch.empty((), dtype=dtype, device="meta").expand(8, 4, 100, 64)
    _, order = find_buffers(operator, (dense, dense, dense, dense))
    _, with_copy = find_buffers(operator, (expanded, dense, dense, dense))
    assert with_copy == [1, *order, -1]
    assert 1 not in order


def test_attention_in_half_takes_no_product():
    """Sums and tiles, as flash attention does not take masks; a copy of an expanded gradient as in float32."""

    def step(model, batch):
        mask = torch.ones(100, 100, dtype=torch.bool, device=batch.device).tril()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return attend(model, batch, mask=mask).sum(dtype=torch.bfloat16)

    traced = trace_of(nn.Linear(256, 256), torch.randn(2, 100, 256), 8, step)
    sizes = {"numbers": 8 * 100 * 256 * 2, "sums": 8 * 4 * 100 * 4, "tiles": 8 * 4 * 2 * (64 * 64 * 4 + 16)}
    expected = [*["+numbers"] * 4, "+sums", "+tiles", "-sums", "-tiles", "-numbers"]
    assert around(traced, sizes, "tiles", 5, 4) == expected


@pytest.mark.parametrize(("keys", "width", "columns"), [(4, 20, 32), (2, 20, 32), (4, 128, 128), (4, 160, 192)])
def test_flash_attention_takes_buffers_in_its_backward_pass(keys, width, columns):
    """Sums in float32 for each query, in whole tiles; with few heads of keys their gradients for each head besides."""

    def step(model, batch):
        query = model(batch).unflatten(-1, (4, -1)).transpose(1, 2)
        shared = query[:, :keys]
        return F.scaled_dot_product_attention(query, shared, shared, enable_gqa=keys < 4).float().sum()

    def step_in_half(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return step(model, batch)

    traced = trace_of(nn.Linear(4 * width, 4 * width), torch.randn(2, 100, 4 * width), 8, step_in_half)
    padded = -(-width // 8) * 8
    sizes = {"rows": 8 * 4 * 128 * 4, "sums": 8 * 4 * 128 * columns * 4, "heads": 8 * 4 * 100 * padded * 2}
    of_heads = [] if keys == 4 else ["+heads", "+heads", "-heads", "-heads"]
    after = ["+sums", *of_heads, "-sums", "-rows", "-heads"]  # at last the copy of the gradient
    assert around(traced, sizes, "sums", 1, len(after)) == ["+rows", *after]


def test_flash_attention_copies_what_is_not_contiguous():
    """Gradient and result, as their samples, queries, heads and columns lie."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    dense = torch.empty(8, 100, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    other = torch.empty(8, 4, 100, 64, dtype=torch.bfloat16, device="meta")
    copies = [
        find_buffers(operator, (gradient, dense, dense, dense, result))[1].index(0)
        for gradient, result in ((dense, dense), (other, dense), (dense, other), (other, other))
    ]
    assert copies == [0, 1, 1, 2]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_copies_what_is_not_contiguous(norm):
    """Its input in the forward pass; in the backward pass the input to the end, and then the gradient."""

    def step(model, batch):
        return model(batch.transpose(1, 2)).sum()

    traced = trace_of(norm(48), torch.randn(2, 48, 16).requires_grad_(), 8, step)
    made = around(traced, {"numbers": 8 * 16 * 48 * 4}, "numbers", 0, 10)
    forward = ["+numbers", "+numbers", "+numbers", "-numbers", "-numbers"]  # samples, copy, result
    assert made == [*forward, "+numbers", "+numbers", "+numbers", "-numbers", "-numbers"]


@pytest.mark.parametrize("name", ["native_layer_norm_backward", "_fused_rms_norm_backward"])
def test_the_copy_of_a_norms_input_is_the_first_and_the_last(name):
    """That of the gradient is made once the results are there, and freed before it."""
    operator = getattr(torch.ops.aten, name).default
    dense, other = torch.empty(8, 16, device="meta"), torch.empty(16, 8, dtype=torch.float64, device="meta").t()
    assert find_buffers(operator, (dense, dense)) == ([], [])
    assert find_buffers(operator, (other, dense)) == ([1024], [0, 1, -1])
    assert find_buffers(operator, (dense, other)) == ([1024], [1, 0, -1])
    assert find_buffers(operator, (dense.t(), other)) == ([512, 1024], [2, 0, 1, -1, -2])


def test_a_norm_on_the_host_takes_nothing_of_the_card():
    """As of a constant that is made there in the step."""

    def step(model, batch):
        return model(batch).sum() + F.layer_norm(torch.ones(64, 1024).t(), (64,)).mean()

    traced = trace_of(nn.Linear(8, 8), torch.randn(2, 8), 4, step)
    assert 4 * 64 * 1024 not in traced.sizes


def test_samples_are_held_to_the_end_of_the_backward_pass():
    """As in training, by the loop: also where no gradient needs them."""
    traced = trace_of(nn.Linear(64, 8), torch.randn(2, 64), 16, lambda m, b: m(b * 2).square().sum())
    first = next(number for number, block in enumerate(traced.blocks, 1) if block.kind == "input")
    freed = traced.order.index(-first)
    later = [traced.blocks[entry - 1].phase for entry in traced.order[:freed] if entry > 0]
    assert "backward" in later


def test_autocast_casts_weights_before_inputs():
    """The last argument first, whether named or not: in a full cache the order decides which block is split."""

    def step(model, batch, *, named):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if named:
                return torch.ops.aten.linear(batch, model.weight, bias=model.bias).float().sum()
            return model(batch).float().sum()

    for named in (False, True):
        traced = trace_of(nn.Linear(64, 8), torch.randn(2, 64), 16, partial(step, named=named))
        made = [size for size, block in zip(traced.sizes, traced.blocks, strict=True) if block.phase == "forward"]
        assert made[1:4] == [2 * 8, 2 * 64 * 8, 2 * 16 * 64]
