"""The gradient of a whole batch from micro-batches: exact, and all or nothing."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from retrying import halve, retrying
from torch import nn
from torch.nn import functional as F
from workloads import (
    Everything,
    Plain,
    bits_of,
    differences,
    full_batch_gradient,
    gradients_of,
    make_batch,
    mean_step,
    relative_error,
)

from autobatch.batch.samples import describe
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.memory.cpu import CpuDevice
from autobatch.step.losses import Mean
from autobatch.step.workload import Workload
from autobatch.testing import FakeDevice, oom_at


def token_step(model, batch):
    """The mean over tokens that count, of sequences of which some are wholly ignored."""
    inputs, labels = batch["inputs"], batch["labels"]
    logits = model(inputs.flatten(0, 1))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100)


def make_tokens(lengths, width=5):
    """Padded sequences [samples, width, 6] whose labels are -100 beyond their length."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(len(lengths), width, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (len(lengths), width), generator=generator)
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = -100
    return {"inputs": inputs, "labels": labels, "source": "generated"}


def count_tokens(batch):
    return (batch["labels"] != -100).sum()


@given(samples=st.integers(1, 40), largest=st.integers(1, 45), checkpointed=st.booleans())
def test_the_split_gradient_is_the_full_batch_gradient(samples, largest, checkpointed):
    """For any batch and any micro-batch size, ragged or not, the gradient is the full batch's to 1e-12."""
    model = Plain(checkpointed=checkpointed)
    batch = make_batch(samples, torch.float64)
    expected = full_batch_gradient(model, mean_step, batch)
    done = retrying(Workload(model, mean_step), CpuDevice(), halve).run([describe(batch)], largest)
    assert relative_error(gradients_of(model), expected) <= 1e-12
    assert sum(done.micro_batch_sizes) == samples
    assert max(done.micro_batch_sizes) <= largest
    assert max(done.micro_batch_sizes) - min(done.micro_batch_sizes) <= 1
    assert torch.allclose(done.loss.value, mean_step(model, batch), rtol=1e-12)


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any), largest=st.integers(1, 12))
def test_a_token_mean_weighed_by_tokens_is_exact(lengths, largest):
    """Micro-batches of unequal token counts, also with none at all, give the token mean of the whole batch."""
    model, batch = Plain(), make_tokens(lengths)
    expected = full_batch_gradient(model, token_step, batch)
    retrying(Workload(model, token_step, count_tokens), CpuDevice(), halve).run([describe(batch)], largest)
    assert relative_error(gradients_of(model), expected) <= 1e-12


def test_sizes_33_33_33_1_are_weighed_by_their_samples():
    """The ragged tail of one sample gets 1 % of the weight, not a quarter."""
    model, batch = Plain(), make_batch(100, torch.float64)
    expected = full_batch_gradient(model, mean_step, batch)
    parts = list(zip(batch[0].split([33, 33, 33, 1]), batch[1].split([33, 33, 33, 1]), strict=True))
    done = retrying(Workload(model, mean_step), CpuDevice(), halve).run([describe(part) for part in parts], 33)
    assert done.micro_batch_sizes == (33, 33, 33, 1)
    assert relative_error(gradients_of(model), expected) <= 1e-12


