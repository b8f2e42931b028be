"""Lightning modules with metrics, hooks and every kind of logged value, and what a training of one leaves behind."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autobatch.testing import FakeDevice, oom_at

TARGET = 31
NAMES = ("lightning.pytorch", "pytorch_lightning")
SEVEN_FIT = 1800
"""Bytes of a device on which 8 samples fit, of 31 in four micro-batches: 8, 8, 8, 7."""


def small_device(total_bytes: int = SEVEN_FIT) -> FakeDevice:
    """A device of 1000 bytes and 100 more for each sample."""
    return FakeDevice(lambda samples: 1000 + 100 * samples, total_bytes=total_bytes)


@cache
def load(package: str | None = None) -> Any:
    """One of the packages; tests ignore its warnings about loaders without workers and missing loggers."""
    for name in NAMES:
        logging.getLogger(name).setLevel(logging.ERROR)
    return importlib.import_module(package or NAMES[1])


@cache
def data(count: int = 8 * TARGET) -> TensorDataset:
    """Samples with a class each, in float64."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 16, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(4, (count,), generator=draw))


@dataclass
class Made:
    """How a module is made.

    Attributes:
        dropout: Its rate.
        optimizer: Makes one for parameters.
        body: Makes the layers between the first and the last.
        changes: Attributes of the class that are replaced.
    """

    dropout: float = 0.0
    optimizer: Callable[..., Any] = lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)
    body: Callable[[], nn.Module] = nn.GELU
    changes: Mapping[str, Any] = field(default_factory=dict)


def module_of(package: Any, made: Made = Made()) -> Any:  # noqa: B008 - frozen in use
    """A classifier that logs a loss, a metric, a sum and a largest value, and notes when its hooks are called."""

    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Linear(16, 32), made.body(), nn.Dropout(made.dropout), nn.Linear(32, 4)
            self.net = nn.Sequential(*layers).double()
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
            self.calls: list[str] = []
            self.outputs: list[Any] = []

        def training_step(self, batch, batch_idx):
            inputs, classes = batch
            scores = self.net(inputs)
            loss = F.cross_entropy(scores, classes)
            self.accuracy(scores, classes)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("synced", loss, on_step=True, on_epoch=False, sync_dist=True)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log("samples", float(len(classes)), reduce_fx="sum", on_step=False, on_epoch=True)
            self.log_dict({"largest": scores.max()}, reduce_fx="max", on_step=False, on_epoch=True)
            return {"loss": loss, "scores": scores.detach(), "twice": loss.detach() * 2}

        def configure_optimizers(self):
            optimizer = made.optimizer(self.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_before_optimizer_step(self, optimizer):
            self.calls.append("before_optimizer_step")
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            self.log("norm", norm, on_step=True)

        def on_before_zero_grad(self, optimizer):
            self.calls.append("before_zero_grad" + str([p.grad is None for p in self.parameters()]))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.calls.append("batch_end")
            self.outputs.append(outputs)

    for name, value in made.changes.items():
        setattr(Net, name, value)
    return Net()


@dataclass
class Trained:
    """The results of a training.

    Attributes:
        module: Trained.
        trainer: That trained it.
        callback: autobatch's; ``None`` without it.
        logs: The numbers of each step, and those of each epoch.
        sizes: Of the micro-batches of each step.
        retries: In all steps.
    """

    module: Any
    trainer: Any
    callback: Any
    logs: list[dict[str, float]]
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    retries: int = 0


def train(
    package: str | None = None,
    made: Made = Made(),  # noqa: B008 - frozen in use
    *,
    attached: Mapping[str, Any] | None = None,
    faults: Mapping[int, list[int]] | None = None,
    module: Any = None,
    batch_size: int = TARGET,
    epochs: int = 1,
    precision: Any = "64-true",
    clip: float | None = 0.5,
    resume: str | None = None,
    callbacks: tuple[Any, ...] = (),
    dataset: Any = None,
    order: list[int] | None = None,
    **options: Any,
) -> Trained:
    """Train from the same weights in the same order."""
    pl = load(package)
    torch.manual_seed(3)
    module = module_of(pl, made) if module is None else module
    recorder = _recorder(pl)
    listed = [recorder, *callbacks]
    callback = None
    if attached is not None:
        from autobatch.integrations.lightning import Autobatch

        callback = Autobatch(**{"device": small_device(), "headroom": 0, "progress": False, **attached})
        listed.append(callback)
    if faults:
        listed.append(_interrupted(pl, faults))
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(dataset or data(), batch_size, shuffle=order is None, sampler=order, generator=generator)
    with silent():
        trainer = pl.Trainer(
            **{
                "callbacks": listed,
                "max_epochs": epochs,
                "accelerator": "cpu",
                "devices": 1,
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": False,
                "log_every_n_steps": 1,
                "precision": precision,
                "gradient_clip_val": clip,
                **options,
            }
        )
        trainer.fit(module, loader, ckpt_path=resume)
    results = recorder.results if callback is not None else []
    return Trained(
        module,
        trainer,
        callback,
        recorder.logs,
        [result.micro_batch_sizes for result in results],
        sum(result.retries for result in results),
    )


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Lightning warns of loaders without workers, of missing loggers and of much else that is meant so here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _recorder(pl: Any) -> Any:
    class Recorder(pl.Callback):
        """Notes the numbers of each step and epoch, and autobatch's results."""

        def __init__(self) -> None:
            self.logs: list[dict[str, float]] = []
            self.results: list[Any] = []

        def on_train_batch_end(self, trainer, module, *_: Any) -> None:
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self.logs.append({**found, "rate": rate, "step": trainer.global_step})
            ours = [one for one in trainer.callbacks if type(one).__name__ == "Autobatch"]
            self.results += [one.result for one in ours if one.result is not None]

        def on_train_epoch_end(self, trainer, module) -> None:
            self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    return Recorder()


def _interrupted(pl: Any, faults: Mapping[int, list[int]]) -> Any:
    class Interrupted(pl.Callback):
        def on_train_start(self, trainer, module) -> None:
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            inner, count = loop.run, iter(range(10**6))

            def run(*arguments: Any) -> Any:
                with oom_at(*faults.get(next(count), [10**9])):
                    return inner(*arguments)

            loop.run = run

    return Interrupted()


def apart(one: Trained, other: Trained) -> float:
    """The largest difference of weights, relative to the largest weight of a tensor."""
    pairs = zip(one.module.state_dict().values(), other.module.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs if a.is_floating_point())


def bit_for_bit(one: Trained, other: Trained) -> bool:
    pairs = zip(one.module.state_dict().values(), other.module.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def logs_apart(one: Trained, other: Trained) -> float:
    """The largest relative difference of what was logged, under the same names; all of one kind are compared."""
    assert [sorted(log) for log in one.logs] == [sorted(log) for log in other.logs]
    pairs = [(a, its[name]) for log, its in zip(one.logs, other.logs, strict=True) for name, a in log.items()]
    return max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)
