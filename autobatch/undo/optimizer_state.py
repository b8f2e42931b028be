"""Makes an optimizer's state before its first step instead of inside it.

Then an out-of-memory error comes while the step can still be undone. Torch's own optimizers make their state with the
first gradients. SGD's momentum is a copy of the first gradient, so SGD makes it in the step.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from autobatch._wrappers import SeveralOptimizers, members_of, state_of


def make_state(optimizer: Any) -> list[torch.Tensor]:
    """Let the optimizer make the entries that its next step would begin with: zeros, and a step count of 0.

    Each of torch's optimizers does this first in ``step`` (``_init_group`` in ``torch/optim/*.py``). Nothing is
    counted, so the step that follows is the first one, bit for bit.

    Returns:
        The parameters that had no entry before; to undo, pass them to ``forget_state``.
    """
    made: list[torch.Tensor] = []
    try:
        for member in members_of(optimizer):
            if not _makes_state_first(type(member)):  # type: ignore[arg-type]  # mypy: a type is not hashable
                continue
            state, held = member.state, [p for group in member.param_groups for p in group["params"]]
            if len(held) == len(state) and all(p is key for p, key in zip(held, state, strict=True)):
                continue  # each parameter has its entry, as in most steps; to look each up takes ten times as long
            new = [p for p in held if p.grad is not None and p not in state]
            made += new
            if new:
                _make_entries(member)
    except BaseException:
        forget_state(optimizer, made)
        raise
    return made


@torch.no_grad()
def _make_entries(optimizer: torch.optim.Optimizer) -> None:
    lists = len(inspect.signature(optimizer._init_group).parameters) - 1  # type: ignore[attr-defined]  # noqa: SLF001 - no public equivalent
    for group in optimizer.param_groups:
        optimizer._init_group(group, *([] for _ in range(lists)))  # type: ignore[attr-defined]  # noqa: SLF001 - no public equivalent


@cache
def _makes_state_first(kind: type) -> bool:
    is_of_torch = f"{kind.__module__}.".startswith("torch.optim.") and hasattr(kind, "_init_group")
    return is_of_torch and not issubclass(kind, torch.optim.SGD)  # whose momentum is made by the step itself


def forget_state(optimizer: Any, parameters: list[torch.Tensor]) -> None:
    """Take these parameters' entries out again."""
    for member in members_of(optimizer):
        if _makes_state_first(type(member)):  # type: ignore[arg-type]  # mypy: a type is not hashable
            for parameter in parameters:
                member.state.pop(parameter, None)


def count_state(optimizer: Any) -> int:
    """How many values the optimizer holds for its parameters, and how many parameters it holds any for."""
    return sum(1 + len(entry) if isinstance(entry, dict) else 1 for entry in state_of(optimizer).values())


def is_making_state(optimizer: Any, before: int) -> bool:
    """Whether a step that failed was making the optimizer's state.

    Args:
        optimizer: After the failure, with the gradients of that step.
        before: ``count_state`` before the step.
    """
    if isinstance(optimizer, SeveralOptimizers):
        return any(map(_lacks_momentum, optimizer.members)) or count_state(optimizer) > before
    if isinstance(optimizer, torch.optim.SGD):  # it writes buffers down after all are made (torch/optim/sgd.py)
        return _lacks_momentum(optimizer)
    return count_state(optimizer) > before


def _lacks_momentum(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and any(
        _lacks_buffer(optimizer, p) for g in optimizer.param_groups if g["momentum"] for p in g["params"]
    )


def _lacks_buffer(optimizer: Any, parameter: torch.Tensor) -> bool:
    entry = optimizer.state.get(parameter) or {}
    return parameter.grad is not None and entry.get("momentum_buffer") is None
