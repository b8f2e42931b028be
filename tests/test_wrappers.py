"""The user's own objects inside wrappers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autobatch.wrappers import unwrap_model


def test_unwrap_model() -> None:
    """Under torch.compile and DistributedDataParallel lies the user's own module; having a `module` wraps nothing."""
    model = nn.Sequential()
    model.module = nn.Linear(3, 1)
    assert unwrap_model(model) is model
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert unwrap_model(torch.compile(DistributedDataParallel(model), backend="eager")) is model
    finally:
        torch.distributed.destroy_process_group()
