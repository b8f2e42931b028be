"""Simulates a device and out-of-memory errors for users' own tests.

``FakeDevice`` is for plans and retries without a GPU, ``oom_at`` for an out-of-memory error at a chosen operation,
``tenant`` for another user of the memory.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from autobatch.torch_internals import import_torch

import_torch()  # this module is often imported before torch is

import torch

from autobatch._arguments import check_count, check_switch, parse_bytes
from autobatch._bounds import LARGEST
from autobatch._formatting import format_bytes, plural, show_value
from autobatch.errors import InvalidArgument
from autobatch.memory.device import Device
from autobatch.memory.devices import open_device
from autobatch.records import DeviceInfo, MemoryUsage, Tenant
from autobatch.torch_internals.dispatch_mode import DispatchMode, call_operator

__all__ = ["FakeDevice", "oom_at", "tenant"]


class FakeDevice(Device):
    """A simulated device: a micro-batch of ``n`` samples peaks at ``curve(n)`` bytes. Tensors really live on the CPU.

    Pass it as ``device=`` to ``fit`` and to ``Runner``.

    Example:
        >>> gpu = FakeDevice(lambda n: 1000 + 50 * n, total_bytes=4000)
        >>> plan = autobatch.fit(model, 256, batch=batch, device=gpu, headroom=0)  # doctest: +SKIP
        >>> plan.micro_batch_size  # doctest: +SKIP
        52
    """

    def __init__(
        self,
        curve: Callable[[int], int],
        total_bytes: int | str,
        *,
        measures: bool = True,
        thrashes_from: int | None = None,
        tenants: Iterable[Tenant] = (),
    ) -> None:
        """Make a device.

        Args:
            curve: Peak bytes of a micro-batch by its samples; ``curve(0)`` is the resident memory.
            total_bytes: An int or a text such as ``"24GiB"``. Beyond it, or beyond a budget, the micro-batch raises
                ``torch.OutOfMemoryError``.
            measures: ``False``: a device that reports nothing; then only an error shows that memory ran out.
            thrashes_from: From this size on each micro-batch counts one allocator retry.
            tenants: Other processes, whose memory is not available.

        Raises:
            InvalidArgument: The curve cannot be called, or another argument cannot be used.
        """
        if not callable(curve):
            raise InvalidArgument(f"curve={show_value(curve)} must be a function from samples to peak bytes")
        check_switch("measures", measures)
        self.torch_device = torch.device("cpu")
        self.measures = measures
        self.curve = curve
        self.total_bytes = parse_bytes("total_bytes", total_bytes)
        self.thrashes_from = None if thrashes_from is None else check_count("thrashes_from", thrashes_from)
        self.tenants = tuple(tenants) if isinstance(tenants, Iterable) else (tenants,)
        for one in self.tenants:
            if not isinstance(one, Tenant):
                raise InvalidArgument(f"tenants has {show_value(one)}: pass a list of autobatch.records.Tenant")
        self.ran_sizes: list[int] = []
        self._budget = self.total_bytes
        self._peak = 0
        self._retries = 0

    def describe(self) -> DeviceInfo:
        """Describe a device of the kind ``"fake"``."""
        return DeviceInfo(kind="fake", name="fake device", total_bytes=self.total_bytes, tenants=self.tenants)

    def available_bytes(self) -> int:
        """Return the total without the tenants' memory; 0 (unknown) if the device does not measure."""
        return self.total_bytes - sum(tenant.used_bytes for tenant in self.tenants) if self.measures else 0

    @contextmanager
    def limit(self, budget_bytes: int) -> Iterator[None]:
        """Enforce the budget, or the available memory if that is less."""
        outer, self._budget = self._budget, budget_bytes if self.measures else self.total_bytes
        try:
            yield
        finally:
            self._budget = outer

    @contextmanager
    def micro_batch(self, samples: int) -> Iterator[None]:
        """Take the memory of so many samples, or run out."""
        need = self._evaluate(samples)
        free = min(self._budget, self.total_bytes - sum(tenant.used_bytes for tenant in self.tenants))
        self.ran_sizes.append(samples)
        if need > free:
            raise torch.OutOfMemoryError(
                f"fake device out of memory. Tried to hold {format_bytes(need)} for {plural(samples, 'sample')} in "
                f"{format_bytes(free)}"
            )
        self._peak = max(self._peak, need)
        self._retries += self.thrashes_from is not None and samples >= self.thrashes_from
        yield

    def reset_peak(self) -> None:
        """Let the peak begin at the resident memory."""
        self._peak = self.usage().allocated

    def usage(self) -> MemoryUsage:
        """Return the memory in use; zeros if the device does not measure."""
        if not self.measures:
            return MemoryUsage()
        resident = self._evaluate(0)
        peak = max(self._peak, resident)
        return MemoryUsage(
            allocated=resident, reserved=resident, peak_allocated=peak, peak_reserved=peak, alloc_retries=self._retries
        )

    def _evaluate(self, samples: int) -> int:
        """Return the bytes of a micro-batch by the present curve."""
        found = self.curve(samples)
        if isinstance(found, bool) or not isinstance(found, numbers.Real) or not 0 <= found < math.inf:
            raise InvalidArgument(
                f"curve({samples}) of the FakeDevice gave {show_value(found)}: it must give bytes, a finite number of "
                f"at least 0"
            )
        return min(int(found), LARGEST)

    def reclaim(self) -> None:
        """Do nothing, as nothing is cached."""


