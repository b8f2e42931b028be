"""Blocks that are recomputed where the step fits plainly: only where trials show that a step becomes faster."""

from __future__ import annotations

import time

import pytest
import torch
from builders.rank_clock import CLOCK, stop_time
from builders.ranks import run_ranks, values_of
from text_blocks import make_model, make_texts, need_of, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autobatch
from autobatch.records import Trial
from autobatch.strategies.choice import BlockRun, WayRun
from autobatch.strategies.faster import MARGIN, faster_choices, read_costs, saved_time

SAMPLES = 16


def slow_for_each_micro_batch(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
    time.sleep(0.3)
    return step(model, texts)


def sleep_for_each_sample(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    time.sleep(0.01 * len(inputs[0]))


def fit(model: nn.Module, given_step, **options) -> autobatch.Plan:
    options = {"strategies": "auto", "check": None, "reuse": False, "step": given_step, **options}
    return autobatch.fit(
        model, SAMPLES, batch=make_texts(SAMPLES), budget=int(3.5 * need_of(model)), headroom=0, **options
    )


def test_larger_micro_batches_are_taken_where_they_save_time():
    """A cost of each micro-batch that is far above the recomputation."""
    model = make_model()
    plain, plan = (fit(model, slow_for_each_micro_batch, strategies=chosen) for chosen in (None, "auto"))
    found = plan.checkpointing
    assert found is not None
    assert plan.micro_batch_size == found.micro_batch_size > found.plain_size == plain.micro_batch_size
    assert plan.peak_bytes <= plan.limit_bytes
    assert found.saved_time >= MARGIN
    started = [time.perf_counter()]
    for one in (plain, plan):
        assert (
            autobatch.Runner(one, model, slow_for_each_micro_batch, None).accumulate(make_texts(SAMPLES)).retries == 0
        )
        started.append(time.perf_counter())
    assert started[2] - started[1] < started[1] - started[0]
    assert f"micro-batches of {plan.micro_batch_size}, {plain.micro_batch_size} without" in plan.explain()


def test_a_larger_size_that_runs_out_of_memory_when_tried_again_is_not_planned():
    """It was faster in its first trial."""
    ran: list[int] = []

    def fragile_step(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
        if any("forward" in vars(block) for block in model.blocks):
            if ran.count(len(texts)) > 1:  # a trial is two micro-batches
                raise torch.OutOfMemoryError("out of memory")
            ran.append(len(texts))
        return slow_for_each_micro_batch(model, texts)

    plan = fit(make_model(), fragile_step)
    assert ran
    assert plan.checkpointing is None


@pytest.mark.parametrize("calls", [0, 1, 4], ids=["first trial", "its second micro-batch", "tried again"])
def test_an_error_of_a_larger_recomputed_micro_batch_leaves_the_plain_plan(calls, caplog):
    """It is logged; fit leaves no trace, and the plan runs."""
    model, ran = make_model(torch.float64), []

    def fragile_step(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
        loss = slow_for_each_micro_batch(model, texts)
        if len(texts) > 4 and any("forward" in vars(block) for block in model.blocks):
            model.embed.weight.data.add_(1)
            ran.append(len(texts))
            if len(ran) > calls:
                raise ZeroDivisionError("no such batch")
        return loss

    before = [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()
    with caplog.at_level("INFO", "autobatch"):
        plan = fit(model, fragile_step)
    assert ran
    assert plan.checkpointing is None
    assert plan.micro_batch_size < ran[0]
    assert plan.recomputable
    assert any("ZeroDivisionError: no such batch" in record.getMessage() for record in caplog.records)
    assert all(torch.equal(one, its) for one, its in zip(model.parameters(), before[0], strict=True))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(one.grad is None for one in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    assert autobatch.Runner(plan, model, fragile_step, None).accumulate(make_texts(SAMPLES)).retries == 0


def test_the_plan_is_the_plain_one_where_recomputation_does_not_pay():
    """A cost of each sample inside the blocks; at most three choices are tried, and two sizes twice again."""
    model = make_model()
    for block in model.blocks:  # not a cost outside them: on a busy machine fewer micro-batches may really be faster
        block.linear1.register_forward_pre_hook(sleep_for_each_sample)
    plain, plan = (fit(model, step, strategies=chosen) for chosen in (None, "auto"))
    assert plan.checkpointing is None
    assert plan.micro_batch_sizes == plain.micro_batch_sizes
    assert plan.curve.largest(plan.limit_bytes) == plain.curve.largest(plain.limit_bytes)
    assert len(plan.trials) <= len(plain.trials) + 7


@pytest.mark.parametrize("options", [{"objective": "memory"}, {"max_micro_batch": 2}])
def test_a_larger_micro_batch_is_not_tried_where_none_is_wanted(options):
    """The least memory was asked for, or no larger size."""
    plan = fit(make_model(), slow_for_each_micro_batch, **options)
    assert plan.checkpointing is None
    assert not any(trial.checkpointed for trial in plan.trials)


def test_a_model_whose_blocks_cannot_be_measured_has_its_plain_plan():
    """Such as a step with a gradient through the blocks; fit leaves no trace of the measurement."""
    model = make_model()

    def penalized_step(model, texts):
        loss = step(model, texts)
        torch.autograd.grad(loss, model.embed.weight, retain_graph=True)
        return loss

    before = torch.get_rng_state()
    plan = fit(model, penalized_step)
    assert plan.checkpointing is None
    assert plan.recomputable == ()
    assert torch.equal(before, torch.get_rng_state())
    assert all(one.grad is None and "forward" not in vars(one) for one in model.parameters())


def step_by_the_clock(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
    """Takes as long on each rank, so that each has half of the target."""
    CLOCK.advance(1.0 + 0.01 * len(texts))
    return step(model, texts)


def fit_a_share(target: int, budget: int) -> autobatch.Plan:
    torch.set_num_threads(1)
    stop_time()
    model = make_model()
    options = {"share": "speed", "strategies": "auto", "check": None, "reuse": False, "headroom": 0}
    options |= {"step": step_by_the_clock, "budget": budget}
    return autobatch.fit(DistributedDataParallel(model), target, batch=make_texts(target), **options)


def test_a_rank_s_share_by_speed_has_its_own_sizes_and_saving():
    """What the plan says of micro-batches is of its own, not of the larger ones before the share was known."""
    for plan in values_of(run_ranks(fit_a_share, 22, int(3.5 * need_of(make_model())))):
        found = plan.checkpointing
        assert found.micro_batch_size == plan.micro_batch_size
        assert found.peak_bytes == plan.peak_bytes <= plan.limit_bytes
        plain = [one for one in plan.trials if one.micro_batch_size == found.plain_size and not one.checkpointed]
        tried = [one for one in plan.trials if one.micro_batch_size == plan.micro_batch_size and one.checkpointed]
        assert found.saved_time >= MARGIN
        assert found.saved_time == pytest.approx(saved_time(plain[-1], tried[-1], sum(plan.micro_batch_sizes)))


def test_a_rank_s_share_by_speed_that_fits_plainly_recomputes_nothing():
    """Before the share was known, recomputed blocks saved a micro-batch."""
    for plan in values_of(run_ranks(fit_a_share, 6, int(3.5 * need_of(make_model())))):
        assert plan.checkpointing is None
        assert plan.accumulation_steps == 1
        assert not [one for one in plan.trials if one.micro_batch_size == plan.micro_batch_size][-1].checkpointed


def make_trial(size: int, pass_seconds: float) -> Trial:
    return Trial(micro_batch_size=size, outcome="fits", seconds=2 * pass_seconds + 1, update_seconds=1.0)


def make_runs(seconds: float) -> list[BlockRun]:
    own = {"kind": "Block", "saved_bytes": 100, "input_bytes": 10, "keeps_input": True}
    own |= {"again_bytes": 120, "again_seconds": seconds}
    own["ways"] = {"checkpoint": WayRun(kept_bytes=0, again_bytes=120, seconds=seconds)}
    return [BlockRun(block=f"blocks.{i}", flops=100, **own) for i in range(4)]


@pytest.mark.parametrize(("fixed", "each", "pays"), [(1.0, 0.1, True), (0.0, 0.1, False), (0.1, 0.1, False)])
def test_a_choice_is_predicted_to_be_faster_only_if_micro_batches_have_a_cost_of_their_own(fixed, each, pays):
    """It is more than the recomputation, here up to half of a micro-batch."""
    trials = [make_trial(size, fixed + each * size) for size in (1, 2, 4)]
    costs = read_costs(trials, 4)
    assert costs.fixed == pytest.approx(fixed, abs=1e-9)
    assert costs.each == pytest.approx(each)
    own = {"head_bytes": 0, "sizes": (6, 8, 16), "measured_size": 1, "samples": 16}
    runs = make_runs((fixed + each) / 8)
    found = faster_choices(runs, ["checkpoint"], costs, room=1800, seconds=4 * (fixed + 4 * each), **own)
    assert bool(found) == pays
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)


def test_the_time_that_is_saved_is_of_whole_steps():
    """Without the optimizer's step, which is made once whatever the micro-batches are."""
    assert saved_time(make_trial(4, 1.0), make_trial(8, 1.5), 16) == pytest.approx(0.25)
    assert saved_time(make_trial(4, 1.0), make_trial(8, 2.0), 16) == pytest.approx(0.0)
