"""Plans, predicts and verifies for a model that the command line names: ``autobatch fit``, ``predict``, ``verify``.

``fit``, ``predict`` and ``verify`` check the values. Errors of the user's code come out unchanged.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autobatch._formatting import show_value
from autobatch.cli.output import DONE, NO, Answer, check_folder, find_kind, read_count, refusals_of, save_plan
from autobatch.errors import InvalidArgument
from autobatch.exactness.verification import verify
from autobatch.fitting.fit import fit
from autobatch.prediction.parallelism import STRATEGIES
from autobatch.prediction.predict import predict
from autobatch.prediction.prediction import Prediction
from autobatch.prediction.text import explain_changes

_KNOWN = inspect.signature(fit).parameters
"""Keys that a user's function may return."""

_ANY_CARD = "H100-80GB"
"""Card of the first prediction of ``--all``."""


def configure_fit(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "Runs a few sizes for real, inside the budget, and plans the target batch."
    _add_source(command)
    _add_target(command)
    command.add_argument("--budget", metavar="SIZE", help="what the process may hold, such as 8GiB; default: all free")
    command.add_argument(
        "--headroom", type=_read_headroom, metavar="SIZE", help="left free of it: a size, or a fraction such as 0.1"
    )
    command.add_argument("--max-micro-batch", type=read_count, metavar="N", help="never try more samples than this")
    command.add_argument(
        "--objective",
        choices=("throughput", "memory"),
        help="the fewest steps, or the smallest micro-batch within 2 percent of the best rate",
    )
    command.add_argument(
        "--no-reuse",
        dest="reuse",
        action="store_const",
        const=False,
        help="search, even if an earlier plan could be confirmed",
    )
    command.add_argument("--explain", action="store_true", help="the whole story instead of one line")
    command.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    command.set_defaults(run=_fit)


def configure_predict(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "Traces the step without running it. Exit code 1 where not even one sample fits."
    _add_source(command, nargs="?")
    _add_target(command)
    cards = command.add_mutually_exclusive_group()
    cards.add_argument(
        "--gpu", nargs="+", action="extend", metavar="NAME", help="such as L4 or 24GiB; default: the one here"
    )
    cards.add_argument("--all", dest="all_cards", action="store_true", help="every card that is known, in one table")
    command.add_argument("--world-size", type=read_count, metavar="N", help="ranks that share the target; default: one")
    command.add_argument(
        "--data-parallel",
        choices=STRATEGIES,
        help="how they share the model: each has all of it (ddp), or a shard (fsdp2)",
    )
    command.add_argument(
        "--margin", type=float, metavar="SHARE", help="left free on top of the prediction, such as 0.1"
    )
    command.add_argument("--what-if", action="store_true", help="also trace what would help; takes some times as long")
    command.add_argument("--explain", action="store_true", help="the whole story instead of one line a card")
    command.add_argument("--save", metavar="FILE", help="write the plan for the (one) card as JSON")
    command.set_defaults(run=_predict)


def configure_verify(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "Compares the gradient of a few samples, whole and in parts. Exit code 1 where they differ."
    _add_source(command)
    command.set_defaults(run=_verify)


def _add_source(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    command.add_argument(
        "source",
        nargs=nargs,
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns a dict of what autobatch.fit takes, such as train:make",
    )


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target",
        dest="target_batch",
        type=read_count,
        metavar="N",
        help="samples that one optimizer step should see",
    )


def _read_headroom(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _fit(options: argparse.Namespace) -> Answer:
    check_folder("--save", options.save)
    arguments = _load(options.source, fit) | _read_options(options, fit) | _without_doubles(options)
    if "target_batch" not in arguments:
        raise InvalidArgument(f"say --target: {options.source!r} returned no 'target_batch'")
    plan = fit(**arguments)
    if options.save:
        save_plan(plan, options.save)
    lines = [plan.explain()] if options.explain else [str(plan), *(f"! {warning}" for warning in plan.warnings)]
    return Answer("\n".join(lines), plan)


def _predict(options: argparse.Namespace) -> Answer:
    check_folder("--save", options.save)
    source = options.source
    if source is None and options.gpu and ":" in options.gpu[-1]:  # --gpu L4 train:make, where it took both
        *options.gpu, source = options.gpu
    if source is None:
        raise InvalidArgument("pass MODULE:FUNCTION, your function that returns the model, such as train:make")
    cards = options.gpu or ([_ANY_CARD] if options.all_cards else [None])
    if options.save and len(cards) > 1:
        raise InvalidArgument(f"--save writes one plan, and {len(cards)} cards were named")
    arguments = _load(source, predict) | _read_options(options, predict) | _without_doubles(options)
    if cards == [None] and not torch.cuda.is_available():  # as predict() says it, with this command's options
        raise InvalidArgument(
            "no CUDA card here: name one as --gpu H100-80GB, or its memory as --gpu 24GiB, or ask for --all"
        )
    predictions = [predict(**{**arguments, "gpu": card}) for card in cards]
    plans = [prediction.plan for prediction in predictions if prediction.plan is not None]
    if options.save:
        if not plans:
            raise InvalidArgument(
                f"nothing to save in {options.save}: not even one sample fits {predictions[0].gpu.name}"
            )
        save_plan(plans[0], options.save)
    if options.explain:
        text = "\n\n".join(prediction.explain() for prediction in predictions)
    elif options.all_cards:
        text = _with_changes(predictions[0].explain_cards(), predictions[0])
    else:
        text = "\n".join(map(_summarise, predictions))
    return Answer(text, predictions, DONE if plans else NO)


def _without_doubles(options: argparse.Namespace) -> dict[str, bool]:
    """Return options that avoid lines twice: with ``--verbose`` the log has all that progress shows."""
    return {"progress": False} if options.verbose else {}


def _summarise(prediction: Prediction) -> str:
    return _with_changes("\n".join([str(prediction), *(f"! {warning}" for warning in prediction.warnings)]), prediction)


def _with_changes(text: str, prediction: Prediction) -> str:
    """Return the answer with the changes that would help, if ``--what-if`` was given."""
    changes = explain_changes(prediction)
    return f"{text}\n{changes}" if changes else text


def _verify(options: argparse.Namespace) -> Answer:
    arguments = _load(options.source, verify)
    if "batch" not in arguments:
        raise InvalidArgument(f"{options.source!r} returned no 'batch', and there is nothing to compare without one")
    verdict = verify(**arguments)
    return Answer(str(verdict), verdict, DONE if verdict.exact else NO)


def _read_options(options: argparse.Namespace, command: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that were given and that the function takes."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    return {name: given[name] for name in inspect.signature(command).parameters if name in given}


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
    is_file = name.endswith(".py")
    with refusals_of(show_value(source)):  # of this file alone: an error inside the user's code comes out unchanged
        here, path = str(Path.cwd()), Path(name)
        if is_file and find_kind(name, show_value(source)) != stat.S_IFREG:
            raise InvalidArgument(f"{source!r}: no file {path}")
        if is_file:
            path.open("rb").close()
        folders = (here, str(path.resolve().parent)) if is_file else (here,)
    for folder in folders:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return _import_file(path) if is_file else _import_module(name, source, here)


def _import_module(name: str, source: str, here: str) -> ModuleType:
    no_module = InvalidArgument(f"{source!r}: no module {name} here ({here}) or installed")
    if Path(name).name != name:  # a path, which import hooks may not expect
        raise no_module
    *packages, last = name.split(".")
    file = Path(here, *packages, f"{last}.py")
    if find_kind(str(file), show_value(source)) == stat.S_IFREG:
        with refusals_of(show_value(source)):
            file.open("rb").close()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An import inside the user's module fails with its own traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise no_module from None


def _import_file(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None  # noqa: S101 - narrows for mypy: the name ends in .py
    assert specification.loader is not None  # noqa: S101 - the same
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module
