"""Real budgets on the CPU: few calls, none out of memory, results counted in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.errors import DoesNotFit
from autobatch.memory.devices import device_for

MIB = 2**20


def make_net():
    """About 0.12 MiB a sample."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.GELU(), nn.Conv2d(32, 32, 3), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 10)).eval()


@pytest.mark.parametrize(("budget", "most_calls"), [(60, 13), (120, 7)])
def test_three_thousand_images_take_few_calls(budget, most_calls, caplog):
    """None of which runs out of memory; torch-max-mem takes 52 and 23."""
    net, images, calls = make_net(), torch.randn(3000, 3, 24, 24), []
    result = autobatch.map(lambda piece: calls.append(len(piece)) or net(piece), images, budget=budget * MIB)
    assert sum(calls) == 3000
    assert len(calls) <= most_calls
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    for start in range(0, 3000, 500):
        with torch.no_grad():
            assert torch.allclose(result[start : start + 500], net(images[start : start + 500]), atol=1e-6)


def test_the_budget_is_never_passed(caplog):
    """The peak that the log names is what torch counted, and it is inside."""
    caplog.set_level("INFO", logger="autobatch")
    device = device_for(torch.device("cpu"))
    autobatch.map(make_net(), torch.randn(500, 3, 24, 24), budget=20 * MIB)
    assert 10 * MIB < device.usage().peak_allocated <= 20 * MIB
    assert "of 20.0 MiB; 0 out of memory" in caplog.text


@pytest.mark.parametrize("kind", ["batch", "samples"])
def test_results_that_stay_are_counted_in(kind):
    """As they fill the budget, pieces become smaller instead of failing."""
    inputs, sizes = torch.zeros(4000, 4), []

    def widen(piece):
        sizes.append(len(piece))
        return piece.repeat(1, 256).add(1)  # 4 KiB a sample, of which results take half

    results = autobatch.map(widen, inputs if kind == "batch" else list(inputs), budget="22MiB")
    results = results if kind == "batch" else list(results)
    assert len(results) == 4000
    assert sum(sizes) == 4000  # so none was run twice


def test_results_that_cannot_fit_are_refused_in_words():
    """With what to do; a callback takes them one by one."""
    inputs, seen = torch.zeros(4000, 4), []

    def widen(piece):
        return piece.repeat(1, 512)

    with pytest.raises(
        DoesNotFit, match=r"the results of all 4000 samples, about 31\.2 MiB, do not fit a budget of 20\.0"
    ):
        autobatch.map(widen, inputs, budget="20MiB")
    autobatch.map(widen, inputs, budget="20MiB", on_result=lambda indices, _: seen.extend(indices))
    assert seen == list(range(4000))


class Decoder(nn.Module):
    """Greedy generation with a cache of keys and values, which grows with each token."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 64), nn.Linear(64, 50)

    def forward(self, tokens, past=None):
        hidden = self.embed(tokens)
        past = hidden if past is None else torch.cat([past, hidden], dim=1)
        return self.out(F.scaled_dot_product_attention(hidden, past, past)), past

    @torch.no_grad()
    def generate(self, tokens, new_tokens):
        past, following = None, tokens
        for _ in range(new_tokens):
            logits, past = self(following, past)
            following = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens


def test_generation_runs_in_pieces():
    """The cache at its longest is what decides the size; texts are those of the whole batch."""
    torch.manual_seed(0)
    model, prompts, sizes = Decoder(), torch.randint(50, (300, 8)), []

    def generate(piece):
        sizes.append(len(piece))
        return model.generate(piece, new_tokens=24)

    texts = autobatch.map(generate, prompts, budget="2MiB")
    assert torch.equal(texts, model.generate(prompts, new_tokens=24))
    assert sum(sizes) == 300
    assert 4 < len(sizes) < 20


def test_inference_mode_hides_no_memory():
    """What composite operators make inside is counted in a function that uses inference mode itself."""
    device, inputs, mask = device_for(torch.device("cpu")), torch.randn(4, 256, 16), torch.randn(256, 256)
    scores = 4 * 256 * 256 * 4
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), device.limit(2**30):
            device.reset_peak()
            before = device.usage().allocated
            attended = F.scaled_dot_product_attention(inputs, inputs, inputs, attn_mask=mask)
            assert device.usage().peak_allocated - before > scores
        assert attended.shape == inputs.shape
