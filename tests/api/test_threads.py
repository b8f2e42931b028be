"""Two threads run any two of fit, verify, predict, map and step: the process's own state is restored."""

import itertools
import random
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from process_state import read_process_state
from sampling import sample
from torch import nn
from torch._dynamo.testing import CompileCounter

import autobatch
from autobatch.memory.cpu import CpuDevice
from autobatch.memory.device import ONE_AT_A_TIME
from autobatch.prediction.child_process import run_apart

AT_MOST_S = 60
"""For what must happen. A thread that never comes is a failed test, not a hanging one."""
WAITS_S = 0.5
"""For what may be held up until the other thread has gone."""


class Pause:
    """The place at which a thread waits inside its work."""

    def __init__(self):
        self.inside, self.goes_on = threading.Event(), threading.Event()

    def __call__(self):
        if not self.inside.is_set():
            self.inside.set()
            assert self.goes_on.wait(AT_MOST_S)


class Work:
    """A model, its batch, and what can be done with them; the step draws numbers and stops where it is asked to."""

    def __init__(self, pause):
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.batch = torch.randn(8, 4, generator=generator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.pause = pause
        self.plan = autobatch.fit(self.model, 8, batch=self.batch, step=self.quiet_step, check=None)

    def quiet_step(self, model, batch):
        return (model(batch) - torch.rand(()) - random.random() - np.random.rand()).square().mean()

    def step(self, model, batch):
        self.pause()
        return self.quiet_step(model, batch)

    def fit(self):
        autobatch.fit(self.model, 8, batch=self.batch, step=self.step, optimizer=self.optimizer)

    def verify(self):
        autobatch.verify(self.model, self.batch, self.step)

    def train(self):
        autobatch.Runner(self.plan, self.model, self.step, self.optimizer).step(self.batch)

    def map(self):
        def score(batch):
            self.pause()
            return self.model(batch)

        autobatch.map(score, self.batch, progress=False)

    def predict(self):
        self.pause()
        autobatch.predict(self.model, self.batch, self.quiet_step, self.optimizer, gpu="L4", target_batch=8)


def read_generators():
    """The states of all default generators of the CPU."""
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


class Worker(threading.Thread):
    def __init__(self, action):
        super().__init__(daemon=True)
        self.action, self.error, self.is_unchanged = action, None, False

    def run(self):
        before = read_process_state()
        try:
            self.action()
        except BaseException as error:
            self.error = error
        # What is of this thread alone, such as its grad mode, can be read nowhere else.
        self.is_unchanged = all(read_process_state()[name] == before[name] for name in ("dispatch modes", "grad mode"))

    def finish(self):
        self.join(AT_MOST_S)
        assert not self.is_alive()
        assert self.error is None, repr(self.error)
        assert self.is_unchanged


def interleave(first, second, *, first_leaves_first):
    """Two pieces of work, the second entered while the first is inside; one leaves, then the other."""
    workers, pauses = [Worker(first), Worker(second)], [first.__self__.pause, second.__self__.pause]
    with released(workers, pauses):
        workers[0].start()
        assert pauses[0].inside.wait(AT_MOST_S)
        workers[1].start()
        is_beside = pauses[1].inside.wait(WAITS_S)
        for number in (0, 1) if first_leaves_first or not is_beside else (1, 0):
            pauses[number].goes_on.set()
            workers[number].finish()


@contextmanager
def released(workers, pauses):
    """Whatever becomes of the test, no thread is left behind: one that runs while Python ends may abort the process."""
    try:
        yield
    finally:
        for pause in pauses:
            pause.goes_on.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join(AT_MOST_S)


PAIRS = [*itertools.product(["fit", "verify", "train"], repeat=2)]
PAIRS += [("map", "map"), *((name, "map") for name in ("fit", "verify", "train")), ("map", "fit"), ("map", "train")]
PAIRS += [pytest.param(name, "predict", marks=pytest.mark.predicts) for name in ("train", "predict")]


@pytest.mark.parametrize("first_leaves_first", sample([True, False], 4))
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_no_interleaving_leaves_the_process_changed(first, second, first_leaves_first):
    """In whatever order two threads enter and leave; and only a step leaves a trace in the generators."""
    works = getattr(Work(Pause()), first), getattr(Work(Pause()), second)
    before, generators = read_process_state(), read_generators()
    with torch.no_grad():
        interleave(*works, first_leaves_first=first_leaves_first)
        assert not torch.is_grad_enabled()
    assert read_process_state() == before
    assert read_generators() == generators or "train" in (first, second)


def enter_and_leave(contexts, first_leaves_first):
    """Two threads, each in one of these blocks: the second enters while the first is inside."""
    pauses = Pause(), Pause()

    def stay(context, pause):
        with context:
            pause()

    workers = [Worker(lambda c=c, p=p: stay(c, p)) for c, p in zip(contexts, pauses, strict=True)]
    with released(workers, pauses):
        for worker, pause in zip(workers, pauses, strict=True):
            worker.start()
            assert pause.inside.wait(AT_MOST_S)
        for number in (0, 1) if first_leaves_first else (1, 0):
            pauses[number].goes_on.set()
            workers[number].finish()


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_compiled_code_is_eager_in_a_limit_and_compiled_later(first_leaves_first):
    """Whichever of two threads leaves its limit first; torch would never compile again what it met in a mode."""
    counter = CompileCounter()
    compiled = torch.compile(lambda inputs: inputs.sin() + 1, backend=counter)

    @contextmanager
    def call_in_limit():
        with CpuDevice().limit(2**60):
            compiled(torch.ones(4))
            yield
            compiled(torch.ones(4))

    enter_and_leave([call_in_limit(), call_in_limit()], first_leaves_first)
    assert counter.frame_count == 0
    compiled(torch.ones(4))
    assert counter.frame_count == 1


@pytest.mark.parametrize("stance", ["default", "eager_on_recompile"])
def test_the_user_s_own_stance_is_in_force_again_after_a_limit(stance):
    """A stance that was set before."""
    with torch.compiler.set_stance(stance):
        with CpuDevice().limit(2**60), CpuDevice().limit(2**60):
            assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        assert torch._dynamo.eval_frame._stance.stance == stance


def test_a_process_that_is_forked_while_a_thread_measures_can_measure():
    """The thread that would release the lock is not there in the child."""
    pause = Pause()

    def hold():
        with ONE_AT_A_TIME:
            pause()

    def measure():
        with ONE_AT_A_TIME:
            return 3

    worker = Worker(hold)
    with released([worker], [pause]):
        worker.start()
        assert pause.inside.wait(AT_MOST_S)
        assert run_apart(measure, most_seconds=AT_MOST_S) == 3
        pause.goes_on.set()
        worker.finish()
