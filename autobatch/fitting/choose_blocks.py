"""Chooses the blocks to recompute or offload where the smallest micro-batch does not fit.

1. One pass measures what each block keeps and costs in each way, and which blocks can run in none.
2. A trial with all others in the way that holds least says whether any choice can fit. It also says what the rest of
   the step takes.
3. Choices whose predicted peak may fit are tried, the cheapest first, until one fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autobatch._bounds import SHORTEST
from autobatch._formatting import plural
from autobatch.distributed.sharded import is_tried
from autobatch.errors import AutobatchError, DoesNotFit, InvalidArgument
from autobatch.fitting.make_plan import Request
from autobatch.fitting.options import read_strategies
from autobatch.fitting.trials import Trials
from autobatch.memory.device import Device
from autobatch.memory.devices import has_own_memory
from autobatch.memory.oom import describe_error
from autobatch.records import Checkpointing, LeftOut, Strategy, Trial
from autobatch.step.model_info import is_compiled
from autobatch.step.workload import Workload
from autobatch.strategies.blocks import BlockMeasurement, find_blocks, measure_blocks
from autobatch.strategies.choice import TOO_LOW, again_seconds, choices, useful_ways

_LESS = 0.995
"""Part of a failed trial's predicted peak that the next choice may be predicted to hold."""

_REASONS_SHOWN = 2

_WITH_SHARDS: tuple[Strategy, ...] = ("checkpoint", "selective")
"""Strategies that are supported where parameters are sharded."""


def allow_strategies(given: Any, workload: Workload, memory: Device, *, are_sharded: bool) -> tuple[Strategy, ...]:
    """Return the strategies that were asked for; raise InvalidArgument where one could not be applied exactly.

    Offload is left out where the device's memory is the host's. ``"auto"`` leaves out those that are not supported with
    sharded parameters.
    """
    strategies = read_strategies(given)
    if not has_own_memory(memory):
        if strategies == ("offload",):
            raise InvalidArgument(
                f"strategies=['offload'] keeps activations in host memory, and that of {memory.torch_device} is host "
                f"memory: pass 'auto', or leave strategies= out"
            )
        strategies = tuple(one for one in strategies if one != "offload")
    if are_sharded:
        unsupported = [one for one in strategies if one not in _WITH_SHARDS]
        if unsupported and given != "auto":
            raise InvalidArgument(
                f"strategies= has {unsupported[0]!r}, which is not supported where parameters are sharded: pass "
                f"'auto', or a list of {', '.join(map(repr, _WITH_SHARDS))}"
            )
        strategies = tuple(one for one in strategies if one in _WITH_SHARDS)
    if strategies and are_sharded and not is_tried():
        raise InvalidArgument(
            f"strategies= was not tried with fully_shard in torch {torch.__version__}: leave it out, and checkpoint "
            f"blocks with torch's checkpoint_wrapper before fully_shard()"
        )
    if strategies and is_compiled(workload.model, workload.step):
        raise InvalidArgument(
            "strategies= is not supported with torch.compile, whose graph is fixed before blocks are chosen, and whose "
            "activation_memory_budget has given wrong gradients with dropout at other batch sizes: pass the model that "
            "is not compiled, or leave strategies= out"
        )
    if strategies and isinstance(workload.model, nn.DataParallel):
        raise InvalidArgument(
            "strategies= is not supported with DataParallel, whose copies would recompute the blocks of the first "
            "card: use DistributedDataParallel, or leave strategies= out"
        )
    return strategies


def choose_blocks(request: Request, trials: Trials, size: int) -> None:
    """Let ``trials`` run the cheapest choice of blocks with which so many samples fit in other ways.

    Blocks of the outermost lists are tried first: they keep the least. Recomputing one may take more than there is, as
    with the stages of a ConvNeXt; then the blocks inside them are tried.

    Raises:
        DoesNotFit: No choice fits, or no block has such a way.
    """
    trials.probe.savings.add("activation checkpointing")  # so that it is not advised
    plain, model = trials.explain(), request.workload.model
    if not request.memory.measures:
        raise DoesNotFit(f"{plain}; strategies= needs a device that reports its memory")
    outer, inner = find_blocks(model), find_blocks(model, innermost=True)
    if not outer:
        raise DoesNotFit(f"{plain}; strategies= found no blocks in ModuleLists or Sequentials")
    reason = _choose_among(outer, request, trials, size, plain)
    if reason and inner != outer:
        reason = _choose_among(inner, request, trials, size, plain)
    if reason:
        raise DoesNotFit(reason)


