"""Predicts the peak memory of a training step on a card that is not there."""