def test_class_weights_are_exact_when_weighed_by_their_sum():
    """A class-weighted mean is over the sum of the classes' weights."""
    model, batch = Plain(), make_batch(23, torch.float64)
    weights = torch.tensor([0.1, 3.0, 1.0, 0.5], dtype=torch.float64)

    def step(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    expected = full_batch_gradient(model, step, batch)
    retrying(Workload(model, step, lambda b: weights[b[1]].sum()), CpuDevice(), halve).run([describe(batch)], 4)
    assert relative_error(gradients_of(model), expected) <= 1e-12


def test_earlier_gradients_are_added_and_keep_their_identity():
    """Gradients from before stay the same tensors and get the new ones added, as ``backward`` does."""
    model, batch = Plain(), make_batch(9, torch.float64)
    mean_step(model, batch).backward()
    earlier = {name: (grad, grad.clone()) for name, grad in gradients_of(model).items() if grad is not None}
    expected = full_batch_gradient(model, mean_step, batch)
    retrying(Workload(model, mean_step), CpuDevice(), halve).run([describe(batch)], 2)
    for name, (gradient, value) in earlier.items():
        assert gradients_of(model)[name] is gradient
        assert torch.allclose(gradient, value + expected[name], rtol=1e-12)


def test_an_unused_and_a_frozen_parameter_keep_none():
    """None stays None: AdamW's decay would move a parameter whose gradient became zero."""
    model = Everything()
    retrying(Workload(model, mean_step), CpuDevice(), halve).run([describe(make_batch(8))], 4)
    assert model.unused.weight.grad is None
    assert model.frozen.weight.grad is None
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("draw", [np.random.rand, np.random.randn, random.random], ids=["rand", "randn", "random"])
@pytest.mark.parametrize("quiet_steps", [0, 2])
def test_a_step_that_draws_from_python_or_numpy_draws_the_same_again(draw, quiet_steps):
    """Also one that begins to draw only after some steps."""
    draws, noisy = [], []

    def step(model, batch):
        loss = mean_step(model, batch)
        if not noisy:
            return loss
        draws.append(draw())
        if len(draws) == 3:
            raise torch.OutOfMemoryError("planned")
        return loss * draws[-1]

    accumulation = retrying(Workload(Plain(), step), CpuDevice(), lambda shortage: 2)
    batch = describe(make_batch(12, torch.float64))
    for _ in range(quiet_steps):
        accumulation.run([batch], 4)
    noisy.append(True)
    for _ in range(2):
        draws.clear()
        accumulation.run([batch], 4)
        assert draws[3:6] == draws[:3]


def test_memory_that_never_suffices_restores_everything_and_raises():
    """Down to one sample and beyond: DoesNotFit, and all is as before, earlier gradients included."""
    model = Everything()
    mean_step(model, make_batch(5)).backward()
    before = bits_of(model)
    device = FakeDevice(lambda n: 100, total_bytes=10)
    with pytest.raises(DoesNotFit, match="fake device out of memory"):
        retrying(Workload(model, mean_step), device, halve).run([describe(make_batch(12))], 12)
    assert device.ran_sizes == [12, 6, 3, 1]
    assert not differences(bits_of(model), before)


@pytest.mark.parametrize("error", [ValueError("labels out of range"), KeyboardInterrupt(), MemoryError("numpy")])
def test_any_other_error_comes_out_unchanged_and_restores_everything(error):
    """An error that is not an OOM is the user's, with its own traceback, and the step has not happened."""
    model = Everything()
    mean_step(model, make_batch(5)).backward()
    before = bits_of(model)
    calls = []

    def step(model, batch):
        calls.append(1)
        loss = mean_step(model, batch)
        np.random.rand()
        if len(calls) == 3:
            raise error
        return loss

    with pytest.raises(type(error)) as caught:
        retrying(Workload(model, step), CpuDevice(), halve).run([describe(make_batch(12))], 4)
    assert caught.value is error
    assert not differences(bits_of(model), before)


def test_aux_comes_back_once_a_committed_micro_batch_detached():
    """The values beside the loss come without a graph, and only from micro-batches that count."""
    model, batch = Plain(), make_batch(8, torch.float64)

    def step(model, part):
        logits = model(part[0])
        return F.cross_entropy(logits, part[1]), {"logits": logits, "size": len(part[1])}

    with oom_at(20):
        done = retrying(Workload(model, step), CpuDevice(), halve).run([describe(batch)], 4)
    assert [entry["size"] for entry in done.aux] == list(done.micro_batch_sizes)
    assert not any(entry["logits"].requires_grad for entry in done.aux)
    assert torch.allclose(torch.cat([entry["logits"] for entry in done.aux]), model(batch[0]), rtol=1e-12)


def test_a_step_may_pop_from_its_batch():
    """A micro-batch's containers are its own: popped labels are there again for a retry and for the user."""
    model, (inputs, labels) = Plain(), make_batch(8, torch.float64)
    batch = {"inputs": inputs, "more": [{"labels": labels}]}

    def step(model, part):
        labels = part["more"].pop()["labels"]
        return F.cross_entropy(model(part.pop("inputs")), labels)

    expected = full_batch_gradient(model, mean_step, (inputs, labels))
    with oom_at(9):
        done = retrying(Workload(model, step), CpuDevice(), halve).run([describe(batch)], 8)
    assert done.retries == 1
    assert batch["inputs"] is inputs
    assert batch["more"][0]["labels"] is labels
    assert relative_error(gradients_of(model), expected) <= 1e-12


def test_a_batch_that_wants_gradients_collects_none():
    """The step may differentiate by its input; nothing is added up in the user's own tensor."""
    model, (inputs, labels) = Plain(), make_batch(8, torch.float64)
    inputs.requires_grad_(True)

    def step(model, part):
        assert part[0].requires_grad
        return mean_step(model, part)

    with oom_at(20):
        retrying(Workload(model, step), CpuDevice(), halve).run([describe((inputs, labels))], 4)
    assert inputs.grad is None


@pytest.mark.parametrize(
    "cut", [lambda x: x, lambda x: x[:], lambda x: x.view(-1, 3, 2)], ids=["whole", "part", "view"]
)
def test_a_batch_that_carries_a_graph_is_refused(cut):
    """Micro-batches are cut off from it, so whatever made it would get no gradient."""
    encoder, (inputs, labels) = nn.Linear(6, 6).double(), make_batch(8, torch.float64)
    batch = {"more": [{"inputs": cut(encoder(inputs))}], "labels": labels}
    model, before = Plain(), torch.get_rng_state()
    with pytest.raises(InvalidArgument, match="carries a graph"):
        retrying(Workload(model, mean_step), CpuDevice(), halve).run([describe(batch)], 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_of_a_batch_that_wants_gradients_is_a_batch():
    """A view of a leaf carries no graph that could be lost but its own."""
    model, (inputs, labels) = Plain(), make_batch(8, torch.float64)
    inputs.requires_grad_(True)
    expected = full_batch_gradient(model, mean_step, (inputs, labels))
    parts = [describe(part) for part in zip(inputs.split(5), labels.split(5), strict=True)]
    retrying(Workload(model, mean_step), CpuDevice(), halve).run(parts, 3)
    assert relative_error(gradients_of(model), expected) <= 1e-12


@pytest.mark.parametrize("position", [12, 30, 10**9])
def test_a_parameter_outside_model_and_optimizer_is_refused(position):
    """Nobody would take its gradient back for a retry: seen in the first micro-batch, before it has one."""
    model, head = Plain(), nn.Linear(4, 4).double()

    def step(model, part):
        return F.cross_entropy(head(model(part[0])), part[1])

    accumulation = retrying(Workload(model, step), CpuDevice(), halve)
    with oom_at(position), pytest.raises(InvalidArgument, match="in neither the model nor the"):
        accumulation.run([describe(make_batch(8, torch.float64))], 4)
    assert head.weight.grad is None
    assert all(gradient is None for gradient in gradients_of(model).values())


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "in the optimizer"])
def test_a_parameter_outside_the_model_is_fine_where_it_is_known_or_frozen(frozen):
    """A loss head in the optimizer, or one that is not trained."""
    model, head = Plain(), nn.Linear(4, 4).double().requires_grad_(not frozen)
    optimizer = None if frozen else torch.optim.SGD([*model.parameters(), *head.parameters()])

    def step(model, part):
        return F.cross_entropy(head(model(part[0])), part[1])

    batch = make_batch(8, torch.float64)
    expected = full_batch_gradient(model, step, batch)
    head.zero_grad()
    with oom_at(20):
        retrying(Workload(model, step, None, optimizer), CpuDevice(), halve).run([describe(batch)], 4)
    assert relative_error(gradients_of(model), expected) <= 1e-12


