"""sentence-transformers with autobatch: losses that are a mean over samples, and losses that are not."""

from __future__ import annotations

from functools import partial

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
