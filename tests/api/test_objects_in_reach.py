"""Objects of the user's that lie near a model: clients, mocks, containers without an end. Nobody asks them anything."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from plans import SMALL, make_plan
from sampling import sample
from torch import nn

import autobatch

MOST_ANSWERS = 1000
"""After so many a walk over new objects has no end."""


class Endless(BaseException):
    """Our code must not catch it."""


ASKED: list[str] = []


class Making:
    """A client whose every attribute is another client."""

    def __getattr__(self, name: str) -> Any:
        ASKED.append(name)
        if name.startswith("__"):
            raise AttributeError(name)
        if len(ASKED) > MOST_ANSWERS:
            raise Endless(name)
        made = self.__dict__[name] = Making()
        return made


class Unconnected:
    """A client that connects when it is first asked for anything."""

    def __getattr__(self, name: str) -> Any:
        ASKED.append(name)
        raise ConnectionError(name)


class Properties:
    """One whose properties do work, under the names that optimizers have."""

    def read(self) -> Any:
        ASKED.append("a property")
        raise ConnectionError

    param_groups = state = ndim = shape = property(read)


class Unbound:
    """A proxy of what exists only inside a request, its ``__dict__`` too."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":
            ASKED.append(name)
            raise RuntimeError("outside of a request")
        return object.__getattribute__(self, name)

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("outside of a request")


def holding_itself() -> Any:
    """A list in a dict in that list."""
    made: list[Any] = []
    made.append({"again": made})
    return made


def nested(depth: int = 1200) -> Any:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


OBJECTS: dict[str, Callable[[], Any]] = {
    "a Mock": Mock,
    "a MagicMock": MagicMock,
    "a Mock of an optimizer": lambda: Mock(spec=torch.optim.SGD([torch.ones(2)])),
    "makes what it is asked for": Making,
    "is not connected": Unconnected,
    "has properties that raise": Properties,
    "is not bound": Unbound,
}

CONTAINERS: dict[str, Callable[[], Any]] = {
    "a list that holds itself": holding_itself,
    "lists in lists": nested,
    "a namespace that holds itself": lambda: (made := SimpleNamespace(), setattr(made, "again", made))[0],
    "a long list": lambda: [object() for _ in range(50_000)],
    "a long dict": lambda: {number: (number,) for number in range(50_000)},
}


class Stepping:
    """An optimizer around another, with something beside it."""

    def __init__(self, inner: torch.optim.Optimizer, thing: Any) -> None:
        self.inner, self.thing, self.things = inner, thing, [thing]

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Model(nn.Module):
    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.thing, self.things = thing, [thing]

    def forward(self, rows: Any) -> torch.Tensor:
        return self.layer(rows["rows"])


def call_fit(thing: Any, batch: Any) -> Any:
    """A plan, with the thing in the model, in the optimizer and in what the step closes over."""
    model = Model(thing)
    optimizer = Stepping(torch.optim.SGD(model.parameters()), thing)
    return autobatch.fit(
        model, 8, batch=batch, step=make_step(thing), optimizer=optimizer, max_micro_batch=4, progress=False
    )


def call_runner(thing: Any, batch: Any) -> Any:
    """Two steps, of which the first one is looked over."""
    model = Model(thing)
    optimizer = Stepping(torch.optim.SGD(model.parameters()), thing)
    plan = make_plan(8, 4, **{**SMALL, "budget_bytes": 2**30})
    runner = autobatch.Runner(plan, model, make_step(thing), optimizer)
    runner.step(batch)
    return runner.step(batch)


def call_map(thing: Any, batch: Any) -> Any:
    """Outputs of a function that closes over the thing and a model with it."""
    model = Model(thing)
    return autobatch.map(lambda rows: (thing, model(rows))[1], batch)


def make_step(thing: Any) -> Any:
    """A step that closes over the thing and has it among its defaults."""
    things = [thing]

    def step(model: nn.Module, batch: Any, default: Any = thing) -> torch.Tensor:
        assert things[0] is default
        return model(batch).square().mean()

    return step


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "fit": call_fit,
    "Runner": call_runner,
    "verify": lambda thing, batch: autobatch.verify(Model(thing), batch=batch, step=make_step(thing)),
    "map": call_map,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_asked_for_nothing(name: str, call: str) -> None:
    """In the model, the optimizer, the step and the batch; a mock made no attribute, a client did not connect."""
    thing = OBJECTS[name]()
    ASKED.clear()
    assert CALLS[call](thing, {"rows": torch.randn(8, 4), "thing": thing}) is not None
    assert not ASKED
    assert not (isinstance(thing, Mock) and vars(thing)["_mock_children"])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_without_an_end_near_the_step(name: str, call: str) -> None:
    """Walks end, and reach as deep as they need."""
    assert CALLS[call](CONTAINERS[name](), {"rows": torch.randn(8, 4)}) is not None


@pytest.mark.parametrize("call", sample(CALLS, 4))
@pytest.mark.parametrize("make", [holding_itself, nested])
def test_a_container_without_an_end_in_the_batch_is_named(make: Callable[[], Any], call: str) -> None:
    """No samples can be found in it, so it is refused by its place."""
    with pytest.raises(autobatch.InvalidArgument, match=r'batch\["endless"\]') as caught:
        CALLS[call](None, {"rows": torch.randn(8, 4), "endless": make()})
    assert "\n" not in str(caught.value)


@pytest.mark.predicts
@pytest.mark.parametrize("name", ["a Mock", "makes what it is asked for", "is not connected"])
def test_a_prediction_asks_nothing_either(name: str) -> None:
    """Nor where the thing is in an optimizer, whose copy has it too."""
    thing = OBJECTS[name]()
    model = Model(thing)
    optimizer = Stepping(torch.optim.SGD(model.parameters()), thing)
    batch = {"rows": torch.randn(8, 4), "thing": thing}
    ASKED.clear()
    assert autobatch.predict(model, batch=batch, step=make_step(thing), optimizer=optimizer, gpu="L4", target_batch=8)
    assert not ASKED
