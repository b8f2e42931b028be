"""Calls a function of the user that must not change the batch, such as ``weigh``.

Covers containers, which it gets as its own, and tensors by torch's count of writes: a write is refused and stays. Does
not cover writes into NumPy arrays and through ``.data``, nor the step's (``training.batch_mutation``).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch

from autobatch._user_errors import note_where
from autobatch.batch.tree import tensors_of, with_fresh_containers
from autobatch.errors import InvalidArgument

__all__ = ["call_read_only"]

_VERSION = attrgetter("_version")


def call_read_only(
    name: str, function: Callable[..., Any], batch: Any, *others: Any, called_by: str = "autobatch"
) -> Any:
    """What the function returns for a batch.

    Args:
        name: What the user calls it.
        function: The user's.
        batch: Of which it gets new containers with the same tensors.
        others: What it is called with beside that.
        called_by: Public function that calls it, for the note on an error of the user's.

    Raises:
        InvalidArgument: It wrote into a tensor.
    """
    tensors = [*filterfalse(torch.Tensor.is_inference, tensors_of(batch))]
    versions = [*map(_VERSION, tensors)]
    try:
        answer = function(with_fresh_containers(batch), *others)
    except Exception as error:
        note_where(error, f"your {name}(batch{', largest' if others else ''})", called_by)
        raise
    if [*map(_VERSION, tensors)] != versions:
        raise InvalidArgument(
            f"{name}() wrote into its batch in place, and the samples stay as it left them: use a copy"
        )
    return answer
