"""``prediction.tracing.fake_device``: a device that exists only while a step is traced, under CUDA's names."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autobatch.prediction.tracing.fake_device import DEVICE, DeviceNames, original_errors, present, without_waiting
from autobatch.prediction.tracing.recording import FakeMode

pytestmark = pytest.mark.apart


def _raise(*_):
    raise ValueError("mine")


def _on_tensor(leaf, hidden):
    hidden.register_hook(_raise)


def _on_leaf(leaf, hidden):
    leaf.register_post_accumulate_grad_hook(_raise)


def _on_node(leaf, hidden):
    hidden.grad_fn.register_hook(_raise)


@pytest.mark.predicts
@pytest.mark.parametrize("place", [_on_tensor, _on_leaf, _on_node])
def test_an_error_in_the_backward_pass_comes_out_as_it_was_raised(place):
    """Where torch's own guard in Python would have the process aborted."""
    with present(), FakeMode():
        leaf = torch.empty(4, 4, device=DEVICE, requires_grad=True)
        hidden = leaf.exp()
        place(leaf, hidden)
        with pytest.raises(ValueError, match="mine"), original_errors():
            hidden.sum().backward()


@pytest.mark.predicts
def test_an_error_while_saved_tensors_are_unpacked_comes_out_too():
    """Recomputation runs there, so an error in it is the user's."""
    with present(), FakeMode():
        leaf = torch.empty(4, 4, device=DEVICE, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, _raise):
            loss = leaf.exp().sum()
        with pytest.raises(ValueError, match="mine"), original_errors():
            loss.backward()


@pytest.mark.predicts
def test_the_device_is_gone_after_a_trace():
    """Nobody who asks for an accelerator is given this one, and the generators of other devices can be forked."""
    available = torch.cuda.is_available()
    with present():
        assert torch.accelerator.is_available()
    assert torch.accelerator.is_available() == available
    assert torch.accelerator.current_accelerator(check_available=True) is None or available
    with torch.random.fork_rng():
        torch.rand(1)


_OTHERS = """
import torch
torch.utils.rename_privateuse1_backend("npu")
from autobatch.errors import InvalidArgument
from autobatch.prediction.tracing.fake_device import register
try:
    register()
except InvalidArgument as error:
    print(error)
"""


@pytest.mark.slow
def test_a_device_of_another_package_is_left_alone():
    """Torch has one slot for such devices: the message names who has it."""
    done = subprocess.run([sys.executable, "-c", _OTHERS], check=False, capture_output=True, text=True)
    assert "'npu'" in done.stdout


_BEFORE = """
import torch
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # autograd's threads start here
from autobatch.prediction.tracing.fake_device import DEVICE, present
from autobatch.prediction.tracing.recording import FakeMode
with present(), FakeMode():
    torch.empty(4, device=DEVICE, requires_grad=True).exp().sum().backward()
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
print(model.weight.grad.device, torch.autograd.is_multithreading_enabled())
"""


@pytest.mark.slow
@pytest.mark.predicts
def test_backward_passes_before_and_after_do_not_matter():
    """Autograd has no thread for a device that came later; the trace needs none, and puts the switch back."""
    done = subprocess.run([sys.executable, "-c", _BEFORE], check=False, capture_output=True, text=True)
    assert done.stdout.split() == ["cpu", "True"], done.stderr


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


@pytest.mark.predicts
@pytest.mark.parametrize("way", _WAYS.values(), ids=_WAYS)
def test_each_way_to_name_cuda_gives_the_fake_card(way):
    """And such a tensor says that it is on one."""
    with present(), FakeMode():
        tensor = torch.empty(4)
        with DeviceNames({"cuda"}):
            moved = way(tensor)
            assert str(moved.device) == DEVICE
            assert moved.is_cuda
            assert not tensor.is_cuda


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
