"""Reads how ranks share a predicted step, and allocates what each of them holds beside a process without others.

Nothing is sent, and what NCCL takes outside the allocator is not counted. The order is that of torch 2.13.
"""

# ruff: noqa: SLF001 - torch has no public name for what is called when a backward pass ends

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from autobatch._arguments import check_choice
from autobatch._bounds import LONGEST_LIST
from autobatch._formatting import show_value
from autobatch.distributed.data_parallel import SharedBuffers, module_of
from autobatch.distributed.reduction import Bucket, GradientSlot, Reduction, make_loss
from autobatch.errors import InvalidArgument
from autobatch.prediction.prediction import Strategy
from autobatch.prediction.tracing.fake_device import DEVICE
from autobatch.prediction.tracing.recording import Recorder
from autobatch.undo.gradients import Float32Sums

STRATEGIES = ("ddp", "fsdp2")
_DEFAULT: Strategy = "ddp"


class Parallelism(NamedTuple):
    """Data parallelism: each rank runs samples of its own."""

    strategy: Strategy
    world_size: int


def read_parallelism(
    model: nn.Module, world_size: Any | None, data_parallel: Any | None
) -> tuple[nn.Module, Parallelism | None]:
    """Read the arguments of ``predict``: the model of one rank, and how ranks share it (``None``: one process)."""
    inner = module_of(model)
    if data_parallel is not None:
        check_choice("data_parallel", data_parallel, STRATEGIES)
    if world_size is None and isinstance(model, DistributedDataParallel):
        return inner, Parallelism(data_parallel or _DEFAULT, dist.get_world_size(model.process_group))
    given: Any = 1 if world_size is None else world_size
    is_count = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    if not is_count or not 1 <= (ranks := int(given)) <= LONGEST_LIST:
        raise InvalidArgument(
            f"world_size={show_value(given)} must be an int from 1 to {LONGEST_LIST}: it counts ranks"
        )
    if ranks == 1 and data_parallel is not None:
        raise InvalidArgument(
            f"data_parallel={data_parallel!r} is of several ranks: pass world_size=2 or more, or leave it out"
        )
    for name, parameter in inner.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise InvalidArgument(
                f"the parameter {name} is sharded (DTensor): predict with the model as it is before fully_shard(), and "
                f"with world_size= and data_parallel='fsdp2'"
            )
    return inner, Parallelism(data_parallel or _DEFAULT, ranks) if ranks > 1 else None


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(model: nn.Module) -> list[nn.Module]:
    """Find the modules that one would call ``fully_shard`` with, before the model.

    They are children of a container (``ModuleList``, ``ModuleDict``, ``Sequential``) that are of one class and have
    modules themselves: a single layer is not a unit. Units do not nest.
    """
    children = [*model.children()]
    blocks = [child for child in children if [*child.children()]] if isinstance(model, _CONTAINERS) else []
    kinds = [type(block) for block in blocks]
    units = [block for block in blocks if kinds.count(type(block)) > 1 and next(block.parameters(), None) is not None]
    others = [child for child in children if not any(child is unit for unit in units)]
    return units + [unit for child in others for unit in find_units(child)]


_BROADCAST_BYTES = 250 * 2**20  # DistributedDataParallel.broadcast_bucket_size
_IN_FLIGHT = 3  # a third broadcast begins before the first has ended (torch/csrc/distributed/c10d/comm.cpp)


class OneRank:
    """The only rank, which holds the whole model and sums over no others."""

    def part_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter

    def reduce(self, parameters: Sequence[torch.Tensor], sums: Float32Sums) -> None:
        """Make each ``.grad`` what the optimizer steps with, after the last micro-batch."""
        sums.write()

    def share_buffers(self) -> None:
        """Take rank 0's buffers, before the optimizer steps."""


class _UnsentReduction(Reduction):
    def start(self, bucket: Bucket) -> None: ...

    def wait(self, work: object) -> None: ...


