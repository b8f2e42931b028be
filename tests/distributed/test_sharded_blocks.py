"""Blocks that are recomputed where parameters are sharded: all ranks choose the same ones, and none waits."""

import random
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.rank_faults import needs_sharding
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from workloads import bits_of, differences

import autobatch
from autobatch.fitting import choose_blocks, choose_faster
from autobatch.records import SUMMINGS, Checkpointing
from autobatch.testing import oom_at

pytestmark = needs_sharding

LAYERS, WIDTH, LENGTH, TARGET = 4, 8, 512, 8
BLOCKS = tuple(f"blocks.{i}" for i in range(LAYERS))


class Block(nn.Module):
    """Keeps four tensors of its input's size, and draws."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, hidden):
        return hidden + self.outer(self.dropout(self.inner(hidden).tanh().sin()))


class Fussy(Block):
    """Raises an error on rank 1 when it runs alone; draws from Python's generator on rank 0."""

    def forward(self, hidden):
        if dist.get_rank() == 0:
            return super().forward(hidden) * (1 + random.random())
        if hidden.is_leaf:
            raise ValueError("my own bug")
        return super().forward(hidden)


class Stage(nn.Module):
    """A block of blocks."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(Block(), Block())

    def forward(self, hidden):
        return self.parts(hidden)


class Network(nn.Module):
    def __init__(self, blocks=(Block,) * LAYERS, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(make() for make in blocks)
        self.head = nn.Linear(WIDTH, 4)
        self.to(dtype)

    def forward(self, inputs):
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


def make_model(blocks=(Block,) * LAYERS, dtype=torch.float64, dropout=0.1):
    torch.manual_seed(0)
    model = Network(blocks, dtype)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model


def shard_blocks(model, **options):
    """As most do: each block, and the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def shard_inside(model):
    """The parts of the first block too."""
    fully_shard(model.blocks[0].inner)
    return shard_blocks(model)


def make_inputs(samples=TARGET, dtype=torch.float64):
    return torch.randn(samples, LENGTH, 1, generator=torch.Generator().manual_seed(1), dtype=dtype)


def step(model, inputs):
    return model(inputs).logsumexp(1).square().mean()


def slow_step(model, inputs):
    """A micro-batch has a cost of its own."""
    time.sleep(0.3)
    return step(model, inputs)


def failing_step(model, inputs):
    """Fails on rank 1 where blocks are measured."""
    loss = step(model, inputs)
    if dist.get_rank() == 1 and "forward" in vars(model.blocks[0]):
        raise ValueError("my own bug")
    return loss


def fail(*_, **__):
    raise ValueError("my own bug")


def fit(model, **changes):
    options = {"batch": make_inputs(2), "step": step, "headroom": 0, "budget": "1GiB", "progress": False}
    return autobatch.fit(model, TARGET, **{**options, **changes})


def need_of(model, **changes):
    return fit(model, max_micro_batch=1, **changes).peak_bytes


def describe(plan):
    """What must be the same on each rank."""
    trials = [(trial.micro_batch_size, trial.outcome, trial.checkpointed) for trial in plan.trials]
    chosen = plan.checkpointing
    left_out = chosen and {one.block: one.reason for one in chosen.left_out}
    return plan.micro_batch_size, chosen and chosen.ways, left_out, plan.recomputable, plan.peak_bytes, trials


def gradients(model, plan, dtype=torch.float64):
    """Of this rank's half of the batch, summed over the ranks; the draws begin with the same number."""
    runner = autobatch.Runner(plan, model, step, None)
    torch.manual_seed(dist.get_rank())
    share, half = plan.shares[dist.get_rank()], plan.shares[0] * dist.get_rank()
    result = runner.accumulate(make_inputs(dtype=dtype)[half : half + share].clone())
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found, result


def error_of(found, expected):
    return max(((found[name] - one).norm() / one.norm()).item() for name, one in expected.items())


