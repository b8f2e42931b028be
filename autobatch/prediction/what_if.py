"""Predicts what other ways to do the same step would need, each traced again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autobatch.batch.samples import Layout
from autobatch.errors import InvalidArgument
from autobatch.events import Hook, StageBegan, emit
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.prediction import Change
from autobatch.prediction.sizing import Sizing, check_timeline, prove_sizing
from autobatch.prediction.timeline import Timeline
from autobatch.prediction.tracing.trace import Circumstances, trace_timeline, trace_whole
from autobatch.step.whole_batch import WholeBatch
from autobatch.step.workload import Step, Workload

_FEWEST_BLOCKS = 3
_BLOCK = 256  # numbers that share one float32 scale (bitsandbytes' block-wise quantization)
_FLAG = "gradient_checkpointing"  # gradient_checkpointing_enable() of a Transformers model sets it on modules
_CHECKPOINT = partial(checkpoint, use_reentrant=False)
_SMALLEST_EIGHT_BIT = 4096  # parameters with fewer numbers keep float32 state


class _Way(NamedTuple):
    name: str
    effect: str  # what it costs besides memory
    workload: Workload
    circumstances: Circumstances


def try_changes(
    workload: Workload, layout: Layout, sizing: Sizing, circumstances: Circumstances, hooks: Sequence[Hook] = ()
) -> tuple[Change, ...]:
    """Trace each change that the step allows; the one that saves most comes first, those that fail last."""
    estimate, size = sizing.estimate, sizing.judged
    before = estimate.reserved(size)
    # An interpolated step mostly stays so, so it is traced at the size of the comparison too.
    also = size if estimate.timeline.interpolated and size > 1 else 0

    def trace_way(way: _Way) -> Timeline:
        timeline = trace_timeline(way.workload, layout, way.circumstances)
        if not also or also in {step.samples for step in timeline.traced}:
            return timeline
        return check_timeline(timeline, way.workload, layout, also, way.circumstances) or timeline

    def judge(way: _Way) -> Change:
        try:
            if way.workload is workload and way.circumstances == circumstances:  # only the allocator is another
                changed = estimate.changed(expandable_segments=True)
            else:
                whole = run_apart(lambda: trace_whole(way.workload, layout, way.circumstances))
                changed = estimate.changed(timeline=run_apart(lambda: trace_way(way)), whole=whole)
            proven, _ = prove_sizing(replace(sizing, estimate=changed), way.workload, layout, way.circumstances)
        except Exception as error:  # noqa: BLE001 - it may come from what was changed
            text = (str(error).splitlines() or [""])[0]
            failed = text if isinstance(error, InvalidArgument) else f"{type(error).__name__}: {text}"
            return Change(name=way.name, effect=way.effect, failed=failed)
        peak = changed.settle(lambda _: [size]).reserved(size)
        saved = before - peak
        return Change(
            name=way.name, effect=way.effect, peak_bytes=peak, saved_bytes=saved, micro_batch_size=proven.largest
        )

    ways = [*_traced_ways(workload, circumstances)]
    if not estimate.expandable_segments:
        ways.append(_Way("expandable segments", "", workload, circumstances))
    changes = []
    for number, way in enumerate(ways, start=1):
        emit(StageBegan(stage=f"what if: {way.name} ({number} of {len(ways)})"), hooks)
        changes.append(judge(way))
    return tuple(sorted(changes, key=lambda change: (bool(change.failed), -change.saved_bytes)))


def _traced_ways(workload: Workload, usual: Circumstances) -> Iterator[_Way]:
    parts = workload.step if isinstance(workload.step, WholeBatch) else None
    step: Step = _with_autocast(workload.step)
    if parts:
        step = WholeBatch(_with_autocast(parts.represent), _with_autocast(parts.loss))
    autocast = replace(workload, step=step)
    yield _Way("bfloat16 autocast", "lower precision", autocast, usual)
    blocks = _own_blocks(workload.model) or repeated_blocks(workload.model)
    if blocks:
        kinds = Counter(type(block).__name__ for block in blocks)
        named = " and ".join(f"{count} {kind}" for kind, count in kinds.items())
        step = _with_checkpoints(parts.represent if parts else workload.step, workload.model, blocks)
        step = WholeBatch(step, parts.loss) if parts else step
        yield _Way(f"checkpointing of {named} blocks", "more time", replace(workload, step=step), usual)
    for name, effect, optimizer in other_optimizers(workload.optimizer):
        yield _Way(name, effect, replace(workload, optimizer=optimizer), usual)


def _with_autocast(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(model: Any, batch: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return step(model, batch)

    return run


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the largest row of modules of one class in one container: a transformer's layers, a network's blocks."""
    rows: list[list[nn.Module]] = []
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            children = [child for child in container.children() if [*child.children()]]
            kinds = {type(child) for child in children}
            rows += [[child for child in children if type(child) is kind] for kind in kinds]
    longest = max(rows, key=lambda row: sum(p.numel() for child in row for p in child.parameters()), default=[])
    return longest if len(longest) >= _FEWEST_BLOCKS else []


