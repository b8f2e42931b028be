"""How many ranks there are, and that more than one is refused before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.distributed import refuse_many_ranks, world_size
from autobatch.errors import AutobatchError

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
    refuse_many_ranks()


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_group_of_one_is_as_good_as_none(ranks):
    """Launchers make a group also for one process."""
    assert world_size() == 1
    refuse_many_ranks()


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_several_ranks_are_refused_with_a_way_out(ranks):
    """How many, why, and what to do."""
    assert world_size() == 4
    with pytest.raises(AutobatchError, match=r"^4 ranks are running.*run on one rank.*plan\.settings\(\)"):
        refuse_many_ranks()


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_fit_refuses_before_anything_runs(ranks):
    """The step is never called."""

    def step(model, batch):
        pytest.fail("the step was called")
        return mean_step(model, batch)

    with pytest.raises(AutobatchError, match="2 ranks"):
        autobatch.fit(Plain(), 8, batch=make_batch(4, torch.float64), step=step)