def whole_gradients():
    model = make_model(dropout=0.0)
    step(model, make_inputs()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def name_error(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def replicate(model):
    return shard_blocks(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def narrow(model):
    return shard_blocks(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


KINDS = {
    "each block": shard_blocks,
    "the whole": fully_shard,
    "kept after forward": lambda model: shard_blocks(model, reshard_after_forward=False),
    "replicated": replicate,
    "in bfloat16": narrow,
}


def run_kinds():
    """What fit finds for each kind, and errors of gradients beside the plain sharded step and the whole batch."""
    found = {}
    for turn, (name, shard) in enumerate(KINDS.items()):
        dtype = torch.float32 if shard is narrow else torch.float64
        model = shard(make_model(dtype=dtype))
        plan = fit(model, batch=make_inputs(2, dtype), strategies="auto", max_micro_batch=1, objective="memory")
        chosen = Checkpointing(
            blocks=BLOCKS[:3],
            selective=BLOCKS[:1],
            candidates=LAYERS,
            micro_batch_size=1,
            plain_bytes=plan.peak_bytes,
            peak_bytes=plan.peak_bytes,
            slowdown=0.0,
        )
        plain = plan.model_copy(update={"summing": SUMMINGS[turn % len(SUMMINGS)]})
        expected, _ = gradients(model, plain, dtype)
        again, _ = gradients(model, plain.model_copy(update={"checkpointing": chosen}), dtype)
        found[name] = plan.recomputable, error_of(again, expected)
    model = shard_blocks(make_model(dropout=0.0))
    need = need_of(model)
    found["plain"] = name_error(lambda: fit(model, budget=int(0.75 * need)))
    plan = fit(model, budget=int(0.75 * need), strategies="auto")
    again, result = gradients(model, plan)
    is_within = result.retries == 0 and result.peak_bytes <= plan.budget_bytes
    found["whole"] = describe(plan), error_of(again, whole_gradients()), is_within
    return found


def run_all():
    model = shard_blocks(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before, need = bits_of(model, optimizer), need_of(model)
    found = {}
    for name, part in (("nothing fits", 0.2), ("chosen", 0.75)):
        found[name] = name_error(lambda part=part: describe(fit(model, budget=int(part * need), strategies="auto")))
    found["one rank has less"] = describe(
        fit(model, budget=int((0.75 if dist.get_rank() else 4) * need), strategies=["checkpoint"])
    )
    found["faster"] = fit(model, step=slow_step, budget=int(1.2 * need), strategies=["checkpoint"])
    found["faster"] = describe(found["faster"]), found["faster"].checkpointing.plain_size
    options = {"step": failing_step, "strategies": ["checkpoint"]}
    found["fails, would not fit"] = name_error(lambda: fit(model, budget=int(0.75 * need), **options))
    found["fails, fits"] = describe(fit(model, budget="1GiB", **options))
    stages = fully_shard(make_model([Stage, Stage]))
    found["fails, has blocks inside"] = name_error(lambda: fit(stages, budget=int(0.75 * need_of(stages)), **options))
    kept = choose_faster.faster_choices
    if dist.get_rank():
        choose_faster.faster_choices = fail  # before a trial, in which the other rank would wait
    options = {"step": slow_step, "budget": int(1.2 * need), "strategies": ["checkpoint"]}
    found["fails between trials"] = describe(fit(model, **options))
    choose_faster.faster_choices = kept
    found["chunk_loss"] = name_error(lambda: fit(model, strategies=["chunk_loss", "checkpoint"]))
    found["unlike"] = name_error(lambda: fit(model, strategies="auto" if dist.get_rank() else None))
    found["changed"] = differences(bits_of(model, optimizer), before)
    fussy = shard_blocks(make_model([Block, Block, Block, Fussy]))
    found["fussy"] = describe(fit(fussy, budget=int(0.75 * need_of(fussy)), strategies=["checkpoint"]))
    nested = shard_inside(make_model())
    found["nested"] = describe(fit(nested, budget=int(0.75 * need_of(nested)), strategies=["checkpoint"]))
    found["later"] = run_out_later(need)
    return found


def run_out_later(need):
    """Rank 1 has less memory than in fit: it recomputes more, alone."""
    model = shard_blocks(make_model())
    plan = fit(model, max_micro_batch=1, strategies=["checkpoint"])
    expected, _ = gradients(model, plan)
    tight = plan.model_copy(update={"budget_bytes": int((0.75 if dist.get_rank() else 4) * need)})
    found, result = gradients(model, tight)
    return plan.recomputable, result.retries, error_of(found, expected)


def run_out_while_measuring():
    """How fit ends if memory ends at operations of the pass that measures blocks, on each rank in turn."""
    model = shard_blocks(make_model())
    need, measure, ends = need_of(model), choose_blocks.measure_blocks, []
    counted = []

    def count(*arguments, **options):
        with oom_at(10**9) as planned:
            found = measure(*arguments, **options)
        counted.append(planned.operations)
        return found

    choose_blocks.measure_blocks = count
    options = {"budget": int(0.75 * need), "strategies": ["checkpoint"], "max_micro_batch": 1}
    expected = describe(fit(model, **options))
    before = bits_of(model)
    for failing in range(2):
        for position in range(1 + 3 * failing, counted[-1], counted[-1] // 5):

            def measure_with_fault(*arguments, position=position, failing=failing, **options):
                with oom_at(position if dist.get_rank() == failing else 10**9):
                    return measure(*arguments, **options)

            choose_blocks.measure_blocks = measure_with_fault
            ends.append((name_error(lambda: fit(model, **options)), differences(bits_of(model), before)))
    choose_blocks.measure_blocks = measure
    return expected, ends, describe(fit(model, **options))


@cache
def kinds():
    return values_of(run_ranks(run_kinds, timeout_seconds=60, limit_seconds=150))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_plain_sharded_step(kind):
    """With the same draws, however often gradients are summed; each block may be recomputed."""
    for found in kinds():
        recomputable, error = found[kind]
        assert recomputable == BLOCKS
        assert error <= 1e-12


def test_a_step_that_does_not_fit_plainly_has_the_gradient_of_the_whole_batch():
    """To 1e-12 in float64, by the same plan on both ranks, within the budget and without a retry."""
    first, second = kinds()
    assert first["plain"].startswith("DoesNotFit")
    assert first["whole"][0] == second["whole"][0]
    for found in (first, second):
        (_, ways, *_), error, is_within = found["whole"]
        assert ways
        assert error <= 1e-12
        assert is_within


@cache
def answers():
    return values_of(run_ranks(run_all, timeout_seconds=60, limit_seconds=150))


def results_of(name):
    first, second = (value[name] for value in answers())
    return first, second


@pytest.mark.parametrize("name", ["chosen", "one rank has less"])
def test_all_ranks_choose_the_same_blocks(name):
    """Also where the plain step would fit one of them."""
    first, second = results_of(name)
    assert first == second
    assert first[1]


def test_blocks_are_recomputed_on_all_ranks_where_that_is_faster():
    """Micro-batches of one sample fit; larger ones with blocks recomputed take less time."""
    first, second = results_of("faster")
    assert first == second
    (size, ways, *_), plain_size = first
    assert size > plain_size == 1
    assert ways


def test_nothing_fits_on_any_rank():
    """Each says what was tried."""
    for text in results_of("nothing fits"):
        assert text.startswith("DoesNotFit: ")
        assert "strategies=" in text


@pytest.mark.parametrize(
    ("name", "block", "reason"), [("fussy", BLOCKS[-1], "generator"), ("nested", BLOCKS[0], "fully_shard")]
)
def test_a_block_that_cannot_be_recomputed_is_left_out_on_all_ranks(name, block, reason):
    """It raises an error on one rank and draws from another generator on the other; or its parts are sharded alone."""
    first, second = results_of(name)
    assert first == second
    _, ways, left_out, recomputable, *_ = first
    assert [*left_out] == [block]
    assert reason in left_out[block]
    assert set(ways) <= set(recomputable) == {*BLOCKS} - {block}


def test_an_error_of_one_rank_while_blocks_are_chosen_ends_that_on_all():
    """All raise an error that names it if the plain step does not fit; else all have the plain plan."""
    for name in ("fails, would not fit", "fails, has blocks inside"):
        first, second = results_of(name)
        assert first.startswith("RankFailed: ")
        assert second.startswith("DoesNotFit: ")
        assert all("rank 1" in text or "strategies=" in text for text in (first, second))
        assert all("ValueError: my own bug" in text for text in (first, second))
    for name in ("fails, fits", "fails between trials"):
        first, second = results_of(name)
        assert first == second
        assert first[1] is None


@pytest.mark.parametrize("name", ["chunk_loss", "unlike"])
def test_what_cannot_be_done_is_refused_on_every_rank(name):
    """At once, in one line."""
    first, second = results_of(name)
    assert first == second
    assert first.startswith("InvalidArgument: strategies= ")
    assert len(first.splitlines()) == 1


def test_it_leaves_no_trace_on_any_rank():
    """After plans and errors."""
    assert results_of("changed") == ([], [])


def test_a_rank_whose_memory_ends_later_recomputes_more_alone():
    """The others wait for the same in each pass; the gradient is the plain one."""
    for recomputable, retries, error in results_of("later"):
        assert recomputable == BLOCKS
        assert retries == 1
        assert error <= 1e-12


def test_memory_that_ends_in_the_pass_that_measures_ends_it_on_all_ranks():
    """Nobody waits, nothing has changed, and a later fit finds what the first one has found."""
    (expected, ends, later), (expected_there, ends_there, later_there) = values_of(
        run_ranks(run_out_while_measuring, timeout_seconds=60, limit_seconds=150)
    )
    assert expected == expected_there == later == later_there
    for (first, changed), (second, changed_there) in zip(ends, ends_there, strict=True):
        assert changed == changed_there == []
        assert first.startswith("DoesNotFit: ")
        assert second.startswith("DoesNotFit: ")
        assert any("planned out of memory" in text for text in (first, second))
