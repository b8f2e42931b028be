"""Interrupts and errors between exchanges, and errors that are hard to report: no other rank waits for them."""

import signal
import time
from contextlib import contextmanager
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.ranks import run_ranks, values_of
from torch.nn.parallel import DistributedDataParallel
from workloads import Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.distributed.channel import Channel
from autobatch.testing import FakeDevice

WHICH = 1
IN_A_STEP = ("totals", "update")
IN_FIT = ("arguments", "device", "search", "check")
LIMIT = 40


@contextmanager
def interrupted_after(count):
    """Ctrl-C comes on one rank when its exchange of this number is done."""
    exchange, done = Channel.exchange, []

    def exchange_and_raise(channel, message, numbers=()):
        messages = exchange(channel, message, numbers)
        done.append(message)
        if dist.get_rank() == WHICH and len(done) == count:
            signal.raise_signal(signal.SIGINT)
        return messages

    with mock.patch.object(Channel, "exchange", exchange_and_raise):
        yield


def make_training(step=mean_step, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Plain(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = make_rank_plans((8, 8), 4, **SMALL)[dist.get_rank()]
    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    return model, optimizer, autobatch.Runner(plan, model, step, optimizer, device=device, **options)


def weigh(batch):
    """In the first step, ranks exchange totals before the first micro-batch: they may be those of several terms."""
    return len(batch[0])


def call(function, *arguments):
    """Its error, if it raises one, and whether it took long."""
    began, name = time.monotonic(), "none"
    try:
        function(*arguments)
    except BaseException as error:
        name = type(error).__name__ if dist.get_rank() == WHICH else f"{type(error).__name__}: {error}"
    return name, time.monotonic() - began > LIMIT


def interrupt_a_step(count):
    """Its error, whether it counts, the changes, and the outcome of the next step."""
    model, optimizer, runner = make_training(weigh=weigh)
    before = bits_of(model.module, optimizer)
    with interrupted_after(count):
        raised, hung = call(runner.step, make_batch(8, torch.float64, seed=dist.get_rank()))
    changed = bool(differences(bits_of(model.module, optimizer), before))
    steps = runner.steps
    return raised, hung, steps, changed, call(runner.step, make_batch(8, torch.float64))


def interrupt_a_pass():
    """The outcome of Ctrl-C on one rank while the ranks exchange their numbers of samples, and the next step."""
    *_, runner = make_training()
    batch = make_batch(8, torch.float64)
    with interrupted_after(1):
        raised = call(list, runner.run([batch, batch]))
    return raised, call(runner.step, batch)


def fit(model):
    options = {"batch": make_batch(4, torch.float64), "step": mean_step, "check": None, "optimizer": None}
    return autobatch.fit(model, 16, device=FakeDevice(lambda n: 10 + n, total_bytes=100), **options)


def interrupt_fit(model, count):
    with interrupted_after(count):
        raised = call(fit, model)
    return raised, call(fit, model)


def step_inside_join():
    """Its error, on which no rank waits."""
    model, _, runner = make_training()

    def run():
        with model.join():
            runner.step(make_batch(8, torch.float64))

    return call(run)


def run_all():
    model = DistributedDataParallel(Plain())
    fit(model)
    return {
        **{f"step {name}": interrupt_a_step(count) for count, name in enumerate(IN_A_STEP, 1)},
        **{f"fit {name}": interrupt_fit(model, count) for count, name in enumerate(IN_FIT, 1)},
        "pass": interrupt_a_pass(),
        "join": step_inside_join(),
    }


@cache
def answers():
    return run_ranks(run_all, timeout_seconds=60)


def results_of(name):
    return [value[name] for value in values_of(answers())]


UNDONE = "RankFailed: step 0 was undone on every rank, because it failed on one: rank 1: "
WELL = ("none", False)


def test_an_interrupt_while_a_pass_is_read_reaches_all_ranks():
    """No rank waits for the one that was interrupted, and the next step succeeds."""
    other, own = results_of("pass")
    assert other == ((f"{UNDONE}KeyboardInterrupt", False), WELL)
    assert own == (("KeyboardInterrupt", False), WELL)


def test_an_interrupt_before_the_ranks_agree_undoes_the_step_on_all():
    """An exchange is noted before the interrupt is raised; the next step succeeds."""
    other, own = results_of("step totals")
    assert other == (f"{UNDONE}KeyboardInterrupt", False, 0, False, WELL)
    assert own == ("KeyboardInterrupt", False, 0, False, WELL)


def test_an_interrupt_after_the_ranks_have_agreed_finds_the_step_done():
    """It counts on this rank as on the others, so they are still together."""
    assert results_of("step update") == [("none", False, 1, True, WELL), ("KeyboardInterrupt", False, 1, True, WELL)]


@pytest.mark.parametrize("block", IN_FIT[:-1])
def test_an_interrupt_between_two_blocks_of_fit_is_sent_in_the_next(block):
    """Else the others would wait there."""
    (other, again), (own, own_again) = results_of(f"fit {block}")
    assert other == (
        "RankFailed: fit() was undone on every rank, because it failed on one: rank 1: KeyboardInterrupt",
        False,
    )
    assert (own, again, own_again) == (("KeyboardInterrupt", False), WELL, WELL)


def test_an_interrupt_after_the_last_block_of_fit_is_this_ranks_own():
    """The others have their plans, and the next call does not get it."""
    assert results_of("fit check") == [(WELL, WELL), (("KeyboardInterrupt", False), WELL)]


def test_a_step_inside_join_is_refused():
    """Ranks whose samples have ended would answer sums that are never made."""
    (other, hung), own = results_of("join")
    assert other.startswith("InvalidArgument: join() was called on the model, but autobatch sums")
    assert not hung
    assert own == ("InvalidArgument", False)
