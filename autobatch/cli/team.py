"""Talks to the team's server: ``autobatch push``, ``gate`` and ``predict --share``. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from autobatch._formatting import format_bytes, plural
from autobatch._version import __version__
from autobatch.cli.output import DONE, TOO_LARGE, Answer
from autobatch.cli.plans import open_store
from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.ledger.courier import Courier
from autobatch.ledger.ledger import find_home
from autobatch.ledger.server import Refused, Server, ServerAway
from autobatch.ledger.wire import cut, host_name, take
from autobatch.prediction.prediction import Prediction
from autobatch.service.comparison import decide
from autobatch.service.records import GateAnswer, GateQuestion, PredictedPoint, PredictionIn, Remedy

_GATE_S = 10.0  # somebody waits for the answer, and a job may hang on it


def find_server(why: str) -> Server:
    server = Server.named()
    if server is None:
        raise InvalidArgument(f"{why} needs a server: set AUTOBATCH_SERVER and AUTOBATCH_TOKEN")
    return server


def push_ledger(*, paths: bool) -> Answer:
    """Hand in all plans and runs of the local ledger, and what waits in its outbox."""
    server = find_server("push")
    with open_store():
        courier = Courier(find_home(), server)
        courier.paths = courier.paths or paths
        courier.note_everything()
        try:
            done = courier.hand_in(everything=True)
        except ServerAway as error:
            raise AutobatchError(
                f"the server {server.url} cannot be used ({error}); the rest is kept: push again later"
            ) from None
    if courier.refused:
        raise AutobatchError(
            f"the server {server.url} does not take {'; '.join(courier.refused)}; the rest is handed in"
        )
    text = f"{plural(done, 'record')} handed in to {server.url}"
    return Answer([text], {"server": server.url, "handed_in": done})


def share_predictions(predictions: Sequence[Prediction]) -> str:
    """Hand in predictions, or keep them for later; return a line about that."""
    server = find_server("--share")
    described = [describe_prediction(prediction) for prediction in predictions]
    with open_store():
        courier = Courier(find_home(), server)
        for one in described:
            courier.note_prediction(one)
        try:
            courier.hand_in()
        except ServerAway as error:
            return f"the server {server.url} cannot be used ({error}): the prediction is kept and handed in later"
    if courier.refused:
        raise AutobatchError(f"the server {server.url} does not take {'; '.join(courier.refused)}")
    return f"shared with {server.url}"


def describe_prediction(prediction: Prediction) -> PredictionIn:
    """Return what a server needs of a prediction; the same prediction has the same id."""
    plan, gpu = prediction.plan, prediction.gpu
    fields: dict[str, Any] = {
        **take(prediction, "step", "context_bytes", "target_batch", "world_size", "margin"),
        "host": host_name(),
        "model": cut(prediction.model),
        "card": cut(gpu.name),
        "card_names": tuple(cut(name) for name in gpu.aliases[:50]),
        "total_bytes": gpu.total_bytes,
        "micro_batch_size": plan.micro_batch_size if plan else 0,
        "points": tuple(PredictedPoint(size=one.size, reserved_bytes=one.reserved) for one in prediction.points[:500]),
        "remedies": tuple(
            Remedy(name=cut(one.name), effect=cut(one.effect), **take(one, "saved_bytes", "micro_batch_size"))
            for one in prediction.changes[:50]
            if not one.failed
        ),
        "version": __version__,
    }
    return PredictionIn(id=hashlib.sha256(repr(fields).encode()).hexdigest()[:32], made_at=time.time(), **fields)


def judge(prediction: Prediction, limit_bytes: int | None) -> GateAnswer:
    """Ask the server whether a step fits; if none is named, judge by the prediction's own margin."""
    described = describe_prediction(prediction)
    if limit_bytes is not None:  # what fits after a change was judged by the whole card
        remedies = tuple(one.model_copy(update={"micro_batch_size": 0}) for one in described.remedies)
        described = described.model_copy(update={"remedies": remedies})
    question = GateQuestion(prediction=described, limit_bytes=limit_bytes)
    server = Server.named()
    if server is not None:
        try:
            answer = server.ask_in_time("POST", "/gate", question.model_dump_json().encode(), seconds=_GATE_S)
            return GateAnswer.model_validate(answer)
        except (ServerAway, ValueError) as error:
            why = "the answer is not one of autobatch" if isinstance(error, ValueError) else error
            raise AutobatchError(
                f"the server {server.url} cannot be used ({why}), so its team's errors are not known; "
                f"unset AUTOBATCH_SERVER to judge by the prediction's own margin"
            ) from None
        except Refused as error:
            raise AutobatchError(f"the server {server.url} does not take this prediction: {error}") from None
    reason = "no server of a team was asked, and this is the prediction's own margin"
    return decide(question, []).model_copy(update={"margin_reason": reason})


def describe_judgement(answer: GateAnswer, card: str) -> Answer:
    """Return the answer of ``autobatch gate``, whose exit code a script reads."""
    limit, margin = format_bytes(answer.limit_bytes), f"margin {answer.margin:.1%}: {answer.margin_reason}"
    peak = f"peak {format_bytes(answer.peak_bytes)} of {limit} on {card}"
    if answer.fits:
        size, steps = (
            plural(answer.micro_batch_size, "sample"),
            plural(answer.accumulation_steps, "micro-batch", "micro-batches"),
        )
        return Answer([f"autobatch: fits: {steps} of at most {size}; {peak}; {margin}"], answer, DONE)
    lines = [f"autobatch: does not fit: {peak}; {margin}", *(f"- {advice}" for advice in answer.advice)]
    return Answer(lines, answer, TOO_LARGE)
