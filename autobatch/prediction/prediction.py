"""Defines ``Prediction``: what ``predict`` returns, and what a user does with it: print, explain, show in a notebook.

Does not cover the data itself (``record``) nor its texts (``text``). Nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autobatch.prediction import text
from autobatch.prediction.record import PredictionRecord
from autobatch.prediction.tables import charts
from autobatch.report.pictures import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Prediction"]


class Prediction(PredictionRecord):
    """What one training step would need on a card that need not be there; frozen, and equal by content.

    Example:
        >>> prediction = autobatch.predict(model, batch=batch, step=step, gpu="L4")  # doctest: +SKIP
        >>> print(prediction)  # doctest: +SKIP
        autobatch: predicted on L4: 256 = 6 x 43 (two of 42); peak 18.1 GiB of 22.0 GiB; nothing was run, 1.9 s
    """

    def __str__(self) -> str:
        """The prediction in one line."""
        return text.summarise_prediction(self)

    def __repr__(self) -> str:
        """The same line, in a REPL too."""
        return str(self)

    @property
    def micro_batch_size(self) -> int:
        """That of ``plan``; 0 where not even one sample fits."""
        return self.plan.micro_batch_size if self.plan else 0

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Those of ``plan``; empty where not even one sample fits."""
        return self.plan.micro_batch_sizes if self.plan else ()

    @property
    def accumulation_steps(self) -> int:
        """Those of ``plan``; 0 where not even one sample fits."""
        return self.plan.accumulation_steps if self.plan else 0

    def explain(self) -> str:
        """The whole story as text: what fits, where the memory goes, what would help, all cards."""
        return text.explain_prediction(self)

    def explain_cards(self) -> str:
        """The same step on the cards of ``cards``, as a table."""
        return text.explain_cards(self)

    def plot(self, kind: str = "peak", ax: Axes | None = None) -> Axes:
        """Draw the prediction with matplotlib, which ``torch-autobatch[plot]`` installs.

        Args:
            kind: ``"peak"`` for the memory curve and the card's memory, ``"memory"`` for where that memory goes.
            ax: Axes to draw on; default: those of a new figure.

        Raises:
            InvalidArgument: The kind is unknown, or matplotlib is not installed.
        """
        return plot(charts(self), kind, ax)

    def _repr_html_(self) -> str:
        """What a notebook shows for a prediction: the same with pictures and in tables."""
        return text.render_prediction(self)
