"""Names why a split is not exact: each cause by an experiment that would have ended otherwise without it.

1. All samples again: another gradient each time, and no other experiment says anything.
2. BatchNorm with fixed statistics: another gradient. The next experiments run with fixed statistics.
3. Twice the loss: not twice the gradient. Then samples that come twice, in two equal parts: inexact, if a backward pass
   ignores the gradient that it is given.
4. State outside the model, then that of its modules, rewound before each part: another gradient of the parts.
5. Each part alone: added up with other counts they are the whole. For sums, terms that count once a micro-batch, and
   means over something else (``loss_weights``).
6. Cuts after an even number of samples, and random numbers in order: exact.
7. Two groups of samples, changed one at a time and both at once: what they do to the gradient does not add up.
8. Few samples, which split exactly, repeated until they are as many: inexact.

If no experiment finds one, the last cause says that it was not found.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autobatch._user_errors import contextmanager
from autobatch.batch.samples import Layout
from autobatch.exactness.gradients import TOLERANCE, is_near, relate, sample_values
from autobatch.exactness.loss_weights import (
    EXPLAINS,
    NO_MEAN,
    error_of,
    explain_weighing,
    find_coupling,
    run_every,
)
from autobatch.exactness.measurement import Measurement, Parts, ranges_of
from autobatch.records import Verdict
from autobatch.step.model_info import batch_norms_in_train_mode, blame_batch_norms, show_names
from autobatch.undo.random_state import RandomState

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
    "queue that the step updates), so once a micro-batch and not once a step: update it after the "
    "optimizer's step, such as after runner.step(), in on_step_end of a Trainer or on_train_batch_end of Lightning"
)
_SUMMED = (
    "the loss is a sum (which may be divided by a constant) and is read as a mean: return autobatch.Sum(loss, count), "
    "with the number of samples or tokens that it sums over; if it is divided already, with the micro-batch's share of "
    "the step's samples: shares add up to 1"
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
    "negatives, the hardest of them, a statistic over the batch, an expert's share, in-batch shuffling: partners that "
    "the step draws), which no weighing makes exact: pass step=autobatch.WholeBatch(represent, loss), with "
    "represent(model, micro_batch) -> a row a sample and loss(representations, batch) -> the loss; or choose partners "
    "when the batch is made; or, where it has several terms with counts of their own: return a dict of losses, and a "
    "dict of their counts by the same names from weigh="
)
_SEVERAL_TERMS = (
    "the loss is not a mean over samples, and no sample's part of it depends on the others: it has several terms with "
    "counts of their own: return a dict of losses, and a dict of their counts by the same names from weigh="
)
_NOT_FOUND = "its cause was not found: no experiment of this check explains the difference"
# Causes that a step may have that depends on the number of samples of its micro-batch.
_OPEN = (_COUPLED, _SEVERAL_TERMS, _NOT_FOUND, NO_MEAN)


def judge_batch_norm(measured: Measurement, parts: Parts) -> Verdict | None:
    """Return an inexact verdict if BatchNorm in train mode alone explains this partition, in five passes."""
    error = measured.error([parts])
    if error <= TOLERANCE:
        return None
    with _fixed_statistics(measured) as (names, fixed):
        if not names or fixed.error([parts]) > TOLERANCE:
            return None
    modules = measured.find_modules([parts])
    return Verdict(
        exact=False,
        relative_error=modules[0].relative_error if modules else error,
        causes=(blame_batch_norms(names),),
        samples=measured.layout.count,
        partitions=(tuple(map(len, parts)),),
        modules=modules,
    )


def find_causes(measured: Measurement, partitions: Sequence[Parts], exact: Layout | None = None) -> tuple[str, ...]:
    """Return every cause that was found, in the order in which the experiments took them away; at least one.

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
    if exact is None or causes[-1] not in _OPEN:
        return causes
    # Their number matters if the same few samples, each several times in a row, do not split exactly either.
    measured.release()
    if measured.on(exact.spread(measured.layout.count)).error(partitions) <= TOLERANCE:
        return causes
    depends_on_size = (
        f"splitting {exact.count} samples is exact and splitting {measured.layout.count} is not, so the step depends "
        f"on how many samples its micro-batch has (the k hardest of them, a least number, a quantile, a branch on the "
        f"size), which no weighing makes exact: choose within fixed groups of samples, or choose the target so that a "
        f"micro-batch is the unit you want"
    )
    return (*causes[:-1], depends_on_size)


