"""Cuts the groups of a step into micro-batches that are weighed, and checks that weights add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from autobatch.batch.cut import Group, MicroBatch, divide
from autobatch.batch.lengths import check_trimmed
from autobatch.batch.samples import refuse_meta
from autobatch.errors import InvalidArgument
from autobatch.planning.division import least_size
from autobatch.step.workload import Workload


def cut(workload: Workload, groups: Iterable[Group], largest: int, smallest: int = 1) -> list[MicroBatch]:
    """Cut groups into the fewest micro-batches, of sizes as equal as possible.

    Args:
        workload: Weighs each micro-batch.
        groups: Samples that may run together.
        largest: As in ``divide``.
        smallest: The fewest samples that the model can run.

    Raises:
        InvalidArgument: ``weigh`` gave no count, or a sample has another length once it is trimmed.
    """
    micro_batches: list[MicroBatch] = []
    for group in groups:
        start = 0
        for part in divide(group, largest, smallest):
            if workload.weigh is None and part.trim is None:
                micro_batches.append(part)  # nothing is counted in its samples: they are not taken out of the batch yet
            else:
                samples = part.samples()
                if part.trim is not None and group.lengths is not None:
                    check_trimmed(group.lengths, part, group.lengths.values[start : start + part.size], samples)
                weights = workload.weights_of(samples, part.size)
                micro_batches.append(part._replace(weights=weights, counts=max(weights.values()) > 0))
            start += part.size
    return micro_batches


def find_least_size(groups: Iterable[Group], smallest: int) -> int:
    """Return the smallest size into which all groups can be cut without a micro-batch below ``smallest``."""
    return max(least_size(len(group.rows), smallest) for group in groups)


def sum_weights(micro_batches: Iterable[MicroBatch]) -> dict[str, float]:
    """Return the total of each term.

    Raises:
        InvalidArgument: ``weigh`` named other terms for one micro-batch than for another.
    """
    weights = [micro_batch.weights for micro_batch in micro_batches]
    for other in weights[1:]:
        if other.keys() != weights[0].keys():
            raise InvalidArgument(
                f"weigh() gave counts for {_name(weights[0])} in one micro-batch and for {_name(other)} in another: "
                f"name the same terms each time, with 0 where there is nothing to count"
            )
    return {name: math.fsum(weight[name] for weight in weights) for name in weights[0]} if weights else {}


def check_additive(micro_batches: Sequence[MicroBatch], smaller: Sequence[MicroBatch]) -> None:
    """Refuse a ``weigh`` under which the same samples weigh differently when they are cut differently.

    Raises:
        InvalidArgument: The totals differ.
    """
    whole, parts = sum_weights(micro_batches), sum_weights(smaller)
    for name in whole:
        if not math.isclose(whole[name], parts.get(name, math.nan), rel_tol=1e-5):
            raise InvalidArgument(
                f"weigh() is not additive: it gave {whole[name]:g} for {[p.size for p in micro_batches]} samples and "
                f"{parts.get(name, math.nan):g} for the same samples as {[p.size for p in smaller]}; it must count "
                f"something, such as tokens, that adds up"
            )


def refuse_graphs(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a batch whose graph micro-batches cannot reach: each is cut off from what computed the batch.

    Raises:
        InvalidArgument: A tensor was computed from one that requires a gradient (a view of a leaf was not), or is on
            the meta device.
    """
    for tensor in tensors:
        if tensor.is_meta:
            refuse_meta(tensor)
        if not tensor.requires_grad:
            continue
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor  # noqa: SLF001 - no public equivalent
        if base.grad_fn is not None:
            raise InvalidArgument(
                f"a tensor of shape {tuple(tensor.shape)} in the batch carries a graph, from which micro-batches are "
                f"cut off: compute it inside step(), or detach() it"
            )


def _name(weights: Mapping[str, float]) -> str:
    return ", ".join(map(repr, weights)) if set(weights) != {""} else "everything"
