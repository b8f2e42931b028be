"""Allocates what cuDNN takes for recurrent layers: one call for a whole LSTM, GRU or RNN.

Tensors are those of ``aten/src/ATen/native/cudnn/RNN.cpp``; torch has no shapes for ``nn.GRUCell`` (``RNN.cu``).
Packed sequences cannot be traced, as their shape depends on values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Cell = Literal["lstm", "gru", "rnn"]

_GATES: dict[Cell, int] = {"lstm": 4, "gru": 3, "rnn": 1}
_SAVED: dict[Cell, int] = {"lstm": 5, "gru": 4, "rnn": 1}
"""Numbers that a hidden unit saves at each step: LSTM gates and cell, GRU gates and a product, RNN its result."""


@dataclass(frozen=True)
class Recurrence:
    """One call for all layers and steps."""

    cell: Cell
    steps: int
    samples: int
    hidden: int  # units of a layer in one direction
    results: int  # numbers that a step gives in one direction: ``hidden``, or the projection's
    layers: int
    directions: int
    drops: bool  # whether there is dropout between layers
    dtype: torch.dtype  # of the computation
    trains: bool = True
    batch_first: bool = False


def reserve_bytes(call: Recurrence) -> int:
    """Bytes saved for the backward pass, by a rule that nobody has measured: cuDNN does not publish this.

    For each layer, direction, step and sample: gates, other inputs of the cell's derivative, input of the next layer.
    """
    in_time = call.steps * call.samples * call.directions
    cells = call.layers * _SAVED[call.cell] * call.hidden
    handed_up = (call.layers - 1) * call.results * (2 if call.drops else 1)
    return in_time * (cells + handed_up) * call.dtype.itemsize


def workspace_bytes(call: Recurrence) -> int:
    """Bytes needed during one call: one layer's gates before their nonlinearity, a rule not measured either."""
    return call.steps * call.samples * call.directions * _GATES[call.cell] * call.hidden * call.dtype.itemsize


class _CuDNN(torch.autograd.Function):
    """The allocations of the call and of its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, call: Recurrence, inputs: torch.Tensor, hidden: torch.Tensor, cell: Any, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        buffer = None
        ctx.dtypes = inputs.dtype, hidden.dtype
        if weights[0].dtype != call.dtype:  # autocast casts all weights into one buffer (autocast_RNN.cpp)
            buffer = inputs.new_empty(sum(weight.numel() for weight in weights), dtype=call.dtype)
        inputs, hidden = inputs.to(call.dtype), hidden.to(call.dtype)
        cell = None if cell is None else cell.to(call.dtype)
        sequence = _time_first(inputs, call)
        results = sequence.new_empty((call.steps, call.samples, call.directions * call.results))
        last = [torch.empty_like(hidden)] if cell is None else [torch.empty_like(hidden), torch.empty_like(cell)]
        workspace = sequence.new_empty(workspace_bytes(call), dtype=torch.uint8)
        reserve = sequence.new_empty(reserve_bytes(call) if call.trains else 0, dtype=torch.uint8)
        del workspace
        output = results.transpose(0, 1) if call.batch_first else results
        ctx.save_for_backward(inputs, hidden, cell, output, reserve, buffer, *weights)
        ctx.call = call
        return (output, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of the inputs first, then of the weights: two calls with a workspace each."""
        call = ctx.call
        inputs, hidden, cell, _output, _reserve, _buffer, *weights = ctx.saved_tensors
        if not call.trains:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")  # as torch does on a card
        sequence, given = _time_first(inputs, call), _time_first(gradients[0], call)
        by_input = torch.empty_like(sequence)
        by_state = [None if state is None else torch.empty_like(state) for state in (hidden, cell)]
        workspace = sequence.new_empty(workspace_bytes(call), dtype=torch.uint8)
        del workspace, given
        buffer = sequence.new_zeros(sum(weight.numel() for weight in weights))
        workspace = sequence.new_empty(workspace_bytes(call), dtype=torch.uint8)
        del workspace, sequence
        by_input = by_input.transpose(0, 1) if call.batch_first else by_input
        of_inputs, of_states = ctx.dtypes
        states = [None if state is None else state.to(of_states) for state in by_state]
        parts = buffer.split([weight.numel() for weight in weights])  # in a weight's own precision a copy
        by_weight = [part.view(weight.shape).to(weight.dtype) for part, weight in zip(parts, weights, strict=True)]
        return (None, by_input.to(of_inputs), *states, *by_weight)


def _time_first(sequence: torch.Tensor, call: Recurrence) -> torch.Tensor:
    """Steps first and dense, which cuDNN asks for: a copy where the batch comes first."""
    return (sequence.transpose(0, 1) if call.batch_first else sequence).contiguous()


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
        hidden, memory = states if cell == "lstm" else (states, None)
        samples, steps = inputs.shape[:2] if batch_first else inputs.shape[1::-1]
        call = Recurrence(
            cell,
            steps,
            samples,
            hidden=(hidden if memory is None else memory).shape[2],
            results=hidden.shape[2],
            layers=layers,
            directions=1 + bidirectional,
            drops=dropout > 0 and train and layers > 1,
            dtype=torch.get_autocast_dtype(device_type) if casts else inputs.dtype,
            trains=train,
            batch_first=batch_first,
        )
        found: tuple[torch.Tensor, ...] = _CuDNN.apply(call, inputs, hidden, memory, *weights)  # type: ignore[no-untyped-call]
        return found

    return run


def _shape_gru_cell(
    gates: torch.Tensor, _: torch.Tensor, hidden: torch.Tensor, *_biases: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next hidden state, and five numbers a unit that are saved."""
    return torch.empty_like(hidden), gates.new_empty(hidden.shape[0], 5 * hidden.shape[1])


def _shape_gru_cell_backward(
    gradient: torch.Tensor,
    saved: torch.Tensor,
    has_bias: bool,  # noqa: FBT001 - torch's own signature
) -> tuple[torch.Tensor | None, ...]:
    samples, hidden = gradient.shape
    gates = [saved.new_empty(samples, 3 * hidden) for _ in range(2)]
    biases = [saved.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(gradient), *biases)


def register(device_type: str) -> torch.library.Library:
    """Run recurrent layers so on the fake device, as long as the result is referenced."""
    library = torch.library.Library("aten", "IMPL")
    names: dict[str, Cell] = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn", "rnn_relu": "rnn"}
    for name, cell in names.items():
        library.impl(f"{name}.input", _kernel(cell, device_type), "AutogradPrivateUse1")
    library.impl("_thnn_fused_gru_cell", _shape_gru_cell, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _shape_gru_cell_backward, "Meta")
    return library
