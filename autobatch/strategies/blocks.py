"""Finds the blocks of a model that may be recomputed, and measures each in one forward pass of a step.

1. Blocks are the entries of ModuleLists and Sequentials that consist of several modules.
2. While the step runs, each block runs twice from the same inputs and generators: plainly, and recomputed. This
   needs no more memory than one block, so it works where the whole step does not fit.
3. The plain run says what the block keeps and computes, the other one what recomputing it takes at once.
4. A block whose two runs differ, in a gradient or in what the model holds, is left out, with the reason.

The step's own graph is cut at each block, so that its backward pass runs the part after the last block alone.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from autobatch._formatting import name_type
from autobatch.memory.device import Device
from autobatch.memory.oom import describe_error, is_oom
from autobatch.step.workload import Workload, read_output
from autobatch.strategies.checkpointing import Forward, find_modules, recomputing, replaced_forward
from autobatch.strategies.choice import BlockRun
from autobatch.torch_internals.storages import bytes_of, storages_of
from autobatch.undo.module_state import ModuleState
from autobatch.undo.random_state import RandomState

_LISTS = (nn.ModuleList, nn.Sequential)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_EXACT = 1e-12  # of the norm of a gradient
_ROUNDING = 16  # in units of the dtype's rounding, for operators that add up in another order each time


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks, in the order of the model's modules; none is inside another."""
    found: list[str] = []
    seen = set[nn.Module]()

    def look(name: str, module: nn.Module, *, is_entry: bool) -> bool:
        """Add the blocks at or below a module; return whether there are any."""
        below = [
            look(f"{name}.{key}" if name else key, child, is_entry=isinstance(module, _LISTS))
            for key, child in module.named_children()
            if not is_entry or isinstance(module, _LISTS)
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


@dataclass
class BlockMeasurement:
    """Measurement of the blocks of a model in one forward pass.

    Attributes:
        runs: Calls of blocks that can be recomputed, in order.
        head_bytes: Most bytes at once after the last block, beyond those held at its end.
        head_seconds: Time of the part after the last block.
        left_out: Blocks that cannot be recomputed, each with the reason.
    """

    workload: Workload
    device: Device
    blocks: Sequence[str]
    runs: list[BlockRun] = field(default_factory=list)
    head_bytes: int = 0
    head_seconds: float = 0.0
    left_out: dict[str, str] = field(default_factory=dict)
    _seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = field(default_factory=dict)
    _held: int = 0
    _began: float = 0.0

    def run(self, samples: Any) -> None:
        """Run the step once on these samples; what it changes is the caller's to restore.

        A later run replaces what an earlier one found: the first one may import modules, which draw numbers.
        """
        self.runs, self.left_out, self._seen = [], {}, {}
        modules = find_modules(self.workload.model, self.blocks)
        names = dict(zip(map(id, modules), self.blocks, strict=True))

        def around(block: nn.Module, forward: Forward) -> Forward:
            return lambda *args, **kwargs: self._run_block(names[id(block)], block, forward, args, kwargs)

        self._begin_rest()
        with replaced_forward(modules, around):
            terms, _ = read_output(self.workload.step(self.workload.model, samples))
        loss = sum(term.loss for term in terms)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        self.device.synchronize()
        self.head_seconds = time.perf_counter() - self._began
        self.head_bytes = max(self.device.usage().peak_allocated - self._held, 0)
        self.runs = [run for run in self.runs if run.block not in self.left_out]

    def _begin_rest(self) -> None:
        self.device.reset_peak()
        self._held, self._began = self.device.usage().allocated, time.perf_counter()

    def _run_block(
        self, name: str, block: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = _Call(args, kwargs)
        if call.opaque:
            self.left_out.setdefault(name, f"it is called with {name_type(call.opaque[0])}, which it may change")
        if name in self.left_out or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        reason, saves_output = "", False
        try:
            returned, saves_output = self._compare(name, block, forward, call)
        except Exception as error:
            if is_oom(error):
                raise
            reason = describe_error(error)
        if call.has_changed_containers:
            reason = "it writes into a list or dict that it is called with"
        if reason:
            self.left_out.setdefault(name, reason)
            return forward(*args, **kwargs)
        flat, nest = tree_flatten(returned)
        del returned
        flat = [_cut(one) if isinstance(one, torch.Tensor) else one for one in flat]
        for one in flat:
            if isinstance(one, torch.Tensor) and saves_output:
                self._note(one, name)
        self._begin_rest()
        return tree_unflatten(flat, nest)

    def _compare(self, name: str, block: nn.Module, forward: Forward, call: _Call) -> tuple[Any, bool]:
        """Run a block plainly and recomputed; return its outputs, and whether its backward pass keeps them."""
        device, parameters = self.device, [one for one in block.parameters() if one.requires_grad]
        for one in parameters:
            one.grad = None
        generators, versions = RandomState(device.torch_device), call.versions()
        saved = _Saved(self.workload.model, call.tensors)
        with (
            torch.autograd.graph.saved_tensors_hooks(saved.pack, torch.Tensor.detach),
            FlopCounterMode(display=False) as counter,
        ):
            inputs, outputs, returned = call.run(forward)
        if not outputs:
            return returned, False
        saves_output = saved.drop(outputs)
        directions = [*map(_direction, outputs)]
        torch.autograd.backward(outputs, directions)
        plain = [_copy(one.grad) for one in (*inputs, *parameters)]
        del inputs, outputs, returned
        state, ended = ModuleState([self.workload.model]), RandomState(device.torch_device)
        generators.restore()
        device.synchronize()
        device.reset_peak()
        before, started = device.usage().allocated, time.perf_counter()
        inputs, outputs, returned = call.run(recomputing(forward))
        device.synchronize()
        seconds, started = time.perf_counter() - started, time.perf_counter()
        torch.autograd.backward(outputs, directions)  # gradients of parameters are there already, as in training
        device.synchronize()
        step_seconds = time.perf_counter() - started  # the backward pass has run the forward pass too
        peak = device.usage().peak_allocated
        again = [_copy(one.grad) for one in (*inputs, *parameters)]
        summed = [1] * len(inputs) + [2] * len(parameters)  # those of parameters are of both runs
        ended.restore()
        if not all(map(_agree, plain, again, summed)):
            self.left_out[name] = "its recomputed gradient differs: it draws from a generator of its own, or moves"
        elif pickle.dumps((generators.python, generators.numpy)) != pickle.dumps((ended.python, ended.numpy)):
            self.left_out[name] = "it draws from Python's or NumPy's generator, which no recomputation restores"
        elif state.find_written() or state.find_changed():
            self.left_out[name] = "its forward pass changes what the model holds, and would do so twice"
        elif versions != call.versions():
            self.left_out[name] = "it writes into its input"
        fed = [self._find(one) for one in call.tensors]
        self.runs.append(
            BlockRun(
                block=name,
                kind=type(block).__qualname__,
                saved_bytes=saved.byte_count,
                input_bytes=sum(bytes_of(one) for one, by in zip(call.tensors, fed, strict=True) if by != ""),
                keeps_input=saved.has_input,
                fed_by=next(filter(None, fed), ""),
                again_bytes=max(peak - before - (0 if saves_output else sum(map(bytes_of, outputs))), 0),
                flops=counter.get_total_flops(),
                seconds=seconds,
                step_seconds=step_seconds,
            )
        )
        return returned, saves_output

    def _note(self, tensor: torch.Tensor, kept_by: str) -> None:
        storage = tensor.untyped_storage()
        self._seen[storage._cdata] = weakref.ref(storage), kept_by

    def _find(self, tensor: torch.Tensor) -> str | None:
        """Return the block that keeps an input as its output; empty if the input was counted, ``None`` if it is new."""
        storage = tensor.untyped_storage()
        reference, kept_by = self._seen.get(storage._cdata, (None, None))
        if reference is None or reference() is None:
            kept_by = None
        if kept_by is None:
            self._note(tensor, "")
        return kept_by


class _Call:
    """Arguments of one call of a block."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._nest = tree_flatten((args, kwargs))
        self.tensors = [one for one in self._leaves if isinstance(one, torch.Tensor)]
        self.has_changed_containers = False
        self.opaque = [one for one in self._leaves if not isinstance(one, (torch.Tensor, *_PLAIN))]

    def versions(self) -> list[int]:
        return [one._version for one in self.tensors]

    def run(self, forward: Forward) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        """Run a forward pass on inputs of its own; return those with a gradient, such outputs, and all outputs."""
        own = [_detach(one) if isinstance(one, torch.Tensor) else one for one in self._leaves]
        args, kwargs = tree_unflatten(own, self._nest)
        returned = forward(*args, **kwargs)
        leaves, nest = tree_flatten((args, kwargs))
        if nest != self._nest or any(one is not other for one, other in zip(leaves, own, strict=True)):
            self.has_changed_containers = True
        return _trained(own), _trained(tree_flatten(returned)[0]), returned


class _Saved:
    """Memory that the backward pass of a block needs.

    Attributes:
        byte_count: Bytes of storages, without parameters, buffers and inputs; each storage counts once.
        has_input: Whether an input is among them.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self.byte_count, self.has_input = 0, False
        held = [*model.parameters(), *model.buffers()]
        self._held = {storage._cdata for one in held for storage in storages_of(one)}
        self._inputs = {storage._cdata for one in inputs for storage in storages_of(one)}
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no other one gets the address

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        for storage in storages_of(tensor):
            if storage._cdata in self._inputs:
                self.has_input = True
            elif storage._cdata not in self._held and storage._cdata not in self._storages:
                self._storages[storage._cdata] = storage
                self.byte_count += storage.nbytes()
        return tensor.detach()

    def drop(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Let go of the storages; return whether one of the outputs was among them."""
        storages, self._storages = self._storages, {}
        return any(storage._cdata in storages for one in outputs for storage in storages_of(one))


def _trained(values: Iterable[Any]) -> list[torch.Tensor]:
    return [one for one in values if isinstance(one, torch.Tensor) and one.requires_grad]


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose graph begins here, but not a leaf: the step may write into it."""
    return _detach(tensor).clone() if tensor.requires_grad else tensor


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy in host memory, which is not measured; the other copies of ``fit`` are not either."""
    with _disable_current_modes():
        return None if gradient is None else gradient.to("cpu", copy=True)


def _direction(output: torch.Tensor) -> torch.Tensor:
    """Return a random gradient; one of ones would be nearly orthogonal to what a normalised output depends on."""
    generator = torch.Generator(output.device).manual_seed(0)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)


def _agree(one: torch.Tensor | None, other: torch.Tensor | None, summed: int) -> bool:
    """Return whether ``other`` is so many times ``one``, but for rounding."""
    if one is None or other is None:
        return one is other
    with _disable_current_modes():
        expected, bound = summed * one, max(_EXACT, _ROUNDING * torch.finfo(one.dtype).eps)
        return torch.equal(expected, other) or float((expected - other).norm()) <= bound * float(expected.norm())
