"""Records everything that a training step may change, and restores it."""
