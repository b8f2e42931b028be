"""Runs a backward function of the user's own, such as a framework's, and refuses one that makes another gradient.

Covers that it is called for the loss once, and that what it multiplies the loss by is taken out again. Does not cover
what it does beside that: a hook that it calls, or an error that it raises, is as in ``loss.backward()``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autobatch._formatting import name_type, show_value
from autobatch.errors import InvalidArgument, InvalidStep

__all__ = ["Backward", "GivenBackward"]

Backward = Callable[[torch.Tensor], object]
"""Called with a scalar loss in place of ``loss.backward()``; what it returns is passed over."""


class GivenBackward:
    """Calls the user's function, once a micro-batch, and counts the backward passes that begin at the loss."""

    def __init__(self, function: Backward, *, is_scaled: bool) -> None:
        """Trust nothing yet.

        Args:
            function: The user's.
            is_scaled: Whether losses arrive scaled, so that the function may not scale them again.

        Raises:
            InvalidArgument: It cannot be called.
        """
        if not callable(function) or isinstance(function, type):
            shown = show_value(function) if isinstance(function, str | int | float) else name_type(function)
            raise InvalidArgument(
                f"backward={shown} cannot be called with a loss: pass backward(loss), such as accelerator.backward"
            )
        self._function, self._is_scaled, self._factor_is_known = function, is_scaled, False

    def __call__(self, loss: torch.Tensor) -> None:
        """Call it.

        Raises:
            InvalidStep: It ran no backward pass from this loss or several, or divided it once more.
        """
        arrived: list[torch.Tensor] = []
        loss.register_hook(arrived.append)
        self._function(loss)
        if len(arrived) != 1:
            ran = f"ran {len(arrived)} backward passes from the loss" if arrived else "ran no backward pass"
            raise InvalidStep(
                f"backward= {ran}: it has to run one, such as loss.backward(), on the loss that it is given"
            )
        if not self._factor_is_known:  # once: reading it waits for the device
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
        raise InvalidStep(
            f"backward= multiplies the loss by {factor:g}, and the Runner has divided it by the whole step's count "
            f"already: {remedy}"
        )
