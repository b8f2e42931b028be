"""A step that does the training loop's work is refused by name before anything has moved."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from sampling import sample
from torch import nn
from workloads import bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.step.workload import Workload


class Wrapped:
    """An optimizer inside another object, as frameworks hold it."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


class HandMade:
    def __init__(self, parameters):
        self.param_groups, self.state = [{"params": list(parameters), "lr": 0.1}], {}

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1)

    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


class Training:
    """A model, and what trains it; ``wrapped`` and ``scheduler`` are other ways to the same optimizer."""

    def __init__(self, make=torch.optim.AdamW):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.optimizer = make(self.model.parameters())
        self.wrapped = Wrapped(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.scheduler = None
        if isinstance(self.optimizer, torch.optim.Optimizer):
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def bits(self):
        scheduler = {} if self.scheduler is None else self.scheduler.state_dict()
        return {**bits_of(self.model, self.optimizer), "scheduler": {k: repr(v) for k, v in scheduler.items()}}


def whole_loop(training, model, batch):
    training.optimizer.zero_grad()
    loss = mean_step(model, batch)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return loss


def backward_and_no_gradients(training, model, batch, *, set_to_none=True):
    """The gradients are gone when the step returns."""
    loss = mean_step(model, batch)
    loss.backward()
    model.zero_grad(set_to_none=set_to_none)
    return loss


def retained(training, model, batch):
    loss = mean_step(model, batch)
    loss.backward(retain_graph=True)
    model.zero_grad()
    return loss


def by_function(training, model, batch):
    loss = mean_step(model, batch)
    torch.autograd.backward([loss])
    training.wrapped.zero_grad()
    return loss


def scaled(training, model, batch):
    loss = mean_step(model, batch)
    training.scaler.scale(loss).backward()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    return loss


def detached(training, model, batch):
    loss = mean_step(model, batch)
    loss.backward()
    return loss.detach()


def closure(training, model, batch):
    losses = []

    def compute():
        training.optimizer.zero_grad()
        losses.append(mean_step(model, batch))
        losses[-1].backward()
        return losses[-1]

    training.optimizer.step(compute)
    return losses[-1]


def swallowed(training, model, batch):
    loss = mean_step(model, batch)
    try:
        loss.backward()
    except Exception:
        model.zero_grad()
    return loss


BACKWARD = {
    "the whole loop": whole_loop,
    "backward, then gradients set to None": backward_and_no_gradients,
    "backward, then gradients set to zero": partial(backward_and_no_gradients, set_to_none=False),
    "backward that retains its graph": retained,
    "torch.autograd.backward": by_function,
    "a scaled loss": scaled,
    "a detached loss": detached,
    "an error that the step caught": swallowed,
}


def update_only(training, model, batch):
    loss = mean_step(model, batch)
    training.optimizer.step()
    return loss


def wrapped_update(training, model, batch):
    training.wrapped.step()
    return mean_step(model, batch)


def held_in_containers(training, model, batch):
    {"optimizers": [training.wrapped]}["optimizers"][0].step()
    return mean_step(model, batch)


UPDATE = {
    "its step alone": update_only,
    "with a closure": closure,
    "in a wrapper": wrapped_update,
    "in containers": held_in_containers,
}


def schedule(training, model, batch):
    training.scheduler.step()
    return mean_step(model, batch)


LOOPS = {
    **{
        name: (loop, "the step calls backward: return the loss, autobatch runs the backward pass")
        for name, loop in BACKWARD.items()
    },
    **{name: (loop, "the step calls optimizer.step(): return the loss") for name, loop in UPDATE.items()},
    "a scheduler": (schedule, "the step calls scheduler.step(): return the loss"),
}


def run_in_fit(training, step, batch):
    autobatch.fit(training.model, 8, batch=batch, step=step, optimizer=training.optimizer)


def run_in_fit_without_optimizer(training, step, batch):
    autobatch.fit(training.model, 8, batch=batch, step=step)


def run_in_verify(training, step, batch):
    autobatch.verify(training.model, batch, step)


def run_in_predict(training, step, batch):
    autobatch.predict(training.model, batch, step, training.optimizer, gpu="L4", target_batch=8)


def make_plan(training, batch):
    return autobatch.fit(
        training.model, 8, batch=batch, step=mean_step, optimizer=training.optimizer, max_micro_batch=4
    )


def run_in_runner(training, step, batch):
    plan = make_plan(training, batch)
    autobatch.Runner(plan, training.model, step, training.optimizer).step(batch)


def run_in_accumulate(training, step, batch):
    plan = make_plan(training, batch)
    autobatch.Runner(plan, training.model, step, None).accumulate(batch)


def run_wrapped(training, step, batch):
    """One training step with an optimizer that is none of torch's."""
    plan = make_plan(training, batch)
    autobatch.Runner(plan, training.model, step, training.wrapped).step(batch)


USES = {
    "fit": run_in_fit,
    "fit without an optimizer": run_in_fit_without_optimizer,
    "verify": run_in_verify,
    "predict": run_in_predict,
    "Runner.step": run_in_runner,
    "Runner.accumulate": run_in_accumulate,
    "Runner.step with a wrapped optimizer": run_wrapped,
}


@pytest.mark.parametrize("use", sample([use for use in USES if use != "predict"], 3))
@pytest.mark.parametrize("name", LOOPS)
def test_a_training_loop_is_refused_by_name_before_anything_has_moved(name, use):
    """Whoever runs the step and however it does the loop's work: one error, and all is bit for bit as before."""
    loop, message = LOOPS[name]
    training, batch = Training(), make_batch(8)
    before = training.bits()
    with pytest.raises(InvalidArgument) as caught:
        USES[use](training, lambda model, part: loop(training, model, part), batch)
    assert str(caught.value).startswith(message)
    assert differences(training.bits(), before) == []


@pytest.mark.predicts
@pytest.mark.parametrize("name", ["the whole loop", "a scaled loss", "its step alone", "a detached loss"])
def test_a_prediction_refuses_a_training_loop_by_name(name):
    """Nothing is run for a prediction, and the step is refused in the same words."""
    loop, message = LOOPS[name]
    training, batch = Training(), make_batch(8)
    before = training.bits()
    with pytest.raises(InvalidArgument) as caught:
        run_in_predict(training, lambda model, part: loop(training, model, part), batch)
    assert str(caught.value).startswith(message)
    assert differences(training.bits(), before) == []


@pytest.mark.parametrize("use", ["fit", "Runner.step"])
@pytest.mark.parametrize("loop", [whole_loop, update_only])
def test_an_optimizer_that_is_none_of_torchs_is_refused_as_well(loop, use):
    """Where there is no hook, its method is covered, and there again afterwards."""
    training, batch = Training(HandMade), make_batch(8)
    before = training.bits()
    with pytest.raises(InvalidArgument, match=r"the step calls (backward|optimizer\.step\(\))"):
        USES[use](training, lambda model, part: loop(training, model, part), batch)
    assert differences(training.bits(), before) == []
    assert "step" not in vars(training.optimizer)


class Task:
    """A step that is a method of the object that holds all else."""

    def __init__(self, training):
        self.training, self.setup = training, {"optimizer": training.wrapped}

    def __call__(self, model, batch):
        self.setup["optimizer"].step()
        return mean_step(model, batch)

    def run(self, model, batch):
        return self(model, batch)


def call(step, model, batch):
    return step(model, batch)


@pytest.mark.parametrize(
    "make", [Task, lambda training: Task(training).run, lambda training: partial(call, Task(training))]
)
def test_an_optimizer_is_found_wherever_the_step_holds_it(make):
    """A callable object, a method, a partial: the update is refused though nobody passed the optimizer."""
    training = Training()
    before = training.bits()
    with pytest.raises(InvalidArgument, match=r"optimizer\.step\(\)"):
        Workload(training.model, make(training)).run(make_batch(4))
    assert differences(training.bits(), before) == []


def gradient_penalty(model, batch):
    inputs = batch[0].clone().requires_grad_()
    scores = model(inputs)
    [slope] = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return nn.functional.cross_entropy(scores, batch[1]) + slope.square().sum(1).mean()


def adversarial(model, batch):
    """With an input that is moved along its gradient."""
    inputs = batch[0].clone().requires_grad_()
    mean_step(model, (inputs, batch[1])).backward(inputs=[inputs])
    return mean_step(model, (batch[0] + 0.1 * inputs.grad.sign(), batch[1]))


def parameters_gradient(model, batch):
    """With a gradient of the parameters that goes nowhere."""
    loss = mean_step(model, batch)
    slopes = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    return loss + 0 * sum(slope.square().sum() for slope in slopes)


def trains_another(model, batch):
    other = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    mean_step(other, batch).backward()
    optimizer.step()
    return mean_step(model, batch)


def draws_a_closed_over_optimizers_rate(training):
    return lambda model, batch: mean_step(model, batch) * (1 + training.optimizer.param_groups[0]["lr"])


LEGITIMATE = {
    "a gradient penalty": lambda _: gradient_penalty,
    "an adversarial input": lambda _: adversarial,
    "a gradient of the parameters": lambda _: parameters_gradient,
    "another model's training": lambda _: trains_another,
    "a look at the optimizer": draws_a_closed_over_optimizers_rate,
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_what_moves_nothing_of_the_workload_passes(name):
    """Gradients that the step takes for itself, and training of what is not trained here."""
    training, batch = Training(partial(torch.optim.SGD, lr=0.1)), make_batch(8)
    step = LEGITIMATE[name](training)
    assert autobatch.verify(training.model, batch, step).exact
    run_in_runner(training, step, batch)


def test_the_guard_leaves_no_trace():
    """Hooks, attributes and what torch keeps of them are as before, also after a refusal."""
    training = Training()
    workload = Workload(
        training.model, lambda model, batch: whole_loop(training, model, batch), None, training.optimizer
    )
    attributes = set(vars(training.optimizer))
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            workload.run(make_batch(4))
        training.model.zero_grad()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in training.model.parameters())
    assert not training.optimizer._optimizer_step_pre_hooks
    assert set(vars(training.optimizer)) == attributes
    assert "step" not in vars(training.scheduler)
    mean_step(training.model, make_batch(4)).backward()
    training.optimizer.step()
    training.scheduler.step()


def test_an_optimizer_that_nobody_can_find_moves_nothing_either():
    """It is made in the step itself, and steps after a backward pass, which is refused at once."""
    training, batch = Training(), make_batch(8)

    def step(model, part):
        loss = mean_step(model, part)
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return loss

    workload = Workload(training.model, step, None, training.optimizer)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    with pytest.raises(InvalidArgument, match=r"calls backward"):
        workload.run(batch)
    assert all(map(torch.equal, before, training.model.parameters()))


def leaves_gradients(training, model, batch):
    loss = mean_step(model, batch)
    loss.backward(retain_graph=True)
    return loss


def puts_gradients_back(training, model, batch, *, retain_graph=True):
    """The tensors that stood in .grad stand there again."""
    earlier = [parameter.grad for parameter in model.parameters()]
    loss = mean_step(model, batch)
    loss.backward(retain_graph=retain_graph)
    for parameter, gradient in zip(model.parameters(), earlier, strict=True):
        parameter.grad = gradient
    return loss


def puts_gradients_back_in_hooks(training, model, batch):
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda p, earlier=parameter.grad: setattr(p, "grad", earlier))
        for parameter in model.parameters()
    ]
    loss = mean_step(model, batch)
    try:
        loss.backward(retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return loss


def fails_after_backward(training, model, batch):
    puts_gradients_back(training, model, batch)
    raise ValueError("planned")


@cache
def plan_once():
    """The same for all models of this kind."""
    return make_plan(Training(), make_batch(8))


LATER = [
    leaves_gradients,
    puts_gradients_back,
    partial(puts_gradients_back, retain_graph=False),
    puts_gradients_back_in_hooks,
    fails_after_backward,
    *BACKWARD.values(),
]


@pytest.mark.parametrize("call", [3, 4])
@pytest.mark.parametrize("loop", LATER)
def test_a_loop_that_begins_later_is_refused_by_the_same_name(loop, call):
    """In the second step only, also where .grad holds the same tensors afterwards."""
    training, calls = Training(), []

    def step(model, batch):
        calls.append(True)
        return loop(training, model, batch) if len(calls) == call else mean_step(model, batch)

    runner = autobatch.Runner(plan_once(), training.model, step, training.optimizer)
    while len(calls) + 2 < call:
        runner.step(make_batch(8))
    before = training.bits()
    with pytest.raises(InvalidArgument, match="the step calls backward: return the loss"):
        runner.step(make_batch(8))
    assert differences(training.bits(), before) == []
    assert not any(parameter._post_accumulate_grad_hooks for parameter in training.model.parameters())


def test_after_an_error_the_next_step_is_watched_again():
    """Later steps are not, as no script begins to call backward in the middle of a training."""
    training, calls = Training(), []

    def step(model, batch):
        calls.append(True)
        if len(calls) == 7:
            raise ValueError("planned")
        if len(calls) == 8:
            training.optimizer.step()
        return mean_step(model, batch)

    runner = autobatch.Runner(plan_once(), training.model, step, training.optimizer)
    for _ in range(3):
        runner.step(make_batch(8))
    with pytest.raises(ValueError, match="planned"):
        runner.step(make_batch(8))
    with pytest.raises(InvalidArgument, match=r"calls optimizer\.step"):
        runner.step(make_batch(8))


def accelerated(optimizer):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare_optimizer(optimizer)


def lightning(optimizer):
    from pytorch_lightning import LightningModule
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.strategies import SingleDeviceStrategy

    wrapper = LightningOptimizer(optimizer)
    wrapper._strategy = SingleDeviceStrategy("cpu")
    wrapper._strategy._lightning_module = LightningModule()
    return wrapper


@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "held by the step"])
@pytest.mark.parametrize("wrap", [accelerated, lightning])
def test_the_wrappers_of_frameworks_are_refused(wrap, is_passed):
    """They derive from torch's optimizers and never call their hooks; the optimizer inside does."""
    training = Training()
    wrapper = wrap(training.optimizer)
    before = training.bits()

    def step(model, batch):
        wrapper.step()
        return mean_step(model, batch)

    workload = Workload(training.model, step, None, wrapper if is_passed else None)
    with pytest.raises(InvalidArgument, match=r"calls optimizer\.step\(\)"):
        workload.run(make_batch(4))
    assert differences(training.bits(), before) == []


