"""``run`` on several ranks: each step is that of one process with the same samples, and no rank waits for another."""

import copy
from functools import cache
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.rank_faults import needs_sharding, shard
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from workloads import make_batch, mean_step

import autobatch
from autobatch.errors import InvalidArgument, RankFailed
from autobatch.testing import FakeDevice

SHARES = (6, 4)
"""Of a target of 10."""

LOADERS = {
    "shares": ((18, 12), (6, 4)),
    "small batches": ((18, 12), (1, 1)),
    "ends in the middle of a step": ((20, 15), (5, 7)),
    "one ends long before the other": ((30, 4), (7, 3)),
    "the other way round": ((5, 31), (16, 16)),
    "one has none": ((0, 9), (4, 4)),
    "neither has any": ((0, 0), (4, 4)),
    "one batch": ((25, 25), (25, 25)),
}
"""For each rank: how many samples its loader has, and how many in a batch."""


class Deep(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))
        self.double()


def samples_of(rank, count):
    return make_batch(count, torch.float64, seed=10 + rank)


def batches_of(rank, count, size):
    return [*zip(*(part.split(size) for part in samples_of(rank, count)), strict=True)] if count else []


class Training:
    """A model on this rank, and its Runner."""

    def __init__(self, shares=SHARES, *, sharded=False):
        torch.manual_seed(0)
        self.model = Deep()
        wrapped = shard(self.model) if sharded else DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        plan = make_rank_plans(shares, 3, **SMALL)[dist.get_rank()]
        device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
        self.runner = autobatch.Runner(plan, wrapped, mean_step, self.optimizer, device=device)

    def weights(self):
        found = [parameter.detach() for parameter in self.model.parameters()]
        return [parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter for parameter in found]


def train_by_hand(counts, *, drop_last=False, shares=SHARES):
    """In one process: the samples of step k are each rank's k-th share, as far as its loader goes."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = [samples_of(rank, count) for rank, count in enumerate(counts)]
    step = 0
    while True:
        parts = [
            tuple(part[step * share : (step + 1) * share] for part in samples)
            for samples, share in zip(held, shares, strict=True)
        ]
        total = sum(len(part[0]) for part in parts)
        if not total or (drop_last and total < sum(shares)):
            return [parameter.detach() for parameter in model.parameters()], step
        optimizer.zero_grad()
        mean_step(model, tuple(torch.cat(column) for column in zip(*parts, strict=True))).backward()
        optimizer.step()
        step += 1


def train_all(*, sharded):
    """How far each case is from one process, and what each step ran here."""
    found = {}
    for name, (counts, sizes) in LOADERS.items():
        if sharded and name == "one has none":  # each rank has to run the model once
            continue
        for drop_last in (False, True):
            training, rank = Training(sharded=sharded), dist.get_rank()
            loader = batches_of(rank, counts[rank], sizes[rank])
            ran = [sum(result.micro_batch_sizes) for result in training.runner.run(loader, drop_last=drop_last)]
            expected, steps = train_by_hand(counts, drop_last=drop_last)
            apart = max(
                float((one - other).abs().max()) for one, other in zip(training.weights(), expected, strict=True)
            )
            found[name, drop_last] = (apart, len(ran) - steps, sum(ran), training.runner.passes)
    return found


@cache
def answers(*, sharded):
    return run_ranks(train_all, options=[{"sharded": sharded}] * 2)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("sharded", "name"),
    [
        *((False, name) for name in LOADERS),
        *(pytest.param(True, name, marks=needs_sharding) for name in LOADERS if name != "one has none"),
    ],
)
def test_steps_are_those_of_one_process(sharded, name, drop_last):
    """Also where one rank's loader ends before the other's; a smaller step is dropped on all ranks or on none."""
    for rank, found in enumerate(values_of(answers(sharded=sharded))):
        apart, more_steps, ran, passes = found[name, drop_last]
        assert apart < 1e-12
        assert (more_steps, passes) == (0, 1)
        if not drop_last:
            assert ran == LOADERS[name][0][rank]


class DiskError(Exception):
    """An error of the user's data."""


def break_off(loader, at):
    for number, batch in enumerate(loader):
        if number == at:
            raise DiskError
        yield batch


def fail_in_a_loader(at):
    """The errors of a run in which rank 1's loader fails; then another run on both."""
    rank, training = dist.get_rank(), Training()
    loader = batches_of(rank, 20, 4)
    error, steps = None, 0
    try:
        for _ in training.runner.run(break_off(loader, at) if rank else loader):
            steps += 1
    except (DiskError, RankFailed) as caught:
        error = type(caught).__name__, str(caught)
    done = training.runner.state_dict()["pass_samples"]
    afterwards = len([*training.runner.run(loader)])
    return error, steps, done, afterwards


