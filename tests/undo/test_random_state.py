"""Random generators: remembered and put back, bit for bit."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autobatch.undo.random_state import RandomState

CPU = torch.device("cpu")


def draw():
    """A few numbers from every generator, in several distributions: Gaussian ones keep a second number for later."""
    return (
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(5).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
    )


def test_after_a_restore_the_same_numbers_come():
    """From torch, Python and NumPy, as often as it is restored."""
    random.gauss(0, 1)  # in the middle of a pair
    np.random.randn()
    state = RandomState(CPU)
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first
    state.restore()
    assert draw() == first


def test_capturing_draws_nothing():
    """To remember is not to move on."""
    state = RandomState(CPU)
    first = draw()
    state.restore()
    RandomState(CPU)
    assert draw() == first


def test_numpy_is_not_imported_for_this(monkeypatch):
    """A generator that is not loaded has no state that a program could have set."""
    monkeypatch.delitem(sys.modules, "numpy.random")
    state = RandomState(CPU)
    assert state.numpy is None
    state.restore()
    assert "numpy.random" not in sys.modules


def make_backend(names_device):
    """A device module of torch with one generator; MPS's functions took no device before torch 2.13."""
    generator = torch.Generator()

    def get(device):
        assert device == torch.device("xpu", 1)
        return generator.get_state()

    def put(state, device):
        assert device == torch.device("xpu", 1)
        generator.set_state(state)

    functions = (get, put) if names_device else (generator.get_state, generator.set_state)
    return generator, SimpleNamespace(get_rng_state=functions[0], set_rng_state=functions[1])


@pytest.mark.parametrize(("device", "names_device"), [("xpu:1", True), ("mps", False)])
def test_the_device_s_own_generator_is_put_back(monkeypatch, device, names_device):
    """A dropout on another device draws from that device's generator."""
    generator, module = make_backend(names_device)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    state = RandomState(torch.device(device))
    first = torch.rand(3, generator=generator)
    state.restore()
    assert torch.equal(torch.rand(3, generator=generator), first)


@pytest.mark.gpu
def test_a_cuda_dropout_is_repeated():
    """The same mask after a restore."""
    device = torch.device("cuda", torch.cuda.current_device())
    state = RandomState(device)
    first = torch.rand(100, device=device)
    state.restore()
    assert torch.equal(torch.rand(100, device=device), first)