def _own_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a Transformers model can checkpoint; none for other models."""
    names = {
        f"{name}.{index}"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, block in module.named_children()
        if hasattr(block, _FLAG)
    }
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return [module for name, module in model.named_modules() if name in outermost]


def _with_checkpoints(
    step: Callable[[Any, Any], Any], whole: nn.Module, blocks: Sequence[nn.Module]
) -> Callable[[Any, Any], Any]:
    """Let the step recompute these blocks; a trace drops what is written into modules, so nothing is put back."""

    def run(model: Any, batch: Any) -> Any:
        if flagged := [module for module in whole.modules() if hasattr(module, _FLAG)]:
            # As ``gradient_checkpointing_enable()``. A wrapped block would append to the model's cache a second time.
            for module in flagged:
                vars(module).update({_FLAG: True, "_gradient_checkpointing_func": _CHECKPOINT})
        else:
            for block in blocks:
                if getattr(block.forward, "func", None) is not checkpoint:
                    block.forward = partial(_CHECKPOINT, block.forward)
        return step(model, batch)

    return run


def other_optimizers(now: Any | None) -> Iterator[tuple[str, str, Any]]:
    """Yield other optimizers of the same parameters: name, what it costs besides memory, and an instance."""
    if now is None:
        return
    parameters = [parameter for group in now.param_groups for parameter in group["params"]]
    is_adam, other = isinstance(now, (torch.optim.Adam, torch.optim.AdamW)), "another optimizer"
    if not isinstance(now, torch.optim.SGD) or _any_group(now, "momentum"):
        yield "SGD without momentum", other, torch.optim.SGD(parameters, lr=1e-3)
    if not is_adam:
        yield "Adam", other, torch.optim.Adam(parameters)
        yield "AdamW", other, torch.optim.AdamW(parameters)
    if not (is_adam and _any_group(now, "fused")):
        fused = torch.optim.Adam if type(now) is torch.optim.Adam else torch.optim.AdamW
        same = fused(parameters, fused=True, amsgrad=_any_group(now, "amsgrad"))
        yield f"fused {fused.__name__}", "" if is_adam else other, same
    if "8bit" not in type(now).__name__.lower() and not isinstance(now, EightBitAdam):
        yield "8-bit AdamW", "state in 8 bits" if is_adam else other, EightBitAdam(parameters, {})


def _any_group(optimizer: Any, option: str) -> bool:
    return any(group.get(option) for group in optimizer.param_groups)


class EightBitAdam(torch.optim.Optimizer):
    """The allocations of 8-bit Adam: two moments in one byte each, and a float32 scale a block."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state once; the fused update allocates nothing."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = _make_moments(parameter)


def _make_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    is_small = parameter.numel() < _SMALLEST_EIGHT_BIT
    dtype, blocks = torch.float32 if is_small else torch.uint8, -(-parameter.numel() // _BLOCK)
    moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("first", "second")}
    scales = () if is_small else moments
    return moments | {f"{name} scale": torch.zeros(blocks, device=parameter.device) for name in scales}
