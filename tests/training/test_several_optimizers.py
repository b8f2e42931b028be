"""Several optimizers and schedulers in one step: all or nothing for all of them."""

import pytest
import torch
from faults import cut_into
from sampling import sample
from torch import nn
from workloads import Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import CannotRetry, DoesNotFit, InvalidArgument
from autobatch.testing import FakeDevice, oom_at

LR = 0.05


def make_optimizers(model, *kinds):
    """The body's and the head's, each of its own kind."""
    parts = [model.body.parameters(), model.head.parameters()]
    return [kind(part, lr=LR) for kind, part in zip(kinds, parts, strict=True)]


class Training:
    """A body moved by AdamW, a head by SGD with momentum, each with a schedule."""

    def __init__(self, kinds=(torch.optim.AdamW, torch.optim.SGD), scaled=False, plan=None, **options):
        torch.manual_seed(1)
        self.model = Plain()
        self.optimizers = make_optimizers(self.model, *kinds)
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, step, gamma=0.5)
            for optimizer, step in zip(self.optimizers, (1, 2), strict=True)
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if scaled else None
        options |= {"device": FakeDevice(lambda n: 10 + n, total_bytes=1000), "max_grad_norm": 0.1}
        options |= {"scheduler": self.schedulers, "scaler": self.scaler}
        if plan is not None:
            self.runner = autobatch.Runner(plan, self.model, mean_step, self.optimizers, **options)
            return
        self.runner = autobatch.Runner.fit(
            self.model,
            16,
            batch=make_batch(8, torch.float64),
            step=mean_step,
            optimizer=self.optimizers,
            max_micro_batch=4,
            check=None,
            **options,
        )

    def state(self):
        found = dict(bits_of(self.model))
        for index, optimizer in enumerate(self.optimizers):
            found |= {f"{index} {key}": value for key, value in bits_of(nn.Module(), optimizer).items()}
        found["rates"] = [scheduler.get_last_lr() for scheduler in self.schedulers]
        found["scaler"] = None if self.scaler is None else self.scaler.state_dict()
        return found


def run_by_hand(steps, *, scaled):
    """The full batch at once, as a loop by hand does it."""
    torch.manual_seed(1)
    model = Plain()
    optimizers = make_optimizers(model, torch.optim.AdamW, torch.optim.SGD)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, step, gamma=0.5)
        for optimizer, step in zip(optimizers, (1, 2), strict=True)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
    for number in range(steps):
        scaler.scale(mean_step(model, make_batch(16, torch.float64, number))).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([*model.body.parameters(), *model.head.parameters()], 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("scaled", [False, True])
def test_steps_are_those_of_a_loop_by_hand(scaled):
    """In float64 to rounding: clipped together, scaled once, each with its own schedule."""
    training, expected = Training(scaled=scaled), run_by_hand(4, scaled=scaled)
    for number in range(4):
        training.runner.step(make_batch(16, torch.float64, number))
    for found, wanted in zip(training.model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-13)
    assert training.schedulers[0].get_last_lr() == [LR / 16]
    assert training.schedulers[1].get_last_lr() == [LR / 4]


@pytest.mark.parametrize("scaled", [False, True])
def test_fit_leaves_no_trace_in_any(scaled):
    """State, groups and schedules as before; gradients too."""
    training = Training(scaled=scaled)
    before = Training(scaled=scaled)
    assert not differences(training.state(), before.state())
    assert not any(optimizer.state for optimizer in training.optimizers)
    assert "AdamW + SGD" in training.runner.plan.identity.optimizer


@pytest.mark.parametrize("scaled", [False, True])
def test_memory_that_ends_anywhere(scaled, quiet_log):
    """Retried exactly, or everything as before, or CannotRetry where the first one has begun."""
    batch, reference = make_batch(16, torch.float64), Training(scaled=scaled)
    before = reference.state()
    with oom_at(10**9) as counted:
        reference.runner.step(batch)
    committed = {(4, 4, 4, 4): reference.state()}
    outcomes, plan = [], reference.runner.plan
    for position in sample(range(1, counted.operations + 1), 7):
        training = Training(scaled=scaled, plan=plan)
        try:
            with oom_at(position):
                sizes = training.runner.step(batch).micro_batch_sizes
        except CannotRetry:
            outcomes.append("reported")
            continue
        except (DoesNotFit, torch.OutOfMemoryError):
            outcomes.append("undone")
            assert not [d for d in differences(training.state(), before) if "gradient object" not in d]
            continue
        outcomes.append("retried")
        if sizes not in committed:
            other = Training(scaled=scaled, plan=plan)
            cut_into(other.runner, sizes)
            other.runner.step(batch)
            committed[sizes] = other.state()
        assert not [d for d in differences(training.state(), committed[sizes]) if "gradient object" not in d]
    assert set(outcomes) == {"retried", "undone", "reported"}


class Failing(torch.optim.SGD):
    error = ValueError("my own")

    def step(self, closure=None):
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError("my own"), ValueError), (torch.OutOfMemoryError("CUDA out of memory"), CannotRetry)],
)
def test_nothing_is_retried_once_the_first_has_stepped(error, expected):
    """The second one fails: the first one's parameters have moved, once."""

    class Broken(Failing):
        pass

    Broken.error = ValueError("not in a trial")
    torch.manual_seed(1)
    model = Plain()
    optimizers = make_optimizers(model, torch.optim.SGD, Broken)
    plan = Training().runner.plan
    runner = autobatch.Runner(plan, model, mean_step, optimizers, device=FakeDevice(lambda n: 10 + n, total_bytes=1000))
    Broken.error = error
    weight = model.body[0].weight.detach().clone()
    loss_gradient = torch.autograd.grad(mean_step(model, make_batch(16, torch.float64)), model.body[0].weight)[0]
    with pytest.raises(expected):
        runner.step(make_batch(16, torch.float64))
    assert torch.allclose(weight - LR * loss_gradient, model.body[0].weight, rtol=1e-11, atol=1e-14)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.predicts
