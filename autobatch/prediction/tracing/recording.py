"""Records what a step allocates and frees on the fake device."""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autobatch.errors import InvalidArgument
from autobatch.prediction.cudnn import Convolution
from autobatch.prediction.timeline import Block, Kind, Phase, Stream, TracedStep
from autobatch.prediction.tracing.failures import TooLong
from autobatch.prediction.tracing.fake_device import DEVICE, original_errors
from autobatch.prediction.tracing.kernels import find_buffers, find_calls, find_sum, uses_cublas
from autobatch.prediction.tracing.operators import Operators, check_devices, is_on_device, only_writes, tensors_in
from autobatch.torch_internals.dispatch_mode import DispatchMode
from autobatch.torch_internals.storages import is_dense

_aten = torch.ops.aten
_LIFTS_CONSTANT = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)  # their values stay known
_READS = _aten._local_scalar_dense.default
_LAST_FIRST = (_aten.native_dropout.default,)  # makes its mask before its result (native/cuda/Dropout.cu)
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_IS_SPARSE = (
    "the step makes a sparse tensor, as a gradient of nn.Embedding(sparse=True) is: its size depends on values, so its "
    "memory cannot be predicted; predict with sparse=False to be on the safe side, or run fit() on a GPU"
)


class FakeMode(FakeTensorMode):
    """Makes fake tensors; constants begin on the host, as the fake device has no kernels."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


def make_fake(tensor: torch.Tensor, device: str = DEVICE) -> torch.Tensor:
    """Make a tensor without memory, laid out as ``.to("cuda")`` does: dense; needs a ``FakeMode``."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else f"{tensor.layout}, {tensor.dtype}"
        raise InvalidArgument(f"a tensor that is not one block of numbers ({kind}) cannot be traced: dense ones can")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if not is_dense(tensor):
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)


class StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows which block belongs to its storage."""

    __slots__ = ("block",)

    block: int


class BlockLog:
    """The blocks that one step has made and freed so far."""

    def __init__(self, module: Callable[[], str]) -> None:
        self.phase: Phase = "before"
        self.sizes: list[int] = []  # bytes by block
        self.labels: list[tuple[Phase, Kind, str, Stream]] = []  # by block
        self.events: list[int | StorageReference] = []  # as TracedStep.order, with weak references of ended storages
        self._module = module
        self._stream: Stream = "compute"
        self._convolutions: dict[int, Convolution] = {}  # by the block of its workspace
        self._handles: set[bool] = set()  # whether in autograd's thread

    def make(self, size: int, kind: Kind) -> int:
        self.sizes.append(size)
        self.labels.append((self.phase, kind, self._module(), self._stream))
        self.events.append(len(self.sizes))
        return len(self.sizes)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def record_kernel(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        for call in find_calls(func, args, result) if is_on_device(args[0] if args else None) else ():
            self._borrow(*((copied, "temporary") for copied in call.copied_bytes), (0, "cuDNN workspace"))
            self._convolutions[len(self.sizes) - 1] = call.convolution
        counts = find_sum(func, args, result)
        if counts is not None and is_on_device(args[0]):
            self._borrow((counts[0], "addends"), (counts[1], "partial sums"))
        if uses_cublas(func) and is_on_device(result):
            self._take_handle()

    def record_buffers(self, sizes: Sequence[int], order: Sequence[int], record_results: Callable[[], None]) -> None:
        """Log an operator's buffers (``find_buffers``) around its results."""
        blocks: dict[int, int] = {}
        for entry in order:
            if entry == 0:
                record_results()
            elif entry < 0:
                self.events.append(-blocks[-entry])
            else:
                blocks[entry] = self.make(sizes[entry - 1], "temporary")

    def finish(self, samples: int) -> TracedStep:
        made = {
            (phase, kind, module, stream): Block(phase=phase, kind=kind, module=module, stream=stream)
            for phase, kind, module, stream in dict.fromkeys(self.labels)
        }
        return TracedStep(
            samples=samples,
            order=tuple(event if isinstance(event, int) else -(event.block + 1) for event in self.events),
            sizes=tuple(self.sizes),
            blocks=tuple(made[label] for label in self.labels),
            convolutions=self._convolutions,
        )

    def _borrow(self, *blocks: tuple[int, Kind]) -> None:
        entries = [self.make(byte_count, kind) for byte_count, kind in blocks]
        self.events += [-entry for entry in entries]

    def _take_handle(self) -> None:
        # Each thread has a handle of cuBLAS: the caller's, and autograd's for the backward pass.
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward not in self._handles:
            self._handles.add(is_backward)
            self.make(0, "cuBLAS workspace")


