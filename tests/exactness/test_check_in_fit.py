"""``fit(check=)``: what the check of a split costs, says and stops."""

from __future__ import annotations

import logging

import pytest
import torch
from splits import NOT_DETERMINISTIC, RIGHT, WRONG, sum_loss, with_batch_norm
from torch import nn
from workloads import Everything, Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import InexactSplit, InvalidArgument
from autobatch.testing import FakeDevice, oom_at


def fit_case(case, **options):
    make_model, step, weigh, batch, *_ = case
    torch.manual_seed(0)
    return autobatch.fit(make_model(), 64, batch=batch, step=step, weigh=weigh, max_micro_batch=16, **options)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_split_is_warned_of_with_its_cause(name):
    """By default the plan is made, and warns; what was found is in it."""
    plan = fit_case(WRONG[name])
    [warning] = [warning for warning in plan.warnings if "not exact" in warning]
    assert WRONG[name][-1] in warning
    assert warning == str(plan.verdict)
    assert warning in plan.explain()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_split_is_not_warned_of(name):
    """No false alarm, under ``check="raise"`` either; the explanation says that it was checked."""
    plan = fit_case(RIGHT[name], check="raise")
    assert plan.verdict.exact
    assert not [warning for warning in plan.warnings if "exact" in warning]
    assert f"{plan.verdict} ({plan.verdict.seconds:.1f} s)" in plan.explain()


def test_a_wrong_split_is_refused_where_that_is_asked_for():
    """``check="raise"`` ends with the verdict's own words, and leaves no trace."""
    model = Everything()
    before = bits_of(model)
    with pytest.raises(InexactSplit, match=r"BatchNorm in train mode \(norm\)"):
        autobatch.fit(model, 64, batch=make_batch(8), step=mean_step, max_micro_batch=16, check="raise")
    assert differences(bits_of(model), before) == []


def test_nothing_is_checked_where_nobody_asks():
    """No verdict, no warning, not even of BatchNorm."""
    plan = autobatch.fit(Everything(), 64, batch=make_batch(8), step=mean_step, max_micro_batch=16, check=None)
    assert plan.verdict is None
    assert not [warning for warning in plan.warnings if "exact" in warning]


def test_a_plan_that_does_not_split_is_checked_and_not_warned_of():
    """A retry may split it one day, and is to say then what that means."""
    plan = autobatch.fit(Everything(), 64, batch=make_batch(8), step=mean_step, check="raise")
    assert plan.micro_batch_sizes == (64,)
    assert not plan.verdict.exact
    assert "BatchNorm" in plan.explain()
    assert not [warning for warning in plan.warnings if "exact" in warning]


@pytest.mark.parametrize("name", ["class weights", "a token mean by rows"])
def test_a_sorted_batch_is_looked_at_from_first_to_last(name):
    """The first samples of a sorted batch are alike in what matters."""
    make_model, step, weigh, batch, cause = WRONG[name]
    torch.manual_seed(0)
    repeated = {key: value.repeat_interleave(8, 0) for key, value in batch.items()} if isinstance(batch, dict) else None
    if repeated is None:
        inputs, labels = (part.repeat_interleave(8, 0) for part in batch)
        order = labels.argsort()
        repeated = (inputs[order], labels[order])
    plan = autobatch.fit(make_model(), 64, batch=repeated, step=step, weigh=weigh, max_micro_batch=16)
    assert not plan.verdict.exact
    assert cause in str(plan.verdict)


@pytest.mark.parametrize("max_micro_batch", [16, None], ids=["split", "whole"])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [(lambda loss: loss * float("nan"), "not finite"), (lambda loss: loss * 0, "count for nothing")],
)
def test_what_could_not_be_checked_is_a_warning(wrong, reason, max_micro_batch):
    """Whether the plan splits or a retry will be the first to: it says so, in its warnings and in its story."""
    options = {"batch": make_batch(16), "step": lambda m, b: wrong(mean_step(m, b)), "max_micro_batch": max_micro_batch}
    plan = autobatch.fit(Plain(torch.float32), 64, **options)
    [warning] = [warning for warning in plan.warnings if reason in warning]
    assert warning == str(plan.verdict)
    assert reason in plan.explain()