def test_a_prediction_counts_the_state_of_all():
    """Two of AdamW's moments for the body, one buffer of SGD's for the head."""
    torch.manual_seed(1)
    model, batch = Plain(torch.float32), make_batch(8)
    moments = sum(parameter.numel() for parameter in model.body.parameters()) * 2 * 4
    peaks = {}
    for name, optimizer in {
        "both": [torch.optim.AdamW(model.body.parameters()), torch.optim.SGD(model.head.parameters(), momentum=0.9)],
        "head": torch.optim.SGD(model.head.parameters(), momentum=0.9),
    }.items():
        predicted = autobatch.predict(model, batch, mean_step, optimizer, target_batch=16, gpu="24GiB")
        peaks[name] = predicted.plan.curve.peak_allocated(8)
    assert peaks["both"] - peaks["head"] >= moments


def test_a_list_of_one_is_that_one():
    """Nothing is different."""
    torch.manual_seed(1)
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    runner = autobatch.Runner(
        Training().runner.plan, model, mean_step, [optimizer], scheduler=[scheduler], device=device
    )
    runner.step(make_batch(16, torch.float64))
    assert runner._workload.optimizer is optimizer
    assert scheduler.get_last_lr() == [pytest.approx(LR / 10)]


def share(model):
    return [torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.head.parameters())]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (share, r"^optimizer\[0\] and optimizer\[1\] both hold a parameter of shape \(4, 10\).*moved twice"),
        (lambda model: [], r"^optimizer=\[\] holds none"),
        (lambda model: [None], r"^optimizer=\[None\] holds none"),
        (lambda model: (None, None), r"^optimizer=\[None, None\] holds none"),
        (lambda model: [torch.optim.SGD(model.parameters()), 3], r"^optimizer=3 is not an optimizer"),
        (lambda model: [torch.optim.SGD(nn.Linear(1, 1).parameters())] * 1, "holds none of the parameters"),
        (
            lambda model: [
                torch.optim.SGD(nn.Linear(1, 1).parameters()),
                torch.optim.AdamW(nn.Linear(1, 1).parameters()),
            ],
            r"^SGD \+ AdamW holds none of the parameters",
        ),
        (
            lambda model: [torch.optim.SGD(model.body.parameters()), torch.optim.LBFGS(model.head.parameters())],
            "LBFGS calls a closure",
        ),
    ],
)
def test_what_cannot_be_stepped_together_is_refused(make, message):
    """In ``fit`` and in ``Runner``."""
    model = Plain()
    with pytest.raises(InvalidArgument, match=message):
        autobatch.fit(model, 16, batch=make_batch(4, torch.float64), step=mean_step, optimizer=make(model))
    with pytest.raises(InvalidArgument, match=message):
        autobatch.Runner(Training().runner.plan, model, mean_step, make(model))


def test_an_optimizer_that_calls_a_closure_runs_on_accumulated_gradients():
    """As the message says: the closure accumulates the whole batch, so LBFGS moves as on all samples at once."""
    found, batch = [], make_batch(16, torch.float64)
    for is_divided in (True, False):
        torch.manual_seed(1)
        model = Plain()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        if is_divided:
            with pytest.raises(InvalidArgument, match=r"LBFGS.*optimizer=None.*runner\.accumulate\(batch\)"):
                autobatch.fit(model, 16, batch=batch, step=mean_step, optimizer=optimizer)
        plan = autobatch.fit(model, 16, batch=batch, step=mean_step, max_micro_batch=4 if is_divided else 16)
        runner = autobatch.Runner(plan, model, mean_step, None)

        def closure(runner=runner, optimizer=optimizer):
            optimizer.zero_grad()
            return runner.accumulate(batch).loss

        for _ in range(3):
            optimizer.step(closure)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.allclose(*found, rtol=1e-8, atol=1e-10)
