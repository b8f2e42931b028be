"""Runs backward passes whose gradients are 0, for a micro-batch that counts for nothing on this rank.

The other ranks run theirs, so the pass has to go through the same modules. Zeros flow from the model's outputs, not
from the loss: a loss whose labels are all ignored is nan, and nan times 0 is nan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autobatch._user_errors import contextmanager
from autobatch.batch.tree import tensors_of
from autobatch.distributed.sharded.internals import sharded_modules
from autobatch.errors import InvalidArgument


class ModelOutput(NamedTuple):
    """A tensor with a graph that a model has returned, as a place in the graph: its memory is not held.

    Attributes:
        edge: The place.
        scalar: Its value where it has no dimension: a loss that the model has computed itself.
    """

    edge: GradientEdge
    scalar: torch.Tensor | None


@contextmanager
def collect_outputs(model: nn.Module) -> Iterator[list[ModelOutput]]:
    """Collect what a sharded model, or a module of it that is called alone, returns inside the block."""
    outputs: list[ModelOutput] = []
    running: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        del running[-1:]
        if not running:
            outputs.extend(_describe(tensor) for tensor in tensors_of(output) if tensor.requires_grad)

    handles = []
    for module in sharded_modules(model):
        if module is model or module._compiled_call_impl is None:  # noqa: SLF001 - a hook would compile it again
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def edges_of(losses: Mapping[str, torch.Tensor]) -> dict[str, GradientEdge]:
    return {name: get_gradient_edge(loss) for name, loss in losses.items() if loss.requires_grad}


def find_reached(losses: Iterable[GradientEdge], outputs: Sequence[ModelOutput]) -> list[ModelOutput]:
    """Through which outputs a backward pass of these losses goes.

    Takes as long as a forward pass where not all are.
    """
    wanted = {(output.edge.node, output.edge.output_nr): output for output in outputs}
    found: dict[int, ModelOutput] = {}
    waiting: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in losses]
    seen = set()
    while waiting and len(found) < len(wanted):
        place = waiting.pop()
        if place in wanted:
            found[id(wanted[place])] = wanted[place]
        if place[0] is not None and place[0] not in seen:
            seen.add(place[0])
            waiting += place[0].next_functions
    return [output for output in outputs if id(output) in found]


def run_zero_backward(reached: Sequence[ModelOutput], loss: torch.Tensor | None = None) -> None:
    """A backward pass with zeros from these outputs, and with the gradient of a loss beside them.

    If the model has computed a loss from another output, only that output gets zeros.
    """
    outputs = _leave_out_losses(reached)
    if not outputs and loss is None:
        raise InvalidArgument(
            "the step did not call the model, or it returned no tensor with a graph; parameters are sharded, so each "
            "micro-batch has to run a backward pass: return the loss of what the model has returned"
        )
    if not all(output.scalar is None or bool(output.scalar.isfinite()) for output in outputs):
        raise InvalidArgument(
            "the model returns only its loss, and the loss is nan or infinite in a micro-batch that counts for nothing "
            "on this rank, while others run theirs: let the model return its outputs, too"
        )
    roots = [output.edge for output in outputs]
    zeros = [_make_zeros(edge) for edge in roots]
    if loss is None:
        torch.autograd.backward(roots, zeros)
    else:
        torch.autograd.backward([get_gradient_edge(loss), *roots], [torch.ones_like(loss), *zeros])


def _describe(tensor: torch.Tensor) -> ModelOutput:
    return ModelOutput(get_gradient_edge(tensor), None if tensor.ndim else tensor.detach())


def _leave_out_losses(reached: Sequence[ModelOutput]) -> list[ModelOutput]:
    others = [output for output in reached if output.scalar is None]
    return [
        output for output in reached if output.scalar is None or not (others and find_reached([output.edge], others))
    ]


def _make_zeros(edge: GradientEdge) -> torch.Tensor:
    """A gradient of 0 for it, of one element's memory."""
    made: Any = edge.node
    metadata = made._input_metadata[edge.output_nr]  # noqa: SLF001 - as torch.autograd.backward reads it
    return torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(tuple(metadata.shape))
