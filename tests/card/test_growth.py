"""The size that grows back after a shortage: what the smaller sizes have left in the allocator's cache.

Only memory counts here, so tensors have no values.
"""

from __future__ import annotations

import pytest
import torch
from own_process import call
from torch import nn
from torch.nn import functional as F

import autobatch

pytestmark = pytest.mark.card

MIB = 2**20
TARGET = 240


def make_model():
    """A small language model: blocks of many sizes, of which the largest are the logits."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.Sequential(nn.Embedding(8000, 256), nn.TransformerEncoder(layer, 3), nn.Linear(256, 8000)).cuda()


def language_step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def train(budget, taken):
    """Train, while another tensor takes this much for some steps; what was reserved before, between and after them."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(TARGET, 128, dtype=torch.long)
    options = {"batch": batch[:8], "step": language_step, "optimizer": optimizer, "budget": budget}
    plan = autobatch.fit(model, TARGET, **options, reuse=False, check=None)
    runner = autobatch.Runner(plan, model, language_step, optimizer)

    def run(steps):
        sizes = [max(runner.step(batch).micro_batch_sizes) for _ in range(steps)]
        return sizes, torch.cuda.memory_reserved(), torch.cuda.memory_stats()["num_alloc_retries"]

    before = run(2)
    held = torch.empty(taken, dtype=torch.uint8, device="cuda")
    between = run(2)
    del held
    if not taken:
        torch.cuda.empty_cache()
    return before, between, run(30)


@pytest.mark.parametrize(
    "settings", [{}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}], ids=["fixed", "expandable"]
)
def test_growing_back_takes_what_an_empty_cache_would(settings):
    """Segments of the smaller sizes do not stay beside those of the larger one, and no allocation waits for them."""
    budget = 1024 * MIB
    before, between, after = call(train, budget, budget // 2, mirror=False, **settings)
    _, _, undisturbed = call(train, budget, 0, mirror=False, **settings)
    assert max(between[0]) < max(before[0]) == after[0][-1]
    assert after[1] <= undisturbed[1]
    assert after[2] == between[2]
