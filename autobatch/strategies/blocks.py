"""Finds the blocks of a model that may run in less memory, and measures each in one forward pass of a step.

1. Blocks are the entries of ModuleLists and Sequentials that consist of several modules; none is inside another.
2. While the step runs, each block runs plainly and in each other way, from the same inputs and generators
   (``each_way.py``). This needs no more memory than one block, so it works where the whole step does not fit.
3. The plain run says what the block keeps and computes, the others what each takes and keeps.
4. A way whose run is another training is left out; so is a block that has none left, with the reason.

The step's own graph is cut at each block, so that its backward pass runs the part after the last block alone.

Where parameters are sharded, all ranks measure together, and have one outcome for each block: it can run in a way if it
can on every rank, and its numbers are the largest. So the ranks choose the same blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autobatch._formatting import name_type
from autobatch.distributed.division import SharedTrials
from autobatch.distributed.sharded import is_sharded
from autobatch.errors import AutobatchError
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Way
from autobatch.step.workload import Workload, read_output
from autobatch.strategies.checkpointing import Forward, find_modules, replaced_forward
from autobatch.strategies.choice import BlockRun, WayRun, Ways, even_out, predict_peak
from autobatch.strategies.each_way import Call, EachWay, run_each_way
from autobatch.torch_internals.storages import bytes_of, storages_of

_LISTS = (nn.ModuleList, nn.Sequential)
_LARGEST = ("saved_bytes", "input_bytes", "keeps_input", "again_bytes", "again_seconds", "flops")
_ALONE = SharedTrials(None)


def find_blocks(model: nn.Module, *, innermost: bool = False) -> list[str]:
    """Return the names of the outermost or innermost blocks, in the order of the model's modules."""
    found: list[str] = []
    seen = set[nn.Module]()

    def look(name: str, module: nn.Module, *, is_entry: bool) -> bool:
        """Add the blocks at or below a module; return whether there are any."""
        below = [
            look(f"{name}.{key}" if name else key, child, is_entry=isinstance(module, _LISTS))
            for key, child in module.named_children()
            if innermost or not is_entry or isinstance(module, _LISTS)
        ]
        if any(below):
            return True
        is_block = is_entry and next(module.children(), None) is not None
        if is_block and module not in seen:
            found.append(name)
            seen.add(module)  # a shared one has its first name
        return is_block

    look("", model, is_entry=False)
    return found


@dataclass(frozen=True)
class BlockMeasurement:
    """What one forward pass has shown of the blocks of a model.

    Attributes:
        candidates: Number of blocks.
        runs: Calls of blocks that can run in another way, in order.
        head_bytes: Most bytes at once after the last block, beyond those held at its end.
        left_out: Blocks that cannot, each with the reason.
    """

    candidates: int
    runs: Sequence[BlockRun]
    head_bytes: int
    left_out: Mapping[str, str]

    def peak(self, chosen: Ways) -> int:
        """Predict what the activations hold at most if these blocks run in these ways."""
        return predict_peak(self.runs, chosen, self.head_bytes)


def measure_blocks(
    workload: Workload,
    device: Device,
    blocks: Sequence[str],
    samples: Any,
    left_out: dict[str, str],
    *,
    allowed: Collection[Way],
    shared: SharedTrials = _ALONE,
) -> BlockMeasurement:
    """Run the step once on these samples, its blocks in the allowed ways too.

    What it changes is the caller's to restore.

    Adds the blocks that can run in no such way to ``left_out``, with the reason, even if the step runs out of memory.
    """
    modules = find_modules(workload.model, blocks)
    names = {id(module): name for name, module in modules.items()}
    for name, module in modules.items():
        if any(map(is_sharded, module.children())):  # the end of its own backward pass would end that of the model
            left_out[name] = "fully_shard was called on modules inside it"
    measuring = _Pass(workload.model, device, left_out, allowed, shared)

    def around(block: nn.Module, forward: Forward) -> Forward:
        return lambda *args, **kwargs: measuring.run_block(names[id(block)], block, forward, args, kwargs)

    measuring.begin_rest()
    with replaced_forward([*modules.values()], around):
        terms, _ = read_output(workload.step(workload.model, samples))
    loss = sum(term.loss for term in terms)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
    return measuring.finish(len(blocks))


