"""The gradient of a whole batch from micro-batches: exact, and all or nothing."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from retrying import halve, retrying
from sampling import IN_PROOF, sample
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
    """What the token mean is over."""
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


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), largest=st.integers(1, 10))
def test_several_batches_count_as_one(sizes, largest):
    """Batches of any sizes that belong together give the gradient of their concatenation."""
    model = Plain()
    whole = make_batch(sum(sizes), torch.float64)
    parts = list(zip(whole[0].split(sizes), whole[1].split(sizes), strict=True))
    expected = full_batch_gradient(model, mean_step, whole)
    retrying(Workload(model, mean_step), CpuDevice(), halve).run([describe(part) for part in parts], largest)
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


def commit_without_errors(sizes, batch):
    """The state of a run that used the committed micro-batches from the start."""
    torch.manual_seed(7)
    model = Everything()
    parts = list(zip(batch[0].split(list(sizes)), batch[1].split(list(sizes)), strict=True))
    retrying(Workload(model, mean_step), CpuDevice(), halve).run([describe(part) for part in parts], max(sizes))
    return bits_of(model)


def forget_objects(bits):
    """Without object identities, which two models cannot share."""
    return {key: value for key, value in bits.items() if not key.startswith("gradient object")}


def count_operations():
    """How many operations one accumulation of the test below has."""
    torch.manual_seed(7)
    model, batch = Everything(), make_batch(12)
    with oom_at(10**9) as counted:
        retrying(Workload(model, mean_step), CpuDevice(), halve).run([describe(batch)], 6)
    return counted.operations


def test_an_oom_at_any_operation_leaves_no_trace_in_the_result():
    """Wherever memory ends, in forward or backward, the result is bitwise that of the committed micro-batches."""
    batch = make_batch(12)
    restarted = 0
    for position in sample(range(1, count_operations() + 1), 5):
        torch.manual_seed(7)
        model = Everything()
        accumulation = retrying(Workload(model, mean_step), CpuDevice(), halve)
        with oom_at(position) as planned:
            done = accumulation.run([describe(batch)], 6)
        assert len(planned.raised) == 1
        restarted += done.micro_batch_sizes == (3, 3, 3, 3)
        expected = commit_without_errors(done.micro_batch_sizes, batch)
        assert not differences(forget_objects(bits_of(model)), forget_objects(expected)), (position, planned.raised)
    assert restarted >= (40 if IN_PROOF else 8)


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


def test_two_ooms_in_one_step_and_one_in_the_retry():
    """A second error, also in the retry itself, is one more retry."""
    batch = make_batch(12)
    torch.manual_seed(7)
    model = Everything()
    with oom_at(30, 45) as planned:
        done = retrying(Workload(model, mean_step), CpuDevice(), halve).run([describe(batch)], 12)
    assert len(planned.raised) == done.retries == 2
    expected = commit_without_errors(done.micro_batch_sizes, batch)
    assert not differences(forget_objects(bits_of(model)), forget_objects(expected))


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


def test_a_failed_attempt_leaves_no_tensor_alive():
    """When the next size is chosen, the activations of the failed attempt are gone."""
    alive = []

    class Tracks(nn.Linear):
        def forward(self, inputs):
            output = super().forward(inputs)
            alive.append(weakref.ref(output))
            return output

    model = Tracks(6, 4)

    def look(shortage):
        assert [ref() for ref in alive] == [None]
        return 2

    gc.disable()
    try:
        with oom_at(6):  # after the first linear layer, inside its loss
            done = retrying(Workload(model, mean_step), CpuDevice(), look).run([describe(make_batch(4))], 4)
    finally:
        gc.enable()
    assert done.retries == 1


def test_a_micro_batch_of_weight_zero_is_not_run():
    """Labels that are all ignored give a mean of nan: such a micro-batch is passed over."""
    model, batch = Plain(), make_tokens([0, 0, 3, 5])
    seen = []

    def step(model, part):
        seen.append(len(part["labels"]))
        return token_step(model, part)

    done = retrying(Workload(model, step, count_tokens), CpuDevice(), halve).run([describe(batch)], 2)
    assert seen == [2]
    assert torch.isfinite(done.loss.value)


def test_nothing_to_take_a_mean_over_is_nothing_done():
    """A batch whose weights are all 0 has no mean: nothing happens, and earlier gradients stay."""
    model = Everything()
    mean_step(model, make_batch(5)).backward()
    before = bits_of(model)
    accumulation = retrying(Workload(model, token_step, count_tokens), CpuDevice(), halve)
    assert accumulation.run([describe(make_tokens([0, 0, 0]))], 2) is None
    assert not differences(bits_of(model), before)


def test_a_weight_that_does_not_add_up_is_an_error():
    """``weigh`` must count: a mean of something changes when the batch is divided anew."""
    model, batch = Plain(), make_batch(8, torch.float64)
    with oom_at(12), pytest.raises(InvalidArgument, match="not additive"):
        retrying(Workload(model, mean_step, lambda b: 5.0), CpuDevice(), halve).run([describe(batch)], 8)
    assert model.head.weight.grad is None


def test_aux_comes_back_once_a_committed_micro_batch_detached():
    """What stands beside the loss is kept only of micro-batches that count, without its graph."""
    model, batch = Plain(), make_batch(8, torch.float64)

    def step(model, part):
        logits = model(part[0])
        return F.cross_entropy(logits, part[1]), {"logits": logits, "size": len(part[1])}

    with oom_at(20):
        done = retrying(Workload(model, step), CpuDevice(), halve).run([describe(batch)], 4)
    assert [entry["size"] for entry in done.aux] == list(done.micro_batch_sizes)
    assert not any(entry["logits"].requires_grad for entry in done.aux)
    assert torch.allclose(torch.cat([entry["logits"] for entry in done.aux]), model(batch[0]), rtol=1e-12)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: loss.item(), "returned float"),
        (lambda loss: loss.detach(), "without a graph"),
        (lambda loss: loss.expand(3), r"shape \(3,\)"),
        (lambda loss: None, "returned None; to skip"),
        (lambda loss: (loss, loss * 2), "second loss"),
        (lambda loss: (loss, (loss * 2).reshape(())), "second loss"),
    ],
)
def test_a_step_without_a_gradient_is_refused(returned, message):
    """A loss that no gradient can come from is named, and nothing has changed."""
    model = Plain()
    with pytest.raises(InvalidArgument, match=message):
        retrying(Workload(model, lambda m, b: returned(mean_step(m, b))), CpuDevice(), halve).run(
            [describe(make_batch(4, torch.float64))], 2
        )
    assert model.head.weight.grad is None


@pytest.mark.parametrize(
    "write", [lambda x: x.div_(255), lambda x: x[0].zero_(), lambda x: F.dropout(x, 0.5, inplace=True)]
)
def test_a_step_that_writes_into_its_batch_is_refused(write):
    """A retry would see the batch changed: an error, though nothing else has happened."""
    model, batch = Plain(), make_batch(8, torch.float64)

    def step(model, part):
        write(part[0])
        return mean_step(model, part)

    with pytest.raises(InvalidArgument, match="wrote into its batch"):
        retrying(Workload(model, step), CpuDevice(), halve).run([describe(batch)], 4)
    assert model.head.weight.grad is None


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


@pytest.mark.parametrize("wrong", [lambda m, loss: m.zero_grad(), lambda m, loss: loss.backward(retain_graph=True)])
def test_a_step_that_touches_gradients_is_refused(wrong):
    """zero_grad() or backward() left over in a ported step would throw gradients away or count them twice."""
    model = Plain()

    def step(model, part):
        loss = mean_step(model, part)
        wrong(model, loss)
        return loss

    with pytest.raises(InvalidArgument, match=r"the step (changed \.grad|calls backward)"):
        retrying(Workload(model, step), CpuDevice(), halve).run([describe(make_batch(8, torch.float64))], 4)
    assert model.head.weight.grad is None


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
    """Micro-batches are cut off from it, so whatever made it would get no gradient, in silence."""
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


def penalise_gradient(model, part):
    """A leaf that the step makes for itself, as gradient penalties do."""
    inputs = part[0].detach().clone().requires_grad_(True)
    [gradient] = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    return gradient.square().sum(1).mean() + F.mse_loss(inputs, part[0])


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


def test_a_leaf_of_the_steps_own_is_no_parameter():
    """What the step makes anew each time is its own matter, and so is a batch that wants gradients."""
    model, (inputs, labels) = Plain(), make_batch(8, torch.float64)
    inputs.requires_grad_(True)
    expected = full_batch_gradient(model, penalise_gradient, (inputs.detach(), labels))
    workload = Workload(model, penalise_gradient)
    retrying(workload, CpuDevice(), halve).run([describe((inputs, labels))], 3)
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


@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_a_loss_in_another_dtype_than_the_first_ones_counts_as_much(first):
    """A step that returns float64 for some micro-batches and float32 for others, whichever comes first."""
    model, batch = Plain().float(), make_batch(5, torch.float32)
    later = torch.float64 if first is torch.float32 else torch.float32

    def step(model, part):
        return mean_step(model, part).to(first if len(part[1]) == 3 else later)

    expected = full_batch_gradient(model, mean_step, batch)
    done = retrying(Workload(model, step), CpuDevice(), halve).run([describe(batch)], 3)
    assert done.micro_batch_sizes == (3, 2)
    assert relative_error(gradients_of(model), expected) <= 1e-6
    assert done.loss.value.item() == pytest.approx(mean_step(model, batch).item(), rel=1e-6)


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


def test_what_preparing_the_update_raises_undoes_the_step():
    """The last word before the update: gradients from before are back, and nothing else has changed."""
    model = Everything()
    mean_step(model, make_batch(5)).backward()
    before = bits_of(model)

    def refuse():
        raise DoesNotFit("no room for the update")

    accumulation = retrying(Workload(model, mean_step), CpuDevice(), halve)
    with pytest.raises(DoesNotFit, match="no room"):
        accumulation.run([describe(make_batch(12))], 4, refuse)
    assert not differences(bits_of(model), before)


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


class Grows(Plain):
    """A table of positions that grows with the batch, through ``.data``."""

    def __init__(self, length):
        super().__init__()
        self.register_buffer("positions", torch.zeros(length, dtype=torch.float64))

    def forward(self, inputs):
        if len(self.positions) < len(inputs) + 8:
            self.positions.data = torch.arange(len(inputs) + 8, dtype=torch.float64)
        return super().forward(inputs) + self.positions[:4]


@pytest.mark.parametrize("length", [1, 2])
def test_a_retry_sees_a_buffer_as_it_was_before_it_grew(length):
    """Its memory is put back, not only its values: gradient and table are those of an undisturbed run."""
    batch, outcomes = make_batch(8, torch.float64), []
    for positions in ((), (9,)):
        torch.manual_seed(3)
        model = Grows(length)
        with oom_at(*positions or (10**9,)):
            done = retrying(Workload(model, mean_step), CpuDevice(), lambda _: 4).run([describe(batch)], 8)
        outcomes.append((done.retries, gradients_of(model)))
        assert len(model.positions) == (12 if positions else 16)
    assert [retries for retries, _ in outcomes] == [0, 1]
    assert relative_error(outcomes[1][1], outcomes[0][1]) <= 1e-12


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


@given(
    samples=st.integers(1, 24),
    largest=st.integers(1, 26),
    nest=st.sampled_from(["dict", "list", "nested", "dataclass", "samples"]),
    weights=st.lists(st.integers(0, 9), min_size=24, max_size=24).filter(lambda w: w[0] > 0),
)
def test_any_nest_with_any_weights_gives_the_full_batchs_gradient(samples, largest, nest, weights):
    """Random targets, sizes, nests and weights together: the weighed mean's gradient to 1e-12."""
    inputs, labels = make_batch(samples, torch.float64)
    weight = torch.tensor(weights[:samples], dtype=torch.float64)
    pack, unpack = NESTS[nest]
    model = Plain()

    def step(model, batch):
        inputs, labels, weight = unpack(batch)
        return (F.cross_entropy(model(inputs), labels, reduction="none") * weight).sum() / weight.sum()

    batch = pack(inputs, labels, weight)
    expected = full_batch_gradient(model, step, batch)
    workload = Workload(model, step, lambda batch: unpack(batch)[2].sum())
    retrying(workload, CpuDevice(), halve).run([describe(batch)], largest)
    assert relative_error(gradients_of(model), expected) <= 1e-12


