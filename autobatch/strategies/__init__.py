"""Chooses blocks to recompute in the backward pass, so that a step fits or is faster."""
