"""How torch's allocator was set up, as far as it changes what a limit means."""

from __future__ import annotations

import pytest
import torch

from autobatch.memory.cuda import uses_expandable_segments


@pytest.mark.parametrize(
    ("environment", "expandable"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            False,
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            True,
        ),
    ],
    ids=str,
)
def test_the_environment_says_how_segments_are_made(monkeypatch, environment, expandable):
    """Where two variables do, the first counts, as torch 2.13 was seen to read them."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)  # as in older versions
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert uses_expandable_segments() == expandable
