"""Tools for users' own tests: a fake device, planned out-of-memory errors, a tenant."""

import pytest
import torch
from torch import nn
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.memory.cpu import CpuDevice
from autobatch.records import Tenant
from autobatch.testing import FakeDevice, oom_at, tenant


def test_the_documented_example_holds():
    """1000 bytes and 50 a sample in 4000: at most 60 fit, which is five steps of 52."""
    gpu = FakeDevice(lambda n: 1000 + 50 * n, total_bytes=4000)
    plan = autobatch.fit(Plain(), 256, batch=make_batch(8, torch.float64), step=mean_step, device=gpu, headroom=0)
    assert plan.micro_batch_size == 52
    assert plan.micro_batch_sizes == (52, 51, 51, 51, 51)


def test_a_fake_device_runs_out_beyond_its_curve_and_its_budget():
    """The total, a narrower budget, and what tenants hold all end it; peaks follow the curve."""
    device = FakeDevice(lambda n: 10 * n, total_bytes=100)
    with device.micro_batch(10):
        pass
    assert device.usage().peak_reserved == 100
    with pytest.raises(torch.OutOfMemoryError, match="11 samples"), device.micro_batch(11):
        pass
    with device.limit(50), pytest.raises(torch.OutOfMemoryError), device.micro_batch(6):
        pass
    with device.micro_batch(6):
        pass
    device.tenants = (Tenant(pid=1, used_bytes=60),)
    with pytest.raises(torch.OutOfMemoryError), device.micro_batch(6):
        pass
    assert device.available_bytes() == 40
    assert device.ran_sizes == [10, 11, 6, 6, 6]


def test_a_fake_device_that_does_not_measure_tells_nothing():
    """Running out is then the only signal."""
    device = FakeDevice(lambda n: 10 * n, total_bytes=100, measures=False)
    with device.micro_batch(10):
        pass
    assert device.available_bytes() == 0
    assert device.usage().peak_reserved == 0
    with pytest.raises(torch.OutOfMemoryError), device.micro_batch(11):
        pass


def test_oom_at_counts_forward_backward_and_update():
    """Every allocating operation of a step can be the one that fails, each exactly once."""
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(4, 3)

    def step():
        layer(inputs).sum().backward()
        optimizer.step()

    with oom_at(10**9) as counted:
        step()
    assert counted.raised == []
    failed = []
    for position in range(1, counted.operations + 1):
        optimizer.zero_grad()
        optimizer.state.clear()
        with oom_at(position) as planned, pytest.raises(torch.OutOfMemoryError, match=f"operation {position} "):
            step()
        failed += planned.raised
    assert len(failed) == counted.operations
    assert failed[0] == "aten.addmm.default"
    assert any("mm" in name for name in failed[1:])  # a backward operation
    assert any("clone" in name or "add_" in name for name in failed[-4:])  # one of the update's


def test_oom_at_passes_views_over():
    """A view allocates nothing, so memory cannot end there."""
    data = torch.randn(4, 4)
    with oom_at(1) as planned:
        data[1:].view(-1).t()
    assert planned.operations == 0


def test_a_tenant_holds_real_bytes_until_it_leaves():
    """Memory that somebody else holds counts against a budget, and is free again after an error too."""
    device = CpuDevice()
    device.reclaim()
    before = device.usage().allocated
    with pytest.raises(ValueError, match="leaves"), tenant(1000):
        assert device.usage().allocated == before + 1000
        with device.limit(before + 1500), pytest.raises(torch.OutOfMemoryError):
            torch.zeros(200)
        raise ValueError("leaves")
    assert device.usage().allocated == before


def test_a_tenant_of_a_fake_device_leaves_less_there():
    """No memory is taken for it, and a step that needs more than is left runs out."""
    gpu = FakeDevice(lambda samples: 1000 + 50 * samples, total_bytes=4000)
    with tenant(3900, device=gpu):
        assert gpu.available_bytes() == 100
        with pytest.raises(torch.OutOfMemoryError), gpu.micro_batch(1):
            pass
    assert gpu.available_bytes() == 4000
