"""Predictions in a process that uses a card: before and after its first backward pass.

A prediction runs backward passes in a child process, and after torch has started autograd's threads for a card no plain
fork can run any.
"""

from __future__ import annotations

import logging

import pytest
import torch
from nets import GPT, step, tokens
from torch.nn import functional as F

import autobatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BUDGET = "256MiB"
TARGET = 4096


def train(model, batch):
    """One backward pass on the card, as training runs it."""
    ids, labels = (tensor.cuda() for tensor in batch)
    step(model, (ids, labels)).backward()
    model.zero_grad()


def fit(model, optimizer, batch):
    """A plan found by trials in a small budget."""
    return autobatch.fit(
        model, TARGET, batch=batch, step=step, optimizer=optimizer, budget=BUDGET, reuse=False, check=None
    )


@pytest.fixture
def gpt():
    """A model on the card, its optimizer and a batch in CPU memory."""
    model = GPT().cuda()
    return model, torch.optim.AdamW(model.parameters()), tokens()


def expected_nothing(caplog):
    """Whether a search began without a prediction, with the reason."""
    return [record.getMessage() for record in caplog.records if "nothing is expected" in record.getMessage()]


@pytest.mark.parametrize("history", ["nothing", "a fit", "training"])
def test_a_search_begins_with_a_prediction(gpt, caplog, history):
    """Whatever has run in the process before: the first trial is of many samples, none runs out of memory."""
    caplog.set_level(logging.DEBUG, logger="autobatch")
    model, optimizer, batch = gpt
    if history == "a fit":
        fit(model, optimizer, batch)
    if history == "training":
        train(model, batch)
    trials = fit(model, optimizer, batch).trials
    assert expected_nothing(caplog) == []
    assert trials[0].micro_batch_size > 2
    assert {trial.outcome for trial in trials} == {"fits"}


def test_a_prediction_after_training_is_that_of_before(gpt):
    """The step is traced as it was, and the model is where it was."""
    model, optimizer, batch = gpt
    before = autobatch.predict(model, batch, step, optimizer, gpu="T4")
    train(model, batch)
    after = autobatch.predict(model, batch, step, optimizer, gpu="T4")
    assert (before.points, before.breakdown) == (after.points, after.breakdown)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}


def test_the_child_does_not_touch_the_card(gpt):
    """A step that seeds the card and waits for it is traced: neither reaches a driver that the child cannot use."""
    model, optimizer, batch = gpt

    def seeding(model, batch):
        torch.manual_seed(3)
        torch.cuda.synchronize()
        return step(model, batch) + 0 * F.dropout(batch[0].float(), 0.1).mean()

    train(model, batch)
    state = torch.cuda.get_rng_state()
    assert autobatch.predict(model, batch, seeding, optimizer, gpu="T4").plan is not None
    assert torch.equal(torch.cuda.get_rng_state(), state)
