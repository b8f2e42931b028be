"""Names why a split is not exact: each cause by an experiment that would have ended otherwise without it.

1. All samples again: another gradient each time, and no other experiment says anything.
2. BatchNorm with fixed statistics: another gradient. Those that follow are done with fixed statistics.
3. Twice the loss: not twice the gradient. Then samples that come twice, in two equal parts: inexact, where a backward
   pass ignores the gradient that it is given.
4. State outside the model, then that of its modules, rewound before each part: another gradient of the parts.
5. Each part by itself: added up with other counts they are the whole. For sums, terms that count once a micro-batch,
   and means over something else (``loss_weights``).
6. Cuts after an even number of samples, and random numbers in order: exact.
7. Two groups of samples changed: what they do to the gradient does not add up (``coupling``).
8. Few samples, which split exactly, repeated until they are as many: inexact.

Where none tells, the last cause says that it was not found.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch._user_errors import contextmanager
from autobatch.batch.layout import Layout
from autobatch.exactness.coupling import Coupling, find_coupling
from autobatch.exactness.gradients import TOLERANCE
from autobatch.exactness.loss_weights import BY_SIZE, EXPLAINS, NO_MEAN, error_of, explain_weighing, is_near
from autobatch.exactness.measurement import Measurement
from autobatch.exactness.partitions import Sizes, ranges_of
from autobatch.exactness.sample_numbers import Order
from autobatch.records import Verdict
from autobatch.step.batch_norm import batch_norms_in_train_mode, blame_batch_norms, show_names
from autobatch.undo.random_state import HostRandomState

__all__ = ["find_causes", "find_uncontrolled_generators", "judge_batch_norm"]

_ORDERS: tuple[Order, ...] = ("rising", "falling")
_MOST_MOVED = 8
"""Modules with state that moves, of which each is tried by itself; of more those of one class are tried together."""

_UNSTEADY = (
    "the same samples give another gradient each time: the step keeps state of its own, outside buffers, or draws from "
    "a generator of its own"
)
_IGNORES_GRADIENT = (
    "the backward pass of the loss ignores the gradient that it is given (grad_output of a custom autograd.Function, "
    "or a hook inside the graph): twice the loss has not twice the gradient, so no weight and no loss scale reaches "
    "it: multiply by grad_output there"
)
_MOVES_OUTSIDE = (
    "something outside the model moves with every forward pass (such as an average of the weights, a teacher or a "
    "queue that the step updates), so once a micro-batch and not once a step: update it after runner.step()"
)
_SHUFFLED = (
    "in-batch shuffling: random numbers of the step pair or reorder the samples of a micro-batch (samples shuffled "
    "among themselves, mixup partners, sampled negatives), which no weighing makes exact: draw within each sample, or "
    "choose partners when the batch is made"
)
_SUMMED = (
    "the loss is a sum (which may be divided by a constant) and is read as a mean: return autobatch.Sum(loss, count), "
    "with the number of samples or tokens that it sums over; or, where it is divided by the count of the whole step "
    "already, autobatch.Part(loss)"
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
    "negatives, a statistic over the batch, in-batch shuffling), which no weighing makes exact"
)
_COUPLED_BY_CHOICES = (
    "the loss is not a mean over samples: the loss of a sample depends on the others in its micro-batch (in-batch "
    "negatives, the hardest of them, an expert's share, how many of them a term counts), which no weighing makes "
    "exact; or, where it has several terms with counts of their own: return a dict of losses, and a dict of their "
    "counts by the same names from weigh="
)
_SEVERAL_TERMS = (
    "the loss is not a mean over samples, and no sample's part of it depends on the others: it has several terms with "
    "counts of their own: return a dict of losses, and a dict of their counts by the same names from weigh="
)
_NOT_FOUND = "its cause was not found: no experiment of this check explains the difference"
_ONE_AFTER_ANOTHER = (
    "its cause was not found: each micro-batch by itself is exact, and one after another they are not, though nothing "
    "that could be put back between them makes a difference"
)
_BY_COUPLING: dict[Coupling, str] = {
    "by values": _COUPLED,
    "by choices": _COUPLED_BY_CHOICES,
    "none": _SEVERAL_TERMS,
    "unknown": _NOT_FOUND,
}
_OPEN = (*_BY_COUPLING.values(), NO_MEAN, BY_SIZE)
"""What may be said of a step that depends on how many samples its micro-batch has."""


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


def find_causes(measured: Measurement, partitions: Sequence[Sizes], exact: Layout | None = None) -> tuple[str, ...]:
    """Every cause that was found, in the order in which they were taken out of the way; at least one.

    Some partition is inexact. ``exact`` are fewer samples, which split exactly.
    """
    if measured.repeat_error() > TOLERANCE:
        return (_UNSTEADY,)
    causes: tuple[str, ...] = ()
    with _fixed_statistics(measured) as (names, fixed):
        if names:
            causes = (blame_batch_norms(names),)
        if not names or fixed.error(partitions) > TOLERANCE:
            causes += _find_further_causes(fixed, partitions)
    if exact is None or causes[-1] not in _OPEN or not _is_by_size(measured, partitions, exact):
        return causes
    depends_on_size = (
        f"splitting {exact.count} samples is exact and splitting {measured.layout.count} is not, so the step depends "
        f"on how many samples its micro-batch has (the k hardest of them, a least number, a quantile, a branch on the "
        f"size), which no weighing makes exact: choose within fixed groups of samples, or choose the target so that a "
        f"micro-batch is the unit you want"
    )
    return (*causes[:-1], depends_on_size)


def _is_by_size(measured: Measurement, partitions: Sequence[Sizes], exact: Layout) -> bool:
    """Whether the same few samples, repeated, do not split exactly either: then it is not which samples they are."""
    measured.release()
    # Each several times in a row, so that parts have different ones.
    return replace(measured, layout=exact.spread(measured.layout.count)).error(partitions) > TOLERANCE


def _find_further_causes(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[str, ...]:
    """The causes in a model without BatchNorm."""
    causes, measured = _find_moving_state(measured, partitions)
    if causes and measured.error(partitions) <= TOLERANCE:
        return causes
    if _ignores_gradient(measured):
        causes += (_IGNORES_GRADIENT,)
    for sizes in partitions:  # each part by itself: if one shows draws to be of another kind, all before is void
        for start, stop in ranges_of(sizes):
            measured.alone(start, stop)
    if _are_counts_right(measured, partitions):
        return causes or (_ONE_AFTER_ANOTHER,)
    return (*causes, *_find_last_causes(measured, partitions))


def _ignores_gradient(measured: Measurement) -> bool:
    """Whether the backward pass does, and the split is inexact because of it.

    The same samples twice, as two equal parts: one part by itself is the whole, whatever counts are used, and however
    its samples depend on each other, unless that depends on how many there are. What is not proportional may do no
    harm: gradients that are clipped for each sample are the same in every part.
    """
    if measured.scaled_error() <= TOLERANCE:
        return False
    half = max(1, measured.layout.count // 2)
    doubled = Layout(measured.layout.pick([*range(half)] * 2), 2 * half, measured.layout.lists)
    twice = replace(measured.renewing("all"), layout=doubled)
    alone, whole = twice.alone(0, half), twice.whole_values()
    is_whole = alone is not None and is_near(alone, whole)
    return is_whole and not is_near(twice.values((half, half)), whole)


def _find_moving_state(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[tuple[str, ...], Measurement]:
    """What is said of state that moves and matters, and a measurement in which it is rewound before each part."""
    causes: tuple[str, ...] = ()
    outside = measured.renewing("outside")
    if not _are_same(outside, measured, partitions[:2]):
        causes, measured = (_MOVES_OUTSIDE,), outside
    everywhere = measured.renewing("all")
    if not _are_same(everywhere, measured, partitions[:2]) and (cause := _name_moving_state(everywhere, partitions)):
        causes, measured = (*causes, cause), everywhere
    return causes, measured


def _name_moving_state(renewed: Measurement, partitions: Sequence[Sizes]) -> str:
    """Names the modules of which the state matters: without it being rewound, the gradient is another."""
    names = _moved_modules(renewed)
    modules = dict(renewed.workload.model.named_modules())
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(name if len(names) <= _MOST_MOVED else type(modules[name]), []).append(name)
    matter = [
        name
        for group in groups.values()
        if not _are_same(renewed.renewing("all", tuple(modules[name] for name in group)), renewed, partitions[:2])
        for name in group
    ]
    if not names:
        return ""
    shown = [name.partition(".parametrizations")[0].removeprefix("parametrizations") for name in matter or names]
    shown = [name or type(renewed.workload.model).__name__ for name in shown]
    return (
        f"state that moves with every forward pass ({show_names([*dict.fromkeys(shown)])}; such as spectral_norm's) is "
        f"another for each micro-batch: it moves once a micro-batch, not once a step"
    )


def _are_same(one: Measurement, other: Measurement, partitions: Sequence[Sizes]) -> bool:
    return all(is_near(one.values(sizes), other.values(sizes), TOLERANCE) for sizes in partitions)


def _are_counts_right(measured: Measurement, partitions: Sequence[Sizes]) -> bool:
    """Whether the parts' own gradients, with the counts that training uses, add up to the whole."""
    whole = measured.whole_values()
    passed = [measured.values(sizes) - whole for sizes in partitions]
    composed = [measured.composed(sizes) for sizes in partitions]
    most = min(EXPLAINS * float(whole.norm()), 0.1 * max(float(apart.norm()) for apart in passed))
    return all(found is not None and float((found - whole).norm()) <= most for found in composed)


