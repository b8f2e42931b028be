"""What one stage hands to the next, as frozen records.

Covers the plain data of devices, trials, curves and plans. Does not cover how a record is computed (``planning``,
``probe``), shown (``report``) or what a user can do with a plan (``plan``). Nothing here imports torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from autobatch.wording import plural

__all__ = ["DeviceInfo", "MemoryUsage", "ModuleError", "Outcome", "Record", "Tenant", "Trial", "Verdict"]

Outcome = Literal["fits", "oom", "thrash"]

_MODULES_SHOWN = 3


class Record(BaseModel):
    """A frozen value: compared by content, refused when it holds a field that nobody declared."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Tenant(Record):
    """Another process that holds memory of the same device.

    Attributes:
        pid: The process, as the driver numbers it.
        used_bytes: What it holds, in bytes.
        name: Its command, where the driver tells.
    """

    pid: int
    used_bytes: int
    name: str = ""


class DeviceInfo(Record):
    """What a device is, at the moment it was asked.

    Attributes:
        kind: The torch device type: ``"cuda"``, ``"cpu"``, ``"mps"``...
        name: What a person calls it: ``"NVIDIA L4"``, ``"CPU"``.
        total_bytes: All memory of the device (a container's limit counts as all), 0 where it cannot be told.
        uuid: The driver's identifier of the card or of its MIG slice, where there is one.
        tenants: Other processes on it.
        driver: The version of the driver, where there is one that tells it.
    """

    kind: str
    name: str
    total_bytes: int
    uuid: str | None = None
    tenants: tuple[Tenant, ...] = ()
    driver: str = ""


class MemoryUsage(Record):
    """One reading of a device's allocator, in bytes; peaks are since the last reset."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    alloc_retries: int = 0


class Trial(Record):
    """One measured attempt at one micro-batch size: two micro-batches accumulated, then the optimizer's step.

    The two peaks cover the whole attempt. An attempt that ran out of memory holds what was reached before it ended.

    Attributes:
        micro_batch_size: Samples in each of the two micro-batches.
        outcome: ``"fits"``; ``"oom"``; or ``"thrash"``: it ran, but the allocator had to give memory back and ask
            again.
        peak_allocated: Most bytes in tensors at once.
        peak_reserved: Most bytes held by the allocator at once: what meets the limit.
        optimizer_peak: Most bytes in tensors at once during ``optimizer.step()``; 0 without an optimizer.
        alloc_retries: How often the allocator had to free its cache to go on.
        seconds: Wall time of the two micro-batches and the step.
        backward_allocated: ``peak_allocated`` of the forward and backward passes alone, which is what grows with the
            size.
        backward_reserved: ``peak_reserved`` up to the end of the backward passes.
        resident_bytes: Bytes in tensors before the first micro-batch: parameters, buffers, optimizer state, batch.
    """

    micro_batch_size: int
    outcome: Outcome
    peak_allocated: int = 0
    peak_reserved: int = 0
    optimizer_peak: int = 0
    alloc_retries: int = 0
    seconds: float = 0.0
    backward_allocated: int | None = None
    backward_reserved: int | None = None
    resident_bytes: int = 0

    @property
    def samples_per_second(self) -> float:
        """Samples of both micro-batches over the attempt's wall time; 0 where no time was taken."""
        return 2 * self.micro_batch_size / self.seconds if self.seconds > 0 else 0.0


class ModuleError(Record):
    """How far one module's gradient is off in a split.

    Attributes:
        module: Its path in the model; the model's type where parameters are the model's own.
        relative_error: ``|split - whole| / |whole|`` of its parameter that is worst; 1 where the whole has no gradient.
    """

    module: str
    relative_error: float


class Verdict(Record):
    """Whether splitting a step gives the gradient of the whole batch, and why not.

    Attributes:
        exact: Whether every division tried gave it, to 1e-4 in each parameter by itself. False also where nothing could
            be checked.
        relative_error: ``|split - whole| / |whole|`` of the worst parameter in the worst division.
        causes: What makes it inexact, each with what to do.
        samples: How many samples were compared.
        partitions: The sizes of the parts of each division that was tried.
        seconds: Wall time of the check.
        unchecked: Why no verdict could be given; empty where one was.
        modules: Which modules differ, the worst first.
    """

    exact: bool
    relative_error: float
    causes: tuple[str, ...] = ()
    samples: int = 0
    partitions: tuple[tuple[int, ...], ...] = ()
    seconds: float = 0.0
    unchecked: str = ""
    modules: tuple[ModuleError, ...] = ()

    def __str__(self) -> str:
        """One line."""
        if self.unchecked:
            return f"splitting was not checked: {self.unchecked}"
        divisions = plural(len(self.partitions), "division")
        tried = f"{self.samples} samples in {divisions}, relative error {self.relative_error:.1e}"
        if self.exact:
            return f"splitting is exact: {tried}"
        return f"splitting is not exact: {tried}{self._show_modules()}: {'; '.join(self.causes)}"

    def _show_modules(self) -> str:
        shown = [f"{found.module}: {found.relative_error:.1e}" for found in self.modules[:_MODULES_SHOWN]]
        more = len(self.modules) - len(shown)
        others = f" and {plural(more, 'more module')}" if more else ""
        return f" ({', '.join(shown)}{others})" if shown else ""
