"""Chooses the blocks to recompute where the smallest micro-batch does not fit.

1. One pass measures what each block keeps and costs, and which blocks cannot be recomputed.
2. A trial with all others recomputed says whether any choice can fit. It also says what the rest of the step takes.
3. Choices whose predicted peak may fit are tried, those with the least recomputation first, until one fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autobatch._formatting import plural
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.fitting.make_plan import Request
from autobatch.fitting.options import read_strategies
from autobatch.fitting.trials import Trials
from autobatch.memory.oom import describe_error
from autobatch.records import Checkpointing, LeftOut, Strategy, Trial
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Workload
from autobatch.strategies.blocks import BlockMeasurement, find_blocks
from autobatch.strategies.choice import (
    TOO_LOW,
    choices,
    predict_peak,
    slowdown_of,
    useful_blocks,
)

_PATIENCE = 10  # failed trials after which only choices with more room are tried
_LESS = 0.98  # of the limit, more with each further one

_REASONS_SHOWN = 2


def allow_strategies(given: Any, workload: Workload, *, are_sharded: bool) -> tuple[Strategy, ...]:
    """Return the strategies that were asked for; raise InvalidArgument where one could not be applied exactly."""
    strategies = read_strategies(given)
    if strategies and are_sharded:
        raise InvalidArgument(
            "strategies= is not supported where parameters are sharded: checkpoint blocks with torch's "
            "checkpoint_wrapper before fully_shard(), and leave strategies= out"
        )
    if strategies and is_compiled(workload.model, workload.step):
        raise InvalidArgument(
            "strategies= is not supported with torch.compile, whose graph is fixed before blocks are chosen: pass the "
            "model that is not compiled, or leave strategies= out"
        )
    if strategies and isinstance(workload.model, nn.DataParallel):
        raise InvalidArgument(
            "strategies= is not supported with DataParallel, whose copies would recompute the blocks of the first "
            "card: use DistributedDataParallel, or leave strategies= out"
        )
    return strategies


def choose_blocks(request: Request, trials: Trials, size: int) -> Checkpointing:
    """Return the cheapest choice of blocks with which so many samples fit; ``trials`` recompute these blocks then.

    Raises:
        DoesNotFit: No choice fits, or no block can be recomputed.
    """
    trials.probe.savings.add("activation checkpointing")  # so that it is not advised
    plain = trials.explain()
    if not request.memory.measures:
        raise DoesNotFit(f"{plain}; strategies= needs a device that reports its memory")
    blocks = find_blocks(request.workload.model)
    if not blocks:
        raise DoesNotFit(f"{plain}; strategies= found no blocks in ModuleLists or Sequentials to recompute")
    request.announce("measuring what blocks of the model keep")
    measured = BlockMeasurement(request.workload, request.memory, blocks)
    try:
        shortage = trials.probe.examine(measured.run, size)
    except Exception as error:
        reason = f"the step fails where its graph is cut at each block ({describe_error(error)})"
        raise DoesNotFit(f"{plain}; strategies= does not help: {reason}") from error
    if shortage is not None:
        raise DoesNotFit(f"{plain}; strategies= does not help: a single block or the rest does not fit ({shortage})")
    useful = useful_blocks(measured.runs)
    if not useful:
        raise DoesNotFit(f"{plain}; strategies= does not help: no block keeps less{_explain(measured.left_out)}")
    trials.recompute(useful)
    most = trials.run(size)
    if most.outcome != "fits":
        tried = f"strategies= recomputed {plural(len(useful), 'block')}, which is not enough"
        raise DoesNotFit(f"{trials.explain()}; {tried}{_explain(measured.left_out)}")
    chosen, trial = _try_choices(request, trials, measured, most)
    return Checkpointing(
        blocks=chosen,
        candidates=len(blocks),
        micro_batch_size=size,
        plain_bytes=_rest(measured, useful, most) + predict_peak(measured.runs, (), measured.head_bytes),
        peak_bytes=trial.peak_reserved,
        slowdown=slowdown_of(measured.runs, chosen, measured.head_seconds),
        left_out=tuple(LeftOut(block=block, reason=reason) for block, reason in measured.left_out.items()),
    )


def _try_choices(
    request: Request, trials: Trials, measured: BlockMeasurement, most: Trial
) -> tuple[tuple[str, ...], Trial]:
    """Try choices until one fits; all useful blocks together have fit in the trial ``most``."""
    runs, useful, failed = measured.runs, tuple(useful_blocks(measured.runs)), 0
    rest, room = _rest(measured, useful, most), TOO_LOW * request.allowance.limit_bytes
    for chosen in choices(runs):
        if rest + predict_peak(runs, chosen, measured.head_bytes) > room or chosen == useful:
            continue
        trials.recompute(chosen)
        trial = trials.run(most.micro_batch_size)
        if trial.outcome == "fits":
            return chosen, trial
        failed += 1
        if failed > _PATIENCE:
            room *= _LESS
    if failed:
        trials.recompute(useful)
        trials.run(most.micro_batch_size)
    return useful, most


def _rest(measured: BlockMeasurement, blocks: Sequence[str], trial: Trial) -> int:
    """Return what a trial with these blocks recomputed held beside what is predicted of blocks."""
    held = trial.peak_reserved if trial.backward_reserved is None else trial.backward_reserved
    return held - predict_peak(measured.runs, blocks, measured.head_bytes)


def _explain(left_out: Mapping[str, str]) -> str:
    shown = [f"{block} ({reason})" for block, reason in [*left_out.items()][:_REASONS_SHOWN]]
    more = f" and {len(left_out) - len(shown)} more" if len(left_out) > len(shown) else ""
    return f"; cannot be recomputed: {', '.join(shown)}{more}" if shown else ""