def _find_further_causes(measured: Measurement, partitions: Sequence[Parts]) -> tuple[str, ...]:
    """Return the causes in a model without BatchNorm."""
    causes, measured = _find_moving_state(measured, partitions)
    if causes and measured.error(partitions) <= TOLERANCE:
        return causes
    if _ignores_gradient(measured):
        causes += (_IGNORES_GRADIENT,)
    for rows in chain(*partitions):  # if a part alone shows draws to be of another kind, all before is void
        measured.alone(rows)
    if _are_counts_right(measured, partitions) or (measured.states_counts and _IGNORES_GRADIENT in causes):
        return causes or (_NOT_FOUND,)
    return (*causes, *_find_causes_in_loss(measured, partitions))


def _find_causes_in_loss(measured: Measurement, partitions: Sequence[Parts]) -> tuple[str, ...]:
    every = run_every(measured, partitions)
    if error_of(every, partitions, sums=True) <= EXPLAINS:
        return (_SUMMED,)
    if once := _find_added_terms(measured, partitions):
        return once
    if cause_by_weight := explain_weighing(measured, every, partitions):
        return (cause_by_weight,)
    if _is_exact_in_pairs(measured):
        return (_PAIRED,)
    is_coupled = find_coupling(measured)
    if is_coupled:
        return (_COUPLED,)
    # If some weights explain the whole, it is not a sum of several terms.
    return (_SEVERAL_TERMS if is_coupled is False and cause_by_weight is None else _NOT_FOUND,)


