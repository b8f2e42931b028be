"""Recomputes blocks in the backward pass and computes losses in chunks, so that a step fits or is faster."""