def _choose_among(blocks: Sequence[str], request: Request, trials: Trials, size: int, plain: str) -> str:
    """Let ``trials`` run the cheapest choice among these blocks; return why none fits, the same on all ranks.

    ``plain`` says why plain ones do not fit. An error of one rank is raised, as the others do not go on.
    """
    try:
        measured = measure(request, trials, blocks, size)
    except AutobatchError:  # of another rank
        raise
    except Exception as error:
        reason = f"the step fails where its graph is cut at each block ({describe_error(error)})"
        raise DoesNotFit(f"{plain}; strategies= does not help: {reason}") from error
    if isinstance(measured, str):
        return f"{plain}; strategies= does not help: {measured}"
    useful = {block: ways[0] for block, ways in useful_ways(measured.runs, request.ways).items()}
    if not useful:
        return f"{plain}; strategies= does not help: no block keeps less{_explain(measured.left_out)}"
    trials.recompute(useful)
    most = trials.run(size)
    if most.outcome != "fits":
        tried = f"strategies= ran {plural(len(useful), 'block')} in less memory, which is not enough"
        return f"{trials.explain()}; {tried}{_explain(measured.left_out)}"
    rest = held_bytes(most) - measured.peak(useful)
    trial = _try_choices(request, trials, measured, most)
    trials.checkpointing = describe(
        trials,
        measured,
        trial,
        plain_bytes=rest + measured.peak({}),
        plain_seconds=trial.pass_seconds - again_seconds(measured.runs, trials.ways),
    )
    return ""


def measure(request: Request, trials: Trials, blocks: Sequence[str], size: int) -> BlockMeasurement | str:
    """Measure the blocks on so many samples, and note which can be recomputed; return the reason if that fails."""
    request.announce("measuring what blocks of the model keep")
    found, left_out = list[BlockMeasurement](), dict[str, str]()

    def run(samples: Any) -> None:  # the second run counts: the first one may import modules, which draw numbers
        left_out.clear()
        own = trials.workload, request.memory, blocks, samples, left_out
        found.append(measure_blocks(*own, allowed=request.ways, shared=request.division.trials))

    if (shortage := trials.probe.examine(run, size)) is not None:
        least = "too many blocks are left out, or one of them" if left_out else "a single block"
        return f"{least} or the rest does not fit ({shortage}){_explain(left_out)}"
    trials.recomputable = tuple(useful_ways(found[-1].runs, [one for one in request.ways if one == "checkpoint"]))
    return found[-1]


def _try_choices(request: Request, trials: Trials, measured: BlockMeasurement, most: Trial) -> Trial:
    """Try choices until one fits, and return its trial; all useful blocks together have fit in the trial ``most``."""
    useful = trials.ways
    rest, room = held_bytes(most) - measured.peak(useful), TOO_LOW * request.allowance.limit_bytes
    for chosen in choices(measured.runs, request.ways):
        predicted = rest + measured.peak(chosen)
        if predicted > room or chosen == useful:
            continue
        trials.recompute(chosen)
        trial = trials.run(most.micro_batch_size)
        if trial.outcome == "fits":
            return trial
        room = _LESS * predicted
    trials.recompute(useful)
    return most


def held_bytes(trial: Trial) -> int:
    """Return what a trial held in its passes; the optimizer's step may have held more."""
    return trial.peak_reserved if trial.backward_reserved is None else trial.backward_reserved


def describe(
    trials: Trials, measured: BlockMeasurement, trial: Trial, *, plain_bytes: int, plain_seconds: float, **found: Any
) -> Checkpointing:
    """Describe the blocks that are recomputed now, in this trial and beside a plain micro-batch of its size.

    The plain one takes at least half of the trial's time, whatever was measured beside others: it runs each block too.
    """
    plain_seconds = max(plain_seconds, trial.pass_seconds / 2, SHORTEST)
    return Checkpointing(
        blocks=tuple(trials.ways),
        selective=tuple(block for block, way in trials.ways.items() if way == "selective"),
        offloaded=tuple(block for block, way in trials.ways.items() if way == "offload"),
        candidates=measured.candidates,
        micro_batch_size=trial.micro_batch_size,
        plain_bytes=plain_bytes,
        peak_bytes=trial.peak_reserved,
        slowdown=max(trial.pass_seconds / plain_seconds - 1, 0.0),
        left_out=tuple(LeftOut(block=block, reason=reason) for block, reason in measured.left_out.items()),
        **found,
    )


def _explain(left_out: Mapping[str, str]) -> str:
    shown = [f"{block} ({reason})" for block, reason in [*left_out.items()][:_REASONS_SHOWN]]
    more = f" and {len(left_out) - len(shown)} more" if len(left_out) > len(shown) else ""
    return f"; left out: {', '.join(shown)}{more}" if shown else ""
