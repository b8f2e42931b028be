"""``autobatch predict``: what would fit which card, with none here.

Covers the options and the answer for one card, several, or all. Does not cover predicting (``prediction``).
"""

from __future__ import annotations

import argparse
from typing import Any

from autobatch.cli.model_source import KNOWN, add_source, load, take
from autobatch.cli.output import DONE, NO, Answer, check_folder, read_count, save_plan
from autobatch.errors import InvalidArgument
from autobatch.prediction.predict import predict
from autobatch.prediction.prediction import Prediction
from autobatch.prediction.text import explain_changes

__all__ = ["configure", "run"]

_TAKEN = ("model", "batch", "step", "optimizer", "weigh", "target_batch")
_ANY_CARD = "H100-80GB"
"""Whose prediction the table of all cards comes with, where none was named."""


def configure(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "Traces the step without running it. Exit code 1 where not even one sample fits."
    add_source(command, nargs="?")
    command.add_argument("--target", type=read_count, metavar="N", help="samples that one optimizer step should see")
    cards = command.add_mutually_exclusive_group()
    cards.add_argument(
        "--gpu", nargs="+", action="extend", metavar="NAME", help="such as L4 or 24GiB; default: the one here"
    )
    cards.add_argument("--all", action="store_true", help="every card that is known, in one table")
    command.add_argument(
        "--margin", type=float, metavar="SHARE", help="left free on top of the prediction, such as 0.1"
    )
    command.add_argument("--what-if", action="store_true", help="also trace what would help; takes some times as long")
    command.add_argument("--explain", action="store_true", help="the whole story instead of one line a card")
    command.add_argument("--save", metavar="FILE", help="write the plan for the (one) card as JSON")


def run(options: argparse.Namespace) -> Answer:
    """Load, predict for each card, and say what came of it."""
    check_folder("--save", options.save)
    source = options.source
    if source is None and options.gpu and ":" in options.gpu[-1]:  # --gpu L4 train:make, where it took both
        *options.gpu, source = options.gpu
    if source is None:
        raise InvalidArgument("say MODULE:FUNCTION, a function of yours that returns the model, such as train:make")
    found = take(load(source), _TAKEN, source, others=KNOWN)
    if options.target is not None:
        found["target_batch"] = options.target
    cards = options.gpu or ([_ANY_CARD] if options.all else [None])
    if options.save and len(cards) > 1:
        raise InvalidArgument(f"--save writes one plan, and {len(cards)} cards were named")
    predictions = [_predict(found, options, card) for card in cards]
    if options.save:
        _save(predictions[0], options.save)
    blocks = [prediction.explain() if options.explain else _summarise(prediction) for prediction in predictions]
    if options.all and not options.explain:
        blocks = [_with_changes(predictions[0].explain_cards(), predictions[0])]
    return Answer("\n\n".join(blocks) if options.explain else "\n".join(blocks), predictions, _judge(predictions))


def _summarise(prediction: Prediction) -> str:
    return _with_changes("\n".join([str(prediction), *(f"! {warning}" for warning in prediction.warnings)]), prediction)


def _with_changes(text: str, prediction: Prediction) -> str:
    """What was asked for with --what-if, below the answer."""
    changes = explain_changes(prediction)
    return f"{text}\n{changes}" if changes else text


def _predict(found: dict[str, Any], options: argparse.Namespace, card: str | None) -> Prediction:
    margin = {} if options.margin is None else {"margin": options.margin}
    return predict(**found, **margin, gpu=card, what_if=options.what_if)


def _save(prediction: Prediction, path: str) -> None:
    if prediction.plan is None:
        raise InvalidArgument(f"nothing to save in {path}: not even one sample fits {prediction.gpu.name}")
    save_plan(prediction.plan, path)


def _judge(predictions: list[Prediction]) -> int:
    return DONE if any(prediction.plan is not None for prediction in predictions) else NO