@pytest.mark.parametrize(("steps_before", "position"), [(2, 40), (1, None)], ids=["a retry", "second step"])
def test_a_network_that_is_trained_from_some_step_on_is_refused(steps_before, position):
    """In a step that is watched nothing has moved; in a retry its gradient would be added twice."""
    model, head, trains = Plain(), nn.Linear(4, 4).double(), []

    def step(model, part):
        outputs = model(part[0])
        return F.cross_entropy(head(outputs) if trains else outputs, part[1])

    accumulation = retrying(Workload(model, step), CpuDevice(), halve, is_training=True)
    for _ in range(steps_before):
        accumulation.run([describe(make_batch(8, torch.float64))], 4)
        model.zero_grad()
    trains.append(True)
    with oom_at(position or 10**9), pytest.raises(InvalidArgument, match="in neither the model nor the"):
        accumulation.run([describe(make_batch(8, torch.float64))], 4)
    assert all(gradient is None for gradient in gradients_of(model).values())
    assert head.weight.grad is None or position is not None


def test_the_sizes_sum_to_the_batch_also_where_a_weight_is_zero():
    """A micro-batch that was not run is in the sizes, and its place in aux is None."""
    model, batch = Plain(), make_tokens([0, 0, 3, 5])

    def step(model, part):
        return token_step(model, part), len(part["labels"])

    done = retrying(Workload(model, step, count_tokens), CpuDevice(), halve).run([describe(batch)], 2)
    assert done.micro_batch_sizes == (2, 2)
    assert done.aux == [None, 2]


