"""The exchange of rows: any number of ranks, numbers that differ, and ranks that end in the middle of it."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.ranks import run_ranks, values_of, wait_at_most
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autobatch
from autobatch.distributed import channel as channels
from autobatch.distributed.agreement import Agreement
from autobatch.distributed.channel import Channel, open_channel
from autobatch.errors import RankFailed, RankLost
from autobatch.testing import FakeDevice


def exchange_numbers(most_direct):
    """What a rank gets: from equal messages, from unequal ones, and more numbers than a row holds."""
    channels._MOST_DIRECT = most_direct
    rank, channel = dist.get_rank(), open_channel(None)
    found = []
    for message in ("the same", rank):
        for count in (0, 3, 20):
            messages, rows = channel.exchange(message, [rank + 0.5] * count)
            found.append((messages, [[*row][:count] for row in rows]))
    return found


@pytest.mark.parametrize(("size", "most_direct"), [(1, 16), (3, 16), (1, 0), (2, 0), (3, 0), (5, 0), (6, 0)])
def test_every_rank_gets_the_numbers_of_all(size, most_direct):
    """By rank, whether or not their number is a power of two, and whether or not messages are equal."""
    ranks = range(size)
    expected = [
        (messages, [[rank + 0.5] * count for rank in ranks])
        for messages in (["the same"] * size, [*ranks])
        for count in (0, 3, 20)
    ]
    for found in values_of(run_ranks(exchange_numbers, most_direct, size=size)):
        assert found == expected


class Ending:
    """A gloo group whose rank ends at one of its sends."""

    def __init__(self, group, sends, end):
        self._group, self._left, self._end = group, sends, end

    def __getattr__(self, name):
        return getattr(self._group, name)

    def send(self, *arguments):
        if not self._left:
            self._end()
        self._left -= 1
        return self._group.send(*arguments)


ENDS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "returned": lambda: os._exit(0),
}


def end_inside(which, how, sends):
    """The outcomes of two exchanges, in the first of which one rank ends before a round."""
    wait_at_most(4)
    channels._MOST_DIRECT = 0
    channel, rank = Channel(None), dist.get_rank()
    if rank == which:
        channel._group = Ending(channel._group, sends, ENDS[how])
    outcomes = []
    for _ in range(2):
        try:
            messages, rows = channel.exchange("here", [rank])
        except RankLost as error:
            outcomes.append(str(error))
        else:
            assert messages == ["here"] * channel.size
            assert [row[0] for row in rows] == [*range(channel.size)]
            outcomes.append("")
    return outcomes


@pytest.mark.parametrize(
    ("size", "how", "sends"),
    [(5, "killed", 0), (5, "killed", 1), (5, "killed", 2), (4, "returned", 1), (3, "killed", 1), (5, "stopped", 0)],
)
def test_a_rank_that_ends_between_two_rounds_is_named_by_all(size, how, sends):
    """No other rank takes rows that did not come for rows: it has all of them, or names the lost rank."""
    found = run_ranks(end_inside, 2, how, sends, size=size, limit_seconds=100)
    assert found.pop(2).end == {"killed": "ended with -9", "returned": "ended with 0", "stopped": "hung"}[how]
    outcomes = values_of(found)
    for first, second in outcomes:
        assert first in ("", second)
        assert second.startswith(
            f"rank 2 of {size} did not answer" if how == "stopped" else f"rank 2 of {size} is gone"
        )
    assert any(first for first, _ in outcomes)


def come_late():
    """The outcome of an exchange in which one rank sends its row when the other one has given up."""
    wait_at_most(2)
    channel = Channel(None)
    channels._MOST_DIRECT = 0
    if dist.get_rank() == 1:
        channel._group = Ending(channel._group, 0, lambda: time.sleep(5))
    try:
        channel.exchange("here", [1])
    except RankLost:
        return "lost"
    return "went on"


def test_a_rank_that_comes_too_late_does_not_go_on_alone():
    """It has the rows of all, but the others have given up: it raises as they do."""
    assert values_of(run_ranks(come_late, size=2, limit_seconds=60)) == ["lost", "lost"]


def fail_in_turn(most_direct):
    """What each rank sees where one of them fails, or makes another call, and all send numbers."""
    channels._MOST_DIRECT = most_direct
    rank, channel, found = dist.get_rank(), open_channel(None), []
    for failing in range(dist.get_world_size()):
        for does in (lambda one: one.fail(ValueError("own")), lambda one: one.gather("another", {"n": rank})):
            agreement = Agreement(channel, "step 0", 1)
            try:
                if rank == failing:
                    does(agreement)
                else:
                    agreement.gather("update", {"n": rank}, equal="x")
            except RankFailed as error:
                found.append(str(error))
            else:
                found.append("")
            met = Agreement(channel, "step 0", 1).gather("update", {"n": rank}, equal="x")
            assert [one["n"] for one in met] == [*range(channel.size)]
    return found


@pytest.mark.parametrize("most_direct", [0, 16])
def test_a_rank_that_fails_or_makes_another_call_is_named_though_all_else_is_equal(most_direct):
    """On each rank in turn; and the exchange that follows is in step again."""
    size = 3
    for rank, found in enumerate(values_of(run_ranks(fail_in_turn, most_direct, size=size))):
        for failing in range(size):
            failed, other = found[2 * failing : 2 * failing + 2]
            undone = f"step 0 was undone on every rank, because it failed on one: rank {failing}: ValueError: own"
            assert failed == ("" if rank == failing else undone)
            assert other.startswith("the ranks made different calls (")
            assert f"rank {failing}: step 0 of Runner 1, another" in other


def step(model, rows):
    return model(rows).square().mean()


def train_unequally(clip):
    """The weights after steps in which ranks have other numbers of samples, and none of them."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = make_rank_plans((8, 8, 8), 4, **SMALL)[dist.get_rank()]
    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    runner = autobatch.Runner(plan, model, step, optimizer, device=device, max_grad_norm=clip)
    seen = []
    for samples in ((8, 8, 8), (1, 5, 8), (8, 0, 3), (0, 0, 2)):
        rows = torch.arange(4 * sum(samples), dtype=torch.float64).view(-1, 4).sin()
        result = runner.step(rows.split(samples)[dist.get_rank()])
        seen.append([one.samples for one in result.ranks])
    return seen, model.module.weight.tolist(), train_alone(clip)


def train_alone(clip):
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples in (24, 14, 11, 2):
        step(model, torch.arange(4 * samples, dtype=torch.float64).view(-1, 4).sin()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.tolist()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_ranks_with_other_numbers_of_samples_train_as_one_process(clip):
    """What counts on each rank is in its row; one without samples sends another message."""
    for seen, weights, alone in values_of(run_ranks(train_unequally, clip, size=3)):
        assert seen == [[8, 8, 8], [1, 5, 8], [8, 0, 3], [0, 0, 2]]
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(alone))
