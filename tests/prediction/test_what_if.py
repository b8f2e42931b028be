"""What else could be done: what is offered, what it saves, and what cannot be tried."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from nets import GPT, step, tokens
from sampling import sample
from torch import nn
from workloads import Plain

import autobatch
from autobatch.batch.samples import describe
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.tracing.trace import Circumstances, trace_timeline
from autobatch.prediction.what_if import (
    EightBitAdam,
    _traced_ways,
    _with_checkpoints,
    other_optimizers,
    repeated_blocks,
)
from autobatch.step.workload import Workload

MIB = 2**20
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def wide():
    """Two layers of 64 MiB each, which have no memory: an allocator's segments are small beside them."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 4096, bias=False))


def mean_of(model, batch):
    return model(batch).square().mean()


def changes_of(model, batch, run, optimizer, **options):
    """Every change that was tried, by name, in order."""
    arguments = {"gpu": "24GiB", "target_batch": 8, "what_if": True, **options}
    prediction = autobatch.predict(model, batch, run, optimizer, **arguments)
    return {change.name: change for change in prediction.changes}


@pytest.fixture(scope="module")
def tried():
    model = GPT(layers=3)
    return changes_of(model, tokens(), step, ADAMW(model.parameters()), target_batch=64, gpu="2GiB")


@pytest.mark.predicts
def test_changes_are_traced_and_sorted(tried):
    """Each in its own words, the one that saves most first; what it saves is less of the same peak."""
    saved = [change.saved_bytes for change in tried.values()]
    assert saved == sorted(saved, reverse=True)
    assert not [change for change in tried.values() if change.failed]
    assert len({change.peak_bytes + change.saved_bytes for change in tried.values()}) == 1
    assert tried["checkpointing of 3 Block blocks"].saved_bytes > 0
    assert tried["bfloat16 autocast"].saved_bytes > 0
    assert all(change.micro_batch_size == 64 for change in tried.values())


@pytest.mark.predicts
def test_what_a_change_costs_besides_is_said(tried):
    """Nothing is said where training stays as it is."""
    assert {change.name: change.effect for change in tried.values()} == {
        "bfloat16 autocast": "lower precision",
        "checkpointing of 3 Block blocks": "more time",
        "SGD without momentum": "another optimizer",
        "fused AdamW": "",
        "8-bit AdamW": "state in 8 bits",
        "expandable segments": "",
    }


@pytest.mark.parametrize(
    ("make", "offered"),
    [
        (lambda p: SGD(p, lr=0.1), ["Adam", "AdamW", "fused AdamW", "8-bit AdamW"]),
        (
            lambda p: SGD(p, lr=0.1, momentum=0.9),
            ["SGD without momentum", "Adam", "AdamW", "fused AdamW", "8-bit AdamW"],
        ),
        (ADAM, ["SGD without momentum", "fused Adam", "8-bit AdamW"]),
        (ADAMW, ["SGD without momentum", "fused AdamW", "8-bit AdamW"]),
        (lambda p: ADAMW(p, fused=True), ["SGD without momentum", "8-bit AdamW"]),
        (lambda p: EightBitAdam(p, {}), ["SGD without momentum", "Adam", "AdamW", "fused AdamW"]),
        (torch.optim.RMSprop, ["SGD without momentum", "Adam", "AdamW", "fused AdamW", "8-bit AdamW"]),
    ],
    ids=["SGD", "momentum", "Adam", "AdamW", "fused", "8-bit", "RMSprop"],
)
def test_other_optimizers_are_offered_and_the_own_one_is_not(make, offered):
    """Among them SGD without momentum to those who have it with; each trains what the own one trains."""
    model = Plain(torch.float32)
    trained = [*model.parameters()][:2]
    others = [*other_optimizers(make(trained))]
    assert [name for name, _, _ in others] == offered
    for _, _, optimizer in others:
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in trained]


@pytest.mark.slow
@pytest.mark.predicts
def test_another_optimizer_saves_its_state():
    """Of 128 MiB of parameters: momentum is as much, Adam's state twice that, and in 8 bits a quarter of it."""
    model = wide()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    changes = changes_of(model, torch.zeros(4, 4096), mean_of, optimizer)
    saved = {name: round(change.saved_bytes / MIB) for name, change in changes.items()}
    assert saved["SGD without momentum"] == pytest.approx(128, abs=66)
    assert saved["fused AdamW"] == pytest.approx(-128, abs=4)
    assert saved["AdamW"] <= saved["fused AdamW"]
    assert saved["8-bit AdamW"] == pytest.approx(64 - 2, abs=4)


