"""The default step: how the model is called, where the loss is found, and what the user is warned of."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autobatch.errors import InvalidArgument
from autobatch.step.default_step import call_model, default_step, explain_default, find_loss

pytestmark = pytest.mark.quick

X, Y = torch.ones(4, 3), torch.full((4, 3), 2.0)


class Recorder(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class OneInput(Recorder):
    def forward(self, x: Any) -> Any:
        return (x,), {}


class TwoInputs(Recorder):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return (x, mask), {}


class TwoNeeded(Recorder):
    def forward(self, x: Any, mask: Any, *, scale: float = 1.0) -> Any:
        return (x, mask), {}


class Fields(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("model", "batch", "args", "kwargs"),
    [
        (OneInput(), X, (X,), {}),
        (OneInput(), [X, Y], (X,), {}),
        (OneInput(), (X,), (X,), {}),
        (OneInput(), Fields(X, Y), (X,), {}),
        (TwoInputs(), [X, Y], (X, Y), {}),
        (TwoInputs(), (X,), (X, None), {}),
        (TwoInputs(), (X, Y, Y), (X, None), {}),
        (TwoNeeded(), Fields(X, Y), (X, Y), {}),
        (Recorder(), (X, Y), (X, Y), {}),
        (Recorder(), {"x": X, "y": Y}, (), {"x": X, "y": Y}),
        (Recorder(), UserDict(x=X), (), {"x": X}),
        (torch.compile(OneInput(), backend="eager"), (X, Y), (X,), {}),
    ],
)
def test_call(model: nn.Module, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A mapping gives keywords; a list gives all of its entries where forward takes them, else its first."""
    called, named = call_model(model, batch)
    assert [id(value) for value in called] == [id(value) for value in args]
    assert named == kwargs


def test_a_models_own_error_comes_out() -> None:
    """A batch whose first entry alone is too little gets Python's own message."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mask'"):
        call_model(TwoNeeded(), (X,))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")  # such models are still around
def test_scripted_models_are_called_with_everything() -> None:
    """A scripted forward that shows no signature gets all entries."""

    class Adding(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    traced = torch.jit.trace(Adding(), (X, Y))
    assert torch.equal(call_model(traced, (X, Y)), X + Y)


SCALAR = torch.tensor(3.0)

OUTPUTS = {
    "attribute": (SimpleNamespace(loss=SCALAR, logits=X), 3.0, "own .loss"),
    "key": ({"loss": SCALAR, "logits": X}, 3.0, "own .loss"),
    "user dict": (UserDict(loss=SCALAR), 3.0, "own .loss"),
    "scalar": (SCALAR, 3.0, "scalar output"),
    "tensor": (Y, 2.0, "mean of its floats"),
    "no loss yet": ({"loss": None, "logits": Y}, 2.0, "mean of its floats"),
    "several, by elements": ({"a": torch.ones(3), "b": [torch.full((1,), 5.0)]}, 2.0, "mean of its floats"),
    "integers left out": ((Y, torch.full((9,), 100)), 2.0, "mean of its floats"),
    "empty left out": ((Y, torch.empty(0)), 2.0, "mean of its floats"),
    "two precisions": (
        (torch.ones(4, dtype=torch.float16), torch.full((4,), 2.0, dtype=torch.float64)),
        1.5,
        "mean of",
    ),
    "float16 beyond its sum": (torch.full((4096,), 100.0, dtype=torch.float16), 100.0, "mean of its floats"),
}


class Returns(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        return self.output


@pytest.mark.parametrize(("output", "value", "explained"), OUTPUTS.values(), ids=OUTPUTS)
def test_loss(output: Any, value: float, explained: str) -> None:
    """The loss is the output's own, else the scalar itself, else the mean of all floats; the sentence says which."""
    loss = default_step(Returns(output), X)
    assert loss.ndim == 0
    assert loss.item() == pytest.approx(value)
    assert explained in explain_default(Returns(output), X)


@pytest.mark.parametrize("output", [None, "text", torch.ones(3, dtype=torch.long), {"loss": None}, torch.empty(0)])
def test_no_loss(output: Any) -> None:
    """An output without a float is refused, with what to do."""
    with pytest.raises(InvalidArgument, match=f"returned {type(output).__name__} without a float tensor: pass step="):
        find_loss(output)


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=1, max_size=4))
def test_mean_over_all_elements(values: list[list[float]]) -> None:
    """However floats are spread over tensors, the mean is that of all laid end to end, and so is its gradient."""
    parts = [torch.tensor(part, dtype=torch.float64, requires_grad=True) for part in values]
    _, loss = find_loss(parts)
    assert loss.item() == pytest.approx(torch.cat(parts).mean().item(), abs=1e-9)
    loss.backward()
    count = sum(map(len, values))
    assert all(torch.allclose(part.grad, torch.full_like(part, 1 / count)) for part in parts)


def test_explaining_leaves_no_gradient() -> None:
    """Two samples are enough to explain a model with BatchNorm in train mode, and no gradient is left."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert "mean of its floats" in explain_default(model, torch.ones(2, 3))
    assert all(parameter.grad is None for parameter in model.parameters())
