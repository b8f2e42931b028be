"""What ``Autobatch`` refuses in Lightning, in which words, and what it takes as arguments."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from builders.refused_options import REFUSED_OPTIONS
from lightning_runs import Made, load, module_of, train
from torch import nn
from torch.nn import functional as F

from autobatch import Sum
from autobatch.errors import InexactSplit, InvalidArgument
from autobatch.integrations.lightning import Autobatch
from autobatch.integrations.lightning.callback import callback_bases, refuse_unsupported


def iterates(self, dataloader_iter):
    """Fetches its own batches."""


def compares(self, batch, batch_idx):
    scores = F.normalize(self.net(batch[0]), dim=1)
    return F.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


def gives_up(self, batch, batch_idx):
    return F.cross_entropy(self.net(batch[0]), batch[1]) if len(batch[0]) > 6 else None


def adds_a_penalty(self, batch, batch_idx):
    """A term that does not grow with the samples, in a sum that does."""
    losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")
    return Sum(losses + sum(parameter.square().sum() for parameter in self.parameters()), len(batch[0]))


def logs_gradients(self):
    self.log("norm of a part", self.net[0].weight.grad.norm())


class Whole(torchmetrics.classification.MulticlassAccuracy):
    """Says that its update needs the whole state."""

    full_state_update = True


def logs_whole_state(self, batch, batch_idx):
    scores = self.net(batch[0])
    if "whole" not in dict(self.named_children()):
        self.whole = Whole(4)
    self.whole(scores, batch[1])
    self.log("whole", self.whole)
    return F.cross_entropy(scores, batch[1])


LBFGS = partial(torch.optim.LBFGS, max_iter=2)
REFUSED = {
    "manual optimization": (
        {"made": Made(changes={"automatic_optimization": property(lambda _: False, lambda *_: None)}), "clip": None},
        InvalidArgument,
        r"^Net: manual optimization: your training_step owns the loop; let Lightning step the optimizer",
    ),
    "accumulate_grad_batches": (
        {"accumulate_grad_batches": 4},
        InvalidArgument,
        r"^Net: accumulate_grad_batches=4 counts each batch the same, whatever its size; give the DataLoader the whole",
    ),
    "dataloader_iter": (
        {"made": Made(changes={"training_step": iterates})},
        InvalidArgument,
        r"^Net: training_step\(dataloader_iter\) fetches its own batches, which cannot be divided",
    ),
    "LBFGS": (
        {"made": Made(optimizer=LBFGS)},
        InvalidArgument,
        r"^Net: LBFGS runs training_step several times in a step, with parameters that move",
    ),
    "no optimizer": (
        {"made": Made(changes={"configure_optimizers": lambda _: None})},
        InvalidArgument,
        r"^Net\.configure_optimizers\(\) returned no optimizer: there is no step to divide$",
    ),
    "another size than the loader's": (
        {"attached": {"target_batch": 256}},
        InvalidArgument,
        r"^target_batch=256, and the loader gives 31 samples at once: give the DataLoader batch_size=256",
    ),
    "a loss that compares samples": ({"made": Made(changes={"training_step": compares})}, InexactSplit, "not exact"),
    "a penalty in a stated sum": (
        {"made": Made(changes={"training_step": adds_a_penalty})},
        InexactSplit,
        r"autobatch\.PerStep \(in Lightning: multiply the term by the count of your autobatch\.Sum\)$",
    ),
    "BatchNorm": ({"made": Made(body=lambda: nn.BatchNorm1d(32))}, InexactSplit, "BatchNorm"),
    "no loss for a part": (
        {"made": Made(changes={"training_step": gives_up}), "attached": {"check": None}},
        InvalidArgument,
        r"^Net\.training_step returned None for a part of a batch, but a step can be skipped only as a whole",
    ),
    "self.log in on_after_backward": (
        {"made": Made(changes={"on_after_backward": logs_gradients})},
        InvalidArgument,
        r"^self\.log\('norm of a part'\) in on_after_backward, which runs once a micro-batch: log it in on_befor",
    ),
    "a metric without a value over micro-batches": (
        {"made": Made(changes={"training_step": logs_whole_state})},
        InvalidArgument,
        r"^self\.log\('whole'\) logs a Whole at each step, which has no value over several micro-batches: pass on_",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_lightning(name):
    """In one line that says what to do, before any weight has moved."""
    options, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words) as raised:
        train(**{"attached": {}, "limit_train_batches": 1, **options})
    assert "\n" not in str(raised.value)


def logs_two(self, batch, batch_idx):
    self.log("two", torch.ones(2))
    return F.cross_entropy(self.net(batch[0]), batch[1])


def test_what_lightning_cannot_log_is_refused_in_its_own_words():
    """As without autobatch."""
    with pytest.raises(ValueError, match="two"):
        train(attached={}, limit_train_batches=1, made=Made(changes={"training_step": logs_two}))


STRATEGIES = {
    "FSDPStrategy": "gathers parameters inside the passes, where ranks that run different micro-batches would wait",
    "ModelParallelStrategy": "gathers parameters inside the passes",
    "DeepSpeedStrategy": r"owns the backward pass and counts its calls; use plan\.settings\('deepspeed'\)",
    "SingleDeviceXLAStrategy": r"is not supported; use one device or strategy='ddp', or plan\.settings\('lightning'\)",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_that_own_the_passes_are_refused(name):
    """By their names: most cannot be made without their hardware."""
    strategies = load().strategies
    kind = type(name, (strategies.SingleDeviceStrategy,), {})
    with pytest.raises(InvalidArgument, match=f"^Net: {name} {STRATEGIES[name]}"):
        train(attached={}, strategy=kind("cpu"))


@pytest.mark.parametrize("name", ["BatchSizeFinder", "GradientAccumulationScheduler"])
def test_callbacks_that_change_the_target_are_refused(name):
    """Whatever they would do first."""
    given = {"scheduling": {0: 2}} if name.startswith("Gradient") else {}
    made = getattr(load().callbacks, name)(**given)
    trainer = SimpleNamespace(callbacks=[made], strategy=load().strategies.SingleDeviceStrategy("cpu"))
    with pytest.raises(InvalidArgument, match=f"^Net: {name} changes the target batch"):
        refuse_unsupported(trainer, module_of(load()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *REFUSED_OPTIONS,
        ({"weigh": 3}, "^weigh=3 cannot be called"),
        ({"keep": [object()]}, r"keep\[0\] is"),
        ({"keep": 5}, "^keep=5: pass a list of objects"),
        ({"hooks": 5}, "^hooks has 5, which cannot be called"),
    ],
)
def test_arguments_of_the_callback_that_mean_nothing(arguments, words):
    """They are refused when the callback is made."""
    with pytest.raises(InvalidArgument, match=words):
        Autobatch(**arguments)


def test_without_lightning(monkeypatch):
    """The import says what to install."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InvalidArgument, match="needs Lightning, and neither lightning nor pytorch_lightning is installed"
    ):
        callback_bases()
