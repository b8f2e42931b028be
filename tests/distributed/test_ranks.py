"""Finding the ranks, a rank's own time, and the comparison of values between ranks."""

import sys
import time
import tracemalloc
import types

import pytest
import torch
from builders.plans import SMALL, make_rank_plans
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.distributed.own_time import OwnTime
from autobatch.distributed.parallelism import find_ranks
from autobatch.distributed.ranks import digest_values, world_size
from autobatch.errors import InvalidArgument

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
    def __init__(self):
        super().__init__(2, 2)


def test_on_the_cpu_it_is_the_clock():
    """Time outside the two marks does not count."""
    own = OwnTime(torch.device("cpu"))
    assert own.read() == 0.0
    began = time.perf_counter()
    own.start()
    time.sleep(0.02)
    own.stop()
    most = time.perf_counter() - began
    time.sleep(0.05)
    assert 0.02 <= own.read() <= most


def test_time_in_many_parts_takes_memory_for_each_part_once():
    """A step of thousands of buckets stops the clock before each."""
    own = OwnTime(torch.device("cpu"))
    tracemalloc.start()
    try:
        own.start()
        for _ in range(2000):
            own.stop()
            own.resume()
        own.stop()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < own.read() < 10
    assert peak_bytes < 1e6


class Stream:
    """A device that is behind: an event is passed when it has come so far."""

    def __init__(self):
        self.enqueued = self.passed = 0

    def make_event(self, *, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    """Its time is its place in the stream: a second each."""

    def __init__(self, stream):
        self.stream = stream

    def record(self, stream):
        assert stream is self.stream
        self.stream.enqueued += 1
        self.place = self.stream.enqueued

    def query(self):
        return self.place <= self.stream.passed

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        return 1000.0 * (other.place - self.place)


def test_on_cuda_it_is_of_the_last_step_that_is_over(monkeypatch):
    """The host does not wait: it reads an unfinished step later."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.make_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    own, read = OwnTime(torch.device("cuda", 0)), []
    for work, passed in ((1, 0), (3, 2), (5, 3), (7, 30)):
        own.start()
        stream.enqueued += work - 1
        own.stop()
        stream.passed = passed
        read.append(own.read())
    assert read == [0.0, 1.0, 1.0, 7.0]
    assert not own._pending


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool)


def numbers(dtype, size=12):
    return torch.rand(size, generator=torch.Generator().manual_seed(0)).round().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_number_changes_it(dtype):
    """By the least bit that the dtype has."""
    one, other = numbers(dtype), numbers(dtype)
    assert digest_values([one]) == digest_values([other])
    other[3] = float(not other[3])
    assert digest_values([one]) != digest_values([other])


def test_the_last_bit_counts():
    """A sum of floats would round it away."""
    one = torch.tensor([1e20, 1.0])
    other = torch.stack((one[0], torch.nextafter(one[1], torch.tensor(2.0))))
    assert digest_values([one]) != digest_values([other])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_place_of_a_number_counts(dtype):
    """Two ranks may hold the same numbers in other rows, as of an embedding that saw other words."""
    values = torch.zeros(4, 3, dtype=dtype)
    one, other = values.clone(), values.clone()
    one[1, 0] = other[2, 1] = 1
    assert digest_values([one]) != digest_values([other])


def test_what_has_no_values_is_told_from_what_is_not_there():
    """Empty, without a shape yet, on the meta device, scalar, sparse."""
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True)
    assert digest_values([]) == digest_values([None, None]) == ""
    kinds = [torch.empty(0, 3), nn.LazyLinear(2).weight, torch.empty(3, device="meta"), torch.tensor(2.0), sparse]
    assert all(digest_values([one, None]) != digest_values([None, one]) for one in kinds)
    assert digest_values([sparse]) == digest_values(
        [torch.sparse_coo_tensor([[0]], [3.0], (3,), check_invariants=True)]
    )