def _ignores_gradient(measured: Measurement) -> bool:
    """Return whether the backward pass ignores the gradient that it is given, and the split is inexact for that."""
    if measured.doubled_error() <= TOLERANCE:
        return False
    # The same samples twice, as two equal parts. One part alone is the whole, with any counts, and also if its samples
    # depend on each other. So a gradient that is clipped for each sample does no harm.
    half = max(1, measured.layout.count // 2)
    doubled = Layout(measured.layout.take([*range(half)] * 2), 2 * half, measured.layout.lists)
    twice = measured.renewing("all").on(doubled)
    alone, whole = twice.alone(range(half)), twice.whole_values()
    is_whole = alone is not None and is_near(alone, whole, EXPLAINS)
    return is_whole and not is_near(twice.values(ranges_of((half, half))), whole, EXPLAINS)


def _find_moving_state(measured: Measurement, partitions: Sequence[Parts]) -> tuple[tuple[str, ...], Measurement]:
    """Return the causes in state that moves, and a measurement that rewinds this state before each part."""
    causes: tuple[str, ...] = ()

    def matters(renewed: Measurement) -> bool:
        # A micro-batch without a finite gradient (the deviation of one sample) has none either time.
        values = [[one.values(parts).nan_to_num() for one in (renewed, measured)] for parts in partitions[:2]]
        return not all(is_near(renewed_values, plain, TOLERANCE) for renewed_values, plain in values)

    outside = measured.renewing("outside")
    if matters(outside):
        causes, measured = (_MOVES_OUTSIDE,), outside
    everywhere = measured.renewing("all")
    if matters(everywhere) and (cause := _name_moving_state(everywhere)):
        causes, measured = (*causes, cause), everywhere
    return causes, measured


def _name_moving_state(renewed: Measurement) -> str:
    """Name the modules whose state moves in a forward pass."""
    renewed.repeat_error()
    moved = {id(module) for module in renewed.start.find_moved()}
    model = renewed.workload.model
    names = [name for name, module in model.named_modules() if id(module) in moved]
    shown = [name.partition(".parametrizations")[0].removeprefix("parametrizations") for name in names]
    listed = show_names([*dict.fromkeys(name or type(model).__name__ for name in shown)])
    return listed and (
        f"state that moves with every forward pass ({listed}; such as spectral_norm's) is another for each "
        f"micro-batch: it moves once a micro-batch, not once a step"
    )


def _are_counts_right(measured: Measurement, partitions: Sequence[Parts]) -> bool:
    """Return whether the parts' own gradients, with samples or ``weigh`` as counts, add up to the whole."""
    if measured.states_counts:
        return False
    weights = {rows: measured.workload.weights_of(measured.part(rows).batch, len(rows)) for rows in chain(*partitions)}
    counts = {str(rows): found[""] for rows, found in weights.items() if "" in found}
    if len(counts) < len(weights):
        return False
    whole = measured.whole_values()
    passed = max(float((measured.values(parts) - whole).norm()) for parts in partitions)
    # Counts that are nearly right explain nothing if the step's own error is as small.
    return error_of(measured, partitions, counts) <= min(EXPLAINS, 0.1 * relate(passed, float(whole.norm())))


def _find_added_terms(measured: Measurement, partitions: Sequence[Parts]) -> tuple[str, ...]:
    """Find a term that is added in each of K micro-batches, so K - 1 times too often."""
    whole = measured.whole_values()
    alone = [[values for rows in parts if (values := measured.alone(rows)) is not None] for parts in partitions]
    run = [(parts, values) for parts, values in zip(partitions, alone, strict=True) if len(values) > 1]
    if _grows_with_parts([(measured.values(parts) - whole) / (len(values) - 1) for parts, values in run]):
        return (_ONCE_A_MICRO_BATCH,)
    if _grows_with_parts([(torch.stack(values).sum(0) - whole) / (len(values) - 1) for _, values in run]):
        return (_SUMMED, _ONCE_A_MICRO_BATCH)
    return ()


def _grows_with_parts(extra: Sequence[torch.Tensor]) -> bool:
    """Return whether each part more adds the same."""
    return len(extra) >= 2 and all(is_near(one, extra[0], EXPLAINS) for one in extra[1:])


def _is_exact_in_pairs(measured: Measurement) -> bool:
    """Return whether cuts after an even number of samples are exact, and one after an odd number is not."""
    samples = measured.layout.count
    if samples < 6 or samples % 2:
        return False
    if measured.error([ranges_of((2, samples - 2)), ranges_of((samples - 2, 2))]) > TOLERANCE:
        return False
    return measured.error([ranges_of((3, samples - 3))]) > TOLERANCE


def find_uncontrolled_generators(measured: Measurement) -> str | None:
    """Say which generators outside torch the step draws from: beside such noise no other cause can be found."""
    measured.start.restore()
    before = RandomState(torch.device("cpu"))
    measured.repeat_error()
    now = RandomState(torch.device("cpu"))
    moved = ["Python's random"] if before.python != now.python else []
    if pickle.dumps(before.numpy) != pickle.dumps(now.numpy):
        moved.append("numpy.random")
    if not moved:
        return None
    return f"the step draws from {' and '.join(moved)}, which cannot be controlled: that alone may be the difference"


@contextmanager
def _fixed_statistics(measured: Measurement) -> Iterator[tuple[list[str], Measurement]]:
    """Yield names of the BatchNorm layers in train mode, and a measurement with their statistics fixed for the block.

    Names are empty without such layers, or if they change no gradient. The given measurement is released, so that
    memory is not taken twice.
    """
    model = measured.workload.model
    names = batch_norms_in_train_mode(model)
    if not names:
        yield names, measured
        return
    divisors = measured.scales().divisors()
    live = sample_values(measured.whole(), measured.whole(), divisors)
    measured.release()
    measured.start.restore()
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    before = [(layer, layer.training, layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            layer.eval()
            vars(layer)["train"] = lambda mode=True, layer=layer: layer  # noqa: ARG005 - a Trainer's step calls it
            if layer.running_mean is None:  # then eval mode too takes the micro-batch's own
                like = next(layer.parameters(), torch.zeros(()))
                layer.running_mean = torch.zeros(layer.num_features, dtype=like.dtype, device=like.device)
                layer.running_var = torch.ones_like(layer.running_mean)
        fixed = measured.again()
        now = sample_values(fixed.whole(), fixed.whole(), divisors)
        yield [] if is_near(now, live, TOLERANCE) else names, fixed
    finally:
        for layer, is_training, mean, variance in before:
            vars(layer).pop("train", None)
            layer.training, layer.running_mean, layer.running_var = is_training, mean, variance
