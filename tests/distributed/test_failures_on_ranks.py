"""A step that fails on one rank ends alike on every rank: undone, and without a hang."""

import os
import re
import signal
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.ranks import run_ranks, values_of, wait_at_most
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.planning.division import spread
from autobatch.testing import FakeDevice

SIZE = 3
TARGET = 24


class Training:
    """A model, an optimizer, a batch of this rank's and its runner."""

    def __init__(self, step=mean_step, samples=8, device=None, make_model=Plain, optimizer=None, **options):
        torch.manual_seed(0)
        self.model = DistributedDataParallel(make_model(), find_unused_parameters=True)
        made = optimizer or torch.optim.SGD
        self.optimizer = made(self.model.parameters(), lr=0.1)
        self.batch = make_batch(samples, torch.float64, seed=dist.get_rank())
        plan = make_rank_plans(spread(TARGET, dist.get_world_size()), 4, **SMALL)[dist.get_rank()]
        device = device or FakeDevice(lambda n: 10 + n, total_bytes=1000)
        self.runner = autobatch.Runner(plan, self.model, step, self.optimizer, device=device, **options)

    def bits(self):
        return bits_of(self.model.module, self.optimizer) | {"steps": self.runner.steps}


def attempt(training, run=None):
    """The error of a step, or its sizes; and whether everything is as before after an error."""
    before = training.bits()
    try:
        result = (run or training.runner.step)(training.batch)
    except BaseException as error:
        changed = differences(training.bits(), before)
        return f"{type(error).__name__}: {error}", changed
    return result.micro_batch_sizes, result.retries


def on_rank(which, action):
    """A step that does something else first, once, on one rank."""
    done = []

    def step(model, batch):
        if dist.get_rank() == which and not done:
            done.append(True)
            action()
        return mean_step(model, batch)

    return step


def raise_error(error):
    def action():
        raise error

    return action


class Scheduler:
    """Fails on one rank, after the optimizer has stepped."""

    def step(self):
        if dist.get_rank() == 1:
            raise ValueError("no such rate")


class Breaking(torch.optim.SGD):
    """Runs out of memory on one rank in the middle of its step."""

    def step(self, closure=None):
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().step(closure)


def run_all():
    """The outcome of each way to fail, and of the next step."""
    rank = dist.get_rank()
    found = {}

    def note(name, training, run=None):
        found[name] = attempt(training, run)
        found[f"after {name}"] = attempt(training)

    note("an error of the user's", Training(on_rank(1, raise_error(ValueError("my own bug")))))
    note("an interrupt", Training(on_rank(2, raise_error(KeyboardInterrupt("ctrl-c")))))
    note("a shortage", Training(on_rank(1, raise_error(torch.OutOfMemoryError("CUDA out of memory. Tried")))))
    tight = FakeDevice(lambda n: 10 + n, total_bytes=1000 if rank else 10)
    note("no memory at all", Training(device=tight))
    note("an error in the scheduler", Training(scheduler=Scheduler()))
    note("a shortage in the update", Training(optimizer=Breaking))
    training = Training(optimizer=Breaking)
    attempt(training)

    def make_again(_):
        autobatch.Runner(training.runner.plan, training.model, step=mean_step, optimizer=training.optimizer)

    found["another call after a failed update"] = attempt(training, make_again if rank == 1 else None)
    found["a new Runner"] = attempt(Training())
    training = Training()
    note("another call", training, training.runner.accumulate if rank == 0 else training.runner.step)
    training = Training()
    if rank == 0:
        with pytest.raises(autobatch.errors.RankFailed) as caught:
            autobatch.Runner(training.runner.plan, training.model, step=mean_step, optimizer=training.optimizer)
        found["another function"] = f"{type(caught.value).__name__}: {caught.value}", []
    else:
        found["another function"] = attempt(training)
    training = Training()
    if rank == 1:
        training.model.module.body[0].requires_grad_(False)
        training.model.module.unused.requires_grad_(False)
    found["frozen on one"] = attempt(training)
    training = Training()
    note("an iterable that fails", training, lambda batch: training.runner.step_over(give_one(batch, fails=rank == 1)))
    training, other = Training(), Training()
    found["another runner"] = attempt(training, (training if rank else other).runner.step)
    training = Training()
    training.model.module.register_buffer("seen", torch.zeros(1 + rank))
    note("other buffers", training)
    training = Training()
    for group in training.optimizer.param_groups:  # as by a scheduler that is given the loss of a rank's own samples
        group["lr"] *= 1 if rank else 0.1
    note("other rates", training)
    training = Training()
    with torch.device("meta"):
        found["a default device"] = attempt(training)
    training = Training()
    if rank == 0:
        training.model.module.head.weight.grad = torch.ones_like(training.model.module.head.weight)
    found["earlier gradients"] = attempt(training)
    training = Training()
    training.batch = (training.batch[0][:4], training.batch[1]) if rank == 2 else training.batch
    found["a wrong batch"] = attempt(training)
    training = Training(lambda model, batch: mean_step(training.model, batch))
    note("a call of the wrapper", training)
    training = Training(sparse_step, make_model=Sparse)
    found["sparse gradients"] = attempt(training)
    training = Training(weigh=lambda batch: 0.0 if rank else float(len(batch[0])))
    found["nothing counts on others"] = attempt(training)
    training = Training(weigh=lambda batch: 0.0)
    found["nothing counts"] = attempt(training)
    found["after nothing counts"] = attempt(training)
    training = Training(samples=8 if rank else 0)
    found["no samples on one"] = attempt(training)
    training = Training(samples=0)
    training.model.requires_grad_(False)
    found["nothing is trained"] = attempt(training)
    training = Training(on_rank(1, lambda: signal.raise_signal(signal.SIGINT)))
    note("a signal", training)
    return found


