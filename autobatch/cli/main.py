"""Defines the commands of ``autobatch``, runs one, and prints its answer or its error.

A command's module is imported when the command runs, so ``--help`` and commands without torch answer at once.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Annotated, Any, Literal

import typer
import typer.main

from autobatch._version import __version__
from autobatch.cli.declare import commands_of, option
from autobatch.cli.output import NO, USAGE, Answer
from autobatch.cli.serve import serve_app
from autobatch.errors import AutobatchError, InvalidArgument, NeedsBatch
from autobatch.torch_internals import import_torch

_MISUSE = (InvalidArgument, NeedsBatch)
_INTERRUPTED = 130
_FAILED = 70  # EX_SOFTWARE of sysexits.h
_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # typer gives it no public name

_EPILOG = """\
MODULE:FUNCTION names a function of yours without arguments, such as train:make or train.py:make. It returns a dict of
what autobatch.fit takes: model, and whichever of batch, step, optimizer, weigh ... it needs.

Exit codes: 0 done, and for gate: the job fits; 1 the answer is no (predict: does not fit; verify: not exact; doctor:
something is wrong; diff: plans differ), or it cannot be done (gate: the server cannot be asked); 2 the command line or
what it names cannot mean anything; 3 gate: the job does not fit; 70 an error in your own code, which comes out with its
traceback; 130 interrupted by Ctrl-C.
"""

app = typer.Typer(
    help="Memory-aware batching for PyTorch training: what fits, what would fit, and what was found before.",
    epilog=_EPILOG,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; the arguments are those of this process, unless given."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    try:
        # typer only reads the command line: it would change errors of the user's code.
        run = typer.main.get_command(app).main(arguments, prog_name="autobatch", standalone_mode=False)
        if not callable(run):  # --help and --version have printed all
            return 0
        with _logging(verbose="--verbose" in arguments), _only_json_on_stdout() if as_json else nullcontext():
            answer: Answer = run()
    except _USAGE_ERROR as error:
        answer = _refuse(InvalidArgument(_describe_usage(error)), as_json=as_json)
    except AutobatchError as error:
        answer = _refuse(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except Exception:  # noqa: BLE001 - mostly of the user's code: 1, Python's own code for it, is an answer here
        traceback.print_exc()
        return _FAILED
    return answer.write(as_json=as_json)


def _refuse(error: AutobatchError, *, as_json: bool) -> Answer:
    code = USAGE if isinstance(error, _MISUSE) else NO
    data = {"error": type(error).__name__, "message": str(error)}
    return Answer([f"autobatch: {error}"], data, code, to_stderr=not as_json)


def _describe_usage(error: Any) -> str:
    from pydantic import ValidationError  # noqa: PLC0415 - a quarter of the time that --help takes

    command = error.ctx.command_path if error.ctx else "autobatch"
    text, cause = error.format_message(), error.__cause__
    if isinstance(cause, ValidationError):  # typer reads values with pydantic
        from autobatch.records import spell_invalid  # noqa: PLC0415 - as above

        text = spell_invalid(cause, error.param.opts[0])
    return f"{' '.join(text.split()).rstrip('.')}; see {command} --help"


app.add_typer(serve_app, name="serve")
_command = commands_of(app)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer passes it so
    if wanted:
        sys.stdout.write(f"autobatch {__version__}\n")
        raise typer.Exit


@app.callback()
def _start(
    *, version: Annotated[bool, typer.Option("--version", callback=_print_version, help="Print the version.")] = False
) -> None:
    """Declare the option that needs no command."""


_SOURCE = typer.Argument(metavar="MODULE:FUNCTION", help="A function of yours, such as train:make.")
_TARGET = option("--target", "N", "Samples that one optimizer step should see.", min=1)
_PLAN = typer.Argument(metavar="ID|FILE", help="The beginning of a plan's id, or a file it was saved to.")
_SAVE = option("--save", "FILE", "Write the plan as JSON.")
_WORLD_SIZE = option("--world-size", "N", "Ranks that share the target; default: one.", min=1)
_DATA_PARALLEL = typer.Option(help="How they share the model: each has all of it (ddp), or a shard (fsdp2).")
_EXPLAIN = typer.Option("--explain", help="Print the whole story.")


@_command
def doctor() -> Answer:
    """Check drivers, packages, allocator settings and limits, and say what to type. Exit code 1 if one is wrong."""
    from autobatch.cli.doctor import check_machine  # noqa: PLC0415 - --help needs none of these

    return check_machine()


@_command
def devices() -> Answer:
    """List cards and the CPU: total and free memory, and who holds it."""
    from autobatch.cli.environment import list_devices  # noqa: PLC0415

    return list_devices()


@_command
def fit(
    *,
    source: Annotated[str, _SOURCE],
    target_batch: Annotated[int | None, _TARGET] = None,
    budget: Annotated[
        str | None, option("--budget", "SIZE", "What the process may hold, such as 8GiB; default: all free.")
    ] = None,
    headroom: Annotated[
        str | None, option("--headroom", "SIZE", "Left free of it: a size, or a fraction such as 0.1.")
    ] = None,
    max_micro_batch: Annotated[int | None, option("--max-micro-batch", "N", "Never try more samples.", min=1)] = None,
    objective: Annotated[
        Literal["throughput", "memory"] | None,
        typer.Option(help="The fewest steps, or the smallest micro-batch within 2 percent of the best rate."),
    ] = None,
    strategies: Annotated[
        Literal["auto"] | None,
        typer.Option(help="Let the loss run in chunks, or blocks in less memory, where a step then fits or is faster."),
    ] = None,
    no_reuse: Annotated[
        bool, typer.Option("--no-reuse", help="Search, even if an earlier plan could be confirmed.")
    ] = False,
    explain: Annotated[bool, _EXPLAIN] = False,
    save: Annotated[str | None, _SAVE] = None,
) -> Answer:
    """Run a few sizes within the budget and plan the target batch for this machine."""
    options = {"target_batch": target_batch, "budget": budget, "headroom": headroom, "objective": objective}
    options |= {"max_micro_batch": max_micro_batch, "strategies": strategies, "reuse": False if no_reuse else None}
    import_torch()
    from autobatch.cli.model_commands import fit_model  # noqa: PLC0415

    return fit_model(source, options, explain=explain, save=save)


@_command
def predict(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODULE:FUNCTION [NAME]...", help="A function of yours; cards may follow --gpu NAME."),
    ] = None,
    target_batch: Annotated[int | None, _TARGET] = None,
    gpu: Annotated[list[str] | None, option("--gpu", "NAME", "Such as L4 or 24GiB; default: the one here.")] = None,
    all_cards: Annotated[bool, typer.Option("--all", help="Every card that is known, in one table.")] = False,
    world_size: Annotated[int | None, _WORLD_SIZE] = None,
    data_parallel: Annotated[Literal["ddp", "fsdp2"] | None, _DATA_PARALLEL] = None,
    margin: Annotated[
        float | None, option("--margin", "SHARE", "Left free on top of the prediction, such as 0.1.")
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also trace what would help; takes several times as long.")
    ] = False,
    explain: Annotated[bool, _EXPLAIN] = False,
    save: Annotated[str | None, _SAVE] = None,
    share: Annotated[bool, typer.Option("--share", help="Hand the prediction in to AUTOBATCH_SERVER.")] = False,
) -> Answer:
    """Predict what fits a card that need not be here; nothing is run. Exit code 1 if not even one sample fits."""
    sources = [word for word in words or [] if ":" in word]
    cards = [*(gpu or []), *(word for word in words or [] if ":" not in word)]
    if len(sources) != 1:
        raise InvalidArgument("pass MODULE:FUNCTION, your function that returns the model, such as train:make")
    if all_cards and cards:
        raise InvalidArgument("--all is not allowed with --gpu; see autobatch predict --help")
    options: dict[str, Any] = {"target_batch": target_batch, "world_size": world_size, "data_parallel": data_parallel}
    options |= {"margin": margin, "what_if": what_if or None, "all_cards": all_cards or None}
    import_torch()
    from autobatch.cli.model_commands import predict_model  # noqa: PLC0415

    return predict_model(sources[0], cards, options, explain=explain, save=save, share=share)


@_command
def gate(
    *,
    source: Annotated[str, _SOURCE],
    gpu: Annotated[str, option("--gpu", "NAME", "The card that the job will get, such as H100-80GB or 24GiB.")],
    target_batch: Annotated[int | None, _TARGET] = None,
    limit: Annotated[
        str | None, option("--limit", "SIZE", "Bytes that the job may take, such as 76GiB; default: all.")
    ] = None,
    world_size: Annotated[int | None, _WORLD_SIZE] = None,
    data_parallel: Annotated[Literal["ddp", "fsdp2"] | None, _DATA_PARALLEL] = None,
) -> Answer:
    """Say whether a job fits, by the team's own errors of prediction. Exit code 3 if it does not."""
    options: dict[str, Any] = {"target_batch": target_batch, "gpu": gpu}
    options |= {"world_size": world_size, "data_parallel": data_parallel}
    import_torch()
    from autobatch.cli.model_commands import ask_gate  # noqa: PLC0415

    return ask_gate(source, options, limit)


