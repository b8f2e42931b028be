"""Defines ``Prediction``: what ``predict`` returns, and what you do with it: print, explain, show in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autobatch.prediction import text
from autobatch.prediction.record import PredictionRecord
from autobatch.prediction.tables import charts
from autobatch.report.pictures import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Prediction(PredictionRecord):
    """What one training step would need on a card; frozen, and equal by content.

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
        """As in ``plan``; 0 if not even one sample fits."""
        return self.plan.micro_batch_size if self.plan else 0

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """As in ``plan``; empty if not even one sample fits."""
        return self.plan.micro_batch_sizes if self.plan else ()

    @property
    def accumulation_steps(self) -> int:
        """As in ``plan``; 0 if not even one sample fits."""
        return self.plan.accumulation_steps if self.plan else 0

    def explain(self) -> str:
        """Explain the prediction: what fits, where the memory goes, what would help, all cards."""
        return text.explain_prediction(self)

    def explain_cards(self) -> str:
        """Show ``cards`` as a table."""
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
        """Show the prediction in a notebook, with pictures and tables."""
        return text.render_prediction(self)