def give_one(batch, fails):
    if fails:
        raise OSError("disk")
    yield batch


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, labels):
        return self.table(labels)


def sparse_step(model, batch):
    return model(batch[1]).square().mean()


@cache
def answers():
    return run_ranks(run_all, size=SIZE, timeout_seconds=30)


def results_of(name):
    return [value[name] for value in values_of(answers())]


UNDONE = "RankFailed: step 0 was undone on every rank, because it failed on one: "
CHECKPOINT = "CannotRetry: the update of step 0 failed on one rank (rank 1: "


@pytest.mark.parametrize(
    ("name", "which", "own", "others"),
    [
        ("an error of the user's", 1, "ValueError: my own bug", f"{UNDONE}rank 1: ValueError: my own bug"),
        ("an interrupt", 2, "KeyboardInterrupt: ctrl-c", f"{UNDONE}rank 2: KeyboardInterrupt: ctrl-c"),
        ("a signal", 1, "KeyboardInterrupt: ", f"{UNDONE}rank 1: KeyboardInterrupt"),
        ("no memory at all", 0, "DoesNotFit: ", f"{UNDONE}rank 0: DoesNotFit: "),
        ("an iterable that fails", 1, "OSError: disk", f"{UNDONE}rank 1: OSError: disk"),
        ("a wrong batch", 2, "InvalidArgument: ", f"{UNDONE}rank 2: InvalidArgument: "),
    ],
)
def test_an_error_on_one_rank_undoes_the_step_on_all(name, which, own, others):
    """The failing rank gets its own error, the others get its rank and reason; the step is undone."""
    for rank, (text, changed) in enumerate(results_of(name)):
        assert text.startswith(own if rank == which else others)
        assert changed == []


@pytest.mark.parametrize("name", ["an error of the user's", "an interrupt", "a signal"])
def test_the_step_can_be_run_again(name):
    """All ranks are still together."""
    assert results_of(f"after {name}") == [((4, 4), 0)] * SIZE


def test_a_shortage_on_one_rank_is_that_ranks_matter():
    """It continues with smaller micro-batches, and the others with theirs."""
    assert results_of("a shortage") == [((4, 4), 0), ((2, 2, 2, 2), 1), ((4, 4), 0)]


@pytest.mark.parametrize(
    ("name", "own"), [("an error in the scheduler", "ValueError: "), ("a shortage in the update", "CannotRetry: ")]
)
def test_after_an_update_that_failed_on_one_rank_all_are_sent_to_load_a_checkpoint(name, own):
    """Parameters may differ between the ranks. The others have made the update, and learn it in the next call."""
    for rank, outcome in enumerate(results_of(name)):
        assert outcome[0].startswith(own) if rank == 1 else outcome == ((4, 4), 0)
    for text, changed in results_of(f"after {name}"):
        assert text.startswith(CHECKPOINT)
        assert changed == []


def test_an_update_that_failed_is_sent_in_place_of_the_next_calls_own_message():
    """Whichever call that is; then all ranks are together again."""
    for text, changed in results_of("another call after a failed update"):
        assert text.startswith(CHECKPOINT)
        assert changed == []
    assert results_of("a new Runner") == [((4, 4), 0)] * SIZE


def test_ranks_that_make_different_calls_say_so():
    """Instead of summing gradients of different steps."""
    for text, changed in results_of("another call"):
        number = re.search(r"of Runner (\d+)", text)[1]
        assert text == (
            f"RankFailed: the ranks made different calls (rank 0: accumulate 0 of Runner {number}, update; "
            f"rank 1: step 0 of Runner {number}, update; rank 2: step 0 of Runner {number}, update): make the same "
            f"calls in the same order on every rank"
        )
        assert changed == []
    assert results_of("after another call") == [((4, 4), 0)] * SIZE


