"""Batches: counted, cut, grown and found, whatever containers their tensors are in."""
