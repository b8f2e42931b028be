"""Small models on several ranks whose gradients fill several buckets, which are summed in the last backward pass."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from workloads import bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.distributed import shared_step
from autobatch.distributed.overlapped_sum import OverlappedSum
from autobatch.testing import FakeDevice, oom_at

BUCKET_BYTES = 4 * 8 * 16
"""Of four buckets: 16 numbers each."""

STEPS = 5
"""The first two are watched."""


BEGIN = OverlappedSum.__enter__
BEGUN = []
"""Sums that began in a backward pass, in this process."""


def note(overlapped):
    BEGUN.append(overlapped)
    BEGIN(overlapped)


class Net(nn.Module):
    """Layers of several buckets each, and one that a step may leave out."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())
        self.head, self.spare = nn.Linear(6, 4), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6, momentum=0.5)
        self.double()
        self.norm.eval()
        self.uses_spare = False

    def forward(self, inputs):
        found = self.body(inputs)
        return self.head(found) + (self.spare(found) if self.uses_spare else 0)


class Tied(Net):
    """The same layer twice."""

    def forward(self, inputs):
        return self.head(self.body(self.body(inputs)))


class Reentrant(Net):
    """Gradients are written once for each part that is recomputed."""

    def forward(self, inputs):
        inputs = inputs.clone().requires_grad_()
        for _ in range(2):
            inputs = checkpoint(self.body, inputs, use_reentrant=True)
        return self.head(inputs)


class Narrow(Net):
    """Gradients are summed over the ranks in float32."""

    def __init__(self):
        super().__init__()
        self.bfloat16()

    def forward(self, inputs):
        return super().forward(inputs.bfloat16())


class Mixed(Net):
    """Buckets of two dtypes."""

    def __init__(self):
        super().__init__()
        self.body.float()

    def forward(self, inputs):
        return self.head(self.body(inputs.float()).double())


class Training:
    """A model, an optimizer, a batch of this rank's and its runner."""

    def __init__(self, make_model=Net, shares=None, step=mean_step, overlaps=True, **options):
        shared_step._SHORTEST_WAIT = 0.1  # tests have collectives of their own after a failed update
        torch.manual_seed(0)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.shares = shares or [8, 5, 7][:size]
        self.model = DistributedDataParallel(make_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        start = sum(self.shares[:rank])
        self.whole = make_batch(sum(self.shares), torch.float64, seed=1)
        self.batch = tuple(part[start : start + self.shares[rank]] for part in self.whole)
        if "scaler" in options:
            options["scaler"] = torch.amp.GradScaler(options["scaler"], init_scale=16.0)
        plan = make_rank_plans(tuple(self.shares), 4, **SMALL)[rank]
        device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
        self.runner = autobatch.Runner(plan, self.model, step, self.optimizer, device=device, **options)
        self.ranks = self.runner._ranks
        self.ranks.reduction._bucket_bytes = BUCKET_BYTES
        self.ranks.have_varied = not overlaps
        OverlappedSum.__enter__ = note

    def bits(self):
        return bits_of(self.model.module, self.optimizer) | {"steps": self.runner.steps}

    def run(self, steps=STEPS):
        return [self.runner.step(self.batch) for _ in range(steps)]


def attempt(training, operation=None):
    """The error of a step, or its sizes; and what changed, after an error. Memory may end at an operation of it."""
    before = training.bits()
    try:
        with nullcontext() if operation is None else oom_at(operation):
            result = training.runner.step(training.batch)
    except BaseException as error:
        return f"{type(error).__name__}: {error}", differences(training.bits(), before)
    return result.micro_batch_sizes, result.retries


def in_last_pass(training, action, which=1):
    """Let one rank do something, once, in the middle of its last backward pass, between two buckets."""
    done, passes = [], []

    def act(gradient):
        passes.append(True)
        if dist.get_rank() == which and not done and len(passes) == 2:
            done.append(True)
            action()

    module = training.model.module.body[2]
    module.register_forward_hook(lambda _, __, output: output.requires_grad and output.register_hook(act) and None)
