"""The update: what comes before the optimizer's own step is undone, what comes after is reported."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from workloads import bits_of, differences

import autobatch
from autobatch.errors import CannotRetry
from autobatch.testing import oom_at
from autobatch.training.update import Update

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB"


def make(*, scaled=False, scheduled=False, max_grad_norm=0.5):
    """A model with gradients, its optimizer and scaler, and an update of them."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    if scaler is not None:
        scaler.scale(torch.zeros(()))  # makes its two tensors, as a first loss does
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
    schedulers = [scheduler] if scheduled else []
    plan = autobatch.fit(nn.Linear(3, 2), 4, batch=(torch.ones(4, 3),), step=lambda m, b: m(b[0]).mean(), reuse=False)
    return model, optimizer, Update([optimizer], plan, scaler, max_grad_norm, schedulers)


def prepare(update):
    """What comes before the update."""
    update.make_state()
    update.prepare()


def run(update):
    """All of it."""
    prepare(update)
    update.apply(0)
    update.step_schedulers()


def fail_with(error):
    """A function that raises, whatever it is given."""

    def fail(*arguments, **options):
        raise error

    return fail


@pytest.mark.parametrize("scaled", [False, True])
def test_all_is_prepared_before_anything_moves(scaled):
    """Then gradients are clipped and the state is made; the optimizer and its scheduler step once."""
    model, optimizer, update = make(scaled=scaled, scheduled=True)
    before, steps = model.weight.detach().clone(), []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    prepare(update)
    assert torch.equal(model.weight, before)
    assert float(nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(0.5, rel=1e-5)
    assert len(optimizer.state) == 2
    assert not steps
    update.apply(0)
    update.step_schedulers()
    assert steps == [1]
    assert not torch.equal(model.weight, before)
    assert update.schedulers[0].last_epoch == 1


@pytest.mark.parametrize("scaled", [False, True])
def test_what_was_prepared_can_be_cancelled(scaled):
    """No state, nothing unscaled, nothing moved; a second try goes through."""
    model, optimizer, update = make(scaled=scaled)
    before = bits_of(model, optimizer)
    prepare(update)
    update.cancel()
    for parameter, name in ((model.weight, "weight"), (model.bias, "bias")):
        before[f"gradient {name}"] = parameter.grad.clone()  # .grad is the caller's to put back
    assert not differences(bits_of(model, optimizer), before)
    run(update)


@pytest.mark.parametrize("scaled", [False, True])
def test_memory_that_runs_out_before_the_step_is_the_callers_to_judge(scaled):
    """At any operation up to there: the error itself, and no half-made state."""
    _, _, update = make(scaled=scaled)
    with oom_at(10**9) as counted:
        prepare(update)
    assert counted.operations >= 8
    for position in range(1, counted.operations + 1):
        _, optimizer, update = make(scaled=scaled)
        with oom_at(position), pytest.raises(torch.OutOfMemoryError, match="planned"):
            prepare(update)
        update.cancel()
        assert not optimizer.state
        run(update)


def test_memory_that_ends_after_the_beginning_cannot_be_retried():
    """What happened, what may have moved, and what to do; a scaler can be used again at once."""
    _, optimizer, update = make(scaled=True)
    optimizer.step = fail_with(torch.OutOfMemoryError(OOM))
    with pytest.raises(CannotRetry) as caught:
        run(update)
    assert OOM in str(caught.value)
    assert "load your last checkpoint" in str(caught.value)
    del optimizer.step
    run(update)


@pytest.mark.parametrize("place", ["optimizer", "scheduler"])
def test_any_other_error_after_the_beginning_comes_out_unchanged(place):
    """It is the user's own optimizer's or scheduler's."""
    _, _, update = make(scaled=True, scheduled=place == "scheduler")
    broken, error = getattr(update, f"{place}s")[0], ValueError("the user's own")
    broken.step = fail_with(error)
    with pytest.raises(ValueError, match="own") as caught:
        run(update)
    assert caught.value is error
    del broken.step
    run(update)


def test_casts_of_weights_that_have_moved_are_not_kept():
    """Autocast would go on with them to the end of its block, here one around two updates."""
    model, _, update = make()
    inputs = torch.ones(1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(inputs)
        run(update)
        assert not torch.equal(model(inputs), before)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize("where", ["optimizer", "scheduler"])
def test_an_interrupt_in_the_update_says_that_it_had_begun(where):
    """Whoever catches it and goes on has to know that parameters may have moved."""
    _, optimizer, update = make(scheduled=True)
    stepped = optimizer if where == "optimizer" else update.schedulers[0]
    stepped.step = fail_with(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        run(update)
    assert [note for note in caught.value.__notes__ if note.startswith("the update had begun: ")]
