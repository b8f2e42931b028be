"""sentence-transformers with autobatch: losses that are a mean over samples, and losses that are not."""

from __future__ import annotations

from functools import partial

import datasets
import pytest
import torch
from sentence_transformers.sentence_transformer import losses
from trainers import Interrupted, apart, logs_apart, small_device, train
from trl_trainers import embedder

from autobatch.errors import InexactSplit


def test_a_loss_of_pairs_ends_where_whole_batches_end(tmp_path):
    """Two texts and a number a sample, in columns of their own width."""
    make = partial(embedder, tmp_path, "CosineSimilarityLoss", labels=True)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-6
    assert split.step.rule.reading == "mean over samples"


def test_a_loss_with_weights_of_its_own_ends_where_whole_batches_end(tmp_path):
    """The optimizer moves the classifier of SoftmaxLoss, which is in the loss and not in the model."""

    def make():
        trainer = embedder(tmp_path, "CosineSimilarityLoss", labels=True)
        data = trainer.train_dataset.cast_column("label", datasets.Value("int64"))
        torch.manual_seed(1)
        loss = losses.SoftmaxLoss(trainer.model, sentence_embedding_dimension=16, num_labels=2).double()
        return type(trainer)(model=trainer.model, args=trainer.args, train_dataset=data, loss=loss)

    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert torch.allclose(whole.trainer.loss.classifier.weight, split.trainer.loss.classifier.weight, atol=1e-12)
    assert all(len(sizes) > 1 for sizes in split.sizes)


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
        ("MultipleNegativesRankingLoss", False),
        ("CachedMultipleNegativesRankingLoss", False),
        ("CoSENTLoss", True),
        ("AnglELoss", True),
        ("BatchAllTripletLoss", True),
        ("BatchHardTripletLoss", True),
        ("BatchHardSoftMarginTripletLoss", True),
        ("BatchSemiHardTripletLoss", True),
    ],
)
def test_a_loss_over_the_whole_batch_ends_where_the_library_s_own_ends(loss, labels, tmp_path):
    """Each sample is compared with those of all micro-batches, as in the library's own whole batch."""
    make = partial(embedder, tmp_path, loss, labels=labels)
    whole, split = train(make), train(make, attached={})
    rounding = 1e-10 if "Triplet" in loss else 1e-12  # distances are roots of differences
    assert apart(whole, split) < rounding
    assert logs_apart(whole, split) < 1e-6
    assert all(len(sizes) > 1 for sizes in split.sizes)
    assert split.step.rule.reading == "loss over the whole batch"


def test_dropout_draws_what_the_library_draws(tmp_path):
    """A batch that fits whole draws the same; in parts it draws for each micro-batch."""
    make = partial(embedder, tmp_path, "MultipleNegativesRankingLoss", dropout=0.1)
    whole = train(make)
    assert apart(whole, train(make, attached={"device": small_device(10**6)})) < 1e-12
    split = train(make, attached={})
    assert all(len(sizes) > 1 for sizes in split.sizes)


def test_a_step_that_runs_out_of_memory_is_run_again(tmp_path):
    """In either pass: the weights are those of a run without the shortage."""
    make = partial(embedder, tmp_path, "MultipleNegativesRankingLoss")
    whole = train(make)
    split = train(make, attached={}, around=Interrupted({2: (40,), 4: (400,)}))
    assert split.retries >= 2
    assert apart(whole, split) < 1e-12


def test_a_loss_of_the_user_s_that_compares_samples_is_refused(tmp_path):
    """With the cause, before the first update: the target batch would be another one in parts."""

    class Own(losses.MultipleNegativesRankingLoss):
        """May do anything in its forward()."""

    def make():
        trainer = embedder(tmp_path, "MultipleNegativesRankingLoss", max_steps=1)
        return type(trainer)(
            model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset, loss=Own(trainer.model)
        )

    with pytest.raises(InexactSplit, match="depends on the others in its micro-batch") as raised:
        train(make, attached={})
    assert "SentenceTransformerTrainer: no way was found to split this loss exactly" in str(raised.value)
