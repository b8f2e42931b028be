"""Which ranks there are, and that a model whose gradients nobody would sum over them is refused."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from builders.plans import SMALL, make_rank_plans
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.distributed.channel import Channel
from autobatch.distributed.ranks import find_ranks, refuse_differences, world_size
from autobatch.errors import InvalidArgument
from autobatch.training.batches import find_bound

pytestmark = pytest.mark.quick


@pytest.fixture
def ranks(request):
    """A process group of so many ranks, all but this one simulated by torch's own fake backend."""
    torch.distributed.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    torch.distributed.destroy_process_group()


def test_without_a_process_group_there_is_one_rank():
    """Nothing has to be set up on one device."""
    assert world_size() == 1
    assert find_ranks(Plain()) is None


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_group_of_one_is_as_good_as_none(ranks):
    """Launchers make a group also for one process."""
    assert world_size() == 1
    assert find_ranks(Plain()) is None


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_wrapped_model_on_one_rank_needs_no_exchange(ranks):
    """It trains as it did."""
    assert find_ranks(torch.nn.parallel.DistributedDataParallel(Plain())) is None


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_the_module_inside_a_wrapper_of_one_rank_is_trained(ranks):
    """A wrapper with a static graph cannot run two forward passes in a row, and one with views moves gradients."""
    models = []

    def step(model, batch):
        models.append(type(model))
        return mean_step(model, batch)

    wrapped = torch.nn.parallel.DistributedDataParallel(Plain(), static_graph=True, gradient_as_bucket_view=True)
    batch = make_batch(4, torch.float64)
    plan = autobatch.fit(wrapped, 8, batch=batch, step=step, max_micro_batch=2, reuse=False)
    autobatch.Runner(plan, wrapped, step, None).accumulate(batch)
    assert set(models) == {Plain}


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_model_that_is_not_wrapped_is_refused_with_a_way_out(ranks):
    """How many ranks, why, and what to do."""
    assert world_size() == 4
    with pytest.raises(InvalidArgument, match=r"^4 ranks are running.*DistributedDataParallel.*plan\.settings\(\)"):
        find_ranks(Plain())


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_fit_refuses_before_anything_runs(ranks):
    """The step is never called."""

    def step(model, batch):
        pytest.fail("the step was called")
        return mean_step(model, batch)

    with pytest.raises(InvalidArgument, match="2 ranks"):
        autobatch.fit(Plain(), 8, batch=make_batch(4, torch.float64), step=step)


def test_a_plan_of_several_ranks_is_refused_on_one():
    """Its micro-batches are of one rank's share, and this process would train on the target."""
    plan = make_rank_plans((8, 8), 4, **SMALL)[0]
    with pytest.raises(InvalidArgument, match=r"^the plan is for 2 ranks, and 1 is running: run fit\(\) again$"):
        autobatch.Runner(plan, Plain(), mean_step, None)


def test_the_bound_of_a_share_is_no_bound_of_the_users():
    """A rank may be given one sample more than its share, which BatchNorm cannot run by itself."""
    plan = make_rank_plans((2, 2), 2, max_micro_batch=2, **SMALL)[0]

    assert find_bound(plan) is None
    assert find_bound(plan.model_copy(update={"max_micro_batch": 1})) == 1


def test_what_differs_between_the_ranks_is_named():
    """With what each has, by its rank among all processes."""
    refuse_differences([{"target_batch=": 8}, {"target_batch=": 8}], None)
    channel = types.SimpleNamespace(members=[2, 3])
    channel.list_by_rank = types.MethodType(Channel.list_by_rank, channel)
    of_two = types.SimpleNamespace(channel=channel, refuse=lambda error: error)
    with pytest.raises(InvalidArgument) as caught:
        gathered = [{"share=": "equal", "target_batch=": 8}, {"share=": "equal", "target_batch=": 9}]
        refuse_differences(gathered, of_two)
    assert str(caught.value) == (
        "target_batch= differs between the ranks (rank 2: 8; rank 3: 9): pass the same on each"
    )


def test_sharding_of_an_older_torch_is_refused(monkeypatch):
    """It has no way to clear a pass that broke off."""
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    fsdp = types.SimpleNamespace(FSDPModule=Sharded)
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", fsdp)
    with pytest.raises(InvalidArgument) as caught:
        find_ranks(Sharded())
    assert str(caught.value) == (
        "fully_shard needs torch 2.13 or later here, and this is 2.8.0: use DistributedDataParallel"
    )


class Sharded(nn.Linear):
    """As fully_shard would make it there."""

    def __init__(self):
        super().__init__(2, 2)
