"""Arithmetic and promises of ``CudaDevice`` over a stand-in for torch's allocator; ``tests/gpu`` has a real card."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autobatch.memory.cuda import CudaDevice, find_fraction
from autobatch.memory.devices import find_allowance
from autobatch.memory.host_limit import HostMemory

GIB = 1024**3
MIB = 1024**2
UUID = "5d3aa3c2-5a8e-4c8a-9d7e-1f1c5a6f0b11"
# Divided and multiplied again in double precision, this budget is a byte less.
ODD_BUDGET, ODD_TOTAL = 6_101_308_501, 85_000_000_000
CARD = torch.device("cuda", 1)


class FakeAllocator:
    """The functions of ``torch.cuda`` that are used, for one card; limits are computed as torch's C++ does."""

    def __init__(self, total=80 * GIB, others=0):
        self.total = total
        self.others = others
        self.allowed = None
        self.allocated = self.peak_allocated = 0
        self.cached = self.peak_reserved = 0
        self.retries = 0

    @property
    def reserved(self):
        return self.allocated + self.cached

    def allocate(self, size):
        new = max(size - self.cached, 0)
        if self.allowed is not None and self.reserved + new > self.allowed:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.cached += new - size
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, size):
        self.allocated -= size
        self.cached += size

    def current_device(self):
        return 1

    def get_device_properties(self, device):
        assert device == CARD
        return SimpleNamespace(name="NVIDIA L4", total_memory=self.total, uuid=UUID)

    def mem_get_info(self, device):
        assert device == CARD
        return self.total - self.reserved - self.others, self.total

    def set_per_process_memory_fraction(self, fraction, device):
        assert device == CARD
        assert isinstance(fraction, float)
        assert 0 <= fraction <= 1
        self.allowed = None if fraction == 1 else int(fraction * self.total)

    def get_per_process_memory_fraction(self, device):
        assert device == CARD
        return 1.0 if self.allowed is None else self.allowed / self.total

    def empty_cache(self):
        self.cached = 0

    def reset_peak_memory_stats(self, device):
        assert device == CARD
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def memory_stats_as_nested_dict(self, device):
        assert device == CARD
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak_allocated}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.peak_reserved}},
            "num_alloc_retries": self.retries,
        }


def put_in_place(patch, allocator):
    """Let ``torch.cuda`` be this allocator, and NVML be missing."""
    for name in dir(FakeAllocator):
        if not name.startswith("_") and hasattr(torch.cuda, name):
            patch.setattr(torch.cuda, name, getattr(allocator, name))
    patch.setattr(torch.accelerator, "empty_host_cache", lambda: None, raising=False)
    patch.setitem(sys.modules, "pynvml", None)
    return allocator


@pytest.fixture
def allocator(monkeypatch):
    """A card of 80 GiB with nothing on it."""
    return put_in_place(monkeypatch, FakeAllocator())


@given(total=st.integers(1, 2**42), data=st.data())
def test_the_limit_is_exactly_the_budget(total, data):
    """What torch computes from the fraction is the budget to the byte, never one more and never one less."""
    budget = data.draw(st.integers(0, total - 1))
    assert int(find_fraction(budget, total) * total) == budget


@pytest.mark.parametrize("budget", [6 * GIB, 80 * GIB, 200 * GIB])
def test_a_budget_never_lifts_the_users_own_limit(allocator, budget):
    """What the user has set for the process holds inside a larger budget too, and is what is available."""
    allocator.allowed = 5 * GIB
    device = CudaDevice(CARD)
    with device.limit(budget), device.limit(budget):
        assert allocator.allowed == 5 * GIB
        assert device.available_bytes() == 5 * GIB
    assert allocator.allowed == 5 * GIB


def test_expandable_segments_get_a_lower_limit(allocator, monkeypatch):
    """Torch may map 18 MiB more than the limit there: the limit is so much lower, and the budget is what is said."""
    monkeypatch.setattr("autobatch.memory.cuda.uses_expandable_segments", lambda: True)
    device = CudaDevice(CARD)
    with device.limit(2 * GIB):
        assert allocator.allowed == 2 * GIB - 18 * MIB
        assert device.available_bytes() == 2 * GIB
        with device.limit(10 * MIB):
            assert allocator.allowed == 0
        with device.limit(allocator.total):
            assert allocator.allowed is None
        assert allocator.allowed == 2 * GIB - 18 * MIB
    assert allocator.allowed is None


