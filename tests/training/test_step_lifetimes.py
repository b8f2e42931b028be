"""Nothing of a micro-batch lives longer than in a loop by hand, nor does a gradient outlive the step it belongs to."""

import gc
import weakref

import pytest
import torch
from torch import nn
from workloads import make_batch, mean_step

import autobatch

pytestmark = pytest.mark.usefixtures("quiet_log")

NOT_RECORDED = 2
"""Steps before the first one that is not recorded."""


def make_runner(model, **options):
    """Two micro-batches of four a step on the CPU, whose pieces run in no range of a device; and the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = autobatch.fit(
        model, 8, batch=make_batch(8), step=mean_step, optimizer=optimizer, max_micro_batch=4, check=None
    )
    return autobatch.Runner(plan, model, mean_step, optimizer, **options), optimizer


class Traced(torch.autograd.Function):
    """Hangs an object on a node of the graph, which lives as long as the graph does."""

    @staticmethod
    def forward(context, inputs, mark):
        context.mark = mark
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class Mark:
    """The target of a weak reference."""


def trace_graph(model, batch, marks):
    mark = Mark()
    marks.append(weakref.ref(mark))
    return Traced.apply(mean_step(model, batch), mark)


def trace_aux(model, batch, marks):
    """A graph on which what the step returns beside the loss hangs."""
    mark = Mark()
    marks.append(weakref.ref(mark))
    return mean_step(model, batch), Traced.apply(model(batch[0]), mark)


def trace_inputs(model, batch, marks):
    """The micro-batch's own tensor, which the step asks for a gradient of."""
    batch[0].requires_grad_()
    marks.append(weakref.ref(batch[0]))
    return mean_step(model, batch)


TRACES = [trace_graph, trace_aux, trace_inputs]


@pytest.mark.parametrize("trace", TRACES)
def test_nothing_of_a_micro_batch_lives_while_the_next_one_runs(trace):
    """As in a loop by hand that rebinds its variables after each backward pass."""
    marks, alive = [], []

    def step(model, batch):
        alive.append([mark() is not None for mark in marks])
        return trace(model, batch, marks)

    model = nn.Linear(6, 4)
    runner, _ = make_runner(model)
    runner._workload.__dict__["step"] = step
    for _ in range(NOT_RECORDED + 1):
        runner.step(make_batch(8))
    assert len(marks) == 2 * (NOT_RECORDED + 1)
    assert not any(any(found) for found in alive)


@pytest.mark.parametrize("trace", TRACES)
def test_nothing_of_a_failed_micro_batch_lives_when_the_next_size_is_chosen(trace):
    """Its tensors would count against the next one."""
    marks, alive = [], []

    def step(model, batch):
        result = trace(model, batch, marks)
        if len(batch[0]) == 4 and runner.steps == NOT_RECORDED:
            raise torch.OutOfMemoryError("planned")
        return result

    model = nn.Linear(6, 4)
    runner, _ = make_runner(model, hooks=[lambda event: alive.extend(m() is not None for m in marks)])
    runner._workload.__dict__["step"] = step
    for _ in range(NOT_RECORDED):
        runner.step(make_batch(8))
    alive.clear()
    runner.step(make_batch(8))
    assert alive
    assert not any(alive)


def test_what_hangs_on_a_parameter_is_free_when_the_step_lets_go_of_it():
    """An attribute of a parameter that each forward pass replaces, such as a cached cast."""
    references, alive = [], []

    def step(model, batch):
        hidden = model(batch[0]).detach()
        references.append(weakref.ref(hidden))
        model.weight.latest = hidden
        return mean_step(model, batch)

    model = nn.Linear(6, 4)
    runner, optimizer = make_runner(model)
    runner._workload.__dict__["step"] = step
    optimizer.register_step_pre_hook(lambda *_: alive.append([r() is not None for r in references]))
    for number in range(1, NOT_RECORDED + 3):
        runner.step(make_batch(8))
        assert alive[-1] == [False] * (2 * number - 1) + [True]
    before, error = model.weight.latest, ValueError("planned")
    runner._workload.__dict__["step"] = lambda model, batch: raise_after(step, model, batch, error)
    with pytest.raises(ValueError, match="planned"):
        runner.step(make_batch(8))
    assert model.weight.latest is before


def raise_after(step, model, batch, error):
    """A step that fails when all is done."""
    step(model, batch)
    raise error


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}])
def test_a_runner_is_in_no_reference_cycle(options):
    """The model is freed when the last reference to it and its runner goes, without a garbage collection."""
    model = nn.Linear(6, 4)
    runner, optimizer = make_runner(model, **options)
    for _ in range(3):
        runner.step(make_batch(8))
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model, runner, optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_earlier_gradients_are_gone_when_the_optimizer_steps():
    """They are in the sum: a second set of gradients beside it is what the update has no room for."""
    model, batch = nn.Linear(6, 4), make_batch(8)
    runner, optimizer = make_runner(model)
    runner.accumulate(batch)
    earlier = [weakref.ref(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    alive = []
    optimizer.register_step_pre_hook(lambda *_: alive.extend(reference() is not None for reference in earlier))
    runner.step(batch)
    assert alive == [False] * len(earlier)
    assert earlier


@pytest.mark.parametrize("make", [lambda: make_batch(8), lambda: {"both": [*make_batch(8)]}], ids=["tuple", "nested"])
def test_a_batch_is_freed_with_the_last_name_that_the_loop_has_for_it(make):
    """Only reference counts free it: a cycle would hold the batches of many steps in the device's memory."""

    def step(model, batch):
        return mean_step(model, batch["both"] if isinstance(batch, dict) else batch)

    model = nn.Linear(6, 4)
    plan = autobatch.fit(model, 8, batch=make(), step=step, max_micro_batch=4, check=None)
    runner = autobatch.Runner(plan, model, step, torch.optim.SGD(model.parameters(), lr=0.1))
    gc.collect()
    gc.disable()
    try:
        references = []
        for _ in range(4):
            batch = make()
            references += [weakref.ref(tensor) for tensor in (batch["both"] if isinstance(batch, dict) else batch)]
            runner.step(batch)
            del batch
        assert not [reference for reference in references if reference() is not None]
    finally:
        gc.enable()


def test_a_parameter_that_a_later_forward_pass_makes_gives_up_its_gradient():
    """The next step begins without it, also where the optimizer holds the parameter by then."""
    model, calls = nn.Linear(3, 1), []

    def step(model, rows):
        calls.append(1)
        if len(calls) == 5:
            model.new = nn.Linear(3, 1, bias=False)
            nn.init.zeros_(model.new.weight)
        out = model(rows)
        return (out + model.new(rows) if hasattr(model, "new") else out).mean()

    def mean(model, rows):
        return model(rows).mean()

    rows = torch.ones(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = autobatch.fit(model, 4, batch=rows, step=mean, check=None)
    runner = autobatch.Runner(plan, model, step, optimizer)
    while not hasattr(model, "new"):
        runner.step(rows)
    assert model.new.weight.grad is None
    optimizer.add_param_group({"params": model.new.parameters()})
    runner.step(rows)
    torch.testing.assert_close(model.new.weight.detach(), torch.full((1, 3), -0.1))