def fit_unchecked(reason, *case, **options):
    """The plan, which warns of what ``check="raise"`` refuses."""
    with pytest.raises(InexactSplit, match="could not be checked whether splitting is exact") as caught:
        fit_case(case, check="raise", **options)
    plan = fit_case(case, **options)
    assert reason in str(caught.value)
    assert plan.verdict.unchecked in str(caught.value)
    assert str(plan.verdict) in plan.warnings
    assert plan.verdict.unchecked in plan.explain()
    return plan


@pytest.mark.parametrize("case", ["one sample", "samples alike", "not finite", "nothing counts"])
def test_what_could_not_be_checked_is_refused_where_exactness_is_asked_for(case):
    """``check="raise"`` ends with the reason; without it the plan is made, and warns."""
    alike = torch.ones(8, 6), torch.zeros(8, dtype=torch.long)
    batch, factor, reason = {
        "one sample": (make_batch(1), 1, "one sample"),
        "samples alike": (alike, 1, "all alike"),
        "not finite": (make_batch(16), float("nan"), "not finite"),
        "nothing counts": (make_batch(16), 0, "count for nothing"),
    }[case]
    fit_unchecked(reason, RIGHT["plain"][0], lambda model, part: mean_step(model, part) * factor, None, batch)


def test_a_term_that_only_some_samples_have_may_be_left_out_where_it_counts_0():
    """A trial of two samples has none of it, and the micro-batches of the plan do."""
    batch = make_batch(64)
    has = (torch.arange(64) % 8 == 7).float()

    def step(model, given):
        output = model(given[0])
        terms = {"all": output.square().mean()}
        if given[1].any():
            terms["some"] = (output.sum(1) * given[1]).sum() / given[1].sum()
        return terms

    plan = autobatch.fit(
        Plain(torch.float32),
        64,
        batch=(batch[0], has),
        step=step,
        weigh=lambda given: {"all": len(given[0]), "some": float(given[1].sum())},
        max_micro_batch=8,
        check=None,
    )
    assert plan.micro_batch_sizes == (8,) * 8


@pytest.mark.parametrize("check", ["warn", "raise", None])
@pytest.mark.parametrize("names", [("a", "c"), ("a",), ("a", "b", "c")], ids=" ".join)
def test_counts_of_terms_that_the_step_does_not_return_are_refused(names, check):
    """No training step could run with them, so neither a plan nor a verdict is made."""
    given = {
        "step": lambda model, batch: {"a": mean_step(model, batch), "b": model(batch[0]).square().mean()},
        "weigh": lambda batch: dict.fromkeys(names, len(batch[0])),
    }
    model, batch = Plain(torch.float32), make_batch(16)
    for ask in (
        lambda: autobatch.fit(model, 64, batch=batch, max_micro_batch=16, check=check, **given),
        lambda: autobatch.verify(model, batch, **given),
    ):
        with pytest.raises(InvalidArgument, match=r"weigh\(\) gives counts for the terms \['a'") as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_batch_norm_is_named_even_where_nothing_could_be_compared():
    """Samples that are all alike give no verdict, and the layers are known without one."""
    plan = autobatch.fit(Everything(), 64, batch=make_batch(1), step=mean_step, max_micro_batch=16)
    assert "one cannot be split" in plan.verdict.unchecked
    [warning] = [warning for warning in plan.warnings if "exact" in warning]
    assert "BatchNorm in train mode (norm)" in warning


@pytest.mark.parametrize("name", NOT_DETERMINISTIC)
def test_what_cannot_be_made_deterministic_is_a_warning(name, caplog):
    """The trials have run the step: the plan is good, and its warning and the log say why it has no verdict."""
    caplog.set_level(logging.INFO, "autobatch")
    plan = fit_unchecked("made deterministic", *NOT_DETERMINISTIC[name])
    assert NOT_DETERMINISTIC[name][-1] in plan.verdict.unchecked + caplog.text


def guarded(model, batch):
    """Trains on what is drawn, and returns a constant where that is nothing."""
    chosen = torch.rand(len(batch[0])) < 0.4
    return mean_step(model, (batch[0][chosen], batch[1][chosen])) if chosen.any() else torch.zeros(())


def test_a_loss_that_is_none_in_a_part_does_not_end_fit():
    """What the trials have accepted is not refused afterwards."""
    torch.manual_seed(0)
    fit_unchecked("without a graph", RIGHT["plain"][0], guarded, None, make_batch(16))


