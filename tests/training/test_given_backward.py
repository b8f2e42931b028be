"""A backward function of the user's own: the gradient is that of ``loss.backward()``, or the step is refused."""

from functools import cache

import pytest
import torch
from workloads import Plain, bits_of, differences, full_batch_gradient, gradients_of, make_batch, mean_step

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.testing import oom_at


@cache
def make_plan():
    """16 samples in four pieces."""
    model = Plain()
    return autobatch.fit(model, 16, batch=make_batch(8, torch.float64), step=mean_step, max_micro_batch=4, check=None)


def make_runner(backward, *, optimizer=None, **options):
    plan = make_plan()  # its first call draws
    torch.manual_seed(3)
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
    return model, autobatch.Runner(plan, model, mean_step, optimizer, backward=backward, **options)


def run_backward(loss):
    loss.backward()
    return "passed over"


def test_it_gets_the_divided_loss_of_each_micro_batch():
    """Four losses that add up to the batch's, and the gradient of the full batch."""
    seen = []
    model, runner = make_runner(lambda loss: seen.append(loss.detach().clone()) or run_backward(loss))
    batch = make_batch(16, torch.float64)
    expected = full_batch_gradient(model, mean_step, batch)
    result = runner.accumulate(batch)
    assert len(seen) == 4
    assert sum(seen).item() == pytest.approx(result.loss.item(), rel=1e-12)
    for name, gradient in gradients_of(model).items():
        assert (gradient is None) == (expected[name] is None)
        assert gradient is None or torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("samples", [4, 8])
def test_a_hook_that_the_step_registers_on_its_loss_is_part_of_the_loss(samples):
    """A step that scales its own gradient does not count as a function that divides the loss."""
    found = []
    for backward in (None, run_backward):
        torch.manual_seed(3)
        model = Plain()

        def step(model, batch):
            loss = mean_step(model, batch)
            loss.register_hook(lambda gradient: 0.5 * gradient)
            return loss

        runner = autobatch.Runner(make_plan(), model, step, None, backward=backward)
        runner.accumulate(make_batch(samples, torch.float64))
        found.append(gradients_of(model))
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items() if gradient is not None)


def test_steps_are_bit_for_bit_those_without_it():
    """With a scaler, clipping and earlier gradients."""
    states = []
    for backward in (None, torch.Tensor.backward, run_backward):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model, runner = make_runner(backward, scaler=scaler, max_grad_norm=0.1)
        model.head.weight.grad = torch.ones_like(model.head.weight)
        for seed in range(3):
            runner.step(make_batch(16, torch.float64, seed))
        states.append({**bits_of(model), "scaler": scaler.state_dict()})
    assert not differences(states[1], states[0])
    assert not differences(states[2], states[0])


def raise_at(calls, error):
    """Raises after the backward pass of the second micro-batch, so that its gradient is there."""

    def backward(loss):
        loss.backward()
        calls.append(1)
        if len(calls) == 2:
            raise error

    return backward


def test_an_oom_that_it_raises_after_its_pass_is_retried():
    """The gradient of the piece is not counted twice."""
    calls = []
    model, runner = make_runner(raise_at(calls, torch.OutOfMemoryError("CUDA out of memory")))
    batch = make_batch(16, torch.float64)
    expected = full_batch_gradient(model, mean_step, batch)
    result = runner.accumulate(batch)
    assert result.retries == 1
    assert len(calls) == 2 + len(result.micro_batch_sizes)
    for name, gradient in gradients_of(model).items():
        assert gradient is None or torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-15)