class _Pass:
    """The forward pass that is measured: which blocks have run, and which tensors they keep."""

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        left_out: dict[str, str],
        allowed: Collection[Way],
        shared: SharedTrials,
    ) -> None:
        self._model, self._device, self._held, self._allowed = model, device, 0, allowed
        self._shared = shared
        self._runs: list[BlockRun] = []
        self._left_out = left_out
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    def begin_rest(self) -> None:
        self._device.reset_peak()
        self._held = self._device.usage().allocated

    def finish(self, candidates: int) -> BlockMeasurement:
        self._device.synchronize()
        own_bytes = max(self._device.usage().peak_allocated - self._held, 0)
        head_bytes = max(self._shared.exchange("the rest", own_bytes))
        runs = [run for run in self._runs if run.block not in self._left_out]
        return BlockMeasurement(candidates, even_out(runs), head_bytes, self._left_out)

    def run_block(
        self, name: str, block: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in self._left_out or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = Call(args, kwargs)
        ran, reason = self._try_each_way(block, forward, call)
        run = self._describe_run(name, block, call, ran) if ran is not None and ran.has_gradient else None
        if not self._agree(name, reason, run, has_run=ran is not None) or ran is None:
            return forward(*args, **kwargs)
        flat, nest = tree_flatten(ran.returned)
        saves_output = ran.saves_output
        del ran
        flat = [_cut(one) if isinstance(one, torch.Tensor) else one for one in flat]
        for one in flat:
            if isinstance(one, torch.Tensor) and saves_output:
                self._note(one, name)
        self.begin_rest()
        return tree_unflatten(flat, nest)

    def _try_each_way(self, block: nn.Module, forward: Forward, call: Call) -> tuple[EachWay | None, str]:
        """Run a block in each way; return the reason why it cannot be recomputed, ``None`` if it cannot even run so."""
        if call.opaque:
            name = name_type(call.opaque[0])
            hint = " (set model.config.use_cache = False)" if name.endswith("Cache") else ""
            return None, f"it is called with {name}, which it may change{hint}"
        reason = ""
        try:
            ran = run_each_way(self._model, self._device, block, forward, call, allowed=self._allowed)
        except Exception as error:
            if isinstance(error, AutobatchError) or is_oom(error):
                raise
            reason = describe_error(error)
        finally:
            for one in block.parameters():  # gradients of gathered ones would be summed over the ranks
                one.grad = None
        if call.has_changed_containers:
            reason = "it writes into a list or dict that it is called with"
        return (None, reason) if reason else (ran, ran.reason)

    def _agree(self, name: str, reason: str, run: BlockRun | None, *, has_run: bool) -> bool:
        """Note what all ranks have found of a block; return whether it could run so on each of them."""
        own = {"reason": reason, "run": run and run.model_dump(), "has_run": has_run}
        found = self._shared.exchange(name, own)
        if any(one["reason"] for one in found):
            self._left_out[name] = next(filter(None, (one["reason"] for one in found)))
        if all(one["run"] for one in found):
            self._runs.append(_join([BlockRun.model_validate(one["run"]) for one in found]))
        return all(one["has_run"] for one in found)

    def _describe_run(self, name: str, block: nn.Module, call: Call, ran: EachWay) -> BlockRun:
        fed = [self._find(one) for one in call.tensors]
        return BlockRun(
            block=name,
            kind=type(block).__qualname__,
            saved_bytes=ran.saved_bytes,
            input_bytes=sum(bytes_of(one) for one, by in zip(call.tensors, fed, strict=True) if by != ""),
            keeps_input=ran.saves_input,
            fed_by=next(filter(None, fed), ""),
            again_bytes=ran.again_bytes,
            again_seconds=ran.again_seconds,
            flops=ran.flops,
            ways=ran.ways,
        )

    def _note(self, tensor: torch.Tensor, kept_by: str) -> None:
        for storage in storages_of(tensor):
            self._seen[storage._cdata] = weakref.ref(storage), kept_by

    def _find(self, tensor: torch.Tensor) -> str | None:
        """Return the block that keeps an input as its output; empty if the input was counted, ``None`` if it is new."""
        for storage in storages_of(tensor):
            reference, kept_by = self._seen.get(storage._cdata, (None, ""))
            if reference is not None and reference() is not None:
                return kept_by
        self._note(tensor, "")
        return None


def _join(runs: Sequence[BlockRun]) -> BlockRun:
    """Return one run for those of all ranks: their largest numbers, and the ways that each of them has."""
    common = [way for way in runs[0].ways if all(way in run.ways for run in runs)]
    ways = {
        way: WayRun(**{name: max(getattr(run.ways[way], name) for run in runs) for name in WayRun.model_fields})
        for way in common
    }
    largest: dict[str, Any] = {name: max(getattr(run, name) for run in runs) for name in _LARGEST}
    return runs[0].model_copy(update={**largest, "ways": ways})


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose graph begins here, but not a leaf: the step may write into it."""
    return tensor.detach().requires_grad_().clone() if tensor.requires_grad else tensor
