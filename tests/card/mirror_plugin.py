"""A plugin for pytest: the body of each test runs under ``Mirror``, without cuDNN, unless it is marked ``no_values``.

Fixtures have no values on the card. Loaded by ``tests/card/run``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mirror import Mirror

torch.backends.cudnn.enabled = False


def _print_from_host() -> None:
    """Let a tensor on the card be printed from a copy: printing leaves all modes, and would find no values."""
    formatter: Any = torch._tensor_str
    original = formatter._str

    def show(self: torch.Tensor, *, tensor_contents: Any = None) -> str:
        text: str = original(self.detach().cpu() if self.is_cuda else self, tensor_contents=tensor_contents)
        return text

    formatter._str = show


_print_from_host()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test in which an operator could not be computed: it has compared what happened to be in memory."""
    if item.get_closest_marker("no_values"):
        with torch.backends.cudnn.flags(enabled=True):
            yield
        return
    Mirror.missing.clear()
    with Mirror():  # type: ignore[no-untyped-call]
        yield
    assert not Mirror.missing, f"no values from {Mirror.missing}"
