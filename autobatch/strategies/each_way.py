"""Runs one block plainly and in each other way, and judges whether these are the same training.

A recomputed run has to have the gradients of the plain one, and to leave what that has left. A run with offload repeats
nothing: it is judged by itself, and has to get back from the host, bit for bit, what it has saved.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from autobatch.errors import AutobatchError
from autobatch.memory.device import Device, end_failed_backward
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Way
from autobatch.strategies.checkpointing import Forward, recomputing
from autobatch.strategies.choice import WayRun
from autobatch.strategies.offloading import Copy, HostCopies, HostRoom, bytes_in, offloading
from autobatch.torch_internals.storages import bytes_of, storages_of
from autobatch.undo.module_state import ModuleState
from autobatch.undo.random_state import RandomState

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_WAYS: Sequence[Way] = ("offload", "selective", "checkpoint")
"""In the order of their runs. The last one always runs: it says what a block takes again."""

_EXACT = 1e-12  # of the norm of a gradient
_ROUNDING = 16  # in units of the dtype's rounding, for operators that add up in another order each time


@dataclass(frozen=True)
class EachWay:
    """One call of a block that ran in each way. Fields that a ``BlockRun`` has too mean the same there.

    Attributes:
        returned: Outputs of the last run.
        reason: Why the block can run in none of the allowed ways; empty if it can.
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
    again_seconds: float = 0.0
    flops: int = 0
    ways: dict[Way, WayRun] = field(default_factory=dict)


def run_each_way(
    model: nn.Module, device: Device, block: nn.Module, forward: Forward, call: Call, *, allowed: Collection[Way]
) -> EachWay:
    """Run a block's forward and backward pass in each way, from the same inputs and generators."""
    runs, saved = _Runs(device, block, call), _Saved(model, call.tensors)
    with (
        torch.autograd.graph.saved_tensors_hooks(saved.pack, torch.Tensor.detach),
        FlopCounterMode(display=False) as counter,
    ):
        inputs, outputs, returned = call.run(forward)
    if not outputs:
        return EachWay(returned)
    saves_output, output_bytes = saved.drop(outputs), sum(map(bytes_of, outputs))
    runs.directions = [*map(_direction, outputs)]
    del inputs, outputs, returned
    plain = runs.run(forward)
    runs.begin(model, plain)
    found, reasons = dict[Way, _Ran](), dict[Way, str]()
    for way in _WAYS:
        if way in allowed or way == "checkpoint":
            ran = runs.try_way(way, forward)
            if isinstance(ran, str):
                reasons[way] = ran
            else:
                found[way] = ran
    if "checkpoint" in reasons:
        found.pop("selective", None)  # it is the same recomputation, of less
    if runs.returned is None:  # the last run has failed
        runs.run(forward)
    whole, freed_bytes = found.get("checkpoint"), 0 if saves_output else output_bytes
    outputs_held = output_bytes if whole is None else whole.held_bytes
    return EachWay(
        returned=runs.returned,
        reason="" if found.keys() & {*allowed} else next(reasons[way] for way in allowed if way in reasons),
        has_gradient=True,
        saves_input=saved.has_input,
        saves_output=saves_output,
        saved_bytes=saved.byte_count,
        again_bytes=max((whole or plain).peak_bytes - freed_bytes, 0),
        again_seconds=plain.forward_seconds if whole is None else runs.longer(whole),
        flops=counter.get_total_flops(),
        ways={
            way: WayRun(
                kept_bytes=max(ran.held_bytes - outputs_held, 0),
                again_bytes=max(ran.peak_bytes - freed_bytes, 0),
                seconds=runs.longer(ran),
            )
            for way, ran in found.items()
        },
    )


@dataclass(frozen=True)
class _Ran:
    """A run of both passes: its gradients, bytes after its forward pass and at most, and its time."""

    gradients: list[torch.Tensor | None]
    held_bytes: int
    peak_bytes: int
    seconds: float
    forward_seconds: float


