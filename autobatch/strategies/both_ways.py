"""Runs one block plainly and recomputed, and judges whether both ways are the same training."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from autobatch.memory.device import Device
from autobatch.strategies.checkpointing import Forward, recomputing
from autobatch.torch_internals.storages import bytes_of, storages_of
from autobatch.undo.module_state import ModuleState
from autobatch.undo.random_state import RandomState

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_EXACT = 1e-12  # of the norm of a gradient
_ROUNDING = 16  # in units of the dtype's rounding, for operators that add up in another order each time


@dataclass(frozen=True)
class BothWays:
    """One call of a block that ran plainly and recomputed. Fields that a ``BlockRun`` has too mean the same there.

    Attributes:
        returned: Outputs of the recomputed run.
        reason: Why the two ways differ; empty if they do not.
        has_gradient: Whether an output has one; without, the block ran once, plainly.
        saves_input: Whether its backward pass needs its inputs.
        saves_output: Whether it needs its outputs.
    """

    returned: Any
    reason: str = ""
    has_gradient: bool = False
    saves_input: bool = False
    saves_output: bool = False
    saved_bytes: int = 0
    again_bytes: int = 0
    flops: int = 0
    seconds: float = 0.0


def run_both_ways(model: nn.Module, device: Device, block: nn.Module, forward: Forward, call: Call) -> BothWays:
    """Run a block's forward and backward pass plainly, and again recomputed, from the same inputs and generators."""
    parameters = [one for one in block.parameters() if one.requires_grad]
    for one in parameters:  # gradients are there already, as in training: adding to them takes time and memory
        one.grad = torch.zeros_like(one)
    begun, versions = RandomState(device.torch_device), call.versions()
    saved = _Saved(model, call.tensors)
    with (
        torch.autograd.graph.saved_tensors_hooks(saved.pack, torch.Tensor.detach),
        FlopCounterMode(display=False) as counter,
    ):
        inputs, outputs, returned = call.run(forward)
    if not outputs:
        return BothWays(returned)
    saves_output = saved.drop(outputs)
    directions = [*map(_direction, outputs)]
    del inputs, outputs, returned
    begun.restore()
    plain_seconds, inputs, *_ = _run_timed(device, call, forward, directions)
    plain = [_copy(one.grad) for one in (*inputs, *parameters)]
    del inputs
    state, ended = ModuleState([model]), RandomState(device.torch_device)
    begun.restore()
    device.synchronize()
    device.reset_peak()
    before = device.usage().allocated
    seconds, inputs, outputs, returned = _run_timed(device, call, recomputing(forward), directions)
    peak = device.usage().peak_allocated
    again = [_copy(one.grad) for one in (*inputs, *parameters)]
    summed = [1] * len(inputs) + [2] * len(parameters)  # those of parameters are of both runs
    ended.restore()
    reason = ""
    if pickle.dumps((begun.python, begun.numpy)) != pickle.dumps((ended.python, ended.numpy)):
        reason = "it draws from Python's or NumPy's generator, which no recomputation restores"
    elif not all(map(_agree, plain, again, summed)):
        reason = "its recomputed gradient differs: it draws from a generator of its own, or reads what its runs change"
    elif state.find_written() or state.find_changed():
        reason = "its forward pass changes what the model holds, and would do so twice"
    elif versions != call.versions():
        reason = "it writes into its input"
    return BothWays(
        returned=returned,
        reason=reason,
        has_gradient=True,
        saves_input=saved.has_input,
        saves_output=saves_output,
        saved_bytes=saved.byte_count,
        again_bytes=max(peak - before - (0 if saves_output else sum(map(bytes_of, outputs))), 0),
        flops=counter.get_total_flops(),
        seconds=max(seconds - plain_seconds, 0.0),
    )


def _run_timed(
    device: Device, call: Call, forward: Forward, directions: Sequence[torch.Tensor]
) -> tuple[float, list[torch.Tensor], list[torch.Tensor], Any]:
    """Run both passes; return their time, and what ``Call.run`` returns."""
    device.synchronize()
    started = time.perf_counter()
    inputs, outputs, returned = call.run(forward)
    torch.autograd.backward(outputs, directions)
    device.synchronize()
    return time.perf_counter() - started, inputs, outputs, returned


class Call:
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
