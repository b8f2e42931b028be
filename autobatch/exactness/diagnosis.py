"""Names why a split is not exact: each cause is tried on the measured gradients, and named where it explains them.

Covers BatchNorm, state that changes with every forward pass, random numbers that mix samples, sums read as means, terms
counted once a micro-batch, means over something else than is counted, and generators that cannot be controlled. Does
not tell apart the other ways in which samples of one micro-batch can depend on each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch.exactness.gradients import TOLERANCE
from autobatch.exactness.loss_weights import NO_MEAN, explain_weighing, is_explained_by, is_near
from autobatch.exactness.measurement import Measurement, Sizes, ranges_of
from autobatch.exactness.sample_numbers import Order
from autobatch.state.random_state import HostRandomState
from autobatch.step.model_info import batch_norms_in_train_mode, blame_batch_norms, show_names

__all__ = ["find_causes", "find_uncontrolled_generators", "fixed_statistics"]

_ORDERS: tuple[Order, ...] = ("alike", "rising", "falling")

_SHUFFLED = (
    "in-batch shuffling: random numbers of the step pair or reorder the samples of a micro-batch (samples shuffled "
    "among themselves, mixup partners, sampled negatives), which no weighing makes exact: draw within each sample, or "
    "choose partners when the batch is made"
)
_COUPLED = (
    "the loss is not a mean over samples: the loss of a sample depends on the others in its micro-batch (in-batch "
    "negatives, the hardest of them, a statistic over the batch, in-batch shuffling), which no weighing makes exact; "
    "or it has several terms with counts of their own: return a dict of losses, and a dict of their counts by the "
    "same names from weigh="
)


def find_causes(measured: Measurement, partitions: Sequence[Sizes], exact_at: int = 0) -> tuple[str, ...]:
    """Every cause that was found, in the order in which they were taken out of the way; at least one.

    Some partition is inexact; ``exact_at`` fewer samples of the same batch split exactly (0 where that is not known).
    """
    with fixed_statistics(measured) as (names, fixed):
        causes: tuple[str, ...] = (blame_batch_norms(names),) if names else ()
        if not names or max(fixed.errors(partitions)) > TOLERANCE:
            causes += _find_further_causes(fixed, partitions)
    if not exact_at or causes[-1] not in (_COUPLED, NO_MEAN):
        return causes
    depends_on_size = (
        f"splitting {exact_at} samples is exact and splitting {measured.layout.count} is not, so the step depends on "
        f"how many samples its micro-batch has (the k hardest of them, a least number, a quantile, a branch on the "
        f"size), which no weighing makes exact: choose within fixed groups of samples, or choose the target so that a "
        f"micro-batch is the unit you want"
    )
    return (*causes[:-1], depends_on_size)


def _find_further_causes(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[str, ...]:
    causes: tuple[str, ...] = ()
    names, measured = _renew_where_it_matters(measured, partitions)
    if names:
        moving = (
            f"state that moves with every forward pass ({show_names(names)}; such as spectral_norm's) is another for "
            f"each micro-batch: it moves once a micro-batch, not once a step"
        )
        causes = (moving,)
        if max(measured.errors(partitions)) <= TOLERANCE:
            return causes
    if measured.repeat_error() > TOLERANCE:
        unsteady = "the same samples give another gradient each time: the step keeps state of its own, outside buffers"
        return (*causes, unsteady)
    if _is_shuffled(measured, partitions):
        return (*causes, _SHUFFLED)
    _measure_parts_alone(measured, partitions)
    explain: Callable[[Measurement, Sequence[Sizes]], str | None]
    for explain in (_explain_sum, _explain_term_per_step, explain_weighing):
        explanation = explain(measured, partitions)
        if explanation is not None:
            return (*causes, explanation)
    return (*causes, _COUPLED)


def _measure_parts_alone(measured: Measurement, partitions: Sequence[Sizes]) -> None:
    """Run each part by itself: if one shows draws to be of another kind, all that was measured before is void."""
    for sizes in partitions:
        for start, stop in ranges_of(sizes):
            measured.alone(start, stop)


def find_uncontrolled_generators(measured: Measurement) -> str | None:
    """Which generators outside torch the step draws from: beside such noise no other cause can be found."""
    measured.rewind_point.restore()
    before = HostRandomState.capture()
    measured.repeat_error()
    now = HostRandomState.capture()
    moved = ["Python's random"] if before.python != now.python else []
    if pickle.dumps(before.numpy) != pickle.dumps(now.numpy):
        moved.append("numpy.random")
    if not moved:
        return None
    return f"the step draws from {' and '.join(moved)}, which cannot be controlled: that alone may be the difference"


@contextmanager
def fixed_statistics(measured: Measurement) -> Iterator[tuple[list[str], Measurement]]:
    """Names of the BatchNorm layers in train mode, and a measurement with their statistics fixed for the block.

    Without such layers it is the measurement itself; else that one is released, so that memory is not taken twice.
    """
    model = measured.workload.model
    names = batch_norms_in_train_mode(model)
    if not names:
        yield names, measured
        return
    measured.release()
    measured.rewind_point.restore()
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    before = [(layer, layer.training, layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            _use_fixed_statistics(layer)
        yield names, measured.anew()
    finally:
        for layer, is_training, mean, variance in before:
            layer.training, layer.running_mean, layer.running_var = is_training, mean, variance


def _use_fixed_statistics(module: _BatchNorm) -> None:
    module.eval()
    if module.running_mean is None:  # then eval mode too takes the micro-batch's own
        like = next(module.parameters(), torch.zeros(()))
        module.running_mean = torch.zeros(module.num_features, dtype=like.dtype, device=like.device)
        module.running_var = torch.ones_like(module.running_mean)


def _renew_where_it_matters(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[list[str], Measurement]:
    """Names of modules with state that changes, and a measurement that restores it, if that gives other gradients."""
    names = _moved_modules(measured)
    if not names:
        return [], measured
    divided = [measured.values(sizes) for sizes in partitions]
    measured.release()
    renewed = measured.renewed()
    moves = any(
        not is_near(renewed.values(sizes), values, scale=values, tolerance=TOLERANCE)
        for sizes, values in zip(partitions, divided, strict=True)
    )
    return (names, renewed) if moves else ([], measured)


def _moved_modules(measured: Measurement) -> list[str]:
    model = measured.workload.model
    measured.repeat_error()
    moved = {id(module) for module in measured.rewind_point.find_moved()}
    names = [name.partition(".parametrizations")[0] for name, module in model.named_modules() if id(module) in moved]
    return [*dict.fromkeys(name.removeprefix("parametrizations") or type(model).__name__ for name in names)]


def _explain_sum(measured: Measurement, partitions: Sequence[Sizes]) -> str | None:
    if not is_explained_by(measured, partitions, lambda _start, _stop: 1.0, normalise=False):
        return None
    return (
        "the loss is a sum and is read as a mean: return autobatch.Sum(loss, count), with the number of samples or "
        "tokens that it sums over"
    )


def _explain_term_per_step(measured: Measurement, partitions: Sequence[Sizes]) -> str | None:
    """A term that is added in each of K micro-batches is K - 1 times too much."""
    whole = measured.whole_values()
    extra = [(measured.values(sizes) - whole) / (len(sizes) - 1) for sizes in partitions]
    if len(extra) < 2 or not all(is_near(one, extra[0], scale=extra[0]) for one in extra[1:]):
        return None
    return (
        "a term that does not depend on the samples, such as a regulariser, counts once a micro-batch instead of once "
        "a step: return it as autobatch.PerStep"
    )


def _is_shuffled(measured: Measurement, partitions: Sequence[Sizes]) -> bool:
    """Whether the difference is gone with random numbers that are all alike, or that leave samples in order."""
    return measured.random.is_used and any(_is_exact_in(order, measured, partitions) for order in _ORDERS)


def _is_exact_in(order: Order, measured: Measurement, partitions: Sequence[Sizes]) -> bool:
    measured.random.ordered = order
    try:
        return max(measured.anew().errors(partitions)) <= TOLERANCE
    finally:
        measured.random.ordered = ""
