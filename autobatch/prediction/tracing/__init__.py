"""A training step on tensors without memory: what it allocates and frees, as CUDA would run it."""
