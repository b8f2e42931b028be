"""Bugs planted on purpose, one file for each room of the package: the named tests must find each of them.

A bug is a function that runs in the place of a real one. Its docstring is the fault that a user would meet. It gets the
real function first, then the arguments of the call::

    @bug("autobatch.undo.random_state.RandomState.restore", "tests/undo/test_random_state.py")
    def generators_stay(real, self):
        \"\"\"A retried step draws other random numbers than its first attempt.\"\"\"

``make bugs`` plants each of them in processes of its own. In every run of the tests ``tests/api/test_planted_bugs.py``
checks that what they replace is there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

NAME_IN_ENVIRONMENT = "AUTOBATCH_PLANTED_BUG"


@dataclass(frozen=True)
class Bug:
    """A planted bug.

    Attributes:
        target: Dotted name of the function, method, property or constant that it replaces.
        tests: Files or tests of which one must fail.
        faulty: Runs in its place, with the real one as first argument. A constant becomes what it returns.
    """

    target: str
    tests: tuple[str, ...]
    faulty: Callable[..., Any]

    @property
    def name(self) -> str:
        """The function's name in words."""
        return self.faulty.__name__.replace("_", " ")

    @property
    def fault(self) -> str:
        """The sentence about what a user would meet."""
        return inspect.getdoc(self.faulty) or ""


_BUGS: list[Bug] = []


def bug(target: str, *tests: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a planted bug that these tests must find."""

    def add(faulty: Callable[..., Any]) -> Callable[..., Any]:
        _BUGS.append(Bug(target, tests, faulty))
        return faulty

    return add


def all_bugs() -> list[Bug]:
    """Read the bugs of all files of this folder."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_") and module.name != "plugin":
            importlib.import_module(f"{__name__}.{module.name}")
    return _BUGS


def plant(bug: Bug) -> None:
    """Replace the target in this process, also where modules have imported it by name."""
    owner, name, real = find(bug)
    faulty = _wrap(real, bug.faulty)
    setattr(owner, name, faulty)
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith("autobatch"):
            for key in [key for key, value in vars(module).items() if value is real]:
                setattr(module, key, faulty)


def find(bug: Bug) -> tuple[Any, str, Any]:
    """Return what holds the target, its name there, and the target."""
    *path, name = bug.target.split(".")
    owner: Any = None
    for end in range(len(path), 0, -1):
        module = ".".join(path[:end])
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # a library that is not installed
            continue
        break
    for part in path[end:]:
        owner = getattr(owner, part, None)
    if owner is None or not hasattr(owner, name):
        raise LookupError(f"{bug.target} is not there any more: let the bug {bug.name!r} follow, or drop it")
    real = inspect.getattr_static(owner, name)
    expected, found = [*_names_of(bug.faulty)][1:], [*_names_of(_function_of(real))]
    if "*" not in expected and callable(_function_of(real)) and expected != found:
        raise LookupError(f"{bug.target} takes {found}, and the bug {bug.name!r} takes {expected}")
    return owner, name, real


def _function_of(real: Any) -> Any:
    if isinstance(real, property):
        return real.fget
    return real.__func__ if isinstance(real, staticmethod | classmethod) else real


def _names_of(function: Any) -> Iterator[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a constant, or a function in C
        return
    for parameter in parameters:
        yield "*" if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD} else parameter.name


def _wrap(real: Any, faulty: Callable[..., Any]) -> Any:
    if isinstance(real, staticmethod | classmethod):
        return type(real)(_wrap(real.__func__, faulty))
    if isinstance(real, property):
        return property(_wrap(real.fget, faulty))
    if not callable(real):
        return faulty(real)

    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        return faulty(real, *arguments, **options)

    return call