@_command
def push(
    *,
    paths: Annotated[bool, typer.Option("--paths", help="Leave paths in the warnings of plans.")] = False,
) -> Answer:
    """Hand in all plans and runs that are stored here to AUTOBATCH_SERVER. Each is stored there once."""
    from autobatch.cli.team import push_ledger  # noqa: PLC0415

    return push_ledger(paths=paths)


@_command
def verify(*, source: Annotated[str, _SOURCE]) -> Answer:
    """Compare the gradient of a few samples, whole and in parts. Exit code 1 if they differ."""
    import_torch()
    from autobatch.cli.model_commands import verify_model  # noqa: PLC0415

    return verify_model(source)


@_command
def plans(
    *,
    model: Annotated[str | None, option("--model", "TEXT", "Only those with this in their model's class.")] = None,
    device: Annotated[str | None, option("--device", "TEXT", "Only those with this in their device's name.")] = None,
    limit: Annotated[int, option("--limit", "N", "At most so many.", min=1)] = 20,
) -> Answer:
    """List the plans that were stored, the newest first."""
    from autobatch.cli.plans import list_plans  # noqa: PLC0415

    return list_plans(model, device, limit)


@_command
def show(*, plan: Annotated[str, _PLAN]) -> Answer:
    """Show one plan and how its runs went."""
    from autobatch.cli.plans import show_stored  # noqa: PLC0415

    return show_stored(plan)


