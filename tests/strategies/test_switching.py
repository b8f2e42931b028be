"""A Runner that begins to recompute blocks where memory ends at one sample."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from builders.ranks import run_ranks, values_of
from faults import CHECKPOINTED_CASES, SAMPLES, Judge, Training, places_of, plan_of, spread_positions
from sampling import IN_PROOF
from text_blocks import LAYERS, make_model, make_texts, need_of, step
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autobatch
from autobatch.events import Retried
from autobatch.records import Checkpointing
from autobatch.testing import oom_at

BLOCKS = tuple(f"blocks.{i}" for i in range(LAYERS))


def make_plan(model: nn.Module, part: float = 1.5, **options) -> autobatch.Plan:
    options = {"strategies": ["checkpoint"], "check": None, "reuse": False, "max_micro_batch": 1, **options}
    return autobatch.fit(
        model, 4, batch=make_texts(), step=step, budget=int(part * need_of(model)), headroom=0, **options
    )


def tighten(plan: autobatch.Plan, model: nn.Module, part: float = 0.6) -> autobatch.Plan:
    """The plan where less memory is left than in fit."""
    return plan.model_copy(update={"budget_bytes": int(part * need_of(model))})


def recomputing_from_the_start(model: nn.Module) -> autobatch.Plan:
    plan = make_plan(model, 0.6)
    chosen = plan.checkpointing.model_copy(update={"blocks": BLOCKS})
    return plan.model_copy(update={"checkpointing": chosen})


def test_fit_finds_the_blocks_that_may_be_recomputed_later():
    """With strategies= alone; a plan that is saved and loaded still knows them."""
    model = make_model()
    plan = make_plan(model)
    assert plan.checkpointing is None
    assert plan.recomputable == BLOCKS
    assert autobatch.Plan.model_validate_json(plan.model_dump_json()).recomputable == BLOCKS
    assert make_plan(model, strategies=None).recomputable == ()


def test_the_step_ends_bit_for_bit_as_one_that_had_recomputed_from_the_start():
    """In float64 with dropout: parameters, generators and losses, also in later steps, which need no retry."""
    ends = []
    for switches in (True, False):
        model, events = make_model(torch.float64), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plan = tighten(make_plan(model), model) if switches else recomputing_from_the_start(model)
        runner = autobatch.Runner(plan, model, step, optimizer, hooks=[events.append])
        torch.manual_seed(1)
        results = [runner.step(make_texts()) for _ in range(3)]
        assert [result.retries for result in results] == ([1, 0, 0] if switches else [0, 0, 0])
        retried = [event for event in events if isinstance(event, Retried)]
        assert [event.recomputed for event in retried] == ([LAYERS] if switches else [])
        assert all(f"recomputes {LAYERS} blocks" in str(event) for event in retried)
        losses = [result.loss for result in results]
        ends.append([*losses, *model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_resumed_run_recomputes_what_the_interrupted_one_did():
    """A new Runner that loads the state needs no retry, and ends bit for bit as the run that was not interrupted."""
    ends = []
    for is_interrupted in (False, True):
        model = make_model(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        plan = tighten(make_plan(model), model)
        runner = autobatch.Runner(plan, model, step, optimizer)
        torch.manual_seed(1)
        assert [runner.step(make_texts()).retries for _ in range(2)] == [1, 0]
        if is_interrupted:
            state = json.loads(json.dumps(runner.state_dict()))
            runner = autobatch.Runner(plan, model, step, optimizer)
            runner.load_state_dict(state)
        results = [runner.step(make_texts()) for _ in range(2)]
        assert [result.retries for result in results] == [0, 0]
        ends.append([*(result.loss for result in results), *model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_the_gradient_is_that_of_the_plain_step():
    """To 1e-12 in float64, with the same draws."""
    found = []
    for part in (None, 0.6):
        model = make_model(torch.float64)
        plan = make_plan(model)
        runner = autobatch.Runner(plan if part is None else tighten(plan, model, part), model, step, None)
        torch.manual_seed(1)
        assert runner.accumulate(make_texts()).retries == (0 if part is None else 1)
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-12 * one.norm()


def test_a_step_that_does_not_fit_even_then_is_undone():
    """It raises DoesNotFit, which names the blocks that are recomputed already, and nothing has changed."""
    model = make_model()
    runner = autobatch.Runner(tighten(make_plan(model), model, 0.15), model, step, None)
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(autobatch.DoesNotFit, match=f"one sample.*recomputed: {LAYERS} blocks"):
        runner.accumulate(make_texts())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_step_that_cannot_be_run_again_even_then_says_what_is_recomputed():
    """It ran out of memory with blocks recomputed, and had written into a tensor of which there was no copy."""
    model = make_model()
    model.count = [torch.zeros(3)]

    def writing_step(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
        is_recomputed = any("forward" in vars(block) for block in model.blocks)
        if is_recomputed:
            model.count[0].add_(1)
        if runner.steps == 3:
            raise torch.OutOfMemoryError("out of memory")
        return step(model, texts)

    runner = autobatch.Runner(make_plan(model), model, writing_step, None)
    for _ in range(3):  # the first steps are watched, and what they write is copied
        runner.accumulate(make_texts())
        model.zero_grad()
    with pytest.raises(autobatch.CannotRetry, match=f"recomputed: {LAYERS} blocks"):
        runner.accumulate(make_texts())


def test_a_runner_without_strategies_refuses_the_step():
    """Only where strategies= allowed it are blocks recomputed."""
    model = make_model()
    runner = autobatch.Runner(tighten(make_plan(model, strategies=None), model), model, step, None)
    with pytest.raises(autobatch.DoesNotFit):
        runner.accumulate(make_texts())


def test_a_plan_with_some_blocks_recomputed_recomputes_the_others_too():
    """Where even that does not fit any more."""
    model, events = make_model(), []
    plan = make_plan(model, 0.8)
    few = len(plan.checkpointing.blocks)
    assert 0 < few < LAYERS
    runner = autobatch.Runner(tighten(plan, model, 0.55), model, step, None, hooks=[events.append])
    assert runner.accumulate(make_texts()).retries == 1
    assert [event.recomputed for event in events if isinstance(event, Retried)] == [LAYERS - few]


def test_a_block_that_is_recomputed_selectively_is_recomputed_whole_where_memory_ends():
    """With the gradient of the plain step, in float64 with dropout."""
    found = []
    for part, retries in ((1.5, 0), (0.4, 1)):
        model, events = make_model(torch.float64), []
        plan = make_plan(model)
        own = {"blocks": BLOCKS, "selective": BLOCKS, "candidates": LAYERS, "micro_batch_size": 1}
        chosen = Checkpointing(plain_bytes=1, peak_bytes=1, slowdown=0.0, **own) if retries else None
        plan = tighten(plan.model_copy(update={"checkpointing": chosen}), model, part)
        runner = autobatch.Runner(plan, model, step, None, hooks=[events.append])
        torch.manual_seed(1)
        assert runner.accumulate(make_texts()).retries == retries
        assert [event.recomputed for event in events if isinstance(event, Retried)] == [LAYERS] * retries
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-12 * one.norm()


def test_a_block_that_was_replaced_is_refused():
    """Nobody has shown that the other module can be recomputed."""
    model = make_model()
    runner = autobatch.Runner(recomputing_from_the_start(model), model, step, None)
    model.blocks[1] = copy.deepcopy(model.blocks[1])
    with pytest.raises(autobatch.InvalidArgument, match=r"blocks\.1"):
        runner.accumulate(make_texts())
    model.blocks = model.blocks[:1]
    with pytest.raises(autobatch.InvalidArgument, match=r"blocks\.1"):
        runner.accumulate(make_texts())


def put_norm(model: nn.Module) -> None:
    model.blocks[1].norm1.track = nn.BatchNorm1d(4)


def replace_block(model: nn.Module) -> None:
    model.blocks[1] = copy.deepcopy(model.blocks[1])


def compile_block(model: nn.Module) -> None:
    model.blocks[1].compile(backend="eager")


@pytest.mark.parametrize(("change", "left"), [(put_norm, 1), (replace_block, 1), (compile_block, LAYERS)])
def test_a_block_that_changed_is_not_recomputed_where_memory_ends(change, left):
    """A BatchNorm in train mode, another module, torch.compile: the shortage is reported, and later steps run."""
    model, events, is_short = make_model(), [], [False]

    def short_step(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
        if is_short[0]:
            raise torch.OutOfMemoryError("out of memory")
        return step(model, texts)

    runner = autobatch.Runner(make_plan(model), model, short_step, None, hooks=[events.append])
    change(model)
    for is_short[0] in (True, False):
        with pytest.raises(autobatch.DoesNotFit) if is_short[0] else nullcontext():
            runner.accumulate(make_texts())
    recomputed = [event.recomputed for event in events if isinstance(event, Retried)]
    assert recomputed == [LAYERS - left] * (left < LAYERS)


@pytest.mark.parametrize("blocks", [("blocks.1", "blocks.1"), ("blocks.1", "blocks.0", "blocks.1.linear1")])
def test_a_plan_file_with_nested_blocks_is_refused(blocks, tmp_path):
    """They would be recomputed twice."""
    model, path = make_model(), tmp_path / "plan.json"
    plan = make_plan(model, 0.6)
    chosen = plan.checkpointing.model_copy(update={"blocks": blocks})
    for field, content in [("checkpointing", chosen), ("recomputable", blocks)]:
        plan.model_copy(update={field: content}).save(path)
        with pytest.raises(autobatch.InvalidArgument, match=r"blocks\.1.* twice"):
            autobatch.Plan.load(path)


def make_model_without_dropout() -> nn.Module:
    model = make_model(torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def represent(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
    return model(texts).mean(1)


def compare(rows: torch.Tensor, _: object) -> torch.Tensor:
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def compare_own(rows: torch.Tensor, batch: object) -> autobatch.Mean:
    own = getattr(batch, "own_rows", slice(None))
    labels = torch.arange(len(rows))[own]
    return autobatch.Mean(F.cross_entropy(rows[own] @ rows.T, labels), len(labels))


STEPS = {
    "a mean over samples": step,
    "a loss over the whole batch": autobatch.WholeBatch(represent, compare),
    "its part of each rank": autobatch.WholeBatch(represent, compare_own),
}


def switch_on_one_rank(kind: str, rank: int) -> tuple[list[torch.Tensor], int]:
    torch.set_num_threads(1)
    model, chosen = make_model_without_dropout(), STEPS[kind]
    wrapped = DistributedDataParallel(model)
    options = {"strategies": "auto", "check": None, "reuse": False, "max_micro_batch": 1}
    plan = autobatch.fit(wrapped, 4, batch=make_texts(2), step=chosen, budget="4GiB", **options)
    if rank == 1:
        plan = plan.model_copy(update={"budget_bytes": int(0.7 * plan.peak_bytes)})
    runner = autobatch.Runner(plan, wrapped, chosen, None)
    result = runner.accumulate(make_texts()[2 * rank : 2 * rank + 2])
    return [parameter.grad for parameter in model.parameters()], result.retries


@pytest.mark.parametrize("kind", STEPS)
def test_one_rank_alone_may_switch(kind):
    """Gradients of both ranks are those of one process with the whole batch."""
    options = [{"rank": 0}, {"rank": 1}]
    ends = values_of(run_ranks(switch_on_one_rank, kind, options=options, timeout_seconds=40, limit_seconds=90))
    assert [retries for _, retries in ends] == [0, 1]
    model = make_model_without_dropout()
    if kind == "a mean over samples":
        step(model, make_texts()).backward()
    else:
        compare(represent(model, make_texts()), None).backward()
    for gradients, _ in ends:
        for one, other in zip(gradients, model.parameters(), strict=True):
            assert (one - other.grad).norm() <= 1e-12 * other.grad.norm()


class Switching(Training):
    """Training in micro-batches of one sample whose plan may recompute blocks whole that it runs in other ways."""

    def _plan(self) -> autobatch.Plan:
        plan, sizes = (
            plan_of(replace(self.case, recomputed=(*self.case.selective, *self.case.offloaded))),
            (1,) * SAMPLES,
        )
        own = {"micro_batch_size": 1, "micro_batch_sizes": sizes, "accumulation_steps": SAMPLES, "max_micro_batch": 1}
        return plan.model_copy(update={**own, "recomputable": self.case.recomputed})


@pytest.mark.parametrize("case", CHECKPOINTED_CASES, ids=lambda case: case.name)
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("quiet_log")
def test_an_oom_at_any_operation_of_one_sample(case):
    """The step begins again with blocks recomputed, and ends bit for bit as one without a fault."""
    options = {"earlier_steps": 1, "earlier_gradients": True}
    judge, places = Judge(case, Switching, **options), places_of(case, Switching, **options)
    stride = 1 if IN_PROOF else 40
    positions = [one for one in spread_positions(places, stride) if places[one - 1] in ("forward", "backward")]
    outcomes = {judge.outcome(oom_at(position)) for position in positions}
    assert "restarted" in outcomes
    assert outcomes <= {"committed", "restarted"}
