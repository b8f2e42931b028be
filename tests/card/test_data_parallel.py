"""What is predicted of a rank of DDP and of FSDP2, beside what torch's own allocator counts on the stand-in card.

Ranks of DDP are processes that gloo joins. Those of FSDP2 are each alone, in a group whose collectives do nothing: on
this card no kernel does anything, and what is allocated is the same. Each is a process of its own, as another case
before it would leave cycles of references, and an allocator that is divided in another way.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from builders.ranks import run_ranks, values_of
from own_process import call
from rank_steps import CASES, predict_timeline, train_replicated, train_sharded
from sampling import sample

from autobatch.prediction.estimate import Estimate
from autobatch.prediction.prior import read_card

pytestmark = pytest.mark.card

KIB = 2**10
MIB = 2**20
SAMPLES = 24


def read_peaks():
    statistics = torch.cuda.memory_stats()
    return statistics["allocated_bytes.all.peak"], statistics["reserved_bytes.all.peak"]


def measure_sharded(name, world_size, micro_batches):
    """Predicted and measured peaks of the first of so many ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    timeline = predict_timeline(CASES[name], "fsdp2", world_size)
    estimate = Estimate(timeline, target=micro_batches * SAMPLES).on_card(read_card())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    train_sharded(CASES[name], SAMPLES, "cuda", micro_batches)
    return (estimate.allocated(SAMPLES), estimate.reserved(SAMPLES)), read_peaks()


def train_and_measure(name):
    train_replicated(CASES[name], SAMPLES, "cuda")
    return read_peaks()


def measure_replicated(name):
    """Predicted peaks, and those measured on each of two ranks."""
    estimate = Estimate(predict_timeline(CASES[name], "ddp", 2), target=2 * SAMPLES).on_card(read_card())
    measured = values_of(run_ranks(train_and_measure, name))
    return (estimate.allocated(SAMPLES), estimate.reserved(SAMPLES)), *measured


@pytest.mark.parametrize(("name", "world_size"), sample(list(zip(CASES, [2, 3, 4] * 3, strict=False)), 4))
def test_a_rank_of_fsdp2_holds_what_is_predicted(name, world_size):
    """Tensors to a page, and what the allocator takes for its three streams to one segment of small blocks."""
    predicted, measured = call(measure_sharded, name, world_size, 2, mirror=False)
    assert predicted[0] == pytest.approx(measured[0], abs=8 * KIB)
    assert predicted[1] == pytest.approx(measured[1], abs=2 * MIB)


@pytest.mark.parametrize("name", sample(["stack in bfloat16, Adam", "transformer, autocast, Adam"], 2))
def test_a_step_of_one_micro_batch_is_predicted_too(name):
    """Where a rank's share is one micro-batch, gradients are not added up."""
    predicted, measured = call(measure_sharded, name, 3, 1, mirror=False)
    assert predicted[0] == pytest.approx(measured[0], abs=8 * KIB)
    assert predicted[1] == pytest.approx(measured[1], abs=2 * MIB)


@pytest.mark.parametrize("name", sample(["stack, SGD", "stack in bfloat16, Adam", "transformer, autocast, Adam"], 3))
def test_a_rank_of_ddp_holds_what_is_predicted(name):
    """Under the Runner: the reducer's buckets and the Runner's own lie beside all else."""
    predicted, *measured = call(measure_replicated, name, mirror=False)
    for allocated, reserved in measured:
        assert predicted[0] == pytest.approx(allocated, abs=16 * KIB)
        assert predicted[1] == pytest.approx(reserved, abs=2 * MIB)