@pytest.mark.parametrize("way", ["optimizer", "wrapped"])
@pytest.mark.parametrize(
    "asked",
    ["fit", "verify", pytest.param("predict", marks=pytest.mark.predicts), "runner", "runner with one micro-batch"],
)
def test_zero_grad_in_the_step_is_refused_by_all_alike(asked, way):
    """Also where no gradient stands, or the step runs on other tensors than the optimizer's, as in predict."""
    training, batch = Training(), make_batch(8)

    def step(model, part):
        getattr(training, way).zero_grad()
        return mean_step(model, part)

    def run(size):
        options = {"batch": batch, "step": mean_step, "optimizer": training.optimizer, "max_micro_batch": size}
        plan = autobatch.fit(training.model, 8, **options)
        autobatch.Runner(plan, training.model, step, training.optimizer).step(batch)

    ask = {
        "fit": lambda: autobatch.fit(training.model, 8, batch=batch, step=step, optimizer=training.optimizer),
        "verify": lambda: autobatch.verify(training.model, batch, step),
        "predict": lambda: autobatch.predict(training.model, batch, step, training.optimizer, gpu="24GiB"),
        "runner": lambda: run(4),
        "runner with one micro-batch": lambda: run(8),
    }[asked]
    before = training.bits()
    attributes = {*vars(training.optimizer)}
    with pytest.raises(InvalidArgument, match=r"leave backward\(\) and zero_grad\(\) to autobatch"):
        ask()
    assert differences(training.bits(), before) == []
    assert {*vars(training.optimizer)} == attributes


@pytest.mark.parametrize("use", ["fit", "verify", "Runner.step"])
def test_gradients_that_the_step_sets_to_none_are_seen(use):
    """By the model's own method, where an earlier micro-batch has left some."""
    training = Training()

    def step(model, part):
        model.zero_grad()
        return mean_step(model, part)

    with pytest.raises(InvalidArgument, match=r"leave backward\(\) and zero_grad\(\) to autobatch"):
        USES[use](training, step, make_batch(8))


def test_another_networks_zero_grad_is_its_own():
    """An optimizer of parameters that are not trained here is not watched."""
    training, other = Training(), nn.Linear(6, 4)
    others = torch.optim.SGD(other.parameters(), 0.1)

    def step(model, part):
        others.zero_grad()
        return mean_step(model, part)

    assert autobatch.verify(training.model, make_batch(8), step).exact
