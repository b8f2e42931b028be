"""Gradients that are summed while the last backward pass runs: the same bits as after it, or a new run."""

import pytest
import torch
import torch.distributed as dist
from builders.overlapping import BEGUN, STEPS, Mixed, Narrow, Net, Reentrant, Tied, Training, attempt
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import differences, full_batch_gradient, gradients_of, mean_step, relative_error

import autobatch


def count_tokens(batch):
    return float((batch[1] + 1).sum())


def state_count(model, batch):
    return autobatch.Sum(mean_step(model, batch) * count_tokens(batch), count_tokens(batch))


def weigh_terms(batch):
    return {"fit": len(batch[0]), "size": count_tokens(batch)}


def terms(model, batch):
    weights = (batch[1] + 1).double()
    sizes = model(batch[0]).square().mean(1)
    return {"fit": mean_step(model, batch), "size": (sizes * weights).sum() / weights.sum()}


def sum_terms(model, batch):
    return sum(terms(model, batch).values())


CASES = {
    "plain": {},
    "ragged": {"shares": [9, 2, 5]},
    "weigh": {"weigh": count_tokens},
    "stated": {"step": state_count},
    "terms": {"step": terms, "weigh": weigh_terms},
    "tied": {"make_model": Tied},
    "narrow": {"make_model": Narrow, "shares": [4, 2, 3]},
    "two dtypes": {"make_model": Mixed},
    "clipped": {"max_grad_norm": 0.1},
    "scaled": {"scaler": "cpu"},
}


def compare(name):
    """How many steps overlapped; whether bits differ from sums afterwards; the error of a gradient against one rank."""
    options = dict(CASES[name])
    if "shares" in options:
        options["shares"] = options["shares"][: dist.get_world_size()]
    training, other = Training(**options), Training(**options, overlaps=False)
    losses = [float(result.loss) for result in training.run()]
    overlapped = len(BEGUN)
    assert losses == [float(result.loss) for result in other.run()]
    assert len(BEGUN) == overlapped
    changed = differences(training.bits(), other.bits())
    training.optimizer.zero_grad()
    training.runner.accumulate(training.batch)
    step = sum_terms if name == "terms" else mean_step
    if name in {"plain", "ragged", "terms", "tied"}:
        expected = full_batch_gradient(training.model.module, step, training.whole)
        error = relative_error(gradients_of(training.model.module), expected)
    else:
        error = 0.0
    return overlapped, changed, error


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_sum_has_the_same_bits_during_the_backward_pass_and_after_it(name, size):
    """And it is that of the whole batch."""
    for overlapped, changed, error in values_of(run_ranks(compare, name, size=size, timeout_seconds=30)):
        assert overlapped == STEPS - 2
        assert changed == []
        assert error < 1e-12


def accumulate(clears):
    """How many of three accumulations overlapped; differing gradients; the error against one rank."""
    pair = [Training(), Training(overlaps=False)]
    for training in pair:
        training.run(3)
    BEGUN.clear()
    for training in pair:
        for _ in range(3):
            if clears:
                training.optimizer.zero_grad()
            training.runner.accumulate(training.batch)
    first, second = (gradients_of(training.model.module) for training in pair)
    times = 1 if clears else 3
    whole = full_batch_gradient(pair[0].model.module, mean_step, pair[0].whole)
    expected = {key: None if value is None else value * times for key, value in whole.items()}
    changed = [key for key, value in first.items() if value is not None and not value.equal(second[key])]
    return len(BEGUN), changed, relative_error(first, expected)


@pytest.mark.parametrize(("clears", "most"), [(True, 3), (False, 1)])
def test_accumulated_gradients_are_summed_in_the_pass_unless_there_were_earlier_ones(clears, most):
    """Earlier gradients are added once, after the sum."""
    for overlapped, changed, error in values_of(run_ranks(accumulate, clears, size=2, timeout_seconds=30)):
        assert overlapped == most
        assert changed == []
        assert error < 1e-12