def _find_last_causes(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[str, ...]:
    if error_of(measured, partitions, lambda _start, _stop: 1.0, normalise=False) <= EXPLAINS:
        return (_SUMMED,)
    if once := _find_added_terms(measured, partitions):
        return once
    if cause_by_weight := explain_weighing(measured, partitions):
        return (cause_by_weight,)
    if _is_exact_in_pairs(measured):
        return (_PAIRED,)
    if measured.random.is_used() and any(_is_exact_in(order, measured, partitions) for order in _ORDERS):
        return (_SHUFFLED,)
    coupling = find_coupling(measured)
    has_weights = cause_by_weight is not None  # then it is no sum of several terms
    return (_BY_COUPLING["unknown" if coupling == "none" and has_weights else coupling],)


def _find_added_terms(measured: Measurement, partitions: Sequence[Sizes]) -> tuple[str, ...]:
    """A term that is added in each of K micro-batches is K - 1 times too much; what counts for nothing is not run."""
    whole = measured.whole_values()
    alone = {sizes: [measured.alone(*part) for part in ranges_of(sizes)] for sizes in partitions}
    run = {sizes: [part for part in parts if part is not None] for sizes, parts in alone.items()}
    run = {sizes: parts for sizes, parts in run.items() if len(parts) > 1}
    if _grows_with_parts([(_add_up(measured, sizes) - whole) / (len(parts) - 1) for sizes, parts in run.items()]):
        return (_ONCE_A_MICRO_BATCH,)
    if _grows_with_parts([(torch.stack(parts).sum(0) - whole) / (len(parts) - 1) for parts in run.values()]):
        return (_SUMMED, _ONCE_A_MICRO_BATCH)
    return ()


def _add_up(measured: Measurement, sizes: Sizes) -> torch.Tensor:
    """The gradient of a partition; of its parts by themselves where their counts are known."""
    composed = measured.composed(sizes)
    return measured.values(sizes) if composed is None else composed


def _grows_with_parts(extra: Sequence[torch.Tensor]) -> bool:
    """Whether each part more adds the same."""
    return len(extra) >= 2 and all(is_near(one, extra[0]) for one in extra[1:])


def _is_exact_in_pairs(measured: Measurement) -> bool:
    """Cut after an even number of samples, and not after an odd one that leaves no sample by itself."""
    samples = measured.layout.count
    if samples < 6 or samples % 2:
        return False
    if measured.error([(2, samples - 2), (samples - 2, 2)]) > TOLERANCE:
        return False
    return measured.error([(3, samples - 3)]) > TOLERANCE


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

    Without such layers, or where they change no gradient, it is the measurement itself; else that one is released, so
    that memory is not taken twice.
    """
    model = measured.workload.model
    names = batch_norms_in_train_mode(model)
    if not names:
        yield names, measured
        return
    divisors = measured.scales().divisors()
    live = measured.whole_values_by(divisors)
    measured.release()
    measured.rewind_point.restore()
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    before = [(layer, layer.training, layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            layer.eval()
            vars(layer)["train"] = partial(_stay, layer)  # a Trainer's step calls model.train()
            if layer.running_mean is None:  # then eval mode too takes the micro-batch's own
                like = next(layer.parameters(), torch.zeros(()))
                layer.running_mean = torch.zeros(layer.num_features, dtype=like.dtype, device=like.device)
                layer.running_var = torch.ones_like(layer.running_mean)
        fixed = measured.anew()
        yield [] if _is_equal(fixed.whole_values_by(divisors), live) else names, fixed
    finally:
        for layer, is_training, mean, variance in before:
            vars(layer).pop("train", None)
            layer.training, layer.running_mean, layer.running_var = is_training, mean, variance


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:  # noqa: ARG001, FBT001, FBT002 - as Module.train
    return layer


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and is_near(one, other, TOLERANCE)


def _moved_modules(measured: Measurement) -> list[str]:
    """Names of modules with state that changes in a forward pass."""
    measured.repeat_error()
    moved = {id(module) for module in measured.rewind_point.find_moved()}
    return [name for name, module in measured.workload.model.named_modules() if id(module) in moved]


def _is_exact_in(order: Order, measured: Measurement, partitions: Sequence[Sizes]) -> bool:
    """Whether the difference is gone with random numbers that are all alike, or that leave samples in order."""
    measured.random.ordered = order
    try:
        return measured.anew().error(partitions) <= TOLERANCE
    finally:
        measured.random.ordered = ""
