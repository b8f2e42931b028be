"""A mark changes whenever Python's or NumPy's global generator was drawn from, and only then."""

from __future__ import annotations

import random
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from autobatch.state import generator_marks
from autobatch.state.generator_marks import copy_python, mark_numpy, mark_python, restore_python
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


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize("is_known", [True, False])
def test_pythons_state_is_restored_bit_for_bit(name, is_known, monkeypatch):
    """From its bytes, and from the public state where these are not known; twice, as a second number may wait."""
    if not is_known:
        monkeypatch.setattr(generator_marks, "_MEMORY", None)
    for _ in range(2):
        state, copied = random.getstate(), copy_python()
        assert isinstance(copied[0], bytes) == is_known
        PYTHON[name]()
        restore_python(copied)
        assert random.getstate() == state
        PYTHON[name]()


def test_numpys_state_is_not_read_again_where_only_pythons_moved(monkeypatch):
    """Reading it takes the longest, and a step's data is often shuffled with one of the two."""
    np.random.seed(3)  # no second number waits
    first = HostRandomState.capture()
    monkeypatch.setattr(np.random, "get_state", lambda **_: pytest.fail("read again"))
    random.random()
    second = HostRandomState.capture(first)
    assert second.numpy is first.numpy
    expected = random.random()
    np.random.rand()
    second.restore()
    assert random.random() == expected


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
        monkeypatch.setattr(generator_marks, "_MEMORY", None)
    elif lost == "NumPy's layout":
        monkeypatch.setattr(generator_marks, "_latest", [None, None])
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


def wrap(monkeypatch):
    """As a tool that logs calls does."""
    original = random.getstate
    monkeypatch.setattr(random, "getstate", lambda *_: original())


def rebind(monkeypatch):
    """As a program that has given itself another global generator."""
    other = random.Random(3)
    for name in ("getstate", "setstate", "random", "seed"):
        monkeypatch.setattr(random, name, getattr(other, name))


@pytest.mark.parametrize("replace", [wrap, rebind])
def test_a_replaced_getstate_is_asked_itself(replace, monkeypatch):
    """Whenever it was replaced, also before the first import."""
    for source in ("before", "after"):
        if source == "before":
            before = HostRandomState.capture()
        replace(monkeypatch)
        assert mark_python() is None
        state = HostRandomState.capture(before)
        assert state is not before
        first = random.random()
        assert not state.is_current()
        state.restore()
        assert state.is_current()
        assert random.random() == first
        runpy.run_path(generator_marks.__file__)


def test_another_bit_generator_at_the_same_address_is_another_one(monkeypatch):
    """Memory of one that is gone is used again; its layout is not the one before's."""
    before, numpy = np.random.get_bit_generator(), sys.modules["numpy.random"]
    assert mark_numpy() is not None
    stand_in = SimpleNamespace(ctypes=SimpleNamespace(state_address=before.ctypes.state_address))
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        monkeypatch.setattr(numpy, "get_bit_generator", lambda: stand_in)
        assert mark_numpy() is None
    finally:
        np.random.set_bit_generator(before)


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