def leave_on_one_rank():
    """One rank begins again and the other continues."""
    rank, training = dist.get_rank(), Training()
    loader = batches_of(rank, 20, 4)
    try:
        for _ in training.runner.run(loader):
            if rank:
                break
        for _ in training.runner.run(loader):
            pass
    except InvalidArgument:
        return "InvalidArgument"
    return "nothing"


def leave_on_all_ranks():
    rank, training = dist.get_rank(), Training()
    loader = batches_of(rank, 20, 4)
    for _ in training.runner.run(loader):
        break
    return len([*training.runner.run(loader)])


def resume(shares, sharded):
    """From after steps of two passes: the weights are bit for bit those of the run that went on."""
    torch.set_num_threads(1)
    rank, training = dist.get_rank(), Training(shares, sharded=sharded)
    loader, parts = batches_of(rank, 4 * shares[rank] + 2, 5), (training.runner, training.model, training.optimizer)
    steps = training.runner.run(loader, epochs=2)
    saved = [copy.deepcopy([part.state_dict() for part in parts]) for _ in steps]
    same = []
    for runner, model, optimizer in saved[:: len(shares) - 1]:
        again = Training(shares, sharded=sharded)
        again.model.load_state_dict(model)
        again.optimizer.load_state_dict(optimizer)
        again.runner.load_state_dict(runner)
        for _ in again.runner.run(loader, epochs=2):
            pass
        same.append(all(map(torch.equal, again.weights(), training.weights())))
    return same, len(saved)


def share_a_dataset():
    """``plan.loader`` and ``run``: the samples of one process, two epochs in their own order."""
    training = Training()
    data = TensorDataset(*make_batch(33, torch.float64))
    loader = training.runner.plan.loader(data, seed=3)
    steps = [sum(result.micro_batch_sizes) for result in training.runner.run(loader, epochs=2)]
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samplers = [autobatch.ShareSampler(plan, data, seed=3) for plan in make_rank_plans(SHARES, 3, **SMALL)]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for rows in zip(*samplers, strict=True):
            optimizer.zero_grad()
            mean_step(model, data[[*chain.from_iterable(rows)]]).backward()
            optimizer.step()
    apart = max(
        float((one - other).abs().max()) for one, other in zip(training.weights(), model.parameters(), strict=True)
    )
    return steps, apart


def do_everything():
    return {
        "first": fail_in_a_loader(0),
        "later": fail_in_a_loader(3),
        "one leaves": leave_on_one_rank(),
        "all leave": leave_on_all_ranks(),
        "share": share_a_dataset(),
    }


@cache
def behaviours():
    return values_of(run_ranks(do_everything))


@pytest.mark.parametrize(("kind", "steps"), [("first", 0), ("later", 3)])
def test_an_error_of_one_loader_ends_the_run_on_all_ranks(kind, steps):
    """It reaches its own rank as it was raised, the others as RankFailed; the next run is a new one."""
    first, second = (found[kind] for found in behaviours())
    assert first[0][0] == "RankFailed"
    assert "DiskError" in first[0][1]
    assert second[0][0] == "DiskError"
    assert first[1] == second[1] == steps
    assert (first[2], second[2]) == (6 * steps, 4 * steps)
    assert first[3] == second[3] == 5


def test_a_rank_that_leaves_the_loop_alone_is_noticed():
    """Both ranks raise; where all leave at the same step, all begin again."""
    assert [found["one leaves"] for found in behaviours()] == ["InvalidArgument", "InvalidArgument"]
    assert [found["all leave"] for found in behaviours()] == [5, 5]


@pytest.mark.parametrize(
    ("shares", "sharded"),
    [
        (SHARES, False),
        ((4, 3, 3), False),
        ((3, 3, 2, 2), False),
        pytest.param((3, 3, 2, 2), True, marks=needs_sharding),
    ],
    ids=str,
)
def test_each_rank_resumes_where_it_was(shares, sharded):
    """Bit for bit, after steps in the first pass and in the second."""
    for same, steps in values_of(run_ranks(resume, shares, sharded, size=len(shares))):
        assert steps >= 8
        assert len(same) >= 4
        assert all(same)


def test_the_plans_loader_gives_each_rank_its_share():
    """``set_epoch`` reaches its sampler."""
    for found, share in zip(behaviours(), SHARES, strict=True):
        steps, apart = found["share"]
        assert steps[:3] == [share] * 3
        assert len(steps) == 8
        assert apart < 1e-12
