"""Which device object stands behind a torch device, and which device a model is on."""

from __future__ import annotations

import pytest
import torch

from autobatch.errors import InvalidArgument
from autobatch.memory.cpu import CpuDevice
from autobatch.memory.cuda import CudaDevice
from autobatch.memory.device import UnmonitoredDevice
from autobatch.memory.devices import device_for, find_device
from autobatch.testing import FakeDevice

FAKE = FakeDevice(lambda n: n, "1GiB")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("cpu", CpuDevice), ("cpu:0", CpuDevice), ("mps", UnmonitoredDevice), ("xpu:1", UnmonitoredDevice)],
)
def test_each_kind_of_device_has_its_class(name, kind):
    """CPU and CUDA are measured, all others only tried."""
    assert type(device_for(torch.device(name))) is kind


@pytest.mark.gpu
def test_cuda_without_an_index_is_the_current_card():
    """``"cuda"`` and ``"cuda:0"`` are one object where card 0 is the current one."""
    device = device_for(torch.device("cuda"))
    assert type(device) is CudaDevice
    assert device is device_for(torch.device("cuda", torch.cuda.current_device()))


ON_CPU = [torch.ones(2), torch.ones(3)]


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_is_found_by_its_parameters(device):
    """Left out, by name or as torch's own object: the same one device, also for parameters made on ``cpu:0``."""
    assert find_device(ON_CPU, "Net", device) is device_for(torch.device("cpu"))
    assert find_device([torch.ones(2, device="cpu:0"), torch.ones(2)], "Net", device) is device_for(torch.device("cpu"))


@pytest.mark.parametrize("device", [None, "cpu", FAKE])
def test_parameters_on_several_devices_are_refused(device):
    """One budget is one device's; the message names those there are, each once."""
    split = [torch.ones(2), torch.ones(2, device="meta"), torch.ones(3)]
    with pytest.raises(InvalidArgument, match="Net has parameters on several devices: cpu, meta; "):
        find_device(split, "Net", device)
