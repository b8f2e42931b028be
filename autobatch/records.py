"""Defines the frozen records that one stage hands to the next: devices, trials, verdicts; plans are ``plan_record``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autobatch._bounds import LISTED, SHORTEST, Bytes, Count, Flag, Ratio, Samples, Seconds, Text, is_one_line
from autobatch._formatting import describe_fields, plural

__all__ = [
    "DeviceInfo",
    "MemoryUsage",
    "ModelIdentity",
    "ModuleError",
    "Outcome",
    "Padding",
    "Phase",
    "Record",
    "SizeAtLength",
    "Tenant",
    "Trial",
    "Verdict",
    "spell_invalid",
]

_MODULES_SHOWN = 3
_LONGEST_REASON = 200  # of each half of a reason: a field's name may come from the file, and be as long as that

Outcome = Literal["fits", "oom", "thrash"]

# The parts of a training step in which memory can end, in their order.
Phase = Literal["forward", "backward", "gradients", "optimizer state", "update"]

# What a step may do already to save memory.
Saving = Literal["activation checkpointing", "autocast", "16-bit parameters"]


class Record(BaseModel):
    """A frozen value: compared by content, refused when it holds an undeclared field."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def __repr__(self) -> str:
        """One line: fields that have their default are left out, and long ones only counted."""
        fields = type(self).model_fields
        shown = ((name, value) for name, value in self if fields[name].repr and value != fields[name].get_default())
        return describe_fields(type(self).__name__, shown)


