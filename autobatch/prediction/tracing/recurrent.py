"""LSTM, GRU and RNN as CUDA runs them: one call of cuDNN for all layers and steps in time.

Covers ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` on padded sequences, with projections, both directions and autocast, as
``aten/src/ATen/native/cudnn/RNN.cpp`` allocates: the results, a reserve space that is kept for the backward pass, a
workspace in each call, weights in one buffer where autocast casts them, and their gradients in one buffer. Covers
``nn.GRUCell`` too, for which torch has no shapes (``native/cuda/RNN.cu``); its ``nn.LSTMCell`` needs a bias. Does not
cover packed sequences, whose shape depends on values, the generator state that dropout between layers keeps (a few MiB
a process), nor cards where cuDNN is switched off.

cuDNN does not publish the sizes of its two spaces. The rule here is what the backward pass must know, and **has not
been measured**: for each layer, direction, step and sample the gates after their nonlinearity, what else the cell's
derivative needs, and what the next layer reads. The workspace is one layer's gates before their nonlinearity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = ["Recurrence", "register", "reserve_bytes", "workspace_bytes"]

Cell = Literal["lstm", "gru", "rnn"]

_GATES: dict[Cell, int] = {"lstm": 4, "gru": 3, "rnn": 1}
_KEPT: dict[Cell, int] = {"lstm": 5, "gru": 4, "rnn": 1}
"""Numbers a hidden unit keeps of each step: LSTM its gates and the cell, GRU its gates and the product that one of them
scales, RNN its result."""


@dataclass(frozen=True)
class Recurrence:
    """One call's sizes.

    Attributes:
        cell: What is repeated.
        steps: In time.
        samples: In the batch.
        hidden: Units of a layer in one direction.
        results: Numbers that a step gives in one direction: ``hidden``, or the projection's.
        layers: On top of each other.
        directions: 1 or 2.
        drops: Whether there is dropout between layers.
        itemsize: Bytes of a number.
    """

    cell: Cell
    steps: int
    samples: int
    hidden: int
    results: int
    layers: int
    directions: int
    drops: bool
    itemsize: int


def reserve_bytes(call: Recurrence) -> int:
    """Bytes kept from the forward pass for the backward pass, by rule (see the module)."""
    in_time = call.steps * call.samples * call.directions
    cells = call.layers * _KEPT[call.cell] * call.hidden
    handed_up = (call.layers - 1) * call.results * (2 if call.drops else 1)
    return in_time * (cells + handed_up) * call.itemsize


def workspace_bytes(call: Recurrence) -> int:
    """Bytes needed during one call, by rule (see the module)."""
    return call.steps * call.samples * call.directions * _GATES[call.cell] * call.hidden * call.itemsize


@dataclass(frozen=True)
class _Options:
    cell: Cell
    layers: int
    directions: int
    drops: bool
    train: bool
    batch_first: bool
    dtype: torch.dtype


class _CuDNN(torch.autograd.Function):
    """The call and its backward pass, as the allocations that they make."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        inputs: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Results, the last hidden state and, of an LSTM, the last cell."""
        buffer = None
        ctx.dtypes = inputs.dtype, hidden.dtype
        if weights[0].dtype != options.dtype:  # autocast: all weights anew in one buffer (autocast_RNN.cpp)
            buffer = inputs.new_empty(sum(weight.numel() for weight in weights), dtype=options.dtype)
        inputs, hidden = inputs.to(options.dtype), hidden.to(options.dtype)
        cell = None if cell is None else cell.to(options.dtype)
        sequence = _in_time(inputs, options)
        call = _measure(options, sequence, hidden, cell)
        results = sequence.new_empty((call.steps, call.samples, call.directions * call.results))
        last = [torch.empty_like(hidden)] if cell is None else [torch.empty_like(hidden), torch.empty_like(cell)]
        workspace = _bytes(sequence, workspace_bytes(call))
        reserve = _bytes(sequence, reserve_bytes(call) if options.train else 0)
        del workspace
        output = results.transpose(0, 1) if options.batch_first else results
        ctx.save_for_backward(inputs, hidden, cell, output, reserve, buffer, *weights)
        ctx.options, ctx.call = options, call
        return (output, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of the inputs first, then of the weights: two calls with a workspace each."""
        inputs, hidden, cell, _output, _reserve, _buffer, *weights = ctx.saved_tensors
        if not ctx.options.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")  # as torch does on a card
        sequence, given = _in_time(inputs, ctx.options), _in_time(gradients[0], ctx.options)
        by_input = torch.empty_like(sequence)
        by_state = [None if state is None else torch.empty_like(state) for state in (hidden, cell)]
        workspace = _bytes(sequence, workspace_bytes(ctx.call))
        del workspace, given
        buffer = sequence.new_zeros(sum(weight.numel() for weight in weights))
        workspace = _bytes(sequence, workspace_bytes(ctx.call))
        del workspace, sequence
        by_input = by_input.transpose(0, 1) if ctx.options.batch_first else by_input
        of_inputs, of_states = ctx.dtypes
        states = [None if state is None else state.to(of_states) for state in by_state]
        return (None, by_input.to(of_inputs), *states, *_views(buffer, weights))


def _in_time(sequence: torch.Tensor, options: _Options) -> torch.Tensor:
    """Steps first and dense, which cuDNN asks for: a copy where the batch comes first."""
    return (sequence.transpose(0, 1) if options.batch_first else sequence).contiguous()


def _measure(options: _Options, sequence: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor | None) -> Recurrence:
    return Recurrence(
        cell=options.cell,
        steps=sequence.shape[0],
        samples=sequence.shape[1],
        hidden=(hidden if cell is None else cell).shape[2],
        results=hidden.shape[2],
        layers=options.layers,
        directions=options.directions,
        drops=options.drops,
        itemsize=sequence.element_size(),
    )


def _bytes(beside: torch.Tensor, count: int) -> torch.Tensor:
    return beside.new_empty(count, dtype=torch.uint8)


def _views(buffer: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each weight's gradient, where they lie one after another; in a weight's own precision a copy."""
    parts = buffer.split([weight.numel() for weight in weights])
    return [part.view(weight.shape).to(weight.dtype) for part, weight in zip(parts, weights, strict=True)]


def _kernel(cell: Cell, device_type: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(  # noqa: PLR0917 - torch's own signature
        inputs: torch.Tensor,
        states: Any,
        weights: Sequence[torch.Tensor],
        _has_biases: bool,  # noqa: FBT001 - torch's own signature
        layers: int,
        dropout: float,
        train: bool,  # noqa: FBT001 - torch's own signature
        bidirectional: bool,  # noqa: FBT001 - torch's own signature
        batch_first: bool,  # noqa: FBT001 - torch's own signature
    ) -> tuple[torch.Tensor, ...]:
        casts = torch.is_autocast_enabled(device_type) and inputs.is_floating_point()
        dtype = torch.get_autocast_dtype(device_type) if casts else inputs.dtype
        drops = dropout > 0 and train and layers > 1
        options = _Options(cell, layers, 1 + bidirectional, drops, train, batch_first, dtype)
        hidden, memory = states if cell == "lstm" else (states, None)
        found: tuple[torch.Tensor, ...] = _CuDNN.apply(options, inputs, hidden, memory, *weights)  # type: ignore[no-untyped-call]
        return found

    return run


def _shape_gru_cell(
    gates: torch.Tensor, _: torch.Tensor, hidden: torch.Tensor, *_biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next hidden state, and five numbers a unit that are kept."""
    return torch.empty_like(hidden), gates.new_empty(hidden.shape[0], 5 * hidden.shape[1])


def _shape_gru_cell_backward(
    gradient: torch.Tensor,
    kept: torch.Tensor,
    has_bias: bool,  # noqa: FBT001 - torch's own signature
) -> tuple[torch.Tensor | None, ...]:
    samples, hidden = gradient.shape
    gates = [kept.new_empty(samples, 3 * hidden) for _ in range(2)]
    biases = [kept.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(gradient), *biases)


def register(device_type: str) -> torch.library.Library:
    """Have the fake device run recurrent layers so; the result must be kept, with it goes the registration."""
    library = torch.library.Library("aten", "IMPL")
    names: dict[str, Cell] = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn", "rnn_relu": "rnn"}
    for name, cell in names.items():
        library.impl(f"{name}.input", _kernel(cell, device_type), "AutogradPrivateUse1")
    library.impl("_thnn_fused_gru_cell", _shape_gru_cell, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _shape_gru_cell_backward, "Meta")
    return library
