"""The refusal names the phase of the trial that ran out of memory, and the remedies for that phase."""

import pytest
import torch
from sampling import sample
from torch import nn

import autobatch
from autobatch.errors import DoesNotFit


class ByHand(torch.optim.Optimizer):
    """Makes its state inside its own step, as optimizers from elsewhere do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            state["mean"].lerp_(parameter.grad, 0.1)
            parameter.sub_(state["mean"] * 0.1)


class Deep(nn.Module):
    def __init__(self, width=128, layers=6):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, inputs):
        return self.layers(inputs).sum()


def refuse(budget_in_models, make):
    """The refusal of a budget of so many times the parameters' bytes."""
    torch.manual_seed(0)
    model = Deep()
    own = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = make(model.parameters())
    budget = int(budget_in_models * own)
    with pytest.raises(DoesNotFit) as caught:
        autobatch.fit(model, 8, batch=torch.randn(2, 128), optimizer=optimizer, budget=budget, headroom=0)
    return str(caught.value)


SMALLER_DOES_NOT_HELP = "smaller micro-batches and activation checkpointing would not help"


def test_gradients_that_do_not_fit_are_named():
    """The parameters fit, the gradients beside them do not, whatever the batch."""
    text = refuse(1.5, lambda p: torch.optim.SGD(p, lr=0.1))
    assert text.startswith("the gradients do not fit on CPU beside the model, at any micro-batch size: memory ended in")
    assert "fewer trained parameters" in text
    assert SMALLER_DOES_NOT_HELP in text
    assert "a micro-batch of" not in text


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_state_that_does_not_fit_is_named(make):
    """Gradients fit, the optimizer's state does not."""
    text = refuse(2.3, make)
    assert text.startswith("the optimizer's state does not fit on CPU beside model and gradients, at any micro-batch")
    assert "an optimizer with less state" in text
    assert SMALLER_DOES_NOT_HELP in text


def test_an_update_that_does_not_fit_is_named():
    """State fits, the temporaries of a step over all parameters at once do not."""
    text = refuse(4.4, lambda p: torch.optim.AdamW(p, foreach=True))
    assert text.startswith("the optimizer's update does not fit on CPU beside model, gradients and its state")
    assert "foreach=False" in text
    assert "fused=True" in text
    assert SMALLER_DOES_NOT_HELP in text


class Busy(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, inputs):
        hidden = (inputs * self.scale).unsqueeze(-1).expand(-1, 8, 5000)
        for _ in range(4):
            hidden = hidden.exp().neg()
        return hidden.mean()


def test_a_pass_that_does_not_fit_is_named():
    """Checkpointing and smaller inputs help against too many activations of one sample."""
    with pytest.raises(DoesNotFit) as caught:
        autobatch.fit(Busy(), 8, batch=torch.randn(2, 8), budget="400KiB")
    text = str(caught.value)
    assert text.startswith("a micro-batch of 1 sample does not fit on CPU: memory ended in the forward pass")
    assert "activation checkpointing" in text
    assert SMALLER_DOES_NOT_HELP not in text


def test_a_model_that_does_not_fit_by_itself_is_named():
    """The model alone takes more than the limit."""
    text = refuse(0.5, lambda p: torch.optim.SGD(p, lr=0.1))
    assert text.startswith("a micro-batch of 1 sample does not fit on CPU, as the model by itself does not")
    assert "parameters in bfloat16" in text
    assert SMALLER_DOES_NOT_HELP in text


@pytest.mark.parametrize("steps", sample([0, 1, 3], 3))
@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, torch.optim.Adagrad, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ByHand],
    ids=["AdamW", "Adagrad", "momentum", "by hand"],
)
def test_the_states_bytes_are_those_of_a_resumed_optimizer_too(make, steps):
    """In the plan and in its report, whether the trials made the state or an earlier run did."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.randn(2, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = autobatch.fit(model, 8, batch=torch.randn(2, 128), optimizer=optimizer)
    model(torch.randn(2, 128)).backward()
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    expected = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
    assert plan.state_bytes == expected
    assert f"optimizer state ({expected / 1024:.1f} KiB)" in " ".join(plan.explain().split())


def test_state_of_which_a_part_was_there_is_counted_whole():
    """Layers that were unfrozen after a resume have none yet."""
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 128)).backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter in model.layers[:3].parameters():
        del optimizer.state[parameter]
    plan = autobatch.fit(model, 8, batch=torch.randn(2, 128), optimizer=optimizer)
    steps = 12 * 4  # a count of steps for each parameter
    assert plan.state_bytes == 2 * sum(parameter.nbytes for parameter in model.parameters()) + steps