@dataclasses.dataclass(frozen=True)
class Packed:
    inputs: torch.Tensor
    rest: tuple


NESTS = {
    "dict": (lambda x, y, w: {"x": x, "y": y, "w": w, "name": "all"}, lambda b: (b["x"], b["y"], b["w"])),
    "list": (lambda x, y, w: [x, (y, w)], lambda b: (b[0], *b[1])),
    "nested": (lambda x, y, w: {"a": {"x": x}, "b": [{"y": y}, w]}, lambda b: (b["a"]["x"], b["b"][0]["y"], b["b"][1])),
    "dataclass": (lambda x, y, w: Packed(x, (y, w, 3.5)), lambda b: (b.inputs, b.rest[0], b.rest[1])),
    "samples": (
        lambda x, y, w: (x, [{"label": int(one)} for one in y], w),
        lambda b: (b[0], torch.tensor([entry["label"] for entry in b[1]]), b[2]),
    ),
}


def test_a_piece_that_fails_in_its_last_operation_is_counted_once():
    """Kept though no parameter's gradient changed: its samples must not stand twice in the sizes."""
    model, prompt = nn.Linear(6, 4).requires_grad_(False), torch.zeros(4, requires_grad=True)

    def step(model, part):
        return F.cross_entropy(model(part[0]) + prompt, part[1])

    batch = describe(make_batch(16))
    for position in range(1, 40):
        with oom_at(position):
            done = retrying(Workload(model, step), CpuDevice(), halve).run([batch], 4)
        assert sum(done.micro_batch_sizes) == 16
