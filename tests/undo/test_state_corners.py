"""Corners of what a step may change: each is as it was after the step was undone, and as it should be after a retry."""

from __future__ import annotations

import gc
from collections import OrderedDict

import numpy as np
import pytest
import torch
from moving_runner import make_runner
from torch import nn
from workloads import make_batch, mean_step

import autobatch
from autobatch.testing import FakeDevice, oom_at
from autobatch.undo.module_state import ModuleState
from autobatch.undo.undo import Undo
from autobatch.undo.written_memory import WriteRecorder, WrittenMemory

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quiet_log")


def record(tensors, write):
    """The values before, and after a recorded write was put back."""
    point = Undo(None, CPU)
    before = [tensor.clone() for tensor in tensors]
    with WriteRecorder(point.memory, WrittenMemory(), []):
        write()
    changed = not all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    point.restore()
    return changed, all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


def test_running_statistics_are_recorded_although_no_schema_says_so():
    """``native_batch_norm`` writes into them; here they belong to no module."""
    mean, variance = torch.zeros(3), torch.ones(3)
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    run = lambda: torch.nn.functional.batch_norm(inputs, mean, variance, training=True)  # noqa: E731
    assert record([mean, variance], run) == (True, True)


class Changes(nn.Module):
    """Calls a function on itself in each forward pass."""

    def __init__(self, prepare, change):
        super().__init__()
        self.layer, self.frozen = nn.Linear(6, 4), nn.Linear(4, 4).requires_grad_(False)
        self.change = change
        prepare(self)

    def forward(self, inputs):
        self.change(self)
        return self.layer(inputs)


class Plain:
    """Its attributes are in no ``__dict__``."""

    __slots__ = ("count",)


def replace_and_write(model):
    """A new tensor, and a write into the old one's successor."""
    model.bank = model.bank.clone()
    model.bank.add_(1)


@torch.no_grad()
def write_then_assign(model):
    """A write into memory that the parameter does not refer to afterwards."""
    model.frozen.weight.add_(1)
    model.frozen.weight.data = model.frozen.weight.data + 1


def mark(model):
    """An attribute of a tensor, counted up."""
    model.layer.weight.calls = getattr(model.layer.weight, "calls", 0) + 1


def with_array(value):
    """Prepares an array as an attribute."""
    return lambda model: setattr(model, "array", value.copy())


def add_to_array(model):
    """In place."""
    model.array += 1


def write_inference(model):
    """Into a buffer that was made under inference mode."""
    with torch.inference_mode():
        model.cache.add_(1)


def write_under_inference(model):
    """Into a frozen parameter, as an average of weights is updated."""
    with torch.inference_mode():
        model.frozen.weight.add_(1)


def make_inference(model):
    """Registers one."""
    with torch.inference_mode():
        model.register_buffer("cache", torch.zeros(3))


def fill(model):
    """A container of more entries than are looked into."""
    model.many = list(range(1500))


NANS = np.array([np.nan, 1.0, -0.0])
CORNERS = {
    "replaced and written": (
        lambda m: setattr(m, "bank", torch.zeros(3)), replace_and_write, lambda m: m.bank.tolist(),
    ),
    "written, then assigned": (lambda m: None, write_then_assign, lambda m: m.frozen.weight.tolist()),
    "attribute of a tensor": (lambda m: None, mark, lambda m: getattr(m.layer.weight, "calls", 0)),
    "array with NaN": (with_array(NANS), add_to_array, lambda m: m.array.tobytes()),
    "written under inference": (lambda m: None, write_under_inference, lambda m: m.frozen.weight.tolist()),
    "inference buffer": (make_inference, write_inference, lambda m: m.cache.tolist()),
    "more than 1,000 entries": (fill, lambda m: m.many.append(len(m.many)), lambda m: len(m.many)),
}  # fmt: skip


def make_changing(name):
    """The model and a runner whose plan has two micro-batches a step."""
    prepare, change, look = CORNERS[name]
    torch.manual_seed(0)
    model = Changes(prepare, change)
    runner, _ = make_runner(model)
    return model, runner, look


RECORDED_ONLY = ("written, then assigned",)  # it writes into other memory in each step, which nobody can know before


@pytest.mark.parametrize(
    ("name", "earlier"),
    [(name, earlier) for name in CORNERS for earlier in (0, 2) if not (earlier and name in RECORDED_ONLY)],
)
def test_a_corner_rides_on_the_step(name, earlier):
    """Undone by an error it is as before, and after a retry as after a run in the committed pieces."""
    model, runner, look = make_changing(name)
    for _ in range(earlier):
        runner.step(make_batch(8))
    before, passes, change = look(model), [], model.change

    def fail(model):
        change(model)
        passes.append(1)
        if len(passes) == 2:
            raise ValueError("planned")

    object.__setattr__(model, "change", fail)
    with pytest.raises(ValueError, match="planned"):
        runner.step(make_batch(8))
    assert len(passes) == 2
    assert look(model) == before
    model.change = change
    batch = make_batch(8)
    with oom_at(12) as planned:
        result = runner.step(batch)
    assert planned.raised
    undisturbed, _, _ = make_changing(name)
    for _ in range(2 * earlier + len(result.micro_batch_sizes)):
        CORNERS[name][1](undisturbed)
    assert look(model) == look(undisturbed)


