"""A fingerprint changes with everything that a measurement depends on, and with nothing else."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autobatch.batch.samples import describe
from autobatch.records import DeviceInfo, Tenant
from autobatch.step.fingerprint import fingerprint
from autobatch.step.workload import Workload

DEVICE = DeviceInfo(kind="cpu", name="CPU", total_bytes=2**30)


def define(source, name="step"):
    """The function of this name that the source defines."""
    namespace = {"F": F, "torch": torch}
    exec(compile(source, "<step>", "exec"), namespace)
    return namespace[name]


PLAIN_STEP = "def step(model, batch):\n    return F.mse_loss(model(batch), batch[:, :4])\n"


class Net(nn.Module):
    """Two layers, a buffer, a switch and a counter."""

    def __init__(self, width=8, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(6, width, dtype=dtype)
        self.last = nn.Linear(width, 4, dtype=dtype)
        self.register_buffer("seen", torch.zeros(3))
        self.gradient_checkpointing = False
        self.calls = 0


def make_workload(model=None, source=PLAIN_STEP, weigh=None, optimizer=torch.optim.AdamW):
    """The workload that all others here differ from in one thing."""
    model = Net() if model is None else model
    return Workload(model, define(source), weigh, None if optimizer is None else optimizer(model.parameters()))


def take(workload=None, batch=None, device=DEVICE, world_size=1):
    """The fingerprint, with what is not said as in the first one."""
    batch = torch.zeros(5, 6) if batch is None else batch
    return fingerprint(workload or make_workload(), describe(batch), device, world_size)


def switched(change):
    """The workload after a change of its model."""
    workload = make_workload()
    change(workload.model)
    return workload


def with_line(line):
    """The step with this line before its own."""
    return PLAIN_STEP.replace("    return", f"    {line}\n    return")


class CallableStep:
    def __call__(self, model, batch):
        return model(batch).sum()

    def by_name(self, model, batch):
        return model(batch).sum() * 2


class OtherCallableStep:
    def __call__(self, model, batch):
        return model(batch).mean()


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, **options)


def in_two_groups(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])


DIFFERENT = {
    "a wider layer": lambda: take(make_workload(Net(width=9))),
    "another dtype": lambda: take(make_workload(Net(dtype=torch.bfloat16))),
    "another class": lambda: take(make_workload(type("OtherNet", (Net,), {})())),
    "another layer type": lambda: take(switched(lambda model: setattr(model, "last", nn.Bilinear(1, 1, 1)))),
    "a module without parameters": lambda: take(switched(lambda model: model.add_module("act", nn.GELU()))),
    "another activation": lambda: take(switched(lambda model: model.add_module("act", nn.ReLU()))),
    "a buffer's shape": lambda: take(switched(lambda model: setattr(model, "seen", torch.zeros(4)))),
    "a frozen parameter": lambda: take(switched(lambda model: model.first.weight.requires_grad_(False))),
    "eval mode of one layer": lambda: take(switched(lambda model: model.last.eval())),
    "gradient checkpointing": lambda: take(switched(lambda model: setattr(model, "gradient_checkpointing", True))),
    "the step's code": lambda: take(make_workload(source=PLAIN_STEP.replace("batch[:, :4]", "batch[:, 1:5]"))),
    "the step's function": lambda: take(make_workload(source=PLAIN_STEP.replace("mse_loss", "l1_loss"))),
    "a tuple in the step": lambda: take(make_workload(source=with_line("size = (1, 2)"))),
    "another tuple in the step": lambda: take(make_workload(source=with_line("size = (1, 3)"))),
    "a function in the step": lambda: take(make_workload(source=with_line("inner = lambda: 1"))),
    "another function in the step": lambda: take(make_workload(source=with_line("inner = lambda: 2"))),
    "a step that is an object": lambda: take(replace(make_workload(), step=CallableStep())),
    "a step that is another object": lambda: take(replace(make_workload(), step=OtherCallableStep())),
    "a bound step": lambda: take(replace(make_workload(), step=CallableStep().by_name)),
    "a partial step": lambda: take(replace(make_workload(), step=functools.partial(define(PLAIN_STEP)))),
    "a partial of another step": lambda: take(replace(make_workload(), step=functools.partial(CallableStep()))),
    "weights": lambda: take(make_workload(weigh=lambda batch: 1.0)),
    "other weights": lambda: take(make_workload(weigh=lambda batch: 2.0)),
    "a longer sample": lambda: take(batch=torch.zeros(5, 7)),
    "a sample of another dtype": lambda: take(batch=torch.zeros(5, 6, dtype=torch.float64)),
    "a second tensor": lambda: take(batch=(torch.zeros(5, 6), torch.zeros(5))),
    "no optimizer": lambda: take(make_workload(optimizer=None)),
    "SGD": lambda: take(make_workload(optimizer=sgd())),
    "SGD with momentum": lambda: take(make_workload(optimizer=sgd(momentum=0.9))),
    "SGD without foreach": lambda: take(make_workload(optimizer=sgd(foreach=False))),
    "amsgrad": lambda: take(make_workload(optimizer=lambda p: torch.optim.AdamW(p, amsgrad=True))),
    "two groups": lambda: take(make_workload(optimizer=in_two_groups)),
    "another card": lambda: take(device=DEVICE.model_copy(update={"name": "NVIDIA L4"})),
    "a dropout that drops": lambda: take(switched(lambda model: setattr(model.first, "p", 0.5))),
    "a step's default": lambda: take(make_workload(source=PLAIN_STEP.replace("batch):", "batch, width=8):"))),
    "another default": lambda: take(make_workload(source=PLAIN_STEP.replace("batch):", "batch, width=9):"))),
    "an argument of a partial step": lambda: take(
        replace(make_workload(), step=functools.partial(define(PLAIN_STEP), width=8))
    ),
    "another argument of a partial step": lambda: take(
        replace(make_workload(), step=functools.partial(define(PLAIN_STEP), width=9))
    ),
    "another driver": lambda: take(device=DEVICE.model_copy(update={"driver": "580.95.05"})),
    "more memory": lambda: take(device=DEVICE.model_copy(update={"total_bytes": 2**31})),
    "another kind of device": lambda: take(device=DEVICE.model_copy(update={"kind": "cuda"})),
    "two ranks": lambda: take(world_size=2),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_it_changes_with_each_thing_a_measurement_depends_on(name):
    """One thing at a time; and the same thing twice gives the same."""
    found = DIFFERENT[name]()
    assert found != take()
    assert found == DIFFERENT[name]()


def test_it_changes_with_software_and_precision(monkeypatch):
    """Another torch, another matmul precision, another default dtype, autocast around everything."""
    found = [take()]
    monkeypatch.setattr(torch, "__version__", "99.0")
    found.append(take())
    monkeypatch.undo()
    with torch.autocast("cpu", torch.bfloat16):
        found.append(take())
    with torch.autocast("cpu", torch.float16):
        found.append(take())
    # torch's own setter cannot be put back: it leaves "ieee" where there was "none" before.
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    found.append(take())
    monkeypatch.undo()
    try:
        torch.set_default_dtype(torch.float64)
        found.append(take(make_workload(Net(dtype=torch.float32)), torch.zeros(5, 6, dtype=torch.float32)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(set(found)) == len(found) == 6


def with_rate(rate):
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate)


SAME = {
    "other values of parameters": lambda: take(make_workload(Net())),
    "other values of buffers": lambda: take(switched(lambda model: model.seen.fill_(7))),
    "a counter": lambda: take(switched(lambda model: setattr(model, "calls", 99))),
    "gradients": lambda: take(switched(lambda model: model.first(torch.ones(6)).sum().backward())),
    "other data": lambda: take(batch=torch.ones(5, 6)),
    "more samples": lambda: take(batch=torch.zeros(500, 6)),
    "one sample": lambda: take(batch=torch.zeros(1, 6)),
    "another learning rate": lambda: take(make_workload(optimizer=with_rate(0.5))),
    "no learning rate yet": lambda: take(make_workload(optimizer=with_rate(0.0))),
    "a learning rate as a tensor": lambda: take(make_workload(optimizer=with_rate(torch.tensor(0.5)))),
    "other betas": lambda: take(make_workload(optimizer=lambda p: torch.optim.AdamW(p, betas=(0.5, 0.6)))),
    "other lines": lambda: take(make_workload(source="# a comment\n\n\n" + PLAIN_STEP)),
    "another file": lambda: take(make_workload(source=PLAIN_STEP.replace(":\n    ", ":\n\n    # why\n    "))),
    "another neighbour": lambda: take(
        device=DEVICE.model_copy(update={"tenants": (Tenant(pid=1, used_bytes=5),), "uuid": "GPU-1"})
    ),
    "a decorated step": lambda: take(
        replace(make_workload(), step=functools.wraps(define(PLAIN_STEP))(lambda *arguments: None))
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_it_does_not_change_with_anything_else(name):
    """Values, counts of samples, rates, lines, neighbours: a remembered plan is still worth a try."""
    assert SAME[name]() == take()


def test_it_does_not_change_while_training_goes_on():
    """A one-cycle schedule moves the rate and the betas in each step; a counter counts."""
    workload = make_workload()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(workload.optimizer, max_lr=1.0, total_steps=10)
    found, betas = {take(workload)}, set()
    for _ in range(9):
        workload.optimizer.step()
        scheduler.step()
        workload.model.calls += 1
        found.add(take(workload))
        betas.add(workload.optimizer.param_groups[0]["betas"])
    assert len(betas) > 5
    assert len(found) == 1


SCRIPT = """
import torch
from torch import nn
from autobatch.records import DeviceInfo
from autobatch.batch.samples import describe
from autobatch.step.fingerprint import fingerprint
from autobatch.step.workload import Workload

def step(model, batch):
    if model.name in {"alpha", "beta", "gamma", "delta", (1, 2), None}:
        return model(batch).sum()
    return (lambda: model(batch).mean())()

model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8))
workload = Workload(model, step, lambda batch: len(batch), torch.optim.AdamW(model.parameters()))
device = DeviceInfo(kind="cpu", name="CPU", total_bytes=1)
print(fingerprint(workload, describe(torch.zeros(4, 6)), device, 1))
"""


@pytest.mark.slow
def test_it_is_the_same_in_every_process():
    """Python's hashes change from process to process, and with them the order of a set."""
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    command = [sys.executable, "-c", SCRIPT]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=each) for each in environments]
    [only] = {process.communicate()[0].strip() for process in running}
    assert len(only) == 32
