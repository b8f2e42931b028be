"""Counts, cuts, grows and finds batches, whatever containers their tensors are in."""
