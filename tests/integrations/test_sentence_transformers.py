"""sentence-transformers with autobatch: losses that are a mean over samples, and losses that are not."""

from __future__ import annotations

from functools import partial

import datasets
import pytest
from trainers import apart, logs_apart, train
from trl_trainers import embedder

from autobatch.errors import InexactSplit


def test_a_loss_of_pairs_ends_where_whole_batches_end(tmp_path):
    """Two texts and a number a sample, in columns of their own width."""
    make = partial(embedder, tmp_path, "CosineSimilarityLoss", labels=True)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-6
    assert split.step.rule.reading == "mean over samples"


def test_several_datasets_with_columns_of_their_own(tmp_path):
    """Each batch is of one of them, and so are the samples that the size is found on."""

    def make():
        trainer = embedder(tmp_path, "CosineSimilarityLoss", labels=True)
        pairs = trainer.train_dataset
        others = pairs.rename_columns({"one": "left", "other": "right"})
        both = datasets.DatasetDict({"first": pairs.select(range(96)), "second": others.select(range(96, 192))})
        kind = type(trainer)
        return kind(model=trainer.model, args=trainer.args, train_dataset=both, loss=trainer.loss)

    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert all(len(sizes) > 1 for sizes in split.sizes)


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        ("CoSENTLoss", True),
        ("MultipleNegativesRankingLoss", False),
        ("CachedMultipleNegativesRankingLoss", False),
    ],
)
def test_a_loss_that_compares_samples_is_refused(loss, labels, tmp_path):
    """With the cause, before the first update: the target batch would be another one in parts."""
    make = partial(embedder, tmp_path, loss, labels=labels, max_steps=1)
    with pytest.raises(InexactSplit, match="depends on the others in its micro-batch") as raised:
        train(make, attached={})
    assert "SentenceTransformerTrainer: no way was found to split this loss exactly" in str(raised.value)
