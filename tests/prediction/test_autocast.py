"""``autobatch.prediction.tracing.autocast``: CUDA's rules on the fake device."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F

from autobatch.prediction.tracing import autocast
from autobatch.prediction.tracing.fake_device import DEVICE, DEVICE_TYPE, present
from autobatch.prediction.tracing.recording import FakeMode

pytestmark = [pytest.mark.apart, pytest.mark.predicts]


@contextmanager
def fake():
    """The device, fake tensors on it, and autocast for CUDA and the host taken for its own."""
    with present(), FakeMode(), autocast.redirect(DEVICE_TYPE, {"cuda", "cpu"}):
        yield


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, w: a @ w, torch.bfloat16),
        (F.linear, torch.bfloat16),
        (lambda a, w: (a @ w).softmax(-1), torch.float32),
        (lambda a, w: (a @ w).sum(), torch.float32),
        (lambda a, w: F.layer_norm(a @ w, (8,)), torch.float32),
        (lambda a, w: (a @ w).exp(), torch.float32),
        (lambda a, w: F.relu(a @ w), torch.bfloat16),
        (lambda a, w: torch.addcmul(a, a @ w, a), torch.float32),
        (lambda a, w: F.cross_entropy(a @ w, torch.zeros(8, dtype=torch.long, device=DEVICE)), torch.float32),
        (lambda a, w: a.double() @ w.double(), torch.float64),
    ],
)
@fake()
def test_operators_run_in_the_precision_that_cuda_gives_them(function, expected):
    """Products in the lower one, sums and exponentials in float32, the rest as it comes."""
    tensors = [torch.empty(8, 8, device=DEVICE) for _ in range(2)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert function(*tensors).dtype == expected
    assert (tensors[0] @ tensors[1]).dtype == torch.float32


@fake()
def test_regions_may_be_older_than_the_trace_and_nested():
    """A region object that names CUDA means the fake device while it is entered, and is as before afterwards."""
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    region.device = "cuda"
    weight = torch.empty(8, 8, device=DEVICE)
    with region:
        with torch.autocast("cuda", enabled=False):
            assert (weight @ weight).dtype == torch.float32
        assert (weight @ weight).dtype == torch.bfloat16
    assert region.device == "cuda"


def _cast_of(product):
    transposed = product.grad_fn.next_functions[1][0]
    return transposed.next_functions[0][0]


@fake()
def test_a_weights_copy_is_made_once_in_a_region():
    """The copy of a leaf that needs a gradient is shared until the outermost region ends; of others it is not."""
    weight = torch.nn.Parameter(torch.empty(8, 8, device=DEVICE))
    inputs = torch.empty(8, 8, device=DEVICE)
    with torch.autocast("cuda", dtype=torch.float16):
        first, second = (_cast_of(F.linear(inputs, weight)) for _ in range(2))
        assert first is second
    with torch.autocast("cuda", dtype=torch.float16):
        assert _cast_of(F.linear(inputs, weight)) is not first
