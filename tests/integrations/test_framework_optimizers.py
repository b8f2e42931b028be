"""The user's own objects inside wrappers, with the real wrappers of Lightning and accelerate."""

from __future__ import annotations

import warnings

import pytest
import torch
from sampling import sample
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from workloads import Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch._wrappers import (
    unwrap_for_training,
    unwrap_model,
    unwrap_optimizer,
    warn_of_wrapper,
)
from autobatch.errors import InvalidArgument

with warnings.catch_warnings():  # what these packages and theirs warn of on import is not ours
    warnings.simplefilter("ignore")
    import accelerate
    import lightning_fabric
    import pytorch_lightning
    from lightning_fabric.strategies import SingleDeviceStrategy
    from lightning_fabric.wrappers import _FabricOptimizer
    from pytorch_lightning.core.optimizer import LightningOptimizer

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs; our own go to the log and into the plan


@pytest.fixture(autouse=True)
def _no_accelerator_before():
    """Begin without what accelerate remembers for the whole process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def make_model():
    """A model of a few parameters, in float32."""
    return Plain(torch.float32)


def test_unwrap_model() -> None:
    """Under torch.compile and data parallel wrappers lies the user's own module; a `module` wraps nothing."""
    model = nn.Sequential()
    model.module = nn.Linear(3, 1)
    assert unwrap_model(model) is model
    assert unwrap_model(DataParallel(model)) is model
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert unwrap_model(torch.compile(DistributedDataParallel(model), backend="eager")) is model
    finally:
        torch.distributed.destroy_process_group()


class Calls:
    def __init__(self):
        self.steps = 0

    def on_after_optimizer_step(self, strategy, optimizer):
        self.steps += 1


class Counting:
    """A wrapper that nobody knows, whose step counts in a trainer."""

    def __init__(self, optimizer, trainer):
        self.inner, self.trainer = optimizer, trainer

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def step(self):
        self.trainer.steps += 1
        self.inner.step()


class CountingSubclass(Counting, torch.optim.Optimizer):
    """The same, which says that it is a torch optimizer and is none by itself."""


def wrap_lightning(optimizer):
    return LightningOptimizer(optimizer)


def wrap_fabric(optimizer):
    """As ``fabric.setup_optimizers`` does."""
    return _FabricOptimizer(optimizer, SingleDeviceStrategy(), [Calls()])


def wrap_accelerate(optimizer):
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


KNOWN = {"Lightning": wrap_lightning, "Fabric": wrap_fabric, "accelerate": wrap_accelerate}
MAKES = {"AdamW": torch.optim.AdamW, "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(
    ("outer", "inner"),
    [(outer, inner) for outer in KNOWN for inner in (None, *KNOWN) if outer != inner or outer == "accelerate"],
)
def test_the_torch_optimizer_is_found_in_any_nesting(make, outer, inner):
    """One wrapper or two, of one framework or of both; Lightning's own cannot wrap themselves."""
    optimizer = make(make_model().parameters())
    wrapped = KNOWN[outer](KNOWN[inner](optimizer) if inner else optimizer)
    assert unwrap_optimizer(wrapped) is optimizer
    assert warn_of_wrapper(wrapped) == ()


@pytest.mark.parametrize("kind", [Counting, CountingSubclass])
def test_an_unknown_wrapper_is_warned_of(kind):
    """Its step ran, the trainer has counted it, and the plan says so."""
    model, trainer = make_model(), Calls()
    wrapped = kind(torch.optim.SGD(model.parameters(), lr=0.1), trainer)
    plan = autobatch.fit(model, 16, batch=make_batch(4), step=mean_step, optimizer=wrapped)
    assert trainer.steps > 0
    [warning] = plan.warnings
    assert f"optimizer= is a {kind.__name__} around SGD" in warning
    assert "a trainer's count of steps, was not put back" in warning


class Lit(pytorch_lightning.LightningModule):
    """Plans and predicts in the middle of its own training, and trains with a Runner where it does so by hand."""

    def __init__(self, by_hand):
        super().__init__()
        self.net, self.automatic_optimization, self.by_hand = make_model(), not by_hand, by_hand
        self.counted = []

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def training_step(self, batch, index):
        optimizer, before = self.optimizers(), self.trainer.global_step
        plan = autobatch.fit(self.net, 16, batch=batch, step=mean_step, optimizer=optimizer, max_micro_batch=4)
        assert plan.warnings == ()
        autobatch.predict(self.net, batch, mean_step, optimizer, gpu="L4", target_batch=16)
        self.counted.append(self.trainer.global_step - before)
        if not self.by_hand:
            return mean_step(self.net, batch)
        autobatch.Runner(plan, self.net, mean_step, optimizer).step(batch)
        self.counted.append(self.trainer.global_step - before)
        return None