def test_a_step_on_one_rank_and_a_runner_on_another_do_not_meet():
    """Both fail, and the next exchange is in step again."""
    for text, _ in results_of("another function"):
        assert text.startswith("RankFailed: the ranks made different calls (rank 0: Runner()")
        assert "rank 1: step 0 of Runner " in text


def test_two_runners_of_one_group_are_not_mixed_up():
    """The gradients of different models would be summed."""
    for text, changed in results_of("another runner"):
        assert text.startswith("RankFailed: the ranks made different calls (rank 0: step 0 of Runner ")
        assert changed == []


def test_the_default_device_of_torch_is_not_asked():
    """Exchanges are on the host."""
    assert results_of("a default device") == [((4, 4), 0)] * SIZE


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "earlier gradients",
            "InvalidArgument: gradients from before the step differ between the ranks",
        ),
        ("a call of the wrapper", "InvalidArgument: the step called the DistributedDataParallel model, which"),
        ("other buffers", "InvalidArgument: the ranks have different buffers"),
        ("other rates", "InvalidArgument: learning rates differ between the ranks (rank 0: "),
        ("after other buffers", "InvalidArgument: the ranks have different buffers"),
        ("frozen on one", "InvalidArgument: the ranks train different parameters"),
        ("sparse gradients", "InvalidArgument: sparse gradients are not summed over ranks"),
    ],
)
def test_what_would_be_wrong_is_refused_on_every_rank(name, text):
    """In the same words."""
    for raised, changed in results_of(name):
        assert raised.startswith(text)
        assert changed == []


def test_a_rank_on_which_nothing_counts_takes_part():
    """Its samples have weight 0, or it has none; where that is so on all, nothing happens on any."""
    assert results_of("nothing counts on others") == [((4, 4), 0)] * SIZE
    assert results_of("no samples on one") == [((), 0), ((4, 4), 0), ((4, 4), 0)]
    for name in ("nothing counts", "after nothing counts", "nothing is trained"):
        assert results_of(name) == [((), 0)] * SIZE


def end_at(place, how):
    """A rank's process ends, or stops, at a place of its second step."""
    training = Training()
    training.runner.step(training.batch)
    wait_at_most(100.0 if how == signal.SIGKILL else 4.0)
    before = training.bits()
    if dist.get_rank() == 1:
        arrange(training, place, lambda: os.kill(os.getpid(), how))
    began = time.monotonic()
    with pytest.raises(autobatch.errors.AutobatchError) as caught:
        training.runner.step(training.batch)
        training.runner.step(training.batch)  # a rank that ends in its update is missed here
    seconds = time.monotonic() - began
    return f"{type(caught.value).__name__}: {caught.value}", seconds, differences(training.bits(), before)


def arrange(training, place, action):
    if place == "forward":
        training.model.module.register_forward_pre_hook(lambda *_: action())
    elif place == "backward":
        head = training.model.module.head
        head.register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(lambda _: action()) and None)
    elif place == "sum":
        reduce = dist.all_reduce
        dist.all_reduce = lambda *args, **options: action() or reduce(*args, **options)
    else:
        training.optimizer.register_step_pre_hook(lambda *_: action())


@pytest.mark.parametrize("place", ["forward", "backward", "sum", "update"])
def test_a_rank_that_is_killed_ends_the_step_on_the_others(place):
    """At once, with its name; before the update everything is as it was."""
    found = run_ranks(end_at, place, signal.SIGKILL, size=SIZE, timeout_seconds=90, limit_seconds=200)
    assert found.pop(1).end == "ended with -9"
    for text, seconds, changed in values_of(found):
        assert text.startswith("RankLost: ")
        assert "rank 1 of 3 is gone: its process " in text
        assert seconds < 60
        assert changed == [] or place == "update"


def stop_first():
    wait_at_most(4.0)
    training = Training()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(autobatch.errors.RankLost) as caught:
        training.runner.step(training.batch)
    return str(caught.value)


def test_the_rank_that_has_the_store_may_be_the_one_that_stops():
    """The store answers nobody then, for good."""
    found = run_ranks(stop_first, size=2, timeout_seconds=20, limit_seconds=100, has_own_store=True)
    assert found[0].end == "hung"
    assert values_of(found[1:])[0].startswith("rank 0 of 2 did not answer, and its process ")


def test_a_rank_that_stops_answering_ends_the_step_on_the_others():
    """After the timeout, with its name."""
    found = run_ranks(end_at, "forward", signal.SIGSTOP, size=2, timeout_seconds=20, limit_seconds=100)
    assert found.pop(1).end == "hung"
    ((text, seconds, changed),) = values_of(found)
    assert text.startswith("RankLost: rank 1 of 2 did not answer, and its process ")
    assert 3 < seconds < 80
    assert changed == []