def test_the_loss_of_many_low_precision_micro_batches_is_summed_in_float32():
    """A thousand shares of a bfloat16 loss vanish one by one if their sum is bfloat16."""
    model = nn.Linear(6, 1).bfloat16()
    batch = torch.ones(1024, 6, dtype=torch.bfloat16)
    done = retrying(Workload(model, lambda m, x: m(x).float().square().mean().bfloat16() + 1), CpuDevice(), halve).run(
        [describe(batch)], 1
    )
    expected = (model(batch[:1]).float().square().mean().bfloat16() + 1).item()
    assert done.loss.value.dtype is torch.float32
    assert float(done.loss.value) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("largest", [8, 4])
def test_the_loss_is_a_tensor_of_its_own(largest):
    """Also of a single micro-batch: what the step keeps and writes into later is not the result."""
    kept, model, batch = [], Plain(), make_batch(8, torch.float64)

    def step(model, part):
        kept.append(mean_step(model, part))
        return kept[-1]

    done = retrying(Workload(model, step), CpuDevice(), halve).run([describe(batch)], largest)
    expected = mean_step(model, batch).item()
    with torch.no_grad():
        for loss in kept:
            loss.zero_()
    assert done.loss.value.item() == pytest.approx(expected)


@pytest.mark.parametrize("step", [lambda m, b: Mean(mean_step(m, b), len(b[0])), mean_step], ids=["stated", "not"])
def test_memory_that_ends_after_the_last_backward_pass_undoes_the_step(step):
    """Also in the division by a total that is known last: gradients from before are back."""
    undone, batch = 0, make_batch(10)
    for position in range(1, 200):
        torch.manual_seed(7)
        model = Plain(torch.float32)
        mean_step(model, make_batch(5)).backward()
        before = bits_of(model)
        with oom_at(position) as planned:
            try:
                done = retrying(Workload(model, step), CpuDevice(), halve).run([describe(batch)], 5)
            except (DoesNotFit, torch.OutOfMemoryError):  # of which a Runner makes the same
                undone += 1
                assert not differences(bits_of(model), before)
                continue
        assert torch.isfinite(done.loss.value)
        if not planned.raised:
            break
    assert not planned.raised
    assert undone >= 2


def test_earlier_gradients_come_back_even_where_a_generator_does_not():
    """One failure in putting back must not keep the rest from it."""
    model = Plain()
    model.head.weight.grad = earlier = torch.ones_like(model.head.weight)

    def refuse(state):
        raise RuntimeError("no way back")

    # Undone before the test ends: pytest-randomly sets NumPy's state then too.
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no way back"):

        def step(model, part):
            patch.setattr(np.random, "set_state", refuse)
            raise ValueError("the user's own")

        retrying(Workload(model, step), CpuDevice(), halve).run([describe(make_batch(4, torch.float64))], 4)
    assert model.head.weight.grad is earlier


def test_an_error_inside_the_users_handling_of_an_oom_is_still_an_error():
    """Whoever calls from an ``except OutOfMemoryError`` block has that OOM in every later error's context."""
    model = Plain()

    def step(model, part):
        raise ValueError("shape bug")

    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    except torch.OutOfMemoryError:
        with pytest.raises(ValueError, match="shape bug"):
            retrying(Workload(model, step), CpuDevice(), halve).run([describe(make_batch(4, torch.float64))], 4)
