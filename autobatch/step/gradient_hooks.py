"""Refuses hooks on the gradients of parameters, which would run on the part of each micro-batch; registers our own.

It finds hooks of ``register_hook`` and ``register_post_accumulate_grad_hook``, and optimizers that step inside the
backward pass. Hooks on torch's own ``AccumulateGrad`` nodes cannot be listed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from autobatch.errors import InvalidArgument

HOOKS_OF = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""A tensor's two tables of hooks on its gradient, each of which may be ``None``."""

_LATE = "_post_accumulate_grad_hooks"


def find_hooks(parameters: Sequence[torch.Tensor]) -> frozenset[int]:
    """Return the keys of hooks on the gradients of trained parameters; each hook of a process has another key."""
    hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]  # noqa: SLF001 - no public equivalent
    tables = [table for p in hooked if p.requires_grad for table in HOOKS_OF(p) if table]
    return frozenset(key for table in tables for key in _keys_of(table))


def refuse_hooks(name: str, parameter: torch.Tensor, known: frozenset[int]) -> None:
    """Raise InvalidArgument if the parameter has a hook whose key is not among ``known``, or its own optimizer.

    ``torch.distributed.optim._apply_optimizer_in_backward`` hooks the parameter's ``AccumulateGrad`` node, and stores
    its optimizers on the parameter.
    """
    early, late = HOOKS_OF(parameter)
    if not known.issuperset(_keys_of(late)) or getattr(parameter, "_in_backward_optimizers", None):
        raise InvalidArgument(
            f"{name} has a post-accumulate-grad hook: an update inside the backward pass happens at every "
            f"micro-batch and cannot be undone; remove the hook, and use an optimizer that is stepped after the "
            f"backward pass, such as torch.optim.AdamW, in place of a layerwise one"
        )
    if not known.issuperset(_keys_of(early)):
        raise InvalidArgument(
            f"{name} has a gradient hook, which would run on the part of each micro-batch instead of on the "
            f"whole gradient; remove it, and do its work on .grad between runner.accumulate(batch) and your update"
        )


def refuse_sample_gradients(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise InvalidArgument if gradients of single samples are gathered, as opacus and other DP-SGD do.

    Each micro-batch's loss is multiplied by its share, which scales those gradients before they are clipped.
    """
    for name, parameter in parameters:
        if "grad_sample" in getattr(parameter, "__dict__", ()):
            raise InvalidArgument(
                f"parameter {name} has grad_sample, the gradients of single samples, which no division into "
                f"micro-batches leaves as they are: with opacus use its "
                f"BatchMemoryManager(max_physical_batch_size=...) without autobatch, or plan on the model before it "
                f"is wrapped"
            )


def _keys_of(table: Mapping[Any, Any] | None) -> Iterator[int]:
    """Return the keys of hooks that torch has registered; our own keys are not integers."""
    return (key for key in table or () if isinstance(key, int))


def table_of(parameter: torch.Tensor) -> OrderedDict[Any, Any]:
    """Return a parameter's table of hooks that run once its gradient is added; make it if there is none.

    ``register_post_accumulate_grad_hook`` is slow, leaves an empty table, and cannot mark a hook as ours.
    """
    hooks: OrderedDict[Any, Any] | None = getattr(parameter, _LATE)
    if hooks is None:
        hooks = OrderedDict()
        setattr(parameter, _LATE, hooks)
    return hooks


def remove_hook(parameter: torch.Tensor, hooks: OrderedDict[Any, Any], key: Any) -> None:
    """Remove a hook from the parameter's table, or from a copy in its place; remove a table that is empty then."""
    # Both, as torch calls the hooks of the last table that was set even after None was set.
    hooks.pop(key, None)
    present = getattr(parameter, _LATE)
    if present is not None:
        present.pop(key, None)
        if not present:
            setattr(parameter, _LATE, None)