@pytest.mark.parametrize("kind", ["read-only", "memmap", "large"])
def test_an_array_that_is_not_copied_does_not_stop_a_step(kind, tmp_path):
    """Nobody can write into the first; of the others a copy would cost too much, as the documentation says."""
    array = np.zeros(2**21 + 1 if kind == "large" else 3)
    if kind == "memmap":
        array = np.memmap(tmp_path / "array", dtype=float, mode="w+", shape=3)
    array.flags.writeable = kind != "read-only"
    model = nn.Linear(2, 2)
    model.array = array
    state = ModuleState([model])
    if kind != "read-only":
        array += 1
    assert not state.find_changed()
    state.restore()
    assert model.array is array
    assert array[0] == (0 if kind == "read-only" else 1)


def test_an_object_with_slots_is_put_back_by_reference():
    """Slots are not looked into, and do not stop what is."""
    model = nn.Linear(2, 2)
    model.slotted = first = Plain()
    state = ModuleState([model])
    model.slotted.count = 1
    model.slotted = Plain()
    state.restore()
    assert model.slotted is first


class Counter:
    """Raises when it is put back."""

    def __init__(self, *, broken=False):
        self.count, self.broken = 0, broken

    def take(self):
        return self.count

    def put(self, taken):
        if self.broken:
            raise RuntimeError("put is broken")
        self.count = taken


def run_with(objects, change, *, fails):
    """One step with these in ``keep=``."""
    model = nn.Linear(6, 4)
    plan_runner, optimizer = make_runner(model)

    def step(model, batch):
        change()
        if fails:
            raise ValueError("planned")
        return mean_step(model, batch)

    device = FakeDevice(lambda n: n, total_bytes=1000)
    runner = autobatch.Runner(plan_runner.plan, model, step, optimizer, keep=objects, device=device)
    return model, runner


def test_named_objects_inside_lists_and_dicts_are_put_back():
    """``keep=[{"a": metric}]``, and deeper."""
    metric, inner = Counter(), Counter()

    def change():
        metric.count, inner.count = metric.count + 1, inner.count + 1

    _, runner = run_with([{"a": metric, "more": [(inner,)]}], change, fails=True)
    with pytest.raises(ValueError, match="planned"):
        runner.step(make_batch(8))
    assert (metric.count, inner.count) == (0, 0)


def test_modules_that_are_keys_of_named_dicts_are_put_back():
    """``keep=[{teacher: 0.9}]``."""
    teacher = nn.Linear(2, 2)
    teacher.count = 0

    def change():
        teacher.count += 1

    _, runner = run_with([{teacher: 0.9}], change, fails=True)
    with pytest.raises(ValueError, match="planned"):
        runner.step(make_batch(8))
    assert teacher.count == 0


class Expiring(OrderedDict):
    """A cache that counts what is read, and drops what has expired."""

    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        del self[key]
        raise KeyError(key)


def test_recording_a_cache_reads_nothing_by_its_own_code():
    """Neither a count nor an entry of it changes, and it is put back."""
    model = nn.Linear(2, 2)
    model.cache = Expiring({"prompt": 1})
    point = Undo(model, CPU)
    assert (model.cache.reads, list(OrderedDict.items(model.cache))) == (0, [("prompt", 1)])
    model.cache["answer"] = 2
    assert [*point.modules.find_changed()] == [model]
    point.restore()
    assert (model.cache.reads, list(OrderedDict.items(model.cache))) == (0, [("prompt", 1)])


def test_empty_lists_of_a_module_with_fewer_tables_are_put_back():
    """Its class sets them before ``super().__init__()``, and it was saved by a torch that had fewer tables."""

    class Early(nn.Module):
        def __init__(self):
            self.first, self.second = [], []
            super().__init__()
            self.layer = nn.Linear(2, 2)

    saved = {name: value for name, value in vars(Early()).items() if name != "_forward_hooks_always_called"}
    del saved["_backward_pre_hooks"]
    model = Early.__new__(Early)
    model.__setstate__(saved)
    point = Undo(model, CPU)
    model.second.append(1)
    point.restore()
    assert model.second == []


def test_a_put_that_raises_leaves_out_nothing_else():
    """Its error comes out with the step's own in its context, and all else is put back."""
    broken, counter, other = Counter(broken=True), Counter(), torch.zeros(())

    def change():
        counter.count += 1
        other.add_(1)

    named = [broken, counter, Counter(broken=True), other]
    model, runner = run_with(named, change, fails=True)
    generator = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="put is broken"):
        runner.step(make_batch(8))
    assert (counter.count, other.item()) == (0, 0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_recorder_is_released_after_its_step():
    """It holds copies of all that was written into."""
    _model, runner, _ = make_changing("written, then assigned")
    gc.collect()
    gc.disable()
    try:
        runner.step(make_batch(8))
        assert not [item for item in gc.get_objects() if isinstance(item, WriteRecorder)]
    finally:
        gc.enable()


def test_hooks_that_the_step_registers_survive_it():
    """A committed step changes nothing of them; one that is undone loses those that it has added."""
    calls = []

    def add_hook(model):
        model.frozen.register_forward_hook(lambda *_: calls.append(1))

    model = Changes(lambda model: None, add_hook)
    runner, _ = make_runner(model)
    assert not model.frozen._forward_hooks
    runner.step(make_batch(8))
    assert len(model.frozen._forward_hooks) == 2  # one a micro-batch
    object.__setattr__(model, "change", lambda model: (add_hook(model), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        runner.step(make_batch(8))
    assert len(model.frozen._forward_hooks) == 2
    model.frozen(torch.zeros(1, 4))
    assert calls == [1, 1]
