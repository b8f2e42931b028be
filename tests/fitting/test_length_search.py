"""Plans with lengths: one search and at most one trial a length, and what is remembered, printed and stored of it."""

from __future__ import annotations

import pytest
import torch
from texts import Reader, count_tokens, length_of, make_texts, read_step
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import autobatch
from autobatch.errors import InexactSplit, InvalidArgument
from autobatch.planning.division import useful_sizes
from autobatch.testing import FakeDevice

TEXTS = (128, 100, 128, 40, 7, 64, 20, 90) * 4
BUDGET = "3MiB"


class Wide(Reader):
    """What attention holds grows with the square of the length."""


def plan_for(**options):
    """A plan for 32 texts of at most 128 tokens."""
    torch.manual_seed(0)
    model = options.pop("model", None) or Wide()
    given = {
        "batch": make_texts(TEXTS),
        "step": read_step,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "weigh": count_tokens,
        "cut": autobatch.by_length(length_of),
        "budget": BUDGET,
        "check": None,
        **options,
    }
    return autobatch.fit(model, given.pop("target_batch", len(TEXTS)), **given)


def test_each_length_takes_one_trial_at_most_and_none_runs_out():
    """All sizes of the plan have run at their length; shorter samples are more at once, within the limit."""
    plan = plan_for()
    longest, *_ = sizes = plan.lengths[::-1]
    assert longest.length == 128
    assert longest.micro_batch_size == plan.micro_batch_size
    assert len(sizes) > 1
    shorter = [trial for trial in plan.trials if trial.length != 128]
    assert len({trial.length for trial in shorter}) == len(shorter)
    assert plan.out_of_memory_trials == 0
    ran = {(trial.length, trial.micro_batch_size): trial for trial in plan.trials if trial.outcome == "fits"}
    for size in sizes:
        assert ran[size.length, size.micro_batch_size].peak_reserved == size.peak_bytes <= plan.limit_bytes


def make_loader(collate):
    """Most texts of the dataset are as long as the longest: more than a plan's example has."""
    batch = make_texts([24] * 100 + [*range(1, 25)] * 2)
    texts = [{key: value[row][:length] for key, value in batch.items()} for row, length in enumerate(length_of(batch))]
    return DataLoader(texts, batch_size=64, collate_fn=collate)


def pad_texts(texts):
    padding = {"tokens": 0, "mask": 0, "labels": -100}
    return {key: pad_sequence([text[key] for text in texts], True, value) for key, value in padding.items()}


def read_each(model, texts):
    losses = [read_step(model, {key: value[None] for key, value in text.items()}) for text in texts]
    return torch.stack(losses).mean()


def count_each(texts):
    """The length of each text of a list."""
    return [len(text["tokens"]) for text in texts]


@pytest.mark.parametrize(
    ("collate", "options"),
    [
        (pad_texts, {}),
        (
            list,
            {
                "step": read_each,
                "weigh": None,
                "cut": autobatch.by_length(count_each),
            },
        ),
    ],
    ids=["padded", "lists"],
)
def test_a_loader_gives_samples_of_all_lengths(collate, options):
    """Not its longest alone, of which nothing could be learnt of padding or of shorter ones."""
    plan = plan_for(batch=make_loader(collate), target_batch=64, budget="600KiB", **options)
    assert plan.lengths[-1].length == 24
    assert plan.lengths[0].length <= 12
    assert plan.lengths[0].micro_batch_size > 2 * plan.lengths[-1].micro_batch_size
    step, weigh = options.get("step", read_step), options.get("weigh", count_tokens)
    lengths = options.get("cut", autobatch.by_length(length_of))
    assert autobatch.verify(Wide(), make_loader(collate), step, weigh, cut=lengths).exact


def test_any_number_of_the_longest_may_be_planned():
    """The sizes of a balanced division are for samples that are all alike."""
    room = FakeDevice(lambda n: 100 + 10 * n, total_bytes=400)
    plan = plan_for(device=room, budget=None, headroom=0)
    assert plan.micro_batch_size == 30
    assert plan.micro_batch_size not in useful_sizes(32, 32)
    assert plan.micro_batch_sizes == (30, 2)


