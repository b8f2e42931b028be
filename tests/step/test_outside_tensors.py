"""Tensors that belong to neither the model nor the optimizer: ``fit`` and ``verify`` leave them as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from workloads import make_batch

import autobatch
from autobatch.errors import DoesNotFit
from autobatch.testing import oom_at

pytestmark = pytest.mark.usefixtures("quiet_log")


class Outside:
    """A teacher that the step moves, and a queue that it writes into; ``way`` says how."""

    def __init__(self, way: str) -> None:
        self.way, self.position = way, 0
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.teacher = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).requires_grad_(False)
        self.queue, self.sparse = torch.zeros(64, 4), torch.eye(4).to_sparse()

    @torch.no_grad()
    def move(self, model: nn.Module) -> None:
        new = next(model.parameters()).mean()
        for old in self.teacher.parameters():
            if self.way == "in place":
                old.lerp_(new, 0.1)
            elif self.way == "through .data":
                old.data.mul_(0.9).add_(0.1 * new)
            elif self.way == "foreach":
                torch._foreach_mul_([old], 0.9)
            elif self.way == "out=":
                torch.mul(old, 0.9, out=old)
            else:
                old.data = old.data * 0.9 + 0.1 * new

    def step(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Consistency with the teacher, whose running statistics move as well."""
        inputs, labels = batch
        self.move(model)
        with torch.no_grad():
            target = self.teacher(inputs)
            rows = torch.arange(self.position, self.position + len(inputs)) % 64
            self.queue[rows] = target
            self.sparse._values().add_(1)
        self.position += len(inputs)
        output = model(inputs)
        return F.cross_entropy(output, labels) + (output - target).square().mean()

    def bits(self) -> list[list[float]]:
        tensors = [*self.teacher.state_dict().values(), self.queue, self.sparse.to_dense()]
        return [tensor.flatten().tolist() for tensor in tensors]

    def objects(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.teacher.parameters()]


WAYS = pytest.mark.parametrize("way", ["in place", "through .data", "foreach", "out=", "assigned"])


def fit(model: nn.Module, step: object, **options: object) -> autobatch.Plan:
    """A plan on the CPU with a real budget, not remembered."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"budget": "64MiB", "max_micro_batch": 4, "reuse": False, "check": None, **options}
    return autobatch.fit(model, 8, batch=make_batch(8), step=step, optimizer=optimizer, **options)


@WAYS
@pytest.mark.parametrize("check", ["warn", None], ids=["checked", "unchecked"])
def test_fit_leaves_no_trace_outside_the_model(way, check):
    """A step's teacher and queue, written in each way that torch has."""
    outside = Outside(way)
    before, objects = outside.bits(), outside.objects()
    fit(nn.Linear(6, 4), outside.step, check=check)
    assert outside.position > 0
    assert outside.bits() == before
    assert outside.objects() == objects


@WAYS
def test_verify_leaves_no_trace_outside_the_model(way):
    """Each run begins from the same teacher, so nothing else than the split is judged."""
    outside = Outside(way)
    outside.teacher.eval()
    before, objects = outside.bits(), outside.objects()
    verdict = autobatch.verify(nn.Linear(6, 4), make_batch(8), outside.step)
    assert outside.position > 0
    assert outside.bits() == before
    assert outside.objects() == objects
    assert not [cause for cause in verdict.causes if "another gradient each time" in cause]


@pytest.mark.parametrize("call", [1, 2, 3, 5], ids=str)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("what", ["fit", "verify"])
def test_an_error_of_the_step_leaves_no_trace_either(what, error, call):
    """Whatever ends a trial or a check: the user's error, or Ctrl-C, right after the step has written."""
    outside, calls = Outside("in place"), []
    before = outside.bits()

    def step(model, batch):
        calls.append(1)
        loss = outside.step(model, batch)
        if len(calls) >= call:
            raise error("planned")
        return loss

    with pytest.raises(error, match="planned"):
        if what == "fit":
            fit(nn.Linear(6, 4), step, max_micro_batch=8)
        else:
            autobatch.verify(nn.Linear(6, 4), make_batch(8), step)
    assert outside.bits() == before


@pytest.mark.parametrize("position", [4, 12, 20])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_memory_that_ends_in_a_trial_leaves_no_trace_either(call, position):
    """Also in the very first step, before it has run through once, and in a trial, whose writes are not recorded."""
    outside, calls, raised = Outside("in place"), [], []
    outside.teacher.eval()  # in train mode it refuses one sample, the last resort of a search without memory
    before = outside.bits()

    def step(model, batch):
        calls.append(1)
        if len(calls) != call:
            return outside.step(model, batch)
        with oom_at(position) as planned:
            try:
                return outside.step(model, batch)
            finally:
                raised.extend(planned.raised)

    fit(nn.Linear(6, 4), step, max_micro_batch=8)
    assert raised
    assert outside.bits() == before


def test_a_step_that_never_fits_leaves_no_trace_either():
    """Its teacher has moved in each trial, and each has failed."""
    outside = Outside("in place")
    before = outside.bits()

    def step(model, batch):
        loss = outside.step(model, batch)
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB. {loss.shape}")

    with pytest.raises(DoesNotFit):
        fit(nn.Linear(6, 4), step)
    assert outside.position > 0
    assert outside.bits() == before


def test_a_compiled_step_leaves_no_trace_outside():
    """Its first step is run a second time, compiled, so that what it loads is not part of a trial."""
    outside = Outside("in place")
    before = outside.bits()
    model = nn.Linear(6, 4)
    model.compile(backend="eager")
    fit(model, outside.step)
    assert outside.bits() == before


def test_a_teachers_mode_and_attributes_come_back():
    """Of a teacher in the step's reach, what is no tensor is put back as well."""
    outside = Outside("in place")
    outside.teacher.calls = 0

    def step(model, batch):
        outside.teacher.eval()
        outside.teacher.calls += 1
        return outside.step(model, batch)

    fit(nn.Linear(6, 4), step)
    assert outside.teacher.training
    assert outside.teacher.calls == 0


def test_what_is_not_written_is_not_copied():
    """A frozen teacher costs no memory while sizes are tried, however large it is."""
    teacher, copied = nn.Linear(6, 4).requires_grad_(False), []

    def step(model, batch):
        inputs, labels = batch
        copied.extend(storage for storage in state_copies() if storage == teacher.weight.untyped_storage()._cdata)
        return F.cross_entropy(model(inputs) + teacher(inputs), labels)

    def state_copies():
        import gc

        from autobatch.undo.training_state import HostCopies

        return [key for item in gc.get_objects() if isinstance(item, HostCopies) for key in item.saved]

    fit(nn.Linear(6, 4), step)
    assert not copied
