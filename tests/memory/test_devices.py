"""Which device object stands behind a torch device."""

from __future__ import annotations

import pytest
import torch

from autobatch.memory.cpu import CpuDevice
from autobatch.memory.cuda import CudaDevice
from autobatch.memory.devices import device_for
from autobatch.memory.unmonitored import UnmonitoredDevice


@pytest.mark.parametrize(
    ("name", "kind"),
    [("cpu", CpuDevice), ("cpu:0", CpuDevice), ("mps", UnmonitoredDevice), ("xpu:1", UnmonitoredDevice)],
)
def test_each_kind_of_device_has_its_class(name, kind):
    """CPU and CUDA are measured, all others only tried."""
    assert type(device_for(torch.device(name))) is kind


def test_a_device_has_one_object():
    """The same torch device, the same object; another index is another device."""
    assert device_for(torch.device("cpu")) is device_for(torch.device("cpu"))
    assert device_for(torch.device("xpu:1")) is not device_for(torch.device("xpu:0"))


def test_a_device_knows_where_it_is():
    """An unmeasured one keeps its torch device."""
    assert device_for(torch.device("xpu:1")).torch_device == torch.device("xpu:1")


@pytest.mark.gpu
def test_cuda_without_an_index_is_the_current_card():
    """``"cuda"`` and ``"cuda:0"`` are one object where card 0 is the current one."""
    device = device_for(torch.device("cuda"))
    assert type(device) is CudaDevice
    assert device is device_for(torch.device("cuda", torch.cuda.current_device()))
