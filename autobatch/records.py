"""Defines the frozen records that one stage hands to the next: devices, trials, verdicts."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autobatch._bounds import LISTED, SHORTEST, Bytes, Count, Flag, Ratio, Samples, Seconds, Text
from autobatch._formatting import describe_fields, format_bytes, is_one_line, plural, show_value

_MODULES_SHOWN = 3
_LONGEST_REASON = 200  # of each half of a reason: a field's name may come from the file, and be as long as that

# What pydantic says otherwise, by the type of its error.
_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "json_invalid": "is not JSON",
}
_OF_NO_VALUE = ("extra_forbidden", "json_invalid")

Outcome = Literal["fits", "oom", "thrash"]

# The parts of a training step that can run out of memory, in their order.
Phase = Literal["forward", "loss", "backward", "gradients", "optimizer state", "update"]

# Ways in which a step may already save memory.
Saving = Literal["activation checkpointing", "autocast", "16-bit parameters"]

# Ways to run a block in less memory: recompute all of it, or what is cheap to compute, or keep its results on the host.
Way = Literal["checkpoint", "selective", "offload"]

# Ways to make a step fit whose smallest micro-batch does not.
Strategy = Literal["checkpoint", "selective", "offload", "chunk_loss"]

# How often gradients of sharded parameters are summed over the ranks, from the least memory to the fewest collectives.
Summing = Literal["in each micro-batch", "once a step", "once a step, parameters stay gathered"]
SUMMINGS: tuple[Summing, ...] = get_args(Summing)
IN_EACH: Summing = "in each micro-batch"


class Record(BaseModel):
    """A frozen value that is compared by content; an undeclared field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", defer_build=True)

    def __repr__(self) -> str:
        """Return one line without fields that have their default; long fields are only counted."""
        fields = type(self).model_fields
        shown = ((name, value) for name, value in self if fields[name].repr and value != fields[name].get_default())
        return describe_fields(type(self).__name__, shown)


def spell_invalid(error: ValidationError, field: str = "") -> str:
    """Return the first fault of a record in one short line: ``"target_batch=-3 must be at least 1"``.

    ``field`` names a value that is in no record.
    """
    first = error.errors(include_url=False)[0]
    kind, value, message = first["type"], first["input"], first["msg"]
    field = _shorten(field or ".".join(map(str, first["loc"])) or "the file")
    if kind in _WORDS:
        message = _WORDS[kind].format(**first.get("ctx", {}))
    if kind == "value_error":
        return f"{field}: {_shorten(message.removeprefix('Value error, '))}"
    shown = f"={show_value(value)}" if isinstance(value, str | int | float) and kind not in _OF_NO_VALUE else ""
    return f"{field}{shown} {_shorten(message.partition(', unable')[0].replace('Input should be', 'must be'))}"


def _shorten(text: str) -> str:
    shown = text if is_one_line(text) else ascii(text)[1:-1]
    return shown if len(shown) <= _LONGEST_REASON else f"{shown[: _LONGEST_REASON - 3]}..."


class Tenant(Record):
    """Another process that holds memory of the same device.

    Attributes:
        pid: Number of the process, from the driver.
        used_bytes: Bytes that it holds.
        name: Its command, if the driver reports one.
    """

    pid: Count
    used_bytes: Bytes
    name: Text = ""


