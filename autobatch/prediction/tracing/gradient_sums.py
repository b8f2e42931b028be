"""Recognises the sums of gradients that autograd makes in place on a card.

torch adds up gradients that meet in the backward pass in place if nobody else holds the first one
(``torch/csrc/autograd/input_buffer.cpp``), but never with fake tensors or while a dispatch mode is active: that would
count a copy that a GPU does not have. So these sums are recognised by who called the operator and by how many hold its
first argument. Does not cover sums that the step itself makes.
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

__all__ = ["Holders", "holders_of", "sole_holder"]

Holders = tuple[int, int, int]
"""Counts of a gradient: who holds the tensor in C++, its storage, and the tensor in Python. Ours are among them."""


def holders_of(args: tuple[Any, ...]) -> Holders | None:
    """How many hold the first of two gradients that autograd adds; ``None`` for any other sum.

    ``args`` are those of ``aten.add.Tensor``; a dispatch mode's ``__torch_dispatch__`` must be the caller.
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
    """What ``holders_of`` returns where autograd alone holds the gradient; needs an active ``FakeMode``.

    The counts depend on the versions of torch and Python, so they are looked at once in a process, on three sums of
    which two have another holder. ``None`` where these look the same: then every sum is taken for one that is
    allocated, so that too much memory is predicted, and never too little.
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
    """While active, notes the holders of each sum and makes it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Holders | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator as it is."""
        if func is torch.ops.aten.add.Tensor:
            self.seen.append(holders_of(args))
        return func(*args, **(kwargs or {}))


def _try_sum(branch: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Holders | None:
    """What is seen of two gradients that meet, of which ``branch`` may have somebody hold the first."""
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
