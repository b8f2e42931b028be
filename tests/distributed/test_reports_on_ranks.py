"""Reports about all ranks: plans, steps, events and one run in the ledger, on real processes."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from builders.rank_clock import CLOCK, stop_time
from builders.ranks import run_ranks, values_of
from torch.nn.parallel import DistributedDataParallel
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch import hooks
from autobatch.events import PlanRecalled, Retried
from autobatch.ledger.store import Store
from autobatch.testing import FakeDevice

TARGET = 24
STEPS = 3
SLOW_SECONDS = 0.01


def slow_step(model, batch):
    """The last rank takes 10 ms a sample, the others one."""
    CLOCK.advance(len(batch[0]) * SLOW_SECONDS * (1.0 if dist.get_rank() == dist.get_world_size() - 1 else 0.1))
    return mean_step(model, batch)


def fit(model, **changes):
    """A plan of this rank, on this computer."""
    options = {"batch": make_batch(4, torch.float64), "step": slow_step, "budget": "1GiB", "check": None}
    return autobatch.fit(model, TARGET, **{**options, **changes})


def take_share(plan):
    start = sum(plan.shares[: plan.rank])
    return tuple(part[start : start + plan.shares[plan.rank]] for part in make_batch(TARGET, torch.float64))


def train(folder):
    """Fit twice, train on the second plan with a file of events; what this rank has seen."""
    stop_time()
    torch.manual_seed(0)
    model = DistributedDataParallel(Plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plans = [fit(model, optimizer=optimizer, max_micro_batch=4) for _ in range(2)]
    by_speed = [fit(model, optimizer=optimizer, max_micro_batch=4, share="speed") for _ in range(2)]
    runner = autobatch.Runner(plans[1], model, slow_step, optimizer, hooks=[hooks.jsonl(Path(folder) / "events")])
    results = [runner.step(take_share(plans[1])) for _ in range(STEPS)]
    return plans, by_speed, [result.ranks for result in results], results[-1].metrics()


@cache
def trainings(size, folder):
    """Asked once: the processes take longer to start than to run."""
    return values_of(run_ranks(train, folder, size=size))


@pytest.fixture(scope="module", params=[2, 3])
def training(request, tmp_path_factory):
    """The findings of each rank, and the folder with the ledger and the events."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("AUTOBATCH_HOME", str(folder))
        changes.setenv("AUTOBATCH_LEDGER", "on")
        return trainings(request.param, str(folder)), folder


def test_every_rank_has_the_plan_of_the_whole(training):
    """The same rows, in which each finds its own numbers."""
    seen, _ = training
    for number in range(2):
        plans = [one[0][number] for one in seen]
        assert all(plan.ranks == plans[0].ranks for plan in plans)
        for plan, row in zip(plans, plans[0].ranks, strict=True):
            assert (row.rank, row.plan_id, row.share) == (plan.rank, plan.id, sum(plan.micro_batch_sizes))
            assert (row.peak_bytes, row.budget_bytes) == (plan.peak_bytes, plan.budget_bytes)
            assert 0 < row.peak_bytes < row.budget_bytes
            assert row.host
    slowest = len(seen) - 1
    assert f"The slowest is rank {slowest}: " in seen[0][0][0].explain()
    assert "share='speed'" in seen[0][0][0].explain()


def test_a_plan_is_remembered_for_each_rank(training):
    """One trial confirms it; shares by speed are measured again each time."""
    seen, _ = training
    for plans, by_speed, _, _ in seen:
        assert [plan.confirms for plan in plans] == ["", plans[0].id]
        assert len(plans[1].trials) == 1
        assert [plan.confirms for plan in by_speed] == ["", ""]


def test_every_step_says_what_each_rank_did(training):
    """The same on all; the slow one is named."""
    seen, _ = training
    slowest = len(seen) - 1
    for _, _, steps, metrics in seen:
        assert steps == seen[0][2]
        assert metrics["autobatch/slowest_rank"] == slowest
    share = TARGET // len(seen)
    for ranks in seen[0][2]:
        assert [(one.rank, one.samples, one.micro_batch_size) for one in ranks] == [
            (rank, share, 4) for rank in range(len(seen))
        ]
        assert all(one.peak_bytes > 0 for one in ranks)
        assert ranks[slowest].seconds == pytest.approx(share * SLOW_SECONDS)
        # That the others wait for it is no work of theirs.
        assert [one.seconds for one in ranks[:slowest]] == pytest.approx([share * SLOW_SECONDS / 10] * slowest)


def test_events_say_of_which_rank_they_are(training):
    """In one file of all."""
    seen, folder = training
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "StepFinished"]
    assert {event["world_size"] for event in events} == {len(seen)}
    assert sorted(event["rank"] for event in steps) == sorted([*range(len(seen))] * STEPS)
    assert all(len(event["ranks"]) == len(seen) for event in steps)


def test_one_run_of_all_ranks_is_recorded(training):
    """With a row for each, though all of them wrote into the folder at once."""
    seen, folder = training
    store = Store(folder)
    plans = store.plans()
    assert {plan.id for plan in plans} == {plan.id for one in seen[:1] for plan in (*one[0], *one[1])}
    [run] = [run for plan in plans for run in store.runs_of(plan.id)]
    assert run.plan_id == seen[0][0][1].id
    assert run.steps == STEPS
    share = TARGET // len(seen)
    assert [(row.steps, row.samples) for row in run.ranks] == [(STEPS, STEPS * share)] * len(seen)
    assert [store.find_plan(row.plan_id).rank for row in plans[0].ranks] == [*range(len(seen))]


def run_short():
    """On the second rank memory is short from the second step on; what the hooks of this rank and its results say."""
    model = DistributedDataParallel(Plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = FakeDevice(lambda n: 10 + n, total_bytes=100)
    plan = fit(model, optimizer=optimizer, device=device, budget=None, step=mean_step)
    events = []
    runner = autobatch.Runner(plan, model, mean_step, optimizer, device=device, hooks=[events.append])
    runner.step(take_share(plan))
    if dist.get_rank() == 1:
        device.curve = lambda n: 10 + 10 * n
    ranks = runner.step(take_share(plan)).ranks
    skipped = runner.step(None).ranks
    return ranks, skipped, [event for event in events if isinstance(event, (Retried, PlanRecalled))]


def test_a_retry_on_one_rank_is_seen_on_all():
    """Its sizes and retries are in the step of each; the event is only its own. A step without samples has no rows."""
    first, second = values_of(run_ranks(run_short))
    assert first[0] == second[0]
    assert [one.retries for one in first[0]] == [0, 1]
    assert first[0][0].micro_batch_size == 12 > first[0][1].micro_batch_size
    assert (first[1], second[1]) == ((), ())
    assert first[2] == []
    [retried] = second[2]
    assert (retried.rank, retried.world_size) == (1, 2)
    assert str(retried).startswith("rank 1 of 2: step 1 ran out of memory at 12 samples")