class _Runs:
    """Runs one call several times from the same generators, and compares each run with the plain one.

    Attributes:
        directions: Gradients of the outputs.
        returned: Outputs of the last run; ``None`` if it failed.
    """

    def __init__(self, device: Device, block: nn.Module, call: Call) -> None:
        self._device, self._block, self._call, self._versions = device, block, call, call.versions()
        self._parameters = [one for one in block.parameters() if one.requires_grad]
        for one in self._parameters:  # gradients are there already, as in training: adding takes time and memory
            one.grad = torch.zeros_like(one)
        self._begun = self._ended = RandomState(device.torch_device)
        self.directions: list[torch.Tensor] = []
        self.returned: Any = None

    def begin(self, model: nn.Module, plain: _Ran) -> None:
        """Take what the plain run has left as that which others must leave."""
        self._gradients, self._seconds = plain.gradients, plain.seconds
        self._state, self._ended = ModuleState([model]), RandomState(self._device.torch_device)

    def run(self, forward: Forward) -> _Ran:
        self.returned = None
        self._begun.restore()
        for one in self._parameters:
            if one.grad is not None:
                one.grad.zero_()
        self._device.synchronize()
        self._device.reset_peak()
        before, started = self._device.usage().allocated, time.perf_counter()
        inputs, outputs, returned = self._call.run(forward)
        held = self._device.usage().allocated
        self._device.synchronize()
        forward_seconds = time.perf_counter() - started
        torch.autograd.backward(outputs, self.directions)
        self._device.synchronize()
        seconds, peak = time.perf_counter() - started, self._device.usage().peak_allocated
        gradients = [_copy(one.grad) for one in (*inputs, *self._parameters)]
        self.returned = returned
        return _Ran(gradients, held - before, peak - before, seconds, forward_seconds)

    def try_way(self, way: Way, forward: Forward) -> _Ran | str:
        """Run in a way; return why that fails or is not the same training, if so."""
        try:
            if way != "offload":
                ran = self.run(recomputing(forward, way))
                return self.compare(ran) or ran
            self.run(offloading(self._block, forward, HostRoom.read(), _ComparedCopies))
            return self.run(offloading(self._block, forward, HostRoom.read()))
        except Exception as error:
            if isinstance(error, AutobatchError) or is_oom(error):
                raise
            reason = describe_error(error)
        end_failed_backward()  # it holds what the failed run saved, and the next run is measured
        return reason

    def longer(self, ran: _Ran) -> float:
        """Return the time that a run took beyond the plain one."""
        return max(ran.seconds - self._seconds, 0.0)

    def compare(self, ran: _Ran) -> str:
        """Return why the last run is not the same training as the plain one, if so."""
        self._ended.restore()
        began, ended = ((one.python, one.numpy) for one in (self._begun, self._ended))
        if pickle.dumps(began) != pickle.dumps(ended):
            return "it draws from Python's or NumPy's generator, which no recomputation restores"
        if not all(map(_agree, self._gradients, ran.gradients)):
            return (
                "its recomputed gradient differs: it draws from a generator of its own, or reads what its runs change"
            )
        if self._state.find_written() or self._state.find_changed():
            return "its forward pass changes what the model holds, and would do so twice"
        return "it writes into its input" if self._versions != self._call.versions() else ""


class _ComparedCopies(HostCopies):
    """Copies in host memory, each compared with what it is a copy of when that is needed; no device has both."""

    def pack(self, tensor: torch.Tensor) -> Any:
        return tensor.detach(), super().pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        saved, (copy, *_) = packed
        if isinstance(copy, Copy) and not torch.equal(copy.host, bytes_in(saved.untyped_storage()).cpu()):
            raise RuntimeError("what it saves is written into before its backward pass, unknown to torch")
        return saved  # type: ignore[no-any-return]


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


def _agree(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two gradients are equal, but for rounding."""
    if one is None or other is None:
        return one is other
    with _disable_current_modes():
        bound = max(_EXACT, _ROUNDING * torch.finfo(one.dtype).eps)
        return torch.equal(one, other) or float((one - other).norm()) <= bound * float(one.norm())