class _OutOfMemoryAt(DispatchMode):
    """Counts operations and raises at the chosen ones."""

    def __init__(self, positions: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.positions = frozenset(positions)
        self.operations = 0
        self.raised: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or raise before it."""
        # Views, copies into existing memory and marks of the profiler cannot run out.
        aliases = [value.alias_info for value in func._schema.returns]  # noqa: SLF001 - nothing public has it
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not (is_view or func is torch.ops.aten.copy_.default or func.namespace == "profiler"):
            self.operations += 1
            if self.operations in self.positions:
                self.raised.append(str(func))
                message = f"planned out of memory. Tried to allocate at operation {self.operations} ({func})"
                raise torch.OutOfMemoryError(message)
        return call_operator(func, args, kwargs)


@contextmanager
def oom_at(*positions: int) -> Iterator[_OutOfMemoryAt]:
    """Raise ``torch.OutOfMemoryError`` at the n-th operation inside the block, in forward, backward or update.

    Args:
        positions: Numbers of operations inside the block, from 1; each makes one error. Views, in-place copies and the
            profiler's marks allocate nothing and are not counted.

    Yields:
        An object with ``operations`` (their number) and ``raised`` (the operators that failed).

    Raises:
        InvalidArgument: A position is not an int of at least 1.
    """
    wrong = [p for p in positions if isinstance(p, bool) or not isinstance(p, numbers.Integral) or p < 1]
    if wrong or not positions:
        shown = ", ".join(map(show_value, wrong[:3]))
        raise InvalidArgument(f"oom_at({shown}): positions are ints, counted from 1")
    with _OutOfMemoryAt(positions) as planned:
        yield planned


@contextmanager
def tenant(byte_count: int | str, device: Device | torch.device | str = "cpu") -> Iterator[None]:
    """Hold so many bytes of a device inside the block, as another model, an evaluation or another process would.

    Args:
        byte_count: An int or a text such as ``"32MiB"``. The bytes are allocated, so they count against every budget.
        device: Device to hold them on. A ``FakeDevice`` allocates nothing, and gets another tenant.

    Raises:
        InvalidArgument: The size or the device cannot be used.
    """
    memory = open_device(device)
    size = parse_bytes("byte_count", byte_count)
    if isinstance(memory, FakeDevice):
        others, memory.tenants = memory.tenants, (*memory.tenants, Tenant(pid=0, used_bytes=size, name="tenant"))
        try:
            yield
        finally:
            memory.tenants = others
        return
    held = torch.empty(size, dtype=torch.uint8, device=memory.torch_device)
    memory.watch([held])
    try:
        yield
    finally:
        del held
        memory.reclaim()
