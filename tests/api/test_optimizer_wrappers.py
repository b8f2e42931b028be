"""Optimizers around others that leave out what torch's have: state, zero_grad, state_dict, defaults, a ``__dict__``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autobatch


class Least:
    """The least that is needed: groups, as a property, and a step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self) -> None:
        self.steps += 1
        self.inner.step()


class InList(Least):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.all = [inner]
        del self.inner

    inner = property(lambda self: self.all[0], lambda self, _: None, lambda self: None)


class Attribute(Least):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps, self.groups = inner, 0, inner.param_groups
        vars(self)["param_groups"] = inner.param_groups

    param_groups: Any = None


class StateIsMethod(Least):
    """Has something else by the name of the state."""

    def state(self) -> str:
        return "ready"


class StateIsNone(Least):
    state = None


class Slots:
    """Has no ``__dict__``."""

    __slots__ = ("inner", "steps")

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self) -> None:
        self.steps += 1
        self.inner.step()


class Passing(Least):
    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Stateless:
    """Around nothing: plain descent, which holds no state at all."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups, self.steps = inner.param_groups, 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)


WRAPPERS = [Least, InList, Attribute, StateIsMethod, StateIsNone, Slots, Passing, Stateless]
TWICE = [lambda inner: Least(Least(inner)), lambda inner: Slots(Least(inner)), lambda inner: [Least(inner)]]


def make(wrap: Callable[..., Any]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model in float64, the optimizer that does the arithmetic, and what is around it."""
    torch.manual_seed(3)
    model = nn.Linear(5, 3, dtype=torch.float64)
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, inner, wrap(inner)


def mean_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


BATCH = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("wrap", [*WRAPPERS, *TWICE])
def test_training_with_a_wrapper_is_that_of_the_whole_batch(wrap: Callable[..., Any]) -> None:
    """Fit leaves no trace in either optimizer, and the Runner makes the steps of a plain loop."""
    model, inner, optimizer = make(wrap)
    before = copy.deepcopy(model.state_dict())
    plan = autobatch.fit(model, 12, batch=BATCH, step=mean_step, optimizer=optimizer, max_micro_batch=5, reuse=False)
    assert not inner.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    wrappers = optimizer if isinstance(optimizer, list) else [optimizer]
    assert all(not one.steps for one in wrappers if not isinstance(one, Slots))  # slots are not put back
    runner = autobatch.Runner(plan, model, mean_step, optimizer)
    whole, _, plain = make(wrap)
    for _ in range(2):
        assert runner.step(BATCH).micro_batch_sizes == (4, 4, 4)
        mean_step(whole, BATCH).backward()
        [one.step() for one in (plain if isinstance(plain, list) else [plain])]
        whole.zero_grad()
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_step_that_steps_a_wrapper_is_refused(wrap: Callable[..., Any]) -> None:
    """As it is for the optimizer itself, where a refusal can be put in front of it."""
    model, _, optimizer = make(wrap)

    def stepping(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        optimizer.inner.step() if hasattr(optimizer, "inner") else optimizer.step()
        return mean_step(model, batch)

    with pytest.raises(autobatch.InvalidArgument, match=r"optimizer\.step"):
        autobatch.fit(model, 12, batch=BATCH, step=stepping, optimizer=optimizer, max_micro_batch=5, reuse=False)


@pytest.mark.parametrize(
    "groups",
    [None, 3, [3], [{}], list, property(lambda _: 1 / 0)],
    ids=["None", "int", "list", "no params", "class", "raises"],
)
@pytest.mark.parametrize("call", ["fit", "Runner", "predict"])
def test_groups_that_are_none_are_refused_by_name(groups: Any, call: str) -> None:
    """Before anything is run; what the user's own code raises comes out."""
    model, _, _ = make(Least)
    kind = type("Odd", (Least,), {"param_groups": groups})
    optimizer = kind(torch.optim.Adam(model.parameters()))
    error = ZeroDivisionError if isinstance(groups, property) else autobatch.InvalidArgument
    plan = autobatch.fit(model, 12, batch=BATCH, step=mean_step, max_micro_batch=5, reuse=False, progress=False)
    with pytest.raises(error) as caught:
        {
            "fit": lambda: autobatch.fit(model, 12, batch=BATCH, step=mean_step, optimizer=optimizer),
            "Runner": lambda: autobatch.Runner(plan, model, mean_step, optimizer),
            "predict": lambda: autobatch.predict(
                model, batch=BATCH, step=mean_step, optimizer=optimizer, gpu="L4", target_batch=12
            ),
        }[call]()
    assert error is ZeroDivisionError or "Odd" in str(caught.value)