def test_nothing_is_measured_without_a_cache(allocator, monkeypatch):
    """There torch's allocator counts nothing and knows no limit."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert not CudaDevice(CARD).measures


def test_a_limit_is_enforced_and_put_back(allocator):
    """Inside, an allocation beyond the budget fails and one up to it does not; afterwards all is as before."""
    device = CudaDevice(CARD)
    with device.limit(2 * GIB):
        with pytest.raises(torch.OutOfMemoryError):
            allocator.allocate(2 * GIB + 1)
        allocator.allocate(2 * GIB)
    assert allocator.allowed is None


def test_a_limit_is_put_back_when_the_block_raises(allocator):
    """An error leaves the block unchanged and the limit behind it."""
    with pytest.raises(KeyError), CudaDevice(CARD).limit(2 * GIB):
        raise KeyError
    assert allocator.allowed is None


def test_a_limit_is_put_back_when_the_cache_cannot_be_emptied(allocator, monkeypatch):
    """Even entering may fail, and then nothing stays limited."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: int("no"))
    allocator.cached = 3 * GIB
    with pytest.raises(ValueError, match="no"), CudaDevice(CARD).limit(2 * GIB):
        raise AssertionError("never entered")
    assert allocator.allowed is None


@given(
    total=st.integers(GIB, 200 * GIB),
    user=st.floats(0, 1),
    budgets=st.lists(st.integers(0, 200 * GIB), min_size=1, max_size=4),
)
@example(total=ODD_TOTAL, user=find_fraction(ODD_BUDGET, ODD_TOTAL), budgets=[GIB])
def test_nested_limits_hold_inside_and_come_back_to_the_byte(total, user, budgets):
    """However deep, the innermost budget holds, or the user's own limit, which survives without losing a byte."""

    def descend(device, allocator, rest):
        before = allocator.allowed
        if rest:
            with device.limit(rest[0]):
                smaller = min(rest[0], total if users is None else users)
                assert allocator.allowed == (None if smaller >= total else smaller)
                descend(device, allocator, rest[1:])
        assert allocator.allowed == before

    with pytest.MonkeyPatch.context() as patch:
        allocator = put_in_place(patch, FakeAllocator(total))
        allocator.set_per_process_memory_fraction(user, CARD)
        users = allocator.allowed
        descend(CudaDevice(CARD), allocator, budgets)


@pytest.mark.parametrize(("cached", "left"), [(2 * GIB, 2 * GIB), (2 * GIB + 1, 0)])
def test_only_a_cache_beyond_the_budget_is_given_back(allocator, cached, left):
    """Cached blocks are handed out whatever the limit is, so what is beyond it must go; the rest is worth keeping."""
    allocator.cached = cached
    with CudaDevice(CARD).limit(2 * GIB):
        assert allocator.cached == left


def test_available_is_what_is_free_and_what_is_ours(allocator):
    """Other processes' bytes are gone, our cache and tensors are ours to use again."""
    allocator.others = 30 * GIB
    allocator.allocate(5 * GIB)
    allocator.cached = 3 * GIB
    assert CudaDevice(CARD).available_bytes() == 50 * GIB


def test_reclaiming_frees_cycles_before_the_cache(allocator):
    """A tensor in a reference cycle is freed first, or its block would stay behind in the emptied cache."""

    class Block:
        def __init__(self):
            allocator.allocate(MIB)
            self.itself = self

        def __del__(self):
            allocator.free(MIB)

    Block()
    CudaDevice(CARD).reclaim()
    assert allocator.reserved == 0


def test_a_card_without_nvml_is_described_by_torch(allocator):
    """Name, total and UUID need no driver library; nobody is known to be on it."""
    info = CudaDevice(CARD).describe()
    assert (info.kind, info.name, info.total_bytes) == ("cuda", "NVIDIA L4", 80 * GIB)
    assert (info.uuid, info.tenants) == (f"GPU-{UUID}", ())


def test_a_slice_with_nvml_is_described_with_its_tenants(allocator, monkeypatch):
    """The driver is asked by the UUID that torch gives, and knows how to write it."""
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        SimpleNamespace(
            NVMLError=KeyError,
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetHandleByUUID={f"MIG-{UUID}": "handle"}.__getitem__,
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=81 * GIB, free=GIB),
            nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=7, usedGpuMemory=3 * GIB)],
            nvmlSystemGetProcessName=lambda pid: "python",
        ),
    )
    info = CudaDevice(CARD).describe()
    assert (info.uuid, info.total_bytes) == (f"MIG-{UUID}", 80 * GIB)
    assert [(tenant.pid, tenant.used_bytes) for tenant in info.tenants] == [(7, 3 * GIB)]


