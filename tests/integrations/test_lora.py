"""LoRA by peft in a Trainer with autobatch: adapters are trained, the rest of the model stays."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trainers import apart, logs_apart, train, trainer_of
from trl_trainers import llama

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's


def adapted():
    """A small model with adapters of rank 4 that are not zero, in float64."""
    model = get_peft_model(
        llama(),
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"),
    ).double()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def test_adapters_end_where_whole_batches_end(tmp_path):
    """Weights to 1e-12; what is frozen has no gradient and has not moved."""
    make = partial(trainer_of, tmp_path, adapted)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-6
    start = adapted().state_dict()
    moved = {name for name, value in split.model.state_dict().items() if not torch.equal(value, start[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_a_plan_for_adapters_has_their_optimizer_state_only(tmp_path):
    """AdamW keeps two copies of the adapters, not of the model."""
    make = partial(trainer_of, tmp_path, adapted, optim="adamw_torch", max_steps=1)
    plan = train(make, attached={"device": None, "budget": "32MiB", "progress": False}).step.plan
    trained = sum(parameter.nbytes for parameter in adapted().parameters() if parameter.requires_grad)
    assert 2 * trained <= plan.state_bytes < 3 * trained