def run_twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("backward", "options", "message"),
    [
        (lambda loss: None, {}, "ran no backward pass"),
        (lambda loss: loss.detach().requires_grad_().backward(), {}, "ran no backward pass"),
        (run_twice, {}, "ran 2 backward passes from the loss"),
        (lambda loss: (loss / 2).backward(), {}, "multiplies the loss by 0.5.*gradient_accumulation_steps=1"),
        (lambda loss: (loss * 0).backward(), {}, "multiplies the loss by 0"),
        (lambda loss: (-loss).backward(), {}, "multiplies the loss by -1"),
        (
            lambda loss: (loss * 1024).backward(),
            {"scaler": torch.amp.GradScaler("cpu")},
            "multiplies the loss by 1024.*leave scaler= out",
        ),
    ],
)
def test_one_that_makes_another_gradient_is_refused(backward, options, message):
    """Whatever it ran before, everything is as before the step, also in a later micro-batch."""
    model, runner = make_runner(backward, **options)
    before = bits_of(model)
    with pytest.raises(InvalidArgument, match=message):
        runner.step(make_batch(16, torch.float64))
    assert not differences(bits_of(model), before)


def test_it_may_not_skip_a_later_micro_batch():
    """Each is counted, not only the first."""
    calls = []
    model, runner = make_runner(lambda loss: calls.append(1) or (loss.backward() if len(calls) < 3 else None))
    before = bits_of(model)
    with pytest.raises(InvalidArgument, match="ran no backward pass"):
        runner.step(make_batch(16, torch.float64))
    assert not differences(bits_of(model), before)


class Unscaling(torch.optim.SGD):
    """A framework's optimizer, which takes its own scale out."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(1024)
        super().step()


def test_a_framework_may_scale_the_loss_where_its_own_step_unscales():
    """Without scaler= the losses are the framework's to scale."""
    plain, runner = make_runner(None)
    scaled, scaling = make_runner(
        lambda loss: (loss * 1024).backward(), optimizer=lambda model: Unscaling(model.parameters(), lr=0.1)
    )
    batch = make_batch(16, torch.float64)
    assert torch.equal(runner.step(batch).loss, scaling.step(batch).loss)
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_that_leaves_no_gradients_is_refused(dtype):
    """It runs a pass, but ``.grad`` stays ``None`` and nothing would be trained; also beside sums in float32."""
    model = Plain().to(dtype)
    plan = make_plan()

    def gradients(loss):
        return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)

    runner = autobatch.Runner(plan, model, mean_step, None, backward=gradients)
    with pytest.raises(InvalidArgument, match=r"^backward= left no gradient in any parameter"):
        runner.accumulate(make_batch(16, dtype))
    assert all(gradient is None for gradient in gradients_of(model).values())
    good = autobatch.Runner(plan, model, mean_step, None, backward=run_backward)
    good.accumulate(make_batch(16, dtype))
    assert model.head.weight.grad is not None


def add_by_hand(model, *, in_place):
    """Gradients by ``torch.autograd.grad``, which the function adds to ``.grad`` itself."""

    def backward(loss):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            elif in_place:
                parameter.grad.add_(gradient)
            else:
                parameter.grad = parameter.grad + gradient

    return backward


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("position", [*range(2, 80, 8), 10**6])
def test_one_that_adds_to_grad_itself_is_exact(position, in_place):
    """As the refusal of one that adds to nothing asks, also where the step runs out of memory."""
    torch.manual_seed(3)
    model, batch = Plain(), make_batch(16, torch.float64)
    backward = add_by_hand(model, in_place=in_place)
    runner = autobatch.Runner(make_plan(), model, mean_step, None, backward=backward)
    expected = full_batch_gradient(model, mean_step, batch)
    with oom_at(position):
        runner.accumulate(batch)
    for name, gradient in gradients_of(model).items():
        assert (gradient is None) == (expected[name] is None)
        assert gradient is None or torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-15)


def test_one_that_adds_to_narrow_gradients_itself_is_refused():
    """They would not be added up in float32; everything is as before."""
    model = Plain(torch.bfloat16)
    runner = autobatch.Runner(make_plan(), model, mean_step, None, backward=add_by_hand(model, in_place=True))
    before = bits_of(model)
    with pytest.raises(InvalidArgument, match=r"adds to \.grad of a parameter in torch\.bfloat16 itself"):
        runner.accumulate(make_batch(16, torch.bfloat16))
    assert not differences(bits_of(model), before)