@_command
def diff(*, first: Annotated[str, _PLAN], second: Annotated[str, _PLAN]) -> Answer:
    """Compare two plans. Exit code 1 if they differ."""
    from autobatch.cli.plans import compare  # noqa: PLC0415

    return compare(first, second)


@_command
def report(
    *,
    plan: Annotated[str, _PLAN],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Default: autobatch-ID.html; - is stdout.")
    ] = None,
) -> Answer:
    """Write one plan and its runs as a page with pictures."""
    from autobatch.cli.plans import write_report  # noqa: PLC0415

    return write_report(plan, output)


@_command
def forget(
    *,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="The beginnings of their ids.")] = None,
    older_than: Annotated[float | None, option("--older-than", "DAYS", "All not stored or used since.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
) -> Answer:
    """Delete plans with their runs."""
    from autobatch.cli.plans import delete  # noqa: PLC0415

    return delete(ids or [], older_than, everything=everything)


@contextmanager
def _only_json_on_stdout() -> Iterator[None]:
    """Redirect to stderr all that the user's code, its libraries and processes print."""
    if sys.stdout is None or sys.stderr is None:
        raise InvalidArgument("--json needs a stdout and a stderr, and one of them is closed")
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@contextmanager
def _logging(*, verbose: bool) -> Iterator[None]:
    """Print warnings, and with ``verbose`` all other events; the plan is in the answer."""
    logger, handler = logging.getLogger("autobatch"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    handler.addFilter(lambda _: not any(map(_writes_to_terminal, logging.getLogger().handlers)))
    level = logger.level
    if verbose:
        logger.setLevel(logging.DEBUG)
    else:
        handler.setLevel(logging.WARNING)
        handler.addFilter(lambda record: record.funcName != "log_event")
    logger.addHandler(handler)
    logger.addFilter(_is_no_plan)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_plan)
        logger.removeHandler(handler)
        logger.setLevel(level)


def _is_no_plan(record: logging.LogRecord) -> bool:
    return not isinstance(record.args, tuple) or "PlanMade" not in {type(one).__name__ for one in record.args}


def _writes_to_terminal(handler: logging.Handler) -> bool:
    """Return whether the user's code logs to the terminal already, so that each line would be there twice."""
    stream = getattr(handler, "stream", None)
    return stream is not None and stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
