"""Runs ``Runner(backward=)``, such as a framework's, and refuses one that makes another gradient.

It must be called once with the loss, gradients must arrive in parameters, and a factor on the loss must be taken out
again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autobatch._formatting import name_type, show_value
from autobatch.errors import InvalidArgument
from autobatch.step.workload import leaves_of_graph
from autobatch.undo.gradients import NARROW

Backward = Callable[[torch.Tensor], object]
"""Called with a scalar loss in place of ``loss.backward()``; what it returns is passed over."""


class GivenBackward:
    """Calls the user's function, once a micro-batch, and counts the backward passes that begin at the loss."""

    def __init__(self, function: Backward, *, is_scaled: bool) -> None:
        if not callable(function) or isinstance(function, type):
            shown = show_value(function) if isinstance(function, str | int | float) else name_type(function)
            raise InvalidArgument(
                f"backward={shown} cannot be called with a loss: pass backward(loss), such as accelerator.backward"
            )
        self._function, self._is_scaled, self._factor_is_known = function, is_scaled, False

    def __call__(self, loss: torch.Tensor) -> None:
        """Call it, and refuse it if it makes another gradient."""
        loss = loss.clone()  # it may keep what it is given, and later losses are added to this one
        arrived: list[torch.Tensor] = []
        loss.register_hook(arrived.append)
        # In the first pass alone: going through the graph takes as long as a forward pass.
        gradients = None if self._factor_is_known else _Gradients(loss)
        if gradients is None:
            self._function(loss)
        else:
            gradients.note(self._function)
        if len(arrived) != 1:
            ran = f"ran {len(arrived)} backward passes from the loss" if arrived else "ran no backward pass"
            raise InvalidArgument(
                f"backward= {ran}: it has to run one, such as loss.backward(), on the loss that it is given"
            )
        if gradients is not None:  # once: reading the factor waits for the device
            gradients.check()
            self._check_factor(float(arrived[0]))
            self._factor_is_known = True

    def _check_factor(self, factor: float) -> None:
        if factor == 1 or (factor > 1 and not self._is_scaled):  # a framework's own scaler, whose update unscales
            return
        remedy = (
            "scale losses in one place: leave scaler= out, or pass a backward= that does not scale"
            if factor > 1
            else "switch the framework's own accumulation off, such as gradient_accumulation_steps=1"
        )
        raise InvalidArgument(
            f"backward= multiplies the loss by {factor:g}, and the Runner has divided it by the whole step's count "
            f"already: {remedy}"
        )


class _Gradients:
    """Where a backward pass from this loss adds up gradients, and whether it has.

    Not by ``.grad`` alone: that of a narrow parameter is taken away at once, to be added up in float32.
    """

    def __init__(self, loss: torch.Tensor) -> None:
        self._loss, self._leaves = loss, [*leaves_of_graph(loss)]
        self._before = [leaf.grad for leaf in self._leaves]
        self._reached: list[torch.Tensor] = []

    def note(self, function: Backward) -> None:
        """Call the function, and note the leaves to which torch adds."""
        hooks = [leaf.register_post_accumulate_grad_hook(self._reached.append) for leaf in self._leaves]
        try:
            function(self._loss)
        finally:
            for hook in hooks:
                hook.remove()

    def check(self) -> None:
        """Raise InvalidArgument where no leaf has got a gradient, or a narrow one has not got it from torch."""
        by_torch = {*map(id, self._reached)}
        pairs = zip(self._leaves, self._before, strict=True)
        written = [leaf for leaf, before in pairs if leaf.grad is not before and id(leaf) not in by_torch]
        if not by_torch and not written:
            raise InvalidArgument(
                "backward= left no gradient in any parameter: it has to add them to .grad, as loss.backward() does and "
                "torch.autograd.grad() does not"
            )
        for leaf in written:
            if leaf.dtype in NARROW:
                raise InvalidArgument(
                    f"backward= adds to .grad of a parameter in {leaf.dtype} itself, which rounds small gradients away"
                    f": run loss.backward(), and gradients are summed in float32"
                )
