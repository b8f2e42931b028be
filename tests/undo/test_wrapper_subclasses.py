"""Tensor subclasses made by ``_make_wrapper_subclass``: with and without ``__tensor_flatten__``, frozen and trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import autobatch


class Scaled(torch.Tensor):
    """Whole numbers and a scale; every operator sees their product."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_, self.scale = values, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return type(self).__name__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values_, args[0].scale)
        plain = tree_map(lambda one: one.values_.float() * one.scale if isinstance(one, Scaled) else one, args)
        return func(*plain, **(kwargs or {}))


class Flattening(Scaled):
    """The same, which says what it is made of."""

    def __tensor_flatten__(self) -> Any:
        return ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Flattening(parts["values_"], parts["scale"])


class InSlots(torch.Tensor):
    """One whose values nobody finds: in slots, and without ``__tensor_flatten__``."""

    __slots__ = ("held",)

    @staticmethod
    def __new__(cls, held: torch.Tensor, requires_grad: bool = False) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, requires_grad=requires_grad)
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return "InSlots"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda one: one.held if isinstance(one, InSlots) else one, args)
        result = func(*plain, **(kwargs or {}))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(result)
        return args[0] if result is not None and result is plain[0] else result


class InAttribute(InSlots):
    """The same in an attribute."""

    def __init__(self, held: torch.Tensor, requires_grad: bool = False) -> None:
        self.there = held


def scaled(kind: type) -> torch.Tensor:
    """Weights of 6 by 5."""
    draw = torch.Generator().manual_seed(4)
    return kind(torch.randint(-127, 127, (6, 5), dtype=torch.int8, generator=draw), torch.tensor(0.01))


def in_slots(kind: type) -> torch.Tensor:
    """The same of plain numbers."""
    return kind(torch.randn(6, 5, generator=torch.Generator().manual_seed(4)))


class Lora(nn.Module):
    """A weight that is not trained, as a parameter, a buffer or an attribute, and layers that are."""

    def __init__(self, weight: torch.Tensor, place: str) -> None:
        super().__init__()
        if place == "parameter":
            self.weight = nn.Parameter(weight, requires_grad=False)
        elif place == "attribute":
            self.weight = weight
        else:
            self.register_buffer("weight", weight, persistent=place == "buffer")
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows @ self.weight.t() + self.up(self.down(rows))).tanh()


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A mean over samples."""
    return model(batch).square().mean()


MAKES = {
    "without flatten": lambda: scaled(Scaled),
    "with flatten": lambda: scaled(Flattening),
    "in slots": lambda: in_slots(InSlots),
    "in an attribute": lambda: in_slots(InAttribute),
}
BATCH = torch.randn(12, 5, generator=torch.Generator().manual_seed(2))


def read(weight: Any) -> torch.Tensor:
    """Its values."""
    return (weight.held if isinstance(weight, InSlots) else weight.values_).clone()


@pytest.mark.parametrize("place", ["parameter", "buffer", "a buffer that is not saved", "attribute"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_model_with_frozen_ones_trains(make: Callable[[], torch.Tensor], place: str) -> None:
    """fit, verify, map and a Runner take it, its values stay, and the step is that of the whole batch."""
    torch.manual_seed(0)
    model = Lora(make(), place)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    expected, values = model(BATCH).detach(), read(model.weight)
    weight = model.weight
    torch.testing.assert_close(autobatch.map(model, BATCH), expected)
    assert autobatch.verify(model, batch=BATCH, step=square).exact
    plan = autobatch.fit(model, 12, batch=BATCH, step=square, optimizer=optimizer, max_micro_batch=4, reuse=False)
    assert torch.equal(model(BATCH), expected)
    square(model, BATCH).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    runner = autobatch.Runner(plan, model, square, optimizer)
    with autobatch.testing.oom_at(12):
        assert runner.accumulate(BATCH).retries
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, whole[name])
    assert model.weight is weight
    assert torch.equal(read(model.weight), values)


def test_memory_inside_one_without_flatten_is_counted() -> None:
    """It is in a tensor in an attribute: the budget must not be that of a model without it."""

    def measure(make: Callable[[], torch.Tensor]) -> int:
        model = Lora(make(), "parameter")
        plan = autobatch.fit(model, 12, batch=BATCH, step=square, max_micro_batch=4, reuse=False, check=None)
        return plan.trials[0].resident_bytes

    inside, plain = (measure(make) for make in (MAKES["in an attribute"], lambda: torch.zeros(6, 5)))
    assert inside == plain


@pytest.mark.parametrize("kind", [InAttribute, InSlots])
@pytest.mark.parametrize("call", ["fit", "verify"])
def test_a_trained_one_is_put_back_or_refused_by_name(kind: type, call: str) -> None:
    """Its values move in trials: put back where they are found, and refused where they are not."""
    torch.manual_seed(0)
    model = Lora(torch.zeros(6, 5), "attribute")
    held = torch.randn(6, 5)
    del model.weight
    model.weight = nn.Parameter(kind(held, True))
    before = held.clone()

    def run() -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
        if call == "fit":
            return autobatch.fit(
                model, 12, batch=BATCH, step=square, optimizer=optimizer, max_micro_batch=4, reuse=False, check=None
            )
        return autobatch.verify(model, batch=BATCH, step=square)

    if kind is InAttribute:
        assert run() is not None
    else:
        with pytest.raises(autobatch.InvalidArgument, match=r"weight is an InSlots") as caught:
            run()
        assert "\n" not in str(caught.value)
    assert torch.equal(held, before)


@pytest.mark.predicts
@pytest.mark.parametrize("place", ["parameter", "buffer"])
def test_a_frozen_one_is_predicted_as_a_plain_tensor_of_its_shape(place: str) -> None:
    """Of another class's memory a trace knows nothing; one that flattens is named."""
    options = {"batch": BATCH, "step": square, "gpu": "L4", "target_batch": 12}
    found, plain = (autobatch.predict(Lora(w, place), **options) for w in (scaled(Scaled), torch.zeros(6, 5)))
    assert found.plan.peak_bytes == plain.plan.peak_bytes
    with pytest.raises(autobatch.InvalidArgument, match="Flattening") as caught:
        autobatch.predict(Lora(scaled(Flattening), place), **options)
    assert "\n" not in str(caught.value)
