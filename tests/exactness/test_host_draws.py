"""Draws by Python's and NumPy's global generators are the same for a sample in the whole batch and in its parts."""

from __future__ import annotations

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
        """A mean over samples."""
        drawn = torch.as_tensor(np.asarray(self.draw(len(x)), dtype=np.float32))
        return (self.linear(x) * drawn.reshape(-1, 1)).square().mean()


def spans(count):
    """As transformers masks time steps: one number for all, then choices in a loop."""
    share = np.random.rand()
    return [np.random.choice(np.arange(9), 1 + int(3 * share), replace=False).sum() + share for _ in range(count)]


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
    "a row for each sample": lambda count: np.random.rand(count, 3)[:, 0] + 0.1,
    "permutations of features": lambda count: [np.random.permutation(5)[0] + 1 for _ in range(count)],
    "spans": spans,
    "waiting": waiting,
    "shuffled features": lambda count: [shuffled()[0] for _ in range(count)],
}


def shuffled():
    """Numbers in another order."""
    numbers = [1, 2, 3, 4]
    random.shuffle(numbers)
    return numbers


@pytest.mark.parametrize("name", EXACT)
def test_what_is_drawn_for_a_sample_is_held_still(name):
    """The split is exact, whatever is drawn; generators are as before."""
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    model = Masked(EXACT[name])
    verdict = autobatch.verify(model, torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), lambda m, x: m(x))
    assert verdict.exact, str(verdict)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def mixed(model, x):
    """Pairs samples by what NumPy draws."""
    return (model.linear(x) * model.linear(x)[torch.from_numpy(np.random.permutation(len(x)))].detach()).mean()


def reordered(model, x):
    """Pairs samples by what Python draws."""
    order = [*range(len(x))]
    random.shuffle(order)
    return (model.linear(x) * model.linear(x)[order].detach()).mean()


@pytest.mark.parametrize("step", [mixed, reordered])
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