def test_noise_from_outside_torch_is_a_warning():
    """No cause is made up for it."""
    from random import random  # a name of its own, which is not held still

    def step(model, batch):
        return mean_step(model, (batch[0] * (1 + random()), batch[1]))

    plan = fit_unchecked("Python's random", RIGHT["plain"][0], step, None, make_batch(16))
    assert not plan.verdict.causes


def test_the_check_stays_within_the_limit():
    """No more samples than are known to fit are compared."""
    model = RIGHT["plain"][0]()
    device = FakeDevice(lambda n: 100 + 10 * n, total_bytes=150)
    plan = autobatch.fit(model, 64, batch=make_batch(16), step=mean_step, device=device, headroom=0)
    assert plan.micro_batch_size == 5
    assert plan.verdict.exact
    assert plan.verdict.samples == 5
    assert max(device.ran_sizes[device.ran_sizes.index(5) :]) <= 6


def parameter_bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("factor", [1.5, 2.5])
def test_a_model_that_cannot_be_widened_for_want_of_memory_is_fitted_all_the_same(factor):
    """A frozen base in bfloat16 trains beside its small head in little more than itself."""
    base = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(256, 4)).bfloat16()
    inputs, labels = torch.randn(16, 256, dtype=torch.bfloat16), torch.arange(16) % 4
    plan = autobatch.fit(
        model,
        64,
        batch=(inputs, labels),
        step=mean_step,
        optimizer=torch.optim.SGD(model[1].parameters()),
        max_micro_batch=16,
        budget=int(factor * parameter_bytes(model)),
    )
    held = "memory ran out for what the check holds at once: two samples, a second gradient and copies of parameters ("
    assert plan.verdict.unchecked.startswith(held)
    assert plan.verdict.unchecked.endswith("): call autobatch.verify(), which has no budget, where more memory is free")
    assert str(plan.verdict) in plan.warnings
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("middle", [nn.ReLU, lambda: nn.BatchNorm1d(2048)], ids=["exact", "BatchNorm"])
def test_the_check_takes_little_more_than_training_does(middle):
    """One gradient beside the running one: 4.5 times the parameters are enough for all samples."""
    model = nn.Sequential(nn.Linear(512, 2048), middle(), nn.Linear(2048, 512))
    batch = torch.randn(16, 512), torch.randn(16, 512)
    plan = autobatch.fit(
        model,
        64,
        batch=batch,
        step=lambda model, part: nn.functional.mse_loss(model(part[0]), part[1]),
        max_micro_batch=16,
        budget=int(4.5 * parameter_bytes(model)),
        headroom=0,
    )
    assert not plan.verdict.unchecked
    assert plan.verdict.samples == 16


def test_batch_norm_does_not_hide_another_cause():
    """Where it does not explain the first division alone, all causes are looked for."""
    plan = fit_case((with_batch_norm, sum_loss, None, make_batch(16)))
    assert "BatchNorm in train mode (1)" in plan.verdict.causes[0]
    assert "autobatch.Sum" in plan.verdict.causes[1]


def test_sizes_are_tried_in_train_mode_and_checked_in_the_users():
    """A model in eval mode needs more memory to train, and splits exactly if that is how it is trained."""
    modes = []

    def step(model, batch):
        modes.append((model.training, model[1].training))
        return mean_step(model, batch)

    model = with_batch_norm().eval()
    checked = autobatch.fit(model, 64, batch=make_batch(16), step=step, max_micro_batch=16)
    tried = autobatch.fit(model, 64, batch=make_batch(16), step=mean_step, max_micro_batch=16, check=None)
    trials = len(modes) - modes.count((False, False))
    assert modes == [(True, True)] * trials + [(False, False)] * (len(modes) - trials)
    assert trials >= len(tried.trials) * 2
    assert checked.verdict.exact
    assert not model.training


def test_a_retry_says_where_it_makes_the_gradient_inexact(caplog):
    """A plan that did not split was not warned of; the retry that splits it is the moment."""
    model = Everything()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plan = autobatch.fit(model, 16, batch=make_batch(16), step=mean_step, optimizer=optimizer)
    runner = autobatch.Runner(plan, model, mean_step, optimizer)
    with caplog.at_level("WARNING", logger="autobatch"), oom_at(20):
        runner.step(make_batch(16))
    [line] = [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]
    assert "THE GRADIENT IS NOT EXACT: BatchNorm in train mode (norm)" in line
