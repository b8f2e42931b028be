"""The hierarchy of errors: what a user can rely on when catching one. Other tests hold their messages."""

from __future__ import annotations

import inspect
import pickle

import pytest

from autobatch import errors

pytestmark = pytest.mark.quick

EVERY_NAME = sorted(errors.__all__)


def test_all_lists_every_error() -> None:
    """No error is defined without being public, and no public name is missing."""
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_one_except_clause_catches_all(name: str) -> None:
    """``except AutobatchError`` catches each of them and ``except Exception`` too."""
    with pytest.raises(errors.AutobatchError, match=r"^17 samples$"):
        raise getattr(errors, name)("17 samples")


def test_wrong_input_is_also_the_builtin_error() -> None:
    """Code that knows nothing of autobatch catches a wrong argument as Python's own error."""
    assert issubclass(errors.InvalidArgument, ValueError)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_no_error_passes_for_an_oom(name: str) -> None:
    """None is a RuntimeError or MemoryError, so that no retry loop around autobatch takes it for the end of memory."""
    assert not issubclass(getattr(errors, name), (RuntimeError, MemoryError))


@pytest.mark.parametrize("name", EVERY_NAME)
def test_errors_cross_processes(name: str) -> None:
    """An error raised in a worker arrives as the same type with the same message."""
    error = getattr(errors, name)("needs 3.0 GiB")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "needs 3.0 GiB"