class DeviceInfo(Record):
    """Description of a device at one moment.

    Attributes:
        kind: The torch device type: ``"cuda"``, ``"cpu"``, ``"mps"``...
        name: Name for people: ``"NVIDIA L4"``, ``"CPU"``.
        total_bytes: All memory of the device (a container's limit counts as all); 0 if it is unknown.
        uuid: The driver's identifier of the card or of its MIG slice, if there is one.
        tenants: Other processes on it.
        driver: Version of the driver, if it reports one.
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


class Trial(Record):
    """One measured attempt at one micro-batch size: two micro-batches accumulated, then the optimizer's step.

    The two peaks cover the whole attempt. An attempt that ran out of memory has the values up to that point.

    Attributes:
        micro_batch_size: Samples in each of the two micro-batches.
        outcome: ``"fits"``, ``"oom"``, or ``"thrash"``: it ran, but the allocator had to free memory and ask again, or
            the driver moved memory to the host.
        peak_allocated: Most bytes in tensors at once.
        peak_reserved: Most bytes held by the allocator at once; the limit applies to them.
        optimizer_peak: Most bytes in tensors at once during ``optimizer.step()``; 0 without an optimizer.
        alloc_retries: Number of times that the allocator had to free its cache.
        seconds: Wall time of the two micro-batches and the step.
        update_seconds: Part of it that the optimizer's step took.
        backward_allocated: ``peak_allocated`` of the forward and backward passes alone, which grows with the size.
        backward_reserved: ``peak_reserved`` up to the end of the backward passes.
        resident_bytes: Bytes in tensors before the first micro-batch: parameters, buffers, optimizer state, batch.
        held_bytes: Bytes of activations of the step before, which attributes or hooks still hold. They are in the
            peaks, but not in ``resident_bytes``.
        ended_in: Phase that ran out of memory; ``None`` if none did. ``"gradients"``: a backward pass whose gradients
            alone exceed the limit. ``"optimizer state"``: the optimizer made its state.
        length: Length to which ``fit`` trimmed the samples, with ``by_length``.
        checkpointed: Number of blocks that were recomputed in the backward pass, or offloaded, with ``strategies``.
        chunked: Whether the loss was computed in chunks, with ``strategies``.
        selective: Number of those that kept their matrix products and attention.
        offloaded: Number of those that kept in host memory what their backward passes need.
    """

    micro_batch_size: Samples
    outcome: Outcome
    peak_allocated: Bytes = 0
    peak_reserved: Bytes = 0
    optimizer_peak: Bytes = 0
    alloc_retries: Count = 0
    seconds: Seconds = 0.0
    update_seconds: Seconds = 0.0
    backward_allocated: Bytes | None = None
    backward_reserved: Bytes | None = None
    resident_bytes: Bytes = 0
    held_bytes: Bytes = 0
    ended_in: Phase | None = None
    length: Samples | None = None
    checkpointed: Count = 0
    chunked: Flag = False
    selective: Count = 0
    offloaded: Count = 0

    @property
    def pass_seconds(self) -> float:
        """Time of one micro-batch, without the optimizer's step."""
        return max(self.seconds - self.update_seconds, 0.0) / 2

    @property
    def samples_per_second(self) -> float:
        """Samples of both micro-batches over the attempt's wall time; 0 if no time was taken."""
        return 2 * self.micro_batch_size / self.seconds if self.seconds > SHORTEST else 0.0


class SizeAtLength(Record):
    """Number of samples of up to one length that a micro-batch may have; a trial ran as many at that length.

    Attributes:
        length: Length of the trial's samples.
        micro_batch_size: Number of the trial's samples.
        peak_bytes: Most bytes that the allocator held; 0 if the device does not measure.
    """

    length: Samples
    micro_batch_size: Samples
    peak_bytes: Bytes = 0


class LeftOut(Record):
    """A block that can run in none of the allowed ways.

    Attributes:
        block: Its name in the model.
        reason: Why such a way would change the training.
    """

    block: Text
    reason: Text


class Checkpointing(Record):
    """Blocks of a model that a step recomputes in its backward pass, or offloads, and what that saves and costs.

    Attributes:
        blocks: Names of the blocks.
        candidates: Number of blocks among which they were chosen.
        micro_batch_size: Samples in the micro-batches of the two peaks.
        plain_bytes: Predicted peak of the plain step, which does not fit.
        peak_bytes: Measured peak.
        slowdown: Time that the blocks take longer, as a part of a plain micro-batch.
        plain_size: Samples in the largest micro-batch that fits plainly; 0 if none does.
        saved_time: Part of a plain step's time that larger micro-batches save, by trials; 0 if none fits plainly.
        left_out: Blocks that can run in none of the allowed ways, with the reasons.
        selective: Those of ``blocks`` that keep the results of matrix products and attention, and recompute the rest.
        offloaded: Those of ``blocks`` that recompute nothing: host memory keeps what their backward passes need.
    """

    blocks: Annotated[tuple[Text, ...], LISTED, Field(min_length=1)]
    candidates: Count
    micro_batch_size: Samples
    plain_bytes: Bytes
    peak_bytes: Bytes
    slowdown: Ratio
    plain_size: Count = 0
    saved_time: Ratio = 0.0
    left_out: Annotated[tuple[LeftOut, ...], LISTED] = ()
    selective: Annotated[tuple[Text, ...], LISTED] = ()
    offloaded: Annotated[tuple[Text, ...], LISTED] = ()

    @property
    def ways(self) -> dict[str, Way]:
        """Way of each block."""
        found: dict[str, Way] = dict.fromkeys(self.blocks, "checkpoint")
        found.update(dict.fromkeys(self.selective, "selective"))
        found.update(dict.fromkeys(self.offloaded, "offload"))
        return found

    @property
    def recomputed(self) -> list[str]:
        """Blocks that run again in the backward pass, whole or selectively."""
        return [block for block, way in self.ways.items() if way != "offload"]

    @model_validator(mode="after")
    def _check_blocks(self) -> Checkpointing:
        refuse_nested(self.blocks)
        others = [*self.selective, *self.offloaded]
        if wrong := [block for block in others if block not in self.blocks or others.count(block) > 1]:
            raise ValueError(f"block {wrong[0]} of selective or offloaded is not in blocks, or there twice")
        return self

    def __str__(self) -> str:
        """One line: ``checkpointing 9 of 24 blocks: 38.1 -> 21.7 GiB, +14 % time in micro-batches of 1``.

        It begins with ``offloading`` if no block is recomputed. It ends in ``-20 % time with micro-batches of 8, 2
        without`` if plain micro-batches fit, too.
        """
        before, after = format_bytes(self.plain_bytes), format_bytes(self.peak_bytes)
        if before.split()[1] == after.split()[1]:
            before = before.split()[0]
        verb = "checkpointing" if self.recomputed else "offloading"
        blocks = f"{verb} {len(self.blocks)} of {plural(self.candidates, 'block')}"
        others = {"selectively": self.selective, "offloaded": self.offloaded if self.recomputed else ()}
        blocks += "".join(f", {len(names)} of them {how}" for how, names in others.items() if names)
        time = f"+{100 * self.slowdown:.0f} % time in micro-batches of {self.micro_batch_size}"
        if self.plain_size:
            sizes = f"micro-batches of {self.micro_batch_size}, {self.plain_size} without"
            time = f"-{100 * self.saved_time:.0f} % time with {sizes}"
        return f"{blocks}: {before} -> {after}, {time}"


