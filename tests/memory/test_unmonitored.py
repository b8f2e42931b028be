"""Devices without measurements: they move tensors, and promise nothing that they cannot keep."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from autobatch.memory.device import UnmonitoredDevice
from autobatch.records import DeviceInfo

META = torch.device("meta")


def test_mps_tells_how_much_metal_recommends(monkeypatch):
    """The one number that is known on MPS is used."""
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * 1024**3)
    device = UnmonitoredDevice(torch.device("mps"))
    assert device.available_bytes() == 12 * 1024**3
    assert device.describe() == DeviceInfo(kind="mps", name="MPS", total_bytes=12 * 1024**3)


def test_tensors_are_placed():
    """A tensor comes to the device, and one that is there already is not copied."""
    device = UnmonitoredDevice(META)
    placed = device.move_tensor(torch.zeros(3))
    assert placed.device == META
    assert device.move_tensor(placed) is placed


def test_a_limit_lets_everything_through():
    """Nothing is enforced, and an error in the block stays what it is."""
    device = UnmonitoredDevice(torch.device("cpu"))
    with device.limit(1):
        assert torch.zeros(1000).numel() == 1000
    with pytest.raises(KeyError), device.limit(1):
        raise KeyError


@pytest.mark.parametrize("promise", ["synchronize", "reclaim", "reset_peak"])
@pytest.mark.parametrize("kind", ["meta", "cpu"])
def test_what_a_backend_lacks_is_passed_over(promise, kind):
    """Torch has no module for ``meta``, and none of the CPU's caches can be emptied."""
    assert getattr(UnmonitoredDevice(torch.device(kind)), promise)() is None


def test_reclaiming_frees_cycles_before_the_cache(monkeypatch):
    """The backend's cache is emptied once, after what nobody holds any more is gone."""
    called = []

    class Held:
        def __init__(self):
            self.itself = self

    reference = weakref.ref(Held())
    backend = SimpleNamespace(
        empty_cache=lambda: called.append(reference()), synchronize=lambda: called.append("waited")
    )
    monkeypatch.setattr(torch, "mps", backend)
    gc.disable()
    try:
        UnmonitoredDevice(torch.device("mps")).reclaim()
    finally:
        gc.enable()
    assert called == [None]
