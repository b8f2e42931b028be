"""A deterministic step: a sample draws the same in any partition, no dropout, float32; afterwards all is as before."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autobatch.exactness.determinism import deterministic, widen

pytestmark = pytest.mark.quick


def attend(inputs):
    """The function by itself, with dropout and weights of ones: ``[length, samples, 3]`` to ``[samples, 3]``."""
    ones = torch.ones(9, 3)
    rates = {"dropout_p": 0.5, "training": True, "need_weights": False}
    bias = {"bias_k": None, "bias_v": None, "add_zero_attn": False}
    weights = {"in_proj_weight": ones, "in_proj_bias": None, "out_proj_weight": ones[:3], "out_proj_bias": None}
    return F.multi_head_attention_forward(inputs, inputs, inputs, 3, 1, **weights, **bias, **rates)[0].sum(0)


def draw_into(out, n):
    """What stands in ``out`` afterwards."""
    torch.randn((n, 3), out=out)
    return out


DRAWS = {
    "rand": lambda n: torch.rand(n, 3),
    "randn": lambda n: torch.randn(n, 3),
    "uniform_": lambda n: torch.empty(n, 3).uniform_(2, 4),
    "normal": lambda n: torch.normal(torch.ones(n, 3), 0.5),
    "normal_": lambda n: torch.empty(n, 3).normal_(),
    "randint": lambda n: torch.randint(10, (n, 3)),
    "random_": lambda n: torch.empty(n, 3).random_(0, 8),
    "exponential_": lambda n: torch.empty(n, 3).exponential_(),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 3), 0.3)),
    "bernoulli_ at its default": lambda n: torch.linspace(-1, 1, 3 * n).view(n, 3).bernoulli_(0.5),
    "bernoulli_ by a tensor": lambda n: torch.linspace(-1, 1, 3 * n).view(n, 3).bernoulli_(torch.tensor(0.5)),
    "randn out": lambda n: draw_into(torch.empty(0), n),
    "rrelu_": lambda n: F.rrelu_(-torch.ones(n, 3), training=True),
    "dropout_": lambda n: torch.dropout_(torch.ones(n, 3), 0.5, True),
    "scripted dropout": lambda n: torch.jit.script(nn.Dropout(0.5))(torch.ones(n, 3)),
    "attention": lambda n: attend(torch.ones(2, n, 3)),
    "dropout": lambda n: F.dropout(torch.ones(n, 3), 0.8),
    "multinomial": lambda n: torch.multinomial(torch.tensor([[0.2, 0.5, 0.3]]).repeat(n, 1), 2),
    "gamma": lambda n: torch.distributions.Gamma(torch.full((n, 3), 2.0), 1.0).sample(),
}


def draw_in_parts(draw, sizes):
    """What is drawn for a whole batch, and for its parts, joined."""
    samples, parts = sum(sizes), []
    with deterministic(nn.Linear(1, 1), []) as random:
        for first, last in [(0, samples), *itertools.pairwise([0, *itertools.accumulate(sizes)])]:
            random.begin(range(first, last), samples)
            parts.append(draw(last - first))
        random.end()
    return parts[0], torch.cat(parts[1:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("sizes", [(1, 6), (4, 3), (2, 2, 2, 1)])
def test_a_sample_draws_the_same_in_the_whole_and_in_any_part(name, sizes):
    """No draw depends on how the samples are divided; each call draws anew."""
    whole, parts = draw_in_parts(DRAWS[name], sizes)
    assert torch.equal(whole, parts)


def test_autocast_does_nothing_and_the_users_object_is_as_before():
    """An autocast of the user's is off while the step is deterministic, and on again afterwards."""
    model, autocast = nn.Linear(4, 4), torch.autocast("cpu", dtype=torch.bfloat16)
    with deterministic(model, [*model.parameters()]), autocast:
        assert model(torch.ones(1, 4)).dtype == torch.float32
    with autocast:
        assert model(torch.ones(1, 4)).dtype == torch.bfloat16


def test_half_precision_is_wide_inside_only():
    """Parameters, buffers and casts by hand are float32 inside, and what they were afterwards."""
    model = nn.BatchNorm1d(4).bfloat16()
    with deterministic(model, [*model.parameters()]):
        assert model(torch.randn(3, 4).bfloat16()).dtype == torch.float32
    assert {tensor.dtype for tensor in (model.weight, model.running_mean)} == {torch.bfloat16}


def test_everything_is_float64_where_that_is_asked_for():
    """Parameters, inputs, casts by hand and new tensors are float64 inside, and float32 afterwards."""
    model = nn.Linear(4, 4)
    with deterministic(model, [*model.parameters()], torch.float64):
        inputs = widen(torch.ones(2, 4), torch.float64) + torch.zeros(4)
        assert {model(inputs.float()).dtype, torch.zeros(2).dtype, inputs.to(torch.float32).dtype} == {torch.float64}
        assert torch.zeros(2, dtype=torch.int64).dtype == torch.int64
    assert model.weight.dtype == torch.zeros(2).dtype == torch.float32


def read_precision():
    """The older switches, read as a step may read them, and the newer ones."""
    backends = torch.backends
    newer = [operation.fp32_precision for operation in (backends.cuda.matmul, backends.mkldnn.matmul)]
    return torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, newer


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
@pytest.mark.parametrize("precision", [None, "highest", "high", "medium"])
def test_precision_is_full_inside_and_can_be_read_by_the_older_switches(precision):
    """Neither reading them nor a deterministic step raises or leaves anything changed."""
    try:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        before = read_precision()
        with deterministic(nn.Linear(1, 1), []):
            assert read_precision() == ("highest", False, ["ieee", "ieee"])
        assert read_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def run_threads(*actions):
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_autocast_of_another_thread_goes_on():
    """A deterministic step in one thread does not change what another computes."""
    found = []

    def use_autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(nn.Linear(4, 4)(torch.ones(1, 4)).dtype)

    with deterministic(nn.Linear(1, 1), []):
        run_threads(use_autocast)
    assert found == [torch.bfloat16]