class Recorder:
    """A tensor as far as ``move_tensor`` looks at it."""

    def __init__(self, kind, pinned):
        self.device = torch.device(kind)
        self.is_pinned = lambda: pinned

    def to(self, device, *, non_blocking):
        return device, non_blocking


@pytest.mark.parametrize(
    ("kind", "pinned", "expected"), [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)]
)
def test_only_pinned_memory_is_copied_without_waiting(allocator, kind, pinned, expected):
    """From pageable memory torch waits anyway, and what is on a card has nothing to be pinned."""
    assert CudaDevice(CARD).move_tensor(Recorder(kind, pinned)) == (CARD, expected)


@pytest.mark.parametrize("leaves", [(0, 1), (1, 0)])
@pytest.mark.parametrize("before", [None, 40 * GIB])
def test_limits_in_two_threads_end_in_what_was_set_before(allocator, leaves, before):
    """The allocator has one limit for all threads: the smallest holds while both are inside, whoever leaves first."""
    allocator.allowed = before
    budgets, steps = (4 * GIB, 9 * GIB), [(threading.Event(), threading.Event()) for _ in range(2)]

    def work(number):
        entered, goes_on = steps[number]
        with CudaDevice(CARD).limit(budgets[number]):
            entered.set()
            assert goes_on.wait(60)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread, (entered, _) in zip(threads, steps, strict=True):
        thread.start()
        assert entered.wait(60)
    assert allocator.allowed == 4 * GIB
    for number, is_last in zip(leaves, (False, True), strict=True):
        steps[number][1].set()
        threads[number].join(60)
        assert allocator.allowed == (before if is_last else budgets[leaves[1]])


class IntegratedCard(FakeAllocator):
    """A card whose memory is the host's: what runs out there hangs the machine, which here is an error."""

    def __init__(self, total, host):
        super().__init__(total)
        self.host = host

    def get_device_properties(self, device):
        return SimpleNamespace(name="NVIDIA GB10", total_memory=self.total, uuid=UUID, is_integrated=1)

    def host_memory(self):
        return HostMemory(total_bytes=self.total, available_bytes=self.host - self.reserved, source="RAM")

    def allocate(self, size):
        super().allocate(size)
        assert self.reserved < self.host, "the machine hangs"


@pytest.fixture
def integrated(monkeypatch):
    """Makes an integrated card on a host that has so many bytes available."""

    def make(total, host):
        card = put_in_place(monkeypatch, IntegratedCard(total, host))
        monkeypatch.setattr("autobatch.memory.cuda.read_host_memory", card.host_memory)
        return card

    return make


@pytest.mark.parametrize("asked", [None, "1TiB", "100GiB", "20GiB"])
@pytest.mark.parametrize("host", [119, 60, 24, 9])
def test_a_trial_on_an_integrated_card_never_takes_what_the_system_needs(integrated, host, asked):
    """The driver has all of the machine's memory free, the host less; an allocation beyond raises before it hangs."""
    card = integrated(128 * GIB, host * GIB)
    device = CudaDevice(CARD)
    allowance = find_allowance(device, asked, 0)
    assert allowance.budget_bytes <= (host - 8) * GIB
    with device.limit(allowance.budget_bytes), pytest.raises(torch.OutOfMemoryError):
        for _ in range(1000):
            card.allocate(GIB // 4)
    assert card.reserved > allowance.budget_bytes - GIB // 2


def test_a_step_on_an_integrated_card_takes_no_more_than_the_host_has_left(integrated):
    """Other programs have taken memory since the budget was found; what this process holds counts as its own."""
    card = integrated(128 * GIB, 100 * GIB)
    device = CudaDevice(CARD)
    budget = find_allowance(device, None, 0).budget_bytes
    card.allocate(10 * GIB)
    card.host -= 50 * GIB
    assert device.limit_bytes(budget) == (50 - 8) * GIB
    with device.limit(budget), pytest.raises(torch.OutOfMemoryError):
        card.allocate(33 * GIB)
    with device.limit(budget):
        card.allocate(31 * GIB)


def test_a_card_with_its_own_memory_is_not_bound_by_the_host(allocator, monkeypatch):
    """Also where torch has no word about that."""
    monkeypatch.setattr("autobatch.memory.cuda.read_host_memory", lambda: pytest.fail("asked"))
    device = CudaDevice(CARD)
    with device.limit(80 * GIB):
        assert device.available_bytes() == 80 * GIB
        device.reset_peak()
