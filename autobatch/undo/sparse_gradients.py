"""Keeps sparse gradients small, such as those of ``nn.Embedding(sparse=True)``.

torch appends each micro-batch's rows to the earlier ones (``accumulateGrad`` in
torch/csrc/autograd/functions/accumulate_grad.h). So equal rows are added up after each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not

import torch

__all__ = ["coalesce_gradients", "widen", "widen_gradients"]

_GRADIENT, _IS_SPARSE = attrgetter("grad"), attrgetter("is_sparse")


def coalesce_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Add up equal rows in each sparse ``.grad``; dense ones are left alone."""
    gradients = [*map(_GRADIENT, parameters)]
    if not any(map(_IS_SPARSE, compress(gradients, map(is_not, gradients, repeat(None))))):  # nearly always, in C
        return
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.is_sparse and not gradient.is_coalesced():
            with torch.no_grad():
                parameter.grad = gradient.coalesce()


@torch.no_grad()
def widen_gradients(parameters: Sequence[torch.Tensor], times: int) -> None:
    """Let each sparse ``.grad`` have as many rows as that of a whole step may have; see ``widen``.

    Args:
        parameters: After one micro-batch's backward pass.
        times: Micro-batches in a step.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = widen(parameter.grad, times)


def widen(gradient: torch.Tensor, times: int) -> torch.Tensor:
    """A gradient of zeros with ``times`` as many rows as a sparse one has, or as its table has if those are fewer.

    Each micro-batch of a step may look up other rows than the one before. A dense gradient is returned as it is.
    """
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        return gradient
    rows = min(gradient.shape[0], times * gradient._nnz())  # noqa: SLF001 - no public way without adding up
    indices = torch.arange(rows, device=gradient.device)[None]
    values = gradient._values().new_zeros(rows, *gradient._values().shape[1:])
    return torch.sparse_coo_tensor(indices, values, gradient.shape, is_coalesced=True, check_invariants=False)
