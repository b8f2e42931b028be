"""The promises of ``CudaDevice`` on a real card; the arithmetic alone is in ``tests/memory/test_cuda.py``."""

from __future__ import annotations

import os

import pytest
import torch

from autobatch.memory import nvml
from autobatch.memory.cuda import CudaDevice, uses_expandable_segments
from autobatch.memory.oom import describe_error, is_oom

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1024**2


@pytest.fixture
def device():
    """The current card, with nothing of ours left on it afterwards."""
    card = CudaDevice(torch.device("cuda"))
    card.reclaim()
    card.reset_peak()
    yield card
    card.reclaim()


def bytes_on(device, count):
    """A tensor of this many bytes on the card."""
    return torch.empty(count, dtype=torch.uint8, device=device.torch_device)


def reserved_on(device):
    return torch.cuda.memory_reserved(device.torch_device)


def test_an_allocation_beyond_the_limit_is_an_oom(device):
    """Inside the block the budget is all there is; it is met by a real error that is classified and reported."""
    budget = reserved_on(device) + 64 * MIB
    with device.limit(budget), pytest.raises(torch.OutOfMemoryError) as caught:
        bytes_on(device, 66 * MIB)
    assert is_oom(caught.value)
    assert describe_error(caught.value).startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 66.00 MiB.")
    assert bytes_on(device, 66 * MIB).nbytes == 66 * MIB


def test_the_limit_is_the_budget_to_the_byte(device):
    """A budget of whole segments can be filled, and one byte less cannot."""
    if uses_expandable_segments():
        pytest.skip("expandable segments are mapped in units of 20 MiB: a budget is kept, and may not be filled")
    budget = reserved_on(device) + 64 * MIB
    with device.limit(budget):
        filled = bytes_on(device, 64 * MIB)
        assert reserved_on(device) == budget
        del filled
    device.reclaim()
    with device.limit(budget - 1), pytest.raises(torch.OutOfMemoryError):
        bytes_on(device, 64 * MIB)


def test_the_earlier_limit_is_put_back(device):
    """The fraction that the user has set survives nested limits and an error, and is no limit where it was none."""
    assert torch.cuda.get_per_process_memory_fraction(device.torch_device) == 1.0
    torch.cuda.set_per_process_memory_fraction(0.5, device.torch_device)
    try:
        earlier = torch.cuda.get_per_process_memory_fraction(device.torch_device)
        with pytest.raises(KeyError), device.limit(200 * MIB):
            with device.limit(100 * MIB):
                pass
            assert device.available_bytes() == 200 * MIB
            raise KeyError
        assert torch.cuda.get_per_process_memory_fraction(device.torch_device) == earlier
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.torch_device)


def test_a_budget_never_lifts_the_users_own_limit(device):
    """What the user has set for the process holds inside a larger budget too."""
    torch.cuda.set_per_process_memory_fraction(0.1, device.torch_device)
    try:
        with device.limit(device.total_bytes // 2):
            assert device.available_bytes() <= device.total_bytes // 10 + 1
            with pytest.raises(torch.OutOfMemoryError):
                bytes_on(device, device.total_bytes // 9)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.torch_device)


def test_a_cache_beyond_the_budget_is_given_back(device):
    """Blocks that are cached from before the block must not let it hold more than its budget."""
    before = reserved_on(device)
    block = bytes_on(device, 64 * MIB)
    del block
    assert reserved_on(device) >= before + 64 * MIB
    with device.limit(before + 32 * MIB):
        assert reserved_on(device) <= before + 32 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            bytes_on(device, 64 * MIB)


def test_peaks_begin_at_a_reset(device):
    """A peak outlives the tensor that made it, until the next reset."""
    start = device.usage()
    held = bytes_on(device, 64 * MIB)
    del held
    after = device.usage()
    assert after.allocated == start.allocated
    assert after.peak_allocated == start.allocated + 64 * MIB
    assert after.peak_reserved >= after.peak_allocated
    device.reset_peak()
    assert device.usage().peak_allocated == start.allocated


def test_retries_are_counted(device):
    """An allocation that goes through only after the cache was given back is a retry."""
    before = device.usage()
    holes = before.reserved - before.allocated  # in segments of what other tests keep: no tensor here fits them
    with device.limit(before.reserved + holes + 64 * MIB):
        for size in (40, 60):  # the cached 40 MiB are no room for 60
            bytes_on(device, holes + size * MIB)
    assert device.usage().alloc_retries == before.alloc_retries + 1


def test_available_bytes_do_not_depend_on_our_cache(device):
    """What we hold, as a tensor or in the cache, stays available to us; it is less than the card."""
    empty = device.available_bytes()
    held = bytes_on(device, 256 * MIB)
    # Other processes and the driver move a little meanwhile.
    assert abs(device.available_bytes() - empty) < 64 * MIB
    del held
    assert abs(device.available_bytes() - empty) < 64 * MIB
    assert 0 < empty < device.total_bytes


def test_reclaim_gives_memory_back_to_the_driver(device):
    """What nobody holds, cycles included, is free to everyone afterwards."""
    before = reserved_on(device)
    cycle: list[object] = [bytes_on(device, 64 * MIB)]
    cycle.append(cycle)
    del cycle
    device.reclaim()
    assert reserved_on(device) == before


def test_the_card_is_described(device):
    """Name, total and UUID are torch's; the list of tenants leaves this process out."""
    info = device.describe()
    properties = torch.cuda.get_device_properties(device.torch_device)
    assert (info.kind, info.name, info.total_bytes) == ("cuda", properties.name, properties.total_memory)
    assert info.uuid is not None
    assert info.uuid.endswith(str(properties.uuid))
    assert os.getpid() not in {tenant.pid for tenant in info.tenants}
    assert all(0 < tenant.used_bytes <= info.total_bytes for tenant in info.tenants)


def test_nvml_reads_the_same_card(device):
    """Found by UUID, the driver's card has at least the memory that CUDA shows, and about as much of it free."""
    reading = nvml.query(str(torch.cuda.get_device_properties(device.torch_device).uuid))
    if reading is None:
        pytest.skip("NVML does not answer here")
    assert 0.9 < device.total_bytes / reading.total_bytes <= 1
    free, _ = torch.cuda.mem_get_info(device.torch_device)
    assert abs(free - reading.free_bytes) < 0.02 * reading.total_bytes


@pytest.mark.parametrize("pinned", [True, False])
def test_tensors_are_placed(device, pinned):
    """The copy has the source's values, from pinned memory too, and what is there already is not copied."""
    source = torch.arange(1_000_000)
    placed = device.move_tensor(source.pin_memory() if pinned else source)
    device.synchronize()
    assert placed.device == device.torch_device
    assert torch.equal(placed.cpu(), source)
    assert device.move_tensor(placed) is placed