def spell_invalid(error: ValidationError) -> str:
    """The first thing that is wrong with a record, in one short line: ``"target_batch: Input should be ..."``."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"])) or "the file"
    return f"{_shorten(field)}: {_shorten(first['msg'].removeprefix('Value error, '))}"


def _shorten(text: str) -> str:
    shown = text if is_one_line(text) else ascii(text)[1:-1]
    return shown if len(shown) <= _LONGEST_REASON else f"{shown[: _LONGEST_REASON - 3]}..."


class Tenant(Record):
    """Another process that holds memory of the same device.

    Attributes:
        pid: The process, as the driver numbers it.
        used_bytes: What it holds, in bytes.
        name: Its command, where the driver reports one.
    """

    pid: Count
    used_bytes: Bytes
    name: Text = ""


class DeviceInfo(Record):
    """What a device is, at the moment it was asked.

    Attributes:
        kind: The torch device type: ``"cuda"``, ``"cpu"``, ``"mps"``...
        name: What a person calls it: ``"NVIDIA L4"``, ``"CPU"``.
        total_bytes: All memory of the device (a container's limit counts as all), 0 where that is not known.
        uuid: The driver's identifier of the card or of its MIG slice, where there is one.
        tenants: Other processes on it.
        driver: The version of the driver, where it reports one.
    """

    kind: Text
    name: Text
    total_bytes: Bytes
    uuid: Text | None = None
    tenants: Annotated[tuple[Tenant, ...], LISTED] = ()
    driver: Text = ""


class MemoryUsage(Record):
    """One reading of a device's allocator, in bytes; peaks are since the last reset."""

    allocated: Bytes = 0
    reserved: Bytes = 0
    peak_allocated: Bytes = 0
    peak_reserved: Bytes = 0
    alloc_retries: Count = 0
    spilled: Bytes = 0  # since the last reset, from a full card to the host


class Trial(Record):
    """One measured attempt at one micro-batch size: two micro-batches accumulated, then the optimizer's step.

    The two peaks cover the whole attempt. An attempt that ran out of memory holds what was reached before it ended.

    Attributes:
        micro_batch_size: Samples in each of the two micro-batches.
        outcome: ``"fits"``, ``"oom"``, or ``"thrash"``: it ran, but the allocator had to free memory and ask again, or
            the driver moved memory to the host.
        peak_allocated: Most bytes in tensors at once.
        peak_reserved: Most bytes held by the allocator at once: what meets the limit.
        optimizer_peak: Most bytes in tensors at once during ``optimizer.step()``; 0 without an optimizer.
        alloc_retries: How often the allocator had to free its cache to go on.
        seconds: Wall time of the two micro-batches and the step.
        backward_allocated: ``peak_allocated`` of the forward and backward passes alone: what grows with the size.
        backward_reserved: ``peak_reserved`` up to the end of the backward passes.
        resident_bytes: Bytes in tensors before the first micro-batch: parameters, buffers, optimizer state, batch.
        held_bytes: Bytes of activations of the step before, which the model holds in attributes, or a hook in a list:
            in the peaks, but not in ``resident_bytes``.
        ended_in: Where memory ended, if it did. ``"gradients"``: in a backward pass, where the gradients alone are more
            than the limit beside what was there before it. ``"optimizer state"``: where the optimizer made it, which
            some do in the course of their first step.
        length: What the samples were trimmed to, where ``fit`` was given ``lengths``.
    """

    micro_batch_size: Samples
    outcome: Outcome
    peak_allocated: Bytes = 0
    peak_reserved: Bytes = 0
    optimizer_peak: Bytes = 0
    alloc_retries: Count = 0
    seconds: Seconds = 0.0
    backward_allocated: Bytes | None = None
    backward_reserved: Bytes | None = None
    resident_bytes: Bytes = 0
    held_bytes: Bytes = 0
    ended_in: Phase | None = None
    length: Samples | None = None

    @property
    def samples_per_second(self) -> float:
        """Samples of both micro-batches over the attempt's wall time; 0 where no time was taken."""
        return 2 * self.micro_batch_size / self.seconds if self.seconds > SHORTEST else 0.0


class SizeAtLength(Record):
    """How many samples of up to one length a micro-batch may have: as many as a trial ran at that length.

    Attributes:
        length: What the trial's samples were trimmed to.
        micro_batch_size: How many they were.
        peak_bytes: The most bytes that the allocator held; 0 where the device does not measure.
    """

    length: Samples
    micro_batch_size: Samples
    peak_bytes: Bytes = 0


class Padding(Record):
    """Where the padding of a batch is.

    Attributes:
        dims: The dimensions of each padded tensor that have the padded length, by path; empty where samples are in
            lists, each of its own length.
        side: Where padding comes: after (``"right"``) or before (``"left"``) a sample's own values.
    """

    dims: dict[Text, tuple[Samples, ...]] = Field(default_factory=dict)
    side: Literal["right", "left"] = "right"


class ModelIdentity(Record):
    """What a plan's model and optimizer are recognised by, without running anything.

    The same for a model that is compiled, wrapped for data parallelism, moved, cast to another dtype or trained on:
    names, dtypes and values do not count.

    Attributes:
        tensors: Parameters, each once however often it is shared.
        parameters: Numbers in them.
        trained: Numbers in those that require a gradient.
        shapes: A digest of all shapes.
        optimizer: The class of the torch optimizer; empty where there was none.
    """

    tensors: Count
    parameters: Count
    trained: Count
    shapes: Text
    optimizer: Text = ""


class ModuleError(Record):
    """How far one module's gradient is off in a split.

    Attributes:
        module: Its path in the model; the model's type where parameters are the model's own.
        relative_error: ``|split - whole| / |whole|`` of its worst parameter; 1 where the whole has no gradient.
    """

    module: Text
    relative_error: Ratio


class Verdict(Record):
    """Whether splitting a step gives the gradient of the whole batch, and why not.

    Attributes:
        exact: Whether every division tried gave it, to 1e-4 in each parameter; false also where none could be checked.
        relative_error: ``|split - whole| / |whole|`` of the worst parameter in the worst division; may be infinite.
        causes: What makes it inexact, each with what to do.
        samples: How many samples were compared.
        partitions: The sizes of the parts of each division that was tried.
        seconds: Wall time of the check.
        unchecked: Why no verdict could be given; empty where one was.
        modules: Which modules differ, the worst first.
        larger_partition: Sizes of the parts of one more exact division, of as many samples as there are or as fit.
            Empty where ``samples`` were all of them, or no more fit.
        not_compared: How many samples the largest comparison had, and why not all; empty where it had all.
    """

    exact: Flag
    relative_error: Ratio
    causes: Annotated[tuple[Text, ...], LISTED] = ()
    samples: Count = 0
    partitions: Annotated[tuple[Annotated[tuple[Samples, ...], LISTED], ...], LISTED] = ()
    seconds: Seconds = 0.0
    unchecked: Text = ""
    modules: Annotated[tuple[ModuleError, ...], LISTED] = ()
    larger_partition: Annotated[tuple[Samples, ...], LISTED] = ()
    not_compared: Text = ""

    def __str__(self) -> str:
        """One line."""
        if self.unchecked:
            return f"splitting was not checked: {self.unchecked}"
        divisions = plural(len(self.partitions), "division")
        tried = f"{self.samples} samples in {divisions}, relative error {self.relative_error:.1e}"
        if self.exact:
            return f"splitting is exact: {tried}{self._show_larger()}"
        return f"splitting is not exact: {tried}{self._show_modules()}: {'; '.join(self.causes)}"

    def _show_larger(self) -> str:
        sizes = self.larger_partition
        larger = f", and {sum(sizes)} samples in {len(sizes)} parts of up to {max(sizes)}" if sizes else ""
        return f"{larger}; {self.not_compared}" if self.not_compared else larger

    def _show_modules(self) -> str:
        shown = [f"{found.module}: {found.relative_error:.1e}" for found in self.modules[:_MODULES_SHOWN]]
        more = len(self.modules) - len(shown)
        others = f" and {plural(more, 'more module')}" if more else ""
        return f" ({', '.join(shown)}{others})" if shown else ""
