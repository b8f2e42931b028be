"""Steps that each rank runs on its samples: means over samples, over some of them, and over class weights."""

from __future__ import annotations

from splits import CLASS_WEIGHTS
from torch.nn import functional as F

import autobatch


def count_some(batch):
    """The count of the weighted mean; 0 for a label of 3."""
    return (batch[1] != 3).sum()


def mean_of_some(model, batch):
    """The mean over samples whose label is not 3."""
    return F.cross_entropy(model(batch[0]), batch[1].masked_fill(batch[1] == 3, -100), ignore_index=-100)


def weigh_classes(batch):
    """The sum of class weights, a fraction."""
    return CLASS_WEIGHTS.double()[batch[1]].sum()


def weighted_classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS.double())


def state_mean(model, batch):
    return autobatch.Mean(mean_of_some(model, batch), count=count_some(batch))


def state_sum(model, batch):
    loss = F.cross_entropy(
        model(batch[0]), batch[1].masked_fill(batch[1] == 3, -100), ignore_index=-100, reduction="sum"
    )
    return autobatch.Sum(loss, count_some(batch))
