"""The command line: which command is meant, what it answers, and how the process ends.

Covers the parser and the way of errors. Does not cover any command: each is a module, imported only when it is meant,
so that what needs no torch answers at once.
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
from autobatch.errors import AutobatchError, InvalidArgument, InvalidBatch, InvalidStep, NeedsBatch
from autobatch.torch_internals.silent_import import import_torch

__all__ = ["main"]

_MISUSE = (InvalidArgument, InvalidBatch, InvalidStep, NeedsBatch)
_INTERRUPTED = 130
_WITH_TORCH = ("fit", "predict", "verify")
_COMMANDS = {
    "fit": "run a few sizes and plan the target batch for this machine",
    "predict": "what would fit a card that is not here, and where the memory would go",
    "verify": "is splitting this step exact, and if not, why?",
    "devices": "cards and the CPU: total, free, and who holds what",
    "plans": "plans that were kept, the newest first",
    "show": "one plan and how its runs went, as text",
    "diff": "what differs between two plans",
    "report": "one plan and its runs as a page with pictures",
    "forget": "delete plans with their runs",
    "doctor": "drivers, packages, allocator settings, limits: what is wrong, and what to type",
}

_EPILOG = """\
MODULE:FUNCTION names a function of yours without arguments, such as train:make or train.py:make, that returns a dict
of what autobatch.fit takes: model, and whichever of batch, step, optimizer, weigh ... it needs.

a day with it:
  autobatch doctor                           is everything here as it should be?
  autobatch fit train:make --target 256      what fits on this machine; the plan is kept
  autobatch plans                            all plans that were kept, the newest first
  autobatch show 5f3a                        one of them, and how its runs went
  autobatch diff 5f3a 91bc                   what changed between two
  autobatch report 5f3a -o plan.html         the same as a page with pictures
  autobatch predict train:make --all         which card would do; none is needed for that

exit codes: 0 done, 1 done and the answer is no (does not fit, not exact, something is wrong, plans differ),
2 the command line or what it names cannot mean anything. Errors in your own code come out with their traceback.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; ``None`` for those of this process.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    try:
        options = _make_parser(arguments[0] if arguments else "").parse_args(arguments)
        as_json = options.json
        with _listening(verbose=options.verbose), _alone_on_stdout() if as_json else nullcontext():
            answer: Answer = options.run(options)
    except AutobatchError as error:
        return _put_out(_refuse(error), as_json=as_json, to_stderr=not as_json)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return _put_out(answer, as_json=as_json)


class _Parser(argparse.ArgumentParser):
    """One whose refusals are errors of ours: one line, or JSON."""

    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(f"{message}; {self.prog} --help says what can be asked")


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
    common.add_argument("--verbose", action="store_true", help="say on stderr what happens on the way")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, parents=[common], help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            if name in _WITH_TORCH:
                import_torch()
            module = importlib.import_module(f"autobatch.cli.{name}")
            module.configure(command)
            command.set_defaults(run=module.run)
    return parser


@contextmanager
def _alone_on_stdout() -> Iterator[None]:
    """What the user's own code prints, and its libraries and processes, is no part of the JSON: it goes to stderr."""
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
def _listening(*, verbose: bool) -> Iterator[None]:
    logger, handler = logging.getLogger("autobatch"), logging.StreamHandler()
    level = logger.level
    if verbose:
        logger.setLevel(logging.DEBUG)
    else:  # what is wrong, but not events: the answer says those itself
        handler.setLevel(logging.WARNING)
        handler.addFilter(lambda record: record.funcName != "log_event")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _refuse(error: AutobatchError) -> Answer:
    code = USAGE if isinstance(error, _MISUSE) else NO
    return Answer(f"autobatch: {error}", {"error": type(error).__name__, "message": str(error)}, code)


def _put_out(answer: Answer, *, as_json: bool, to_stderr: bool = False) -> int:
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is None:  # closed by whoever started this
        return USAGE
    try:
        stream.write(f"{answer.show(as_json=as_json)}\n")
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python's own last flush must not complain
        if isinstance(error, BrokenPipeError):  # the reader, such as head, has seen enough
            return answer.code
        return USAGE if to_stderr else _put_out(_explain_unwritten(error), as_json=False, to_stderr=True)
    return answer.code


def _explain_unwritten(error: OSError) -> Answer:
    return Answer(f"autobatch: the answer cannot be written: {error}", None, USAGE)
