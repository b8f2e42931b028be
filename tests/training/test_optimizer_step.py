"""The update: what comes before the optimizer's own step is undone, what comes after is reported."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from workloads import bits_of, differences

from autobatch.errors import CannotRetry, DoesNotFit
from autobatch.testing import oom_at
from autobatch.training.optimizer_step import Update

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB"


def make(*, scaled=False, scheduled=False, check_memory=lambda: None, max_grad_norm=0.5):
    """A model with gradients, its optimizer and scaler, and an update of them."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    if scaler is not None:
        scaler.scale(torch.zeros(()))  # makes its two tensors, as a first loss does
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
    advise = lambda: "so load your last checkpoint"  # noqa: E731 - one word for one argument
    schedulers = [scheduler] if scheduled else []
    return model, optimizer, Update([optimizer], check_memory, advise, scaler, max_grad_norm, schedulers)


def fail_with(error):
    """A function that raises, whatever it is given."""

    def fail(*arguments, **options):
        raise error

    return fail


@pytest.mark.parametrize("scaled", [False, True])
def test_the_beginning_is_told_once_right_before_the_optimizers_step(scaled):
    """When it is reported all is prepared and nothing has moved."""
    model, optimizer, update = make(scaled=scaled, scheduled=True)
    before, order = model.weight.detach().clone(), []

    def begin():
        order.append("begin")
        assert torch.equal(model.weight, before)
        assert float(nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(0.5, rel=1e-5)
        assert len(optimizer.state) == 2

    optimizer.register_step_pre_hook(lambda *_: order.append("step"))
    update.run(begin)
    assert order == ["begin", "step"]
    assert not torch.equal(model.weight, before)
    assert update.schedulers[0].last_epoch == 1


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("error", [DoesNotFit("no room"), KeyboardInterrupt(), torch.OutOfMemoryError(OOM)], ids=repr)
@pytest.mark.parametrize("where", ["room", "begin"])
def test_what_is_raised_before_the_beginning_has_not_happened(where, error, scaled):
    """No state, nothing unscaled, nothing moved, and the error itself comes out; a second try goes through."""
    checks = [fail_with(error)] if where == "room" else []
    model, optimizer, update = make(scaled=scaled, check_memory=lambda: checks.pop()() if checks else None)
    before = bits_of(model, optimizer)
    with pytest.raises(type(error)) as caught:
        update.run(fail_with(error) if where == "begin" else lambda: None)
    assert caught.value is error
    for parameter, name in ((model.weight, "weight"), (model.bias, "bias")):
        before[f"gradient {name}"] = parameter.grad.clone()  # .grad is the caller's to put back
    assert not differences(bits_of(model, optimizer), before)
    update.run(lambda: None)


@pytest.mark.parametrize("scaled", [False, True])
def test_memory_that_ends_before_the_beginning_is_the_callers_to_judge(scaled):
    """At any operation up to there: the error itself, and no half-made state."""
    seen, (_, _, update) = [], make(scaled=scaled)
    with oom_at(10**9) as counted:
        update.run(lambda: seen.append(counted.operations))
    assert seen[0] >= 8
    for position in range(1, seen[0] + 1):
        _, optimizer, update = make(scaled=scaled)
        with oom_at(position), pytest.raises(torch.OutOfMemoryError, match="planned"):
            update.run(lambda: None)
        assert not optimizer.state
        update.run(lambda: None)


def test_memory_that_ends_after_the_beginning_cannot_be_retried():
    """What happened, what may have moved, and what to do; a scaler can be used again at once."""
    _, optimizer, update = make(scaled=True)
    optimizer.step = fail_with(torch.OutOfMemoryError(OOM))
    with pytest.raises(CannotRetry) as caught:
        update.run(lambda: None)
    assert str(caught.value) == (
        f"memory ended inside the optimizer's step (OutOfMemoryError: {OOM}): parameters may have moved, so load your "
        f"last checkpoint"
    )
    del optimizer.step
    update.run(lambda: None)


@pytest.mark.parametrize("place", ["optimizer", "scheduler"])
def test_any_other_error_after_the_beginning_comes_out_unchanged(place):
    """It is the user's own optimizer's or scheduler's."""
    _, _, update = make(scaled=True, scheduled=place == "scheduler")
    broken, error = getattr(update, f"{place}s")[0], ValueError("the user's own")
    broken.step = fail_with(error)
    with pytest.raises(ValueError, match="own") as caught:
        update.run(lambda: None)
    assert caught.value is error
    del broken.step
    update.run(lambda: None)


def test_casts_of_weights_that_have_moved_are_not_kept():
    """Autocast would go on with them to the end of its block, here one around two updates."""
    model, _, update = make()
    inputs = torch.ones(1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(inputs)
        update.run(lambda: None)
        assert not torch.equal(model(inputs), before)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize("where", ["optimizer", "scheduler"])
def test_an_interrupt_in_the_update_says_that_it_had_begun(where):
    """Whoever catches it and goes on has to know that parameters may have moved."""
    _, optimizer, update = make(scheduled=True)
    stepped = optimizer if where == "optimizer" else update.schedulers[0]
    stepped.step = fail_with(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        update.run(lambda: None)
    assert [note for note in caught.value.__notes__ if note.startswith("the update had begun: ")]


def test_an_interrupt_before_the_update_says_nothing():
    """All is as before."""
    _, _, update = make(check_memory=fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as caught:
        update.run(lambda: None)
    assert not getattr(caught.value, "__notes__", [])
