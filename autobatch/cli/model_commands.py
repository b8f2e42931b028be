"""Plans, predicts and verifies a model that the command line names: ``fit``, ``predict``, ``gate`` and ``verify``.

``fit``, ``predict`` and ``verify`` check the values. Errors of the user's code come out unchanged.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autobatch._arguments import parse_bytes
from autobatch._formatting import show_value
from autobatch.cli.output import DONE, NO, Answer, Table, check_folder, refusals_of, save_plan
from autobatch.cli.team import describe_judgement, find_server, judge, share_predictions
from autobatch.errors import InvalidArgument
from autobatch.exactness.verification import verify
from autobatch.fitting.fit import fit
from autobatch.prediction.predict import predict
from autobatch.prediction.prediction import Prediction
from autobatch.prediction.text import CARD_HEADINGS, card_rows, explain_changes, explain_table

_KNOWN = inspect.signature(fit).parameters
"""Keys that a user's function may return."""

_ANY_CARD = "H100-80GB"
"""Card of the first prediction of ``--all``."""


def fit_model(source: str, options: Mapping[str, Any], *, explain: bool, save: str | None) -> Answer:
    check_folder("--save", save)
    arguments = _load(source, fit) | _given(options) | _without_doubles()
    if headroom := options["headroom"]:
        with suppress(ValueError):  # a size such as 1GiB
            arguments["headroom"] = int(headroom) if headroom.isdecimal() else float(headroom)
    if "target_batch" not in arguments:
        raise InvalidArgument(f"say --target: {source!r} returned no 'target_batch'")
    plan = fit(**arguments)
    if save:
        save_plan(plan, save)
    return Answer([plan.explain()] if explain else [str(plan), *(f"! {warning}" for warning in plan.warnings)], plan)


def predict_model(
    source: str, cards: Sequence[str], options: Mapping[str, Any], *, explain: bool, save: str | None, share: bool
) -> Answer:
    check_folder("--save", save)
    if share:
        find_server("--share")
    all_cards = bool(options["all_cards"])
    if save and len(cards) > 1:
        raise InvalidArgument(f"--save writes one plan, and {len(cards)} cards were named")
    arguments = _load(source, predict) | _given(options) | _without_doubles()
    if not cards and not all_cards and not torch.cuda.is_available():  # as predict() says it, with these options
        raise InvalidArgument(
            "no CUDA card here: name one as --gpu H100-80GB, or its memory as --gpu 24GiB, or ask for --all"
        )
    named: Sequence[str | None] = cards or ([_ANY_CARD] if all_cards else [None])
    predictions = [predict(**{**arguments, "gpu": card}) for card in named]
    plans = [prediction.plan for prediction in predictions if prediction.plan is not None]
    if save:
        if not plans:
            raise InvalidArgument(f"nothing to save in {save}: not even one sample fits {predictions[0].gpu.name}")
        save_plan(plans[0], save)
    shared = [share_predictions(predictions)] if share else []
    body: list[str | Table]
    if explain:
        body = ["\n\n".join(prediction.explain() for prediction in predictions)]
    elif all_cards:
        header, *notes = explain_table(predictions[0])
        table = Table(card_rows(predictions[0]), CARD_HEADINGS, right=range(1, len(CARD_HEADINGS)))
        body = [header, table, *notes, *filter(None, [explain_changes(predictions[0])])]
    else:
        body = ["\n".join(map(_summarise, predictions))]
    return Answer([*body, *shared], predictions, DONE if plans else NO)


def ask_gate(source: str, options: Mapping[str, Any], limit: str | None) -> Answer:
    limit_bytes = None if limit is None else parse_bytes("--limit", limit)
    arguments = _load(source, predict) | _given(options) | _without_doubles()
    prediction = predict(**arguments)
    answer = judge(prediction, limit_bytes)
    if not answer.fits:  # only now: what would help takes several times as long
        answer = judge(predict(**arguments, what_if=True), limit_bytes)
    return describe_judgement(answer, prediction.gpu.name)


def verify_model(source: str) -> Answer:
    arguments = _load(source, verify)
    if "batch" not in arguments:
        raise InvalidArgument(f"{source!r} returned no 'batch', and there is nothing to compare without one")
    verdict = verify(**arguments)
    return Answer([str(verdict)], verdict, DONE if verdict.exact else NO)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _without_doubles() -> dict[str, bool]:
    """Return the option that avoids lines twice: with ``--verbose`` the log has all that progress shows."""
    return {"progress": False} if logging.getLogger("autobatch").isEnabledFor(logging.DEBUG) else {}


def _summarise(prediction: Prediction) -> str:
    """Return the answer, its warnings, and the changes that would help if ``--what-if`` was given."""
    lines = [str(prediction), *(f"! {warning}" for warning in prediction.warnings), explain_changes(prediction)]
    return "\n".join(filter(None, lines))


def _load(source: str, command: Callable[..., Any]) -> dict[str, Any]:
    """Call the user's function and return the arguments of this command; other arguments of ``fit`` are left out.

    ``source`` is ``package.module:function`` or ``path/to/file.py:function``; modules are looked for here first.
    """
    found = _call(source)
    if not isinstance(found, Mapping) or "model" not in found:
        keys = f"a dict without 'model' ({', '.join(map(str, found))})" if isinstance(found, Mapping) else ""
        raise InvalidArgument(
            f"{source!r} returned {keys or type(found)}: return a dict such as "
            f"{{'model': model, 'batch': batch, 'step': step, 'optimizer': optimizer}}"
        )
    names = [name for name in inspect.signature(command).parameters if name in _KNOWN]
    unknown = sorted(str(key) for key in found.keys() - _KNOWN.keys())
    if unknown:
        raise InvalidArgument(f"{source!r} returned {', '.join(map(repr, unknown))}; known are {', '.join(names)}")
    return {name: found[name] for name in names if name in found}


def _call(source: str) -> Any:
    name, _, function_name = source.rpartition(":")
    is_relative = name.startswith(".") and not name.endswith(".py")
    if not name or is_relative or not function_name.isidentifier():
        raise InvalidArgument(f"{source!r} is not MODULE:FUNCTION, such as train:make or train.py:make")
    arguments, sys.argv = sys.argv, [name]  # a script may read its arguments on import, and must not find ours
    try:
        function = getattr(_import(name, source), function_name, None)
        if not callable(function):
            raise InvalidArgument(f"{source!r}: {name} has no function {function_name}")
        try:
            inspect.signature(function).bind()
        except TypeError:
            raise InvalidArgument(f"{source!r} takes arguments: name a function that can be called with none") from None
        except ValueError:  # a builtin without a signature
            pass
        return function()
    finally:
        sys.argv = arguments


def _import(name: str, source: str) -> ModuleType:
    """Import a file or a module, looked for here first; errors of the user's code come out unchanged."""
    here, path = Path.cwd(), Path(name)
    folders = [str(here)]
    if name.endswith(".py"):
        with refusals_of(show_value(source)):
            if not path.is_file():
                raise InvalidArgument(f"{source!r}: no file {path}")
            path.open("rb").close()
        folders.append(str(path.resolve().parent))
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    if name.endswith(".py"):
        specification: Any = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An import inside the user's module fails with its own traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InvalidArgument(
            f"{show_value(source)}: no module {show_value(name)} here ({here}) or installed"
        ) from None
