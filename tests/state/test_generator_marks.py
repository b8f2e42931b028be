"""A mark changes whenever Python's or NumPy's global generator was drawn from, and only then."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from autobatch.state import generator_marks
from autobatch.state.generator_marks import mark_numpy, mark_python
from autobatch.state.random_state import HostRandomState

pytestmark = pytest.mark.quick

PYTHON = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "choices": lambda: random.choices([1, 2], k=3),
    "getrandbits": lambda: random.getrandbits(7),
    "seed": lambda: random.seed(5),
}
NUMPY = {
    "rand": lambda: np.random.rand(3),
    "randn": lambda: np.random.randn(1),
    "permutation": lambda: np.random.permutation(9),
    "randint": lambda: np.random.randint(4),
    "seed": lambda: np.random.seed(5),
}


@pytest.mark.parametrize("name", PYTHON)
def test_pythons_generator(name):
    """Each way to draw is seen, the second number of a pair too, and putting the state back is seen as well."""
    for _ in range(3):
        state, before = random.getstate(), mark_python()
        assert mark_python() == before
        PYTHON[name]()
        assert mark_python() != before or name == "seed"
        random.setstate(state)
        assert mark_python() == before
        PYTHON[name]()


@pytest.mark.parametrize("name", NUMPY)
def test_numpys_generator(name):
    """As Python's, through what remembers it: where a second number waits, the whole state is compared."""
    for _ in range(3):
        before = HostRandomState.capture()
        assert before.is_current()
        NUMPY[name]()
        assert not before.is_current() or name == "seed"
        before.restore()
        assert before.is_current()
        NUMPY[name]()


def test_an_unchanged_state_is_not_read_again():
    """The earlier one is taken over, and not where something was drawn."""
    first = HostRandomState.capture()
    assert HostRandomState.capture(first) is first
    random.random()
    second = HostRandomState.capture(first)
    assert second is not first
    np.random.rand()
    assert HostRandomState.capture(second) is not second


@pytest.mark.parametrize("lost", ["Python's layout", "NumPy's layout", "NumPy's function"])
def test_where_the_layout_is_unknown_the_public_state_is_read(lost, monkeypatch):
    """Slower, and as exact."""
    if lost == "Python's layout":
        monkeypatch.setattr(generator_marks, "_ADDRESS", 0)
    elif lost == "NumPy's layout":
        monkeypatch.setattr(generator_marks, "_known", dict.fromkeys(generator_marks._known or {0: True}, False))
        monkeypatch.setattr(generator_marks, "_holds_numpy", lambda *_: False)
    else:
        monkeypatch.delattr(sys.modules["numpy.random"], "get_bit_generator")
    before = HostRandomState.capture()
    assert before.marks is None
    assert HostRandomState.capture(before) is not before
    assert before.is_current()
    for draw in (random.random, np.random.rand):
        draw()
        assert not before.is_current()
        before.restore()
        assert before.is_current()


def test_another_bit_generator_is_followed():
    """NumPy's global generator can be another one than a Mersenne twister."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        assert mark_numpy() is None
        state = HostRandomState.capture()
        first = np.random.rand()
        assert not state.is_current()
        state.restore()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(before)