class TwiceInLast(Net):
    """The gradients of the first bucket are written again when all later buckets have been summed."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 6).double()

    def forward(self, inputs):
        inputs = checkpoint(self.last, inputs.clone().requires_grad_(), use_reentrant=True)
        return checkpoint(self.last, self.body(inputs).tanh(), use_reentrant=True)[:, :4]


class Late(Net):
    """It makes a parameter in a forward pass, once."""

    makes_scale = False

    def forward(self, inputs):
        if self.makes_scale and not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        found = super().forward(inputs)
        return found * self.scale if self.makes_scale else found


def vary(kind):
    """Outcome of steps whose gradients are others than in the steps before, and what differs from sums afterwards."""
    models = {"written twice": Reentrant, "first bucket twice": TwiceInLast, "a parameter made in forward": Late}
    make_model = models.get(kind, Net)
    found = []
    pair = [Training(make_model), Training(make_model, overlaps=False)]
    for training in pair:
        training.run(3)
        net = training.model.module
        if kind == "frozen":
            net.body[2].requires_grad_(False)
        elif kind == "a parameter more":
            net.uses_spare = True
        elif kind == "a parameter more on one rank":
            net.uses_spare = dist.get_rank() == 1
        elif kind == "a parameter made in forward":
            net.makes_scale = True
        elif kind == "a parameter less":
            net.head.forward = lambda inputs, net=net: inputs[:, :4] * 1.0
        elif kind == "earlier gradients":
            training.runner.accumulate(training.batch)
        elif kind == "no samples on one rank" and dist.get_rank() == 1:
            training.runner.step(None)
        elif kind == "no samples on one rank":
            training.runner.step(training.batch)
        training.run(2)
        found.append(training.ranks.have_varied)
    first, second = (training.bits() for training in pair)
    return found[0], differences(first, second)


VARIES = {
    "frozen": False,
    "a parameter more": True,
    "a parameter more on one rank": True,
    "a parameter made in forward": False,
    "a parameter less": True,
    "earlier gradients": False,
    "no samples on one rank": False,
    "written twice": True,
    "first bucket twice": True,
}


@pytest.mark.parametrize("kind", VARIES)
def test_gradients_other_than_expected_are_never_summed_wrongly(kind):
    """All ranks run the step again if need be, and sum after the backward pass."""
    for has_varied, changed in values_of(run_ranks(vary, kind, size=2, timeout_seconds=30)):
        assert has_varied == VARIES[kind]
        assert changed == []


class Embedded(Net):
    """The gradients of its embedding may become sparse."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 6, dtype=torch.float64)

    def forward(self, inputs):
        return super().forward(inputs + self.embedding(inputs.argmax(1) % 4))


def become_sparse(shares):
    """Number of sums that began in a pass with a sparse gradient on one rank; the outcome, and that of the next."""
    training = Training(Embedded, shares)
    training.run(3)
    BEGUN.clear()
    training.model.module.embedding.sparse = dist.get_rank() == 1
    outcome, overlapped = attempt(training), len(BEGUN)
    training.model.module.embedding.sparse = False
    return overlapped, outcome, attempt(training)


@pytest.mark.parametrize(("shares", "times"), [([4, 4], 1), ([8, 8], 0)])
def test_a_sparse_gradient_is_refused_before_the_last_pass_and_in_it(shares, times):
    """All ranks undo the step."""
    for overlapped, outcome, after in values_of(run_ranks(become_sparse, shares, size=2, timeout_seconds=30)):
        assert overlapped == times
        assert "sparse gradients are not summed" in outcome[0]
        assert outcome[1] == []
        assert after[1] == 0


class Viewed(Net):
    """The gradient of a view is the tensor that the rest of the backward pass reads."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in ((16, 2), (2, 6)))
        self.base, self.offset = (nn.Parameter(torch.randn(96, dtype=torch.float64)) for _ in range(2))

    def make_weight(self):
        return (self.left @ self.right).exp() + self.base.view(16, 6)

    def forward(self, inputs):
        return super().forward(nn.functional.linear(inputs, self.make_weight())[:, :6])


class ViewedTwice(Viewed):
    """And the gradient of another view."""

    def make_weight(self):
        return super().make_weight() + self.offset.view(16, 6)


def share_memory(make_model, overlaps):
    training = Training(make_model, [4, 4], overlaps=overlaps)
    expected = full_batch_gradient(training.model.module, mean_step, training.whole)
    for _ in range(STEPS):
        training.optimizer.zero_grad()
        training.runner.accumulate(training.batch)
    return len(BEGUN), relative_error(gradients_of(training.model.module), expected)


@pytest.mark.parametrize("make_model", [Viewed, ViewedTwice])
@pytest.mark.parametrize("overlaps", [True, False])
def test_gradients_that_share_memory_are_summed_once(make_model, overlaps):
    """And nothing that the rest of the backward pass reads is written over."""
    for overlapped, error in values_of(run_ranks(share_memory, make_model, overlaps, size=2, timeout_seconds=30)):
        assert (overlapped > 0) == overlaps
        assert error < 1e-12


def sum_unlike_ranks():
    """Exchanges in each of the last steps, if only one rank sums several micro-batches' gradients in float32."""
    training = Training(Narrow, [4, 8])
    training.run(4)
    before = training.ranks.channel.exchanges
    training.run(4)
    return (training.ranks.channel.exchanges - before) / 4


def test_a_rank_does_not_hold_its_last_pass_back_for_one_that_never_can():
    """It would begin that pass when the other has ended its step."""
    assert values_of(run_ranks(sum_unlike_ranks, size=2, timeout_seconds=30)) == [1, 1]
