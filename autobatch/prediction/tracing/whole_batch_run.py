"""Runs steps of ``WholeBatch`` on fake tensors, in two passes; see ``training/whole_batch``.

The representations of the whole batch are one tensor here, so the same operators run at any micro-batch size.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from autobatch.batch.tree import map_tensors
from autobatch.prediction.tracing.dry_run import DryRun
from autobatch.prediction.tracing.fake_device import original_errors
from autobatch.step.whole_batch import WholeBatch, read_loss, read_rows
from autobatch.step.workload import check_leaves, split_output

_Rows = list["torch.Tensor | None"]


class WholeBatchRun(DryRun):
    """Runs one step after another in two passes.

    Attributes:
        samples: Samples in a micro-batch.
        whole: Whole batch of a step, on the host.
    """

    samples: int = 0
    whole: Any = None

    def _run_micro_batches(self, batch: Any, outputs: list[Any], *, is_placed: bool) -> None:
        kept: _Rows = []
        with self._names:
            for _ in range(self._circumstances.micro_batches):
                with self.recorder.forward():
                    found, nest = self._represent(batch, is_placed=is_placed)
                # The last micro-batch of the first pass runs beside the representations of all.
                kept = kept or [one if one is None else self._keep(one) for one in found]
                del found
                gc.collect()
            self._run_loss(kept, nest, outputs, is_placed=is_placed)
            for _ in range(self._circumstances.micro_batches):
                with self.recorder.forward():
                    found, _ = self._represent(batch, is_placed=is_placed)
                self._run_backward(found, kept)
                del found
                gc.collect()
        self._label_gradients()

    def _represent(self, batch: Any, *, is_placed: bool) -> tuple[_Rows, TreeSpec]:
        placed = map_tensors(batch, self._place)
        with self._user.watch():
            returned = self._call(partial(self._step.represent, self._user.model), placed, is_placed=is_placed)
        return read_rows(returned, self.samples)

    def _run_loss(self, kept: _Rows, nest: TreeSpec, outputs: list[Any], *, is_placed: bool) -> None:
        copies = [buffer.detach().clone() for buffer in self._user.model.buffers()]  # to see whether the loss moves one
        batch = map_tensors(self.whole, self._place) if is_placed else self.whole
        with self.recorder.forward("loss"):
            joined = tree_unflatten([one if one is None else torch.cat([one]) for one in kept], nest)
            with self._user.watch():
                losses, aux = split_output(self._call(partial(self._step.loss, joined), batch, is_placed=is_placed))
            loss, _ = read_loss(losses)
            check_leaves(loss, self._leaves)
        self.recorder.log.phase = "loss"
        with original_errors():
            (loss if self._scale is None else loss * self._scale).backward()
        outputs += [loss.detach(), aux]
        self.recorder.label(outputs[0], "activation")
        del joined, losses, loss, copies
        gc.collect()

    def _run_backward(self, found: _Rows, kept: _Rows) -> None:
        pairs = [(one, rows) for one, rows in zip(found, kept, strict=True) if one is not None and rows is not None]
        trained = [(one, self._take_rows(rows.grad)) for one, rows in pairs if rows.grad is not None]
        if not trained:
            return
        for one, _ in trained:
            check_leaves(one, self._leaves)
        with original_errors():
            torch.autograd.backward([one for one, _ in trained], [rows for _, rows in trained])

    def _take_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the rows of one micro-batch, in no new memory; a trace may be larger than the whole batch."""
        if len(gradient) >= self.samples:
            return gradient[: self.samples]
        with self.recorder.unrecorded():
            return gradient.new_empty((self.samples, *gradient.shape[1:]))

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make rows like these for the whole batch."""
        rows = tensor.new_empty((self._circumstances.whole, *tensor.shape[1:]))
        self.recorder.label(rows, "representation")
        return rows.requires_grad_(tensor.requires_grad)

    @property
    def _step(self) -> WholeBatch:
        assert isinstance(self._user.step, WholeBatch)  # noqa: S101 - narrows for mypy
        return self._user.step
