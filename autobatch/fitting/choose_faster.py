"""Recomputes blocks if trials show a faster step, though micro-batches fit without."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from autobatch.errors import DoesNotFit, RankLost
from autobatch.fitting.choose_blocks import describe, held_bytes, measure
from autobatch.fitting.make_plan import Found, Request
from autobatch.fitting.trials import Trials
from autobatch.memory.oom import describe_error
from autobatch.planning.division import balance
from autobatch.records import Trial
from autobatch.step.whole_batch import WholeBatch
from autobatch.strategies.blocks import find_blocks
from autobatch.strategies.choice import Ways
from autobatch.strategies.faster import MARGIN, FasterChoice, faster_choices, read_costs, saved_time

_log = logging.getLogger("autobatch")

_MOST_TRIED = 3
"""Choices that are tried; further ones are predicted to be slower, and differ little from these."""

_REPEATS = 2
"""Further trials of the best choice and of the plain one; the fastest of each counts, on a machine that others use."""


def choose_faster(request: Request, trials: Trials, size: int, larger: Sequence[int], least: int) -> int:
    """Return the size of the fastest step: the plain one, or a larger one with blocks that ``trials`` recompute then.

    1. Blocks are measured on ``least`` samples.
    2. The best few choices that are predicted to be faster are tried.
    3. If the fastest saves the margin, it and the plain size are tried again, in turn. If it still does, it is taken.

    If any of these raises an error, the plain plan stays.
    """
    blocks = find_blocks(request.workload.model) if request.memory.measures else []
    if not blocks:
        return size
    try:
        with request.division.trials.together():
            return _compare(request, trials, size, larger=larger, least=least, blocks=blocks)
    except RankLost:
        raise
    except Exception as error:  # noqa: BLE001 - the plain step has run at this size
        _log.info("no blocks are recomputed, since that raised an error: %s", describe_error(error))
    with request.division.trials.together():
        trials.recompute({})
        request.memory.reclaim()
    return size


def _compare(
    request: Request, trials: Trials, size: int, *, larger: Sequence[int], least: int, blocks: Sequence[str]
) -> int:
    measured = measure(request, trials, blocks, least)
    is_comparable = not (isinstance(request.workload.step, WholeBatch) or request.lengths)
    if isinstance(measured, str) or not is_comparable or request.wanted.objective == "memory":
        return size
    samples, plain = request.wanted.target_batch, trials.fastest(size)
    rest = max(held_bytes(plain) - measured.peak({}) * size // least, plain.resident_bytes)
    costs = read_costs(trials.done, size)
    found = faster_choices(
        measured.runs,
        request.ways,
        costs,
        head_bytes=measured.head_bytes,
        room=request.allowance.limit_bytes - rest,
        sizes=larger,
        measured_size=least,
        samples=samples,
        seconds=samples / size * plain.pass_seconds,
    )
    saved = list[tuple[float, FasterChoice]]()
    for choice in found[:_MOST_TRIED]:
        trials.recompute(choice.ways)
        if (trial := trials.run(choice.size)).outcome == "fits":
            saved.append((saved_time(plain, trial, samples), choice))
    trials.recompute({})
    most, best = max(saved, key=itemgetter(0), default=(0.0, None))
    if best is None or most < MARGIN:
        return size
    for _ in range(_REPEATS):
        plain = _run_again(trials, {}, size)
        trial = _run_again(trials, best.ways, best.size)
        has_fit = all(one.outcome == "fits" for one in trials.done if one.micro_batch_size == best.size)
        if not has_fit or (saving := saved_time(plain, trial, samples)) < MARGIN:
            trials.recompute({})
            return size
    trials.checkpointing = describe(
        trials,
        measured,
        trial,
        plain_bytes=rest + measured.peak({}) * best.size // least,
        plain_seconds=costs.predict(best.size),
        plain_size=size,
        saved_time=saving,
    )
    return best.size


def choose_again(trials: Trials, found: Found) -> Found:
    """Return what was found for this rank's share, whose micro-batches may be smaller than those of the search.

    Both ways are tried once more. Blocks are recomputed only if that still saves the margin.

    Raises:
        DoesNotFit: The plain size does not fit, though a larger one did.
    """
    chosen, samples = found.checkpointing, found.samples
    assert chosen is not None  # noqa: S101 - narrows for mypy
    before, size = (max(balance(samples, one, min(found.smallest, samples))) for one in (chosen.plain_size, found.size))
    trial = trials.run(size)
    trials.recompute({})
    if (plain := trials.run(before)).outcome != "fits":
        raise DoesNotFit(trials.explain())
    recomputed, others = (*found.trials, trial), (*found.earlier_trials, plain)
    saving = saved_time(plain, trial, samples) if trial.outcome == "fits" else 0.0
    if saving < MARGIN:
        plains = tuple(one for one in others if not one.checkpointed)
        earlier = (*(one for one in others if one.checkpointed), *recomputed)
        return replace(found, size=before, checkpointing=None, trials=plains, earlier_trials=earlier)
    saved_bytes = (chosen.plain_bytes - chosen.peak_bytes) * size // chosen.micro_batch_size
    sizes = {"micro_batch_size": size, "plain_size": before, "saved_time": saving}
    peaks = {"peak_bytes": trial.peak_reserved, "plain_bytes": trial.peak_reserved + saved_bytes}
    chosen = chosen.model_copy(update={**sizes, **peaks})
    return replace(found, size=size, checkpointing=chosen, trials=recomputed, earlier_trials=others)


def _run_again(trials: Trials, ways: Ways, size: int) -> Trial:
    """Try a size with these blocks recomputed, and return its fastest trial so far."""
    trials.recompute(ways)
    trials.run(size)
    return trials.fastest(size)