class Replicated(OneRank):
    """A rank of ``DistributedDataParallel``, with a model on the fake device.

    Its reducer has one bucket for each dtype, as large as all its gradients. A forward pass of the wrapper would build
    smaller ones, but the Runner never calls it.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder
        self._reduction = _UnsentReduction(None, None)  # type: ignore[arg-type] # the channel says who is gone
        _broadcast([*model.parameters(), *model.buffers()])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = [
            torch.empty(sum(parameter.numel() for parameter in alike), dtype=alike[0].dtype, device=DEVICE)
            for alike in _group_by_dtype(trained)
        ]
        self._label(self._buckets)

    def reduce(self, parameters: Sequence[torch.Tensor], sums: Float32Sums) -> None:
        """Sum gradients through buckets, as the Runner does."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        loss = make_loss(parameters)
        self._label(self._reduction.reserve([*trained, loss]))
        slots = [GradientSlot(parameter, sums.by_parameter) for parameter in trained]
        there = [slot for slot in slots if slot.has_any()]
        self._reduction.sum([*there, GradientSlot(loss, {})])

    def share_buffers(self) -> None:
        SharedBuffers([*self._model.buffers()])

    def _label(self, buckets: Iterable[torch.Tensor]) -> None:
        for bucket in buckets:
            self._recorder.label(bucket, "bucket", "")


def _group_by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return [*groups.values()]


def _broadcast(tensors: Sequence[torch.Tensor]) -> None:
    held: list[torch.Tensor] = []
    for alike in _group_by_dtype(tensors):
        count = 0
        for tensor in alike:
            count += tensor.numel()
            if count * tensor.element_size() >= _BROADCAST_BYTES or tensor is alike[-1]:
                held.append(torch.empty(count, dtype=tensor.dtype, device=DEVICE))
                del held[: 1 - _IN_FLIGHT]
                count = 0


_Pair = tuple[torch.Tensor, torch.Tensor]  # a whole parameter, and this rank's shard


@dataclass(eq=False)
class _Unit:
    """Parameters that are gathered together, and what of them is allocated now."""

    module: nn.Module
    name: str
    pairs: Sequence[_Pair]
    reshards: bool  # after the forward pass
    gathered: list[torch.Tensor] = field(default_factory=list)  # an all-gather's buffer
    whole: list[torch.Tensor] = field(default_factory=list)
    phase: str = ""  # "forward", "backward" or "reduced"
    forwards: list[int] = field(default_factory=list)  # numbers of the passes whose backward passes are to come


