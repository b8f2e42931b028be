"""Draws by Python's and NumPy's global generators are the same for a sample in the whole batch and in its parts."""

from __future__ import annotations

import faulthandler
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import autobatch
from autobatch.exactness.determinism import deterministic


class Masked(nn.Module):
    """Multiplies its samples by what ``draw`` makes of their number, and takes the mean of their squares."""

    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.draw = nn.Linear(5, 3), draw

    def forward(self, x):
        drawn = torch.as_tensor(np.asarray(self.draw(len(x)), dtype=np.float32))
        return (self.linear(x) * drawn.reshape(-1, 1)).square().mean()


def spans(count):
    """As transformers masks time steps: one number for all, then choices in a loop."""
    share = np.random.rand()
    return [np.random.choice(np.arange(9), 1 + int(3 * share), replace=False).sum() + share for _ in range(count)]


def distinct():
    """Waits until three numbers of one draw differ."""
    while len(set((drawn := np.random.randint(0, 4, size=3)).tolist())) < 3:
        pass
    return drawn


def pair():
    """Waits until the numbers of two draws differ."""
    while True:
        first, second = np.random.randint(4), random.randrange(4)
        if first != second:
            return first + 2 * second + 1


def waiting(count):
    """A loop that waits for a number, differently long for each sample."""
    found = []
    for _ in range(count):
        number = random.gauss(0, 1)
        while number < 0.5:
            number = random.gauss(0, 1)
        found.append(number)
    return found


EXACT = {
    "once": lambda count: [random.uniform(1, 2)] * count,
    "once, by NumPy": lambda count: [np.random.beta(0.5, 0.5) + 0.1] * count,
    "for each sample": lambda count: [random.random() + 0.1 for _ in range(count)],
    "for each sample, by NumPy": lambda count: [np.random.normal(1.0, 0.1) for _ in range(count)],
    "two for each sample": lambda count: [random.randint(1, 9) * random.choice((1, 2)) for _ in range(count)],
    "one of an array": lambda count: [np.random.rand(1).item() + 0.1] * count,
    "an array for each sample": lambda count: [np.random.rand(3).prod() + 0.1 for _ in range(count)],
    "permutations of features": lambda count: [np.random.permutation(5)[0] + 1 for _ in range(count)],
    "spans": spans,
    "a row for each sample": lambda count: np.random.rand(count, 3)[:, 0] + 0.1,
    "several rows a sample": lambda count: np.random.normal(1.0, 0.3, 2 * count).reshape(count, 2).prod(1),
    "a list": lambda count: random.choices((1.0, 2.0, 5.0), k=count),
    "waiting": waiting,
    "waiting for a pair for each sample": lambda count: [pair() for _ in range(count)],
    "waiting for an array": lambda count: [distinct()[0] + 1] * count,
    "waiting for a pair": lambda count: [pair()] * count,
    "shuffled features": lambda count: [shuffled()[0] for _ in range(count)],
}


def shuffled():
    numbers = [1, 2, 3, 4]
    random.shuffle(numbers)
    return numbers


@pytest.mark.parametrize("name", EXACT)
def test_what_is_drawn_for_a_sample_is_held_still(name):
    """The split is exact, whatever is drawn; generators are as before.

    Numbers that neither calls nor shapes assign to samples are the same where the parts draw them in the whole's order.
    """
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    model = Masked(EXACT[name])
    verdict = autobatch.verify(model, torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), lambda m, x: m(x))
    assert verdict.exact, str(verdict)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.fixture(autouse=True)
def ends_soon():
    """A loop that never ends fails the test."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def divided(drawn):
    """Weights that add up to 1 in each part."""
    return np.asarray(drawn) / np.sum(drawn)


def features(count):
    """Two arrays, each with a number for each sample."""
    return np.random.rand(count) + np.random.rand(count) + 0.1


UNKNOWN = {
    "two arrays": features,
    "indices of samples": lambda count: np.random.randint(0, count, size=count) + 1.0,
    "a list without repetition": lambda count: random.sample(range(1, count + 1), count),
    "a list that adds up to 1": lambda count: divided(random.choices((1.0, 2.0, 5.0), k=count)),
    "columns": lambda count: np.random.randn(3, count).sum(0),
    "weights that add up to 1": lambda count: divided(np.random.rand(count)),
    "centred on the batch": lambda count: (drawn := np.random.randn(count, 2)[:, 0]) - drawn.mean(),
    "an order": lambda count: np.random.permutation(count) + 1.0,
    "different choices": lambda count: np.random.choice(2 * count, count, replace=False) + 1.0,
    "weights from a loop that waits": lambda count: divided(waiting(count)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_draws_whose_samples_are_not_known_give_no_verdict(name):
    """Nothing is promised and no cause is made up, whether they couple samples or not; generators are as before."""
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    model = Masked(UNKNOWN[name])
    verdict = autobatch.verify(model, torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), lambda m, x: m(x))
    assert not verdict.exact
    assert verdict.causes == ()
    assert "cannot be controlled" in verdict.unchecked, str(verdict)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_each_draw_is_one_that_its_call_can_return():
    """A permutation holds each number once, choices without replacement differ, and arrays have many numbers."""
    found = []

    def draw(count):
        found.append(count)
        assert sorted(np.random.permutation(5)) == [*range(5)]
        assert len(set(np.random.choice(9, 3, replace=False).tolist())) == 3
        assert sorted(np.random.permutation(count)) == [*range(count)]
        assert len(set(np.random.choice(count, count, replace=False).tolist())) == count
        assert len(set(np.random.rand(4, 3).ravel().tolist())) == 12
        assert len(set(random.sample(range(count), count))) == count
        assert len({random.random() for _ in range(8)}) == 8
        return [1.0] * count

    assert autobatch.verify(Masked(draw), torch.randn(9, 5), lambda m, x: m(x)).exact
    assert set(found) > {9}


def mixed(model, x):
    return (model.linear(x) * model.linear(x)[torch.from_numpy(np.random.permutation(len(x)))].detach()).mean()


def reordered(model, x):
    order = [*range(len(x))]
    random.shuffle(order)
    return (model.linear(x) * model.linear(x)[order].detach()).mean()


def weighted(model, x):
    """Divides what is drawn for each sample by its sum."""
    drawn = torch.tensor(divided([np.random.rand() for _ in range(len(x))]))
    return (model.linear(x).square().sum(1) * drawn).sum()


def centred(model, x):
    """Subtracts the mean of what is drawn for each sample."""
    drawn = torch.tensor([[random.gauss(0, 1)] for _ in range(len(x))])
    return model.linear(x + drawn - drawn.mean()).square().mean()


@pytest.mark.parametrize("step", [mixed, reordered, weighted, centred])
def test_draws_that_mix_samples_are_still_found(step):
    """Holding them still must not hide that a sample depends on another."""
    batch = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    assert not autobatch.verify(Masked(None), batch, step).exact


def test_functions_are_put_back_and_other_threads_draw_as_ever():
    """The modules' functions are replaced while something is compared only."""
    before = random.random, np.random.rand, random.shuffle
    found = []
    with deterministic(nn.Linear(1, 1), []):
        assert random.random is not before[0]
        thread = threading.Thread(target=lambda: found.append((random.random(), np.random.rand())))
        random.seed(3)
        np.random.seed(3)
        thread.start()
        thread.join()
    assert before == (random.random, np.random.rand, random.shuffle)
    assert found == [(random.Random(3).random(), np.random.RandomState(3).rand())]
