"""Names why a split is not exact: each cause is tried on the measured gradients, and named where it explains them.

Covers BatchNorm, state that changes with every forward pass, random numbers that mix samples, sums read as means,
samples that belong together in pairs, terms counted once a micro-batch, means over something else than is counted, and
generators that cannot be controlled. Does not distinguish the other ways in which samples of one micro-batch can depend
on each other, nor find BatchNorm's layers (``step.batch_norm``).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch._user_errors import contextmanager
from autobatch.exactness.gradients import TOLERANCE
from autobatch.exactness.loss_weights import EXPLAINS, NO_MEAN, error_of, explain_weighing, is_near
from autobatch.exactness.measurement import Measurement
from autobatch.exactness.partitions import Sizes, ranges_of
from autobatch.exactness.sample_numbers import Order
from autobatch.records import Verdict
from autobatch.state.random_state import HostRandomState
from autobatch.step.batch_norm import batch_norms_in_train_mode, blame_batch_norms, show_names

__all__ = ["find_causes", "find_uncontrolled_generators", "judge_batch_norm"]

_ORDERS: tuple[Order, ...] = ("alike", "rising", "falling")

_SHUFFLED = (
    "in-batch shuffling: random numbers of the step pair or reorder the samples of a micro-batch (samples shuffled "
    "among themselves, mixup partners, sampled negatives), which no weighing makes exact: draw within each sample, or "
    "choose partners when the batch is made"
)
_SUMMED = (
    "the loss is a sum and is read as a mean: return autobatch.Sum(loss, count), with the number of samples or "
    "tokens that it sums over; or, where it is divided by the count of the whole step already, autobatch.Part(loss)"
)
_ONCE_A_MICRO_BATCH = (
    "a term that does not depend on the samples, such as a regulariser, counts once a micro-batch instead of once "
    "a step: return it as autobatch.PerStep"
)
_PAIRED = (
    "two samples in a row belong together (two views, a chosen and a rejected answer in rows 2i and 2i + 1): cut after "
    "an even number of samples the loss is exact, else it is not, and a last batch or a retry may cut anywhere: make "
    "each pair one sample, of shape (2, ...)"
)
_COUPLED = (
    "the loss is not a mean over samples: the loss of a sample depends on the others in its micro-batch (in-batch "
    "negatives, the hardest of them, a statistic over the batch, in-batch shuffling), which no weighing makes exact; "
    "or it has several terms with counts of their own: return a dict of losses, and a dict of their counts by the "
    "same names from weigh="
)


def judge_batch_norm(measured: Measurement, sizes: Sizes) -> Verdict | None:
    """An inexact verdict, where BatchNorm in train mode alone explains this partition; ``None`` where not."""
    error = measured.error([sizes])
    if error <= TOLERANCE:
        return None
    with _fixed_statistics(measured) as (names, fixed):
        if not names or fixed.error([sizes]) > TOLERANCE:
            return None
    modules = measured.find_modules([sizes])
    return Verdict(
        exact=False,
        relative_error=modules[0].relative_error if modules else error,
        causes=(blame_batch_norms(names),),
        samples=measured.layout.count,
        partitions=(sizes,),
        modules=modules,
    )


def find_causes(measured: Measurement, partitions: Sequence[Sizes], exact_at: int = 0) -> tuple[str, ...]:
    """Every cause that was found, in the order in which they were taken out of the way; at least one.

    Some partition is inexact; ``exact_at`` fewer samples of the same batch split exactly (0 where that is not known).
    """
    with _fixed_statistics(measured) as (names, fixed):
        causes: tuple[str, ...] = (blame_batch_norms(names),) if names else ()
        if not names or fixed.error(partitions) > TOLERANCE:
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
    names = _moved_modules(measured)
    if names and (renewed := _renew_where_it_matters(measured, partitions)) is not None:
        measured = renewed
        moving = (
            f"state that moves with every forward pass ({show_names(names)}; such as spectral_norm's) is another for "
            f"each micro-batch: it moves once a micro-batch, not once a step"
        )
        causes = (moving,)
        if measured.error(partitions) <= TOLERANCE:
            return causes
    return (*causes, _find_last_cause(measured, partitions))


def _find_last_cause(measured: Measurement, partitions: Sequence[Sizes]) -> str:
    if measured.repeat_error() > TOLERANCE:
        return "the same samples give another gradient each time: the step keeps state of its own, outside buffers"
    if measured.random.is_used() and any(_is_exact_in(order, measured, partitions) for order in _ORDERS):
        return _SHUFFLED
    for sizes in partitions:  # each part by itself: if one shows draws to be of another kind, all before is void
        for start, stop in ranges_of(sizes):
            measured.alone(start, stop)
    if error_of(measured, partitions, lambda _start, _stop: 1.0, normalise=False) <= EXPLAINS:
        return _SUMMED
    # A term that is added in each of K micro-batches is K - 1 times too much; what counts for nothing is not run.
    whole = measured.whole_values()
    run = {sizes: sum(measured.alone(*part) is not None for part in ranges_of(sizes)) for sizes in partitions}
    extra = [(measured.values(sizes) - whole) / (parts - 1) for sizes, parts in run.items() if parts > 1]
    if len(extra) >= 2 and all(is_near(one, extra[0]) for one in extra[1:]):
        return _ONCE_A_MICRO_BATCH
    if causes_by_weight := explain_weighing(measured, partitions):
        return causes_by_weight
    return _PAIRED if _is_exact_in_pairs(measured) else _COUPLED


def _is_exact_in_pairs(measured: Measurement) -> bool:
    samples = measured.layout.count
    return samples >= 4 and samples % 2 == 0 and measured.error([(2, samples - 2), (samples - 2, 2)]) <= TOLERANCE


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
def _fixed_statistics(measured: Measurement) -> Iterator[tuple[list[str], Measurement]]:
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
            layer.eval()
            if layer.running_mean is None:  # then eval mode too takes the micro-batch's own
                like = next(layer.parameters(), torch.zeros(()))
                layer.running_mean = torch.zeros(layer.num_features, dtype=like.dtype, device=like.device)
                layer.running_var = torch.ones_like(layer.running_mean)
        yield names, measured.anew()
    finally:
        for layer, is_training, mean, variance in before:
            layer.training, layer.running_mean, layer.running_var = is_training, mean, variance


def _moved_modules(measured: Measurement) -> list[str]:
    """Names of modules with state that changes in a forward pass."""
    model = measured.workload.model
    measured.repeat_error()
    moved = {id(module) for module in measured.rewind_point.find_moved()}
    names = [name.partition(".parametrizations")[0] for name, module in model.named_modules() if id(module) in moved]
    return [*dict.fromkeys(name.removeprefix("parametrizations") or type(model).__name__ for name in names)]


def _renew_where_it_matters(measured: Measurement, partitions: Sequence[Sizes]) -> Measurement | None:
    """A measurement that restores buffers before each part, if that gives other gradients."""
    divided = [measured.values(sizes) for sizes in partitions]
    measured.release()
    renewed = replace(measured, renews=True)
    is_same = all(
        is_near(renewed.values(sizes), values, TOLERANCE) for sizes, values in zip(partitions, divided, strict=True)
    )
    return None if is_same else renewed


def _is_exact_in(order: Order, measured: Measurement, partitions: Sequence[Sizes]) -> bool:
    """Whether the difference is gone with random numbers that are all alike, or that leave samples in order."""
    measured.random.ordered = order
    try:
        return measured.anew().error(partitions) <= TOLERANCE
    finally:
        measured.random.ordered = ""
