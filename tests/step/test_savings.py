"""What a step does already to save memory is found, and nobody is advised to do it."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import transformers
from sampling import sample
from torch import nn
from torch.utils.checkpoint import checkpoint

import autobatch
from autobatch.errors import DoesNotFit
from autobatch.step.model_info import find_savings

CHECKPOINTING, AUTOCAST, SHORT = "activation checkpointing", "autocast", "16-bit parameters"


class Blocks(nn.Module):
    """Three blocks with large activations, checkpointed or not."""

    def __init__(self, way="", width=32):
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 800), nn.Tanh(), nn.Linear(800, width)) for _ in "abc"
        )

    def forward(self, inputs):
        for block in self.blocks:
            if self.way:
                inputs = checkpoint(block, inputs.requires_grad_(), use_reentrant=self.way == "reentrant")
            else:
                inputs = block(inputs)
        return inputs


class InAutocast(Blocks):
    """Enters autocast by itself, as a model that accelerate has prepared."""

    def forward(self, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(inputs)


def plain(model, batch):
    return model(batch).float().square().mean()


def in_autocast(model, batch):
    """The same in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(model, batch)


def recomputing(model, batch):
    """The whole model below one checkpoint, in the step."""
    return plain(lambda inputs: checkpoint(model, inputs, use_reentrant=False), batch)


CASES = {
    "neither": (Blocks, plain, ()),
    "checkpointing": (lambda: Blocks("new"), plain, (CHECKPOINTING,)),
    "reentrant": (lambda: Blocks("reentrant"), plain, (CHECKPOINTING,)),
    "checkpointing in the step": (Blocks, recomputing, (CHECKPOINTING,)),
    "autocast": (Blocks, in_autocast, (AUTOCAST,)),
    "autocast in the model": (InAutocast, plain, (AUTOCAST,)),
    "both": (lambda: Blocks("new"), in_autocast, (CHECKPOINTING, AUTOCAST)),
    "short parameters": (lambda: Blocks().bfloat16(), plain, (SHORT,)),
    "all": (lambda: Blocks("new").bfloat16(), in_autocast, (CHECKPOINTING, SHORT, AUTOCAST)),
}
ADVICE = re.compile(r"(?m)^.*shrink what each sample needs")


def advised(text):
    """What is said to shrink a sample, or to help where nothing fits."""
    return {
        name
        for name, word in ((CHECKPOINTING, "activation checkpointing"), (AUTOCAST, "bfloat16 autocast"))
        if word in text
    }


@pytest.mark.parametrize("name", CASES)
def test_a_plan_advises_what_is_not_on(name):
    """Whoever does both gets no such advice."""
    make, step, savings = CASES[name]
    model = make()
    batch = torch.randn(64, 32, dtype=next(model.parameters()).dtype)
    plan = autobatch.fit(
        model, 64, batch=batch, step=step, optimizer=torch.optim.SGD(model.parameters(), 0.1), max_micro_batch=16,
        check=None, reuse=False,
    )  # fmt: skip
    assert plan.savings == tuple(sorted(savings))
    # As on a card where the whole batch does not fit.
    short = plan.model_copy(update={"budget_bytes": plan.peak_bytes, "headroom_bytes": 0})
    found = "".join(ADVICE.findall(short.explain()))
    on = set(savings) | ({AUTOCAST} if SHORT in savings else set())
    assert advised(found) == {CHECKPOINTING, AUTOCAST} - on
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_advises_what_is_not_on(name):
    """Also where memory ends in the first forward pass, before anything is recomputed."""
    make, step, savings = CASES[name]
    model = make()
    batch = torch.randn(4, 4000, 32, dtype=next(model.parameters()).dtype)
    with pytest.raises(DoesNotFit) as caught:
        autobatch.fit(model, 4, batch=batch, step=step, budget="4MiB", headroom=0, reuse=False)
    helps = str(caught.value).partition("what would help")[2]
    on = set(savings) | ({AUTOCAST} if SHORT in savings else set())
    assert advised(helps) == {CHECKPOINTING, AUTOCAST} - on
    assert "smaller inputs" in helps
    assert "\n" not in str(caught.value)


def test_the_flag_of_a_compiled_transformers_model_counts():
    """Its modules are not looked at while it runs, since it would be compiled again."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    assert find_savings(model) == set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its new name
        model.gradient_checkpointing_enable()
    assert find_savings(model) == {CHECKPOINTING}


@pytest.mark.predicts
@pytest.mark.parametrize("name", sample(["neither", "checkpointing", "autocast in the model", "both"], 3))
def test_a_predicted_plan_advises_what_is_not_on(name):
    """As the step would run on a card: where it names that card's type, too."""
    make, step, savings = CASES[name]

    def on_a_card(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=step is in_autocast):
            return plain(model, batch)

    model = make()
    found = autobatch.predict(model, torch.zeros(4, 4000, 32), on_a_card, gpu="1300MiB", target_batch=64)
    assert found.plan.accumulation_steps > 1
    assert found.plan.savings == tuple(sorted(savings))
    assert advised("".join(ADVICE.findall(found.plan.explain()))) == {CHECKPOINTING, AUTOCAST} - set(savings)