@pytest.mark.slow
@pytest.mark.predicts
def test_what_the_step_has_already_changes_nothing():
    """Autocast inside of autocast; and the story says so."""

    def run(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return mean_of(model, batch)

    prediction = autobatch.predict(nn.Linear(2, 2), torch.zeros(4, 2), run, gpu="24GiB", what_if=True)
    change = next(change for change in prediction.changes if change.name == "bfloat16 autocast")
    assert (change.saved_bytes, change.failed) == (0, "")
    assert "no change" in next(line for line in prediction.explain().splitlines() if "autocast" in line)


@pytest.mark.slow
@pytest.mark.predicts
def test_a_change_that_cannot_be_traced_says_why_and_comes_last():
    """The others are tried all the same."""

    def run(model, batch):
        loss = model(batch).square().mean()
        return loss if model(batch).dtype is torch.float32 else loss * loss.item()

    changes = changes_of(nn.Linear(2, 2), torch.zeros(4, 2), run, None)
    *others, last = changes.values()
    assert last.name == "bfloat16 autocast"
    assert "test_what_if.py" in last.failed
    assert others
    assert not any(change.failed for change in others)


@pytest.mark.slow
@pytest.mark.predicts
def test_expandable_segments_are_not_offered_to_those_who_have_them():
    """Nor is anything else that is only another setting."""
    changes = changes_of(nn.Linear(2, 2), torch.zeros(4, 2), mean_of, None, expandable_segments=True)
    assert changes.keys() == {"bfloat16 autocast"}


def test_repeated_blocks_are_the_models_own():
    """A transformer's layers; none where nothing repeats."""
    assert [type(block).__name__ for block in repeated_blocks(GPT(layers=4))] == ["Block"] * 4
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_eight_bit_state_is_as_large_as_it_says():
    """Two bytes a number and eight for each 256; small parameters keep float32."""
    large, small = nn.Parameter(torch.zeros(100, 100)), nn.Parameter(torch.zeros(10))
    optimizer = EightBitAdam([large, small], {})
    (large.sum() + small.sum()).backward()
    optimizer.step()
    sizes = [sum(tensor.nbytes for tensor in optimizer.state[p].values()) for p in (large, small)]
    assert sizes == [2 * 10_000 + 2 * 4 * 40, 2 * 4 * 10]


def bend(model, batch):
    """All samples are compared with all where there are more than a hundred, which no smaller trace shows."""
    outputs = model(batch)
    if len(batch) > 100:
        flat = outputs[:, :64].flatten(1)
        return outputs.mean() + (flat.unsqueeze(1) - flat.unsqueeze(0)).square().mean()
    return outputs.mean()


@pytest.mark.slow
@pytest.mark.predicts
def test_the_size_that_a_change_lets_in_is_traced_as_well():
    """What is predicted of it is what a prediction of the changed step says, not a line from below the bend."""
    with torch.device("meta"):
        model, batch = nn.Linear(256, 4096), torch.zeros(2, 512, 256)

    def bend_in_bfloat16(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return bend(model, batch)

    tried = changes_of(model, batch, bend, None, target_batch=4096, gpu="8GiB")
    itself = autobatch.predict(model, batch, bend_in_bfloat16, gpu="8GiB", target_batch=4096)
    assert tried["bfloat16 autocast"].micro_batch_size == itself.plan.micro_batch_size < 4096


def test_a_forward_of_the_instance_stays():
    """A library that patches modules puts it there; under a checkpoint of the block it is called as before."""
    called = []
    block = nn.Linear(2, 2)
    usual = block.forward

    def forward(inputs):
        called.append(len(inputs))
        return usual(inputs)

    block.forward = forward
    run = _with_checkpoints(lambda model, batch: model(batch).sum(), block, [block])
    for _ in range(2):
        run(block, torch.zeros(3, 2, requires_grad=True)).backward()
    assert called == [3] * 4  # recomputed in the backward pass


SMALL = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DECODER = SMALL | {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
ENCODER_DECODER = SMALL | {"d_model": 32, "decoder_start_token_id": 0}
BART_SIZES = {"layers": 3, "ffn_dim": 64, "attention_heads": 2}
FAMILIES = {
    "Llama": (DECODER | {"num_key_value_heads": 2}, 3),
    "Qwen2": (DECODER | {"num_key_value_heads": 2}, 3),
    "GPTNeoX": (DECODER, 3),
    "GPT2": (SMALL | {"n_layer": 3, "n_embd": 32, "n_head": 2}, 3),
    "Bloom": (SMALL | {"n_layer": 3, "hidden_size": 32, "n_head": 2}, 3),
    "T5": (ENCODER_DECODER | {"num_layers": 3, "d_kv": 16, "d_ff": 64, "num_heads": 2}, 6),
    "Bart": (
        ENCODER_DECODER
        | {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in BART_SIZES.items()},
        6,
    ),
}


def small_model(family):
    """One of the families, with random weights; the cache is on, as it is by default."""
    config, blocks = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**config)
    if family in ("T5", "Bart"):
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    else:
        model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
    assert model.config.use_cache
    return model, blocks


def trace_of(workload, batch):
    """What its step allocates and frees, at any size."""
    return run_apart(lambda: trace_timeline(workload, describe(batch), Circumstances()))


@pytest.mark.predicts
@pytest.mark.parametrize("family", sample(FAMILIES, 7))
def test_checkpointing_is_traced_as_the_library_would_train_it(family):
    """Byte for byte what gradient_checkpointing_enable() gives, whatever the model does with a cache; no flag stays."""
    model, blocks = small_model(family)
    labels = torch.randint(0, 96, (2, 16))
    batch = {"input_ids": labels, "labels": labels}
    workload = Workload(model, lambda model, batch: model(**batch).loss, None, torch.optim.SGD(model.parameters()))
    ways = {way.name: way for way in _traced_ways(workload, Circumstances())}
    [name] = [name for name in ways if name.startswith("checkpointing")]
    offered = trace_of(ways[name].workload, batch)
    assert sum(int(word) for word in name.split() if word.isdigit()) == blocks
    assert not any(vars(module).get("gradient_checkpointing") for module in model.modules())
    usual = trace_of(workload, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its new name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    asked = trace_of(workload, batch)
    assert (offered.order, offered.blocks) == (asked.order, asked.blocks)
    assert len(asked.order) > len(usual.order)