def test_a_plan_says_its_lengths():
    """In the line, in the explanation and in JSON."""
    plan = plan_for()
    assert "32 by length, " in str(plan)
    assert "of length 128 to " in str(plan)
    assert "Samples by length" in plan.explain()
    assert "all samples as long as the longest" in plan.explain()
    assert autobatch.Plan.model_validate_json(plan.model_dump_json()) == plan


def test_other_frameworks_get_the_worst_step():
    """They run one size, so it is the one at which the longest samples run."""
    plan = plan_for()
    size = plan.settings("huggingface")["per_device_train_batch_size"]
    assert size <= plan.lengths[-1].micro_batch_size


def test_a_remembered_plan_is_confirmed_at_the_longest_length(tmp_path, monkeypatch):
    """One trial; the shorter lengths are those of the plan. Other lengths are another plan."""
    monkeypatch.setenv("AUTOBATCH_LEDGER", "on")
    monkeypatch.setenv("AUTOBATCH_HOME", str(tmp_path))
    first = plan_for()
    again = plan_for()
    assert again.confirms == first.id
    assert again.lengths == first.lengths
    assert [trial.length for trial in again.trials] == [128]
    assert not plan_for(cut=None).confirms
    assert not plan_for(cut=autobatch.by_length(lambda batch: (batch["mask"] != 0).sum(1))).confirms
    only = autobatch.by_length(length_of, dims={'batch["tokens"]': 1, 'batch["mask"]': 1, 'batch["labels"]': 1})
    assert plan_for(cut=only).confirms


def test_a_length_that_does_not_fit_runs_as_few_as_the_next_longer_one():
    """A trial that runs out of memory is not a size; nothing is tried twice."""
    calls = []

    def step(model, batch):
        samples, length = batch["tokens"].shape
        calls.append((samples, length))
        if length == 64 and samples > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return read_step(model, batch)

    plan = plan_for(step=step, max_micro_batch=16)
    assert 64 not in [size.length for size in plan.lengths]
    assert sum(trial.length == 64 for trial in plan.trials) == 1


@pytest.mark.parametrize("check", ["warn", "raise"])
def test_a_step_that_looks_at_padding_is_named(check):
    """Its loss is a mean over all positions: without by_length() it splits exactly, with it not."""

    def step(model, batch):
        logits = model(batch["tokens"], batch["mask"])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].clamp(min=0).flatten())

    given = {"step": step, "weigh": None, "check": check, "target_batch": 32, "budget": "2MiB"}
    assert plan_for(**{**given, "cut": None}).verdict.exact
    if check == "raise":
        with pytest.raises(InexactSplit, match="trimming padding changes the gradient"):
            plan_for(**given)
    else:
        plan = plan_for(**given)
        assert not plan.verdict.exact
        assert "trimming padding changes the gradient" in plan.warnings[0]


def test_verify_compares_trimmed_samples_too():
    """Exact where padding is masked and left out of the mean, on either side."""
    model = Wide()
    for left in (False, True):
        batch = make_texts(TEXTS, left=left)
        assert autobatch.verify(model, batch, read_step, count_tokens, cut=autobatch.by_length(length_of)).exact

    def last_position(model, batch):
        return model(batch["tokens"], batch["mask"])[:, -1].square().mean()

    verdict = autobatch.verify(model, make_texts(TEXTS), last_position, cut=autobatch.by_length(length_of))
    assert not verdict.exact
    assert "trimming padding changes the gradient" in str(verdict)
    assert autobatch.verify(model, make_texts(TEXTS), last_position).exact


def test_a_model_that_needs_two_samples_is_refused():
    """A division by length may leave one alone."""

    class Normed(Wide):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8, dtype=torch.float64)

        def forward(self, tokens, mask):
            self.norm(self.embed(tokens)[:, 0])
            return super().forward(tokens, mask)

    with pytest.raises(InvalidArgument, match=r"by_length\(\) divides a batch into parts of any size, and "):
        plan_for(model=Normed())
