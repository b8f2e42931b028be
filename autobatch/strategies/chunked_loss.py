"""Computes the loss of a step in chunks of its classes, and proves on a few rows that this is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from autobatch._user_errors import contextmanager
from autobatch.errors import InvalidArgument
from autobatch.records import ChunkedLoss
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Workload
from autobatch.strategies.checkpointing import Forward, replaced_forward
from autobatch.strategies.chunked_logits import HeadCall, call_head, chunked_losses

_ROWS = 16
_EXACT = 1e-12  # of the norm of a loss or gradient
_ROUNDING = 16  # in units of the dtype's rounding


def find_head(model: nn.Module) -> str:
    """Return the name of the linear layer with the most outputs, if these are more than its inputs; empty if none is.

    The last one of equal layers is the head. A layer whose forward pass was replaced is none.
    """
    heads = [
        (module.out_features, place, name)
        for place, (name, module) in enumerate(model.named_modules())
        if type(module) is nn.Linear and module.out_features > module.in_features and "forward" not in vars(module)
    ]
    return max(heads, default=(0, 0, ""))[2]


def chunked(workload: Workload, chosen: ChunkedLoss | None) -> Workload:
    """Return the workload whose step computes the loss of this head in chunks.

    Raises:
        InvalidArgument: The model has no such head, or is compiled.
    """
    if chosen is None:
        return workload
    head = dict(workload.model.named_modules()).get(chosen.head)
    if type(head) is not nn.Linear or is_compiled(workload.model, workload.step):
        raise InvalidArgument(
            f"the plan computes the loss of {chosen.head} in chunks, and this {type(workload.model).__name__} has no "
            f"such nn.Linear or is compiled: pass the model that the plan was made for, or run fit() again"
        )

    def step(model: nn.Module, samples: Any) -> Any:
        with _chunking(head):
            return workload.step(model, samples)

    return workload.around(step, weigh=workload.weigh)


@contextmanager
def _chunking(head: nn.Linear) -> Iterator[list[HeadCall]]:
    """Let a head return logits whose loss is computed in chunks, inside this block; yield its calls."""
    calls: list[HeadCall] = []

    def around(_: nn.Module, __: Forward) -> Forward:
        def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of nn.Linear
            logits = call_head(head, input)
            calls.append(logits.call)
            return logits

        return forward

    with replaced_forward([head], around):
        yield calls


def try_chunks(workload: Workload, name: str, samples: Any) -> tuple[int, str]:
    """Run the step's forward pass in chunks; return the bytes of its logits, and why their loss cannot be chunked.

    The losses of a few rows and their gradients are computed both ways. The reason is empty if they are the same.
    """
    head: Any = workload.model.get_submodule(name)
    # Nothing is kept for a backward pass, so this fits where the step does not.
    with torch.autograd.graph.saved_tensors_hooks(_drop, _refuse), _chunking(head) as calls:
        try:
            workload.step(workload.model, samples)
        except Exception:
            if not any(call.is_read for call in calls):  # else they may not fit
                raise
    reason, losses = "", [(call, *loss) for call in calls for loss in call.losses]
    if not losses or any(call.is_read for call in calls):
        reason = (
            f"it is not the cross_entropy of the rows of {name}'s output alone: compute it so, or with "
            f"torch.nn.functional.linear_cross_entropy"
        )
    elif not all(_is_same(call, hidden[:_ROWS], labels[:_ROWS]) for call, hidden, labels in losses):
        reason = "it or its gradient differs"
    return sum(call.rows * head.out_features * torch.float32.itemsize for call in calls), reason


def _drop(_: Any) -> Any:
    """Keep nothing of a saved tensor."""


def _refuse(_: Any) -> Any:
    raise InvalidArgument("it computes a gradient in its forward pass")


def _is_same(call: HeadCall, hidden: torch.Tensor, labels: torch.Tensor) -> bool:
    inputs, weight = hidden.detach().requires_grad_(), call.weight.detach().requires_grad_()
    bias = None if call.bias is None else call.bias.detach().requires_grad_()
    leaves = [inputs, weight] if bias is None else [inputs, weight, bias]
    with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        plain = cross_entropy(linear(inputs, weight, bias).to(wide), labels, reduction="sum")
        again = chunked_losses(inputs, weight, bias, labels).sum()
        expected = plain.detach(), *torch.autograd.grad(plain, leaves)
        found = again.detach(), *torch.autograd.grad(again, leaves)
    bound = max(_EXACT, _ROUNDING * torch.finfo(hidden.dtype).eps)
    return all(
        float(other.sub_(one).norm()) <= bound * float(one.norm()) for one, other in zip(expected, found, strict=True)
    )