class ChunkedLoss(Record):
    """A loss that a step computes in chunks of its classes, and what that saves.

    Attributes:
        head: Name of the linear layer whose outputs are the logits.
        chunks: Number of chunks.
        micro_batch_size: Samples of the logits that were measured.
        logits_bytes: Bytes of these in float32. A loss that is not chunked holds several such copies at once.
    """

    head: Text
    chunks: Annotated[int, Field(ge=1)]
    micro_batch_size: Samples
    logits_bytes: Bytes

    def __str__(self) -> str:
        """One line: ``loss of lm_head in 16 chunks: copies of its logits take 12.3 MiB, not 196.3 MiB``."""
        chunk, whole = format_bytes(self.logits_bytes // self.chunks), format_bytes(self.logits_bytes)
        return f"loss of {self.head} in {plural(self.chunks, 'chunk')}: copies of its logits take {chunk}, not {whole}"


def refuse_nested(blocks: Collection[str]) -> None:
    """Raise ValueError for a block that is named twice, or is inside another one: it would be recomputed twice."""
    for name, following in pairwise(sorted(blocks, key=lambda name: name.split("."))):
        if f"{following}.".startswith(f"{name}."):
            raise ValueError(f"block {following} is recomputed twice: it is named twice, or inside {name}")


class Padding(Record):
    """Position of the padding in a batch.

    Attributes:
        dims: Dimensions of each padded tensor that have the padded length, by path. Empty if samples are in lists, each
            of its own length.
        side: ``"right"`` if padding comes after a sample's own values, ``"left"`` if it comes before them.
    """

    dims: dict[Text, tuple[Samples, ...]] = Field(default_factory=dict)
    side: Literal["right", "left"] = "right"


class ModelIdentity(Record):
    """Identity of a plan's model and optimizer.

    It does not depend on names, dtypes and values. So it stays the same if the model is compiled, wrapped for data
    parallelism, moved, cast to another dtype or trained.

    Attributes:
        tensors: Number of parameters; a shared one counts once.
        parameters: Number of values in them.
        trained: Number of values in those that require a gradient.
        shapes: A digest of all shapes.
        optimizer: Class of the torch optimizer; empty without one.
    """

    tensors: Count
    parameters: Count
    trained: Count
    shapes: Text
    optimizer: Text = ""


class ModuleError(Record):
    """Error of one module's gradient in a split.

    Attributes:
        module: Its path in the model, or the model's type for parameters of the model itself.
        relative_error: ``|split - whole| / |whole|`` of its worst parameter; 1 if the whole has no gradient.
    """

    module: Text
    relative_error: Ratio


class Verdict(Record):
    """Whether splitting a step gives the gradient of the whole batch, and why not.

    Attributes:
        exact: Whether every division gave it, to 1e-4 in each parameter; false also if none could be checked.
        relative_error: ``|split - whole| / |whole|`` of the worst parameter in the worst division; may be infinite.
        causes: Reasons why it is inexact, each with the remedy.
        samples: Number of samples that were compared.
        partitions: Sizes of the parts of each division.
        seconds: Wall time of the check.
        unchecked: Reason why nothing was compared; empty after a comparison.
        modules: Modules that differ, the worst first.
        larger_partition: Sizes of the parts of one more exact division, of as many samples as there are or as fit.
            Empty if ``samples`` were all of them, or no more fit.
        not_compared: Number of samples in the largest comparison, and why it had not all; empty if it had all.
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
