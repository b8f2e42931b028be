"""Finds modules and tensors that a step can reach and that belong to neither the model nor its optimizer.

Covers a teacher, a memory bank or a queue in the step's closure, bound arguments, globals, or attributes of those. Does
not cover what lies in objects with ``__slots__``, class attributes and modules of Python, nor whether the step writes
into any of them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autobatch.step.reachable import parts_of, walk

__all__ = ["find_outside"]

_MOST_REACHED = 2_000  # objects from the step; a dataset in a list may be among them


def find_outside(step: Callable[..., Any], model: nn.Module) -> list[nn.Module | torch.Tensor]:
    """The modules, the outermost only, and the tensors that are in none of them; nearest first.

    Args:
        step: ``step(model, micro_batch)``.
        model: Its submodules, parameters and buffers are not part of the answer.
    """
    owned = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    reached = (value for value in walk(step, _lead_on, _MOST_REACHED) if id(value) not in owned)
    return [value for value in reached if isinstance(value, nn.Module | torch.Tensor)]


def _lead_on(value: Any) -> Iterator[Any]:
    # Optimizers hold thousands of tensors, and belong to somebody who steps them.
    is_end = isinstance(value, nn.Module | torch.Tensor | torch.optim.Optimizer)
    return iter(()) if is_end else parts_of(value, _attributes)


def _attributes(value: Any) -> Iterator[Any]:
    yield from vars(value).values()
    call = vars(type(value)).get("__call__")
    if isinstance(call, types.FunctionType):
        yield call  # a callable object: the globals of its method
