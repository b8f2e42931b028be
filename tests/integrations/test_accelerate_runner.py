"""A Runner with what ``accelerator.prepare`` returns, beside accelerate's own loop with whole batches."""

from __future__ import annotations

from types import SimpleNamespace

import accelerate
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainers import apart

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.testing import FakeDevice, oom_at


@pytest.fixture(autouse=True)
def _no_accelerator_before():
    """Begin without what accelerate remembers for the whole process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Prepared:
    """Everything from one ``accelerator.prepare``, and four batches of 31 samples."""

    def __init__(self, dtype=torch.float64, *, scaled=False, two=False, **options):
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        if scaled:  # on a card accelerate makes it itself
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        torch.manual_seed(0)
        inputs, targets = torch.randn(124, 16, dtype=dtype), torch.randint(0, 4, (124,))
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(dtype)
        groups = [list(layer.parameters()) for layer in (model[0], model[2])] if two else [list(model.parameters())]
        optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=31)
        self.model, self.loader = self.accelerator.prepare(model, loader)
        self.optimizers = [self.accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]
        self.schedulers = [self.accelerator.prepare_scheduler(scheduler) for scheduler in schedulers]

    def rates(self):
        return [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]


def step(model, batch):
    """The mean over the samples of a micro-batch."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float() if inputs.dtype == torch.float32 else model(inputs), targets)


def train_whole(prepared):
    """The loop of accelerate's documentation, 31 samples at once; clipped as on a card, where it unscales before."""
    for batch in prepared.loader:
        prepared.accelerator.backward(step(prepared.model, batch))
        if (scaler := prepared.accelerator.scaler) is not None:
            for optimizer in prepared.optimizers:
                scaler.unscale_(optimizer.optimizer)
        prepared.accelerator.clip_grad_norm_(prepared.model.parameters(), 0.5)
        for optimizer, scheduler in zip(prepared.optimizers, prepared.schedulers, strict=True):
            if scaler is None or len(prepared.optimizers) == 1:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return prepared


def card():
    return FakeDevice(lambda n: 100_000 + 10_000 * n, total_bytes=180_000)


def train_in_parts(prepared, **options):
    """A Runner with the prepared objects as they are."""
    runner = None
    for number, batch in enumerate(prepared.loader):
        if runner is None:
            runner = autobatch.Runner.fit(
                prepared.model,
                31,
                batch=batch,
                step=step,
                optimizer=prepared.optimizers,
                device=card(),
                headroom=0,
                max_grad_norm=0.5,
                scheduler=prepared.schedulers,
                **options,
            )
            assert runner.plan.micro_batch_sizes == (8, 8, 8, 7)
            assert runner.plan.verdict.exact
            assert runner.plan.warnings == ()
        with oom_at(9 if number == 2 else 10_000):
            result = runner.step(batch)
        assert result.retries == (number == 2)
    return prepared


CASES = {
    "prepared": ({}, {}, 1e-12),
    "two optimizers": ({"two": True}, {}, 1e-12),
    "scaler": ({"scaled": True}, {}, 1e-12),
    "float32": ({"dtype": torch.float32}, {}, 1e-5),
    "bfloat16 autocast": ({"dtype": torch.float32, "mixed_precision": "bf16"}, {}, 2e-2),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 2}, {}, 1e-12),
}


@pytest.mark.parametrize("name", CASES)
def test_prepared_objects_end_where_whole_batches_end(name):
    """Weights, learning rates and the scaler's scale, with one step that runs out of memory."""
    options, given, tolerance = CASES[name]
    ours = train_in_parts(Prepared(**options), **given)
    whole = train_whole(Prepared(**{**options, "gradient_accumulation_steps": 1}))
    assert apart(SimpleNamespace(model=ours.model), SimpleNamespace(model=whole.model)) < tolerance
    assert ours.rates() == whole.rates()
    if options.get("scaled"):
        assert ours.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()


def test_accelerators_own_backward():
    """In place of ``loss.backward()``, as hooks of accelerate may need it."""
    prepared = Prepared()
    ours = train_in_parts(prepared, backward=prepared.accelerator.backward)
    whole = train_whole(Prepared())
    assert apart(SimpleNamespace(model=ours.model), SimpleNamespace(model=whole.model)) < 1e-12


def test_a_backward_that_divides_again_is_refused():
    """The function divides by gradient_accumulation_steps, and the Runner has divided."""
    prepared = Prepared(gradient_accumulation_steps=2)
    with pytest.raises(
        InvalidArgument, match=r"by 0\.5, and the Runner has divided .* such as gradient_accumulation_steps=1"
    ):
        train_in_parts(prepared, backward=prepared.accelerator.backward)


@pytest.mark.parametrize("unwrapped", [False, True], ids=["prepared optimizer", "the one inside"])
def test_accumulate_inside_accumulate_is_refused(unwrapped):
    """Whichever optimizer the Runner has: accelerate's would add up two batches, and nothing would divide the sum."""
    prepared = Prepared(gradient_accumulation_steps=2)
    [optimizer] = prepared.optimizers
    batch, *_ = prepared.loader
    optimizer = optimizer.optimizer if unwrapped else optimizer
    runner = autobatch.Runner.fit(
        prepared.model, 31, batch=batch, step=step, optimizer=optimizer, device=card(), headroom=0
    )
    with prepared.accelerator.accumulate(prepared.model):
        with pytest.raises(
            InvalidArgument, match=r"nothing would divide the sum; leave accelerator\.accumulate\(\) out"
        ):
            runner.accumulate(batch)
        assert all(parameter.grad is None for parameter in prepared.model.parameters())


@pytest.mark.parametrize("steps", [1, 2])
def test_accumulate_in_a_loop_of_ones_own(steps):
    """Outside of ``accumulate()``, or in it with one step: the batch's gradient, and accelerate's optimizer steps."""
    prepared, whole = Prepared(gradient_accumulation_steps=steps), train_whole(Prepared())
    [optimizer], [scheduler], runner = prepared.optimizers, prepared.schedulers, None
    for batch in prepared.loader:
        runner = runner or autobatch.Runner.fit(
            prepared.model, 31, batch=batch, step=step, optimizer=optimizer, device=card(), headroom=0
        )
        if steps == 1:
            with prepared.accelerator.accumulate(prepared.model):
                runner.accumulate(batch)
        else:
            runner.accumulate(batch)
        prepared.accelerator.clip_grad_norm_(prepared.model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert apart(SimpleNamespace(model=prepared.model), SimpleNamespace(model=whole.model)) < 1e-12
