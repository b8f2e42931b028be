"""Traces a training step on tensors without memory, and records what it would allocate and free on CUDA."""
