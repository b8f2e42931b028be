"""``prediction.tracing.device_names``: the user's words for a card mean the fake one."""

from __future__ import annotations

import pytest
import torch

from autobatch.prediction.tracing.device_names import DeviceNames, without_waiting
from autobatch.prediction.tracing.fake_device import DEVICE, present
from autobatch.prediction.tracing.recording import FakeMode

_WAYS = {
    "a word": lambda t: t.to("cuda"),
    "a word with an index": lambda t: t.to("cuda:3"),
    "a device": lambda t: t.to(torch.device("cuda", 0)),
    "an index": lambda t: t.to(0),
    "by name": lambda t: t.to(device="cuda", dtype=torch.float16),
    "cuda()": lambda t: t.cuda(),
    "a factory": lambda _: torch.zeros(3, device="cuda"),
    "like": lambda t: torch.zeros_like(t, device="cuda:0"),
    "new": lambda t: t.new_zeros(2, device="cuda"),
    "the other tensor's": lambda t: torch.arange(3, device=t.cuda().device),
}


@pytest.mark.apart
@pytest.mark.parametrize("way", _WAYS.values(), ids=_WAYS)
def test_each_way_to_say_cuda_gives_the_fake_card(way):
    """And such a tensor says that it is on one."""
    with present(), FakeMode():
        tensor = torch.empty(4)
        with DeviceNames({"cuda"}):
            moved = way(tensor)
            assert str(moved.device) == DEVICE
            assert moved.is_cuda
            assert not tensor.is_cuda


@pytest.mark.apart
def test_devices_that_are_not_meant_stay():
    """The host is the host, unless the model is on it."""
    with present(), FakeMode():
        with DeviceNames({"cuda"}):
            assert torch.empty(4, device="cuda").cpu().device.type == "cpu"
            assert torch.empty(4).to(torch.float64).device.type == "cpu"
        with DeviceNames({"cuda", "cpu"}):
            assert str(torch.empty(4).to("cpu").device) == DEVICE


def test_waiting_for_a_card_is_left_out_and_comes_back():
    """Nothing runs on the fake one; each function is torch's own again afterwards, also after an error."""
    names = ("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
    before = [getattr(torch.cuda, name) for name in names]
    with pytest.raises(ValueError, match="mine"), without_waiting():
        for name in names:
            assert getattr(torch.cuda, name)() is None
        torch.cuda.synchronize(device=0)
        raise ValueError("mine")
    assert [getattr(torch.cuda, name) for name in names] == before
