"""TRL's Trainers with autobatch, beside their own whole batches."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
from trainers import Interrupted, apart, logs_apart, train
from trl_trainers import dpo, generating, kto, llama, preferences, reward, sft

from autobatch.errors import InexactSplit, InvalidArgument
from autobatch.integrations.transformers import attach
from autobatch.integrations.transformers.logs import StepMetrics

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # TRL's

EAGER = {"attn_implementation": "eager"}

CASES = {
    "SFT": (sft, 1e-6, "rows without padding"),
    "SFT without padding": (
        lambda folder: sft(folder, llama(**EAGER), padding_free=True, max_length=None),
        1e-6,
        "samples collated again",
    ),
    "SFT, packed": (lambda folder: sft(folder, llama(**EAGER), packing=True), 1e-6, "samples collated again"),
    "DPO": (dpo, 1e-5, "samples collated again"),
    "reward": (reward, 1e-12, "samples collated again"),
}


@pytest.mark.parametrize("name", CASES)
def test_trl_ends_where_its_whole_batches_end(name, tmp_path):
    """Weights, and every metric that is logged: entropies, accuracies, rewards and counts of tokens."""
    make, tolerance, cut = CASES[name]
    whole, split = train(partial(make, tmp_path)), train(partial(make, tmp_path), attached={})
    assert apart(whole, split) < tolerance
    assert logs_apart(whole, split) < 1e-4
    assert logs_apart(whole, split, ["num_tokens", "learning_rate"]) == 0
    assert split.step.rule.cut.name == cut
    assert split.recorder.calls == whole.recorder.calls
    assert all(len(sizes) > 1 for sizes in split.sizes)


def test_means_over_desirable_samples(tmp_path):
    """Of KTO, also where a micro-batch has none; TRL then adds no entry."""
    make = partial(kto, tmp_path)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-6
    assert logs_apart(whole, split) < 1e-4
    assert {"rewards/margins", "logps/chosen", "entropy"} <= set(split.recorder.logs[0])


@pytest.mark.parametrize(
    ("kind", "options"), [("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}), ("ORPO", {})], ids=["CPO", "ORPO"]
)
def test_metrics_that_experimental_trainers_store(kind, options, tmp_path, monkeypatch):
    """Means over pairs and over tokens; those of logits are over padding too, which a part has less of."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    make = partial(preferences, tmp_path, kind, max_steps=1, **options)
    whole, split = train(make), train(make, attached={"check": None})
    names = {name for name in whole.recorder.logs[0] if name.startswith(("rewards", "logps", "log_odds", "nll"))}
    assert len(split.sizes[0]) > 1
    assert len(names) > 5
    assert logs_apart(whole, split, names) < 1e-4


@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_sums_and_counts_add_up(prefix):
    """As older Trainers store them, whose logs divide one by the other."""
    stored = defaultdict(lambda: defaultdict(list))
    lists = stored["eval" if prefix else "train"]
    names = [prefix + name for name in ("rewards/chosen_sum", "count/chosen", "kl")]
    for name in names:
        lists[name].append(100.0)
    metrics = StepMetrics(SimpleNamespace(_stored_metrics=stored), "eval" if prefix else "train")
    metrics.begin()
    for values in ((6.0, 3, 1.0), (2.0, 1, 5.0)):
        metrics.add({})
        for name, value in zip(names, values, strict=True):
            lists[name].append(value)
    metrics.merge([3, 1])
    assert [lists[name] for name in names] == [[100, 8], [100, 4], [100, 2]]


def test_trl_counts_once_what_is_retried(tmp_path):
    """Tokens and metrics of a micro-batch that is undone are put back."""
    make = partial(sft, tmp_path)
    whole = train(make)
    split = train(make, attached={}, around=Interrupted({1: [2000], 2: [57], 3: [300, 900]}))
    assert split.retries >= 3
    assert apart(whole, split) < 1e-6
    assert logs_apart(whole, split) < 1e-4
    assert logs_apart(whole, split, ["num_tokens"]) == 0


@pytest.mark.parametrize(("make", "tolerance"), [(dpo, 1e-5), (reward, 1e-9)], ids=["DPO", "reward"])
def test_preferences_are_evaluated_in_pairs(make, tolerance, tmp_path):
    """In parts of whole pairs, where the batch has the preferred texts first and then the others."""

    def evaluate(**options):
        trained = train(partial(make, tmp_path, max_steps=1, per_device_eval_batch_size=20), **options)
        return trained.trainer.evaluate(trained.trainer.train_dataset.select(range(60))), trained

    (expected, _), (found, trained) = evaluate(), evaluate(attached={})
    assert trained.trainer.prediction_step.size == 5
    for name, value in expected.items():
        if "runtime" not in name and "per_second" not in name and "preparation" not in name:
            assert found[name] == pytest.approx(value, rel=1e-3, abs=tolerance), name


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_steps_that_generate_are_refused(kind, tmp_path):
    """They divide what they have generated by themselves."""
    with pytest.raises(
        InvalidArgument, match=f"{kind}Trainer: it generates inside its step and splits its own batches"
    ):
        attach(generating(tmp_path, kind), 32)


COMPARING = [(dpo, ["aot"]), (dpo, ["aot_unpaired"]), (dpo, ["sigmoid", "aot"]), (kto, "kto")]


@pytest.mark.parametrize(("make", "loss_type"), COMPARING)
def test_losses_that_are_known_to_compare_samples_are_refused_at_once(make, loss_type, tmp_path, caplog):
    """Where policy and reference are equal no comparison shows it; a warning or None let them pass."""
    with pytest.raises(InexactSplit, match="compares the samples of a micro-batch") as raised:
        attach(make(tmp_path, loss_type=loss_type))
    assert "\n" not in str(raised.value)
    attach(make(tmp_path, loss_type=loss_type), check="warn")
    assert sum("compares the samples" in record.getMessage() for record in caplog.records) == 1
    attach(make(tmp_path, loss_type=loss_type), check=None)
    assert sum("compares the samples" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("make", "options"), [(dpo, {"loss_type": ["sigmoid", "apo_zero"]}), (kto, {}), (reward, {}), (sft, {})]
)
def test_losses_that_look_at_each_sample_are_not(make, options, tmp_path, caplog):
    """Those of the same Trainers that compare nothing, and other Trainers."""
    attach(make(tmp_path, **options))
    assert not [record for record in caplog.records if record.name == "autobatch"]
