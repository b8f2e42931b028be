"""A plan of another model, optimizer or device: used as it is, and warned of once, with what differs."""

from __future__ import annotations

import logging

import pytest
import torch
from builders import plans
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.events import PlanDiffers
from autobatch.plan import Plan
from autobatch.records import DeviceInfo
from autobatch.testing import FakeDevice
from autobatch.training.step_events import device_differences


class Other(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.head = nn.Linear(6, classes)

    def forward(self, inputs):
        return self.head(inputs.float())


def make_model():
    return Plain(torch.float32)


def adamw(model):
    return torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)


def make_plan():
    model = make_model()
    return autobatch.fit(model, 16, batch=make_batch(4), step=mean_step, optimizer=adamw(model), max_micro_batch=4)


@pytest.fixture(scope="module")
def plan():
    """One for all tests: it is a value."""
    return make_plan()


def start(plan, model, optimizer, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO, "autobatch"):
        autobatch.Runner(plan, model, mean_step, optimizer)
    return [record.getMessage() for record in caplog.records]


def frozen():
    """The same with a part that is not trained."""
    model = make_model()
    model.body.requires_grad_(False)
    return model


OTHERS = {
    "another model": (Other, "it was made for Plain with 230 parameters in 8 tensors, and this is Other with 28"),
    "frozen layers": (frozen, "230 of 230 parameters were trained, and now 50 are"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("via", ["fit", "file", pytest.param("prediction", marks=pytest.mark.predicts)])
def test_another_model_is_warned_of_once_with_what_differs(plan, tmp_path, caplog, name, via):
    """Whether the plan was just made, comes from a file or was predicted; the runner works all the same."""
    make, message = OTHERS[name]
    if via == "prediction":
        model = make_model()
        plan = autobatch.predict(model, make_batch(4), mean_step, adamw(model), gpu="L4", target_batch=16).plan
    if via == "file":
        plan.save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
    model = make()
    [line] = start(plan, model, adamw(model), caplog)
    assert message in line
    assert line.endswith("its sizes may not fit, so run fit() again")
    assert len(line.splitlines()) == 1
    heard = []
    runner = autobatch.Runner(plan, model, mean_step, adamw(model), hooks=[heard.append])
    for _ in range(2):
        runner.step(make_batch(16))
    assert sum(isinstance(event, PlanDiffers) for event in heard) == 1


def test_another_number_of_classes_is_warned_of(caplog):
    """Which may be meant: it is a warning and no error."""
    model = Other(4)
    plan = autobatch.fit(model, 16, batch=make_batch(4), step=mean_step, optimizer=adamw(model))
    wider = Other(1000)
    assert (
        "Other with 28 parameters in 2 tensors, and this is Other with 7000"
        in start(plan, wider, adamw(wider), caplog)[0]
    )
    autobatch.Runner(plan, wider, mean_step, adamw(wider)).step(make_batch(16))


def test_another_optimizer_is_warned_of(plan, caplog):
    """Its state and its step were not measured."""
    model = make_model()
    [line] = start(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), caplog)
    assert "the optimizer was AdamW, and now is SGD" in line


def test_a_runner_that_only_accumulates_needs_no_optimizer(plan, caplog):
    """The update is the user's."""
    assert start(plan, make_model(), None, caplog) == []


def trained():
    model = make_model()
    optimizer = adamw(model)
    mean_step(model, make_batch(4)).backward()
    optimizer.step()
    return model


def compiled_part():
    model = make_model()
    model.body = torch.compile(model.body, backend="eager")
    return model


def compiled_in_place():
    model = make_model()
    model.compile(backend="eager")
    return model


SAME = {
    "the same": make_model,
    "other values": trained,
    "compiled": lambda: torch.compile(make_model(), backend="eager"),
    "compiled in place": compiled_in_place,
    "a part compiled": compiled_part,
    "bfloat16": lambda: make_model().to(torch.bfloat16),
    "float64": lambda: make_model().double(),
    "eval mode": lambda: make_model().eval(),
    "DataParallel": lambda: DataParallel(make_model()),
    "in another class": lambda: type("Wrapper", (Plain,), {})(torch.float32),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_model_in_another_form_is_not_warned_of(plan, caplog, name):
    """Compiled, wrapped, cast, trained on."""
    model = SAME[name]()
    assert start(plan, model, adamw(model), caplog) == []


@pytest.mark.apart
def test_a_model_in_ddp_is_the_same_compiled_or_not(plan, caplog):
    """Of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for wrap in (
            DistributedDataParallel,
            lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
        ):
            model = wrap(make_model())
            assert start(plan, model, adamw(model), caplog) == []
    finally:
        torch.distributed.destroy_process_group()


CARD, GIB = plans.L4, plans.GIB


@pytest.mark.parametrize(
    ("device", "predicted", "warns"),
    [
        (CARD, False, False),
        (CARD.model_copy(update={"uuid": "GPU-1", "total_bytes": 23 * GIB}), False, False),  # another one of the kind
        (CARD.model_copy(update={"name": "NVIDIA H100 80GB HBM3", "total_bytes": 80 * GIB}), False, True),
        (CARD.model_copy(update={"name": "NVIDIA A10G"}), False, True),
        (DeviceInfo(kind="cpu", name="CPU", total_bytes=24 * GIB), False, True),
        (CARD.model_copy(update={"name": "L4 as the driver calls it", "total_bytes": 24 * GIB - 1000}), True, False),
        (CARD.model_copy(update={"name": "NVIDIA H100 80GB HBM3", "total_bytes": 80 * GIB}), True, True),
        (DeviceInfo(kind="cpu", name="CPU", total_bytes=24 * GIB), True, True),
    ],
)
def test_a_plan_of_another_device_is_warned_of(device, predicted, warns):
    """Both are named; a prediction knows cards by other names than the driver."""
    plan = plans.make_plan(16, 4, device=CARD, predicted=predicted)
    found = [*device_differences(plan, device)]
    assert len(found) == warns
    assert all(CARD.name in one and device.name in one and ("predicted" in one) == predicted for one in found)


def test_a_runner_on_another_device_is_warned_of():
    """Once, when it is made; on the device of the plan nothing is said."""
    heard = []
    model, device = nn.Linear(3, 2), FakeDevice(lambda n: 10 + n, total_bytes=1000)
    plan = autobatch.fit(model, 4, batch=torch.ones(4, 3), device=device, check=None)
    autobatch.Runner(plan, model, None, None, device=device, hooks=[heard.append])
    assert not heard
    autobatch.Runner(plan, model, None, None, hooks=[heard.append])
    [event] = heard
    assert isinstance(event, PlanDiffers)
    assert "fake device" in str(event)
