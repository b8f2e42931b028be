"""What-if: the same step done in another way, traced again.

Covers autocast to bfloat16, checkpointing of repeated blocks, other optimizers, expandable segments, and gradients that
are kept and zeroed. Does not cover what a change does to the result of training: that is the user's to weigh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autobatch.errors import CannotPredict
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.isolation import run_apart
from autobatch.prediction.record import Change
from autobatch.prediction.timeline import Timeline
from autobatch.prediction.tracing.trace import Circumstances, trace_timeline
from autobatch.workload.batches import Layout
from autobatch.workload.step import Workload

__all__ = ["EightBitAdam", "repeated_blocks", "try_changes"]

_FEWEST_BLOCKS = 3
_BLOCK = 256
"""Numbers that share one float32 scale in 8-bit optimizers (bitsandbytes' block-wise quantization)."""
_SMALLEST_EIGHT_BIT = 4096
"""Parameters with fewer numbers keep float32 state there."""


def try_changes(
    workload: Workload,
    layout: Layout,
    estimate: Estimate,
    size: int,
    *,
    largest: Callable[[Estimate], int],
    circumstances: Circumstances,
) -> tuple[Change, ...]:
    """Each change that the step allows, the one that saves most at ``size`` first, those that fail last.

    Args:
        workload: The step as it is.
        layout: Its example batch.
        estimate: Of it.
        size: Samples at which changes are compared.
        largest: The most samples that fit, of an estimate.
        circumstances: In which the unchanged step was traced.
    """
    before = estimate.reserved(size)

    def judge(name: str, make: Callable[[], Estimate]) -> Change:
        try:
            changed = make()
        except CannotPredict as error:
            return Change(name=name, failed=str(error))
        peak = changed.reserved(size)
        return Change(name=name, peak_bytes=peak, saved_bytes=before - peak, micro_batch_size=largest(changed))

    changes = [
        judge(name, partial(_estimate_anew, estimate, trace))
        for name, trace in _traces(workload, layout, circumstances)
    ]
    if not estimate.expandable_segments:
        changes.append(judge("expandable segments", lambda: estimate.changed(expandable_segments=True)))
    return tuple(sorted(changes, key=lambda change: (bool(change.failed), -change.saved_bytes)))


def _estimate_anew(estimate: Estimate, trace: Callable[[], Timeline]) -> Estimate:
    return estimate.changed(timeline=trace())


def _traces(workload: Workload, layout: Layout, usual: Circumstances) -> Iterator[tuple[str, Callable[[], Timeline]]]:
    def trace(changed: Workload, circumstances: Circumstances) -> Callable[[], Timeline]:
        return lambda: run_apart(lambda: trace_timeline(changed, layout, circumstances))

    yield "bfloat16 autocast", trace(replace(workload, step=_with_autocast(workload.step)), usual)
    blocks = repeated_blocks(workload.model)
    if blocks:
        name = f"checkpointing of {len(blocks)} {type(blocks[0]).__name__} blocks"
        yield name, trace(replace(workload, step=_with_checkpoints(workload.step, blocks)), usual)
    if workload.optimizer is not None:
        for name, make in _optimizers(workload):
            yield name, trace(replace(workload, optimizer=make()), usual)
    yield "gradients zeroed, not set to None", trace(workload, usual._replace(keeps_gradients=True))


def _with_autocast(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(model: Any, batch: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return step(model, batch)

    return run


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest row of modules of one class in one container: a transformer's layers, a network's blocks."""
    rows: list[list[nn.Module]] = []
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            children = [child for child in container.children() if [*child.children()]]
            kinds = {type(child) for child in children}
            rows += [[child for child in children if type(child) is kind] for kind in kinds]
    longest = max(rows, key=lambda row: sum(p.numel() for child in row for p in child.parameters()), default=[])
    return longest if len(longest) >= _FEWEST_BLOCKS else []


def _with_checkpoints(step: Callable[[Any, Any], Any], blocks: Sequence[nn.Module]) -> Callable[[Any, Any], Any]:
    def run(model: Any, batch: Any) -> Any:
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(_checkpointed(block))
            return step(model, batch)

    return run


@contextmanager
def _checkpointed(block: nn.Module) -> Iterator[None]:
    forward = block.forward

    def recompute(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recompute
    try:
        yield
    finally:
        del block.forward


def _optimizers(workload: Workload) -> Iterator[tuple[str, Callable[[], Any]]]:
    parameters = [parameter for parameter in workload.parameters() if parameter.requires_grad]
    now = type(workload.optimizer)
    if now is not torch.optim.SGD:
        yield "SGD without momentum", lambda: torch.optim.SGD(parameters, lr=1e-3)
    if now not in (torch.optim.Adam, torch.optim.AdamW):
        yield "AdamW", lambda: torch.optim.AdamW(parameters, lr=1e-3)
    yield "fused AdamW", lambda: torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    yield "8-bit AdamW", lambda: EightBitAdam(parameters, {})


class EightBitAdam(torch.optim.Optimizer):
    """What 8-bit Adam allocates, and nothing else of it: two moments in one byte each, a float32 scale a block."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state, where it is not there; one fused kernel updates in place and takes nothing."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = _make_moments(parameter)


def _make_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if parameter.numel() < _SMALLEST_EIGHT_BIT:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("first", "second")}
    blocks = -(-parameter.numel() // _BLOCK)
    moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("first", "second")}
    scales = {f"{name} scale": torch.zeros(blocks, device=parameter.device) for name in ("first", "second")}
    return {**moments, **scales}