def train_lightning(by_hand):
    module = Lit(by_hand)
    trainer = pytorch_lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
    )
    trainer.fit(module, torch.utils.data.DataLoader([make_batch(16, seed=n) for n in range(3)], batch_size=None))
    assert trainer.global_step == 3
    return module


@pytest.mark.predicts
@pytest.mark.parametrize(("by_hand", "counted"), sample([(False, [0]), (True, [0, 1])], 2))
def test_lightning_counts_no_trial_and_each_step(by_hand, counted):
    """``trainer.global_step`` stands still in ``fit`` and ``predict``; a Runner's step is one."""
    assert train_lightning(by_hand).counted == counted * 3


def test_fabric_calls_no_callback_in_trials():
    """Its callbacks hear of each step of a Runner, and of no trial."""
    model, callback = make_model(), Calls()
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, callbacks=[callback])
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    plan = autobatch.fit(model, 16, batch=make_batch(4), step=mean_step, optimizer=optimizer)
    assert callback.steps == 0
    autobatch.Runner(plan, model, mean_step, optimizer).step(make_batch(16))
    assert callback.steps == 1


@pytest.mark.parametrize("wrap", KNOWN.values(), ids=KNOWN)
def test_fit_leaves_no_trace_in_a_wrapped_optimizer(wrap):
    """State, counters and attributes of the wrapper and of what is inside."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = wrap(optimizer)
    before, attributes = bits_of(model, optimizer), dict(vars(wrapped))
    plan = autobatch.fit(model, 16, batch=make_batch(4), step=mean_step, optimizer=wrapped)
    assert not differences(bits_of(model, optimizer), before)
    assert vars(wrapped) == attributes
    assert plan.state_bytes >= 2 * sum(parameter.nbytes for parameter in model.body.parameters())


def train_accelerate(scaled, given, inside):
    """The weights after three steps of a Runner with a prepared optimizer and scheduler, and the rates."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = accelerator.prepare_optimizer(inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    if scaled:  # on a card accelerate makes it itself
        optimizer = type(optimizer)(inner, scaler=scaler)
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5))
    plan = autobatch.fit(model, 16, batch=make_batch(16), step=mean_step, optimizer=optimizer, max_micro_batch=4)
    passed = {"scaler": scaler} if given else {}
    runner = autobatch.Runner(plan, model, mean_step, optimizer, scheduler=scheduler, **passed)
    for number in range(3):
        if inside:
            with accelerator.accumulate(model):  # here its own step() does nothing every second time
                runner.step(make_batch(16, seed=number))
        else:
            runner.step(make_batch(16, seed=number))
    return [parameter.detach() for parameter in model.parameters()], inner.param_groups[0]["lr"]


@pytest.mark.parametrize("inside", [False, True], ids=["outside accumulate()", "inside accumulate()"])
@pytest.mark.parametrize(
    ("scaled", "given"), [(False, False), (True, False), (True, True)], ids=["plain", "its scaler", "scaler given"]
)
def test_accelerate_trains_as_torch_does(scaled, given, inside):
    """Each step is one update, unscaled once, and one of the scheduler, whatever accelerate believes to accumulate."""
    weights, rate = train_accelerate(scaled, given, inside)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number in range(3):
        mean_step(model, make_batch(16, seed=number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert rate == optimizer.param_groups[0]["lr"] == 0.1 / 8
    for found, expected in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach())


def test_two_scalers_are_refused():
    """The prepared optimizer has one, and unscaling by another would be wrong."""
    optimizer = wrap_accelerate(torch.optim.SGD(make_model().parameters(), lr=0.1))
    optimizer.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(InvalidArgument, match=r"scaler= is not the one that accelerate's optimizer was prepared with"):
        unwrap_for_training(optimizer, torch.amp.GradScaler("cpu"))
    assert unwrap_for_training(optimizer, optimizer.scaler) == (optimizer.optimizer, optimizer.scaler)


@pytest.mark.parametrize("wrap", [wrap_lightning, wrap_fabric])
def test_a_scaler_beside_lightnings_own_is_refused(wrap):
    """Its step would unscale what is unscaled already."""
    optimizer = wrap(torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(InvalidArgument, match=r"pass the torch optimizer inside it, optimizer\.optimizer"):
        unwrap_for_training(optimizer, torch.amp.GradScaler("cpu"))
