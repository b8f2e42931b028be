"""What is predicted of one rank among several, beside what torch's own allocator on the CPU counts on real ranks."""

from __future__ import annotations

import gc
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders.ranks import run_ranks, values_of
from rank_steps import CASES, predict_timeline, train_replicated, train_sharded
from sampling import sample
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.predicts

SAMPLES = 24
SIZES = (2, 3, 4)
SIZE_OF = dict(sample(zip(CASES, SIZES * 3, strict=False), 3))
REAL = "stack, Adam"
SHARE_IN_KERNELS = {"transformer, autocast, Adam": 0.1}
"""Of the peak: what other kernels of the CPU take inside in bfloat16, which a card's do not."""


def measure(train, name):
    """Most bytes that torch's allocator has given, as its profiler sees it.

    Without oneDNN: what that takes inside an operator in bfloat16 depends on the processor (9 % of the peak here, under
    5 % on another).
    """
    gc.collect()  # FSDP2 leaves cycles
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        train(CASES[name], SAMPLES, "cpu")
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(max(np.cumsum([change for _, change in changes])))


def shard_alone():
    """Peaks of the first rank by case, in groups of so many whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    peaks = {}
    for name, size in SIZE_OF.items():
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        peaks[name] = measure(train_sharded, name)
    return peaks


def train_for_real():
    return {"ddp": measure(train_replicated, REAL), "fsdp2": measure(train_sharded, REAL)}


@cache
def alone():
    return values_of(run_ranks(shard_alone, size=1, limit_seconds=280))[0]


@cache
def on_ranks(size):
    return values_of(run_ranks(train_for_real, size=size, limit_seconds=280))


@pytest.mark.parametrize(("name", "size"), SIZE_OF.items())
@pytest.mark.timeout(300)
def test_fsdp2_holds_what_is_predicted(name, size):
    """To half a percent."""
    predicted, measured = predict_timeline(CASES[name], "fsdp2", size).at(SAMPLES).peak(), alone()[name]
    assert (1 - SHARE_IN_KERNELS.get(name, 0.005)) * measured <= predicted <= 1.005 * measured


@pytest.mark.parametrize("size", sample(SIZES, 3))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.timeout(300)
def test_real_ranks_hold_no_less(strategy, size):
    """The first rank; gloo's threads may free their buffers later, so that up to half as much comes on top."""
    predicted = predict_timeline(CASES[REAL], strategy, size).at(SAMPLES).peak()
    measured = on_ranks(size)[0][strategy]
    assert 0.99 * predicted <= measured <= 1.5 * predicted


def test_one_rank_of_many_holds_little():
    """Of the shards and all that is as large, a share; of what is gathered, never more than two units."""
    one, many = (predict_timeline(CASES["stack, SGD"], how, 64).at(1).peak() for how in (None, "fsdp2"))
    model = sum(parameter.nbytes for parameter in CASES["stack, SGD"].make().parameters())
    assert one > 3 * model
    assert many < 2 * model


def test_only_what_is_trained_is_reduced():
    """Frozen parameters are sharded and gathered, and have no gradient, bucket or state."""

    def freeze():
        model = CASES["stack, SGD"].make()
        model.body.requires_grad_(False)
        return model

    case = CASES["stack, SGD"]._replace(make=freeze)
    trained = sum(parameter.numel() for parameter in freeze().parameters() if parameter.requires_grad)
    timeline = predict_timeline(case, "ddp", 2)
    sizes = [size for size, block in zip(timeline.fixed, timeline.blocks, strict=True) if block.kind == "bucket"]
    assert sorted(sizes) == [4 * trained, 4 * trained + 4]
    timeline = predict_timeline(case, "fsdp2", 2)
    kinds = {block.kind for block in timeline.blocks if block.module.startswith("body")}
    assert {"parameter", "gathered parameter", "all-gather"} <= kinds
    assert not {"gradient", "reduce-scatter", "optimizer state"} & kinds
