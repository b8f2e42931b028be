"""A rank that fails between two buckets, or runs out of memory, stops or is killed there: all ranks know it."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from builders.overlapping import BEGUN, Training, attempt, in_last_pass
from builders.rank_clock import CLOCK, stop_time
from builders.ranks import run_ranks, values_of, wait_at_most
from sampling import IN_PROOF
from workloads import differences

import autobatch


def fail(kind):
    training, other = Training(), Training()
    training.run(3), other.run(3)
    error = {"an error": ValueError("my own"), "a shortage": torch.OutOfMemoryError("CUDA out of memory. Tried")}

    def action():
        raise error.get(kind, KeyboardInterrupt("ctrl-c"))

    in_last_pass(training, action)
    outcome = attempt(training)
    hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in training.model.parameters())
    return outcome, attempt(training), hooks


def test_an_error_between_two_buckets_undoes_the_step_on_all_ranks():
    """The failing rank gets its own, the others its name; the next step is made."""
    for kind, text in (("an error", "ValueError: my own"), ("an interrupt", "KeyboardInterrupt: ctrl-c")):
        for rank, (outcome, after, hooks) in enumerate(values_of(run_ranks(fail, kind, size=3, timeout_seconds=30))):
            assert text in outcome[0]
            assert ("RankFailed" in outcome[0]) == (rank != 1)
            assert outcome[1] == []
            assert after[1] == 0
            assert hooks == 0


def test_a_shortage_between_two_buckets_lets_all_ranks_run_again():
    """The failing rank in smaller micro-batches."""
    found = values_of(run_ranks(fail, "a shortage", size=3, timeout_seconds=30))
    for rank, (outcome, after, hooks) in enumerate(found):
        assert outcome[1] == (rank == 1)
        assert outcome[0] == [(4, 4), (1, 1, 1, 1, 1), (4, 3)][rank]
        assert after[1] == 0
        assert hooks == 0


def interrupt_before_a_new_run():
    """Outcome of a step in whose last pass memory ends on rank 0, and Ctrl-C comes on rank 1; and of the next."""
    training = Training()
    training.run(3)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried")

    def end_memory():
        raise error

    in_last_pass(training, end_memory, which=0)
    in_last_pass(training, lambda: os.kill(os.getpid(), signal.SIGINT))
    return attempt(training), attempt(training)


def test_an_interrupt_ends_a_step_before_it_is_run_again():
    """It is not kept until the end of the step."""
    for outcome, after in values_of(run_ranks(interrupt_before_a_new_run, size=2, timeout_seconds=30)):
        assert "KeyboardInterrupt" in outcome[0]
        assert outcome[1] == []
        assert after[1] == 0


def fail_to_hook():
    """Outcome of a step in which one rank cannot hook its third parameter, and of the next."""
    training = Training()
    training.run(3)
    register, calls = torch.Tensor.register_post_accumulate_grad_hook, []

    def refuse(parameter, hook):
        calls.append(parameter)
        if len(calls) == 3:
            raise ValueError("no hook")
        return register(parameter, hook)

    if dist.get_rank() == 1:
        torch.Tensor.register_post_accumulate_grad_hook = refuse
    return attempt(training), attempt(training)


def test_a_rank_that_cannot_begin_its_sum_takes_part_in_it():
    """So the others do not wait, and all undo the step."""
    for outcome, after in values_of(run_ranks(fail_to_hook, size=2, timeout_seconds=10)):
        assert "ValueError: no hook" in outcome[0]
        assert outcome[1] == []
        assert after[1] == 0


def clear_state():
    """What differs from sums afterwards if a step trains less than the one before, and the optimizer was cleared."""
    pair = [Training(), Training(overlaps=False)]
    for training in pair:
        training.run(3)
        training.optimizer.state.clear()
        training.model.module.head.forward = lambda inputs: inputs[:, :4] * 1.0
        training.run(1)
    return pair[0].ranks.have_varied, differences(*(training.bits() for training in pair))


def test_state_of_gradients_that_were_expected_in_vain_is_dropped():
    """The run that follows makes its own."""
    for has_varied, changed in values_of(run_ranks(clear_state, size=2, timeout_seconds=30)):
        assert has_varied
        assert changed == []


def gather(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def run_in(largest):
    """A training whose fourth step runs in such micro-batches from its start, and sums after its passes."""
    training = Training(overlaps=False)
    training.run(3)
    memory = training.runner._memory
    memory.pace = replace(memory.pace, ladder=(largest,), size=largest)
    training.run(1)
    return training


def run_short(which, stride):
    """Whether each rank made its step if memory ends at an operation before one's update, and what is wrong then."""
    found, operation = [], 1
    while True:
        training = Training()
        training.run(3)
        BEGUN.clear()
        outcome = attempt(training, operation if dist.get_rank() == which else None)
        overlapped, made = len(BEGUN), gather(outcome)
        if "CannotRetry" in str(made[which][0]):  # in the update, which the others have made
            return found
        if isinstance(outcome[1], int):
            wrong = differences(training.bits(), run_in(max(outcome[0])).bits())
        else:
            wrong = outcome[1]
        following = attempt(training)
        everyone = gather(training.bits() | {"python": None})  # each process has a generator of its own
        wrong += differences(everyone[0], everyone[-1]) + ([] if isinstance(following[1], int) else [following])
        found.append((operation, [isinstance(one[1], int) for one in made], overlapped, wrong))
        operation += stride