class Recorder(DispatchMode):
    """Records what is allocated and freed on the fake device.

    ``sole`` are the holders of a gradient that autograd adds to in place; ``None``: it never does.
    """

    def __init__(
        self, mode: FakeMode, module: Callable[[], str], sole: Holders | None = None, most_events: int = sys.maxsize
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = BlockLog(module)
        self._sole, self._most_events = sole, most_events
        self._operators = Operators(mode)
        self._live: dict[int, StorageReference] = {}
        self._adopted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._ignored: dict[int, torch.UntypedStorage] = {}
        self._ignores = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # a shortcut, as often as all others together
            return args[0].fake_device
        kwargs = kwargs or {}
        if func is _READS:
            return self._read(args[0])
        if func not in _LIFTS_CONSTANT:
            args, kwargs = self._adopt_all(func, args, kwargs)
        if func is _aten.add.Tensor and self.log.phase == "backward" and self._sole and holders_of(args) == self._sole:
            return args[0]
        if only_writes(func):
            first = args[0] if args else None
            if all(map(is_on_device, first if isinstance(first, (list, tuple)) else (first,))):
                if self.log.phase != "optimizer":
                    check_devices(func, args)
                return first if func._schema.returns else None
        result = self._operators.run(func, args, kwargs)
        sizes, order = find_buffers(func, args) if args and is_on_device(args[0]) else ([], [])
        if order:
            self.log.record_buffers(sizes, order, partial(self.record, result))
        else:
            self.record(result[::-1] if func in _LAST_FIRST else result)
        self.log.record_kernel(func, args, result)
        return result

    def record(self, result: Any, kind: Kind = "temporary") -> None:
        for tensor in tensors_in((result,)):
            if tensor.layout is not torch.strided:
                raise InvalidArgument(_IS_SPARSE)
            if is_on_device(tensor):
                self._record_storage(tensor.untyped_storage(), kind)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Never record what is made within this block: other blocks take its memory."""
        self._ignores = True
        try:
            yield
        finally:
            self._ignores = False

    def label(self, tensor: torch.Tensor, kind: Kind, module: str | None = None) -> None:
        if is_on_device(tensor):
            self.record(tensor, kind)
            block = self._live[tensor.untyped_storage()._cdata].block
            phase, _, before, stream = self.log.labels[block]
            self.log.labels[block] = (phase, kind, before if module is None else module, stream)

    def label_new(self, tensor: torch.Tensor, kind: Kind, first: int) -> None:
        reference = self._find(tensor.untyped_storage()) if is_on_device(tensor) else None
        if reference is not None and reference.block >= first:
            self.label(tensor, kind)

    @contextmanager
    def forward(self, phase: Phase = "forward") -> Iterator[None]:
        """A forward phase; its temporaries that are alive at the end are activations."""
        self.log.phase, first = phase, len(self.log.sizes)
        try:
            yield
        finally:
            self.log.phase = "backward"
        for reference in self._live.values():
            phase, kind, module, stream = self.log.labels[reference.block]
            if reference.block >= first and kind == "temporary" and reference() is not None:
                self.log.labels[reference.block] = (phase, "activation", module, stream)

    def _read(self, tensor: torch.Tensor) -> Any:
        """Read one value: of a real tensor its own; in an optimizer's step any, as no allocation depends on it."""
        known = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        if known is not None:
            with torch._C._DisableTorchDispatch():
                return _READS(known)
        if self.log.phase == "optimizer":  # Adafactor's and ASGD's norms and rates
            return 1.0 if tensor.is_floating_point() else 1
        return _READS(tensor)

    def _record_storage(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        if self._ignores:
            self._ignored[storage._cdata] = storage
        if storage._cdata in self._ignored:
            return
        size, known = storage.nbytes(), self._find(storage)
        if known is not None:
            if self.log.sizes[known.block] == size:
                return
            self.log.events.append(-(known.block + 1))  # resized: another block
        if len(self.log.events) >= self._most_events:
            raise TooLong(f"it makes and frees tensors more than {self._most_events} times, which takes too long")
        # A C function records the end of a storage: in a Python function an interrupt would be lost.
        reference = StorageReference(storage, self.log.events.append)
        reference.block = len(self.log.sizes)
        self._live[storage._cdata] = reference
        self.log.make(size, kind)

    def _find(self, storage: torch.UntypedStorage) -> StorageReference | None:
        known = self._live.get(storage._cdata)
        return known if known is not None and known() is not None else None

    def _adopt_all(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace real tensors, which the step closes over, by fake ones."""
        given = [*tensors_in((args, *kwargs.values()))]
        if all(isinstance(tensor, FakeTensor) for tensor in given):
            return args, kwargs
        beside_fake = func not in _COPIES and any(map(is_on_device, given))

        def adopt(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(adopt, value)) if type(value) in (list, tuple) else value
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                return self._adopt(value, DEVICE if beside_fake and value.dim() else "cpu")
            return value

        return adopt(args), {name: adopt(value) for name, value in kwargs.items()}

    def _adopt(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        if tensor.requires_grad:
            raise InvalidArgument(
                f"the step uses a parameter of shape {tuple(tensor.shape)} that belongs to no module of the model: "
                f"make it a parameter of the model"
            )
        known = self._adopted.get(id(tensor))
        if known is None or known[1].device.type != torch.device(device).type:
            fake = make_fake(tensor, device)
            known = self._adopted[id(tensor)] = (tensor, fake)
            self.record(fake, "buffer")
        return known[1]


# ------------------------------------------------------------------------------------------ sums of gradients in place

Holders = tuple[int, int, int]
"""Reference counts of a gradient: the tensor in C++, its storage, the tensor in Python; with ours among them."""


def holders_of(args: tuple[Any, ...]) -> Holders | None:
    """Count the holders of the first of two gradients that autograd adds; ``None`` for any other sum.

    The caller must be the ``__torch_dispatch__`` of a mode.
    """
    first, second = args[:2]
    if torch.is_grad_enabled() or not isinstance(second, torch.Tensor) or first.shape != second.shape:
        return None
    caller = sys._getframe(2)
    while caller.f_code.co_name == "_fn" and caller.f_back is not None:
        caller = caller.f_back
    if caller.f_code.co_name != "_engine_run_backward" or first.dtype != second.dtype or not is_dense(first):
        return None
    in_storage: int = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    in_tensor: int = first._use_count()
    return in_tensor, in_storage, sys.getrefcount(first)


@cache
def sole_holder() -> Holders | None:
    """Return what ``holders_of`` does if autograd alone holds the gradient; needs an active ``FakeMode``.

    The counts depend on the versions of torch and Python. So three sums are tried once in a process, two of them with
    another holder. ``None`` if these look the same: then every sum counts as a new tensor, never too little.
    """
    held: list[Any] = []

    def hold_in_python(hidden: torch.Tensor, _oldest: torch.Tensor) -> torch.Tensor:
        branch = hidden.cos()
        branch.grad_fn.register_hook(lambda given, _: held.append(given))  # type: ignore[union-attr]
        return branch

    try:
        alone, by_python = _try_sum(lambda hidden, _: hidden.cos()), _try_sum(hold_in_python)
        # The gradient of a sum is that of both of its terms, and the older term waits for it longer.
        by_autograd = _try_sum(lambda hidden, oldest: (hidden + oldest).cos())
    except (AttributeError, RuntimeError, TypeError):  # a torch that counts nowhere, or elsewhere
        return None
    return None if alone in (by_python, by_autograd) else alone


class _Observer(DispatchMode):
    """Notes the holders of each sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Holders | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.seen.append(holders_of(args))
        return func(*args, **(kwargs or {}))


def _try_sum(branch: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Holders | None:
    """The holders of a gradient that meets another one, and that ``branch`` may hold."""
    with torch.enable_grad():
        oldest, hidden = (torch.empty(4, 4, device=DEVICE, requires_grad=True).exp() for _ in range(2))
        later = hidden.sin()
        sooner = branch(hidden, oldest)  # what was made last is differentiated first
        total = torch.stack([later.sum(), sooner.sum()]).sum()
    observer = _Observer()
    with observer, original_errors():
        total.backward()
    (seen,) = observer.seen
    return seen
