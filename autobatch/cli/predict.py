"""Predicts what fits which card: the options and the answer of ``autobatch predict`` for one card, several, or all."""

from __future__ import annotations

import argparse

from autobatch.cli.model_source import add_source, load, take
from autobatch.cli.output import DONE, NO, Answer, check_folder, read_count, save_plan
from autobatch.errors import InvalidArgument
from autobatch.prediction.predict import predict
from autobatch.prediction.prediction import Prediction
from autobatch.prediction.text import explain_changes

__all__ = ["configure_predict"]

_TAKEN = ("model", "batch", "step", "optimizer", "weigh", "target_batch")
_ANY_CARD = "H100-80GB"
"""The card of the prediction that ``--all`` begins with."""


def configure_predict(command: argparse.ArgumentParser) -> None:
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
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> Answer:
    check_folder("--save", options.save)
    source = options.source
    if source is None and options.gpu and ":" in options.gpu[-1]:  # --gpu L4 train:make, where it took both
        *options.gpu, source = options.gpu
    if source is None:
        raise InvalidArgument("say MODULE:FUNCTION, a function of yours that returns the model, such as train:make")
    found = take(load(source), _TAKEN, source)
    if options.target is not None:
        found["target_batch"] = options.target
    cards = options.gpu or ([_ANY_CARD] if options.all else [None])
    if options.save and len(cards) > 1:
        raise InvalidArgument(f"--save writes one plan, and {len(cards)} cards were named")
    if options.margin is not None:
        found["margin"] = options.margin
    predictions = [predict(**found, gpu=card, what_if=options.what_if) for card in cards]
    plans = [prediction.plan for prediction in predictions if prediction.plan is not None]
    if options.save:
        if not plans:
            raise InvalidArgument(
                f"nothing to save in {options.save}: not even one sample fits {predictions[0].gpu.name}"
            )
        save_plan(plans[0], options.save)
    blocks = [prediction.explain() if options.explain else _summarise(prediction) for prediction in predictions]
    if options.all and not options.explain:
        blocks = [_with_changes(predictions[0].explain_cards(), predictions[0])]
    text = "\n\n".join(blocks) if options.explain else "\n".join(blocks)
    return Answer(text, predictions, DONE if plans else NO)


def _summarise(prediction: Prediction) -> str:
    return _with_changes("\n".join([str(prediction), *(f"! {warning}" for warning in prediction.warnings)]), prediction)


def _with_changes(text: str, prediction: Prediction) -> str:
    """Changes that would help are below the answer, where --what-if asked for them."""
    changes = explain_changes(prediction)
    return f"{text}\n{changes}" if changes else text
