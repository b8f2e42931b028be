"""The CPU as a device: one count and one budget a thread, whoever asks for them."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autobatch.memory import cpu
from autobatch.memory.cpu import CpuDevice
from autobatch.memory.host_limit import read_host_memory

ROOMY = 2**60


def allocate(byte_count):
    return torch.empty(byte_count, dtype=torch.uint8)


def beyond(byte_count):
    """A budget of so many bytes more than what is counted now."""
    return CpuDevice().usage().allocated + byte_count


def is_refused(byte_count):
    """Whether a tensor of this size passes the budget in force."""
    try:
        allocate(byte_count)
    except torch.OutOfMemoryError:
        return True
    return False


def test_what_is_held_is_available_too(monkeypatch):
    """A budget is for all tensors together: those that are there count as available to it."""
    device, host = CpuDevice(), read_host_memory()
    monkeypatch.setattr(cpu, "read_host_memory", lambda: host)  # others use memory meanwhile
    before = device.available_bytes()
    held = allocate(2**33)  # never written: it has no pages
    device.watch([held])
    assert before == host.available_bytes
    assert device.available_bytes() == before + held.nbytes


def test_usage_follows_what_is_made_and_freed():
    """Allocated falls at once, the peak stays until it is reset."""
    device = CpuDevice()
    gc.collect()
    with device.limit(ROOMY):
        device.reset_peak()
        base = device.usage().allocated
        held = allocate(1000)
        allocate(5000)
        usage = device.usage()
        assert (usage.allocated - base, usage.peak_allocated - base) == (1000, 6000)
        assert (usage.reserved, usage.peak_reserved) == (usage.allocated, usage.peak_allocated)
        device.reset_peak()
        assert device.usage().peak_allocated - base == 1000
    del held
    assert device.usage().allocated == base


def test_tensors_from_before_count_once_they_are_watched():
    """Parameters and batches were made outside any limit."""
    device = CpuDevice()
    model = nn.Linear(10, 10, bias=False)
    base = device.usage().allocated
    device.watch([model.weight, model.weight[1:], model.weight.detach()])
    assert device.usage().allocated - base == 400


def test_beyond_the_budget_is_an_out_of_memory_error():
    """What fits goes through, the byte more does not, and what it asked for is not held."""
    device = CpuDevice()
    base = device.usage().allocated
    with device.limit(beyond(1000)):
        assert not is_refused(1000)
        assert is_refused(1001)
        assert device.usage().allocated == base


@pytest.mark.parametrize("same_object", [True, False])
def test_the_inner_of_two_limits_holds_inside(same_object):
    """Tighter or wider, by the same device object or another; the outer one is put back at the end."""
    outer = CpuDevice()
    inner = outer if same_object else CpuDevice()
    with outer.limit(beyond(1000)):
        with inner.limit(beyond(100)):
            assert is_refused(500)
        assert not is_refused(500)
        with inner.limit(beyond(10000)):
            assert not is_refused(5000)
        assert is_refused(5000)
    assert not is_refused(10**6)


def test_an_error_inside_puts_the_outer_limit_back():
    """An out-of-memory error, or any other, ends the inner limit and both."""
    device = CpuDevice()
    with pytest.raises(KeyboardInterrupt), device.limit(beyond(1000)):
        with pytest.raises(torch.OutOfMemoryError), device.limit(beyond(10)):
            allocate(11)
        assert not is_refused(500)
        assert is_refused(5000)
        raise KeyboardInterrupt
    assert not is_refused(10**6)
    assert _get_current_dispatch_mode_stack() == []


def test_a_limit_is_of_the_thread_that_entered_it():
    """Two threads have two budgets; what one of them makes, the other's budget does not see."""
    device, answers = CpuDevice(), {}

    def work():
        answers["without"] = is_refused(5000)
        with CpuDevice().limit(beyond(100)):
            answers["own"] = is_refused(5000)

    with device.limit(beyond(1000)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert answers == {"without": False, "own": True}
        assert is_refused(5000)
        assert not is_refused(500)


def test_backward_is_inside_the_limit_too():
    """Autograd runs a CPU graph in the thread that called it."""
    device, weight = CpuDevice(), torch.ones(1000, requires_grad=True)
    loss = weight.sum()
    with device.limit(beyond(100)), pytest.raises(torch.OutOfMemoryError):
        (loss * 1).backward()
    assert weight.grad is None or weight.grad.stride() == (0,)


def test_what_is_first_called_inside_a_limit_is_still_compiled_outside():
    """A budget is a dispatch mode, under which dynamo would give up a function for ever."""
    device, counter = CpuDevice(), CompileCounter()

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, inputs):
            return (inputs * self.weight).sin()

    compiled, inputs = torch.compile(Layer(), backend=counter), torch.ones(4)
    with device.limit(ROOMY):
        compiled(inputs).sum().backward()
        assert counter.frame_count == 0
    compiled(inputs)
    assert counter.frame_count == 1
    with device.limit(ROOMY):
        compiled(inputs)
    compiled(inputs)
    assert counter.frame_count == 1


def test_reclaim_frees_what_a_cycle_holds():
    """A tensor in a reference cycle counts until the cycle is collected."""
    device = CpuDevice()
    device.reclaim()  # what other tests left
    gc.disable()
    try:
        base = device.usage().allocated
        cycle = [allocate(1000)]
        cycle.append(cycle)
        device.watch(cycle[:1])
        reference = weakref.ref(cycle[0])
        del cycle
        assert device.usage().allocated - base == 1000
        device.reclaim()
        assert reference() is None
        assert device.usage().allocated == base
    finally:
        gc.enable()
