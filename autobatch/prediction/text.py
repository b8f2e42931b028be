"""A prediction as text: one line, and the whole story.

Covers words and tables in 80 to 120 columns. Does not cover any estimate: every number shown stands in the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autobatch.wording import format_bytes, plural

if TYPE_CHECKING:
    from autobatch.prediction.record import Prediction

__all__ = ["explain_prediction", "summarise_prediction"]


def summarise_prediction(prediction: Prediction) -> str:
    """``autobatch: predicted on L4: 256 = 6 x 43; peak 18.1 of 22.0 GiB; nothing was run, 1.9 s``."""
    gpu = prediction.gpu
    if prediction.plan is None:
        least = prediction.points[0].reserved + prediction.context_bytes
        return (
            f"autobatch: predicted on {gpu.name}: not even one sample fits: {format_bytes(least)} of "
            f"{format_bytes(gpu.total_bytes)}; nothing was run, {prediction.seconds:.1f} s"
        )
    plan = prediction.plan
    peak = plan.peak_bytes + prediction.context_bytes
    return (
        f"autobatch: predicted on {gpu.name}: {plan.target_batch} = {plan.accumulation_steps} x "
        f"{plan.micro_batch_size}; peak {format_bytes(peak)} of {format_bytes(gpu.total_bytes)}; nothing was run, "
        f"{prediction.seconds:.1f} s"
    )


def explain_prediction(prediction: Prediction) -> str:
    """All that a prediction says, in sections; ends without a newline."""
    return "\n".join(
        [
            summarise_prediction(prediction),
            *_section(f"What fits on {prediction.gpu.name}", _reach_lines(prediction)),
            *_section(f"Where the memory goes at {plural(prediction.judged_size, 'sample')}", _part_lines(prediction)),
            *_section("Memory by size", _point_lines(prediction)),
            *_section("What would help", _change_lines(prediction)),
            *_section("Other cards", _card_lines(prediction)),
            *_section("How sure this is", _trust_lines(prediction)),
        ]
    )


def _section(title: str, lines: Iterator[str]) -> list[str]:
    body = [f"  {line}" for line in lines]
    return ["", title, *body] if body else []


def _reach_lines(prediction: Prediction) -> Iterator[str]:
    chosen = prediction.plan.micro_batch_size if prediction.plan else 0
    yield f"{chosen:>8}   with the margin: the plan"
    yield f"{prediction.reach.comfortable:>8}   without it, if the allocator never has to give memory back"
    yield f"{prediction.reach.tight:>8}   if it does, which costs time; more is predicted to be impossible"


def _part_lines(prediction: Prediction) -> Iterator[str]:
    for part in prediction.breakdown:
        yield f"{format_bytes(part.byte_count):>12}   {part.name}"
    yield f"{format_bytes(prediction.context_bytes):>12}   CUDA's own, outside the allocator"
    yield f"{format_bytes(prediction.per_sample_bytes):>12}   each sample more"
    for part in prediction.modules:
        yield f"{format_bytes(part.byte_count):>12}   in {part.name or 'the model itself, outside its submodules'}"


def _point_lines(prediction: Prediction) -> Iterator[str]:
    yield f"{'size':>8}{'allocated':>14}{'reserved':>14}"
    for point in prediction.points:
        yield f"{point.size:>8}{format_bytes(point.allocated):>14}{format_bytes(point.reserved):>14}"


def _change_lines(prediction: Prediction) -> Iterator[str]:
    for change in prediction.changes:
        if change.failed:
            yield f"{'?':>12}   {change.name}: {change.failed}"
            continue
        word = "less" if change.saved_bytes >= 0 else "more"
        saved = format_bytes(abs(change.saved_bytes))
        yield f"{saved:>12} {word}   {change.name}: micro-batches of up to {change.micro_batch_size}"
    if not prediction.changes:
        yield "ask with what_if=True: each change is traced, which takes about as long as this prediction did"


def _card_lines(prediction: Prediction) -> Iterator[str]:
    yield f"{'card':<32}{'memory':>10}{'micro-batch':>13}{'steps':>7}{'peak':>11}"
    for card in sorted(prediction.cards, key=lambda card: (card.total_bytes, card.gpu)):
        peak = format_bytes(card.peak_bytes) if card.micro_batch_size else "-"
        yield (
            f"{card.gpu:<32}{format_bytes(card.total_bytes):>10}{card.micro_batch_size or 'none':>13}"
            f"{card.accumulation_steps or '-':>7}{peak:>11}"
        )


def _trust_lines(prediction: Prediction) -> Iterator[str]:
    yield f"{prediction.margin:.0%} of the predicted peak is left free on top of it"
    if not prediction.gpu.context_measured:
        yield f"what CUDA takes for itself is a guess on this card ({prediction.gpu.context_source})"
    yield "what cuDNN takes is a rule fitted to one card; grouped convolutions may take more"
    if prediction.interpolated:
        yield "the step ran different operators at different sizes: sizes between those traced are estimates"