@pytest.mark.parametrize("which", [0, 1])
def test_memory_may_end_at_any_operation_before_the_update(which):
    """Every rank makes the step, as if in its last micro-batches from the start, or none does and all is as before."""
    stride = 1 if IN_PROOF else 3
    answers = values_of(run_ranks(run_short, which, stride, size=2, timeout_seconds=60, limit_seconds=400))
    assert len(answers[0]) > 60 / stride
    assert any(overlapped > 1 for *_, overlapped, _ in answers[0])  # memory ended between two buckets, or behind them
    for operation, made, _, wrong in (*answers[0], *answers[1]):
        assert made in ([True, True], [False, False]), operation
        assert wrong == [], operation


def run_slowly(place):
    """Own seconds of each rank in a step in which rank 1 is slow."""
    stop_time()
    training = Training()
    training.run(3)

    def wait(*_):
        if dist.get_rank() == 1:
            time.sleep(0.1)
            CLOCK.advance(10)

    def reach_other_rank(*arguments, exchange=training.ranks.channel.exchange):
        found = exchange(*arguments)
        CLOCK.advance(100)
        return found

    def end_sum(work, wait=training.ranks.reduction.wait):
        wait(work)
        CLOCK.advance(100)

    training.ranks.channel.exchange, training.ranks.reduction.wait = reach_other_rank, end_sum
    if place == "forward":
        training.model.module.head.register_forward_pre_hook(wait)
    else:
        in_last_pass(training, wait)
    BEGUN.clear()
    result = training.runner.step(training.batch)
    return len(BEGUN), [one.seconds for one in result.ranks]


@pytest.mark.parametrize(("place", "seconds"), [("forward", 20), ("backward", 10)])
def test_seconds_of_a_rank_are_its_own(place, seconds):
    """Those in which it waits for other ranks are none of them, neither before the pass nor in it."""
    for overlapped, found in values_of(run_ranks(run_slowly, place, size=2, timeout_seconds=30)):
        assert overlapped == 1
        assert found == [0, seconds]


def end_between(how):
    """A rank's process ends, or stops, between two buckets."""
    training = Training()
    training.run(3)
    wait_at_most(100.0 if how == signal.SIGKILL else 4.0)
    in_last_pass(training, lambda: os.kill(os.getpid(), how))
    before = training.bits()
    began = time.monotonic()
    with pytest.raises(autobatch.RankLost) as caught:
        training.runner.step(training.batch)
    return str(caught.value), time.monotonic() - began, differences(training.bits(), before)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_between_two_buckets_ends_the_step_on_the_others(how):
    """With its name, and everything is as before the step."""
    found = run_ranks(end_between, how, size=3, timeout_seconds=20, limit_seconds=100)
    assert found.pop(1).end != "well"
    for text, seconds, changed in values_of(found):
        assert "rank 1 of 3 " in text
        assert seconds < 80
        assert changed == []
