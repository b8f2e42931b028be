"""Plans and steps on several models of cards, with fixed and expandable segments, beside other processes."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import stand_in
import torch
from own_process import call
from sampling import sample
from torch import nn
from torch.nn import functional as F
from workloads import full_batch_gradient, gradients_of, make_batch, relative_error

import autobatch
from autobatch.memory.devices import device_for

pytestmark = pytest.mark.card

MIB = 2**20
BUDGET, TARGET = 200 * MIB, 300
NAMES = {"a100": "NVIDIA A100-SXM4-40GB", "h100": "NVIDIA H100 80GB HBM3", "l4": "NVIDIA L4", "t4": "Tesla T4"}
SEGMENTS = {"fixed": {}, "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}


class Wide(nn.Module):
    """Much memory and little work: 96 KiB for each of eight activations of a sample."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.8, 1.2, 8, dtype=torch.float64))
        self.head = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, inputs):
        hidden = inputs.unsqueeze(1).expand(-1, 2048, -1)
        for scale in self.scale:
            hidden = hidden * scale  # saved for the gradient of the scale
        return self.head(hidden.mean(1))


class Neighbour:
    """A step in which, when it is due, another process comes and takes all but a little of the card."""

    def __init__(self, card):
        self.card, self.leaves, self.presence = card, 0, ExitStack()

    def step(self, model, batch):
        if self.leaves:
            self.come(self.leaves)
        return F.cross_entropy(model(batch[0]), batch[1])

    def come(self, leaves):
        """Take what is free but for these bytes."""
        free, _ = torch.cuda.mem_get_info(self.card)
        self.presence.enter_context(stand_in.tenant(free - leaves))
        self.leaves = 0


def live_beside_others(card):
    """A fit and steps with and without neighbours; what came of each."""
    device, batch = torch.device(card), make_batch(TARGET, torch.float64)
    torch.manual_seed(0)
    model = Wide().to(device)
    neighbour = Neighbour(device)
    expected = full_batch_gradient(copy.deepcopy(model).cpu(), neighbour.step, batch)
    options = {"batch": batch, "step": neighbour.step, "reuse": False, "check": None}

    with neighbour.presence:
        neighbour.come(140 * MIB)
        crowded = autobatch.fit(model, TARGET, **options)
        tenants = [tenant.pid for tenant in device_for(device).describe().tenants]
    torch.cuda.empty_cache()
    plan = autobatch.fit(model, TARGET, **options, budget=BUDGET)
    runner = autobatch.Runner(plan, model, neighbour.step, None)

    def run():
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats(device)
        result = runner.accumulate(batch)
        return {
            "largest": max(result.micro_batch_sizes),
            "retries": result.retries,
            "reserved": torch.cuda.max_memory_reserved(device),
            "error": relative_error({k: v.cpu() for k, v in gradients_of(model).items()}, expected),
        }

    found = {"name": plan.device.name, "tenants": tenants, "crowded": crowded.budget_bytes, "alone": run()}
    found |= {"plan": plan.micro_batch_size, "crowded size": crowded.micro_batch_size}
    torch.cuda.empty_cache()
    with neighbour.presence:
        neighbour.come(40 * MIB)
        found["between"] = run()
    found["gone"] = [run() for _ in range(3)]
    torch.cuda.empty_cache()
    with neighbour.presence:
        neighbour.leaves = 40 * MIB
        found["inside"] = run()
    return found


def check_all(found):
    alone = found["alone"]
    assert 1 < alone["largest"] <= found["plan"] < TARGET
    assert found["crowded size"] < found["plan"]
    assert 0 < found["crowded"] <= 144 * MIB  # what was left, and what this process held
    assert found["tenants"] == [4242]
    for run in (alone, found["between"], *found["gone"], found["inside"]):
        assert run["error"] <= 1e-12
        assert run["reserved"] <= BUDGET
    assert alone["retries"] == found["between"]["retries"] == 0
    assert found["between"]["largest"] < alone["largest"]
    assert found["gone"][-1]["largest"] == alone["largest"]
    assert found["inside"]["retries"] >= 1


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("card", sample(NAMES, 4))
def test_budgets_hold_and_gradients_are_right_beside_others(card, segments):
    """Who comes before a step makes it smaller, who comes inside it makes it retry, and no gradient changes."""
    found = call(live_beside_others, "cuda:0", STANDIN_CARD=card, **SEGMENTS[segments])
    assert found["name"] == NAMES[card]
    check_all(found)


@pytest.mark.parametrize("segments", sample(SEGMENTS, 2))
def test_a_second_card_is_its_own(segments):
    """All the same on ``cuda:1``, while the process's current card is the first."""
    check_all(call(live_beside_others, "cuda:1", STANDIN_DEVICES="2", **SEGMENTS[segments]))
