"""Recognises the sums of gradients that autograd makes in place on a card.

torch adds gradients that meet in place if nothing else holds the first one
(``torch/csrc/autograd/input_buffer.cpp``), but never with fake tensors or under a dispatch mode. A trace would then
count a copy that a GPU does not have. So the caller and the holders of the first argument show which sums these are.
"""

# ruff: noqa: SLF001 - torch has no public names for what those who add devices need

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autobatch.prediction.tracing.fake_device import DEVICE, original_errors
from autobatch.torch_internals.dispatch_mode import DispatchMode
from autobatch.torch_internals.storages import is_dense

Holders = tuple[int, int, int]
"""Reference counts of a gradient: the tensor in C++, its storage, the tensor in Python; with ours among them."""


def holders_of(args: tuple[Any, ...]) -> Holders | None:
    """Count the holders of the first of two gradients that autograd adds; ``None`` for any other sum.

    The caller must be the ``__torch_dispatch__`` of a mode.
    """
    first, second = args[:2]
    if torch.is_grad_enabled() or not isinstance(second, torch.Tensor) or first.shape != second.shape:
        return None
    caller = sys._getframe(2)
    while caller.f_code.co_name == "_fn" and caller.f_back is not None:
        caller = caller.f_back
    if caller.f_code.co_name != "_engine_run_backward" or first.dtype != second.dtype or not is_dense(first):
        return None
    in_storage: int = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    in_tensor: int = first._use_count()
    return in_tensor, in_storage, sys.getrefcount(first)


@cache
def sole_holder() -> Holders | None:
    """Return what ``holders_of`` does if autograd alone holds the gradient; needs an active ``FakeMode``.

    The counts depend on the versions of torch and Python. So three sums are tried once in a process, two of them with
    another holder. ``None`` if these look the same: then every sum counts as a new tensor, never too little.
    """
    held: list[Any] = []

    def hold_in_python(hidden: torch.Tensor, _oldest: torch.Tensor) -> torch.Tensor:
        branch = hidden.cos()
        branch.grad_fn.register_hook(lambda given, _: held.append(given))  # type: ignore[union-attr]
        return branch

    try:
        alone, by_python = _try_sum(lambda hidden, _: hidden.cos()), _try_sum(hold_in_python)
        # The gradient of a sum is that of both of its terms, and the older term waits for it longer.
        by_autograd = _try_sum(lambda hidden, oldest: (hidden + oldest).cos())
    except (AttributeError, RuntimeError, TypeError):  # a torch that counts nowhere, or elsewhere
        return None
    return None if alone in (by_python, by_autograd) else alone


class _Observer(DispatchMode):
    """Notes the holders of each sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Holders | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.seen.append(holders_of(args))
        return func(*args, **(kwargs or {}))


def _try_sum(branch: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Holders | None:
    """The holders of a gradient that meets another one, and that ``branch`` may hold."""
    with torch.enable_grad():
        oldest, hidden = (torch.empty(4, 4, device=DEVICE, requires_grad=True).exp() for _ in range(2))
        later = hidden.sin()
        sooner = branch(hidden, oldest)  # what was made last is differentiated first
        total = torch.stack([later.sum(), sooner.sum()]).sum()
    observer = _Observer()
    with observer, original_errors():
        total.backward()
    (seen,) = observer.seen
    return seen
