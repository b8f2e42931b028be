"""Runs a command: parses the command line, prints the answer or the error, and returns the exit code.

A command's module is imported when the command runs, so ``--help`` and commands without torch answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import NoReturn

from autobatch._version import __version__
from autobatch.cli.output import NO, USAGE, Answer
from autobatch.errors import AutobatchError, InvalidArgument, NeedsBatch
from autobatch.events import PlanMade
from autobatch.torch_internals import import_torch

_MISUSE = (InvalidArgument, NeedsBatch)
_INTERRUPTED = 130
_COMMANDS = {
    "fit": ("model_commands", "run a few sizes and plan the target batch for this machine"),
    "predict": ("model_commands", "what would fit a card that is not here, and where the memory would go"),
    "verify": ("model_commands", "is splitting this step exact, and if not, why?"),
    "devices": ("environment", "cards and the CPU: total, free, and who holds what"),
    "plans": ("plans", "plans that were stored, the newest first"),
    "show": ("plans", "one plan and how its runs went, as text"),
    "diff": ("plans", "what differs between two plans"),
    "report": ("plans", "one plan and its runs as a page with pictures"),
    "forget": ("plans", "delete plans with their runs"),
    "doctor": ("doctor", "drivers, packages, allocator settings, limits: what is wrong, and what to type"),
}
"""Module and help of each command."""

_EPILOG = """\
MODULE:FUNCTION names a function of yours without arguments, such as train:make or train.py:make, that returns a dict
of what autobatch.fit takes: model, and whichever of batch, step, optimizer, weigh ... it needs.

a day with it:
  autobatch doctor                           is everything here as it should be?
  autobatch fit train:make --target 256      what fits on this machine; the plan is stored
  autobatch plans                            all plans that were stored, the newest first
  autobatch show 5f3a                        one of them, and how its runs went
  autobatch diff 5f3a 91bc                   what changed between two
  autobatch report 5f3a -o plan.html         the same as a page with pictures
  autobatch predict train:make --all         which card would do; none is needed for that

exit codes: 0 done, 1 done and the answer is no (does not fit, not exact, something is wrong, plans differ),
2 the command line or what it names cannot mean anything. Errors in your own code come out with their traceback.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; the arguments are those of this process, unless given."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    try:
        options = _make_parser(arguments[0] if arguments else "").parse_args(arguments)
        as_json = options.json
        with _logging(verbose=options.verbose), _only_json_on_stdout() if as_json else nullcontext():
            answer: Answer = options.run(options)
    except AutobatchError as error:
        code = USAGE if isinstance(error, _MISUSE) else NO
        refusal = Answer(f"autobatch: {error}", {"error": type(error).__name__, "message": str(error)}, code)
        return _write(refusal, as_json=as_json, to_stderr=not as_json)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return _write(answer, as_json=as_json)


class _Parser(argparse.ArgumentParser):
    """A parser that raises ``InvalidArgument``, which is shown in one line or as JSON."""

    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(f"{message}; see {self.prog} --help")


def _make_parser(chosen: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="autobatch",
        description="Memory-aware batching for PyTorch training: what fits, what would fit, and what was found before.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"autobatch {__version__}")
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the answer as JSON")
    common.add_argument("--verbose", action="store_true", help="print each event on stderr")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, parents=[common], help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            if module == "model_commands":
                import_torch()
            getattr(importlib.import_module(f"autobatch.cli.{module}"), f"configure_{name}")(command)
    return parser


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
    return not isinstance(record.args, tuple) or not any(isinstance(one, PlanMade) for one in record.args)


def _writes_to_terminal(handler: logging.Handler) -> bool:
    """Return whether the user's code logs to the terminal already, so that each line would be there twice."""
    stream = getattr(handler, "stream", None)
    return stream is not None and stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


def _encodable(text: str, encoding: str | None) -> str:
    r"""Return the text with ``\xe9`` for letters that the encoding lacks, such as ASCII in a container."""
    return text if encoding is None else text.encode(encoding, "backslashreplace").decode(encoding)


def _write(answer: Answer, *, as_json: bool, to_stderr: bool = False) -> int:
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is None:  # closed by whoever started this
        return USAGE
    try:
        stream.write(f"{_encodable(answer.show(as_json=as_json), stream.encoding)}\n")
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python's own last flush must not raise
        if isinstance(error, BrokenPipeError):  # the reader, such as head, has seen enough
            return answer.code
        unwritten = Answer(f"autobatch: the answer cannot be written: {error}", None, USAGE)
        return USAGE if to_stderr else _write(unwritten, as_json=False, to_stderr=True)
    return answer.code
