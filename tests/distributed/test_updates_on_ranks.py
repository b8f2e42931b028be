"""What runs between the sum and the update on several ranks, and an update that fails on all of them."""

import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autobatch
from autobatch.integrations.lightning.training import LightningRunner
from autobatch.records import IN_EACH, SUMMINGS
from autobatch.testing import FakeDevice


class Heads(nn.Module):
    """Two heads of which one runs, and a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 1), nn.Linear(4, 1), "a"
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows):
        return getattr(self, self.head)(rows)


def make_plan(**changes):
    plan = make_rank_plans((8, 8), 4, **SMALL)[dist.get_rank()]
    return plan.model_copy(update=changes)


def make_device():
    return FakeDevice(lambda n: 10 + n, total_bytes=1000)


def step(model, rows):
    return model(rows).square().mean()


def name_error(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


class Scheduler:
    """Fails at its first step, on every rank."""

    is_new = True

    def step(self):
        if self.is_new:
            self.is_new = False
            raise ValueError("no such rate")


def run_data_parallel(clip):
    rank, rows = dist.get_rank(), torch.ones(8, 4)
    found = {}

    def make(optimizer=torch.optim.SGD, **options):
        torch.manual_seed(0)
        model = DistributedDataParallel(Heads(), find_unused_parameters=True)
        made = optimizer(model.parameters(), lr=0.1)
        runner = autobatch.Runner(make_plan(), model, step, made, device=make_device(), **options)
        return runner, model.module, made

    runner, _, _ = make(scheduler=Scheduler())
    found["a scheduler"] = [name_error(lambda: runner.step(rows)) for _ in range(3)]

    runner, inner, _ = make(max_grad_norm=1.0)
    runner.step(rows)
    before = inner.a.weight.detach().clone()

    def fail(*arguments, **options):
        raise ValueError("no norm")

    if rank:
        nn.utils.clip_grad_norm_ = fail
    error = name_error(lambda: runner.step(rows))
    nn.utils.clip_grad_norm_ = clip
    found["clipping"] = error, runner.steps, bool((inner.a.weight == before).all())

    runner, inner, optimizer = make(torch.optim.Adam)
    inner.head = "b"
    runner.accumulate(rows)
    inner.head = "a"
    had = []
    optimizer.register_step_pre_hook(lambda *_: had.append(inner.b.weight in optimizer.state))
    runner.step(rows)
    found["state of an earlier gradient"] = had

    torch.manual_seed(0)
    inner = Heads()
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def apply(commit):
        inner.seen += 1
        commit()
        optimizer.step()

    def apply_rates(commit):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        commit()
        optimizer.step()

    runner = LightningRunner(apply, make_plan(), model, step, optimizer, device=make_device())
    for _ in range(3):
        runner.step(rows)
    found["a buffer"] = float(inner.seen)
    runner._apply = apply_rates
    found["rates"] = name_error(lambda: runner.step(rows))
    return found


def test_what_comes_between_the_sum_and_the_update():
    """Clipping is undone on all ranks, and rates and buffers are those that the framework's hooks have set."""
    first, second = values_of(run_ranks(run_data_parallel, nn.utils.clip_grad_norm_))
    assert first["clipping"] == ("RankFailed", 1, True)
    assert second["clipping"] == ("ValueError", 1, True)
    for found in (first, second):
        assert found["a scheduler"] == ["ValueError", "", ""]
        assert found["state of an earlier gradient"] == [True]
        assert found["a buffer"] == 3
        assert found["rates"] == "InvalidArgument"


def train_sharded(resumes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer, has_failed = torch.optim.Adam(model.parameters(), lr=0.3), []

    def fails_once(model, rows):
        loss = step(model, rows)
        if len(steps) == 3 and not has_failed and dist.get_rank() == 0:
            has_failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return loss

    def make():
        plan = make_plan(summing=SUMMINGS[-1], micro_batch_size=2, micro_batch_sizes=(2, 2, 2, 2))
        return autobatch.Runner(plan, model, fails_once, optimizer, device=make_device())

    runner, generator, steps = make(), torch.Generator().manual_seed(3 + dist.get_rank()), []
    for number in range(6):
        if resumes and number == 4:
            state, runner = runner.state_dict(), make()
            runner.load_state_dict(state)
        steps.append(runner.step(torch.randn(8, 4, generator=generator)))
        steps[-1] = runner._ranks.passes.summing
    return steps, [parameter.full_tensor().detach() for parameter in model.parameters()]


def run_sharded():
    (whole, expected), (resumed, found) = train_sharded(False), train_sharded(True)
    model = nn.Linear(4, 1)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    runner = autobatch.Runner(
        make_plan(), model, lambda model, rows: autobatch.Mean(step(model, rows), 0), optimizer, device=make_device()
    )
    skipped = runner.step(torch.ones(8, 4)).skipped
    return whole, resumed, [*map(torch.equal, expected, found)], skipped, len(optimizer.state)


def test_a_sharded_run_goes_on_as_it_was_and_a_skipped_step_leaves_no_state():
    """After a shortage a resumed run sums in each micro-batch as long as the uninterrupted one."""
    for whole, resumed, are_equal, skipped, states in values_of(run_ranks(run_sharded)):
        assert whole[3:] == [IN_EACH] * 3 != whole[:3]
        assert resumed == whole
        assert all(are_equal)
        assert skipped
        assert states == 0