class FullySharded(OneRank):
    """Rank 0 of a sharded model, whose shards are the largest.

    It allocates as ``torch/distributed/fsdp/_fully_shard`` around the forward and backward passes. The backward pass
    gathers one unit ahead, and each micro-batch ends in a reduce-scatter. Whole parameters are unrecorded fake tensors,
    and blocks beside them take their memory.
    """

    def __init__(
        self, model: nn.Module, recorder: Recorder, shards: Mapping[torch.Tensor, torch.Tensor], world_size: int
    ) -> None:
        self._recorder, self._shards, self._world_size = recorder, shards, world_size
        self._root, *others = _divide(model, shards)
        self._units = [self._root, *others]
        self._forwards: list[_Unit] = []  # in order, of this micro-batch
        self._copied: list[torch.Tensor] = []  # an all-gather's buffer, until the next one has begun
        self._reducing: list[torch.Tensor] = []  # a reduce-scatter's input, until the next one begins
        self._ends_backward = False
        for unit in self._units:
            unit.module.register_forward_pre_hook(partial(self._enter_forward, unit), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(partial(self._leave_forward, unit))

    def part_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._shards.get(parameter, parameter)

    def _enter_forward(self, unit: _Unit, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit.phase == "backward":  # a checkpoint runs it again
            self._gather(unit)
            self._copy_out(unit)
        if unit.phase == "backward" or not unit.pairs:
            return args, kwargs
        unit.phase = "forward"
        self._gather(unit)
        if unit.gathered:
            self._copied = []  # its copies may overlap with the all-gather that has just begun
            self._copied = self._copy_out(unit)
        return _after_backward(lambda: self._reduce(unit), (args, kwargs))

    def _leave_forward(self, unit: _Unit, _: nn.Module, _args: Any, output: Any) -> None:
        if unit is self._root:
            self._copied = []
        if unit.phase == "backward" or not unit.pairs:
            return
        if unit.reshards:
            unit.whole = []
        unit.forwards.append(len(self._forwards))
        self._forwards.append(unit)
        unit.phase = ""
        for tensor in _differentiable(tree_flatten(output)[0]):
            tensor.register_hook(lambda _: self._begin_backward(unit))

    def _begin_backward(self, unit: _Unit) -> None:
        if not self._ends_backward:
            self._ends_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if unit.phase == "backward":
            return
        unit.phase = "backward"
        self._gather(unit)
        self._copy_out(unit)
        number = unit.forwards.pop() if unit.forwards else 0
        if number:
            self._gather(self._forwards[number - 1])

    def _end_backward(self) -> None:
        for unit in self._units:
            if unit.phase != "reduced":
                self._reduce(unit)
            unit.phase, unit.gathered, unit.forwards = "", [], []
        self._forwards, self._reducing, self._ends_backward = [], [], False

    def _gather(self, unit: _Unit) -> None:
        """Begin an all-gather, unless its buffer or its result exists."""
        if not unit.whole and not unit.gathered:
            byte_count = self._world_size * sum(shard.nbytes for _, shard in unit.pairs)
            with self._recorder.log.on_stream("all-gather"):
                unit.gathered = [self._allocate(byte_count, torch.uint8, "all-gather", unit)]

    def _copy_out(self, unit: _Unit) -> list[torch.Tensor]:
        """Make whole parameters from an all-gather's buffer, and return the buffer."""
        buffer, unit.gathered = unit.gathered, []
        if buffer:
            unit.whole = [
                self._allocate(self._world_size * shard.numel(), shard.dtype, "gathered parameter", unit)
                for _, shard in unit.pairs
            ]
        return buffer

    def _reduce(self, unit: _Unit) -> None:
        unit.phase = "reduced"
        found = [(whole, shard) for whole, shard in unit.pairs if whole.grad is not None]
        gradients = []
        for whole, _ in found:
            assert whole.grad is not None  # noqa: S101 - narrows for mypy
            self._recorder.label(whole.grad, "unsharded gradient", unit.name)
            gradients.append(whole.grad)
            whole.grad = None
        unit.whole = []
        self._reducing = []
        if not found:
            return
        dtype = gradients[0].dtype
        count = sum(shard.numel() for _, shard in found)
        self._reducing = [self._allocate(self._world_size * count, dtype, "reduce-scatter", unit)]
        gradients.clear()
        with torch.no_grad(), self._recorder.log.on_stream("reduce-scatter"):
            reduced = self._allocate(count, dtype, "temporary", unit)
            parts = reduced.split([shard.numel() for _, shard in found])
            del reduced
            for (_, shard), part in zip(found, parts, strict=True):
                gradient = part.view(shard.shape)
                if shard.grad is None:
                    shard.grad = gradient
                else:
                    shard.grad.add_(gradient)
                for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
                    hook(shard)

    def _allocate(self, count: int, dtype: torch.dtype, kind: Any, unit: _Unit) -> torch.Tensor:
        made = torch.empty(count, dtype=dtype, device=DEVICE)
        self._recorder.label(made, kind, unit.name)
        return made


def _divide(model: nn.Module, shards: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[_Unit]:
    names = {id(module): name for name, module in model.named_modules()}
    taken: set[int] = set()
    others = []
    for module in find_units(model):
        own = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        taken.update(map(id, own))
        others.append(_Unit(module, names[id(module)], [(p, shards[p]) for p in own], reshards=True))
    rest = [(parameter, shards[parameter]) for parameter in model.parameters() if id(parameter) not in taken]
    yield _Unit(model, "", rest, reshards=False)
    yield from others


def _differentiable(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


class _AfterBackward(torch.autograd.Function):
    """Passes tensors on, and calls a function when all their gradients have come."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.function = function
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.function()
        return (None, *gradients)


def _after_backward(function: Callable[[], None], inputs: Any) -> Any:
    """Return the inputs; the backward pass calls the function when it has come back to them."""
    leaves, spec = tree_flatten(inputs)
    tensors = _differentiable(leaves)
    if not tensors or not torch.is_grad_enabled():
        return inputs
    passed = iter(_AfterBackward.apply(function, *tensors))  # type: ignore[no-untyped-call]
    return tree_unflatten(
        [next(passed) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf for leaf in leaves], spec
    )
